"""Locks inside transactions borrow a few connections, and give all of them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test.runner import DiscoverRunner

from django_distlock import Lock, distlock
from tests.backends import Registered
from tests.processes import spawn
from tests.shop.models import Row

from .aliases import alias_like, counted_alias, locks_on, sessions
from .helpers import Later
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


def drop_after_locks(key: str) -> bool:
    """Be a test run: make a database, lock from threads inside transactions, drop it."""
    options = connections.settings["default"]
    options["NAME"] = settings.DATABASES["default"]["NAME"]
    name = options["TEST"]["NAME"] = f"distlock_{key}"
    runner = DiscoverRunner(verbosity=0, interactive=False)
    made = runner.setup_databases(aliases={"default"})
    assert options["NAME"] == name

    def work(number: int) -> None:
        for alias in ("postgres", "postgres_orm"):
            lock_inside("default", distlock(f"{key}:{number}", backend=alias))

    for thread in [Later(work, number) for number in range(4)]:
        thread.result()
    work(4)
    # Sessions that are still connected would make this fail.
    runner.teardown_databases(made)
    return True


def test_test_database_can_be_dropped(key: str) -> None:
    """The end of a test run finds no session of ours in its database."""
    target = "tests.contract.test_transaction_connections:drop_after_locks"
    with spawn(target, key) as run:
        assert run.result(timeout=60) is True
    given = connections["default"].settings_dict
    with psycopg.connect(
        host=given["HOST"], port=given["PORT"], user=given["USER"], password=given["PASSWORD"],
        dbname="postgres",
    ) as raw:  # fmt: skip
        found = raw.execute("SELECT 1 FROM pg_database WHERE datname = %s", [f"distlock_{key}"])
        assert found.fetchone() is None
