"""Routers that answer by context: all processes look for a key in one database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

from django_distlock import InvalidLockBackend, Lease, LockUsageError, distlock
from django_distlock.fencing.rejecting import Fence
from django_distlock.fencing.seen import see
from django_distlock.handler import lock_backends
from django_distlock.inspection.diagnosis import diagnose
from tests.backends import ADVISORY, DATABASE

#: Whose request it is: the alias of a tenant, or nobody's.
TENANT: ContextVar[str | None] = ContextVar("TENANT", default=None)


class ByContext:
    """Sends everything to the database of the tenant, as middleware has set it."""

    def db_for_write(self, model: Any, **_: Any) -> str | None:
        """Name the alias of the tenant."""
        return TENANT.get()

    db_for_read = db_for_write


@pytest.fixture
def tenants() -> Iterator[tuple[str | None, ...]]:
    """Give contexts in which a router answers differently."""
    with override_settings(DATABASE_ROUTERS=[ByContext()]):
        yield None, "default", "sqlite"
    TENANT.set(None)


def configured(backend: str = DATABASE, **options: Any) -> Any:
    """Configure one lock backend."""
    return override_settings(DISTLOCK={"default": {"BACKEND": backend, "OPTIONS": options}})


def attempt(tenant: str | None, key: str) -> Lease | None:
    """Try to take a key as a process does whose first request is one of this tenant."""
    lock_backends.reset()
    TENANT.set(tenant)
    with suppress(InvalidLockBackend):
        return distlock(key).try_acquire()
    return None


def test_processes_with_other_contexts_exclude_each_other(
    tenants: tuple[str | None, ...], key: str
) -> None:
    """Without `using` there is one holder, and who is sent elsewhere is told what to set."""
    with configured():
        held = [lease for tenant in tenants if (lease := attempt(tenant, key)) is not None]
        assert len(held) == 1
        assert held[0].release()


def test_database_that_is_named_needs_no_router(tenants: tuple[str | None, ...], key: str) -> None:
    """With `using`, every context has the same lock, whatever the router says."""
    with configured(using="sqlite"):
        held = [lease for tenant in tenants if (lease := attempt(tenant, key)) is not None]
        assert len(held) == 1
        assert held[0].release()


@pytest.mark.parametrize("backend", [DATABASE, ADVISORY])
def test_check_asks_for_the_database(tenants: tuple[str | None, ...], backend: str) -> None:
    """E001 where a router sends the models away and no option says where to."""
    TENANT.set("sqlite")
    with configured(backend):
        (told,) = [
            each for each in checks.run_checks(tags=["distlock"]) if each.id == "distlock.E001"
        ]
    assert "OPTIONS['using']" in told.msg
    assert "'sqlite'" in told.msg


def test_seen_fences_stay_in_one_database(tenants: tuple[str | None, ...], key: str) -> None:
    """A process whose router sends the next request elsewhere refuses it, and lets nothing pass."""
    assert see(Fence(key, 7)) == 7
    TENANT.set("sqlite")
    with pytest.raises(LockUsageError, match="'sqlite'"):
        see(Fence(key, 6))
    assert see(Fence(key, 6), "default") == 7
    TENANT.set("default")
    assert see(Fence(key, 6)) == 7


class OfTenants:
    """Knows no database outside of a request."""

    def db_for_write(self, model: Any, **hints: Any) -> str:
        """Fail."""
        raise RuntimeError("no tenant")

    db_for_read = db_for_write


def test_router_that_needs_a_tenant_stops_no_check() -> None:
    """E001 where it has to name the database of the locks, and nothing where `using` does."""
    for options, wrong in (({"using": "sqlite"}, False), ({}, True)):
        with override_settings(DATABASE_ROUTERS=[OfTenants()]), configured(**options):
            found = checks.run_checks(tags=["distlock"])
        told = [each.msg for each in found if each.id in ("distlock.E001", "distlock.W110")]
        assert len(told) == wrong
        assert all("no tenant" in each and "OPTIONS['using']" in each for each in told)


class OfInstances:
    """Names the database of a project's row, and knows none for its model."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        """Name the shard of a row."""
        if model._meta.app_label == "shop":
            return str(hints["instance"].shard)
        return "default" if model._meta.app_label != "django_distlock" else None

    db_for_read = db_for_write


@pytest.mark.parametrize("using", ["default", "sqlite"])
def test_router_that_needs_an_instance_stops_neither_checks_nor_the_doctor(using: str) -> None:
    """Django's own checks ask routers only where tables are made; `migrate` runs ours as well."""
    with override_settings(DATABASE_ROUTERS=[OfInstances()]), configured(using=using):
        said = {each.id for each in checks.run_checks(databases=[using])}
        said |= {each.id for each in diagnose().findings}
    assert not said & {"distlock.E001", "distlock.D013"}
