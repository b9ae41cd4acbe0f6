"""Threads and forks: few connections, and nobody reads another's answer."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from tests.contract.helpers import Later, at_once, take
from tests.keeper import Server

from .servers import PATIENCE, backend_on, eventually, stopped, with_query
from .test_loops import NAME, connections


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
    """Of fifty threads each gets its own answers; `LOCK_CONNECTIONS` connections are kept."""
    backend = backend_on(with_query(private.url, client_name=NAME), lock_connections=limit)
    at_once([partial(cycles, backend, f"{key}-{number}", 40) for number in range(50)])
    assert 1 <= connections(client) <= limit


def test_nobody_waits_for_a_connection(private: Server, client: Any, key: str) -> None:
    """Where each connection is in use, another one is opened, and closed behind its answer."""
    url = with_query(private.url, client_name=NAME, socket_timeout=PATIENCE)
    backend = backend_on(url, lock_connections=1)
    take(backend, key)
    with stopped(client):
        waiting = [Later(backend.read, key) for _ in range(3)]
        eventually(lambda: not backend.store._lines._idle, "the connection is in use")
    assert all(each.result() is not None for each in waiting)
    assert connections(client) == 1


def test_many_connections_are_opened_where_they_are_allowed(
    private: Server, client: Any, key: str
) -> None:
    """`LOCK_CONNECTIONS` are kept, also above what a client's pool takes by default."""
    url = with_query(private.url, client_name=NAME, socket_timeout=PATIENCE)
    backend = backend_on(url, lock_connections=150)
    take(backend, key)
    with stopped(client):
        waiting = [Later(backend.read, key) for _ in range(150)]
        eventually(lambda: not backend.store._lines._idle, "the connection is in use")
    for each in waiting:
        record = each.result()
        assert record is not None
        assert record.key == key
    assert connections(client) == 150


def test_forked_child_uses_connections_of_its_own(private: Server, client: Any, key: str) -> None:
    """Parent and child work on at once, and neither reads what the other one was told."""
    backend = backend_on(with_query(private.url, client_name=NAME))
    cycles(backend, key, 3)
    assert connections(client) == 1
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(backend, f"{key}-child", tell)
    os.close(tell)
    assert os.read(told, 1) == b"r"
    os.close(told)
    assert connections(client) == 2
    cycles(backend, key, 200)
    _, status = os.waitpid(child, 0)
    assert status == 0
    # The end of the child has closed nothing of ours.
    cycles(backend, key, 3)
    assert connections(client) == 1


def _in_child(backend: Any, key: str, tell: int) -> None:
    """Be the child: work while the parent works, and end without a word."""
    signal.alarm(PATIENCE)
    status = 1
    try:
        cycles(backend, key, 1)
        os.write(tell, b"r")
        cycles(backend, key, 200)
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
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(told, 1)
            _in_child(backend, f"{key}-child", tell)
    os.write(tell, b"g")
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert waiting.result() is not None
    for each in (told, tell):
        os.close(each)


def test_lock_taken_before_a_fork_is_released_once(private: Server, key: str) -> None:
    """The child knows the token, and what it gives back is gone for the parent."""
    backend = backend_on(private.url)
    grant = take(backend, key)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if backend.release(grant) is True else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert backend.release(grant) is False


def test_thousands_of_cycles_leave_no_growth(private: Server, client: Any, key: str) -> None:
    """Neither connections, nor threads, nor names in Redis get more."""
    backend = backend_on(with_query(private.url, client_name=NAME))
    cycles(backend, key, 10)
    before = (connections(client), client.dbsize(), threading.active_count(), _open_files())
    cycles(backend, key, 2_000)
    after = (connections(client), client.dbsize(), threading.active_count(), _open_files())
    # A thread that another test has left may end meanwhile.
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def _open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))
