"""What a beat knows of the others: the marks of entries, and the options of the scheduler."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab
from django.conf import settings
from django.test import override_settings

from django_distlock import InvalidArgument, InvalidLockBackend, LockNotAcquired, distlock
from django_distlock.contrib.celery import beats
from django_distlock.contrib.celery.beats import Mark, Marks, Moved, mark_key
from django_distlock.contrib.celery.scheduler import AGAIN, DistlockScheduler, _reserve_numbers
from django_distlock.core.keys import own_key
from django_distlock.core.records import Grant, Record
from django_distlock.handler import lock_backends
from django_distlock.testing import lose_connection
from tests.contract.helpers import Later, held, there
from tests.processes import spawn

from .beat_processes import eventually

RAN: list[str] = []
#: Seconds between two ticks: many, so that a test has to do with one of them.
EVERY = 30.0


def ran(name: str) -> None:
    """Be the task."""
    RAN.append(name)


@pytest.fixture(params=["postgres", "redis"])
def alias(request: pytest.FixtureRequest) -> str:
    """Give a store in turn."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def make(tmp_path: Path, key: str, alias: str) -> Iterator[Callable[..., DistlockScheduler]]:
    """Give a way to make beats, whose tasks run where they are sent."""
    RAN.clear()
    made: list[DistlockScheduler] = []

    def make(
        *names: str, kind: type[DistlockScheduler] = DistlockScheduler, **conf: Any
    ) -> DistlockScheduler:
        app = Celery("marks", broker="memory://", set_as_current=False)
        app.task(name="marks.ran")(ran)
        app.conf.update(
            task_always_eager=True,
            beat_distlock_key=key,
            beat_distlock_backend=alias,
            beat_schedule={
                name: {"task": "marks.ran", "schedule": EVERY, "args": [name]} for name in names
            },
            **conf,
        )
        file = tmp_path / f"schedule-{len(made)}"
        made.append(kind(app=app, schedule_filename=str(file), max_interval=1))
        return made[-1]

    yield make
    for each in made:
        each.close()


def make_due(beat: DistlockScheduler, *names: str) -> None:
    """Let it be so long ago that entries were sent, for all who have not looked yet."""
    store = beat._marks._store
    for name in names:
        store.force_release(mark_key(beat._marks._key, name))
        beat.schedule[name].last_run_at -= timedelta(seconds=EVERY + 5)


def run(beat: DistlockScheduler, ticks: int = 6) -> None:
    """Let a beat do what is to be done now."""
    for _ in range(ticks):
        beat.tick()


def test_move_without_an_answer_is_made_again(make: Callable[..., DistlockScheduler]) -> None:
    """The store has moved the mark, the beat does not know it: the tick is sent, and once."""
    beat = make("a")
    make_due(beat, "a")
    alias = beat._marks._store.alias
    learned = beats.Marks.move

    def move(marks: Marks, name: str, sent_at: datetime) -> None:
        with lose_connection(alias, answers=False):
            learned(marks, name, sent_at)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(beats.Marks, "move", move)
        assert [beat.tick(), beat.tick()] == [AGAIN, AGAIN]
    assert RAN == []
    run(beat)
    assert RAN == ["a"]
    assert mark_of(beat).runs == 1


def test_mark_that_was_moved_is_not_sent(make: Callable[..., DistlockScheduler]) -> None:
    """Another beat has sent it behind our look: we look again, and leave it."""
    beat = make("a", "b")
    make_due(beat, "a", "b")
    marks, key = beat._marks, beat._marks._key
    other = Marks(marks._store, key)
    move = marks.move

    def overtaken(name: str, sent_at: datetime) -> None:
        if name == "a" and other.get("a") is None:
            other.learn("a", sent_at, 0)
            other.move("a", sent_at)
        move(name, sent_at)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(marks, "move", overtaken)
        run(beat)
    assert RAN == ["b"]
    assert beat.schedule["a"].total_run_count == 1


