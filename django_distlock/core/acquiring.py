"""The algorithm of waiting for a key, without clock, store or sleep.

`acquiring()` yields what to do next and is sent what came of it. One driver does that with calls
(`waiting.acquire`), the other with awaits (`waiting.aacquire`): the algorithm exists once.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from .durations import MAX_BOUND
from .errors import BackendUnavailable
from .records import Contended, Grant


@dataclass(frozen=True, slots=True)
class Attempt:
    """Try once, waiting at most `bound` seconds inside the store."""

    bound: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Sleep for `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Release a grant that came too late to be used."""

    grant: Grant


#: What an attempt led to. An error says that nothing is known, not that the key is held.
Outcome = Grant | Contended | BackendUnavailable


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a step.

    Attributes:
        now: The caller's monotonic clock, in seconds, after the step.
        outcome: What an `Attempt` led to; None after the other steps.
    """

    now: float
    outcome: Outcome | None = None


def acquiring(
    *, now: float, wait: float | None, pauses: Iterator[float]
) -> Generator[Attempt | Pause | GiveBack, Reply, Outcome]:
    """Try until granted or until `wait` is over; return the last attempt's outcome.

    The first attempt is made at once and the last one at the deadline. Between them a caller
    pauses until the earliest of: the next step of `pauses`, the moment the key becomes free, the
    deadline.

    Args:
        now: The caller's monotonic clock, in seconds.
        wait: Seconds to keep trying; 0: one attempt; None: for ever.
        pauses: Seconds between attempts; its end means that no attempt is left.
    """
    deadline = math.inf if wait is None else now + wait
    while True:
        is_last = now >= deadline
        sent_at = now
        reply = yield Attempt(bound=max(0.0, min(MAX_BOUND, deadline - now)))
        outcome, now = reply.outcome, reply.now
        if outcome is None:
            raise TypeError("An Attempt must be answered with its outcome.")
        if isinstance(outcome, Grant):
            if outcome.ttl is None or now < sent_at + outcome.ttl:
                return outcome
            # The reply took longer than the lease lives: somebody else may hold the key by now.
            now = (yield GiveBack(outcome)).now
            outcome = Contended(busy=True)
        pause = None if is_last else next(pauses, None)
        if pause is None:
            return outcome
        if isinstance(outcome, Contended) and _tells_when(outcome):
            pause = min(pause, outcome.free_in or 0.0)
        now = (yield Pause(max(0.0, min(pause, deadline - now)))).now


def _tells_when(outcome: Contended) -> bool:
    # Busy or paused, the key may be past its end and yet not to be had: backoff, or it would spin.
    return outcome.free_in is not None and not outcome.busy and not outcome.paused
