"""Threads and forks: few connections, and nobody reads another's answer."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from django.test import override_settings

from django_distlock import distlock, lock_backends
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.exceptions import InvalidLockBackend
from tests.contract.helpers import Later, at_once, listed, take
from tests.contract.stores_redis import RedisStore
from tests.keeper import Server
from tests.settings import REDIS_BACKEND

from .servers import NAME, PATIENCE, backend_on, connections, eventually, stopped, with_query


def cycles(backend: Any, key: str, times: int) -> None:
    """Lock and release, and check that each answer is about our own question."""
    for number in range(times):
        token = new_token()
        grant = backend.acquire(f"{key}-{number % 3}", token, 30 + number)
        assert isinstance(grant, Grant)
        assert (grant.token, grant.ttl) == (token, 30 + number)
        record = backend.read(grant.key)
        assert (record.token, record.fence, record.ttl) == (token, grant.fence, grant.ttl)
        assert backend.release(grant) is True


@pytest.mark.parametrize("limit", [1, 4])
def test_threads_leave_few_connections(private: Server, client: Any, key: str, limit: int) -> None:
    """Of thirty threads each gets its own answers; `LOCK_CONNECTIONS` connections are kept."""
    backend = backend_on(with_query(private.url, client_name=NAME), lock_connections=limit)
    at_once([partial(cycles, backend, f"{key}-{number}", 20) for number in range(30)])
    assert 1 <= connections(client) <= limit
    # However often a key was locked, its counter is all that stays.
    assert client.dbsize() == 3 * 30


@pytest.mark.parametrize(("limit", "number"), [(1, 3), (150, 150)])
def test_nobody_waits_for_a_connection(
    private: Server, client: Any, key: str, limit: int, number: int
) -> None:
    """Where each connection is in use, another one is opened, and closed if it is one too many.

    Also above what a client's pool takes by default.
    """
    url = with_query(private.url, client_name=NAME, socket_timeout=PATIENCE)
    backend = backend_on(url, lock_connections=limit)
    take(backend, key)
    idle = backend.store._lines._idle
    with stopped(client):
        waiting = [Later(backend.read, key) for _ in range(number)]
        eventually(lambda: not idle, "the connection is in use")
    assert all(each.result() is not None for each in waiting)
    assert connections(client) == limit
    # They are closed with the backend, before a socket can warn that it is still open.
    del backend, waiting
    gc.collect()
    eventually(lambda: connections(client) == 0, "the connections are closed")


async def test_coroutines_share_the_connections_of_threads(
    private: Server, client: Any, key: str
) -> None:
    """However many ask at once, in whichever loop, no more are kept."""
    backend = backend_on(with_query(private.url, client_name=NAME), lock_connections=2)

    async def cycle(name: str) -> None:
        grant = await backend.threads.run(backend.acquire, name, new_token(), 30)
        assert isinstance(grant, Grant)
        assert (await backend.threads.run(backend.read, name)).token == grant.token
        assert await backend.threads.run(backend.release, grant) is True

    await asyncio.gather(*(cycle(f"{key}-{number}") for number in range(100)))
    await asyncio.to_thread(asyncio.run, cycle(key))
    assert 1 <= connections(client) <= 2


def test_forked_child_uses_connections_of_its_own(private: Server, client: Any, key: str) -> None:
    """Parent and child work on at once, and neither reads what the other one was told.

    What was granted before is released once.
    """
    backend = backend_on(with_query(private.url, client_name=NAME))
    cycles(backend, key, 3)
    grant = take(backend, key)
    assert connections(client) == 1
    told, tell = os.pipe()

    def work() -> None:
        cycles(backend, f"{key}-child", 1)
        os.write(tell, b"r")
        cycles(backend, f"{key}-child", 100)
        assert backend.release(grant) is True

    child = forked(work)
    assert os.read(told, 1) == b"r"
    assert connections(client) == 2
    cycles(backend, key, 100)
    assert os.waitpid(child, 0)[1] == 0
    # The end of the child has closed nothing of ours.
    assert backend.release(grant) is False
    assert connections(client) == 1
    for each in (told, tell):
        os.close(each)


def test_forked_child_uses_its_own_beside_refused_backends(private: Server, key: str) -> None:
    """What is left of a backend whose options were refused, by its error, stands in no way."""
    backend = backend_on(private.url)
    refused = []
    for _ in range(8):
        with pytest.raises(InvalidLockBackend) as error:
            backend_on(options={"cache": "nowhere"})
        refused.append(error.value)
    cycles(backend, key, 1)

    def work() -> None:
        assert backend.store._lines is None

    assert os.waitpid(forked(work), 0)[1] == 0
    assert refused


def forked(work: Callable[[], None]) -> int:
    """Do something in a child, which ends without a word; return its number."""
    child = os.fork()
    if child:
        return child
    signal.alarm(PATIENCE)
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def test_child_forked_while_all_connections_were_in_use(
    private: Server, client: Any, key: str
) -> None:
    """What threads of the parent had in use is no bound for the child, where they do not run."""
    url = with_query(private.url, socket_timeout=PATIENCE)
    backend = backend_on(url, lock_connections=1)
    take(backend, key)
    with stopped(client):
        waiting = Later(backend.read, key)
        eventually(lambda: not backend.store._lines._idle, "the connection is in use")
        child = forked(lambda: cycles(backend, f"{key}-child", 20))
    assert os.waitpid(child, 0)[1] == 0
    assert waiting.result() is not None


def test_child_forked_while_a_thread_looked_into_the_cluster(
    on_cluster: RedisStore, key: str
) -> None:
    """What a thread of the parent has locked in redis-py's client bounds no child."""
    backend: Any = on_cluster.backend
    is_locked, is_forked = threading.Event(), threading.Event()
    take(backend, key)

    def look() -> None:
        with backend.store.client.nodes_manager._lock:
            is_locked.set()
            assert is_forked.wait(PATIENCE)

    def work() -> None:
        assert listed(backend, key) == [key]

    looking = Later(look)
    assert is_locked.wait(PATIENCE)
    child = forked(work)
    is_forked.set()
    assert os.waitpid(child, 0)[1] == 0
    looking.result()


def test_settings_that_change_close_the_connections(private: Server, client: Any, key: str) -> None:
    """At once, whoever still refers to the old backend; its leases are released all the same."""
    url = with_query(private.url, client_name=NAME)
    given = {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": url}}
    with override_settings(DISTLOCK={"default": given}):
        lease = distlock(key).acquire()
        old = lock_backends["default"]
        assert connections(client) == 1
    eventually(lambda: connections(client) == 0, "the connections are closed")
    assert lease.release() is True
    assert old.read(key) is None
    eventually(lambda: connections(client) == 0, "the connections are closed")


def test_backend_leaves_no_pool_to_the_collector(private: Server) -> None:
    """A pool's finaliser is Python code: amid locks, it would swallow what Ctrl-C raises."""

    def pools() -> set[int]:
        return {
            id(each) for each in gc.get_objects() if issubclass(type(each), redis.ConnectionPool)
        }

    gc.collect()
    backend = backend_on(private.url)
    made = pools()
    gc.collect()
    assert pools() == made
    assert backend.read("k") is None
