"""The Celery app of the project, for commands that need it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..core.errors import LockUsageError


def app_and(name: str) -> tuple[Any, Any]:
    """Return a module of `contrib.celery`, and the app of the project; or refuse: there is none."""
    try:
        module = import_module(f"django_distlock.contrib.celery.{name}")
        declaring = import_module("django_distlock.contrib.celery.declaring")
    except ImportError as error:
        raise LockUsageError(f"Celery cannot be imported: {error}") from error
    app = declaring.app_of_project()
    if app is None:
        raise LockUsageError(
            "No Celery app was found. Import it in the package of the settings, as the Celery"
            " documentation for Django describes."
        )
    return module, app
