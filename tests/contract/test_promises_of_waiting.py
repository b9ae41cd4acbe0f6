"""Promises of waiting that begin where the other tests end: killed, cut and forked waiters."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
from django.conf import settings
from django.db import connections
from django.test import override_settings

from django_distlock import BackendUnavailable, Lock, Retry, distlock
from django_distlock.backends.database import DatabaseBackend
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.integration.wires import Wire
from tests.processes import spawn

from .aliases import abandon_connections, in_a_fork
from .helpers import PATIENCE, PROMPT, SHARED, Later, alone, pressure, take
from .locking import eventually, grantable, held_elsewhere, lock_of
from .test_lost_leases import WIRED, hanging

HERE = f"{__name__}:"
WAITS = "tests.contract.turn_workers:wait_for_turn"
#: Pauses of a waiter that polls.
QUICK = Retry(delay=0.05, factor=1, cap=0.1)


# Waiters that die


@SHARED
@pytest.mark.requires("supports_wakeups")
def test_killed_waiter_takes_no_wake_up_with_it(registered: Registered, key: str) -> None:
    """Who dies while it waits holds nothing afterwards, and whoever waits beside it is woken."""
    lock = lock_of(registered, key, ttl=60)
    with (
        held_elsewhere(lock) as lease,
        spawn(WAITS, registered.alias, key, "acquire") as doomed,
        spawn(WAITS, registered.alias, key, "acquire") as other,
    ):
        for worker in (doomed, other):
            worker.wait_for("asks", PATIENCE)
            worker.send("ask")
            worker.wait_for("waits")
        # Until both have made their attempt behind the subscription.
        time.sleep(0.7)
        doomed.kill()
        pressed = pressure()
        assert Later(lease.release).result() is True
        released_at = time.monotonic()
        assert alone(other.result() - released_at, pressed) < PROMPT
    assert grantable(lock)


# A store that is lost in the middle of a wait


def waiting(alias: str, key: str, wait: float | None) -> Later[float]:
    """Wait for a key in a thread; give when it was granted."""

    def run() -> float:
        with distlock(key, backend=alias, ttl=30, wait=wait, retry=QUICK):
            return time.monotonic()

    waiter = Later(run)
    backend = lock_backends[alias]
    assert eventually(lambda: backend.queues.name_of(key) in backend.queues, timeout=10)
    time.sleep(0.3)
    return waiter


@contextmanager
def wired(registered: Registered) -> Iterator[tuple[str, Wire]]:
    """Give another way to the keys of a backend, which can be cut."""
    prefix = lock_backends[registered.alias].config.key_prefix
    with hanging(registered) as (alias, wire):
        configured = {alias: {**settings.DISTLOCK[alias], "KEY_PREFIX": prefix}}
        with override_settings(DISTLOCK=configured):
            yield alias, wire
            cut(wire)


def cut(wire: Wire) -> None:
    """End all connections; new ones are taken."""
    for each in list(wire._sockets):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@WIRED
def test_store_that_is_lost_while_waiting_is_trouble_at_the_deadline(
    registered: Registered, key: str
) -> None:
    """It is asked again until the wait is over, and what is told then is no contention."""
    backend = lock_backends[registered.alias]
    grant = Later(take, backend, key, 60).result()
    with wired(registered) as (alias, wire):
        began = time.monotonic()
        waiter = waiting(alias, key, 5)
        wire._listener.shutdown(socket.SHUT_RDWR)
        cut(wire)
        with pytest.raises(BackendUnavailable):
            waiter.result()
        assert 5 <= time.monotonic() - began < 5 + 2 + PROMPT
    assert Later(backend.release, grant).result() is True


@WIRED
def test_connection_that_is_cut_while_waiting_costs_no_turn(
    registered: Registered, key: str
) -> None:
    """The waiter connects anew, is not granted the key of another, and gets it in its time."""
    backend = lock_backends[registered.alias]
    grant = Later(take, backend, key, 60).result()
    with wired(registered) as (alias, wire):
        waiter = waiting(alias, key, None)
        cut(wire)
        time.sleep(1)
        assert waiter._thread.is_alive()
        pressed, released_at = pressure(), time.monotonic()
        assert Later(backend.release, grant).result() is True
        took = waiter.result() - released_at
        assert took >= 0
        # With a safety read of 5 s at the latest.
        assert alone(took, pressed) < 5 + PROMPT


# Tasks


async def test_cancelled_waiter_gives_back_what_it_never_heard_of(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt whose answer was lost may have been granted: the key is free all the same."""
    lock = lock_of(registered, key, ttl=60, wait=30, retry=Retry(delay=5, factor=1, cap=5))
    backend, heard = lock_backends[registered.alias], []
    real = backend.acquire

    def lose_the_answer(*args: Any, **kwargs: Any) -> Any:
        heard.append(real(*args, **kwargs))
        raise BackendUnavailable("The answer was lost.")

    monkeypatch.setattr(backend, "acquire", lose_the_answer)
    waiter = asyncio.create_task(lock.aacquire())
    assert await asyncio.to_thread(eventually, lambda: bool(heard), 10)
    await asyncio.sleep(0.5)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    monkeypatch.undo()
    assert await asyncio.to_thread(eventually, lambda: grantable(lock), 5)


