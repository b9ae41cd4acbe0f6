"""Renew the leases of this process, report their loss, and release those that are left at exit.

A heartbeat renews all leases of a backend in one round trip. One timer reports the loss of any
lease: it uses only the monotonic clock and never asks a store, so a store that hangs cannot delay
it.
"""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.util import Finalize
from operator import attrgetter
from typing import Protocol

from ..backends.base import BaseLockBackend
from ..core.clock import monotonic
from ..core.durations import MIN_TTL
from ..core.errors import LockError
from ..core.logs import log_fields
from ..core.records import Grant, Unknown
from ..core.threads import TimerThread, in_child
from ..core.wording import counted
from . import deferred_release

logger = logging.getLogger("django_distlock")


# Renewals

#: After so many renewals in a row without an answer, a lease counts as lost.
MOST_FAILURES = 3

#: The default part of the ttl that is left when the holder is warned.
DANGER_PART = 0.25


@dataclass(slots=True)
class Renewing:
    """The renewals of one lease. Times are seconds of the holder's monotonic clock.

    Attributes:
        part: The part of the ttl between two renewals.
        ends_at: When renewing ends.
        due_at: When the next renewal is due.
        failures: How many in a row got no answer.
    """

    part: float
    ends_at: float = math.inf
    due_at: float = math.inf
    interval: float = math.inf
    failures: int = 0

    def renewed(self, sent_at: float, ttl: float | None) -> None:
        """Schedule the next renewal after a grant or an extend that was sent at `sent_at`."""
        self.failures = 0
        self.interval = math.inf if ttl is None else ttl * self.part
        self.due_at = sent_at + self.interval

    def failed(self, now: float) -> bool:
        """Count a renewal without an answer; return whether to give up."""
        self.failures += 1
        self.due_at = now + self.interval
        return self.failures >= MOST_FAILURES

    def is_due(self, now: float, *, early: bool = False) -> bool:
        """Whether to renew now.

        Args:
            early: Also within half of the interval before, unless the last one failed: quicker
                failures would give a lease up too early.
        """
        return self.due_at - now <= (self.interval / 2 if early and not self.failures else 0)

    def ttl(self, now: float, ttl: float) -> float | None:
        """Return the ttl to ask for now; None: renewing has ended."""
        left = min(ttl, self.ends_at - now)
        return left if left >= MIN_TTL else None


#: How many leases one round trip renews at most.
MANY = 1000
#: Seconds for which a late beat is reported, because metrics are scraped only now and then.
LAG_SECONDS = 60.0

#: The outcome of a renewal.
Answer = Grant | Unknown | LockError | None


class Renewed(Protocol):
    """The interface of a lease that can be renewed."""

    renewing: Renewing

    def begin_renewal(self) -> Grant | None:
        """Take the mutex of the lease, and return what to extend; None: not now."""

    def end_renewal(self, sent_at: float, answer: Answer) -> None:
        """Process the answer, and give the mutex back."""


class Heartbeat(TimerThread[Renewed]):
    """Renews the leases of one backend, in a thread that runs while there are any."""

    def __init__(self, backend: BaseLockBackend):
        # A weak reference, because the backend is the weak key of this object in `every`.
        self._backend = weakref.ref(backend)
        self._lag = self._lag_since = 0.0
        name = f"distlock-heartbeat-{backend.alias}"
        super().__init__(name, attrgetter("renewing.due_at"), backend.monotonic)

    @property
    def lag(self) -> float:
        """The seconds by which the next beat is late, or the latest one of the last minute was."""
        now = self._clock()
        due = min((each.renewing.due_at for each in self.all()), default=now)
        was = self._lag if now - self._lag_since < LAG_SECONDS else 0.0
        return max(was, now - due, 0.0)

    def _note_lag(self, now: float, due: float) -> None:
        if now - due >= self._lag or now - self._lag_since >= LAG_SECONDS:
            self._lag, self._lag_since = now - due, now

    def beat(self, *, early: bool = False) -> None:
        """Renew the leases that are due, in this thread.

        Args:
            early: Also those due within half of their interval, so that leases acquired one after
                the other come to share a round trip.
        """
        now = self._clock()
        due = [lease for lease in self.all() if lease.renewing.is_due(now, early=early)]
        for start in range(0, len(due), MANY):
            self.renew(due[start : start + MANY])

    def renew(self, leases: Sequence[Renewed]) -> None:
        """Renew leases by one request, whether they are due or not."""
        backend = self._backend()
        taken: list[tuple[Renewed, Grant]] = []
        sent_at = self._clock()
        answers: Sequence[Answer] = []
        try:
            for lease in leases:
                grant = lease.begin_renewal()
                if grant is not None:
                    taken.append((lease, grant))
            if taken and backend is not None:
                sent_at = self._clock()
                answers = _extended(backend, [grant for _lease, grant in taken])
        finally:
            known = [
                *answers,
                *[LockError("The renewal was not sent.")] * (len(taken) - len(answers)),
            ]
            for (lease, _grant), answer in zip(taken, known, strict=True):
                try:
                    lease.end_renewal(sent_at, answer)
                except Exception:
                    extra = log_fields("renewal_failed", backend=getattr(backend, "alias", None))
                    logger.exception("The processing of a renewal failed", extra=extra)

    def _begin(self) -> None:
        backend = self._backend()
        if backend is not None:
            backend._own_thread(keeps_leases=True)

    def _look(self, now: float, due: float) -> None:
        if due > now:
            return
        self._note_lag(now, due)
        try:
            deferred_release.sweep()
            self.beat(early=True)
        except Exception:
            # The other leases need their next beat, whatever went wrong.
            extra = log_fields("heartbeat_failed", backend=getattr(self._backend(), "alias", None))
            logger.exception("A heartbeat failed", extra=extra)


