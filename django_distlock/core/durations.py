"""Durations are seconds: a float, an int or a timedelta, checked in one place.

The time limit of a call is kept here as well. The code that starts a call sets the limit. Code that
waits for a store, however deep below, asks here how much time is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from datetime import timedelta
from typing import Final, ParamSpec, TypeAlias, TypeVar

from .errors import InvalidArgument, shown

P = ParamSpec("P")
T = TypeVar("T")

#: What a caller may give as a duration; numbers are seconds.
Duration: TypeAlias = float | timedelta

#: The shortest lease. Below it, the way to the store and back takes a good part of the lease.
MIN_TTL = 0.1

#: Seconds after `expires_at` in which nobody else is granted the key. Fixed, so that every
#: backend and every version of a rolling deployment agrees on when a key is free.
GRACE = 1.0

#: The longest time, in seconds, that one attempt waits inside the store.
MAX_BOUND = 1.0

#: Seconds that a transaction of ours may stand still, where the server can end it: a process that
#: is stopped there would keep what it has locked until it goes on, or its session ends.
MAX_STANDSTILL = 5.0

#: A hundred years, in seconds: far above it, adding seconds to a time leaves the calendar.
LONGEST = 3.2e9

#: Seconds above which a float cannot tell one from the next.
_MOST = 1e15


def number(value: object, name: str, *, minimum: float, maximum: float = math.inf) -> float:
    """Return `value`, a finite number within the bounds (inclusive), as a float.

    Raises:
        InvalidArgument: Another type (`bool` included), NaN, infinity, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name} must be a number, not {shown(value)}.")
    # Compared before float(): an int too large for a float is out of bounds, not OverflowError.
    if not minimum <= value <= min(maximum, _MOST):
        upper = "finite" if maximum == math.inf else f"at most {maximum:g}"
        raise InvalidArgument(
            f"{name} must be at least {minimum:g} and {upper}, not {shown(value)}."
        )
    return float(value)


def whole_number(value: object, name: str, most: float = math.inf) -> int:
    """Return `value`, an int from 1 to `most`; see `number`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        bounds = "of at least 1" if most == math.inf else f"from 1 to {most}"
        raise InvalidArgument(f"{name} must be an int {bounds}, not {shown(value)}.")
    return value


def seconds(value: object, name: str, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """Return a duration, a number of seconds or a `timedelta`, as seconds: see `number`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if (type(value) is float or type(value) is int) and minimum <= value <= min(maximum, _MOST):
        return float(value)  # Without making a message that nobody will read.
    return number(value, f"{name} (seconds)", minimum=minimum, maximum=maximum)


def wait_seconds(value: object) -> float | None:
    """Return how long to keep trying: seconds, 0 for one attempt, None for ever."""
    return None if value is None else seconds(value, "wait")


def ttl_seconds(value: object, *, maximum: float = math.inf) -> float:
    """Return a legal ttl in seconds, from 0.1 to `maximum`."""
    if type(value) is float and MIN_TTL <= value <= min(maximum, _MOST):
        return value
    return seconds(value, "ttl", minimum=MIN_TTL, maximum=maximum)


# The time of a call

#: Seconds that a store gets beyond `wait` for all that is still to be asked then.
PATIENCE: Final = 5.0


class Over(Exception):
    """The call has no time left."""

    def __str__(self) -> str:
        return "The time limit of the call has passed."


_end: ContextVar[float] = ContextVar("distlock_end", default=math.inf)


def end(seconds: float = math.inf) -> float:
    """Return when to stop waiting (`time.monotonic`): after these seconds, or with the call."""
    return min(time.monotonic() + seconds, _end.get())


def left(seconds: float = math.inf) -> float:
    """Return how long to wait: these seconds, but no longer than the call lasts; at least 0."""
    return max(0.0, min(seconds, _end.get() - time.monotonic()))


def spend(until: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call that lasts until then (`time.monotonic`) at most, or as long as one around it.

    In a context of its own, so that nothing has to be put back where a signal's handler raises.
    """
    context = copy_context()
    context.run(_end.set, min(until, _end.get()))
    return context.run(call, *args, **kwargs)
