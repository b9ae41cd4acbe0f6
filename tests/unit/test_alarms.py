"""The thread that says when leases are over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from django_distlock import distlock
from django_distlock.core.clock import monotonic
from django_distlock.process import heartbeat as module
from django_distlock.process.heartbeat import Alarms, alarms, held_here
from tests.contract.helpers import Later
from tests.contract.locking import eventually

from .test_heartbeat_thread import Interrupted, interrupted_starts, no_thread, threads


class Watched:
    """Something with an end, which notes in a list when it was told."""

    def __init__(self, alarms: Alarms, after: float, *, broken: Exception | None = None):
        self.at = monotonic() + after
        self.told: list[float] = []
        self._alarms = alarms
        self._broken = broken
        alarms.add(self)

    def alarm_in(self) -> float:
        """Return in how many seconds to be called."""
        return self.at - monotonic()

    def is_over(self) -> bool:
        """Only by its time."""
        return monotonic() >= self.at

    def alarm(self) -> None:
        """Note the call, and fail if that is what this one does."""
        self.told.append(monotonic())
        if self._broken is not None:
            raise self._broken
        self._alarms.discard(self)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarms]:
    """Give a timer for this test alone, whose thread ends soon."""
    monkeypatch.setattr(Alarms, "linger", 0.2)
    made = Alarms()
    yield made
    made._leases.clear()
    thread = made._thread
    assert thread is None or eventually(lambda: not thread.is_alive())


def used_in(seconds: float) -> float:
    """Return the processor time that this process uses while nothing happens."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def test_each_is_told_at_its_time(made: Alarms) -> None:
    """In whatever order they came: each once, none early, and none behind a later one."""
    watched = [Watched(made, after) for after in (0.9, 0.3, 0.6)]
    assert eventually(lambda: all(each.told for each in watched))
    assert all(len(each.told) == 1 and each.told[0] >= each.at for each in watched)
    in_order = sorted(watched, key=lambda each: each.at)
    for sooner, later in pairwise(in_order):
        # Whoever looks late, where the machine stood still, finds several at once.
        assert sooner.told[0] < later.told[0] or sooner.told[0] >= later.at


def test_earlier_one_is_not_kept_waiting(made: Alarms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sleeps for the first one is woken for the second, which comes sooner."""
    monkeypatch.setattr(Alarms, "longest_wait", 60.0)
    late = Watched(made, 60)
    assert eventually(lambda: made._looks_at > monotonic() + 30)
    soon = Watched(made, 0.2)
    assert eventually(lambda: bool(soon.told))
    assert not late.told
    made.discard(late)
    Watched(made, -1)  # Wakes the thread, which looks whether there is anything left.


def test_one_that_fails_costs_the_others_nothing(
    made: Alarms, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged, and the others are told. The one that failed is not asked again."""
    with caplog.at_level(logging.ERROR, "django_distlock"):
        broken = Watched(made, 0.1, broken=ZeroDivisionError())
        others = [Watched(made, after) for after in (0.1, 0.4)]
        assert eventually(lambda: all(each.told for each in others))
    assert "ZeroDivisionError" in caplog.text
    assert len(broken.told) == 1


def test_thread_ends_and_starts_again(made: Alarms) -> None:
    """With nothing to watch the thread ends; the next lease has one again."""
    for _ in range(2):
        watched = Watched(made, 0.1)
        thread = made._thread
        assert thread is not None
        assert thread.daemon
        thread.join(20)
        assert not thread.is_alive()
        assert watched.told
        assert made._thread is None


def test_thread_that_could_not_be_started_is_started_next_time(
    made: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no thread to give, the next lease asks it again."""
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            Watched(made, 0.1)
    watched = Watched(made, 0.1)
    assert eventually(lambda: bool(watched.told))


def test_thread_whose_start_was_interrupted_is_the_only_one(
    made: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's exception behind the start leaves no second timer."""
    before = threads("distlock-alarms")
    with interrupted_starts(monkeypatch), pytest.raises(Interrupted):
        Watched(made, 30)
    watched = Watched(made, 0.1)
    assert eventually(lambda: bool(watched.told))
    assert len({*threads("distlock-alarms")} - {*before}) == 1


def test_thread_that_is_about_to_end_sees_what_comes_meanwhile(made: Alarms) -> None:
    """Whoever adds something looks only whether the thread is there."""
    own = threading.Thread()
    made._thread = own
    watched = object.__new__(Watched)
    made._leases[watched] = None
    assert made._retires() is False
    assert made._thread is own
    made._leases.clear()
    assert made._retires() is True
    assert made._thread is None


def test_nothing_is_told_of_what_was_dropped(made: Alarms) -> None:
    """Who was released in time hears nothing."""
    dropped, later = Watched(made, 0.3), Watched(made, 0.4)
    made.discard(dropped)
    assert eventually(lambda: bool(later.told))
    assert not dropped.told


def test_idle_thread_uses_no_processor(made: Alarms) -> None:
    """While nothing is due the thread sleeps."""
    many = [Watched(made, 60 + number) for number in range(100)]
    assert used_in(1.0) < 0.5
    for each in many:
        made.discard(each)


@pytest.mark.parametrize("how", ["released", "over"])
def test_lease_that_ends_while_it_is_watched_anew_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An extend leaves nothing that the timer asks for ever, whoever ends the lease just then."""
    lease = distlock("alarms:extended", backend="memory", ttl=2).acquire()
    told: list[object] = []
    lease.on_lost(told.append)
    watch = alarms.add

    def ended_meanwhile(watched: module.Watched) -> None:
        monkeypatch.undo()
        if how == "released":
            assert Later(lease.release).result() is True
        else:
            assert eventually(lambda: bool(told))
        watch(watched)

    monkeypatch.setattr(alarms, "add", ended_meanwhile)
    lease.extend()
    try:
        assert eventually(lambda: lease._holding not in alarms._leases)
        assert used_in(1.0) < 0.5
    finally:
        alarms.discard(lease._holding)
    assert lease.is_released is (how == "released")
    assert told == ([] if how == "released" else [lease])
    lease.release()


def test_housekeeping_among_many_leases_costs_no_loss() -> None:
    """A process with many leases forgets those that are over, and not what has yet to be told."""
    lease = distlock("alarms:swept", backend="memory", ttl=0.2).acquire()
    told: list[object] = []
    lease.on_lost(told.append)
    with alarms._changed:  # The timer's thread is a moment late.
        over = monotonic() + 0.3
        while monotonic() < over:
            time.sleep(0.01)
        held_here._sweep()
    assert eventually(lambda: told == [lease])
