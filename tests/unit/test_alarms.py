"""The thread that says when leases are over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from django_distlock import Lease, distlock
from django_distlock import alarms as module
from django_distlock.alarms import Alarms, alarms
from django_distlock.exits import held_here
from django_distlock.host import monotonic
from tests.contract.helpers import Later
from tests.contract.locking import eventually

from .test_heartbeat_thread import Interrupted, interrupted_starts, threads

#: What a busy machine may add to a time.
NOISE = 0.7


class Watched:
    """Something with an end, which notes when it was told."""

    def __init__(self, alarms: Alarms, at: float, *, broken: Exception | None = None):
        self.at = at
        self.told: list[float] = []
        self._alarms = alarms
        self._broken = broken

    def next_alarm(self) -> float:
        """Return when to be called."""
        return self.at

    def is_over(self) -> bool:
        """Only by its time."""
        return monotonic() >= self.at

    def alarm(self) -> None:
        """Note the call, and fail if that is what this one does."""
        self.told.append(monotonic())
        if self._broken is not None:
            raise self._broken
        self._alarms.drop(self)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarms]:
    """Give a timer for this test alone, whose thread ends soon."""
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.2)
    made = Alarms()
    yield made
    made._watched.clear()
    thread = made._thread
    assert thread is None or eventually(lambda: not thread.is_alive(), timeout=10)


def used_in(seconds: float) -> float:
    """Return the processor time that this process uses while nothing happens."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def test_each_is_told_at_its_time(made: Alarms) -> None:
    """In whatever order they came, none is told early, and none late."""
    now = monotonic()
    watched = [Watched(made, now + after) for after in (0.9, 0.3, 0.6)]
    for each in watched:
        made.watch(each)
    assert eventually(lambda: all(each.told for each in watched), timeout=5)
    for each in watched:
        assert 0 <= each.told[0] - each.at < NOISE
        assert len(each.told) == 1


def test_earlier_one_is_not_kept_waiting(made: Alarms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sleeps for the first one is woken for the second, which comes sooner."""
    monkeypatch.setattr(module, "LONGEST_WAIT", 60.0)
    late = Watched(made, monotonic() + 60)
    made.watch(late)
    assert eventually(lambda: made._looks_at > monotonic() + 30)
    soon = Watched(made, monotonic() + 0.2)
    made.watch(soon)
    assert eventually(lambda: bool(soon.told), timeout=5)
    assert soon.told[0] - soon.at < NOISE
    made.drop(late)
    made.watch(Watched(made, 0.0))  # Wakes the thread, which looks whether there is anything left.


def test_one_that_fails_costs_the_others_nothing(
    made: Alarms, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged, and the others are told. The one that failed is not asked again."""
    now = monotonic()
    broken = Watched(made, now + 0.1, broken=ZeroDivisionError())
    others = [Watched(made, now + after) for after in (0.1, 0.4)]
    with caplog.at_level(logging.ERROR, "django_distlock"):
        for each in (broken, *others):
            made.watch(each)
        assert eventually(lambda: all(each.told for each in others), timeout=5)
    assert "ZeroDivisionError" in caplog.text
    assert len(broken.told) == 1


def test_thread_ends_and_starts_again(made: Alarms) -> None:
    """With nothing to watch the thread ends; the next lease has one again."""
    for _ in range(2):
        watched = Watched(made, monotonic() + 0.1)
        made.watch(watched)
        thread = made._thread
        assert thread is not None
        assert thread.daemon
        assert eventually(lambda each=watched: bool(each.told), timeout=5)  # type: ignore[misc]
        assert eventually(lambda: made._thread is None, timeout=10)
        thread.join(5)
        assert not thread.is_alive()


def test_thread_that_could_not_be_started_is_started_next_time(
    made: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no thread to give, the next lease asks it again."""
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            made.watch(Watched(made, monotonic() + 0.1))
    watched = Watched(made, monotonic() + 0.1)
    made.watch(watched)
    assert eventually(lambda: bool(watched.told), timeout=3)


def test_thread_whose_start_was_interrupted_is_the_only_one(
    made: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's exception behind the start leaves no second timer."""
    before = threads("distlock-alarms")
    with interrupted_starts(monkeypatch), pytest.raises(Interrupted):
        made.watch(Watched(made, monotonic() + 30))
    watched = Watched(made, monotonic() + 0.1)
    made.watch(watched)
    assert eventually(lambda: bool(watched.told), timeout=3)
    assert len(threads("distlock-alarms")) == len(before) + 1


def no_thread(*_: object) -> None:
    """Fail as the system does that is out of threads."""
    raise RuntimeError("can't start new thread")


def test_nothing_is_told_of_what_was_dropped(made: Alarms) -> None:
    """Who was released in time hears nothing."""
    watched = Watched(made, monotonic() + 0.3)
    made.watch(watched)
    made.drop(watched)
    assert not eventually(lambda: bool(watched.told), timeout=0.6)


def test_idle_thread_uses_no_processor(made: Alarms) -> None:
    """While nothing is due the thread sleeps."""
    many = [Watched(made, monotonic() + 60 + number) for number in range(100)]
    for each in many:
        made.watch(each)
    assert used_in(1.0) < 0.5
    for each in many:
        made.drop(each)


def test_lease_released_while_it_is_watched_anew_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An extend whose lease another thread releases leaves nothing that the timer asks for ever."""
    lease = distlock("alarms:extended and released", backend="memory", ttl=0.5).acquire()
    lease.on_lost(print)
    watch = alarms.watch

    def released_meanwhile(watched: module.Watched) -> None:
        monkeypatch.undo()
        assert Later(lease.release).result() is True
        watch(watched)

    monkeypatch.setattr(alarms, "watch", released_meanwhile)
    lease.extend()
    assert lease.is_released
    assert_forgotten(lease)


def assert_forgotten(lease: Lease) -> None:
    """Check that the timer's thread does nothing about a lease any more."""
    try:
        assert eventually(lambda: id(lease) not in alarms._watched, timeout=3)
        assert used_in(1.0) < 0.5
    finally:
        alarms.drop(lease)


def test_lease_that_ends_while_it_is_watched_anew_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same for one that the timer finds over just then."""
    lease = distlock("alarms:extended and lost", backend="memory", ttl=0.3).acquire()
    told: list[object] = []
    lease.on_lost(told.append)
    watch = alarms.watch

    def over_meanwhile(watched: module.Watched) -> None:
        monkeypatch.undo()
        assert eventually(lambda: bool(told), timeout=5)
        watch(watched)

    monkeypatch.setattr(alarms, "watch", over_meanwhile)
    lease.extend()
    assert_forgotten(lease)
    assert told == [lease]
    lease.release()


def test_housekeeping_among_many_leases_costs_no_loss() -> None:
    """A process with many leases forgets those that are over, and not what has yet to be told."""
    lease = distlock("alarms:swept", backend="memory", ttl=0.2).acquire()
    told: list[object] = []
    lease.on_lost(told.append)
    with alarms._changed:  # The timer's thread is a moment late.
        time.sleep(0.3)
        held_here._sweep()
    assert eventually(lambda: told == [lease], timeout=3)
