"""A lease that ends before its block does: when that is noticed, and who is told, once."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FunctionType
from typing import Any, cast
from unittest.mock import Mock

import pytest
from django.db import connections
from django.test import override_settings

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    Lease,
    LockError,
    LockLost,
    distlock,
    signals,
)
from django_distlock.core.clock import monotonic
from django_distlock.core.records import UNKNOWN
from django_distlock.handler import lock_backends
from django_distlock.locks import taking
from django_distlock.process.heartbeat import alarms, heartbeat_of
from tests.backends import BACKENDS, Registered
from tests.integration.wires import Wire

from .aliases import alias_like
from .heart_workers import loses
from .helpers import NOISE, Later
from .interrupting import interrupt_at
from .locking import Heard, eventually, grantable, lock_of, receiving, take_away
from .scripted import Script, ScriptedMemory
from .test_lock_trouble import address, registered_options

#: A ttl of which a busy machine does not miss two renewals in a row.
TTL = 2.4
DOWN = "The store is away."


class Told:
    """Notes when it was called back."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.leases: list[Lease] = []
        self.threads: list[str] = []

    def __call__(self, lease: Lease) -> None:
        """Note this call."""
        self.at.append(monotonic())
        self.leases.append(lease)
        self.threads.append(threading.current_thread().name)

    def within(self, seconds: float) -> bool:
        """Wait until it was called."""
        return eventually(lambda: bool(self.at), timeout=seconds)

    @property
    def once(self) -> Lease:
        """Give the lease of a loss that was told exactly once."""
        assert len(self.leases) <= 1, "a loss was told twice"
        (lease,) = self.leases
        return lease


@pytest.fixture
def script(scripted: Script) -> list[Any]:
    """Give the script of the renewals of the aliases `scripted` and `thirds`."""
    return scripted.setdefault("extend_many", [])


def failures(count: int) -> list[Any]:
    """Make errors of a store that is away."""
    return [BackendUnavailable(DOWN) for _ in range(count)]


# Renewals that fail


@pytest.mark.parametrize(
    "trouble",
    [BackendUnavailable(DOWN), UNKNOWN, LockError("refused"), OSError("a driver's")],
    ids=lambda trouble: type(trouble).__name__,
)
def test_one_or_two_renewals_that_fail_are_unknown(
    script: list[Any], key: str, trouble: Any
) -> None:
    """Not knowing is not losing: the lease goes on, and signals tell of the trouble."""
    script += [trouble, trouble]
    with (
        Heard(signals.lock_extended, key) as extended,
        Heard(signals.lock_lost, key) as lost,
        distlock(key, backend="scripted", ttl=4) as lease,
    ):
        before = lease.expires_at
        assert eventually(lambda: lease.expires_at != before, timeout=4)
        lease.check()
        assert eventually(lambda: len(extended.facts) >= 3)
    assert [bool(each["cause"]) for each in extended.facts[:3]] == [True, True, False]
    assert lost.facts == []


def test_three_failures_in_a_row_lose_the_lease(script: list[Any], key: str) -> None:
    """At the third, though its deadline is far; nobody says that the store does not know it."""
    script += failures(3)
    told = Told()
    with (
        Heard(signals.lock_lost, key) as heard,
        loses(distlock(key, backend="scripted", ttl=8)) as lease,
    ):
        lease.on_lost(told)
        assert told.within(6)
        assert lease.deadline - told.at[0] > 2
        assert (lease.is_lost, lease.held) == (True, False)
        with pytest.raises(LockLost) as caught:
            lease.check()
        assert "no longer has it" not in str(caught.value)
    assert "3 renewals" in heard.once["cause"]


