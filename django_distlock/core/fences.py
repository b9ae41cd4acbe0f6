"""Numbers that order the writes of a key's holders."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Final

from .errors import InvalidArgument, LockError, shown
from .logs import log_fields

#: A grant with a fence above this logs a warning; above the maximum there are none.
FENCE_WARNING: Final = 800_000_000_000_000
FENCE_MAX: Final = 900_000_000_000_000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: What a fence that follows the clock counts: 15 digits last until the year 2255.
_STEP: Final = timedelta(microseconds=10)

logger = logging.getLogger("django_distlock")


def clock_fence(now: datetime) -> int:
    """Return the least fence of a grant at `now`, where fences follow the clock."""
    return (now - _EPOCH) // _STEP


def next_fence(key: str, last: int, floor: datetime | None) -> int:
    """Return the fence after `last`.

    Args:
        last: The counter of the key; 0: it had none yet.
        floor: The time whose `clock_fence` it is not to be below; None: it just counts.

    Raises:
        LockError: There is none: the key has used up its fences.
    """
    fence = last + 1 if floor is None else max(last + 1, clock_fence(floor))
    if fence > FENCE_WARNING:
        check_fence(key, fence)
    return fence


def check_fence(key: str, fence: int) -> None:
    """Warn before a key runs out of fences, and refuse the one after the last."""
    if fence > FENCE_MAX:
        raise used_up(key)
    if fence > FENCE_WARNING:
        extra = log_fields("fences_run_out", key=key, fence=fence)
        logger.warning("The fence of %r is %d; %d is the last.", key, fence, FENCE_MAX, extra=extra)


def used_up(key: str | None) -> LockError:
    """Return why a key is granted no more."""
    return LockError(f"The key {key!r} has used all its fences ({FENCE_MAX}).", key=key)


def validate_fence(value: object, *, least: int = 1, most: int = FENCE_MAX) -> int:
    """Return a fence that a counter may be raised to, or have.

    Args:
        least: 0 where that of a key that was never granted will do.
        most: Less where the key is to have some left.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(f"A fence must be an int from {least} to {most}, not {shown(value)}.")
    return value
