"""`reentrant=True`: a block inside of one that holds the key works under the same lease."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from django_distlock import Lease, LockLost, LockNotAcquired, LockUsageError, current_lease, signals
from django_distlock.database.connections import releases
from tests.backends import Registered

from .conftest import Hold
from .helpers import Later, prompt
from .locking import HOLDING, Heard, grantable, lock_of, take_away, taken


def test_inner_block_has_the_same_lease(registered: Registered, key: str, hold: Hold) -> None:
    """The very same, in any mixture: token, fence and deadline are those of the outer block."""
    lock = lock_of(registered, key, reentrant=True)

    def work(outer: Lease) -> None:
        for way in HOLDING:
            with prompt():
                assert way(lock, lambda inner: (inner, current_lease())) == (outer, outer)
            assert outer.held
            assert taken(lock)

    hold(lock, work)
    assert grantable(lock)


@pytest.mark.aliases("memory", "postgres")
async def test_inner_end_that_is_awaited_late(registered: Registered, key: str) -> None:
    """A block whose end has yet to be awaited is not taken for one that was interrupted."""
    lock = lock_of(registered, key, reentrant=True)
    async with lock as lease:
        # As the statement does it: it lets go of what it has called before it awaits the end.
        leave = lock.__aexit__
        assert await lock.__aenter__() is lease
        end = leave(None, None, None)
        del leave
        releases.finish()
        await end
        assert lease.held
    assert lease.is_released


def test_inner_end_does_not_release(registered: Registered, key: str) -> None:
    """The key is free behind the outermost block, however deep the others were."""
    lock = lock_of(registered, key, reentrant=True)
    with Heard(signals.lock_acquired, key) as granted, Heard(signals.lock_released, key) as freed:
        with lock as lease:
            with lock:
                with lock:
                    assert taken(lock)
                assert taken(lock)
                lease.check()
            assert taken(lock)
            assert lease.held
            assert current_lease(key) is lease
            with pytest.raises(ZeroDivisionError), lock:
                raise ZeroDivisionError
            lease.check()
        assert not taken(lock)
    assert lease.is_released
    assert (len(granted.facts), len(freed.facts)) == (1, 1)


def test_outer_lock_need_not_be_reentrant(registered: Registered, key: str) -> None:
    """Whoever enters again says so, under any spelling of the key; else it is refused as ever."""
    outer = lock_of(registered, key + "caf\u00e9")
    inner = lock_of(registered, key + "cafe\u0301", reentrant=True, ttl=5, wait=0)
    with outer as lease, inner as again:
        assert again is lease
        assert lease.remaining() > 20
    with inner as lease:
        with prompt(), pytest.raises(LockUsageError) as caught, replace(outer, wait=None):
            pytest.fail("entered twice")
        assert caught.value.code == "reentrant"
        assert lease.held


def test_another_thread_contends(registered: Registered, key: str) -> None:
    """A new thread is not inside of the block."""
    lock = lock_of(registered, key, reentrant=True, wait=0)

    def enter() -> None:
        with lock:
            pytest.fail("entered twice")

    with lock, pytest.raises(LockNotAcquired):
        Later(enter).result()


def test_recursion_of_a_decorated_function(registered: Registered, key: str) -> None:
    """A function that calls itself with the same arguments is one holding."""
    lock = lock_of(registered, key + ":{name}", reentrant=True)
    seen: list[Lease | None] = []

    @lock
    def climb(name: str, steps: int) -> int:
        seen.append(current_lease())
        return steps and 1 + climb(name, steps - 1)

    assert climb("a", 5) == 5
    assert len(seen) == 6
    assert seen[0] is not None
    assert all(each is seen[0] for each in seen)
    assert grantable(lock_of(registered, f"{key}:a"))


async def test_task_of_its_own_contends(registered: Registered, key: str) -> None:
    """A task that was started before the block is not inside of it."""
    lock = lock_of(registered, key, reentrant=True, wait=0)
    entered = asyncio.Event()

    async def enter() -> None:
        await entered.wait()
        async with lock:
            pytest.fail("entered twice")

    task = asyncio.create_task(enter())
    async with lock:
        entered.set()
        with pytest.raises(LockNotAcquired):
            await task


def test_loss_is_told_at_the_inner_end(registered: Registered, key: str) -> None:
    """Work that succeeded in the inner block without the lock did not succeed, nor the outer."""
    lock = lock_of(registered, key, reentrant=True)
    ran: list[str] = []

    def work() -> None:
        with lock as lease:
            with lock:
                take_away(lease)
                with pytest.raises(LockLost):
                    lease.extend()
            ran.append("outer")

    with Heard(signals.lock_lost, key) as heard, pytest.raises(LockLost, match=key):
        work()
    assert ran == []
    assert heard.once["key"] == key


def test_outer_end_tells_the_loss_where_the_inner_could_not(
    registered: Registered, key: str
) -> None:
    """An error of the inner block is never hidden, and caught by the outer it hides nothing."""
    lock = lock_of(registered, key, reentrant=True)

    def fail(lease: Lease) -> None:
        with lock:
            take_away(lease)
            raise ZeroDivisionError

    def work() -> None:
        with lock as lease, pytest.raises(ZeroDivisionError):
            fail(lease)

    with pytest.raises(LockLost):
        work()
    assert grantable(lock)


async def test_loss_is_told_at_the_inner_end_in_async(registered: Registered, key: str) -> None:
    """The same where the task is cancelled for the loss: `LockLost` comes out of the blocks."""
    lock = lock_of(registered, key, reentrant=True)

    async def work() -> None:
        async with lock as lease, lock:
            await asyncio.to_thread(take_away, lease)
            await lease.aextend()

    with pytest.raises(LockLost):
        await work()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert await asyncio.to_thread(grantable, lock)


def test_inner_block_behind_a_release_takes_the_key_anew(registered: Registered, key: str) -> None:
    """What the outer block has given up is not held: the inner one has a lease of its own."""
    lock = lock_of(registered, key, reentrant=True)
    with lock as outer:
        assert outer.release() is True
        with lock as inner:
            assert inner is not outer
            assert registered.is_next(inner.fence, outer.fence)
        assert not taken(lock)
    assert grantable(lock)


def test_inner_block_that_outlives_its_outer_block(registered: Registered, key: str) -> None:
    """A task that goes on in its block behind the end of the outer one gets to know of it."""
    lock = lock_of(registered, key, reentrant=True)

    async def inner(entered: asyncio.Event, leave: asyncio.Event) -> None:
        async with lock:
            entered.set()
            await leave.wait()

    async def outer() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        async with lock:
            task = asyncio.create_task(inner(entered, leave))
            await entered.wait()
        leave.set()
        with pytest.raises(LockLost, match="ended first"):
            await task

    asyncio.run(outer())
