"""Cancelling work never costs the release, and cancelling a wait leaves nothing held."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from django_distlock import Lock, LockError, Retry
from tests.backends import Registered

from .locking import eventually, grantable, held_elsewhere, lock_of, taken

QUICK = Retry(delay=0.02, factor=1, cap=0.02)


async def test_cancelled_work_releases(lock: Lock) -> None:
    """A task that is cancelled inside the block has given the key back when it ends."""
    entered = asyncio.Event()

    async def work() -> None:
        async with lock:
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await entered.wait()
    assert taken(lock)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert grantable(lock)


async def test_work_cancelled_twice_releases(lock: Lock) -> None:
    """Cancelling again, while the release is under way, does not stop it."""
    entered = asyncio.Event()

    async def work() -> None:
        async with lock:
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    while not task.done():
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert eventually(lambda: grantable(lock))


async def test_timeout_around_work_releases(lock: Lock) -> None:
    """`asyncio.timeout` is a cancellation like any other."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), lock:
            await asyncio.sleep(60)
    assert grantable(lock)


async def test_decorated_coroutine_that_is_cancelled_releases(lock: Lock) -> None:
    """The same for decorated functions."""

    @lock
    async def work() -> None:
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work(), 0.2)
    assert grantable(lock)


async def test_cancelled_wait_ends_at_once_and_holds_nothing(
    registered: Registered, key: str
) -> None:
    """A waiter that gives up does not get the key afterwards."""
    lock = lock_of(registered, key, wait=None, retry=QUICK)
    with held_elsewhere(lock):
        waiting = asyncio.create_task(lock.aacquire())
        await asyncio.sleep(0.15)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.sleep(0.1)
    assert grantable(lock)


async def test_attempt_cancelled_in_flight_holds_nothing(registered: Registered, key: str) -> None:
    """Whenever an acquire is cancelled, its key is free afterwards: no grant is orphaned."""
    lock = lock_of(registered, key, wait=5)
    for steps in range(12):
        task = asyncio.create_task(lock.aacquire())
        for _ in range(steps):
            await asyncio.sleep(0.001 * (steps % 3))
        task.cancel()
        try:
            lease = await task
        except asyncio.CancelledError:
            assert eventually(lambda: grantable(lock)), f"orphaned after {steps} steps"
        else:
            assert await lease.arelease()


async def test_cancelled_attempts_of_blocks_hold_nothing(registered: Registered, key: str) -> None:
    """The same for entering a block."""
    lock = lock_of(registered, key, wait=5)

    async def work() -> None:
        async with lock:
            await asyncio.sleep(60)

    for steps in range(8):
        task = asyncio.create_task(work())
        await asyncio.sleep(0.001 * steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert eventually(lambda: grantable(lock)), f"orphaned after {steps} ms"


async def test_task_group_that_fails_releases_all(registered: Registered, key: str) -> None:
    """One failing task cancels the others, and every key is free."""
    locks = [lock_of(registered, f"{key}:{n}") for n in range(3)]
    ready = asyncio.Barrier(3)

    async def work(number: int) -> None:
        async with locks[number]:
            await ready.wait()
            if number == 0:
                raise ZeroDivisionError
            await asyncio.sleep(60)

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(work(number))
    assert all(grantable(lock) for lock in locks)


async def test_cancelled_extend_leaves_a_lease_that_can_be_released(lock: Lock) -> None:
    """Giving up on an extend does not give up the lease."""
    lease = await lock.aacquire()
    task = asyncio.create_task(lease.aextend(20))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LockError):
        await task
    assert await lease.arelease() is True
    assert grantable(lock)


async def test_cancelled_release_is_carried_out(lock: Lock) -> None:
    """A release that was begun frees the key, whatever becomes of its task."""
    lease = await lock.aacquire()
    task = asyncio.create_task(lease.arelease())
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert eventually(lambda: grantable(lock))
