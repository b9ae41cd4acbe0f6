"""The heartbeat: extends the leases of a process, all of a backend in one round trip."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from ..backends.base import BaseLockBackend
from ..core.errors import LockError
from ..core.logs import log_fields
from ..core.records import Grant, Unknown
from ..core.renewing import Renewing
from ..core.threads import start_thread
from . import deferred_release
from .host import monotonic

logger = logging.getLogger("django_distlock")

#: Leases in one round trip.
MANY = 1000
#: Seconds that the thread stays when there is nothing to extend: leases come and go quickly.
LINGER_SECONDS = 10.0
#: Seconds for which it is told that a beat was late: a scrape comes now and then.
LAG_SECONDS = 60.0

#: What a renewal led to.
Answer = Grant | Unknown | LockError | None


class Renewed(Protocol):
    """What a lease has to have to be renewed."""

    renewing: Renewing

    def begin_renewal(self) -> Grant | None:
        """Return what to extend, and for how long; None: not now. Keeps others off the lease."""

    def end_renewal(self, sent_at: float, answer: Answer) -> None:
        """Take the answer to what `begin_renewal` returned."""


class Heartbeat:
    """Renews the leases of one backend in a thread of its own, while there are any.

    Args:
        backend: Whose leases.
    """

    def __init__(self, backend: BaseLockBackend):
        # Not the backend itself, which is the key under which this object is kept.
        self._backend = weakref.ref(backend)
        self._name = f"distlock-heartbeat-{backend.alias}"
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        # Entered by itself: `Condition.__enter__` is Python, where a signal's exception leaks it.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._leases: dict[int, Renewed] = {}
        self._thread: threading.Thread | None = None
        # When the thread looks next.
        self._looks_at = 0.0
        self._lag = self._lag_since = 0.0

    @property
    def lag(self) -> float:
        """Seconds by which the next beat is late by now, or one of the last minute was."""
        now = monotonic()
        due = min((each.renewing.due_at for each in list(self._leases.values())), default=now)
        was = self._lag if now - self._lag_since < LAG_SECONDS else 0.0
        return max(was, now - due, 0.0)

    def _note_lag(self, now: float, due: float | None) -> None:
        late = 0.0 if due is None else now - due
        if late >= self._lag or now - self._lag_since >= LAG_SECONDS:
            self._lag, self._lag_since = late, now

    def add(self, lease: Renewed) -> None:
        """Renew a lease from now on; again, when that has become due sooner."""
        if self._pid != os.getpid():
            self._forget()  # Not everybody who forks tells Python of it: uWSGI does not.
        with self._mutex:
            self._leases[id(lease)] = lease
            if self._thread is None or not self._thread.is_alive():
                # Kept before it starts: a signal's handler may raise behind that.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._looks_at = 0.0
                start_thread(self._thread)
            elif lease.renewing.due_at < self._looks_at:
                self._changed.notify()

    def discard(self, lease: Renewed) -> None:
        """Do not renew a lease any more."""
        self._leases.pop(id(lease), None)

    def beat(self, *, early: bool = False) -> None:
        """Renew what is due, in this thread.

        Args:
            early: Also what is due within half of its interval, so that leases that were taken one
                after the other come to share a round trip.
        """
        now = monotonic()
        due = [
            lease
            for lease in list(self._leases.values())
            if lease.renewing.is_due(now, early=early)
        ]
        for start in range(0, len(due), MANY):
            self._renew(due[start : start + MANY])

    def _renew(self, leases: Sequence[Renewed]) -> None:
        backend = self._backend()
        taken: list[tuple[Renewed, Grant]] = []
        sent_at = monotonic()
        answers: Sequence[Answer] = []
        try:
            for lease in leases:
                grant = lease.begin_renewal()
                if grant is not None:
                    taken.append((lease, grant))
            if taken and backend is not None:
                sent_at = monotonic()
                answers = _extended(backend, [grant for _lease, grant in taken])
        finally:
            known = [*answers, *[LockError("It was not asked.")] * (len(taken) - len(answers))]
            for (lease, _grant), answer in zip(taken, known, strict=True):
                try:
                    lease.end_renewal(sent_at, answer)
                except Exception:
                    extra = log_fields("renewal_failed", backend=_alias(backend))
                    logger.exception("The end of a renewal failed", extra=extra)

    def _run(self) -> None:
        backend = self._backend()
        alias = _alias(backend)
        if backend is not None:
            backend._own_thread(keeps_leases=True)
        del backend
        idle_since = monotonic()
        while True:
            with self._mutex:
                if self._thread is not threading.current_thread():
                    return  # Another one was started in its place.
                now = monotonic()
                if self._leases:
                    idle_since = now
                elif now - idle_since >= LINGER_SECONDS:
                    self._thread = None
                    return
                due = min(
                    (each.renewing.due_at for each in list(self._leases.values())), default=None
                )
                self._looks_at = (
                    now + LINGER_SECONDS if due is None else min(due, now + LINGER_SECONDS)
                )
                if self._looks_at > now:
                    self._changed.wait(self._looks_at - now)
                    continue
                self._note_lag(now, due)
            try:
                deferred_release.sweep()
                self.beat(early=True)
            except Exception:
                # Whatever it was, the other leases need their next beat.
                extra = log_fields("heartbeat_failed", backend=alias)
                logger.exception("A heartbeat failed", extra=extra)


def _extended(backend: BaseLockBackend, grants: Sequence[Grant]) -> Sequence[Answer]:
    try:
        return backend.extend_many(grants)
    except LockError as error:
        extra = log_fields("renewal_failed", backend=backend.alias, error=error)
        logger.warning("%d leases could not be renewed: %s", len(grants), error, extra=extra)
        return [error] * len(grants)
    except Exception as error:
        extra = log_fields("renewal_failed", backend=backend.alias)
        logger.exception("%d leases could not be renewed", len(grants), extra=extra)
        return [LockError(str(error))] * len(grants)


def _alias(backend: BaseLockBackend | None) -> str | None:
    return None if backend is None else backend.alias


_every: weakref.WeakKeyDictionary[BaseLockBackend, Heartbeat] = weakref.WeakKeyDictionary()


def heartbeat_of(backend: BaseLockBackend) -> Heartbeat:
    """Return the heartbeat of a backend's leases in this process."""
    # Two threads may make one each; one of them is kept.
    return _every.get(backend) or _every.setdefault(backend, Heartbeat(backend))


def _begin_in_child() -> None:
    # The leases are the parent's, and so is the thread.
    _every.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
