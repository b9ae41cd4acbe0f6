"""The awaited twins answer as the operations do, and wait for no synchronous code."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_distlock import Lock, LockNotAcquired
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument, LockUsageError
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.backends import Registered

from .locking import eventually, grantable, lock_of


async def test_twins_answer_alike(backend: BaseLockBackend, key: str) -> None:
    """Run on the backend's own threads, every operation has the same answers, and errors."""
    run = backend.threads.run
    assert await run(threading.get_ident) != threading.get_ident()
    grant = await run(backend.acquire, key, new_token(), 30)
    assert isinstance(grant, Grant)
    assert isinstance(await run(backend.acquire, key, new_token(), 30), Contended)
    extended = await run(backend.extend, grant, 60, bound=0.5)
    assert isinstance(extended, Grant)
    assert extended.ttl == 60
    record = await run(backend.read, key)
    assert record is not None
    assert record.expires_at == extended.expires_at
    assert [each.key for each in (await run(backend.list, key)).records] == [key]
    assert await run(backend.release, grant) is True
    assert await run(backend.release, grant) is False
    assert await run(backend.force_release, key) is None
    assert await run(backend.read, key) is None
    with pytest.raises(InvalidArgument):
        await run(backend.acquire, "", new_token(), 30)


@pytest.mark.stores("sqlite", "postgresql", "mysql", "session", why="no driver tells")
async def test_plain_call_in_a_coroutine_is_refused(lock: Lock) -> None:
    """Instead of blocking the event loop: the message names what to write."""
    for call in (lock.__enter__, lock.acquire, lock.locked):
        with pytest.raises(LockUsageError, match=r"without await.* Write async with distlock\("):
            call()
    async with lock as lease:
        assert lease.held


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="no driver tells")
async def test_plain_release_in_a_coroutine_is_refused_and_the_lease_goes_on(lock: Lock) -> None:
    """The store was not asked: the lease is held, and its release can still be awaited."""
    lease = await lock.aacquire()
    with pytest.raises(LockUsageError, match="without await"):
        lease.release()
    assert lease.held
    lease.check()
    assert await lease.arelease() is True


# Behind a thread that waits for asynchronous code by `async_to_sync`


def test_release_does_not_wait_behind_synchronous_code(registered: Registered, key: str) -> None:
    """A synchronous waiter of the same request gets the key when the block is left."""
    lock = lock_of(registered, key, ttl=20, wait=5)
    took = {}

    def view() -> str:
        try:
            return "granted" if lock.acquire().release() else "lost"
        except LockNotAcquired:
            return "refused"

    async def holder(started: asyncio.Event) -> None:
        async with lock:
            started.set()
            await asyncio.sleep(0.5)
            left = time.monotonic()
        took["release"] = time.monotonic() - left

    async def main() -> str:
        started = asyncio.Event()
        task = asyncio.create_task(holder(started))
        await started.wait()
        said = await sync_to_async(view, thread_sensitive=True)()
        await task
        return said

    said = async_to_sync(main)()
    assert (said, took["release"] < 3) == ("granted", True), (said, took)


def test_acquire_does_not_wait_behind_synchronous_code(registered: Registered, key: str) -> None:
    """A free key is granted at once, whatever synchronous code does in between."""
    lock = lock_of(registered, key, ttl=20, wait=5)

    async def main() -> float:
        busy = asyncio.create_task(sync_to_async(time.sleep, thread_sensitive=True)(4))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        lease = await lock.aacquire()
        took = time.monotonic() - began
        await busy
        await lease.arelease()
        return took

    took = async_to_sync(main)()
    assert took < 3, took


def test_release_that_was_begun_outlives_its_loop(registered: Registered, key: str) -> None:
    """The end of an event loop cancels every task, and gives every key back."""
    locks = [lock_of(registered, f"{key}:{how}", ttl=60) for how in ("block", "arelease")]

    async def in_a_block(started: asyncio.Barrier, leave: asyncio.Event) -> None:
        async with locks[0]:
            await started.wait()
            await leave.wait()

    async def by_hand(started: asyncio.Barrier, leave: asyncio.Event) -> None:
        lease = await locks[1].aacquire()
        await started.wait()
        await leave.wait()
        await lease.arelease()

    async def main() -> None:
        started, leave = asyncio.Barrier(3), asyncio.Event()
        tasks = [asyncio.create_task(work(started, leave)) for work in (in_a_block, by_hand)]
        await started.wait()
        busy = asyncio.create_task(sync_to_async(time.sleep)(1.5))
        await asyncio.sleep(0.3)
        leave.set()
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del busy

    async_to_sync(main)()
    assert eventually(lambda: all(map(grantable, locks)), timeout=5)
