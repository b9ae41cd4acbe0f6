"""Write the events that operators need to know about as rows of `LockEvent`.

Signals are sent by timers and during requests. So a separate thread writes the rows, on a
connection of its own: it delays nobody, and no rollback of a caller removes a row. A database that
hangs delays only other events.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DataError, IntegrityError, connections, router, transaction

from .. import conf
from ..backends.base import BaseLockBackend
from ..core.durations import MAX_BOUND
from ..core.errors import InvalidArgument
from ..core.interruptions import pass_on
from ..core.logs import log_fields
from ..core.metadata import validate_metadata
from ..core.records import Holder
from ..core.threads import Bell, start_thread
from ..database import vendors
from ..database.connections import before_drop, close_here, in_test_case
from ..models import LockEvent
from ..signals import (
    fence_rejected,
    lock_forced,
    lock_lost,
    lock_operated,
    lock_released,
    lock_taken_over,
)
from . import deferred_release

logger = logging.getLogger("django_distlock")

#: How many events may wait to be written. Further ones are dropped, because a thousand rows about
#: one outage say as much as more would. Twice as many may wait if operators caused them.
MAX_WAITING = 1000
#: How many rows one statement writes.
BATCH = 100
#: Seconds that releases are collected for, so that each one does not need its own connection.
GATHER = 1.0

_UID = "django_distlock.process.event_log"
_KINDS = {
    "expire_soon": LockEvent.Kind.SHORTENED,
    "request_stop": LockEvent.Kind.STOP_REQUESTED,
    "pause": LockEvent.Kind.PAUSED,
    "resume": LockEvent.Kind.RESUMED,
    "cleanup": LockEvent.Kind.CLEANED,
}


def connect() -> None:
    """Record events from now on.

    This is called when the app is ready, before any lock is acquired. So at the exit of the
    interpreter `finish` runs after the leases are released, and writes their events. That takes a
    second at most; what is not written by then is lost, as if the process had been killed.
    """
    lock_taken_over.connect(note_takeover, dispatch_uid=_UID)
    lock_lost.connect(note_loss, dispatch_uid=_UID)
    fence_rejected.connect(_note_rejection, dispatch_uid=_UID)
    lock_forced.connect(_note_force, dispatch_uid=_UID)
    lock_operated.connect(_note_operation, dispatch_uid=_UID)
    setting_changed.connect(_follow_setting, dispatch_uid=_UID)
    _follow_setting()
    before_drop.append(finish)
    atexit.register(finish)


def finish(seconds: float = MAX_BOUND) -> bool:
    """Wait until the events so far are written, or have failed; return whether none is left."""
    return _writer.finish(seconds)


def dropped() -> int:
    """Return how many events were dropped: too many waited, or their database refused them."""
    return _writer.dropped


def _follow_setting(*, setting: str = "DISTLOCK_HISTORY", **_: Any) -> None:
    """Connect to `lock_released` only if releases are recorded, because receivers cost time."""
    if setting == "DISTLOCK_HISTORY":
        lock_released.disconnect(dispatch_uid=_UID)
        if getattr(settings, setting, 0):
            lock_released.connect(_note_release, dispatch_uid=_UID)


def _note_release(*, held_for: float, waited: float, released: bool, **facts: Any) -> None:
    # A lost lease has another event; a lease that could not be released expires.
    if released and random.random() < conf.history():  # noqa: S311 - a sample
        details = {"held_for": round(held_for, 3), "waited": round(waited, 3)}
        _note(LockEvent.Kind.RELEASED, details, **facts)


def note_takeover(*, previous: Holder | None = None, **facts: Any) -> None:
    """Record that a lease was taken over."""
    details = {"previous": _told(previous)}
    _note(LockEvent.Kind.TAKEN_OVER, details, **facts)


def note_loss(*, held_for: float | None = None, **facts: Any) -> None:
    """Record that a lease was lost."""
    _note(LockEvent.Kind.LOST, {"held_for": held_for}, **facts)


def _note_rejection(*, current: int | None, model: str, pk: Any, **facts: Any) -> None:
    pk = None if pk is None else _plain(str(pk))
    details = {"current": current, "model": model, "pk": pk}
    _note(LockEvent.Kind.REJECTED, details, **facts)


def _note_force(*, reason: str, **facts: Any) -> None:
    _note(LockEvent.Kind.FORCED, {}, cause=reason, **facts)


def _note_operation(*, operation: str, reason: str, details: Any, **facts: Any) -> None:
    _note(_KINDS[operation], dict(details), cause=reason, **facts)


def _note(
    kind: LockEvent.Kind,
    details: dict[str, Any],
    *,
    sender: type[BaseLockBackend],
    alias: str,
    key: str,
    fence: int | None,
    holder: Holder | None,
    cause: object,
    **more: Any,
) -> None:
    if not sender.distributed:
        return  # Locks in memory are for tests and development.
    using = ""
    try:
        event = LockEvent(
            backend=alias[:100],
            key=key,
            kind=kind,
            fence=fence,
            holder=_told(holder),
            actor=_plain(more.get("actor", "")),
            reason=_plain(str(cause or "")),
            details=details,
        )
        using = router.db_for_write(LockEvent)
        if in_test_case(connections[using]):
            # Written in the transaction of the test, where it is seen and rolled back. After a
            # failed statement, nothing can be written there any more.
            if not connections[using].needs_rollback:
                with transaction.atomic(using=using):
                    event.save(using=using)
        elif not _waits_for_the_writer(using, event):
            _writer.put(using, event)
    except Exception as error:  # noqa: BLE001 - an event is told, or logged
        pass_on(error)
        _writer.tell(using, error)


def _waits_for_the_writer(using: str, event: LockEvent) -> bool:
    """On SQLite, defer an event until this thread's transaction, the only writer, has ended."""
    if connections[using].vendor != "sqlite":
        return False

    def put() -> bool:
        _writer.put(using, event)
        return True

    return deferred_release.defer(("", event.key), None, put)


