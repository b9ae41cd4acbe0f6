"""Races, provoked: another client stands in the way until the rivals wait for it.

Memory and Redis have no such tests. From the reading of the clock to the last write, each of their
operations is under one mutex or in one script: an extend cannot stall between judging and writing.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.durations import MAX_BOUND
from django_distlock.core.keys import new_token
from django_distlock.core.records import FENCE_WARNING, UNKNOWN, Contended, Grant, Record
from tests.backends import Registered

from .helpers import HAS_TTL, PATIENCE, Later, at_once, crew, held, race, take
from .stores import DatabaseStore, Elapse, Store, Stranger
from .workers import WIDTH, count_up

STALLS = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", why="no operation stalls between clock and write"
)
RIVALS = 6
RESTLESS = pytest.mark.usefixtures("_restless")


@pytest.fixture
def _restless() -> Iterator[None]:
    """Let threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@RESTLESS
def test_one_of_six_gets_a_new_key(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Of six that acquire a key that never was, one gets its first fence; the next gets another."""
    # A lock that lasts for a session would be free again with the end of its process.
    if backend.distributed and store.registered.store != "session":
        fences = _processes(store, key)
    else:
        answers = at_once([lambda: backend.acquire(key, new_token(), 30)] * RIVALS)
        fences = [each.fence if isinstance(each, Grant) else None for each in answers]
    fence = only([each for each in fences if each is not None])
    assert len(fences) == RIVALS
    assert store.registered.is_next(fence)
    record = held(backend, key)
    assert record.fence == fence
    assert backend.release(Grant(key, record.token, fence, 30, record.acquired_at, None)) is True
    second = take(backend, key).fence
    assert second > fence, "a fence came again"
    assert store.registered.is_next(second, fence)


def only(granted: list[int]) -> int:
    """Give the fence of the only one who was granted a key."""
    assert len(granted) <= 1, "two held a key at once"
    (fence,) = granted
    return fence


def _processes(store: Store, key: str) -> list[int | None]:
    attempt = "tests.contract.workers:attempt"
    with crew(RIVALS, attempt, store.registered.alias, key) as rivals:
        if isinstance(store, DatabaseStore):
            stranger = store.stranger()
            # All of them find the key free, and none can take it before the last one has looked;
            # but the first one does not wait for longer than a second.
            stranger.hold_table()
            racing = Later(race, rivals)
            stranger.wait_until_blocked(len(rivals), patience=0.7)
            stranger.rollback()
            return [each["fence"] for each in racing.result(PATIENCE)]
        # Looking and taking are one step, which nobody can come into.
        return [each["fence"] for each in race(rivals)]


class Dawdler(logging.Handler):
    """Delays whoever logs."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a while."""
        time.sleep(0.02)


def test_stalled_acquire_has_no_rival(backend: BaseLockBackend, store: Store, key: str) -> None:
    """An acquire that is held up between judging and writing is still the only one.

    Its warning about a high fence is logged just there by the backend in memory.
    """
    store.set_fence(key, FENCE_WARNING)
    logger = logging.getLogger("django_distlock")
    handler = Dawdler()
    logger.addHandler(handler)
    try:
        answers = at_once([lambda: backend.acquire(key, new_token(), 30)] * 4)
    finally:
        logger.removeHandler(handler)
    fence = only([each.fence for each in answers if isinstance(each, Grant)])
    assert fence > FENCE_WARNING, "a fence came again"
    assert fence == FENCE_WARNING + 1


@RESTLESS
@HAS_TTL
def test_one_of_many_follows(
    backend: BaseLockBackend, registered: Registered, elapse: Elapse, key: str
) -> None:
    """Of those who find a lease expired, one has the key."""
    old = take(backend, key, 5)
    elapse(6.1)
    answers = at_once([lambda: backend.acquire(key, new_token(), 30)] * 4)
    fence = only([each.fence for each in answers if isinstance(each, Grant)])
    assert fence > old.fence, "a fence came again"
    assert registered.is_next(fence, old.fence)


@pytest.fixture
def nearly_over(store: DatabaseStore, key: str) -> Grant:
    """Give a lease with 0.3 s left before the key is free: the question is on its way by then."""
    grant = take(store.backend, key, 0.5)
    store.elapse(0.5 + 1 - 0.3)
    return grant


def _until_free(store: Store, grant: Grant) -> None:
    record = store.backend.read(grant.key)
    if record is not None:
        assert record.free_at is not None
        time.sleep(max(0.0, (record.free_at - store.now()).total_seconds()) + 0.01)
    assert store.backend.read(grant.key) is None


@STALLS
def test_stalled_extend_wins_over_an_acquire(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, nearly_over: Grant, key: str
) -> None:
    """An acquire that found the key free while an extend was on its way does not get it."""
    stranger.hold(key)
    _until_free(store, nearly_over)
    rival = Later(backend.acquire, key, new_token(), 30)
    stranger.wait_until_blocked()
    stranger.extend(key, 20)
    stranger.commit()
    answer = rival.result()
    assert not isinstance(answer, Grant), "two held a key at once"
    assert isinstance(answer, Contended)
    assert not answer.busy
    record = held(backend, key)
    assert (record.token, record.fence) == (nearly_over.token, nearly_over.fence)
    assert store.fence(key) == nearly_over.fence


@STALLS
def test_extend_and_acquire_have_one_winner(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, nearly_over: Grant, key: str
) -> None:
    """Where an extend stalls past the end of its lease, it or the acquire behind it loses."""
    stranger.hold(key)
    began = time.monotonic()
    extend = Later(backend.extend, nearly_over, 20)
    stranger.wait_until_blocked()
    _until_free(store, nearly_over)
    acquire = Later(backend.acquire, key, new_token(), 30)
    stranger.wait_until_blocked(2)
    stranger.rollback()
    extended, acquired = extend.result(), acquire.result()
    took = time.monotonic() - began
    assert not (extended is not None and isinstance(acquired, Grant)), "two held a key at once"
    if extended is UNKNOWN or (isinstance(acquired, Contended) and acquired.busy):
        # The machine stood still for longer than either of them may wait.
        assert took >= MAX_BOUND
        return
    # The extend came too late by the clock that it reads behind the wait.
    assert extended is None
    assert isinstance(acquired, Grant)
    assert held(backend, key).token == acquired.token


@STALLS
@pytest.mark.parametrize("operation", ["extend", "release", "settle"])
def test_lease_that_ends_while_waiting_is_gone(
    backend: BaseLockBackend,
    store: DatabaseStore,
    stranger: Stranger,
    nearly_over: Grant,
    operation: str,
) -> None:
    """Extend, release and settle judge the lease by the time behind their wait."""
    calls: dict[str, Callable[[], object]] = {
        "extend": lambda: backend.extend(nearly_over, 20),
        "release": lambda: backend.release(nearly_over),
        "settle": lambda: backend.release(nearly_over, 500),
    }
    stranger.hold(nearly_over.key)
    call = Later(calls[operation])
    stranger.wait_until_blocked()
    _until_free(store, nearly_over)
    stranger.rollback()
    assert call.result() in (None, False)
    assert backend.read(nearly_over.key) is None


@STALLS
@pytest.mark.parametrize("operation", ["extend", "release", "settle", "shorten"])
def test_successor_is_safe_from_those_who_waited(
    backend: BaseLockBackend, stranger: Stranger, key: str, operation: str
) -> None:
    """Whoever waited for the record while another token took it over changes nothing."""
    grant = take(backend, key)
    successor = new_token()
    calls: dict[str, Callable[[], object]] = {
        "extend": lambda: backend.extend(grant, 500),
        "release": lambda: backend.release(grant),
        "settle": lambda: backend.release(grant, 0),
        "shorten": lambda: backend.request_stop(key, 0, token=grant.token),
    }
    stranger.hold(key)
    stranger.give_to(key, successor)
    call = Later(calls[operation])
    stranger.wait_until_blocked()
    stranger.commit()
    answer = call.result()
    record = backend.read(key)
    assert record is not None, "a holder lost its key"
    assert record.token == successor, "a holder lost its key to another one"
    assert answer in (None, False)
    assert (record.token, record.expires_at) == (successor, grant.expires_at)


@STALLS
@pytest.mark.parametrize("is_new", [False, True], ids=["expired", "new"])
def test_waiter_gets_its_full_ttl(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str, is_new: bool
) -> None:
    """A grant behind a slow transaction lasts for its ttl from the end of the wait."""
    if is_new:
        stranger.hold_table()
    else:
        take(backend, key, 5)
        store.elapse(6.1)
        stranger.hold(key)
    _is_full(Later(backend.acquire, key, new_token(), 30), store, stranger)


@STALLS
def test_extend_that_waited_gives_its_full_ttl(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """An extend behind a slow transaction counts from the end of the wait."""
    grant = take(backend, key, 30)
    stranger.hold(key)
    _is_full(Later(backend.extend, grant, 40), store, stranger)


def _is_full(waiter: Later[Any], store: Store, stranger: Stranger) -> None:
    stranger.wait_until_blocked()
    time.sleep(0.1)
    freed = store.now()
    stranger.rollback()
    grant = waiter.result()
    assert isinstance(grant, Grant)
    assert grant.expires_at is not None
    assert grant.ttl is not None
    assert grant.expires_at - timedelta(seconds=grant.ttl) >= freed
    assert held(store.backend, grant.key).expires_at == grant.expires_at
    assert grant.expires_at > store.now()


@STALLS
def test_acquire_that_waited_for_a_release_gets_the_key(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """An acquire in the way of a removal sees that the record is gone, and makes its own."""
    take(backend, key, 5)
    store.elapse(6.1)
    stranger.hold(key)
    stranger.execute(f"DELETE FROM {store.locks} WHERE storage_key = %s", store.name(key))
    waiter = Later(backend.acquire, key, new_token(), 30)
    stranger.wait_until_blocked()
    stranger.commit()
    grant = waiter.result()
    assert isinstance(grant, Grant)
    assert grant.fence >= 2, "a fence came again"
    assert grant.fence == 2
    assert held(backend, key).token == grant.token


def insist_on(backend: BaseLockBackend, key: str) -> Grant | Contended:
    """Acquire, and again while a stranger is in the way for longer than an attempt waits."""
    while isinstance(answer := backend.acquire(key, new_token(), 30), Contended) and answer.busy:
        pass
    return answer


@STALLS
def test_pause_and_acquire_have_an_order(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """An acquire that found the key free does not get it if it was paused meanwhile."""
    take(backend, key, 5)
    store.elapse(6.1)
    # PostgreSQL: the acquire waits in the queue for the key, before it has touched its fence.
    stranger.queue(key)
    waiter = Later(insist_on, backend, key)
    if store.registered.store != "mysql":
        stranger.wait_until_blocked()
    # Not through the backend's own pause, which would wait for the acquire.
    stranger.execute(
        f"UPDATE {store.fences} SET paused_until = %s WHERE storage_key = %s",
        int((store.now().timestamp() + 60) * 1_000_000),
        store.name(key),
    )
    stranger.commit()
    answer = waiter.result()
    assert isinstance(answer, Contended)
    assert answer.paused
    assert backend.pause(key, None) is True


@pytest.mark.stores("mysql", why="nobody waits for a fence: the acquirers queue elsewhere")
def test_pause_of_a_new_key_and_acquire_have_an_order(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """The same for a key that never was, while the pause makes its fence."""
    stranger.execute(
        f"INSERT INTO {store.fences} (storage_key, {store.key_column}, fence, paused_until)"
        " VALUES (%s, %s, 0, %s)",
        store.name(key),
        key,
        int((store.now().timestamp() + 60) * 1_000_000),
    )
    waiter = Later(backend.acquire, key, new_token(), 30)
    stranger.wait_until_blocked()
    stranger.commit()
    answer = waiter.result()
    assert isinstance(answer, Contended)
    assert answer.paused
    assert backend.pause(key, None) is True
    assert take(backend, key).fence == 1


PROCESSES, TIMES = 4, 30


@RESTLESS
def test_counter_under_the_lock_loses_nothing(
    backend: BaseLockBackend, store: Store, key: str, tmp_path: Path
) -> None:
    """Four that read, think and write under the lock make as many steps as they were told."""
    counter = tmp_path / "counter"
    counter.write_bytes(b"0" * WIDTH)
    attempts = _count(backend, store, key, counter)
    assert int(counter.read_bytes()) == PROCESSES * TIMES, "updates were lost"
    assert store.fence(key) >= PROCESSES * TIMES, "a fence came again"
    assert store.registered.is_next(store.fence(key), grants=PROCESSES * TIMES)
    # They were in each other's way, or this would prove nothing.
    assert sum(attempts) > PROCESSES * TIMES


@RESTLESS
@pytest.mark.parametrize("distributed", [False, True], ids=["threads", "processes"])
def test_counter_without_the_lock_loses_some(distributed: bool, tmp_path: Path) -> None:
    """The same without a lock loses steps: nothing else protects the counter."""
    counter = tmp_path / "counter"
    counter.write_bytes(b"0" * WIDTH)
    if distributed:
        _count_in_processes("memory", "", counter)
    else:
        at_once([lambda: count_up(None, "", str(counter), TIMES)] * PROCESSES)
    assert int(counter.read_bytes()) < PROCESSES * TIMES


def _count(backend: BaseLockBackend, store: Store, key: str, counter: Path) -> list[int]:
    if not backend.distributed:
        return at_once([lambda: count_up(backend, key, str(counter), TIMES)] * PROCESSES)
    return _count_in_processes(store.registered.alias, key, counter)


def _count_in_processes(alias: str, key: str, counter: Path) -> list[int]:
    count = "tests.contract.workers:count"
    with crew(PROCESSES, count, alias, key, str(counter), TIMES) as workers:
        return race(workers)


def test_force_release_has_one_winner(backend: BaseLockBackend, key: str) -> None:
    """Of force-releases at the same time, one gets the record, and the fence moves once."""
    grant = take(backend, key)
    answers = at_once([lambda: backend.force_release(key)] * 4)
    removed = [each for each in answers if isinstance(each, Record)]
    assert len(removed) <= 1, "a record was taken away twice"
    assert [each.token for each in removed] == [grant.token]
