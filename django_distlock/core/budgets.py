"""The time that one call has, from which each question to a store takes its own.

Whoever drives a call says until when it lasts, and whoever waits for a store asks here, however
deep below: opening a connection takes of it, and each statement, and each answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Final, ParamSpec, TypeVar

from .threads import begun

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds that a store gets beyond `wait` for all that is still to be asked then.
PATIENCE: Final = 5.0


class Over(Exception):
    """The call has no time left."""

    def __str__(self) -> str:
        return "The time limit of the call has passed."


_end: ContextVar[float] = ContextVar("distlock_end", default=math.inf)


def end(seconds: float = math.inf) -> float:
    """Return until when to wait (`time.monotonic`) for what may take so many seconds by itself."""
    return min(time.monotonic() + seconds, _end.get())


def left(seconds: float = math.inf) -> float:
    """Return for how many of these seconds to wait: not below 0, nor for longer than the call."""
    return max(0.0, min(seconds, _end.get() - time.monotonic()))


def spend(until: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call that lasts until then (`time.monotonic`) at most, or as long as one around it.

    In a context of its own, so that nothing has to be put back where a signal's handler raises.
    """
    context = copy_context()
    context.run(_end.set, min(until, _end.get()))
    return context.run(call, *args, **kwargs)


def apart(work: Callable[[], T], name: str) -> T:
    """Do some work that knows no bound; if the call ends first, leave it behind, by `Over`."""
    seconds = left()
    if seconds == math.inf:
        return work()
    try:
        return begun(work, name).result(seconds)
    except TimeoutError as error:
        raise Over from error