def _extended(backend: BaseLockBackend, grants: Sequence[Grant]) -> Sequence[Answer]:
    try:
        return backend.extend_many(grants)
    except LockError as error:
        extra = log_fields("renewal_failed", backend=backend.alias, error=error)
        number = counted(len(grants), "lease")
        logger.warning("%s could not be renewed: %s", number, error, extra=extra)
        return [error] * len(grants)
    except Exception as error:
        extra = log_fields("renewal_failed", backend=backend.alias)
        number = counted(len(grants), "lease")
        logger.exception("%s could not be renewed", number, extra=extra)
        return [LockError(str(error))] * len(grants)


#: The heartbeats of this process.
every: weakref.WeakKeyDictionary[BaseLockBackend, Heartbeat] = weakref.WeakKeyDictionary()


def heartbeat_of(backend: BaseLockBackend) -> Heartbeat:
    """Return the heartbeat of a backend's leases in this process."""
    # If two threads create one at the same time, only one of them is kept.
    return every.get(backend) or every.setdefault(backend, Heartbeat(backend))


# The leases and the threads are the parent's.
in_child(every.clear)


# Deadlines


class Watched(Protocol):
    """The interface of a lease that can be watched."""

    def alarm_in(self) -> float:
        """Return the seconds until `alarm` is to be called; infinite: nothing is to be reported."""

    def is_over(self) -> bool:
        """Whether it has ended, by its deadline or before."""

    def alarm(self) -> None:
        """Report what is due, without blocking."""


def _due(lease: Watched) -> float:
    return lease.alarm_in() + monotonic()


class Alarms(TimerThread[Watched]):
    """Calls `alarm` of each lease when something is due."""

    def __init__(self) -> None:
        super().__init__("distlock-alarms", _due, monotonic)

    def ring(self) -> None:
        """Call `alarm` of each lease for which something is due, in this thread."""
        for lease in self.all():
            try:
                if lease.alarm_in() <= 0 or lease.is_over():
                    lease.alarm()
            except Exception:
                key = getattr(lease, "key", None)
                extra = log_fields(
                    "telling_failed", key=key, backend=getattr(lease, "backend", None)
                )
                logger.exception("The end of a lease could not be reported to it", extra=extra)
                self.discard(lease)

    def _look(self, now: float, due: float) -> None:
        # Even if nothing is due: a lease may have ended before its deadline.
        self.ring()


alarms = Alarms()

in_child(alarms.forget)


# The exit of the interpreter

#: Seconds that the exit of the interpreter may take for releases.
EXIT_PATIENCE = 2.0


class Held(Protocol):
    """The state of a lease."""

    token: str

    @property
    def is_watched(self) -> bool:
        """Whether the timer still watches it."""

    def is_over(self) -> bool:
        """Whether its deadline has passed."""


class Ending(Protocol):
    """Releases a lease."""

    @property
    def holding(self) -> Held:
        """The lease."""

    def at_exit(self, patience: float) -> None:
        """Release within `patience` seconds."""


class HeldHere:
    """The leases that this process has to release."""

    def __init__(self) -> None:
        self._by_token: dict[str, Ending] = {}
        # The process that has registered `release_all`.
        self._process = 0
        # The number of leases at which expired ones are removed.
        self._sweep_at = 0

    def __contains__(self, lease: Held) -> bool:
        found = self._by_token.get(lease.token)
        return found is not None and found.holding is lease

    def add(self, ending: Ending) -> None:
        """Add a lease, or replace the one whose token it continues."""
        if self._process != os.getpid():
            self._begin()
        if len(self._by_token) >= self._sweep_at:
            self._sweep()
        self._by_token[ending.holding.token] = ending

    def _begin(self) -> None:
        self._process = os.getpid()
        # Again in a fork, where `multiprocessing` forgets what the parent has registered.
        atexit.register(self.release_all)
        if multiprocessing.parent_process() is not None:
            # Before Python 3.13, its forks do not call `atexit` functions.
            Finalize(None, self.release_all, exitpriority=0)

    def rename(self, lease: Held, token: str) -> None:
        """Give a lease another token."""
        ending, before = self._by_token.get(lease.token), lease.token
        if ending is not None:
            self._by_token[token] = ending
        lease.token = token
        self._by_token.pop(before, None)

    def discard(self, lease: Held) -> bool:
        """Forget a lease that has ended; return False if somebody else has done so."""
        return lease in self and self._by_token.pop(lease.token, None) is not None

    def all(self) -> list[Ending]:
        """Return the releases of all leases."""
        # Copied in one step, because other threads add leases meanwhile.
        return list(self._by_token.values())

    def release_all(self) -> None:
        """Release all leases at the exit of the interpreter, even if some releases raise."""
        until = monotonic() + EXIT_PATIENCE

        def release(ending: Ending) -> None:
            ending.at_exit(max(0.0, until - monotonic()))

        with ExitStack() as stack:
            for ending in reversed(self.all()):
                stack.callback(release, ending)

    def _sweep(self) -> None:
        """Forget expired leases that nobody has released, such as dropped ones."""
        for lease in [each.holding for each in self.all()]:
            if not lease.is_watched and lease.is_over():
                self.discard(lease)
        self._sweep_at = max(1024, 2 * len(self._by_token))


held_here = HeldHere()
