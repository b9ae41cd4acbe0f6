"""Cancelling work never costs the release, and cancelling a wait leaves nothing held."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from django_distlock import Lease, Lock, LockError, Retry, distlock, lock_backends, signals
from django_distlock.database.connections import releases
from tests.backends import Registered

from .locking import Heard, eventually, grantable, held_elsewhere, lock_of, taken

QUICK = Retry(delay=0.02, factor=1, cap=0.02)


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
async def test_cancelled_work_releases(lock: Lock, *, decorated: bool, again: bool) -> None:
    """A task that is cancelled has given the key back; cancelling its release does not stop it."""
    entered = asyncio.Event()

    async def wait() -> None:
        entered.set()
        await asyncio.sleep(60)

    async def work() -> None:
        async with lock:
            await wait()

    task = asyncio.create_task(lock(wait)() if decorated else work())
    await entered.wait()
    assert taken(lock)
    task.cancel()
    while again and not task.done():
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert eventually(lambda: grantable(lock)) if again else grantable(lock)


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


@pytest.mark.parametrize("in_a_block", [False, True])
async def test_attempt_cancelled_in_flight_holds_nothing(
    registered: Registered, key: str, *, in_a_block: bool
) -> None:
    """Whenever an acquire is cancelled, its key is free afterwards: no grant is orphaned."""
    lock = lock_of(registered, key, wait=5)

    async def work() -> Lease | None:
        if not in_a_block:
            return await lock.aacquire()
        async with lock:
            await asyncio.sleep(60)
        return None

    for steps in range(12):
        task = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0.001 * (steps % 3))
        task.cancel()
        try:
            lease = await task
        except asyncio.CancelledError:
            assert eventually(lambda: grantable(lock)), f"orphaned after {steps} steps"
        else:
            assert lease is not None
            assert await lease.arelease()


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


async def test_release_that_is_cancelled_is_told_once(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the block that nobody ends any more asks the store as well."""
    store = lock_backends["memory"]
    lock, entered, release = distlock(key, backend="memory"), asyncio.Event(), store.release
    asked, goes_on = threading.Semaphore(0), threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        asked.release()
        assert goes_on.wait(20)
        return release(*args, **kwargs)

    async def work() -> None:
        async with lock:
            entered.set()
            await asyncio.sleep(60)

    with Heard(signals.lock_released, key) as heard:
        task = asyncio.create_task(work())
        await entered.wait()
        monkeypatch.setattr(store, "release", late)
        for _ in range(2):
            task.cancel()
            assert await asyncio.to_thread(asked.acquire, timeout=20)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert eventually(lambda: bool(heard.facts))
        releases.finish()
        assert heard.once["released"] is True