def test_one_of_two_moves_a_mark(key: str, alias: str) -> None:
    """Both have read the same: the store lets one of them send."""
    store, now = lock_backends[alias], datetime.now(UTC)
    first, second = Marks(store, key), Marks(store, key)
    for each in (first, second):
        each.learn("a", now, 0)
    first.move("a", now + timedelta(seconds=5))
    with pytest.raises(Moved):
        second.move("a", now + timedelta(seconds=5))
    second.learn("a", now - timedelta(days=1), 0)
    mark = there(second.get("a"))
    assert (mark.sent_at, mark.runs) == (now + timedelta(seconds=5), 1)


def mark_of(beat: DistlockScheduler) -> Mark:
    """Return what a beat knows of the sending of its entry."""
    return there(beat._marks.get("a"))


def stored(beat: DistlockScheduler) -> Record:
    """Return the mark of its entry, as the store has it."""
    return held(beat._marks._store, mark_key(beat._marks._key, "a"))


def sent_by_a_clock_ahead(beat: DistlockScheduler, name: str, ahead: timedelta) -> None:
    """Let the entry have been sent just now, by a beat that is gone and whose clock was ahead."""
    marks = Marks(beat._marks._store, beat._marks._key)
    now = datetime.now(UTC)
    marks.learn(name, now, 0)
    marks.move(name, now + ahead)


@pytest.mark.parametrize("ahead", [timedelta(minutes=5), timedelta(days=400)])
def test_clock_that_was_ahead_silences_nobody(
    make: Callable[..., DistlockScheduler], caplog: pytest.LogCaptureFixture, ahead: timedelta
) -> None:
    """The successor goes on an interval behind the last sending, and says whose clock it was."""
    beat = make("a")
    beat.schedule["a"].schedule.run_every = timedelta(seconds=2)
    began = time.monotonic()
    sent_by_a_clock_ahead(beat, "a", ahead)
    eventually(lambda: beat.tick() is not None and RAN, "it is sent", 20)
    assert time.monotonic() - began >= 2
    said = [
        each for each in caplog.records if getattr(each, "distlock_event", "") == "clock_differs"
    ]
    assert len(said) == 1
    assert f"the beat on {socket.gethostname()} sent 'a'" in said[0].getMessage()


def test_tick_that_was_sent_early_is_not_sent_again(make: Callable[..., DistlockScheduler]) -> None:
    """A nightly job ran before its time: tonight's was that, and tomorrow's is not waived."""
    beat = make("a")
    soon = datetime.now(UTC) + timedelta(minutes=3)
    nightly = crontab(minute=soon.minute, hour=soon.hour, app=beat.app)
    entry = beat.schedule["a"]
    entry.schedule = nightly
    for ahead in (timedelta(minutes=5), timedelta(days=400)):
        beat._marks.forget()
        sent_by_a_clock_ahead(beat, "a", ahead)
        beat._learn(entry)
        tonight = soon.replace(second=0, microsecond=0)
        assert tonight <= entry.last_run_at < tonight + timedelta(hours=1)
        assert not entry.is_due()[0]
        assert entry.schedule.remaining_delta(entry.last_run_at)[1].hour == soon.hour


