"""Django's connection pools: `OPTIONS["pool"]`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction

from django_distlock import BackendUnavailable, distlock
from django_distlock.database import connections as distlock_connections
from tests.contract.aliases import alias_like, locks_on, session_of
from tests.contract.helpers import Later
from tests.contract.locking import eventually

from .counting import (
    EAGER,
    PATIENCE,
    assert_none_lost,
    count_by_transaction,
    count_inside,
    count_once,
    new_counter,
    together,
)
from .sessions import close_ours, named, sessions

#: Two connections for all threads, and two seconds to wait for one.
SMALL = {"min_size": 1, "max_size": 2, "timeout": 2}
#: The same for those that may wait.
PATIENT = {"min_size": 1, "max_size": 2, "timeout": PATIENCE}


@contextmanager
def pooled(pool: object, application: str) -> Iterator[tuple[str, str]]:
    """Give an alias with a pool, and locks on it."""
    options = {**named(application)["OPTIONS"], "pool": pool}
    with alias_like("default", OPTIONS=options) as using, locks_on(using) as backend:
        try:
            yield using, backend
        finally:
            connections[using].close()
            close_ours(backend)
            close_pool(using)


def close_pool(using: str) -> None:
    """Close a pool as the end of its process does."""
    connection: Any = connections[using]
    connection.close_pool()


@contextmanager
def emptied(using: str) -> Iterator[None]:
    """Let two threads have the connections of a small pool."""
    ready, over = threading.Barrier(3), threading.Event()

    def occupy() -> None:
        with transaction.atomic(using=using):
            session_of(using)
            ready.wait(PATIENCE)
            over.wait(PATIENCE)
        connections[using].close()

    occupying = [Later(occupy) for _ in range(2)]
    ready.wait(PATIENCE)
    try:
        yield
    finally:
        over.set()
        for each in occupying:
            each.result(PATIENCE)


@pytest.mark.parametrize("pool", [True, PATIENT], ids=["default", "small"])
def test_more_threads_than_connections(key: str, pool: object) -> None:
    """Threads that share a pool count without a loss, in transactions and without."""
    with pooled(pool, key) as (using, backend):
        new_counter(key)
        lock = distlock(key, backend=backend, wait=PATIENCE, retry=EAGER)

        def work() -> list[Any]:
            counted = []
            for count in (count_once, count_inside) * 2:
                counted.append(count(lock, key, using))
                # As the end of a request does: the pool gets it back.
                connections[using].close()
            return counted

        assert_none_lost(each for counted in together([work] * 8) for each in counted)


def test_transactions_of_a_small_pool_lock_keys(key: str) -> None:
    """Whoever waits for the key has one of its connections, as with any statement."""
    with pooled(PATIENT, key) as (using, backend):
        new_counter(key)

        def work() -> list[int]:
            counted = []
            for _ in range(4):
                counted.append(count_by_transaction(key, using, backend)[0])
                connections[using].close()
            return counted

        counted = [each for some in together([work] * 6) for each in some]
        assert sorted(counted) == list(range(1, 25))


def test_connections_of_ours_are_not_the_pools(key: str) -> None:
    """Inside of transactions locks need connections, though the pool has no more to give."""
    ready = threading.Barrier(2)

    def work(number: int) -> set[int]:
        try:
            with transaction.atomic(using=using):
                mine = session_of(using)
                # Now the pool is empty.
                ready.wait(PATIENCE)
                with distlock(f"{key}:{number}", backend=backend) as lease:
                    lease.extend()
                    ready.wait(PATIENCE)
                    seen = sessions(key)
                ready.wait(PATIENCE)
            return {mine, *seen}
        finally:
            connections[using].close()

    with pooled(SMALL, key) as (using, backend):
        both = together(partial(work, number) for number in range(2))
        # Two of the pool, and up to two of ours.
        assert 3 <= len(both[0] | both[1]) <= 4


def test_empty_pool_is_neither_contention_nor_a_grant(key: str) -> None:
    """A thread that gets no connection from the pool is told so, and nothing is held."""
    with pooled(SMALL, key) as (using, backend):
        lock = distlock(key, backend=backend, wait=0)
        with emptied(using), pytest.raises(BackendUnavailable) as caught:
            lock.acquire()
        assert caught.value.code == "service_unavailable"
        with lock as lease:
            assert lease.fence == 1


def test_lease_is_released_though_the_pool_is_empty(key: str) -> None:
    """Who holds a key and has given its connection back releases when the pool has one again."""
    with pooled(SMALL, key) as (using, backend):
        lock = distlock(key, backend=backend, wait=0)
        lease = lock.acquire()
        connections[using].close()
        with emptied(using):
            with pytest.raises(BackendUnavailable):
                lease.release()
            # The store may hear it at any time.
            assert not lease.held
        assert lease.release() is True
        assert lock.locked() is False


def test_nothing_is_left(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all is closed, the pool keeps its minimum, and idle connections of ours go."""
    monkeypatch.setattr(distlock_connections, "IDLE_SECONDS", 0.3)
    with pooled(PATIENT, key) as (using, backend):

        def work(number: int) -> None:
            lock = distlock(f"{key}:{number}", backend=backend, wait=PATIENCE)
            with lock:
                pass
            with transaction.atomic(using=using), lock:
                pass
            connections.close_all()

        together(partial(work, number) for number in range(6))
        assert eventually(lambda: len(sessions(key)) <= PATIENT["max_size"], timeout=10)
        assert connections[using].connection is None
        close_pool(using)
        assert eventually(lambda: not sessions(key), timeout=10)