def test_deadline_loses_the_lease_while_a_renewal_hangs(script: list[Any], key: str) -> None:
    """The alarm is a timer of its own, which waits for no store."""
    script += [4.0]
    told = Told()
    with loses(distlock(key, backend="thirds", ttl=TTL)) as lease:
        lease.on_lost(told)
        assert told.within(3.5)
        assert lease.deadline <= told.at[0] < lease.deadline + NOISE
    # The reply that comes behind it brings nothing back.
    time.sleep(2.5)
    assert lease.is_lost
    assert told.once is lease


def test_block_that_ends_while_a_renewal_hangs_has_its_result(script: list[Any], key: str) -> None:
    """A body that ended in time has not lost its lease, whatever its release takes."""
    script += [3.0]
    with Heard(signals.lock_lost, key) as lost, distlock(key, backend="thirds", ttl=TTL) as lease:
        assert eventually(lambda: "extend_many" in ScriptedMemory.asked, timeout=5)
        lease.check()
    assert lost.facts == []


@contextmanager
def hanging(registered: Registered) -> Iterator[tuple[str, Wire]]:
    """Give a lock alias whose store can be made to hang."""
    is_redis = registered.store == "redis"
    wire = Wire(server=address(registered)) if is_redis else Wire(registered.using)
    options = registered_options(registered)
    try:
        with ExitStack() as stack:
            if is_redis:
                options["url"] = f"redis://127.0.0.1:{wire.address['PORT']}/0"
            else:
                options["using"] = stack.enter_context(alias_like(registered.using, **wire.address))
            configured = {"hanging": {"BACKEND": registered.path, "OPTIONS": options}}
            stack.enter_context(override_settings(DISTLOCK=configured))
            yield "hanging", wire
            wire.close()
            Later(connections.close_all).result()
    finally:
        wire.close()


WIRED = pytest.mark.stores(
    "postgresql", "mysql", "redis", "session", why="no wire leads to its store"
)


@WIRED
def test_store_that_hangs_loses_the_lease_at_its_deadline(registered: Registered, key: str) -> None:
    """Whatever the driver waits for, who holds a lease is told in time, also at its block's end."""
    told = Told()
    with hanging(registered) as (alias, wire):
        began = monotonic()
        with loses(distlock(key, backend=alias, ttl=TTL)) as lease:
            lease.on_lost(told)
            before = lease.deadline
            assert eventually(lambda: lease.deadline != before, timeout=5)
            wire.hang()
            assert told.within(4 * TTL)
            assert lease.deadline <= told.at[0] < lease.deadline + NOISE
            assert lease.is_lost
            threading.Timer(1, wire.close).start()
        assert monotonic() - began < 60
    assert told.once is lease


@WIRED
def test_store_that_comes_back_in_time_loses_nothing(registered: Registered, key: str) -> None:
    """A renewal that hangs for a while is late, and the lease goes on."""
    with hanging(registered) as (alias, wire), Heard(signals.lock_lost, key) as lost:
        with distlock(key, backend=alias, ttl=6) as lease:
            before = lease.deadline
            assert eventually(lambda: lease.deadline != before, timeout=8)
            wire.hang()
            time.sleep(2.5)
            wire.flow()
            before = lease.deadline
            assert eventually(lambda: lease.deadline != before, timeout=8)
            lease.check()
        assert lost.facts == []


# Leases that are gone


def test_lease_that_an_operator_took_is_lost_at_the_next_beat(
    registered: Registered, key: str
) -> None:
    """Long before its deadline the holder is told, once, and by everything that tells."""
    told = Told()
    with Heard(signals.lock_lost, key) as heard, loses(lock_of(registered, key, ttl=6)) as lease:
        lease.on_lost(told)
        taken_at = monotonic()
        take_away(lease)
        assert told.within(4)
        assert told.at[0] - taken_at < 2 + NOISE
        assert lease.is_lost
        for call in (lease.check, lease.extend):
            with pytest.raises(LockLost):
                call()
        assert lease.release() is False
    assert heard.once["fence"] == lease.fence
    assert heard.once["holder"] is not None
    assert told.once is lease
    assert grantable(lock_of(registered, key))


# Told once


