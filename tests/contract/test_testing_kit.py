"""The helpers of `django_distlock.testing` that work on every backend, on each of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from django_distlock import (
    BackendUnavailable,
    Lease,
    Lock,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.handler import lock_backends
from django_distlock.testing import (
    advance,
    assert_locked,
    assert_not_locked,
    expire,
    hold,
    lose_connection,
    simulate_pause,
    steal,
)
from tests.backends import Registered

from .locking import eventually, grantable, lock_of, taken


@pytest.fixture
def lease(registered: Registered, key: str) -> Iterator[Lease]:
    """Give a lease that no block is bound to."""
    lease = lock_of(registered, key, ttl=30).acquire()
    yield lease
    lease.release()


def test_assertions_say_what_is_so(registered: Registered, key: str) -> None:
    """Who fails is told who holds the key, as far as the store tells; all contend with it."""
    lock = lock_of(registered, key, wait=0)
    with pytest.raises(AssertionError, match=key):
        assert_locked(key, backend=registered.alias)
    with hold(key, backend=registered.alias):
        assert_locked(key, backend=registered.alias)
        with pytest.raises(AssertionError, match=rf"{key}.* since \d{{4}}-.*fence"):
            assert_not_locked(key, backend=registered.alias)
        with pytest.raises(LockNotAcquired):
            lock.acquire()
        assert taken(lock)
    assert_not_locked(key, backend=registered.alias)
    assert grantable(lock)


def test_expired_key_is_free(lease: Lease, registered: Registered) -> None:
    """The holder has not noticed, unless its session went; asking, it is told."""
    expire(lease.key, backend=registered.alias)
    assert_not_locked(lease.key, backend=registered.alias)
    assert grantable(lock_of(registered, lease.key))
    if lock_backends[registered.alias].supports_ttl:
        lease.check()
    with pytest.raises(LockLost):
        lease.extend()


def test_stolen_key_has_a_higher_fence(lease: Lease, registered: Registered) -> None:
    """The store knows the new holder alone, and the old one is told when it asks."""
    other = steal(lease)
    assert other.fence > lease.fence
    lease.check()
    with pytest.raises(LockLost):
        lease.extend()
    assert lease.release() is False
    assert taken(lock_of(registered, lease.key))
    assert other.release() is True
    assert_not_locked(lease.key, backend=registered.alias)


@pytest.mark.parametrize("taken_by_other", [False, True])
def test_paused_holder_has_lost_its_lease(
    lease: Lease, registered: Registered, *, taken_by_other: bool
) -> None:
    """Who is to be told has been, in this thread; the key is free, or another's."""
    told: list[str] = []
    lease.on_lost(lambda lost: told.append(threading.current_thread().name))
    other = simulate_pause(lease, taken_by_other=taken_by_other)
    assert lease.is_lost
    assert told == [threading.current_thread().name]
    with pytest.raises(LockLost):
        lease.check()
    if other is not None:
        assert other.fence > lease.fence
        assert lease.release() is False
        assert taken(lock_of(registered, lease.key))
        assert other.release() is True
    elif not lock_backends[registered.alias].supports_ttl:
        # Who stands still keeps its session, and the key.
        assert taken(lock_of(registered, lease.key))
        lease.release()
    assert grantable(lock_of(registered, lease.key))


@pytest.mark.requires("supports_sharing", "supports_ttl")
def test_paused_holder_of_a_shared_key_has_lost_its_own_lease(
    registered: Registered, key: str
) -> None:
    """Who shares the key keeps it, however long."""
    paused, beside = (lock_of(registered, key, ttl=ttl, shared=True).acquire() for ttl in (30, 60))
    simulate_pause(paused)
    beside.extend()
    assert paused.release() is False
    assert beside.release() is True
    assert_not_locked(key, backend=registered.alias)


def test_time_of_a_store_stays_as_it_is(lease: Lease) -> None:
    """What would need another one is refused."""
    with pytest.raises(LockUsageError, match="only have a length inside memory_locks"):
        simulate_pause(lease, 60)
    with pytest.raises(LockUsageError, match="only be advanced inside memory_locks"):
        advance(60)
    lease.check()


def test_store_that_is_away_raises(lock: Lock, registered: Registered, key: str) -> None:
    """Nothing has reached it; behind the block it is there again."""
    backend = lock_backends[registered.alias]
    with lose_connection(registered.alias):
        with pytest.raises(BackendUnavailable) as raised:
            backend.acquire(key, new_token(), 30)
        with pytest.raises(BackendUnavailable):
            lock.locked()
    assert raised.value.code == "service_unavailable"
    assert not taken(lock)
    assert grantable(lock)


@pytest.mark.parametrize("awaited", [False, True])
def test_answer_that_is_lost_was_carried_out(
    registered: Registered, key: str, *, awaited: bool
) -> None:
    """The store has granted, and taken back, what the caller knows nothing of."""
    backend, token = lock_backends[registered.alias], new_token()

    def ask(operation: str, *arguments: Any) -> Any:
        if awaited:
            return asyncio.run(backend.threads.run(getattr(backend, operation), *arguments))
        return getattr(backend, operation)(*arguments)

    with lose_connection(registered.alias), pytest.raises(BackendUnavailable):
        ask("acquire", key, token, 30)
    assert ask("read", key) is None
    with lose_connection(registered.alias, answers=False), pytest.raises(BackendUnavailable):
        ask("acquire", key, token, 30)
    record = ask("read", key)
    assert record is not None
    grant = Grant(key, token, record.fence, 30, record.acquired_at, record.expires_at)
    with lose_connection(registered.alias, answers=False), pytest.raises(BackendUnavailable):
        ask("release", grant)
    assert ask("read", key) is None


def test_short_outage_is_not_noticed(registered: Registered, key: str) -> None:
    """A lease stands until its deadline, and is released when the store is there again."""
    with lock_of(registered, key, ttl=30) as lease:
        with lose_connection(registered.alias), pytest.raises(BackendUnavailable):
            lease.extend()
        lease.check()
        lease.extend()
    assert eventually(lambda: not taken(lock_of(registered, key)), timeout=20)
