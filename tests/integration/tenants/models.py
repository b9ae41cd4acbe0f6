"""What django-tenants wants of a project: a model of its tenants."""

from __future__ import annotations

from django_tenants.models import TenantMixin


class Client(TenantMixin):  # type: ignore[misc] # django-tenants has no types
    """A tenant, whose schema is made and migrated when it is saved."""

    class Meta:
        app_label = "tenants"
