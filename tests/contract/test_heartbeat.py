"""A block keeps its lease for as long as it runs; what is bound to no block ends by its ttl."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_distlock import BackendUnavailable, Lease, Lock, LockLost, signals
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.clock import monotonic
from django_distlock.database import connections as lock_connections
from django_distlock.handler import lock_backends
from django_distlock.process import heartbeat
from django_distlock.process.heartbeat import heartbeat_of
from tests.backends import Registered

from .aliases import counted_alias, locks_on, sessions
from .heart_workers import loses
from .helpers import NOISE, Later, held, noted
from .locking import (
    HOLDING,
    Heard,
    eventually,
    grantable,
    lock_of,
    receiving,
    rolled_back,
    shuts_out,
    taken,
)
from .stores import Stranger

#: A ttl of which a busy machine does not miss two renewals in a row.
TTL = 2.4


def test_block_longer_than_three_ttls_keeps_its_lease(registered: Registered, key: str) -> None:
    """However it is held, its end moves on in the store, and nobody else is granted the key."""
    backend = lock_backends[registered.alias]
    leave = threading.Event()

    def work(lease: Lease) -> None:
        entered.append(lease)
        assert leave.wait(30)
        lease.check()

    entered: list[Lease] = []
    locks = [lock_of(registered, f"{key}:{way.__name__}", ttl=TTL) for way in HOLDING]
    running = [Later(way, lock, work) for way, lock in zip(HOLDING, locks, strict=True)]
    try:
        assert eventually(lambda: len(entered) == len(HOLDING), timeout=10)
        ends: dict[str, set[datetime | None]] = {lock.key: set() for lock in locks}
        until = time.monotonic() + 3.2 * TTL
        while time.monotonic() < until:
            for lock in locks:
                ends[lock.key].add(held(backend, lock.key).renewed_at)
            assert all(shuts_out(lease) for lease in entered)
            time.sleep(0.3)
        assert all(lease.held for lease in entered)
    finally:
        leave.set()
        for each in running:
            each.result()
    # Renewed at a third of the ttl each time; some may come late.
    assert all(len(seen) >= 5 for seen in ends.values())
    assert all(lease.is_released for lease in entered)
    assert all(grantable(lock) for lock in locks)


def test_what_nobody_renews_ends_by_its_ttl(registered: Registered, key: str) -> None:
    """Without a heartbeat, without a block, or basic: each lease is lost at its deadline."""
    names = {"quiet": {"heartbeat": False}, "unbound": {}, "basic": {"basic": True}}
    locks = {
        name: lock_of(registered, f"{key}:{name}", ttl=TTL, **more) for name, more in names.items()
    }
    with ExitStack() as stack:
        leases = [locks["unbound"].acquire()]
        for name in ("quiet", "basic"):
            stack.enter_context(suppress(LockLost))
            leases.append(stack.enter_context(locks[name]))
        before = [(lease.deadline, lease.expires_at) for lease in leases]
        assert eventually(lambda: all(lease.is_lost for lease in leases), timeout=TTL + NOISE)
        assert [(lease.deadline, lease.expires_at) for lease in leases] == before
        for lease in leases:
            assert lease.deadline <= monotonic()
            lease.release()


def test_extend_changes_what_the_next_beats_ask_for(registered: Registered, key: str) -> None:
    """A longer ttl is renewed as such, a shorter one in time; a request to stop is seen then."""
    backend = lock_backends[registered.alias]
    longer = lock_of(registered, f"{key}:longer", ttl=TTL)
    shorter = lock_of(registered, f"{key}:shorter", ttl=60)
    with longer as long, shorter as short:
        long.extend(9)
        short.extend(TTL)
        extended = held(backend, long.key).renewed_at
        assert eventually(lambda: held(backend, long.key).renewed_at > extended, timeout=7)
        assert held(backend, long.key).ttl == 9
        assert 9 - NOISE < long.remaining() <= 9
        # By now the short one has been renewed several times.
        assert short.held
        assert held(backend, short.key).ttl == TTL
        assert short.remaining() <= TTL
        assert not short.stop_requested
        assert Later(backend.request_stop, short.key).result() is not None
        assert eventually(lambda: short.stop_requested, timeout=TTL / 3 + 2 * NOISE)
        assert short.held


@pytest.mark.requires("supports_ttl")
def test_lifetime_bounds_the_renewals(registered: Registered, key: str) -> None:
    """A lease is lost when its lifetime is over: neither a ttl later nor a ttl sooner."""
    lock = lock_of(registered, key, ttl=TTL, max_lifetime=4)
    ended: list[float] = []
    with Heard(signals.lock_lost, key) as heard, loses(lock) as lease:
        lease.on_lost(lambda _: ended.append(monotonic()))
        began = lease.deadline - TTL
        assert eventually(lambda: bool(ended), timeout=8)
        assert lease.deadline - began == pytest.approx(4, abs=0.1)
        assert ended[0] - began > 3.9
        assert ended[0] - began < 4 + NOISE
        end = held(lock_backends[registered.alias], key).expires_at
        assert end is not None
        assert end - lease.acquired_at < timedelta(seconds=4 + NOISE)
    assert "lifetime" in heard.once["cause"]


def test_lifetime_does_not_cut_short_what_the_holder_extends(key: str) -> None:
    """A heartbeat makes leases longer: what was extended beyond the lifetime ends when it says."""
    memory = Lock(key=key, backend="memory", ttl=1.0, max_lifetime=1.5, wait=0)
    with suppress(LockLost), memory as lease:
        time.sleep(0.5)
        lease.extend(30)
        deadline = lease.deadline
        time.sleep(1.5)  # A beat has come meanwhile, and the lifetime has passed.
        assert lease.held
        assert lease.deadline >= deadline


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_block_left_inside_a_transaction_is_renewed_until_its_end(
    registered: Registered, key: str, ends: str
) -> None:
    """Neither the work nor the data is finished: nobody is granted the key before."""
    block = lock_of(registered, f"{key}:block", ttl=TTL)
    unbound = lock_of(registered, f"{key}:unbound", ttl=TTL)
    quiet = lock_of(registered, f"{key}:quiet", ttl=TTL, heartbeat=False)
    locks = (block, unbound, quiet)
    with (
        Heard(signals.lock_lost, block.key) as lost,
        suppress(ZeroDivisionError),
        transaction.atomic(),
    ):
        with block:
            pass
        with quiet:
            pass
        assert unbound.acquire().release() is True
        until = time.monotonic() + 2.5 * TTL
        while time.monotonic() < until:
            assert all(taken(lock) for lock in locks)
            assert not any(grantable(lock) for lock in locks)
            time.sleep(0.3)
        if ends == "rollback":
            raise ZeroDivisionError
    assert lost.facts == []
    assert eventually(lambda: not any(taken(lock) for lock in locks), timeout=5)
    backend = lock_backends[registered.alias]
    assert eventually(lambda: not of_key(backend, key), timeout=5)


def of_key(backend: BaseLockBackend, key: str) -> list[Any]:
    """Give the leases on keys that start so, which a heartbeat renews."""
    leases: list[Any] = list(heartbeat_of(backend).all())
    return [each for each in leases if each.key.startswith(key)]


# Many leases


@pytest.mark.stores("memory", "postgresql", "redis", why="what holds for these holds for others")
def test_hundreds_of_leases_share_their_round_trips(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All leases of a process are renewed at once, whichever thread took them, and when."""
    answers = noted(monkeypatch, lock_backends[registered.alias], "extend_many")
    with ExitStack() as stack:
        locks = [lock_of(registered, f"{key}:{number}", ttl=12) for number in range(300)]
        leases = [stack.enter_context(lock) for lock in locks]
        began = len(answers)
        ends = [(lease, lease.expires_at) for lease in leases]
        assert eventually(
            lambda: all(lease.expires_at != before for lease, before in ends), timeout=12
        )
        asked = [len(each) for each in answers]
        assert len(asked) - began <= 6, asked
        assert max(asked) >= 150
        assert all(lease.held for lease in leases)
    assert all(lease.is_released for lease in leases)


