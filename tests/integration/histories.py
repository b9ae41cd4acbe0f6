"""What came before what, where many write with fences at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from django.db import OperationalError

from django_distlock.core.errors import FenceRejected


class Attempt(NamedTuple):
    """One try to pass with a fence, on the clock that all processes of the machine share."""

    began: float
    ended: float
    fence: int
    passed: bool


def attempted(fence: int, act: Callable[[int], object]) -> Attempt:
    """Try to pass, and note when and whether that worked."""
    began = time.monotonic()
    while True:
        try:
            act(fence)
        except FenceRejected:
            return Attempt(began, time.monotonic(), fence, passed=False)
        except OperationalError:
            continue  # Of a file with one writer, others had more than their share.
        return Attempt(began, time.monotonic(), fence, passed=True)


def rising(last: int, seed: int) -> list[int]:
    """Give fences that rise on the whole, with many of them too late."""
    chance = random.Random(seed)
    return sorted(range(1, last + 1), key=lambda fence: fence + chance.uniform(0, 8))


def wrong(history: Iterable[Attempt]) -> list[tuple[Attempt, Attempt | None]]:
    """Return what passed behind a higher fence, and what was refused without one before it."""
    attempts = list(history)
    passed = [each for each in attempts if each.passed]
    found: list[tuple[Attempt, Attempt | None]] = []
    for each in attempts:
        higher = [other for other in passed if other.fence > each.fence]
        if each.passed:
            found += [(each, other) for other in higher if other.ended < each.began]
        elif not any(other.began < each.ended for other in higher):
            found.append((each, None))
    return found
