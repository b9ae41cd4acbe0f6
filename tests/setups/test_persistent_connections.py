"""`CONN_MAX_AGE` and the end of requests: a lease belongs to no session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, connections, transaction

from django_distlock import distlock
from tests.contract.aliases import alias_like, locks_on, session_of
from tests.contract.locking import eventually
from tests.integration.databases import ask

from .sessions import close_ours, named, sessions

#: How long sessions last, and whether Django looks at them before it uses them again.
aging = pytest.mark.parametrize(("age", "checks"), [(0, False), (60, True), (None, False)])


@contextmanager
def aged(age: int | None, key: str, **more: Any) -> Iterator[tuple[str, str]]:
    """Give an alias whose connections last so long, and locks on it."""
    with (
        alias_like("default", CONN_MAX_AGE=age, **named(key), **more) as using,
        locks_on(using) as backend,
    ):
        try:
            yield using, backend
        finally:
            close_ours(backend)


@contextmanager
def requested() -> Iterator[None]:
    """Do what Django does around a request. Its test client keeps connections open instead."""
    request_started.send(sender=None, scope={})
    yield
    request_finished.send(sender=None)


@aging
def test_lease_outlives_the_request_that_took_it(key: str, age: int | None, checks: bool) -> None:
    """Held over the end of a request, a lease is extended and released in others."""
    with aged(age, key, CONN_HEALTH_CHECKS=checks) as (_using, backend):
        lock = distlock(key, backend=backend)
        with requested():
            lease = lock.acquire()
        # The server ends a session a moment behind the client.
        assert eventually(lambda: len(sessions(key)) == (age != 0))
        with requested():
            lease.extend()
        with requested():
            assert lock.try_acquire() is None
            assert lease.release() is True
        with requested():
            assert lock.locked() is False


@aging
def test_connections_are_closed_inside_of_a_block(key: str, age: int | None, checks: bool) -> None:
    """`close_old_connections()` between acquire and release, also by hand, costs nothing."""
    with aged(age, key, CONN_HEALTH_CHECKS=checks) as (_using, backend):
        for close in (close_old_connections, connections.close_all):
            with distlock(key, backend=backend) as lease:
                close()
                lease.extend()
                close()
                lease.check()
            assert lease.is_released


@aging
def test_locks_in_transactions_leave_sessions_alone(
    key: str, age: int | None, checks: bool
) -> None:
    """A request that locks in a transaction keeps Django's session, and ends without ours."""
    with aged(age, key, CONN_HEALTH_CHECKS=checks) as (using, backend):
        for _ in range(3):
            with requested():
                before = session_of(using)
                with transaction.atomic(using=using), distlock(key, backend=backend):
                    assert session_of(using) == before
                assert session_of(using) == before
        connections[using].close()
        assert eventually(lambda: not sessions(key), timeout=10)


@pytest.mark.parametrize("checks", [False, True], ids=["unchecked", "health checks"])
def test_cut_persistent_session_is_replaced(key: str, checks: bool) -> None:
    """The server ends a persistent session between requests: the next one locks all the same."""
    with aged(None, key, CONN_HEALTH_CHECKS=checks) as (_using, backend):
        with requested():
            lease = distlock(key, backend=backend).acquire()
        for pid in sessions(key):
            ask("default", "SELECT pg_terminate_backend(%s, 10000)", pid)
        with requested():
            lease.extend()
            assert lease.release() is True