@contextmanager
def watched(alias: str) -> Iterator[list[str]]:
    """Note what heartbeats ask on connections that are opened meanwhile."""
    asked: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if threading.current_thread().name.startswith("distlock-heartbeat"):
            asked.append(sql)
        return execute(sql, params, many, context)

    def wrap(connection: BaseDatabaseWrapper, **_: Any) -> None:
        if connection.alias == alias and note not in connection.execute_wrappers:
            connection.execute_wrappers.append(note)

    connection_created.connect(wrap)
    try:
        yield asked
    finally:
        connection_created.disconnect(wrap)


def test_beat_of_a_hundred_leases_is_a_statement_on_one_connection(key: str) -> None:
    """What is on the wire does not grow with the leases: a statement, and one connection more."""
    with counted_alias() as using, watched(using) as asked, locks_on(using) as alias:
        with ExitStack() as stack:
            leases = [
                stack.enter_context(Lock(key=f"{key}:{number}", backend=alias, ttl=6))
                for number in range(100)
            ]
            first = leases[0].expires_at
            assert eventually(lambda: leases[0].expires_at != first, timeout=6)
            assert eventually(lambda: all(lease.remaining() > 4 for lease in leases), timeout=6)
            questions = [sql for sql in asked if "distlock" in sql]
            assert 1 <= len(questions) <= 4, questions
            assert len(asked) <= 16, asked
            assert len(sessions(using)) <= 2
        backend: Any = lock_backends[alias]
        backend._connections.close_all()


