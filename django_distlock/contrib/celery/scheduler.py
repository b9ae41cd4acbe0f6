"""Schedulers for `celery beat`, of which many may run and one schedules."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import django
from billiard.process import current_process
from celery.beat import PersistentScheduler, event_t
from celery.schedules import schedule as interval
from celery.utils.time import maybe_make_aware
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

from ...core.errors import BackendUnavailable
from ...core.holders import LEADER
from ...core.keys import own_key
from ...exceptions import InvalidLockBackend
from ...handler import lock_backends
from ...leading import Leadership
from ...locks.lock import distlock
from .beats import Mark, Marks, Moved, NotNow, mark_key

#: Seconds that a beat which stands by waits in one go, and that a leader sleeps at most.
PATIENCE: Final = 5.0
#: Seconds until what failed is tried again.
AGAIN: Final = 1.0
#: By how much django-celery-beat lets a row count from before it was changed, if it was not run
#: since, and has a time to start at.
_BEFORE_ITS_START: Final = timedelta(days=365 * 30)


class _Later(Exception):
    """Nothing was sent, and the entry is in its new place."""


class OneLeader:
    """What makes a scheduler one of many, of which the leader alone schedules.

    Mixed into a `celery.beat.Scheduler`. Its options are settings of the Celery app:

    - `beat_distlock_key`: What the leader holds; "〈celery-beat:" and the app's name if left out.
    - `beat_distlock_ttl`: Seconds (or a `timedelta`) until a dead leader's lease ends; the `TTL` of
      the lock backend if left out. Another beat leads a second after that.
    - `beat_distlock_backend`: An alias in `DISTLOCK`; "default" if left out.

    Raises:
        InvalidLockBackend: The backend is not configured, or its locks are of this process or
            of a session alone.
        InvalidArgument: Another option breaks a rule.
    """

    if TYPE_CHECKING:
        app: Any
        schedule: Any
        max_interval: float
        producer: Any
        _when: Any

    _leadership: Leadership
    _block: ExitStack
    _marks: Marks
    _heap: list[Any] | None
    #: Celery makes schedulers only to look at them, too.
    _can_lead = False
    _is_busy = False

    def setup_schedule(self) -> None:
        """Prepare to lead. Nothing is locked yet."""
        if not apps.ready:
            django.setup()
        if getattr(current_process(), "_parent_pid", None) is not None:
            _reserve_numbers()
        conf = self.app.conf
        key = conf.get("beat_distlock_key") or own_key(f"celery-beat:{self.app.main or 'celery'}")
        alias = conf.get("beat_distlock_backend") or "default"
        store = lock_backends[alias]
        if not (store.distributed and store.supports_ttl):
            raise InvalidLockBackend(
                f"DISTLOCK[{alias!r}]: {type(store).__name__} cannot choose a leader among beats:"
                " set beat_distlock_backend to a backend in a database or in Redis, whose leases"
                " expire."
            )
        ttl = conf.get("beat_distlock_ttl")
        lock = distlock(key, ttl=ttl, backend=alias, metadata=dict(LEADER))
        mark_key(lock.key, "x" * 1000)  # Refuses a key that leaves no room for names.
        self._block = ExitStack()
        self._leadership = Leadership(lock, "Beat", does="schedules", word="beat")
        self._marks = Marks(store, lock.key)
        self._can_lead = True
        super().setup_schedule()  # type: ignore[misc]

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send one entry that is due, if this one leads; return the seconds until the next call."""
        with self._busy():
            try:
                if not self._leads():
                    return 0.0
                self._marks.renew()
                interval: float = super().tick(*args, **kwargs)  # type: ignore[misc]
                self._leadership.succeeded()
                # Not for long: a lease may be lost, and the leadership is to be had again.
                return min(interval, PATIENCE)
            except Moved:
                self._heap = None
                return 0.0
            except _Later:
                return 0.0
            except BackendUnavailable as error:
                self._leadership.trouble(error)
                self._heap = None
                return AGAIN

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Learn when each entry was sent last, by whichever beat, and put them into order."""
        for entry in self.schedule.values():
            self._learn(entry)
        super().populate_heap(*args, **kwargs)  # type: ignore[misc]

    def is_due(self, entry: Any) -> Any:
        """Look at the entry with what is known of it now."""
        self._remember(entry)
        return super().is_due(entry)  # type: ignore[misc]

    def reserve(self, entry: Any) -> Any:
        """Mark an entry as sent, just before it is; `Moved`: another beat has sent it."""
        # Who has to wait for the broker does so before the mark.
        _ = self.producer
        try:
            self._marks.move(entry.name, _aware(entry.default_now()))
        except NotNow:
            # The other entries do not wait for this one.
            self._learn(entry)
            heapq.heappush(
                cast("list[Any]", self._heap), event_t(self._when(entry, AGAIN), 5, entry)
            )
            raise _Later from None
        return super().reserve(entry)  # type: ignore[misc]

    def close(self) -> None:
        """Save what is to be saved, and let another beat lead at once."""
        # A signal came amid a question to a store, and no other can be asked now: Celery closes
        # once more when the signal has ended what was going on.
        if self._is_busy:
            return
        try:
            super().close()  # type: ignore[misc]
        finally:
            if self._can_lead:
                self._leadership.give_up(self._block)

    def _do_sync(self) -> None:
        with self._busy():
            super()._do_sync()  # type: ignore[misc]

    @contextmanager
    def _busy(self) -> Iterator[None]:
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    def _leads(self) -> bool:
        if self._leadership.held:
            return True
        if self._leadership.gain(min(PATIENCE, self.max_interval), self._block):
            self._begin_to_lead()
            return True
        return False

    def _begin_to_lead(self) -> None:
        self._marks.forget()
        self._heap = None

    def _learn(self, entry: Any) -> None:
        self._marks.learn(entry.name, _aware(entry.last_run_at), entry.total_run_count or 0)
        self._remember(entry)

    def _remember(self, entry: Any) -> None:
        """Correct what the entry says of itself: another beat may have sent it."""
        mark = self._marks.get(entry.name)
        if mark is not None:
            self._apply(entry, mark)

    def _apply(self, entry: Any, mark: Mark) -> None:
        entry.last_run_at = self._sent_at(entry, mark)
        entry.total_run_count = mark.runs

    def _sent_at(self, entry: Any, mark: Mark) -> datetime:
        """Return since when the entry counts, by the clock of this process."""
        zone = self.app.timezone
        if mark.sent_at <= mark.made_at:
            return mark.sent_at.astimezone(zone)
        made_at = mark.made_at.astimezone(zone)
        if isinstance(entry.schedule, interval):
            return made_at
        # The clock of who sent it was ahead, so it was sent for the first tick after that: a
        # nightly job which ran five minutes early is not run again. Later ticks are not waived.
        # The time is read last, so that this is not a moment before the tick.
        left = entry.schedule.remaining_estimate(made_at)
        next_tick: datetime = _aware(entry.default_now()) + left
        return min(mark.sent_at.astimezone(zone), next_tick)


class DistlockScheduler(OneLeader, PersistentScheduler):  # type: ignore[misc]
    """Celery's own scheduler, as one of many.

    Its file (`celery beat -s`) says since when an entry counts that no beat has sent yet. Two beats
    on one machine need a file each.
    """


def _database_scheduler() -> type[Any]:
    """Make the class whose base not everybody has, and which has models."""
    try:
        from django_celery_beat.schedulers import DatabaseScheduler
    except ImportError as error:
        raise ImproperlyConfigured(
            "DistlockDatabaseScheduler needs django-celery-beat: pip install django-celery-beat,"
            " and add django_celery_beat to INSTALLED_APPS."
        ) from error

    class DistlockDatabaseScheduler(OneLeader, DatabaseScheduler):  # type: ignore[misc]
        """The scheduler of django-celery-beat, as one of many."""

        def _begin_to_lead(self) -> None:
            super()._begin_to_lead()
            # Rows that the leader before has changed.
            self._initial_read = True

        def _apply(self, entry: Any, mark: Mark) -> None:
            # The row is known to all beats. It may be older than the mark, if nobody has saved it,
            # or younger, if a task was enabled again; in the future, by a clock that was ahead.
            sent_at, since = self._sent_at(entry, mark), _aware(entry.last_run_at)
            changed = _aware(entry.model.date_changed or entry.last_run_at)
            is_younger = sent_at <= changed
            if is_younger and changed - since == _BEFORE_ITS_START:
                return
            if not sent_at <= since <= _aware(entry.default_now()):
                super()._apply(entry, mark)
                if not is_younger:
                    # One that is to run once is over by its number of runs.
                    entry.model.total_run_count = max(entry.model.total_run_count, mark.runs)

    DistlockDatabaseScheduler.__qualname__ = DistlockDatabaseScheduler.__name__
    return DistlockDatabaseScheduler


def __getattr__(name: str) -> Any:
    if name != "DistlockDatabaseScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _database_scheduler()
    return made


def _reserve_numbers() -> None:
    """Let no file or socket of ours have a number that one of the worker's had.

    In a beat that `celery worker -B` forks, Celery closes what was inherited by its number, after
    the back of the objects that own it. The garbage collector closes these numbers once more, and
    that would be our connection to the store, which then waits for an answer for ever.
    """
    try:
        last = max(int(each.name) for each in Path(f"/proc/{os.getppid()}/fd").iterdir())
    except OSError:
        last = 255  # No such folder here.
    while (number := os.open(os.devnull, os.O_RDONLY)) <= last:
        pass
    os.close(number)


def _aware(moment: datetime) -> datetime:
    # As Celery does it: what has no time zone is in UTC.
    return cast("datetime", maybe_make_aware(moment))