FINDERS = pytest.mark.parametrize("finder", ["timer", "check", "end"])


def lose(lease: Lease, finder: str) -> None:
    """Let the lease pass, and be found lost."""
    while monotonic() < lease.deadline:
        time.sleep(0.01 if finder == "timer" else 0)
    if finder == "check":
        with pytest.raises(LockLost):
            lease.check()
    elif finder == "timer":
        time.sleep(0.7)  # The timer is quicker, unless the machine stands still.


@FINDERS
def test_loss_is_told_once(registered: Registered, key: str, finder: str) -> None:
    """By one signal, one call of each callback, and the end of the block."""
    first, second = Told(), Told()
    with Heard(signals.lock_lost, key) as heard:
        with loses(lock_of(registered, key, ttl=0.4, heartbeat=False)) as lease:
            lease.on_lost(first)
            lease.on_lost(second)
            lose(lease, finder)
        # The timer may have been first, and tells in a thread of its own.
        assert first.within(5)
        assert second.within(5)
        assert eventually(lambda: bool(heard.facts), timeout=5)
        time.sleep(0.3)
    assert 0 < heard.once["held_for"] < 30
    assert heard.once["cause"]
    assert first.once is second.once is lease
    assert lease.is_lost
    assert not lease.is_released


@FINDERS
def test_error_of_the_body_is_what_is_seen(registered: Registered, key: str, finder: str) -> None:
    """It says more about what went wrong. The signal is sent all the same, once."""
    with Heard(signals.lock_lost, key) as heard:

        def work() -> None:
            with lock_of(registered, key, ttl=0.4, heartbeat=False) as lease:
                lose(lease, finder)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()
        assert eventually(lambda: bool(heard.facts))
        time.sleep(0.3)
        assert heard.once["cause"]


def test_clean_release_tells_of_no_loss(registered: Registered, key: str) -> None:
    """Not of a block's, nor of one by hand, nor when the deadline has passed since."""
    told, close = Told(), Told()
    with Heard(signals.lock_lost, key) as heard:
        with lock_of(registered, key, ttl=0.8, heartbeat=False) as lease:
            lease.on_lost(told)
            lease.on_danger(close, before=0.05)
        unbound = lock_of(registered, key, ttl=0.8).acquire()
        unbound.on_lost(told)
        assert unbound.release() is True
        time.sleep(1.2)
        assert heard.facts == []
    assert told.at == close.at == []
    assert lease.is_released
    assert not lease.is_lost


@pytest.mark.parametrize("looked_at", [False, True])
def test_callback_behind_the_loss_is_called_at_once(key: str, *, looked_at: bool) -> None:
    """Who asks too late to be told gets to know immediately, whoever has noticed before."""
    lease = distlock(key, backend="memory", ttl=0.2).acquire()
    time.sleep(0.3)
    assert not looked_at or lease.is_lost
    told, again = Told(), Told()
    lease.on_lost(told)
    assert told.within(2)
    lease.on_lost(again)
    assert again.once is told.once is lease
    assert again.threads == [threading.current_thread().name]
    lease.release()


def test_callback_of_a_lease_that_gets_an_end_later(key: str) -> None:
    """A lease without expiry that is extended by some seconds ends, and its holder is told."""
    told = Told()
    with loses(distlock(key, backend="memory", basic=True)) as lease:
        lease.on_lost(told)
        lease.extend(0.3)
        assert told.within(3)
        assert told.at[0] - lease.deadline < NOISE


def test_end_that_comes_nearer_is_noticed_although_the_store_hangs(key: str) -> None:
    """A shorter ttl counts from when it was asked for: the store may have heard of it."""
    told = Told()
    lease = distlock(key, backend="memory", ttl=60).acquire()
    lease.on_lost(told)
    time.sleep(0.2)  # The timer sleeps.
    memory: Any = lock_backends["memory"]
    with memory._mutex:
        extending = Later(lease.extend, 0.2)
        assert eventually(lambda: lease.remaining() < 1, timeout=2)
        assert told.within(3)
    with pytest.raises(LockLost):
        extending.result()
    lease.release()


