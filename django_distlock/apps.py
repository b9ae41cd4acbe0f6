"""The app's entry in `INSTALLED_APPS`."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_save
from django.utils.translation import gettext_lazy as _


class DistlockConfig(AppConfig):
    """The app, with its checks and receivers of signals."""

    name = "django_distlock"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks, and the receivers that keep events and install server functions."""
        from . import checks
        from .managers.lock import refuse_lower_fence
        from .models import FenceCounter, SeenFence
        from .process import event_log

        event_log.connect()
        checks.settings.warn_of_missing_threads()
        for model in (FenceCounter, SeenFence):
            pre_save.connect(refuse_lower_fence, sender=model)
        post_migrate.connect(_install_server_side, sender=self)
        _check_tasks()


def _check_tasks() -> None:
    """Register the checks of tasks if Celery is in use.

    Importing the tasks registers them, too, but only workers do that.
    """
    if "celery" in sys.modules:
        with suppress(ImportError):  # Celery is older than the supported versions.
            import_module("django_distlock.contrib.celery")


def _install_server_side(*, using: str, **_: Any) -> None:
    # Not only in the migration, because test runs with --nomigrations make the tables without it.
    from .database.sql.operations import install_missing
    from .fencing.triggers import fix_path

    install_missing(using)
    fix_path(using)
