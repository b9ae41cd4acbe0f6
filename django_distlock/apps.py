"""The app's entry in `INSTALLED_APPS`."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_save
from django.utils.translation import gettext_lazy as _


class DistlockConfig(AppConfig):
    """Connect what has to be connected."""

    name = "django_distlock"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, and install server functions behind `migrate`."""
        from . import checks  # noqa: F401 - registers
        from .managers import refuse_lower_fence
        from .models import FenceCounter

        pre_save.connect(refuse_lower_fence, sender=FenceCounter)
        post_migrate.connect(_install_server_side, sender=self)


def _install_server_side(*, using: str, **_: Any) -> None:
    # Beside the migration, because test runs with --nomigrations make the tables without it.
    from .sql.operations import install_missing

    install_missing(using)