def test_shorter_end_whose_answer_was_lost_is_renewed_in_time(scripted: Script, key: str) -> None:
    """In a block the heartbeat goes on by the sooner end, and the lease is kept."""
    with distlock(key, backend="thirds", ttl=60) as lease:
        scripted["extend"] = failures(2)
        with pytest.raises(BackendUnavailable):
            lease.extend(3)
        assert lease.remaining() <= 3
        sooner = lease.deadline
        assert eventually(lambda: lease.deadline > sooner, timeout=10)
        lease.check()


# Warnings


def test_warning_comes_before_the_end(key: str) -> None:
    """A quarter of the ttl by default, or as many seconds before as one says; again each time."""
    by_default, early = Told(), Told()
    lease = distlock(key, backend="memory", ttl=3).acquire()
    lease.on_danger(by_default)
    lease.on_danger(early, before=2)
    for count in (1, 2):
        assert eventually(lambda least=count: len(by_default.at) >= least, timeout=5)  # type: ignore[misc]
        assert lease.held
        for told, before in ((by_default, 0.75), (early, 2)):
            assert told.leases == [lease] * count
            assert lease.deadline - before <= told.at[-1] < lease.deadline - before + NOISE
        lease.extend()
    lease.release()


def test_no_warning_while_renewals_succeed(key: str) -> None:
    """A lease that a heartbeat keeps is in no danger."""
    told = Told()
    with distlock(key, backend="memory", ttl=3) as lease:
        lease.on_danger(told)
        time.sleep(4)
    assert told.at == []


async def coroutine(lease: Lease) -> None:
    """Be a callback that nobody would await."""


@pytest.mark.parametrize("callback", [None, 3, "name", coroutine])
def test_what_cannot_be_called_is_refused(key: str, callback: Any) -> None:
    """A callback that would fail when it is needed is refused when it is given."""
    with distlock(key, backend="memory") as lease:
        for give in (lease.on_lost, lease.on_danger):
            with pytest.raises(InvalidArgument):
                give(callback)


# Those who are told


def fail(*_: Lease, **__: Any) -> None:
    """Be a callback, or a receiver, with a defect."""
    raise ZeroDivisionError