def test_clock_of_this_host_that_is_ahead_repeats_nothing(
    make: Callable[..., DistlockScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beat that begins again reads its own marks as it wrote them."""
    beat = make("a")
    ahead = timedelta(minutes=5)
    monkeypatch.setattr(beats, "_now", lambda: datetime.now(UTC) + ahead)
    sent_by_a_clock_ahead(beat, "a", ahead)
    beat._learn(beat.schedule["a"])
    mark = mark_of(beat)
    assert timedelta() <= mark.made_at - mark.sent_at < ahead
    assert beat._sent_at(beat.schedule["a"], mark) == mark.sent_at


def test_paused_entry_stands_in_nobodys_way(make: Callable[..., DistlockScheduler]) -> None:
    """An operator pauses its mark: the others are sent, and it is sent when that is over."""
    beat = make("a", "b")
    make_due(beat, "a", "b")
    store, key = beat._marks._store, mark_key(beat._marks._key, "a")
    store.pause(key, datetime.now(UTC) + timedelta(minutes=5), "somebody")
    run(beat)
    assert RAN == ["b"]
    store.pause(key, None)
    eventually(lambda: beat.tick() is not None and "a" in RAN, "it is sent")
    assert RAN == ["b", "a"]


def test_marks_that_were_lost_come_back(make: Callable[..., DistlockScheduler]) -> None:
    """The leader knows when it sent what: a store that forgot is told so."""
    beat = make("a")
    make_due(beat, "a")
    run(beat)
    before = stored(beat)
    beat._marks._store.force_release(before.key)
    beat._marks._renew_at = 0.0
    run(beat)
    assert stored(beat).holder.metadata == before.holder.metadata
    assert RAN == ["a"]


def test_marks_are_renewed(make: Callable[..., DistlockScheduler]) -> None:
    """What is sent once a month stays known, as long as somebody leads."""
    beat = make("a")
    run(beat)
    mark = stored(beat)
    store = beat._marks._store
    assert store.extend(Grant(mark.key, mark.token, mark.fence, 100, mark.acquired_at, None))
    beat._marks._renew_at = 0.0
    run(beat)
    expires_at = there(stored(beat).expires_at)
    assert expires_at - datetime.now(UTC) > timedelta(days=6)


def leave_mark(key: str, alias: str) -> None:
    """Be a beat that knows how often an entry was sent, and ends."""
    Marks(lock_backends[alias], key).learn("a", datetime.now(UTC), 3)


def test_mark_is_not_taken_from_a_beat_that_is_gone(key: str, alias: str) -> None:
    """Whoever may take what a dead process held does not get it, and the next beat reads it."""
    with spawn("tests.celery.test_beat_marks:leave_mark", key, alias) as process:
        process.result()
    name = own_key(mark_key(key, "a"))
    lock = distlock(name, backend=alias, ttl=60, wait=0, steal_if_dead=True)
    with pytest.raises(LockNotAcquired):
        lock.acquire()
    marks = Marks(lock_backends[alias], key)
    marks.learn("a", datetime.now(UTC), 0)
    assert there(marks.get("a")).runs == 3


def test_second_beat_stands_by_and_says_whom_it_waits_for(
    make: Callable[..., DistlockScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    """It sends nothing, says so once, and leads as soon as the first is closed."""
    caplog.set_level(logging.INFO, "django_distlock")
    first, second = make("a"), make("a")
    run(first)
    make_due(second, "a")
    Later(run, second, 2).result()
    assert RAN == []
    said = [each.message for each in caplog.records if "stands by" in each.message]
    assert len(said) == 1
    assert "(pid " in said[0]
    first.close()
    run(second)
    assert RAN == ["a"]


def test_second_beat_pauses_though_its_attempts_end_at_once(
    make: Callable[..., DistlockScheduler], alias: str
) -> None:
    """With a `RETRY` that allows few attempts, it asks once a second and not all the time."""
    few = {**settings.DISTLOCK[alias], "RETRY": {"max_retries": 0}}
    with override_settings(DISTLOCK={**settings.DISTLOCK, alias: few}):
        first, second = make("a"), make("a")
        run(first)
        assert Later(second.tick).result() == AGAIN
        first.close()
        second.close()


class Ended(DistlockScheduler):
    """A beat that is ended by a signal while it sends, as `celery beat` does it."""

    held = None

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Be the handler of the signal."""
        self.close()
        self.held = self._leadership.held
        raise SystemExit


def test_signal_amid_a_tick_waits_for_its_end(make: Callable[..., DistlockScheduler]) -> None:
    """The store is not asked while it may be asked already; the second close gives up."""
    beat = make("a", kind=Ended)
    make_due(beat, "a")
    with pytest.raises(SystemExit):
        run(beat)
    assert beat.held is True
    beat.close()
    assert not beat._leadership.held
    assert not distlock(beat._marks._key, backend=beat._marks._store.alias).locked()


def test_scheduler_to_look_at_asks_no_store(tmp_path: Path, key: str) -> None:
    """What `celery beat` makes for its banner neither locks nor needs a backend."""
    with override_settings(DISTLOCK={}):
        beat = DistlockScheduler(
            Celery("x", set_as_current=False), schedule_filename=str(tmp_path / "s"), lazy=True
        )
        assert str(tmp_path) in beat.info
        beat.close()


@pytest.mark.parametrize(
    ("conf", "error", "what"),
    [
        ({"beat_distlock_backend": "memory"}, InvalidLockBackend, "MemoryBackend cannot choose"),
        ({"beat_distlock_backend": "advisory"}, InvalidLockBackend, "in a database or in Redis"),
        ({"beat_distlock_backend": "nobody"}, InvalidLockBackend, "nobody"),
        ({"beat_distlock_ttl": 0}, InvalidArgument, "ttl"),
        ({"beat_distlock_key": "x" * 500}, InvalidArgument, "512 bytes"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, conf: dict[str, Any], error: type[Exception], what: str
) -> None:
    """They are refused where beat starts, and named."""
    app = Celery("options", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    with pytest.raises(error, match=what):
        DistlockScheduler(app=app, schedule_filename=str(tmp_path / "schedule"))


@pytest.mark.parametrize(
    ("name", "key"), [("shop", own_key("celery-beat:shop")), (None, own_key("celery-beat:celery"))]
)
def test_default_options(tmp_path: Path, name: str | None, key: str) -> None:
    """Each app has a leader of its own, on the default backend and with its ttl."""
    app = Celery(name, broker="memory://", set_as_current=False)
    beat = DistlockScheduler(app=app, schedule_filename=str(tmp_path / "schedule"))
    lock = beat._leadership._lock
    assert (lock.key, lock.backend, lock.ttl) == (key, "default", None)
    assert lock.metadata == {"role": "leader"}
    beat.close()


def test_keys_of_marks() -> None:
    """No two entries have one key, and whatever name Celery takes fits."""
    assert mark_key("beat", "report") == own_key("beat:sent:report")
    pairs = [("a", "b:sent:c"), ("a:sent:b", "c"), ("a", "b%3Asent%3Ac"), ("a", "ä" * 600)]
    names = ["ä" * 601, "\u00e4", "a\u0308", "\0", "\ud800", "", 1]
    keys = [mark_key(*pair) for pair in [*pairs, *(("a", name) for name in names)]]
    assert len(set(keys)) == len(keys)
    assert all(len(each.encode()) <= 512 for each in keys)


def test_time_of_a_mark_is_that_of_the_app(make: Callable[..., DistlockScheduler]) -> None:
    """Celery reads the hours of a crontab from the last run: they are those of its time zone."""
    beat = make("a", timezone="Asia/Tokyo")
    make_due(beat, "a")
    began = time.time()
    run(beat)
    beat.is_due(beat.schedule["a"])
    last = beat.schedule["a"].last_run_at
    assert last.utcoffset() == timedelta(hours=9)
    assert began - 1 < last.timestamp() < time.time() + 1


def use_numbers() -> dict[str, bool]:
    """Own files that somebody has closed by their numbers; say if ours outlive their ends."""
    return {"as they are": _outlives(reserved=False), "reserved": _outlives(reserved=True)}


def _outlives(*, reserved: bool) -> bool:
    reads, _writes = os.pipe()
    stale = os.fdopen(reads)
    os.close(reads)
    if reserved:
        _reserve_numbers()
    ours = os.open(os.devnull, os.O_RDONLY)
    with contextlib.suppress(OSError):
        stale.close()
    try:
        os.fstat(ours)
    except OSError:
        return False
    return True


def test_numbers_of_a_workers_files_are_not_used() -> None:
    """In `celery worker -B`, what Celery has closed by its number closes no connection of ours."""
    with spawn("tests.celery.test_beat_marks:use_numbers") as process:
        assert process.result() == {"as they are": False, "reserved": True}
