"""How long a caller pauses between its attempts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from .errors import LockError
from .records import Contended, Grant

#: Seconds between two attempts of a waiter who is woken: the net, should a wake-up be lost.
SAFETY_SECONDS = 5.0
#: Grants to others behind which a waiter that is woken asks by itself, too: of many that are woken
#: at once the quickest wins, which may be another one each time.
FEW = 3
#: How often a waiter asks at most in the time for which the key has been held: of a hundred
#: processes that wait, each one would ask the more often, the more they are.
OFTEN = 4
#: Seconds at least between two attempts of a waiter whom nobody wakes.
SHORTEST_PAUSE = 0.005

#: What an attempt led to. `BackendUnavailable` says that nothing is known, not that the key is
#: held; any other error, that there is nothing to wait for.
Outcome = Grant | Contended | LockError


class Pacing:
    """How long a caller pauses between its attempts.

    A pause is a step of `pauses`, or shorter where nobody wakes the caller. What has been held for
    moments is asked for again in moments: a pause is no longer than the key has been held for, and
    the shorter, the more grants to others the caller has seen. So whoever has waited longest asks
    most often. Other transactions that are in the way are over in moments, too: behind those,
    pauses begin short and double.

    Args:
        pauses: Seconds between attempts; its end means that no attempt is left.
        safety: Seconds between attempts while wake-ups come; None: pauses are those of `pauses`,
            whatever comes.

    Attributes:
        missed: How many grants to others the caller has seen.
    """

    def __init__(self, pauses: Iterator[float], safety: float | None = SAFETY_SECONDS):
        self.missed = 0
        self.safety = safety
        self._pauses = pauses
        self._fence: int | None = None
        self._short = SHORTEST_PAUSE

    def step(self) -> float | None:
        """Return the next pause at the longest; None: no attempt is left."""
        return next(self._pauses, None)

    def see(self, outcome: Outcome) -> None:
        """Look at what is in the way."""
        if not isinstance(outcome, Contended):
            return
        if outcome.fence != self._fence and outcome.fence is not None:
            self._fence, self.missed, self._short = outcome.fence, self.missed + 1, SHORTEST_PAUSE
        elif outcome.busy:
            self._short *= 2

    def pause(self, outcome: Outcome, step: float, *, listening: bool) -> float:
        """Return for how long to sleep behind an outcome, unless woken."""
        seconds = self._shortened(outcome, step)
        if not leaves_mark(outcome):
            # Nobody would wake us, and the key may be past its end and yet not to be had.
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
    """Whether an attempt has met with a grant, which it can ask to be woken by."""
    return isinstance(outcome, Contended) and not outcome.busy and not outcome.paused
