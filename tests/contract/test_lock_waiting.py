"""How long a caller keeps trying, and what it gets to know when that was not enough."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_distlock import Lease, Lock, LockNotAcquired, Retry
from django_distlock.core.clock import monotonic
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .conftest import TWINS
from .helpers import Later, prompt
from .locking import SHORT, grantable, held_elsewhere, lock_of, taken
from .turn_workers import LAZY

Acquire = Callable[[Lock], Lease]
TRIES = [Lock.try_acquire, lambda lock: asyncio.run(lock.atry_acquire())]


def release_after(lease: Lease, seconds: float) -> Later[bool]:
    """Release from another thread, later."""

    def run() -> bool:
        time.sleep(seconds)
        return lease.release()

    return Later(run)


@pytest.mark.parametrize("wait", [0, 0.3, timedelta(milliseconds=300)])
def test_wait_over_is_not_acquired(
    registered: Registered, key: str, acquire: Acquire, wait: Any
) -> None:
    """A number or a timedelta is how long a caller tries, no less and not much more; 0 is once."""
    lock, seconds = lock_of(registered, key, wait=wait), 0.3 if wait else 0
    with (
        held_elsewhere(lock),
        prompt(seconds, least=max(0, seconds - 0.001)),
        pytest.raises(LockNotAcquired),
    ):
        acquire(lock)
    assert acquire(lock).release()


@pytest.mark.requires("supports_ttl")
def test_refusal_tells_who_holds_the_key(
    registered: Registered, key: str, acquire: Acquire
) -> None:
    """The error knows key, holder, since when and until when, and never the token."""
    lock = lock_of(registered, key, wait=0, ttl=30, metadata={"user": "Ada"})
    with held_elsewhere(lock) as lease:
        with pytest.raises(LockNotAcquired) as caught:
            acquire(lock)
        error = caught.value
        assert (error.code, error.key) == ("acquisition_timeout", key)
        assert error.holder is not None
        assert error.holder.pid == os.getpid()
        assert error.holder.metadata == {"user": "Ada"}
        assert error.held_for is not None
        assert 0 <= error.held_for < 5
        assert error.expires_in is not None
        assert 25 < error.expires_in <= 30
        assert key in str(error)
        assert str(os.getpid()) in str(error)
        assert lease.token not in f"{error!s} {error!r} {vars(error)}"


@pytest.mark.parametrize("wait", [5, None])
def test_key_that_is_given_back_is_granted(
    registered: Registered, key: str, acquire: Acquire, wait: float | None
) -> None:
    """A waiter gets the key soon after its release; `None` is for ever."""
    lock = lock_of(registered, key, wait=wait, retry=Retry(delay=0.05, factor=1, cap=0.05))
    release = release_after(Later(lock.acquire).result(), 0.3)
    with prompt(0.35):
        lease = acquire(lock)
    assert release.result() is True
    assert lease.held
    assert lease.release()


def test_last_attempt_is_at_the_deadline(
    registered: Registered, key: str, acquire: Acquire
) -> None:
    """A long step of backoff does not cost the last attempt: it is cut to the deadline.

    Without a pause of the key, whose end nobody calls out, a release would wake the waiter.
    """
    lock = lock_of(registered, key, wait=1.5, retry=LAZY)
    store = lock_backends[registered.alias]
    store.pause(key, datetime.now(UTC) + timedelta(seconds=0.7))
    started = time.monotonic()
    lease = acquire(lock)
    assert time.monotonic() - started >= 1.49
    assert lease.release()


@pytest.mark.requires("supports_ttl")
def test_waiter_tries_when_an_abandoned_key_becomes_free(
    registered: Registered, key: str, acquire: Acquire
) -> None:
    """A waiter knows when a lease ends that nobody extends, and needs no backoff for it."""
    lease = Later(lock_of(registered, key, ttl=SHORT).acquire).result()
    started = time.monotonic()
    with prompt(SHORT + 1.0):
        granted = acquire(lock_of(registered, key, wait=5, retry=LAZY))
    assert time.monotonic() - started > 0.9
    assert granted.fence > lease.fence
    assert not lease.held
    assert granted.release()
    assert lease.release() is False


def test_retries_end_before_the_wait(registered: Registered, key: str, acquire: Acquire) -> None:
    """`max_retries` bounds the attempts, whatever time is left."""
    lock = lock_of(
        registered, key, wait=30, retry=Retry(delay=0.01, factor=1, cap=0.01, max_retries=2)
    )
    with held_elsewhere(lock), prompt(0.05), pytest.raises(LockNotAcquired):
        acquire(lock)


@pytest.mark.parametrize("attempt", TRIES, ids=TWINS)
def test_try_acquire_is_one_attempt(
    registered: Registered, key: str, attempt: Callable[[Lock], Lease | None]
) -> None:
    """It answers None where the key is taken, whatever `wait` the lock has."""
    lock = lock_of(registered, key, wait=None)
    with held_elsewhere(lock), prompt():
        assert attempt(lock) is None
    lease = attempt(lock)
    assert lease is not None
    assert taken(lock)
    assert lease.release()


def test_locked_reads_only(lock: Lock, registered: Registered) -> None:
    """Asking whether anybody holds a key takes nothing and uses up no fence."""
    with lock as first:
        pass
    for _ in range(3):
        assert lock.locked() is False
        assert asyncio.run(lock.alocked()) is False
    with lock as second:
        assert lock.locked() is True
        assert asyncio.run(lock.alocked()) is True
    assert registered.is_next(second.fence, first.fence)
    assert grantable(lock)


async def test_waiting_does_not_stop_the_event_loop(registered: Registered, key: str) -> None:
    """While one task waits for a lock, others go on."""
    lock = lock_of(registered, key, wait=0.5)
    ticks = 0
    with held_elsewhere(lock):
        waiting = asyncio.create_task(lock.aacquire())
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(LockNotAcquired):
            waiting.result()
    # A loop that stands still ticks once.
    assert ticks > 3


def test_deadline_counts_from_before_the_request(registered: Registered, key: str) -> None:
    """The holder's own deadline lies between ttl after the call's start and after its end."""
    before = monotonic()
    lease = lock_of(registered, key, ttl=10).acquire()
    after = monotonic()
    assert before + 10 <= lease.deadline <= after + 10
    assert lease.release()
