"""When a lease is renewed, and when its renewals are given up. Without clock and store."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .durations import MIN_TTL

#: Renewals in a row without an answer, after which a lease counts as lost.
MOST_FAILURES = 3

#: What part of a ttl is left when the holder is warned, unless it says when.
DANGER_PART = 0.25


@dataclass(slots=True)
class Renewing:
    """The renewals of one lease. Times are seconds of the holder's monotonic clock.

    Attributes:
        part: The part of the ttl between two renewals.
        ends_at: Until when it is renewed at all.
        due_at: When the next renewal is due.
        failures: How many in a row got no answer.
    """

    part: float
    ends_at: float = math.inf
    due_at: float = math.inf
    interval: float = math.inf
    failures: int = 0

    def renewed(self, sent_at: float, ttl: float | None) -> None:
        """Count from a grant or an extend that was asked for at `sent_at`."""
        self.failures = 0
        self.interval = math.inf if ttl is None else ttl * self.part
        self.due_at = sent_at + self.interval

    def failed(self, now: float) -> bool:
        """Count a renewal without answer; return whether that was one too many."""
        self.failures += 1
        self.due_at = now + self.interval
        return self.failures >= MOST_FAILURES

    def is_due(self, now: float, *, early: bool = False) -> bool:
        """Whether to renew now.

        Args:
            early: Also within half of the interval before, unless the last one failed: failures
                that come sooner would end a lease before its time.
        """
        return self.due_at - now <= (self.interval / 2 if early and not self.failures else 0)

    def ttl(self, now: float, ttl: float) -> float | None:
        """Return for how long to renew now; None: the lease has had its time."""
        left = min(ttl, self.ends_at - now)
        return left if left >= MIN_TTL else None
