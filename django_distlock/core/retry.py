"""How long to pause between two attempts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from .durations import number
from .errors import InvalidArgument, shown


@dataclass(frozen=True, slots=True)
class Retry:
    """Exponential backoff with equal jitter: each pause is 50 to 100 % of its step.

    Step `n` (from 0) is `min(cap, delay * factor ** n)` seconds. Without `max_retries`, a pause is
    shorter where a key is held for moments: see `Pacing`.

    Args:
        delay: The first step, at least 0.001 seconds (or a `timedelta`, kept as seconds).
        factor: By how much a step outgrows the one before; at least 1.
        cap: The longest step, in seconds (or a `timedelta`); at least `delay`.
        max_retries: Attempts after the first one; None for as many as `wait` allows.

    Raises:
        InvalidArgument: A value out of bounds.

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    delay: float = 0.1
    factor: float = 2.0
    cap: float = 1.0
    max_retries: int | None = None

    def __post_init__(self) -> None:
        for name in ("delay", "cap"):
            value = getattr(self, name)
            if isinstance(value, timedelta):
                object.__setattr__(self, name, value.total_seconds())
        number(self.delay, "delay", minimum=0.001)
        number(self.factor, "factor", minimum=1)
        number(self.cap, "cap", minimum=self.delay)
        if self.max_retries is None:
            return
        if isinstance(self.max_retries, bool) or not isinstance(self.max_retries, int):
            raise InvalidArgument(
                f"max_retries must be an int or None, not {shown(self.max_retries)}."
            )
        if self.max_retries < 0:
            raise InvalidArgument(f"max_retries must be at least 0, not {shown(self.max_retries)}.")

    def pauses(self, uniform: Callable[[], float] = random.random) -> Iterator[float]:
        """Yield the pauses, in seconds; the end means that no attempt is left.

        Args:
            uniform: Answers numbers in [0, 1).
        """
        step, count = self.delay, 0
        while self.max_retries is None or count < self.max_retries:
            yield step * (0.5 + uniform() / 2)
            # Multiplied up to the cap only, so that waiting for days cannot overflow a float.
            step, count = min(self.cap, step * self.factor), count + 1