@pytest.mark.stores("postgresql", "mysql", why="its server does not tell its sessions apart")
def test_d14_heartbeat_leaves_no_connection_behind(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last lease the thread ends, and its connection is closed; then both come again."""
    monkeypatch.setattr(heartbeat.Heartbeat, "linger", 0.3)
    monkeypatch.setattr(lock_connections, "IDLE_SECONDS", 0.5)
    with counted_alias(registered.using) as using, locks_on(using) as alias:
        backend = lock_backends[alias]
        for _ in range(2):
            with Lock(key=key, backend=alias, ttl=TTL) as lease:
                before = lease.expires_at
                assert eventually(lambda at=before, of=lease: of.expires_at != at, timeout=5)  # type: ignore[misc]
                # This thread's own, where its statements need no transaction, and that of the beat.
                own = int(connections[using].connection is not None)
                # It may have idled since, on a busy machine, and comes back with the next beat.
                assert eventually(lambda own=own: len(sessions(using)) > own, timeout=10)  # type: ignore[misc]
            assert eventually(lambda: heartbeat_of(backend)._thread is None, timeout=10)
            assert eventually(lambda own=own: len(sessions(using)) == own, timeout=10)  # type: ignore[misc]
        connections[using].close()
        assert eventually(lambda: not sessions(using), timeout=10)


# What is in the way of one lease


ROW_LOCKS = pytest.mark.stores("postgresql", "mysql", why="no transaction can hold a single record")


@ROW_LOCKS
def test_record_that_a_transaction_holds_costs_the_others_nothing(
    registered: Registered, key: str, stranger: Stranger
) -> None:
    """The one renewal is unknown, the others of the same beat succeed, and the lease goes on."""
    blocked = lock_of(registered, f"{key}:blocked", ttl=6)
    with (
        Heard(signals.lock_extended, blocked.key) as about_blocked,
        Heard(signals.lock_lost, blocked.key) as lost,
        blocked as one,
        lock_of(registered, f"{key}:free", ttl=6) as other,
    ):
        before = other.expires_at
        stranger.hold(blocked.key)
        assert eventually(lambda: bool(about_blocked.facts), timeout=5)
        assert isinstance(about_blocked.facts[0]["cause"], BackendUnavailable)
        assert eventually(lambda: other.expires_at != before, timeout=2)
        stranger.rollback()
        assert eventually(lambda: about_blocked.facts[-1]["cause"] is None, timeout=5)
        time.sleep(1)
        assert one.held
        assert other.held
        assert lost.facts == []


@ROW_LOCKS
def test_record_that_a_transaction_goes_on_holding_loses_its_lease_alone(
    registered: Registered, key: str, stranger: Stranger
) -> None:
    """Three unknown renewals, or the deadline, end the one lease, and none of the others."""
    blocked = lock_of(registered, f"{key}:blocked", ttl=TTL)
    with (
        Heard(signals.lock_lost, blocked.key) as lost,
        lock_of(registered, f"{key}:free", ttl=TTL) as other,
        loses(blocked) as one,
    ):
        stranger.hold(blocked.key)
        assert eventually(lambda: one.is_lost, timeout=TTL + NOISE)
        assert eventually(lambda: bool(lost.facts), timeout=NOISE)
        assert other.held
        stranger.rollback()
    assert other.is_released
    assert lost.once["fence"] == one.fence


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="no transaction is around its locks")
def test_heartbeat_takes_nothing_away_in_a_test_case(registered: Registered, key: str) -> None:
    """What a `TestCase` has not committed no other connection sees: that is no loss."""
    case: Any = transaction.atomic(using=registered.using)
    case._from_testcase = True
    with Heard(signals.lock_lost, key) as lost, case:
        with lock_of(registered, key, ttl=3) as lease:
            time.sleep(1.6)  # The first beat comes after one second.
            lease.check()
        transaction.set_rollback(True, using=registered.using)
    assert lost.facts == []


def test_signals_of_a_beat_delay_nobody(registered: Registered, key: str) -> None:
    """A receiver of `lock_extended` delays no beat, and no release that a rollback has left."""
    leave, entered = threading.Event(), threading.Event()

    def receive(**facts: Any) -> None:
        if facts["key"] == key:
            entered.set()
            leave.wait(8)

    other = lock_of(registered, f"{key}:other", wait=0)
    with receiving(signals.lock_extended, receive), lock_of(registered, key, ttl=TTL) as lease:
        assert entered.wait(5)
        with rolled_back(), other:
            pass
        # Not by whoever asks for the key: that would wait for the release.
        read = lock_backends[registered.alias].read
        assert eventually(lambda: read(other.key) is None, timeout=3)
        time.sleep(1.5 * TTL)
        lease.check()
        leave.set()