def _told(holder: Holder | None) -> dict[str, Any]:
    """Return a holder as JSON that every database accepts: its metadata may be spoiled."""
    if holder is None:
        return {}
    try:
        validate_metadata(holder.metadata)
    except InvalidArgument:
        holder = replace(holder, metadata={})
    return holder.as_json()


def _plain(text: str) -> str:
    """Return a text as every database accepts it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


class _Waiting(NamedTuple):
    """An event to write, with the alias and the name of its database."""

    using: str
    name: object
    event: LockEvent


class _Writer:
    """Writes events in a thread that runs while there are any."""

    def __init__(self) -> None:
        self._told = False
        self.dropped = 0
        # The process whose exit calls `finish`.
        self._process = 0
        self.forget()

    def forget(self) -> None:
        """Start empty in a forked child: the parent writes the waiting events."""
        self._pid = os.getpid()
        # Reentrant, because a signal's handler may interrupt its holder, and cause another event.
        self._mutex = threading.RLock()
        self._waiting: deque[_Waiting] = deque()
        self._is_running = False
        self._is_full = False
        self._idle = Bell()
        self._idle.ring()
        #: Rung by events that are not collected.
        self._now = Bell()

    def put(self, using: str, event: LockEvent) -> None:
        """Add an event, unless too many are waiting; half as many for releases."""
        if self._pid != os.getpid():
            self.forget()
        if self._process != os.getpid():
            self._process = os.getpid()
            if multiprocessing.parent_process() is not None:
                # Forks by `multiprocessing` run no `atexit` functions. This runs after the release
                # of all leases.
                Finalize(None, finish, exitpriority=-1)
        waiting = _Waiting(using, _name(using), event)
        with self._mutex:
            if not self._waiting:
                self._now.clear()  # It may have been rung when there was nothing to write.
            if event.kind != LockEvent.Kind.RELEASED:
                self._now.ring()
            elif len(self._waiting) >= MAX_WAITING // 2:
                return
            if len(self._waiting) < MAX_WAITING * (2 if event.actor else 1):
                self._waiting.append(waiting)
            else:
                self.dropped += 1
                if not self._is_full:
                    self._is_full = True
                    logger.warning(
                        "%d lock events wait to be written to %r. Further events are dropped",
                        MAX_WAITING,
                        using,
                        extra=log_fields("events_dropped"),
                    )
            if not self._is_running:
                self._start()

    def finish(self, seconds: float) -> bool:
        """Wait until nothing is left to write, and return whether that is so."""
        if self._pid != os.getpid():
            return True
        self._now.ring()
        with self._mutex:
            is_stuck = bool(self._waiting) and not self._is_running
        if is_stuck:
            # At the exit of the interpreter, Python 3.12 starts no threads any more.
            self._run(MAX_BOUND)
        self._idle.wait(seconds)
        return self._idle.is_rung

    def tell(self, using: str, error: Exception) -> None:
        """Warn once that events cannot be stored, until that works again.

        In a project without databases, this is logged for debugging only.
        """
        quietly = self._told or isinstance(error, ImproperlyConfigured)
        self._told = True
        logger.log(
            logging.DEBUG if quietly else logging.WARNING,
            "Lock events cannot be stored in %s: %s",
            repr(using) if using else "any database",
            error,
            extra=log_fields("events_dropped", error=error),
        )

    def _start(self) -> None:
        try:
            start_thread(threading.Thread(target=self._run, name="distlock-events", daemon=True))
        except RuntimeError:
            return  # No thread can be started: `finish` writes the events.
        self._is_running = True
        self._idle.clear()

    def _run(self, bound: float | None = None) -> None:
        while True:
            if self._waiting:
                self._now.wait(GATHER)
            if not (batch := self._take()):
                return
            for using in dict.fromkeys(each.using for each in batch):
                self._write(using, [each for each in batch if each.using == using], bound)

    def _take(self) -> list[_Waiting]:
        """Return all waiting events; if there are none, the thread ends."""
        with self._mutex:
            batch = list(self._waiting)
            self._waiting.clear()
            self._is_full = False
            if not batch:
                self._is_running = False
                self._idle.ring()
            return batch

    def _write(self, using: str, events: list[_Waiting], bound: float | None) -> None:
        """Write events to a database; `bound`: the seconds to wait for locks of others."""
        try:
            try:
                with nullcontext() if bound is None else vendors.of(using).short_transaction(bound):
                    connections[using].ensure_connection()
                    # After a test run, its alias stands for the project's database again.
                    ours = [each.event for each in events if each.name == _name(using)]
                    refused = list(_refused(using, ours))
            finally:
                close_here()
        except Exception as error:  # noqa: BLE001
            self.dropped += 0 if isinstance(error, ImproperlyConfigured) else len(events)
            self.tell(using, error)
        else:
            self._told = False
            self.dropped += len(refused)
            for each in refused:
                self.tell(using, each)


def _refused(using: str, events: list[LockEvent]) -> Iterator[Exception]:
    """Write events, and yield the errors of those that the database refuses."""
    try:
        with transaction.atomic(using=using):
            LockEvent.objects.using(using).bulk_create(events, batch_size=BATCH)
    except (DataError, IntegrityError, OverflowError) as error:
        half = len(events) // 2
        if not half:
            yield error
            return
        yield from _refused(using, events[:half])
        yield from _refused(using, events[half:])


def _name(using: str) -> object:
    """Return the name of the database that an alias stands for now."""
    return connections[using].settings_dict["NAME"]


_writer = _Writer()
