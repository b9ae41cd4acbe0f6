"""A context that holds a key is told so, instead of waiting for itself."""

from __future__ import annotations

import asyncio
import contextvars
import time
from contextlib import suppress

import pytest

from django_distlock import (
    Lease,
    Lock,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock,
)
from tests.backends import Registered

from .conftest import Hold
from .helpers import Later, prompt
from .locking import HOLDING, PAST, SHORT, grantable, held_elsewhere, lock_of, taken


def test_reentry_is_refused_at_once(registered: Registered, key: str, hold: Hold) -> None:
    """The same key in the same context is refused, in any mixture, however long one would wait."""
    again = lock_of(registered, key, wait=None, ttl=5)

    def work(lease: Lease) -> None:
        for way in HOLDING:
            with prompt(), pytest.raises(LockUsageError, match=key) as caught:
                way(again, lambda _: pytest.fail("entered twice"))
            assert (caught.value.code, caught.value.key) == ("reentrant", key)
        assert lease.held
        assert taken(again)

    hold(lock_of(registered, key), work)
    assert grantable(again)


def test_reentry_under_another_spelling_is_refused(registered: Registered, key: str) -> None:
    """Spellings that are one lock are one lock here too."""
    one = lock_of(registered, key + "caf\u00e9")
    other = lock_of(registered, key + "cafe\u0301", wait=None)
    with one as lease:
        assert current_lease(other.key) is current_lease(key + "cafe\u0301") is lease
        with pytest.raises(LockUsageError), other:
            pytest.fail("entered twice")


def test_other_backends_key_is_another_lock(registered: Registered, key: str) -> None:
    """The same text on another alias may be locked inside."""
    other = distlock(key, backend="sqlite" if registered.alias == "memory" else "memory")
    with lock_of(registered, key) as outer, other as inner:
        assert outer.backend != inner.backend
        assert current_lease(key) is inner


def test_key_can_be_entered_again_behind_its_release(
    lock: Lock, registered: Registered, key: str
) -> None:
    """What was given back or lost is not held, even inside its block."""
    with lock as first:
        first.release()
        assert current_lease() is None
        with lock as second:
            assert registered.is_next(second.fence, first.fence)
            assert current_lease(key) is second
        assert current_lease(key) is None
    with lock:
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_unbound_lease_is_contended_like_anybodys(
    registered: Registered, key: str, reentrant: bool
) -> None:
    """A lease from `acquire()` is not the context's: it contends with blocks, and they with it."""
    lock = lock_of(registered, key, wait=0, reentrant=reentrant)
    lease = lock.acquire()
    assert current_lease() is None
    for attempt in (lock.acquire, lock.__enter__):
        with pytest.raises(LockNotAcquired):
            attempt()
    assert lease.release()
    with lock:
        assert lock.try_acquire() is None
        with pytest.raises(LockNotAcquired):
            lock.acquire()


def test_current_lease_is_that_of_the_innermost_block(registered: Registered, key: str) -> None:
    """Without a key the innermost lease, with a key that one's, outside of blocks none."""
    outer, inner = (lock_of(registered, f"{key}:{name}") for name in ("outer", "inner"))
    assert current_lease() is None
    with outer as first:
        assert current_lease() is first
        with inner as second:
            assert current_lease() is second
            assert current_lease(outer.key) is first
            assert current_lease(inner.key) is second
            assert current_lease(f"{key}:other") is None
            assert first.token != second.token
        assert current_lease() is first
        assert current_lease(inner.key) is None
        assert (taken(outer), taken(inner)) == (True, False)
    assert current_lease() is None
    assert current_lease(outer.key) is None


def test_current_lease_that_is_lost_says_so(registered: Registered, key: str) -> None:
    """So that `check()` of what is called amid the block raises the loss."""
    with suppress(LockLost), lock_of(registered, key, ttl=SHORT, heartbeat=False) as lease:
        assert current_lease() is lease
        time.sleep(PAST)
        assert current_lease(key) is current_lease() is lease
        assert not lease
        with pytest.raises(LockLost):
            lease.check()


def test_copied_context_shows_what_was_held(registered: Registered, key: str) -> None:
    """As long as it is held; a new thread starts with an empty one."""
    with lock_of(registered, key) as lease:
        context = contextvars.copy_context()
        assert context.run(current_lease) is lease
        assert Later(current_lease).result() is None
    assert context.run(current_lease) is None


async def test_current_lease_reaches_threads_and_tasks_of_the_block(lock: Lock, key: str) -> None:
    """`asyncio.to_thread` and tasks that the block starts work under its lease."""

    async def current() -> object:
        return current_lease(key)

    async with lock as lease:
        assert current_lease() is lease
        assert await asyncio.to_thread(current_lease, key) is lease
        assert await asyncio.create_task(current()) is lease
        with pytest.raises(LockUsageError):
            await asyncio.to_thread(lock.__enter__)
    assert await asyncio.to_thread(current_lease) is None


async def test_task_that_outlives_the_block_has_no_lease(lock: Lock) -> None:
    """A task started in the block may take the lock itself once the block is over."""
    left = asyncio.Event()

    async def work() -> int:
        assert current_lease() is not None
        await left.wait()
        assert current_lease() is None
        async with lock as own:
            assert current_lease() is own
            return own.fence

    async with lock as lease:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
    left.set()
    assert await task > lease.fence


async def test_tasks_do_not_see_each_others_leases(registered: Registered, key: str) -> None:
    """Each task has its own leases, though all of them run in one thread."""

    async def work(number: int) -> bool:
        async with lock_of(registered, f"{key}:{number}") as lease:
            await asyncio.sleep(0.01)
            return current_lease() is lease and current_lease(f"{key}:{1 - number}") is None

    assert list(await asyncio.gather(work(0), work(1))) == [True, True]
    assert current_lease() is None


def test_block_left_in_another_context_is_refused_and_frees_the_key(lock: Lock) -> None:
    """A block belongs to the context that entered it; leaving it elsewhere says so."""
    contextvars.copy_context().run(lock.__enter__)
    assert taken(lock)
    with pytest.raises(LockUsageError) as caught:
        lock.__exit__(None, None, None)
    assert caught.value.code == "foreign_context"


def test_contention_inside_a_block_leaves_the_outer_lease_alone(
    registered: Registered, key: str
) -> None:
    """Failing to get a second lock changes nothing on the first one."""
    first, second = lock_of(registered, key), lock_of(registered, f"{key}:2", wait=0)
    with held_elsewhere(second), first as lease:
        with pytest.raises(LockNotAcquired), second:
            pytest.fail("entered")
        assert current_lease() is lease
        assert lease.held
    assert grantable(first)
