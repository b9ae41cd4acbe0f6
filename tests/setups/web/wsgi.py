"""The project as WSGI, for gunicorn and uWSGI."""

from __future__ import annotations

from django.core.wsgi import get_wsgi_application

application = get_wsgi_application()

# Not above: it needs the apps.
from .preload import prepare  # noqa: E402

prepare()
