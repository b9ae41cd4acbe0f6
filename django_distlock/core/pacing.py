"""How long a caller pauses between its attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from .errors import LockError
from .records import Contended, Grant

#: Seconds between two attempts of a waiter that is woken: a safety net for lost wake-ups.
SAFETY_SECONDS = 5.0
#: After so many grants to others, a waiter that is woken polls as well: of many waiters that are
#: woken at once, it may never be the quickest.
FEW = 3
#: How often at most a waiter polls within the time for which the key has been held. Without a
#: limit, each of a hundred waiting processes would poll more often, the more there are.
OFTEN = 4
#: The shortest pause, in seconds, between two attempts of a waiter that polls.
SHORTEST_PAUSE = 0.005

#: The outcome of an attempt. `BackendUnavailable` means that nothing is known, not that the key is
#: held; any other error means that waiting is pointless.
Outcome = Grant | Contended | LockError


@dataclass(slots=True)
class Pacing:
    """How long a caller pauses between its attempts.

    A pause is the next one of `pauses`, or shorter if the caller is not woken: no longer than the
    key has been held for, and the shorter, the more grants to others the caller has seen. So the
    waiter that has waited longest polls most often. If other transactions are in the way, which
    end soon as well, pauses begin short and double.

    Attributes:
        pauses: Seconds between attempts; its end means that no attempt is left.
        safety: Seconds between attempts while wake-ups come; None: always use `pauses`.
        missed: How many grants to others the caller has seen.
    """

    pauses: Iterator[float]
    safety: float | None = SAFETY_SECONDS
    missed: int = 0
    _fence: int | None = None
    _short: float = SHORTEST_PAUSE

    def step(self) -> float | None:
        """Return the longest value of the next pause; None: no attempt is left."""
        return next(self.pauses, None)

    def see(self, outcome: Outcome) -> None:
        """Note which grant is in the way."""
        if not isinstance(outcome, Contended):
            return
        if outcome.fence != self._fence and outcome.fence is not None:
            self._fence, self.missed, self._short = outcome.fence, self.missed + 1, SHORTEST_PAUSE
        elif outcome.busy:
            self._short *= 2

    def pause(self, outcome: Outcome, step: float, *, listening: bool) -> float:
        """Return for how long to sleep after an outcome, unless woken."""
        seconds = self._shortened(outcome, step)
        if not leaves_mark(outcome) or outcome.fence is None:
            # No wake-up will come: the key may be expired but not yet available, or nobody holds
            # it, and a waiter to hold it alone comes first.
            return seconds
        if listening and self.safety is not None and self.missed <= FEW:
            seconds = self.safety
        return seconds if outcome.free_in is None else min(seconds, outcome.free_in)

    def _shortened(self, outcome: Outcome, step: float) -> float:
        if self.safety is None or not isinstance(outcome, Contended) or outcome.paused:
            return step
        if outcome.held_for is not None:
            often = min(max(1, self.missed), OFTEN)
            return min(step, max(SHORTEST_PAUSE, outcome.held_for / often))
        return min(step, self._short) if outcome.busy else step


def leaves_mark(outcome: Outcome | None) -> TypeGuard[Contended]:
    """Whether an attempt has found a grant in its way, which it could mark for a wake-up."""
    return isinstance(outcome, Contended) and not outcome.busy and not outcome.paused
