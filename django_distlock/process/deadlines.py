"""One timer for the deadlines of all leases of a process.

It waits on the monotonic clock and asks no store, so that nothing which hangs can delay it.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ..core.clock import monotonic
from ..core.logs import log_fields
from ..core.threads import TimerThread, in_child

logger = logging.getLogger("django_distlock")


class Watched(Protocol):
    """What a lease has to have to be watched."""

    def alarm_in(self) -> float:
        """Return in how many seconds to be called; infinite: not as things are."""

    def is_over(self) -> bool:
        """Whether it has ended, also before its time."""

    def alarm(self) -> None:
        """Do what is due, without waiting for anything."""


def _due(lease: Watched) -> float:
    return lease.alarm_in() + monotonic()


class Alarms(TimerThread[Watched]):
    """Calls leases when it is time."""

    #: The clock of a wait may stand while the machine sleeps.
    longest_wait = 1.0

    def __init__(self) -> None:
        super().__init__("distlock-alarms", _due, monotonic)

    def ring(self) -> None:
        """Call every lease whose time has come, in this thread."""
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
        # Whatever is due: a lease may be over before its time.
        self.ring()


alarms = Alarms()

in_child(alarms.forget)
