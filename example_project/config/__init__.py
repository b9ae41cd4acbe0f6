"""Settings and addresses of the example."""

# Or a task that a view sends would look for a broker of its own.
from config.celery import app as celery_app

__all__ = ["celery_app"]
