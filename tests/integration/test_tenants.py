"""Projects with django-tenants: each request has a schema, and the locks have one for all."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction

from django_distlock import LockNotAcquired, distlock

from .projects import PATIENCE, Project

OURS = "django_distlock"
CONTENT = "django.contrib.contenttypes"
SHARED = ["django_tenants", "tests.integration.tenants", CONTENT]


def project_of(using: str, *, in_tenants: bool, **settings: Any) -> Project:
    """Give a project whose tenants have tables of locks as well, or have none."""
    plain = Project(using).settings["DATABASES"]["default"]
    return Project(
        using,
        DATABASES={"default": {**plain, "ENGINE": "django_tenants.postgresql_backend"}},
        **{
            "DATABASE_ROUTERS": ["django_tenants.routers.TenantSyncRouter"],
            "INSTALLED_APPS": [*SHARED, OURS],
            "SHARED_APPS": [*SHARED, OURS],
            "TENANT_APPS": [CONTENT, *([OURS] if in_tenants else [])],
            "TENANT_MODEL": "tenants.Client",
            # Told by another test.
            "SILENCED_SYSTEM_CHECKS": ["distlock.E106"],
            **settings,
        },
    )


@pytest.mark.parametrize("in_tenants", [True, False], ids=["both", "shared"])
def test_tenants_share_the_locks(postgresql: str, in_tenants: bool) -> None:
    """In and out of `atomic()`, whichever tenant asks: one holder, and fences that grow."""
    said = project_of(postgresql, in_tenants=in_tenants).run(f"{__name__}:contend")
    assert said["tenants with tables"] == (2 if in_tenants else 0)
    assert said["holders"] == 1
    assert said["fences"] == [1, 2, 3, 4]


def make_tenants() -> None:
    """Make two tenants."""
    from .tenants.models import Client

    call_command("migrate_schemas", "--shared", verbosity=0)
    for name in ("a", "b"):
        Client(schema_name=name).save(verbosity=0)


def contend() -> dict[str, Any]:
    """Make two tenants, and take a lock in the schema of each."""
    make_tenants()
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


@pytest.mark.parametrize(
    ("in_tenants", "atomic"), [(True, False), (False, True)], ids=["both", "shared"]
)
def test_processes_of_two_tenants_exclude_each_other(
    postgresql: str, in_tenants: bool, atomic: bool
) -> None:
    """And the lease is renewed and released by connections that know no tenant."""
    project = project_of(postgresql, in_tenants=in_tenants)
    project.run(f"{__name__}:make_tenants")
    with project.start(f"{__name__}:hold", "a", atomic) as holder:
        holder.wait_for("held", PATIENCE)
        refused = project.run(f"{__name__}:attempt", "b")
        assert (refused["fence"], refused["holder"]) == (None, holder.popen.pid)
        holder.send("let go")
        fence = holder.result(PATIENCE)
    assert project.run(f"{__name__}:attempt", "b") == {"fence": fence + 1, "holder": None}


def hold(tenant: str, atomic: bool) -> int:
    """Hold a key in the schema of a tenant, renewed at least once, until told otherwise."""
    connection.set_schema(tenant)  # type: ignore[attr-defined]
    with transaction.atomic() if atomic else nullcontext():
        _ask("SELECT 1")
        with distlock("invoice:42", ttl=6, wait=0) as lease:
            renewed = lease.deadline
            while lease.deadline == renewed:
                time.sleep(0.05)
            print("held")
            input()
            lease.check()
    return lease.fence


def attempt(tenant: str) -> dict[str, Any]:
    """Try once to take it in the schema of another one; say who holds it."""
    connection.set_schema(tenant)  # type: ignore[attr-defined]
    try:
        with distlock("invoice:42", wait=0) as lease:
            return {"fence": lease.fence, "holder": None}
    except LockNotAcquired as error:
        return {"fence": None, "holder": error.holder and error.holder.pid}


def types(*of_tenants: str) -> dict[str, Any]:
    """Give a setting with several kinds of tenants, of which one has these apps."""
    shared = {"APPS": [*SHARED, OURS]}
    return {"TENANT_TYPES": {"public": shared, "paying": {"APPS": [*of_tenants]}}}


def test_tables_of_tenants_are_refused(postgresql: str) -> None:
    """E106 where tenants get tables that no lock is kept in, and not where they share ours."""
    wrong: list[dict[str, Any]] = [
        {"TENANT_APPS": [CONTENT, OURS]},
        {"TENANT_APPS": [CONTENT, OURS], "SHARED_APPS": SHARED},
        {"TENANT_APPS": [CONTENT, f"{OURS}.apps.DistlockConfig"]},
        types(OURS),
    ]
    for settings, status in [*((each, 1) for each in wrong), ({}, 0), (types(CONTENT), 0)]:
        project = project_of(postgresql, in_tenants=False, SILENCED_SYSTEM_CHECKS=[], **settings)
        said = project.manage("check", status=status)
        assert ("(distlock.E106)" in said) == bool(status), settings
        assert ("TENANT_APPS" in said) == bool(status), settings
