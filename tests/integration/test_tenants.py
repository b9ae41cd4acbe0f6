"""Projects with django-tenants: each request has a schema, and the locks have one for all."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction

from django_distlock import distlock

from .projects import Project

OURS = "django_distlock"
SHARED = ["django_tenants", "tests.integration.tenants", "django.contrib.contenttypes"]


def project_of(using: str, *, in_tenants: bool) -> Project:
    """Give a project whose tenants have tables of locks as well, or have none."""
    plain = Project(using).settings["DATABASES"]["default"]
    return Project(
        using,
        DATABASES={"default": {**plain, "ENGINE": "django_tenants.postgresql_backend"}},
        DATABASE_ROUTERS=["django_tenants.routers.TenantSyncRouter"],
        INSTALLED_APPS=[*SHARED, OURS],
        SHARED_APPS=[*SHARED, OURS],
        TENANT_APPS=["django.contrib.contenttypes", *([OURS] if in_tenants else [])],
        TENANT_MODEL="tenants.Client",
        # Told by another test.
        SILENCED_SYSTEM_CHECKS=["distlock.E106"],
    )


@pytest.mark.parametrize("in_tenants", [True, False], ids=["both", "shared"])
def test_tenants_share_the_locks(postgresql: str, in_tenants: bool) -> None:
    """In and out of `atomic()`, whichever tenant asks: one holder, and fences that grow."""
    said = project_of(postgresql, in_tenants=in_tenants).run(f"{__name__}:contend")
    assert said["tenants with tables"] == (2 if in_tenants else 0)
    assert said["holders"] == 1
    assert said["fences"] == [1, 2, 3, 4]


def contend() -> dict[str, Any]:
    """Make two tenants, and take a lock in the schema of each."""
    from .tenants.models import Client

    call_command("migrate_schemas", "--shared", verbosity=0)
    for name in ("a", "b"):
        Client(schema_name=name).save(verbosity=0)
    lock, fences, most = distlock("invoice:42", wait=0), [], 0
    for name in ("a", "b"):
        connection.set_schema(name)  # type: ignore[attr-defined]
        lease = lock.acquire()
        with transaction.atomic():
            _ask("SELECT 1")
            most = max(most, 1 + (lock.try_acquire() is not None))
            lease.guard()
        lease.release()
        with transaction.atomic():
            _ask("SELECT 1")
            inside = lock.acquire()
        fences += [lease.fence, inside.fence]
        inside.release()
    tables = "SELECT count(*) FROM pg_class WHERE relname = 'django_distlock_heldlock'"
    found = _ask(f"{tables} AND relnamespace <> 'public'::regnamespace")[0]
    return {"fences": fences, "holders": most, "tenants with tables": found}


def _ask(statement: str) -> Any:
    with connections["default"].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()


def test_tables_of_tenants_are_refused(postgresql: str) -> None:
    """E106 where tenants get tables that no lock is kept in, and not where they get none."""
    mixed = project_of(postgresql, in_tenants=True)
    mixed.settings["SILENCED_SYSTEM_CHECKS"] = []
    said = mixed.manage("check", status=1)
    assert "(distlock.E106)" in said
    assert "TENANT_APPS" in said
    shared = project_of(postgresql, in_tenants=False)
    shared.settings["SILENCED_SYSTEM_CHECKS"] = []
    assert "E106" not in shared.manage("check")
