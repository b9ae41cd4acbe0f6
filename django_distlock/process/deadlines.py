"""One timer for the deadlines of all leases of a process.

It uses only the monotonic clock. It never asks a store, so a store that hangs cannot delay it.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ..core.clock import monotonic
from ..core.logs import log_fields
from ..core.threads import TimerThread, in_child

logger = logging.getLogger("django_distlock")


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

    #: The clock after a timeout may stop while the machine is suspended.
    longest_wait = 1.0

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
