"""Locks work under any isolation level, and say where its reads may be older than the lock."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction
from psycopg import IsolationLevel

from django_distlock import Lease, Lock, distlock
from tests.integration.databases import ask
from tests.shop.models import Row

from .aliases import alias_like, locks_on
from .helpers import Later
from .locking import eventually, grantable, taken

SNAPSHOTS = [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]


@contextmanager
def shown_warnings() -> Iterator[list[Any]]:
    """Show each warning once per place, as programs see them by default."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield caught


def with_block(lock: Lock) -> None:
    """Enter and leave a block."""
    with lock as lease:
        assert lease.held


def with_acquire(lock: Lock) -> None:
    """Acquire and release."""
    assert lock.acquire().release()


def with_try_acquire(lock: Lock) -> None:
    """Try once and release."""
    lease = lock.try_acquire()
    assert isinstance(lease, Lease)
    assert lease.release()


@pytest.mark.parametrize("level", SNAPSHOTS, ids=lambda level: level.name)
def test_lock_in_a_snapshot_works_and_warns_once(lock: Lock, level: IsolationLevel) -> None:
    """What the caller reads may be older than the lock: that is said, once, where it is taken."""
    uses = (with_block, with_acquire, with_try_acquire)
    with (
        alias_like("default", OPTIONS={"isolation_level": level}) as alias,
        shown_warnings() as caught,
    ):
        for use in uses:
            with transaction.atomic(using=alias):
                Row.objects.using(alias).exists()
                for _ in range(3):
                    use(lock)
                assert taken(lock)
            assert eventually(lambda: grantable(lock))
    assert [warning.category for warning in caught] == [RuntimeWarning] * len(uses)
    for warning, use in zip(caught, uses, strict=True):
        assert "snapshot" in str(warning.message)
        assert repr(alias) in str(warning.message)
        # The line that takes the lock, so that people find it and each place is told once.
        assert (warning.filename, warning.lineno) == (__file__, use.__code__.co_firstlineno + 2)


def test_what_is_read_behind_the_lock_does_not_warn(lock: Lock) -> None:
    """The snapshot begins under the lock; or each statement sees what is committed."""
    with (
        alias_like("default", OPTIONS={"isolation_level": IsolationLevel.SERIALIZABLE}) as alias,
        shown_warnings() as caught,
    ):
        with lock, transaction.atomic(using=alias):
            Row.objects.using(alias).exists()
        with transaction.atomic(), lock:
            Row.objects.exists()
    assert [str(warning.message) for warning in caught] == []


def test_transaction_that_sets_its_own_level_works(lock: Lock) -> None:
    """A level that was set by hand changes nothing about the lock."""
    with transaction.atomic():
        with connections["default"].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE READ ONLY")
        with lock as lease:
            lease.extend()
            assert not grantable(lock)
    assert grantable(lock)


@pytest.mark.parametrize(("level", "functions"), [*zip(SNAPSHOTS, (False, True), strict=True)])
def test_locks_on_an_alias_of_snapshots_exclude_each_other(
    level: IsolationLevel, functions: bool, key: str
) -> None:
    """Whatever isolation the alias has, the locks see what others commit, and lose no update."""
    options = {"server_functions": functions}
    value = [0]

    def add() -> None:
        for _ in range(10):
            with lock:
                before = value[0]
                with transaction.atomic(using=alias):
                    Row.objects.using(alias).exists()
                value[0] = before + 1

    with (
        alias_like("default", OPTIONS={"isolation_level": level}) as alias,
        locks_on(alias, OPTIONS={"using": alias, **options}) as backend,
    ):
        lock = distlock(key, backend=backend, wait=30)
        for thread in [Later(add) for _ in range(4)]:
            thread.result(60)
        with lock as lease:
            assert lease.fence == 41
    assert value == [40]


@pytest.mark.parametrize("where", ["database", "session"])
def test_servers_default_is_a_snapshot_too(key: str, where: str) -> None:
    """What a role, a database or a session is given as its isolation counts as Django's option."""
    name = connections["default"].settings_dict["NAME"]
    altered = f'ALTER DATABASE "{name}" SET default_transaction_isolation'
    options = {"options": "-c default_transaction_isolation=serializable"}
    lock = distlock(key, backend="memory")
    with (
        alias_like("default", OPTIONS=options if where == "session" else {}) as alias,
        shown_warnings() as caught,
    ):
        if where == "database":
            ask("default", f"{altered} = 'repeatable read'")
        try:
            for _ in range(2):
                with transaction.atomic(using=alias), lock:
                    pass
        finally:
            ask("default", f'ALTER DATABASE "{name}" RESET default_transaction_isolation')
    assert [warning.category for warning in caught] == [RuntimeWarning]


def test_server_is_asked_for_its_default_once(key: str) -> None:
    """A connection is asked at its first lock in a transaction, and no more: it costs a query."""
    lock = distlock(key, backend="memory")
    with alias_like("default") as alias, shown_warnings() as caught:
        for _ in range(2):
            with transaction.atomic(using=alias), lock:
                pass
            # Which a second question would find.
            ask(alias, "SET default_transaction_isolation = 'repeatable read'")
    assert not caught


def test_failed_transaction_is_not_asked(key: str) -> None:
    """Where the server answers no more, a lock is taken and given back all the same."""
    lock = distlock(key, backend="memory")
    with alias_like("default") as alias, transaction.atomic(using=alias):
        with pytest.raises(DatabaseError):
            ask(alias, "SELECT 1 / 0")
        with lock as lease:
            assert lease.held
        transaction.set_rollback(True, using=alias)
