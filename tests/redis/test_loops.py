"""Coroutines ask Redis themselves: no threads, few connections, and none left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from django_distlock.backends.redis import store
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.contract.helpers import take
from tests.keeper import Server

from .asking import tell_short_story
from .servers import PATIENCE, backend_on, eventually, stopped, with_query

NAME = "distlock-tests"


@pytest.fixture
def named(private: Server) -> Any:
    """Give a backend whose connections have a name."""
    return backend_on(with_query(private.url, client_name=NAME))


def connections(client: Any) -> int:
    """Return how many connections with the name the server has."""
    return sum(each["name"] == NAME for each in client.client_list())


async def cycle(backend: Any, key: str, times: int = 1) -> None:
    """Lock and release."""
    for _ in range(times):
        grant = await backend.aacquire(key, new_token(), 30)
        assert isinstance(grant, Grant)
        assert (await backend.aread(key)).token == grant.token
        assert isinstance(await backend.aextend(grant), Grant)
        assert await backend.arelease(grant) is True


async def test_no_thread_waits_for_the_server(named: Any, key: str) -> None:
    """However many coroutines ask, no thread is started."""
    await cycle(named, key)
    before = set(threading.enumerate())
    await asyncio.gather(*(cycle(named, f"{key}-{number}") for number in range(50)))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("limit", [1, 4])
async def test_coroutines_share_the_connections(
    private: Server, client: Any, key: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred coroutines at once open `LOCK_CONNECTIONS` connections, and all are served."""
    # None of so many may give up because the machine is busy.
    monkeypatch.setattr(store, "MAX_BOUND", PATIENCE)
    backend = backend_on(with_query(private.url, client_name=NAME), lock_connections=limit)
    await asyncio.gather(*(cycle(backend, f"{key}-{number}") for number in range(200)))
    assert connections(client) == limit


def test_loop_after_loop_leaves_no_connection(named: Any, client: Any, key: str) -> None:
    """Each loop closes what it opened when it ends."""
    for number in range(10):
        asyncio.run(cycle(named, f"{key}-{number}", 2))
        eventually(lambda: not connections(client), "the connections are closed")
    assert named.store._lanes == {}


def test_loops_in_threads_are_apart(named: Any, client: Any, key: str) -> None:
    """Two loops that run at once each use connections of their own."""
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    async def work(name: str) -> None:
        await cycle(named, name)
        await asyncio.to_thread(barrier.wait, PATIENCE)
        await cycle(named, name, 20)
        assert connections(client) == 2
        await asyncio.to_thread(barrier.wait, PATIENCE)

    def run(name: str) -> None:
        try:
            asyncio.run(work(name))
        except BaseException as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f"{key}-{number}",)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    assert errors == []
    eventually(lambda: not connections(client), "the connections are closed")


@pytest.mark.parametrize("operation", ["acquire", "release"])
async def test_cancelling_the_await_does_not_cancel_the_question(
    private: Server, client: Any, key: str, operation: str
) -> None:
    """Also what waits for a connection is asked, and no answer is taken for that of another."""
    backend = backend_on(private.url, lock_connections=1)
    token = new_token()
    await cycle(backend, key)
    grant = await backend.aacquire(f"{key}-b", new_token(), 30)
    with stopped(client):
        first = asyncio.ensure_future(backend.aread(f"{key}-b"))
        asked = asyncio.ensure_future(
            backend.aacquire(key, token, 30) if operation == "acquire" else backend.arelease(grant)
        )
        # The first has the connection, and the second one waits for it.
        await asyncio.sleep(0.02)
        for each in (first, asked):
            each.cancel()
        for each in (first, asked):
            with pytest.raises(asyncio.CancelledError):
                await each
    if operation == "acquire":
        assert isinstance(await backend.aacquire(key, new_token(), 30), Contended)
        assert (await backend.aread(key)).token == token
    else:
        assert await backend.aread(f"{key}-b") is None
        assert await backend.arelease(grant) is False


def test_loop_may_end_in_the_middle_of_a_question(named: Any, client: Any, key: str) -> None:
    """A question that nobody waits for any more ends with the loop; nothing is left open."""

    async def ask() -> None:
        await cycle(named, key)
        with stopped(client):
            task = asyncio.ensure_future(named.aread(key))
            await asyncio.sleep(0.02)
            task.cancel()
            del task

    asyncio.run(ask())
    eventually(lambda: not connections(client), "the connections are closed")
    asyncio.run(cycle(named, key))


def test_thread_and_loop_work_side_by_side(named: Any, client: Any, key: str) -> None:
    """Locks taken on a thread are seen by coroutines, and each has its own connections."""
    grant = take(named, key)

    async def ask() -> None:
        assert isinstance(await named.aacquire(key, new_token(), 30), Contended)
        assert connections(client) == 2
        assert await named.arelease(grant) is True

    asyncio.run(ask())
    assert named.read(key) is None


def test_child_of_a_loop_uses_connections_of_its_own(named: Any, key: str) -> None:
    """A process that forks in the middle of a loop shares no connection with its child."""

    async def ask() -> int:
        await cycle(named, key)
        child = os.fork()
        if child == 0:
            _in_child(named, f"{key}-child")
        await cycle(named, key, 50)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        await cycle(named, key)
        return status

    assert asyncio.run(ask()) == 0


def _in_child(backend: Any, key: str) -> None:
    """Be the child: ask from a thread and from a loop of our own, and end without a word."""
    signal.alarm(PATIENCE)
    status = 1
    try:
        for _ in range(50):
            assert backend.release(take(backend, key)) is True
        # The parent's loop runs in this thread, as it seems.
        thread = threading.Thread(target=lambda: asyncio.run(tell_short_story(backend, key)))
        thread.start()
        thread.join()
        assert backend.read(key) is None
        status = 0
    finally:
        os._exit(status)
