"""Who may join those who share a key: one rule, for every store."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from datetime import datetime
from typing import Final, TypeAlias

from .errors import InvalidArgument, shown
from .pacing import SAFETY_SECONDS
from .records import Attempt, Contended, Record

#: Seconds for which nobody is granted a key shared after each question of who waits to hold it
#: alone: such a waiter asks again before.
DOOR_SECONDS: Final = SAFETY_SECONDS + 1.0

#: How many may hold a key at the same time at most, where there is a limit.
MAX_PERMITS: Final = 10_000
#: That number, or what returns it for the arguments of a decorated call.
Permits: TypeAlias = int | Callable[..., int]


def validate_permits(permits: object, name: str = "permits") -> int:
    """Return how many may hold a key, from 1 to `MAX_PERMITS`; messages call that by `name`."""
    if type(permits) is bool or not isinstance(permits, int) or not 0 < permits <= MAX_PERMITS:
        raise InvalidArgument(
            f"{name} must be an int from 1 to {MAX_PERMITS:,}, not {shown(permits)}."
        )
    return permits


def last_to_end(records: Sequence[Record]) -> Record:
    """Return the one of these that is free last."""
    return max(records, key=_free_at)


def in_the_way(
    attempt: Attempt,
    holders: Sequence[Record],
    closed_until: datetime | None,
    paused_until: datetime | None,
    now: datetime,
) -> Contended | None:
    """Return why a pause or the holders of a key are in the way of an attempt; None: they are not.

    An attempt to share a key in the place of another lease is refused where that is gone: others
    may have been there in between.

    Args:
        holders: The records of all who hold the key now: of one alone, or of those who share it.
        closed_until: Until when nobody is granted it shared, because somebody waits to hold it
            alone; None: nobody does.
        paused_until: Until when nobody is granted it; None: it is not paused.
    """
    if paused_until is not None and now < paused_until:
        if not holders:
            return Contended(observed_at=now, paused=True)
        return last_to_end(holders).contended(now, paused=True)
    others = [each for each in holders if not attempt.may_replace(each)]
    if not attempt.shared:
        return last_to_end(others).contended(now) if others else None
    has_place = len(others) < len(holders)
    if attempt.replace not in (None, attempt.token) and not has_place:
        return last_to_end(others).contended(now) if others else Contended(observed_at=now)
    if others and not others[0].shared:
        return last_to_end(others).contended(now)
    if has_place:
        return None
    is_full = attempt.permits is not None and len(others) >= attempt.permits
    if is_full or any(each.token == attempt.token for each in others):
        return min(others, key=_free_at).contended(now)
    if closed_until is not None and now < closed_until:
        if not others:
            # The last of them has left, and the waiter is woken or asks soon.
            return Contended(observed_at=now)
        found = last_to_end(others).contended(now)
        return changed(found, free_at=min(found.free_at or closed_until, closed_until))
    return None


def _free_at(record: Record) -> float:
    return math.inf if record.free_at is None else record.free_at.timestamp()
