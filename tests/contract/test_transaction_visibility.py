"""A lock taken inside `atomic()` is committed at once, and a rollback takes nothing back."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DataError, connections, transaction

from django_distlock import Lock, LockLost, LockUsageError, distlock
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.processes import spawn
from tests.services import NO_MARIADB
from tests.shop.models import Row

from .helpers import ELSEWHERE, take
from .locking import PAST, SHORT, eventually, grantable, lock_of, rolled_back, taken


def read_holder(alias: str, key: str) -> int | None:
    """Be another process, and read who holds a key."""
    record = lock_backends[alias].read(key)
    return None if record is None else record.holder.pid


@ELSEWHERE
def test_lock_taken_inside_a_transaction_is_seen_by_other_processes(
    registered: Registered, key: str
) -> None:
    """Before the caller commits, they see who holds it."""
    with transaction.atomic(), lock_of(registered, key):
        with spawn(f"{__name__}:read_holder", registered.alias, key) as other:
            assert other.result() == os.getpid()
        assert not grantable(lock_of(registered, key))


def test_rollback_never_hands_a_fence_out_twice(lock: Lock, registered: Registered) -> None:
    """Fences grow over transactions that are rolled back, as over all others."""
    fences = []
    for _ in range(5):
        with rolled_back(), lock as lease:
            fences.append(lease.fence)
    with lock as lease:
        fences.append(lease.fence)
    assert registered.are_next(fences)


def test_callers_transaction_is_left_alone(lock: Lock, key: str) -> None:
    """Taking, extending and failing to take locks neither commits nor breaks a transaction."""
    with rolled_back():
        Row.objects.create(name=key)
        with lock as lease:
            lease.extend()
            assert lock.try_acquire() is None
        assert connections["default"].in_atomic_block
        assert not connections["default"].needs_rollback
        assert Row.objects.filter(name=key).exists()
    assert not Row.objects.filter(name=key).exists()
    with transaction.atomic(), lock:
        Row.objects.create(name=key)
    assert Row.objects.get(name=key).value == 0


def test_broken_transaction_does_not_stop_the_release(lock: Lock) -> None:
    """A database error inside the block breaks the caller's transaction and not the lock's."""
    with transaction.atomic(), lock as lease:
        with pytest.raises(DataError):
            Row.objects.create(name="x" * 101)
        connections["default"].needs_rollback = True
        lease.extend()
        assert taken(lock)
    assert eventually(lambda: grantable(lock))


async def test_asynchronous_lock_is_taken_beside_a_synchronous_transaction(
    lock: Lock, key: str
) -> None:
    """Synchronous code in a transaction does not delay locks of asynchronous code."""
    entered, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @sync_to_async(thread_sensitive=True)
    def in_transaction() -> None:
        try:
            with transaction.atomic():
                Row.objects.filter(name=key).exists()
                loop.call_soon_threadsafe(entered.set)
                asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(timeout=20)
        finally:
            connections.close_all()

    task = asyncio.create_task(in_transaction())
    await entered.wait()
    async with asyncio.timeout(5), lock as lease:
        assert lease.held
    assert grantable(lock)
    leave.set()
    await task


@pytest.mark.parametrize("around", [nullcontext, transaction.atomic], ids=["bare", "savepoint"])
def test_manual_transaction_is_refused_with_the_reason(
    lock: Lock, around: Callable[[], AbstractContextManager[None]]
) -> None:
    """With autocommit off nothing tells when a transaction ends: the key would be free early."""
    transaction.set_autocommit(False)
    try:
        for attempt in (lock.acquire, lock.try_acquire, lock.__enter__):
            with around(), pytest.raises(LockUsageError) as caught:
                attempt()
            assert caught.value.code == "unsupported"
            for said in ("set_autocommit", "'default'", "atomic()"):
                assert said in str(caught.value)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert grantable(lock)


@contextmanager
def begun(using: str) -> Iterator[Callable[[str], object]]:
    """Begin a transaction in SQL, behind Django's back; it ends with the block at the latest."""
    with connections[using].cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            yield cursor.execute
        finally:
            cursor.execute("ROLLBACK")


def test_transaction_that_django_does_not_know_is_refused(lock: Lock) -> None:
    """Nothing tells when one ends that was begun in SQL: whoever locks is told what to use."""
    with begun("default"), pytest.raises(LockUsageError, match="atomic()") as caught:
        lock.acquire()
    assert (caught.value.code, "'default'" in str(caught.value)) == ("unsupported", True)
    assert grantable(lock)


@pytest.mark.parametrize("using", ["sqlite", "mariadb", "driver"])
def test_transaction_of_any_driver_is_noticed(using: str, key: str) -> None:
    """The driver knows, on each database, and whichever way it was begun."""
    lock = distlock(key, backend="memory")
    if using == "driver":
        connections["default"].ensure_connection()
        open_one: Any = connections["default"].connection.transaction()
    elif using not in connections.settings:
        pytest.skip(NO_MARIADB)
    else:
        open_one = begun(using)
    with open_one, pytest.raises(LockUsageError, match="atomic()"):
        lock.acquire()
    assert grantable(lock)


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="its store is no database")
def test_statement_is_not_part_of_a_transaction_that_django_does_not_know(
    registered: Registered, key: str
) -> None:
    """Its rollback takes no grant back, so no fence is handed out twice."""
    backend = lock_backends[registered.alias]
    with begun(registered.using) as execute:
        if registered.store != "sqlite":  # Whose one writer would be in the way.
            execute("UPDATE shop_row SET value = value")
        first = take(backend, key)
    assert backend.release(first) is True
    assert take(backend, key).fence > first.fence


def test_key_is_not_free_before_a_transaction_that_django_does_not_know_ends(lock: Lock) -> None:
    """Begun under a lease, it has the release wait for its end."""
    lease = lock.acquire()
    with begun("default") as execute:
        execute("UPDATE shop_row SET value = value")
        lease.release()
        assert not grantable(lock)
        execute("COMMIT")
        assert eventually(partial(grantable, lock), timeout=5)


def test_lease_that_is_lost_inside_a_transaction_rolls_it_back(
    registered: Registered, key: str
) -> None:
    """The block's `LockLost` leaves `atomic()` as an error does: nothing unprotected is kept."""
    lock = lock_of(registered, key, ttl=SHORT, heartbeat=False)

    def work() -> None:
        with transaction.atomic(), lock:
            Row.objects.create(name=key)
            time.sleep(PAST)

    with pytest.raises(LockLost):
        work()
    assert not Row.objects.filter(name=key).exists()
    assert eventually(lambda: grantable(lock))
