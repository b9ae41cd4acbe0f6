"""Stores that take their time for each answer: a call ends in the time that it has for all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.db import connections
from django.test import override_settings
from redis import RedisCluster

from django_distlock import BackendUnavailable, Lease, Lock, LockError, LockNotAcquired, distlock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core import durations
from django_distlock.core.clock import monotonic
from django_distlock.core.records import Grant
from django_distlock.database.borrowing import TICK_SECONDS
from django_distlock.database.connections import releases
from django_distlock.handler import lock_backends
from django_distlock.locks import attempts
from django_distlock.locks.attempts import Attempts, Request, release_unanswered
from django_distlock.locks.blocks import Block
from django_distlock.process import deferred_release
from django_distlock.process.host import current_holder
from tests.backends import BACKENDS
from tests.contract.aliases import alias_like
from tests.contract.helpers import PROMPT, Later
from tests.contract.locking import eventually, grantable, lock_of, rolled_back
from tests.contract.redis_clients import close, cluster_url

from .databases import here
from .wires import Wire, wire

#: Seconds that each answer takes, that a call waits, and that the store gets beyond that.
DELAY, WAIT, PATIENCE = 0.4, 0.4, 0.8
#: Seconds that a call takes at most.
MOST = WAIT + PATIENCE + DELAY + TICK_SECONDS + PROMPT
#: Answers that come beyond that: drivers open a connection in steps of whole seconds.
OPENING = {"redis": 0, "redis_cluster": 0, "mariadb": 5}

ALIASES = ["postgres", "postgres_orm", "mariadb", "advisory", "redis", "redis_cluster"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "PATIENCE", PATIENCE)


@contextmanager
def slowly(alias: str) -> Iterator[list[Wire]]:
    """Configure a backend as "slow", behind wires, and as it is as "fast"."""
    given = settings.DISTLOCK[here(alias)]
    options = dict(given["OPTIONS"])
    with ExitStack() as stack:
        if alias == "redis_cluster":
            wires, options["client_factory"] = _cluster(stack)
        elif alias == "redis":
            url = urlsplit(options["url"])
            wires = [stack.enter_context(wire(server=(str(url.hostname), url.port or 0)))]
            options["url"] = f"redis://127.0.0.1:{wires[0].address['PORT']}/0"
        else:
            wires = [stack.enter_context(wire(options["using"]))]
            address = wires[0].address
            options["using"] = stack.enter_context(alias_like(options["using"], **address))
        configured = {"slow": {**given, "OPTIONS": options}, "fast": given}
        stack.enter_context(override_settings(DISTLOCK=configured))
        store: Any = lock_backends["slow"]
        yield wires
        for each in wires:
            each.delay = 0.0
        for name in ("_listener", "_sessions", "_connections"):
            if (owner := getattr(store, name, None)) is not None:
                owner.close_all()


def _cluster(stack: ExitStack) -> tuple[list[Wire], Callable[[], RedisCluster]]:
    known: Any = RedisCluster.from_url(cluster_url())
    servers = {node.port: node.host for node in known.get_nodes()}
    close(known)
    ways = {port: stack.enter_context(wire(server=(at, port))) for port, at in servers.items()}
    ports = {port: int(way.address["PORT"]) for port, way in ways.items()}
    first = urlsplit(cluster_url()).port or 0

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        return address[0], ports.get(address[1], address[1])

    def connect() -> RedisCluster:
        return RedisCluster.from_url(f"redis://127.0.0.1:{ports[first]}/0", address_remap=remap)

    return list(ways.values()), connect


def ended(acquire: Callable[[], Lease]) -> tuple[LockError | Lease, float]:
    """Return what came of a call, and the seconds that it took."""
    began = time.monotonic()
    try:
        return acquire(), time.monotonic() - began
    except LockError as error:
        return error, time.monotonic() - began


def ways_of(lock: Lock) -> list[Callable[[], Lease]]:
    """Return both ways to acquire."""
    return [lock.acquire, lambda: asyncio.run(lock.aacquire())]


@pytest.mark.parametrize("alias", ALIASES)
def test_call_on_a_slow_store_ends_in_its_time(alias: str, key: str) -> None:
    """Connecting, waiting, notes, wake-ups and the last question have one time, sync and async.

    Of the key that is held it says so, or that the store is slow; nothing of a transaction.
    """
    with slowly(alias) as wires:
        held = distlock(key, backend="fast", heartbeat=False).acquire()
        for each in wires:
            each.delay = DELAY
        calls = [Later(ended, way) for way in ways_of(distlock(key, backend="slow", wait=WAIT))]
        for error, took in [call.result() for call in calls]:
            assert took < MOST + OPENING.get(alias, 2) * DELAY, error
            assert isinstance(error, LockNotAcquired | BackendUnavailable)
            assert "transaction" not in str(error)
            if isinstance(error, BackendUnavailable):
                assert error.code == "network_timeout"
                assert "too slowly" in str(error)
        held.release()


@pytest.mark.parametrize("alias", ["postgres", "postgres_orm", "mariadb", "redis", "advisory"])
def test_grant_whose_answer_comes_too_late_is_given_back(alias: str, key: str) -> None:
    """Of many statements, or of one: who is told that the store is too slow holds nothing."""
    with slowly(alias) as wires:
        lock = distlock(key, backend="slow", wait=0, ttl=60, heartbeat=False)
        # Whatever the first connections take.
        patient = distlock(key, backend="slow", wait=15, ttl=60, heartbeat=False)
        Later(lambda: patient.acquire().release()).result()

        def late() -> tuple[LockError | Lease, float]:
            connections[lock_backends["slow"].using or "default"].ensure_connection()
            for each in wires:
                each.delay = PATIENCE * 1.5
            found = ended(lock.acquire)
            for each in wires:
                each.delay = 0.0
            return found

        error, took = Later(late).result()
        assert took < PATIENCE + TICK_SECONDS + PROMPT
        assert isinstance(error, BackendUnavailable), error
        assert f"whether {key!r} is free" in str(error)
        # Its release goes on its own way, and once more after 2.5 s.
        distlock(key, backend="fast", wait=15).acquire().release()


def test_who_waits_is_not_noted_on_a_slow_store(key: str) -> None:
    """A note takes as long as many answers, for which nobody would be heard."""
    backend = lock_backends["memory"]
    took = {0.001: True, 0.4: True, 0.6: False}
    for seconds, noted in took.items():
        attempts = _waiting(backend, wait=60)
        backend.queues.took = seconds
        assert attempts.may_be_noted is noted
    # Nor where it would take the rest of the wait.
    attempts = _waiting(backend, wait=3)
    backend.queues.took = 0.3
    assert not attempts.may_be_noted
    # Whoever waits behind another one is noted when the store has become quick.
    lock_of(BACKENDS["memory"], key).acquire().release()
    assert attempts.may_be_noted


def _waiting(backend: BaseLockBackend, wait: float) -> Attempts:
    """Give the attempts of a caller that has waited for a while."""
    return Attempts(
        backend,
        Request(
            key="a", ttl=30.0, wait=wait, holder=current_holder(), retry=backend.config.retry,
            since=monotonic() - 1.5,
        ),
    )  # fmt: skip


class Silent:
    """A store that answers no release until the test ends."""

    alias = "silent"

    def __init__(self) -> None:
        self.was_asked, self.ended = threading.Event(), threading.Event()
        self.asked = 0

    def release(self, *_: object) -> bool:
        """Wait for the end of the test."""
        self.asked += 1
        self.was_asked.set()
        return self.ended.wait(30)


@pytest.fixture
def silent() -> Iterator[Any]:
    """Give a store that does not answer, with a thread of its own for what is released there."""
    store = Silent()
    yield store
    store.ended.set()
    releases.finish()


def _unanswered(silent: Any, key: str) -> None:
    now = datetime.now(UTC)
    release_unanswered(silent, Grant(key, "t", 1, 5.0, now, now))


def _rolled_back(silent: Any, key: str) -> None:
    owner = SimpleNamespace(terms=SimpleNamespace(hold=False), lasts=True)
    with rolled_back():
        assert deferred_release.defer((silent.alias, key), owner, silent.release)


def _interrupted(silent: Any, key: str) -> None:
    block = Block(None)
    block.name = silent.alias, key
    holding = SimpleNamespace(token="t")
    block.release = SimpleNamespace(holding=holding, end_left_block=silent.release)
    block.watched()  # Nobody keeps what it returns.


@pytest.mark.parametrize("leave", [_unanswered, _rolled_back, _interrupted])
def test_silent_store_delays_no_release_of_another(
    silent: Any, key: str, leave: Callable[[Any, str], None]
) -> None:
    """Each backend has a thread for what it owes its store."""
    leave(silent, key)
    assert silent.was_asked.wait(10)
    lock = lock_of(BACKENDS["memory"], key)
    with rolled_back(), lock:
        pass
    assert eventually(partial(grantable, lock), timeout=10)


def test_grant_without_an_end_is_given_back_however_much_waits(
    silent: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stay for ever."""
    monkeypatch.setattr(attempts, "MOST_UNHEARD", 0)
    now = datetime.now(UTC)
    release_unanswered(silent, Grant(key, "t", 1, None, now, None))
    assert silent.was_asked.wait(10)


@pytest.mark.parametrize("error", [SystemExit, ZeroDivisionError])
def test_release_that_fails_keeps_none_behind_it(key: str, error: type[BaseException]) -> None:
    """Not even where a receiver of a signal has called `sys.exit`."""

    def fail() -> None:
        raise error

    done = threading.Event()
    for work in (fail, done.set):
        deferred_release.later(partial(deferred_release.apart, "memory", work))
    assert done.wait(10)


def test_what_a_silent_store_keeps_waiting_is_bounded(
    silent: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt without an answer would leave two more calls: what is too much expires."""
    monkeypatch.setattr(attempts, "MOST_UNHEARD", 3)
    _unanswered(silent, key)
    assert silent.was_asked.wait(10)
    for _ in range(10):
        _unanswered(silent, key)
    # Behind these ten, the thread has another task for the backend.
    _rolled_back(silent, key)
    lock = lock_of(BACKENDS["memory"], key)
    with rolled_back(), lock:
        pass
    assert eventually(partial(grantable, lock), timeout=10)
    silent.ended.set()
    releases.finish()
    assert silent.asked == 1 + 3 + 1
