"""A transaction in the way in the store is no holder: nobody is told that others do the work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from django_distlock import BackendUnavailable, Lease, Lock, LockNotAcquired, signals
from django_distlock.locks.attempts import BUSY_SECONDS
from tests.backends import Registered

from .helpers import Later, at_once, prompt, take
from .locking import Heard, held_elsewhere, lock_of
from .stores import DatabaseStore, Stranger

pytestmark = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", why="no transaction comes between it and an answer"
)

ROW_LOCKS = pytest.mark.stores("postgresql", "mysql", why="its transactions lock no rows")


def awaited(lock: Lock) -> Lease | None:
    """Try once, with an await."""
    return asyncio.run(lock.atry_acquire())


@pytest.mark.parametrize("attempt", [Lock.try_acquire, awaited], ids=["called", "awaited"])
def test_locked_table_is_trouble(
    registered: Registered, stranger: Stranger, key: str, attempt: Callable[[Lock], Lease | None]
) -> None:
    """Nobody holds the key: who tries once is told that the store could not say so."""
    lock = lock_of(registered, key, wait=0)
    stranger.hold_table()
    with (
        Heard(signals.lock_not_acquired, key) as heard,
        prompt(BUSY_SECONDS),
        pytest.raises(BackendUnavailable, match="transaction") as caught,
    ):
        Later(attempt, lock).result()
    assert (caught.value.code, caught.value.key) == ("network_timeout", key)
    assert heard.once["cause"] is caught.value
    stranger.rollback()
    lease = Later(attempt, lock).result()
    assert lease is not None
    assert lease.release() is True


def test_transaction_that_ends_in_time_is_not_noticed(
    registered: Registered, stranger: Stranger, key: str
) -> None:
    """Who tries once gets the key where the transaction in the way ends within the margin."""
    stranger.hold_table()
    timer = threading.Timer(0.3, stranger.rollback)
    timer.start()
    with lock_of(registered, key, wait=0) as lease:
        assert lease.held
    timer.join()


@pytest.mark.requires("supports_sharing")
def test_permit_that_is_left_is_granted_behind_a_transaction(
    registered: Registered, stranger: Stranger, key: str
) -> None:
    """The holder that is seen has a permit of its own, and is named where the other stays busy."""
    lock = lock_of(registered, key, permits=2, wait=0)
    with held_elsewhere(lock):
        stranger.hold_table()
        with prompt(BUSY_SECONDS), pytest.raises(LockNotAcquired, match="has held it"):
            lock.acquire()
        timer = threading.Timer(0.3, stranger.rollback)
        timer.start()
        with lock as lease:
            assert lease.held
        timer.join()


@ROW_LOCKS
def test_uncommitted_delete_is_nobody(
    registered: Registered, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """A record that is over and being removed holds nothing: none of many nodes says it does."""
    take(store.backend, key, 5)
    store.elapse(6.1)
    stranger.execute(f"DELETE FROM {store.locks} WHERE storage_key = %s", store.name(key))
    lock = lock_of(registered, key, wait=0)
    answers = at_once([partial(cause_of, lock)] * 4)
    assert {type(each) for each in answers} == {BackendUnavailable}
    stranger.rollback()
    with lock as lease:
        assert lease.fence == 2


@ROW_LOCKS
def test_open_guard_is_a_holder(
    registered: Registered, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """Whoever still writes under the key has it, also behind the end of the lease."""
    take(store.backend, key, 5)
    store.elapse(6.1)
    stranger.guard(key)
    with pytest.raises(LockNotAcquired, match="a transaction has locked it"):
        lock_of(registered, key, wait=0).acquire()


def cause_of(lock: Lock) -> BaseException | None:
    """Say why a lock is not granted."""
    try:
        lock.acquire().release()
    except (BackendUnavailable, LockNotAcquired) as error:
        return error
    return None