def test_what_fails_when_it_is_told_is_logged(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """The other callbacks are called, and the timer goes on for other leases."""
    told, other = Told(), Told()
    with caplog.at_level(logging.ERROR, "django_distlock"), receiving(signals.lock_lost, fail):
        lease = distlock(key, backend="memory", ttl=0.6).acquire()
        lease.on_danger(fail, before=0.3)
        lease.on_lost(fail)
        # In the thread of a timer it ends no program.
        lease.on_lost(sys.exit)
        lease.on_lost(told)
        later = distlock(f"{key}:later", backend="memory", ttl=1.2).acquire()
        later.on_lost(other)
        assert told.within(4)
        assert other.within(4)
    logged = [each.exc_text or "" for each in caplog.records]
    assert sum("ZeroDivisionError" in each for each in logged) >= 3
    assert any("SystemExit" in each for each in logged)
    # In the main thread it does, whoever is told behind.
    with pytest.raises(SystemExit):
        lease.on_lost(sys.exit)
    for each in (lease, later):
        each.release()


@pytest.mark.parametrize("which", ["lost", "danger", "signal"])
def test_callback_that_takes_its_time_delays_nobody(key: str, which: str) -> None:
    """Neither the loss of another lease, nor a renewal, waits for who has been told."""
    leave = threading.Event()

    def block(*_: Any, **facts: Any) -> None:
        if facts.get("key", key) == key and (facts or which != "signal"):
            leave.wait(5)

    told = Told()
    slow = distlock(key, backend="memory", ttl=0.6).acquire()
    with receiving(signals.lock_lost, block if which == "signal" else lambda **_: None):
        if which == "danger":
            slow.on_danger(block, before=0.5)
        else:
            slow.on_lost(block)
        with distlock(f"{key}:kept", backend="memory", ttl=TTL) as kept:
            other = distlock(f"{key}:other", backend="memory", ttl=1.2).acquire()
            other.on_lost(told)
            assert told.within(4)
            assert told.at[0] - other.deadline < NOISE
            time.sleep(1.2)
            kept.check()
        leave.set()
    for each in (slow, other):
        each.release()


@pytest.mark.parametrize("finder", [Lease.extend, Lease.downgrade, Lease.release])
def test_callback_may_wait_for_a_thread_that_uses_the_lease(
    key: str, finder: Callable[[Lease], object]
) -> None:
    """Whoever finds out about the loss keeps nobody from the lease while that is told."""
    lease = distlock(key, backend="memory", ttl=60).acquire()
    answers: list[bool] = []

    def use() -> bool:
        with pytest.raises(LockLost):
            lease.extend()
        return lease.release()

    lease.on_lost(lambda _lease: answers.append(Later(use).result(5)))
    take_away(lease)
    with suppress(LockLost):
        finder(lease)
    assert answers == [False]


def test_receivers_leave_no_connection_behind(key: str) -> None:
    """What a receiver opens in the thread that tells it is closed there."""
    seen: list[Any] = []

    def receive(lease: Lease) -> None:
        connections["default"].ensure_connection()
        seen.append(connections["default"])

    lease = distlock(key, backend="memory", ttl=0.2).acquire()
    lease.on_lost(receive)
    assert eventually(lambda: bool(seen), timeout=3)
    assert eventually(lambda: seen[0].connection is None, timeout=3)
    lease.release()


# Races


def test_three_hundred_leases_that_are_released_at_their_end(key: str) -> None:
    """Each is either released, and nothing is told; or lost, and told once. Never both."""
    heard: dict[str, int] = {}
    mutex = threading.Lock()

    def receive(**facts: Any) -> None:
        with mutex:
            heard[facts["key"]] = heard.get(facts["key"], 0) + 1

    def race(number: int) -> tuple[Lease, Told, bool]:
        told = Told()
        lease = distlock(f"{key}:{number}", backend="memory", ttl=0.3).acquire()
        lease.on_lost(told)
        # From a little before the deadline to a little behind it.
        until = lease.deadline + (number % 60 - 30) / 3000
        time.sleep(max(0.0, until - monotonic() - 0.01))
        while monotonic() < until:
            pass
        return lease, told, lease.release()

    with receiving(signals.lock_lost, receive):
        outcomes: list[tuple[Lease, Told, bool]] = []
        for start in range(0, 300, 20):
            running = [Later(race, number) for number in range(start, start + 20)]
            outcomes += [each.result() for each in running]
        lost = [lease for lease, _told, _released in outcomes if lease.is_lost]
        assert eventually(lambda: len(heard) >= len(lost))
        time.sleep(0.5)
    assert lost
    assert len(lost) < 300
    for lease, told, released in outcomes:
        once = 1 if lease.is_lost else 0
        times = (heard.get(lease.key, 0), len(told.at))
        assert max(times) <= once, "a loss was told that was none, or twice"
        assert lease.is_released is not lease.is_lost
        assert times == (once, once)
        # In the grace behind its deadline, a lost lease can still be given back.
        assert released or lease.is_lost
        assert lease._holding not in alarms._leases


def test_leases_that_are_extended_and_released_at_once_leave_nothing(key: str) -> None:
    """Two threads that cross on a lease leave neither timers nor renewals behind."""

    def extend(lease: Lease) -> None:
        with suppress(LockError):
            lease.extend()

    leases: list[Lease] = []
    for number in range(300):
        lock = distlock(f"{key}:{number}", backend="memory", ttl=1)
        with suppress(LockLost), lock as lease:
            lease.on_lost(print)
            extending = [Later(extend, lease) for _ in range(2)]
            lease.release()
        for each in extending:
            each.result()
        leases.append(lease)
    kept, renewed = alarms._leases, heartbeat_of(lock_backends["memory"])._leases
    ended = {lease._holding for lease in leases}
    assert eventually(lambda: ended.isdisjoint(kept) and ended.isdisjoint(renewed), timeout=5)


# Nothing grows

#: Cycles of each backend. By hand: `DISTLOCK_TEST_CYCLES=10000`.
CYCLES = int(os.environ.get("DISTLOCK_TEST_CYCLES", "500"))


def test_many_cycles_leave_nothing_behind(registered: Registered, key: str) -> None:
    """Taken and given back thousands of times, locks cost no threads and no memory."""
    lock = lock_of(registered, key, ttl=30)
    backend: Any = lock_backends[registered.alias]
    with lock:
        pass
    threads = {each.name for each in threading.enumerate()}
    for _ in range(CYCLES):
        with lock as lease:
            lease.on_lost(print)
    more = {each.name for each in threading.enumerate()} - threads
    # What another test has left is released by a thread of its own backend.
    releases = "distlock-releases-"
    more -= {each for each in more if each.startswith(releases)} - {releases + registered.alias}
    assert not [name for name in more if name.startswith("distlock")], more
    kept = [each for each in alarms.all() if getattr(each, "key", "") == key]
    assert kept == []
    assert not [each for each in heartbeat_of(backend).all() if vars(each)["key"] == key]
    assert len(backend.queues) == 0
    assert backend.read(key) is None
    if registered.store in ("sqlite", "postgresql", "mysql"):
        from django_distlock.models import HeldLock

        left = HeldLock.objects.using(registered.using).filter(key__startswith=key)
        assert left.count() == 0


def test_release_that_is_interrupted_does_not_hide_the_end(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it the deadline counts as before: nobody works under a lease that is over."""
    lease = distlock(key, backend="memory", ttl=0.3).acquire()
    with monkeypatch.context() as patched:
        # A signal's handler raises before anybody has got it.
        mutex = Mock(**{"acquire.side_effect": KeyboardInterrupt})
        patched.setattr(lease._holding, "mutex", mutex)
        with pytest.raises(KeyboardInterrupt):
            lease.release()
    assert lease.held
    assert eventually(lambda: lease.is_lost, timeout=3)


def test_release_that_ends_amid_a_look_is_a_clean_one(key: str) -> None:
    """Whoever looks behind the deadline has not lost what was released in time."""
    lease = lock_of(BACKENDS["memory"], key).acquire()
    holding: Any = lease._holding

    def is_over() -> bool:
        del holding.is_over
        assert lease.release() is True
        return True

    holding.is_over = is_over
    assert not lease.is_lost
    assert lease.is_released


def test_interrupted_end_amid_a_renewal_is_no_loss(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the renewal, which then finds that the key is free."""
    lock = lock_of(BACKENDS["memory"], key, ttl=0.6)
    store, begun, goes_on = lock_backends["memory"], threading.Event(), threading.Event()
    renew, told, answered = store.extend_many, Told(), threading.Event()

    def slow(grants: Any) -> Any:
        begun.set()
        assert goes_on.wait(20)
        answered.set()
        return renew(grants)

    monkeypatch.setattr(store, "extend_many", slow)

    def block() -> None:
        with lock as lease:
            lease.on_lost(told)
            assert begun.wait(20)

    with Heard(signals.lock_lost, key) as lost, Heard(signals.lock_released, key) as released:
        assert interrupt_at(1, block, cast("FunctionType", taking.leave))
        assert eventually(lambda: bool(released.facts))
        goes_on.set()
        assert answered.wait(20)
        assert not eventually(lambda: bool(lost.facts or told.leases), 0.5)
    assert [each["released"] for each in released.facts] == [True]
