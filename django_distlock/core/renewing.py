"""When to renew a lease, and when to give up. Without a clock or a store."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .durations import MIN_TTL

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
