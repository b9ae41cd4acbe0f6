"""The heartbeat: renews the leases of a process, all of a backend in one round trip."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from ..backends.base import BaseLockBackend
from ..core.errors import LockError
from ..core.logs import log_fields
from ..core.records import Grant, Unknown
from ..core.renewing import Renewing
from ..core.threads import TimerThread, in_child
from ..core.wording import counted
from . import deferred_release

logger = logging.getLogger("django_distlock")

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
