"""What an operator needs to know afterwards, kept as rows of `LockEvent`.

Signals are sent by timers and amid requests, so a row is written by a thread of its own, on a
connection of its own: it delays nobody, and no rollback of a caller takes it back. A database that
hangs holds up the other events, and nothing else.
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
from ..core.holders import Holder, validate_metadata
from ..core.interruptions import pass_on
from ..core.logs import log_fields
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

#: Events that wait to be written. Further ones are dropped: the table tells what happened, and a
#: thousand rows of one outage tell as much as more. Of what operators do, twice as many wait.
MAX_WAITING = 1000
#: Rows of one statement.
BATCH = 100
#: Seconds that releases wait for others, so that there is no connection for each of them.
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
    """Keep what happens from now on.

    Called when the app is ready, so before anybody locks: what the leases that are released at the
    end of the interpreter have to tell is written behind them. That takes a second at most, and
    what is not written by then is lost, as it is with a process that is killed.
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
    """Wait until what happened so far is written, or could not be; return whether that is so."""
    return _writer.finish(seconds)


def dropped() -> int:
    """Return how many events this process has dropped so far, because too many waited."""
    return _writer.dropped


def _follow_setting(*, setting: str = "DISTLOCK_HISTORY", **_: Any) -> None:
    """Hear of releases where some are kept: a signal that nobody hears costs less."""
    if setting == "DISTLOCK_HISTORY":
        lock_released.disconnect(dispatch_uid=_UID)
        if getattr(settings, setting, 0):
            lock_released.connect(_note_release, dispatch_uid=_UID)


def _note_release(*, held_for: float, waited: float, released: bool, **facts: Any) -> None:
    # What was lost, or could not be released, is told by another event, or ends by its ttl.
    if released and random.random() < conf.history():  # noqa: S311 - a sample
        details = {"held_for": round(held_for, 3), "waited": round(waited, 3)}
        _note(LockEvent.Kind.RELEASED, details, **facts)


def note_takeover(*, previous: Holder | None = None, **facts: Any) -> None:
    """Keep that a lease was taken over."""
    details = {"previous": _told(previous)}
    _note(LockEvent.Kind.TAKEN_OVER, details, **facts)


def note_loss(*, held_for: float | None = None, **facts: Any) -> None:
    """Keep that a lease was lost."""
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
        return  # In memory: a test, or a developer's machine.
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
            # Here the test sees it, and with all else it is rolled back: at once where a write was
            # refused, after which nothing can be written.
            if not connections[using].needs_rollback:
                with transaction.atomic(using=using):
                    event.save(using=using)
        elif not _waits_for_the_writer(using, event):
            _writer.put(using, event)
    except Exception as error:  # noqa: BLE001 - an event is told, or logged
        pass_on(error)
        _writer.tell(using, error)


def _waits_for_the_writer(using: str, event: LockEvent) -> bool:
    """Let an event wait for the end of this thread's transaction, where no other one can write."""
    if connections[using].vendor != "sqlite":
        return False

    def put() -> bool:
        _writer.put(using, event)
        return True

    return deferred_release.defer(("", event.key), None, put)


def _told(holder: Holder | None) -> dict[str, Any]:
    """Return what every database can keep of a holder: somebody may have spoiled its metadata."""
    if holder is None:
        return {}
    try:
        validate_metadata(holder.metadata)
    except InvalidArgument:
        holder = replace(holder, metadata={})
    return holder.as_json()


def _plain(text: str) -> str:
    """Return what every database can keep of an error's text."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")


class _Waiting(NamedTuple):
    """An event that waits, with the alias and the name of its database."""

    using: str
    name: object
    event: LockEvent


class _Writer:
    """Writes events in a thread that lives while there are any."""

    def __init__(self) -> None:
        self._told = False
        self.dropped = 0
        # The process whose end waits for what is written.
        self._process = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child: what waits is written by its parent."""
        self._pid = os.getpid()
        # Reentrant, because a signal's handler may interrupt its holder, and lose a lease.
        self._mutex = threading.RLock()
        self._waiting: deque[_Waiting] = deque()
        self._is_running = False
        self._is_full = False
        self._idle = Bell()
        self._idle.ring()
        #: Rung by what does not wait for others.
        self._now = Bell()

    def put(self, using: str, event: LockEvent) -> None:
        """Let an event be written, unless too many are waiting: of releases half as many."""
        if self._pid != os.getpid():
            self.forget()
        if self._process != os.getpid():
            self._process = os.getpid()
            if multiprocessing.parent_process() is not None:
                # Its forks forget what `atexit` knows. Behind the release of all leases.
                Finalize(None, finish, exitpriority=-1)
        waiting = _Waiting(using, _name(using), event)
        with self._mutex:
            if not self._waiting:
                self._now.clear()  # Rung when there was nothing to write.
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
        """Wait until there is nothing to write, and return whether that is so."""
        if self._pid != os.getpid():
            return True
        self._now.ring()
        with self._mutex:
            is_stuck = bool(self._waiting) and not self._is_running
        if is_stuck:
            # At the end of the interpreter, Python 3.12 starts no thread any more.
            self._run(MAX_BOUND)
        self._idle.wait(seconds)
        return self._idle.is_rung

    def tell(self, using: str, error: Exception) -> None:
        """Say that events are not kept: once, until they are again.

        A project without databases, whose locks are elsewhere, is not bothered at all.
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
            return  # No more threads now, or ever: `finish` writes what waits.
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
        """Return all that waits; nothing, when the thread is to end."""
        with self._mutex:
            batch = list(self._waiting)
            self._waiting.clear()
            self._is_full = False
            if not batch:
                self._is_running = False
                self._idle.ring()
            return batch

    def _write(self, using: str, events: list[_Waiting], bound: float | None) -> None:
        """Write events to a database, and wait for locks of others so many seconds at most."""
        try:
            try:
                with nullcontext() if bound is None else vendors.of(using).short_transaction(bound):
                    connections[using].ensure_connection()
                    # A test run that has ended gives the alias back to the project's database.
                    ours = [each.event for each in events if each.name == _name(using)]
                    refused = list(_refused(using, ours))
            finally:
                close_here()
        except Exception as error:  # noqa: BLE001
            self.tell(using, error)
        else:
            self._told = False
            for each in refused:
                self.tell(using, each)


def _refused(using: str, events: list[LockEvent]) -> Iterator[Exception]:
    """Write events; give the errors of those that the database refuses: others are written."""
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
    """Return which database an alias stands for now."""
    return connections[using].settings_dict["NAME"]


_writer = _Writer()
