"""The awaited twins answer as the operations do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from django_distlock import Lock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument, LockUsageError
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant


async def test_twins_answer_alike(backend: BaseLockBackend, key: str) -> None:
    """Acquire, extend, read and release can be awaited, with the same answers."""
    grant = await backend.threads.run(backend.acquire, key, new_token(), 30)
    assert isinstance(grant, Grant)
    assert isinstance(await backend.threads.run(backend.acquire, key, new_token(), 30), Contended)
    extended = await backend.threads.run(backend.extend, grant, 60, bound=0.5)
    assert isinstance(extended, Grant)
    assert extended.ttl == 60
    record = await backend.threads.run(backend.read, key)
    assert record is not None
    assert record.expires_at == extended.expires_at
    assert await backend.threads.run(backend.release, grant) is True
    assert await backend.threads.run(backend.release, grant) is False
    assert await backend.threads.run(backend.read, key) is None


async def test_bad_arguments_are_refused(backend: BaseLockBackend) -> None:
    """Awaited, a bad argument is the same error."""
    with pytest.raises(InvalidArgument):
        await backend.threads.run(backend.acquire, "", new_token(), 30)


@pytest.mark.stores("sqlite", "postgresql", "mysql", "session", why="no driver tells")
@pytest.mark.parametrize(
    "call", [Lock.__enter__, Lock.acquire, Lock.locked], ids=["block", "acquire", "locked"]
)
async def test_plain_call_in_a_coroutine_is_refused(
    lock: Lock, call: Callable[[Lock], object]
) -> None:
    """Instead of blocking the event loop: the message names what to write."""
    with pytest.raises(LockUsageError, match=r"without await.* Write async with distlock\("):
        call(lock)
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


async def test_other_operations_can_be_awaited(backend: BaseLockBackend, key: str) -> None:
    """Every operation can be run on the backend's own threads."""
    grant = await backend.threads.run(backend.acquire, key, new_token(), 30)
    assert isinstance(grant, Grant)
    page = await backend.threads.run(backend.list, key)
    assert [record.key for record in page.records] == [key]
    name = await backend.threads.run(lambda: threading.current_thread().name)
    assert name != threading.current_thread().name
    assert await backend.threads.run(backend.force_release, key)


async def test_many_acquires_have_one_winner(backend: BaseLockBackend, key: str) -> None:
    """Tasks of one loop exclude each other as threads do."""
    answers = await asyncio.gather(
        *(backend.threads.run(backend.acquire, key, new_token(), 30) for _ in range(8))
    )
    (winner,) = (answer for answer in answers if isinstance(answer, Grant))
    record = await backend.threads.run(backend.read, key)
    assert record is not None
    assert record.fence == winner.fence