# Forks


def fork_beside_a_waiter(alias: str, key: str) -> dict[str, Any]:
    """Fork while a thread waits for a key, and let the child take it when it is free."""
    lock = distlock(key, backend=alias, ttl=60, wait=30, retry=QUICK)
    free_reads, free_writes = os.pipe()
    reads, writes = os.pipe()
    lease = lock.acquire()
    waiter = threading.Thread(target=take_and_give_back, args=(lock,))
    waiter.start()
    backend = lock_backends[alias]
    while backend.queues.name_of(key) not in backend.queues:
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        abandon_connections()
        os.read(free_reads, 1)
        began = time.monotonic()
        take_and_give_back(lock)
        os.write(writes, json.dumps({"took": time.monotonic() - began}).encode())
        os._exit(0)
    lease.release()
    waiter.join(20)
    os.write(free_writes, b".")
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said: dict[str, Any] = json.loads(pipe.read())
    os.waitpid(child, 0)
    return {**said, "waits": waiter.is_alive()}


def take_and_give_back(lock: Lock) -> None:
    """Take turns."""
    with lock:
        pass


@SHARED
def test_child_does_not_stand_behind_a_thread_of_its_parent(
    registered: Registered, key: str
) -> None:
    """That thread is not there, and would never let the child have its turn."""
    with spawn(f"{HERE}fork_beside_a_waiter", registered.alias, key) as worker:
        said = worker.result(PATIENCE)
    assert said["waits"] is False
    assert said["took"] < 1 + PROMPT


def fork_amid_a_transaction(alias: str, key: str) -> float:
    """Fork while a thread writes to the file; return the seconds that the child needs for a key."""
    begun, forks = threading.Event(), threading.Event()
    os.register_at_fork(before=forks.set)

    def write() -> None:
        backend = cast("DatabaseBackend", lock_backends[alias])
        with backend._connections.use() as name:
            raw = connections[name].connection
            raw.execute("BEGIN IMMEDIATE")
            begun.set()
            forks.wait(PATIENCE)
            raw.commit()

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait(PATIENCE)

    def take() -> dict[str, Any]:
        began = time.monotonic()
        take_and_give_back(distlock(key, backend=alias, wait=0))
        return {"took": time.monotonic() - began}

    said, _status = in_a_fork(take)
    writer.join(PATIENCE)
    took: float = said["took"]
    return took


@pytest.mark.stores("sqlite", why="a server knows who has a lock")
def test_child_does_not_find_a_transaction_of_its_parent(registered: Registered, key: str) -> None:
    """A fork copies what SQLite knows of locked files: none comes amid a transaction of ours."""
    with spawn(f"{HERE}fork_amid_a_transaction", registered.alias, key) as worker:
        assert worker.result(PATIENCE) < PROMPT
