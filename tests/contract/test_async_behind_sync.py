"""Asynchronous code that a thread waits for (`async_to_sync`) does not wait for that thread."""

from __future__ import annotations

import asyncio
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_distlock import LockNotAcquired
from tests.backends import Registered

from .locking import eventually, grantable, lock_of


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


@pytest.mark.parametrize("how", ["block", "arelease"])
def test_release_that_was_begun_outlives_its_loop(
    registered: Registered, key: str, how: str
) -> None:
    """The end of an event loop cancels every task, and gives every key back."""
    lock = lock_of(registered, key, ttl=60)

    async def work(started: asyncio.Event, leave: asyncio.Event) -> None:
        if how == "block":
            async with lock:
                started.set()
                await leave.wait()
        else:
            lease = await lock.aacquire()
            started.set()
            await leave.wait()
            await lease.arelease()

    async def main() -> None:
        started, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(work(started, leave))
        await started.wait()
        busy = asyncio.create_task(sync_to_async(time.sleep)(1.5))
        await asyncio.sleep(0.3)
        leave.set()
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait([task])
        del busy

    async_to_sync(main)()
    assert eventually(lambda: grantable(lock), timeout=5)
