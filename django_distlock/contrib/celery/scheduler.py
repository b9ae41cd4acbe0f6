"""Schedulers for `celery beat`: many may run, and one of them, the leader, schedules."""

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

from ...core.clock import monotonic
from ...core.errors import BackendUnavailable
from ...core.keys import own_key
from ...core.records import LEADER
from ...exceptions import InvalidLockBackend
from ...handler import lock_backends
from ...leading import Leadership
from ...locks.lock import distlock
from .beats import Mark, Marks, Moved, NotNow, mark_key

#: The longest single wait of a standby beat, and the longest sleep of a leader, in seconds.
PATIENCE: Final = 5.0
#: Seconds until the next attempt after a failure, or after one that ended sooner.
AGAIN: Final = 1.0
#: How long before its change django-celery-beat lets a row count from, if the row has a start time
#: and has not run since the change.
_BEFORE_ITS_START: Final = timedelta(days=365 * 30)


class _Later(Exception):
    """Nothing was sent, and the entry has its new place in the heap."""


class OneLeader:
    """A mixin for a `celery.beat.Scheduler`, of which many may run and only the leader schedules.

    Its options are settings of the Celery app:

    - `beat_distlock_key`: The leader's key; by default "〈celery-beat:" and the app's name.
    - `beat_distlock_ttl`: Seconds (or a `timedelta`) until a dead leader's lease expires; by
      default the `TTL` of the lock backend. Another beat leads a second after that.
    - `beat_distlock_backend`: An alias in `DISTLOCK`; by default "default".

    Raises:
        InvalidLockBackend: The backend is not configured, or its locks belong to this process or
            to a session only.
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
    #: False at first, because Celery also makes schedulers only to inspect them.
    _can_lead = False
    _is_busy = False

    def setup_schedule(self) -> None:
        """Prepare to lead, without acquiring the lock."""
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
        """Send one due entry if this beat leads; return the seconds until the next call."""
        with self._busy():
            try:
                since, least = monotonic(), min(AGAIN, self.max_interval)
                if not self._leads():
                    # If `RETRY` allows few attempts, the wait for the lock ended at once.
                    return least if monotonic() - since < least else 0.0
                self._marks.renew()
                interval: float = super().tick(*args, **kwargs)  # type: ignore[misc]
                self._leadership.succeeded()
                # The sleep is short, because the leader must notice and replace a lost lease.
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
        """Learn when each entry was sent last, by any beat, and sort the entries."""
        for entry in self.schedule.values():
            self._learn(entry)
        super().populate_heap(*args, **kwargs)  # type: ignore[misc]

    def is_due(self, entry: Any) -> Any:
        """Correct the entry by its mark, and return when it is due."""
        self._remember(entry)
        return super().is_due(entry)  # type: ignore[misc]

    def reserve(self, entry: Any) -> Any:
        """Mark an entry as sent just before it is sent; `Moved`: another beat has sent it."""
        # Connect to the broker first, so that no wait comes between the mark and the sending.
        _ = self.producer
        try:
            self._marks.move(entry.name, _aware(entry.default_now()))
        except NotNow:
            # The entry comes back later, so that the other entries do not wait for it.
            self._learn(entry)
            heapq.heappush(
                cast("list[Any]", self._heap), event_t(self._when(entry, AGAIN), 5, entry)
            )
            raise _Later from None
        return super().reserve(entry)  # type: ignore[misc]

    def close(self) -> None:
        """Save the schedule, and let another beat lead immediately."""
        # A signal interrupted a call to a store, and no other call is possible now. Celery closes
        # once more when the signal has ended that call.
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
        """Update an entry from its mark, because another beat may have sent it."""
        mark = self._marks.get(entry.name)
        if mark is not None:
            self._apply(entry, mark)

    def _apply(self, entry: Any, mark: Mark) -> None:
        entry.last_run_at = self._sent_at(entry, mark)
        entry.total_run_count = mark.runs

    def _sent_at(self, entry: Any, mark: Mark) -> datetime:
        """Return the time from which the entry counts, by the clock of this process."""
        zone = self.app.timezone
        if mark.sent_at <= mark.made_at:
            return mark.sent_at.astimezone(zone)
        made_at = mark.made_at.astimezone(zone)
        if isinstance(entry.schedule, interval):
            return made_at
        # The sender's clock was ahead, so it sent the first tick after `made_at`: a nightly job
        # that ran five minutes early does not run again. Later ticks are not skipped.
        # The time is read last, so that the result is not a moment before the tick.
        left = entry.schedule.remaining_estimate(made_at)
        next_tick: datetime = _aware(entry.default_now()) + left
        return min(mark.sent_at.astimezone(zone), next_tick)


class DistlockScheduler(OneLeader, PersistentScheduler):  # type: ignore[misc]
    """Celery's own scheduler, of which many may run.

    Its file (`celery beat -s`) has the time from which entries count that no beat has sent yet. Two
    beats on one machine need a file each.
    """


def _database_scheduler() -> type[Any]:
    """Make the class when it is used, because its base is an optional package with models."""
    try:
        from django_celery_beat.schedulers import DatabaseScheduler
    except ImportError as error:
        raise ImproperlyConfigured(
            "DistlockDatabaseScheduler needs django-celery-beat: pip install django-celery-beat,"
            " and add django_celery_beat to INSTALLED_APPS."
        ) from error

    class DistlockDatabaseScheduler(OneLeader, DatabaseScheduler):  # type: ignore[misc]
        """The scheduler of django-celery-beat, of which many may run."""

        def _begin_to_lead(self) -> None:
            super()._begin_to_lead()
            # Read the rows again, because the previous leader has changed them.
            self._initial_read = True

        def _apply(self, entry: Any, mark: Mark) -> None:
            # All beats share the row. It is older than the mark if no beat has saved it, younger if
            # the task was enabled again, and in the future if a clock was ahead.
            sent_at, since = self._sent_at(entry, mark), _aware(entry.last_run_at)
            changed = _aware(entry.model.date_changed or entry.last_run_at)
            is_younger = sent_at <= changed
            if is_younger and changed - since == _BEFORE_ITS_START:
                return
            if not sent_at <= since <= _aware(entry.default_now()):
                super()._apply(entry, mark)
                if not is_younger:
                    # The number of runs ends an entry that is to run once.
                    entry.model.total_run_count = max(entry.model.total_run_count, mark.runs)

    DistlockDatabaseScheduler.__qualname__ = DistlockDatabaseScheduler.__name__
    return DistlockDatabaseScheduler


def __getattr__(name: str) -> Any:
    if name != "DistlockDatabaseScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _database_scheduler()
    return made


def _reserve_numbers() -> None:
    """Keep the worker's file numbers from being used again for files or sockets of this process.

    In a beat that `celery worker -B` forks, Celery closes inherited files by number, without their
    owners. The garbage collector closes these numbers once more. A connection to the store with
    such a number would be closed, and then wait for an answer for ever.
    """
    try:
        last = max(int(each.name) for each in Path(f"/proc/{os.getppid()}/fd").iterdir())
    except OSError:
        last = 255  # No such folder here.
    while (number := os.open(os.devnull, os.O_RDONLY)) <= last:
        pass
    os.close(number)


def _aware(moment: datetime) -> datetime:
    # As in Celery, a time without a zone is in UTC.
    return cast("datetime", maybe_make_aware(moment))
