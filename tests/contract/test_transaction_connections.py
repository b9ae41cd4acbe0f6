"""Locks inside transactions borrow a few connections, and give all of them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections, transaction

from django_distlock import Lock, distlock
from tests.backends import Registered
from tests.shop.models import Row

from .aliases import alias_like, counted_alias, locks_on, sessions
from .locking import eventually

pytestmark = pytest.mark.stores("postgresql", "mysql", why="locks run on no session of the thread")


@contextmanager
def counted(registered: Registered, **configured: Any) -> Iterator[tuple[str, str]]:
    """Give the alias of a database whose sessions can be counted, and of locks on it."""
    with counted_alias(registered.using) as using:
        options = {"using": using, "server_functions": registered.alias == "postgres"}
        with locks_on(using, OPTIONS=options, **configured) as backend:
            yield using, backend


def lock_inside(using: str, lock: Lock) -> None:
    """Take a lock in a transaction."""
    with transaction.atomic(using=using):
        Row.objects.using(using).exists()
        with lock as lease:
            lease.extend()


def test_connections_are_used_again(registered: Registered, key: str) -> None:
    """In autocommit a lock needs one, the thread's or ours; in a transaction one of ours more."""
    with counted(registered) as (using, backend):
        lock = distlock(key, backend=backend)
        for _ in range(3):
            with lock as lease:
                lease.extend()
        assert len(sessions(using)) == 1
        for _ in range(5):
            lock_inside(using, lock)
            assert len(sessions(using)) <= 2


@pytest.mark.stores("postgresql", why="its driver has no pool")
def test_lock_takes_nothing_from_the_projects_pool(registered: Registered, key: str) -> None:
    """The pool of the alias may be empty: a lock in a transaction does not wait for it."""
    pytest.importorskip("psycopg_pool", reason="psycopg[pool] is not installed")
    pool = {"min_size": 1, "max_size": 1, "timeout": 0.5}
    with alias_like("default", OPTIONS={"pool": pool}, CONN_MAX_AGE=0) as using:
        options = {"using": using, "server_functions": registered.alias == "postgres"}
        with locks_on(using, OPTIONS=options) as backend:
            lock = distlock(key, backend=backend, wait=2)
            try:
                lock_inside(using, lock)
                assert eventually(lambda: not lock.locked())
            finally:
                connections[using].close()
                connections[using].close_pool()  # type: ignore[attr-defined]
