"""The thread that renews leases."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from django_distlock.backends.memory import MemoryBackend
from django_distlock.conf import BackendConfig
from django_distlock.core import threads as threads_module
from django_distlock.core.clock import monotonic
from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Unknown
from django_distlock.core.threads import Bell
from django_distlock.process.heartbeat import LAG_SECONDS, Answer, Heartbeat, Renewing, heartbeat_of
from tests.contract.locking import eventually

INTERVAL = 0.2


class Memory(MemoryBackend):
    """Locks in memory, whose renewals a test can count, and spoil."""

    def __init__(self) -> None:
        super().__init__(BackendConfig(alias="heart"))
        self.beats: list[int] = []
        #: What comes in between: an error, a stop until somebody lets it go on, or nothing.
        self.troubles: list[Exception | threading.Event | None] = []

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        self.beats.append(len(named))
        trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, Exception):
            raise trouble
        if trouble is not None:
            trouble.wait(20)
        return super()._extend_many(named)


class Leased:
    """Something to renew, which notes what it was answered."""

    def __init__(self, backend: Memory, *, broken: bool = False):
        grant = backend.acquire(f"heart:{new_token()}", new_token(), 30)
        assert isinstance(grant, Grant)
        self.grant = grant
        self.renewing = Renewing(INTERVAL / 30)
        self.renewing.renewed(monotonic(), 30)
        self.answers: list[Answer] = []
        self.taken = False
        self._broken = broken

    def begin_renewal(self) -> Grant | None:
        """Return what to extend."""
        self.taken = True
        return self.grant

    def end_renewal(self, sent_at: float, answer: Answer) -> None:
        """Note the answer, and fail if that is what this one does."""
        self.taken = False
        self.answers.append(answer)
        self.renewing.renewed(sent_at, 30)
        if self._broken:
            raise RuntimeError("can't start new thread")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """Give a store for this test alone, whose heartbeat ends soon."""
    monkeypatch.setattr(Heartbeat, "linger", 0.2)
    made = Memory()
    heartbeat = heartbeat_of(made)
    yield made
    heartbeat._leases.clear()
    thread = heartbeat._thread
    assert thread is None or eventually(lambda: not thread.is_alive())


@pytest.fixture
def heartbeat(memory: Memory) -> Heartbeat:
    """Give the heartbeat of that store."""
    return heartbeat_of(memory)


def test_leases_share_a_round_trip(memory: Memory, heartbeat: Heartbeat) -> None:
    """What was taken one after the other comes to be renewed at once."""
    for _ in range(50):
        heartbeat.add(Leased(memory))
        time.sleep(INTERVAL / 25)
    assert eventually(lambda: memory.beats[-3:] == [50, 50, 50])


def test_many_leases_take_several_round_trips(memory: Memory, heartbeat: Heartbeat) -> None:
    """No round trip carries more than a thousand."""
    for _ in range(2500):
        leased = Leased(memory)
        leased.renewing.due_at = 0.0
        heartbeat._leases[leased] = None
    heartbeat.beat()
    assert memory.beats == [1000, 1000, 500]


def test_failure_counts_its_leases(
    memory: Memory, heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    """One is no several."""
    some = [Leased(memory) for _ in range(2)]
    memory.troubles = [BackendUnavailable("no"), ZeroDivisionError(), BackendUnavailable("no")]
    for leases in (some[:1], some[:1], some):
        heartbeat.renew(leases)
    said = [each.getMessage() for each in caplog.records]
    assert said == [
        "1 lease could not be renewed: no",
        "1 lease could not be renewed",
        "2 leases could not be renewed: no",
    ]


def test_thread_ends_and_starts_again(memory: Memory, heartbeat: Heartbeat) -> None:
    """With the last lease the thread ends, some seconds later; the next lease has one again."""
    for _ in range(2):
        leased = Leased(memory)
        heartbeat.add(leased)
        thread = heartbeat._thread
        assert thread is not None
        assert thread.daemon
        assert eventually(lambda each=leased: bool(each.answers))  # type: ignore[misc]
        heartbeat.discard(leased)
        thread.join(20)
        assert not thread.is_alive()
        assert heartbeat._thread is None


def test_thread_that_could_not_be_started_is_started_next_time(
    memory: Memory, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system has no thread to give, the next lease asks it again."""
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            heartbeat.add(Leased(memory))
    leased = Leased(memory)
    heartbeat.add(leased)
    assert eventually(lambda: bool(leased.answers))


def test_thread_whose_start_was_interrupted_is_the_only_one(
    memory: Memory, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's exception behind the start leaves no second thread to renew the same leases."""
    with interrupted_starts(monkeypatch), pytest.raises(Interrupted):
        heartbeat.add(Leased(memory))
    leased = Leased(memory)
    heartbeat.add(leased)
    assert eventually(lambda: bool(leased.answers))
    assert threads(heartbeat._name) == [heartbeat._thread]


def threads(name: str) -> list[threading.Thread]:
    """Return the threads of this name that run."""
    return [each for each in threading.enumerate() if each.name == name]


class Interrupted(BaseException):
    """What a signal's handler raises."""


@contextmanager
def interrupted_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let whoever starts a thread be interrupted once it has started."""

    class Interrupting(Bell):
        def wait(self, seconds: float) -> None:
            super().wait(seconds)
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(threads_module, "Bell", Interrupting)
        yield


def no_thread(*_: object) -> None:
    """Fail as the system does that is out of threads."""
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    "trouble",
    [BackendUnavailable("The store is away."), ZeroDivisionError("a defect"), OSError("a driver")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_store_raises_is_an_answer(
    memory: Memory,
    heartbeat: Heartbeat,
    trouble: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each lease gets to know that its renewal failed, it is logged, and the next beat comes."""
    leases = [Leased(memory) for _ in range(3)]
    memory.troubles = [trouble]
    with caplog.at_level(logging.WARNING, "django_distlock"):
        for each in leases:
            heartbeat.add(each)
        assert eventually(lambda: all(len(each.answers) >= 2 for each in leases))
    failed = [each.answers[0] for each in leases]
    assert all(isinstance(answer, Exception) and str(trouble) in str(answer) for answer in failed)
    assert all(isinstance(each.answers[-1], Grant) for each in leases)
    assert str(trouble) in caplog.text


def test_lease_that_fails_to_take_its_answer_costs_the_others_nothing(
    memory: Memory, heartbeat: Heartbeat
) -> None:
    """Each lease that a beat has begun to renew is told the answer: it is kept from others."""
    leases = [Leased(memory), Leased(memory, broken=True), Leased(memory)]
    for each in leases:
        heartbeat.add(each)
    assert eventually(lambda: all(each.answers for each in leases))
    assert eventually(lambda: len(leases[-1].answers) >= 3)
    for each in leases:
        heartbeat.discard(each)
    assert eventually(lambda: not any(each.taken for each in leases))


def test_lag_grows_while_a_beat_hangs(memory: Memory, heartbeat: Heartbeat) -> None:
    """How late renewals are can be seen, also before the beat that is late has ended."""
    leased, goes_on = Leased(memory), threading.Event()
    memory.troubles = [None, goes_on]
    heartbeat.add(leased)
    assert eventually(lambda: len(memory.beats) == 2)
    before = heartbeat.lag
    assert eventually(lambda: heartbeat.lag > before + 0.3)
    assert len(leased.answers) == 1
    goes_on.set()


def test_lag_is_told_for_a_minute(heartbeat: Heartbeat) -> None:
    """So that a scrape sees it; and not for ever where nothing is renewed any more."""
    now = monotonic()
    heartbeat._note_lag(now, now - 8)
    heartbeat._note_lag(now, now)
    assert heartbeat.lag == 8
    heartbeat._lag_since -= LAG_SECONDS
    assert heartbeat.lag == 0


def test_sooner_lease_is_not_kept_waiting(
    memory: Memory, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sleeps for one lease is woken for another that is due sooner."""
    monkeypatch.setattr(Heartbeat, "longest_wait", 60)
    late = Leased(memory)
    late.renewing.due_at, late.renewing.interval = monotonic() + 50, 60
    heartbeat.add(late)
    assert eventually(lambda: heartbeat._looks_at > monotonic() + 30)
    soon = Leased(memory)
    heartbeat.add(soon)
    assert eventually(lambda: bool(soon.answers))
    assert late.answers == []
    heartbeat.discard(late)


def test_lease_that_became_due_in_a_suspend_is_not_kept_waiting(
    memory: Memory, heartbeat: Heartbeat
) -> None:
    """The clock of the thread's wait stands still then, and that of the leases does not."""
    leased = Leased(memory)
    leased.renewing.due_at, leased.renewing.interval = monotonic() + 50, 60
    heartbeat.add(leased)
    assert eventually(lambda: heartbeat._looks_at < math.inf)
    leased.renewing.due_at = monotonic()
    assert eventually(lambda: bool(leased.answers), 5)
    heartbeat.discard(leased)


def test_backend_that_nobody_uses_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that has ended holds on to no backend."""
    monkeypatch.setattr(Heartbeat, "linger", 0.1)

    def use() -> weakref.ref[Memory]:
        memory = Memory()
        heartbeat, leased = heartbeat_of(memory), Leased(memory)
        heartbeat.add(leased)
        assert eventually(lambda: bool(leased.answers))
        heartbeat.discard(leased)
        assert eventually(lambda: heartbeat._thread is None)
        return weakref.ref(memory)

    reference = use()
    gc.collect()
    assert reference() is None


class Failing(Leased):
    """Counts failures as a lease does: by the time of each beat."""

    is_lost = False

    def end_renewal(self, sent_at: float, answer: Answer) -> None:
        """Lose the lease by one failure too many."""
        if isinstance(answer, Grant):
            self.renewing.renewed(sent_at, 30)
        else:
            self.is_lost = self.renewing.failed(sent_at)


def test_failures_next_to_other_leases_are_not_counted_faster(
    memory: Memory, heartbeat: Heartbeat
) -> None:
    """Beats that others need do not use up the failures that a lease is allowed."""
    leases = [Failing(memory) for _ in range(4)]
    for number, each in enumerate(leases):
        each.renewing.renewed(number * INTERVAL / 4, 30)
    # Without its thread: this one says what time it is.
    heartbeat._leases = dict.fromkeys(leases)
    memory.troubles += [BackendUnavailable("away") for _ in range(3)]
    while memory.troubles:
        now = min(each.renewing.due_at for each in leases)
        heartbeat._clock = partial(float, now)
        heartbeat.beat(early=True)
    assert [each.is_lost for each in leases] == [False] * 4
    assert max(each.renewing.failures for each in leases) == 2
