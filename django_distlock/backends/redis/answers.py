"""Read the answers of the scripts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from ...core.errors import InvalidArgument
from ...core.keys import whole_name
from ...core.logs import log_fields
from ...core.records import (
    SPOILED,
    Attempt,
    Contended,
    Counter,
    Grant,
    Holder,
    InTheWay,
    Record,
    Unreadable,
    Waiting,
    all_or_none,
    check_fence,
    from_microseconds,
    known_holder,
    used_up,
)

#: The fields of a record that are read without a script. Every record has `free_at`.
FIELDS: Final = (
    "free_at", "key", "token", "fence", "ttl", "acquired_at", "renewed_at", "expires_at", "holder",
    "wanted", "stop_requested_at", "shared", "renewed_until",
)  # fmt: skip

logger = logging.getLogger("django_distlock")


def granted(attempt: Attempt, answer: str) -> Grant | Contended:
    """Read the answer to an acquire."""
    outcome, _, rest = answer.partition(" ")
    if outcome != "granted":
        return _contended(attempt.key, outcome, rest)
    fence, now, expires_at = rest.split(" ")
    check_fence(attempt.key, int(fence))
    return attempt.grant(int(fence), from_microseconds(int(now)), _instant(expires_at))


def granted_many(attempts: Sequence[Attempt], answer: str) -> list[Grant] | InTheWay:
    """Read the answer to an acquire of several keys."""
    place, told = json.loads(answer)
    if place:
        attempts, told = attempts[place - 1 : place], [told]
    return all_or_none(map(granted, attempts, told), attempts)


def extended(grant: Grant, ttl: float | None, answer: str) -> Grant | None:
    """Read the answer to an extend."""
    outcome, *rest = answer.split(" ")
    if outcome != "extended":
        extra = log_fields("extend_failed", key=grant.key, fence=grant.fence)
        logger.debug("%r cannot be extended: %s", grant.key, outcome, extra=extra)
        return None
    fence, acquired_at, stop, expires_at = rest
    granted_at = from_microseconds(int(acquired_at))
    return grant.renewed(ttl, int(fence), granted_at, _instant(expires_at), stop == "1")


def _contended(key: str, outcome: str, rest: str) -> Contended:
    if outcome == "overflow":
        raise used_up(key)
    if outcome == "duplicate":
        raise InvalidArgument("This token already holds another key.", key=key)
    now, _, described = rest.partition(" ")
    observed_at, paused = from_microseconds(int(now)), outcome == "paused"
    if not described:
        return Contended(observed_at=observed_at, paused=paused)
    try:
        return _record(described).contended(observed_at, paused=paused)
    except SPOILED:
        # The record is spoiled, but the key is held. That is not an error for a waiter.
        return Contended(observed_at=observed_at, paused=paused)


def held(answer: str) -> Record | None:
    """Read an answer with a record; None: nobody holds the key."""
    outcome, _, rest = answer.partition(" ")
    return _record(rest.partition(" ")[2]) if outcome == "held" else None


def sharing(answer: str) -> list[Record]:
    """Read the records of all that share a key."""
    return [_recorded(each) for each in json.loads(answer)]


def counted(answer: str) -> Counter | None:
    """Read a key's counter; None: it was never granted, and is not paused."""
    fence, until, by = answer.split(" ", 2)
    if until:
        return Counter(int(fence), from_microseconds(int(until)), by or None)
    return Counter(int(fence)) if int(fence) else None


def waiting(answer: str) -> list[Waiting]:
    """Return the waiters, the first to come first."""
    found = json.loads(answer)
    shown = []
    # Each note is followed by its end.
    for note, until in zip(found[::2], found[1::2], strict=True):
        # A spoiled note is left out.
        with suppress(*SPOILED):
            since, is_woken, _number, told = note.split(" ", 3)
            holder = Holder.from_json(json.loads(told))
            times = from_microseconds(int(since)), from_microseconds(int(float(until)))
            shown.append(Waiting(holder, *times, is_woken == "1"))
    return sorted(shown, key=lambda each: each.since)


def _record(described: str) -> Record:
    return _recorded(json.loads(described))


def _recorded(fields: Mapping[str, str]) -> Record:
    try:
        told = json.loads(fields["holder"])
    except SPOILED:
        told = None
    return _record_of(fields, known_holder(told))


def live_record(values: Sequence[str | bytes | None], now: int) -> Record | None:
    """Read the values of `FIELDS`, at a time of the server's; None: nobody holds the key."""
    free_at, *_others = values
    # "" means no expiry. A client of the project may decode answers.
    if free_at is None or (free_at and int(free_at) <= now):
        return None
    fields = {
        field: value if isinstance(value, str) else str(value, "utf-8")
        for field, value in zip(FIELDS, values, strict=True)
        if value is not None
    }
    # In a listing, a spoiled holder is an error.
    return _record_of(fields, Holder.from_json(json.loads(fields["holder"])))


def unreadable(name: str, error: Exception) -> Unreadable:
    """Return the description of a record, by its name in the store, that cannot be read."""
    return Unreadable.of(key_of(name), error)


def key_of(name: str) -> str:
    """Return the key of a record, by its name in the store."""
    return whole_name(name).partition("}:")[2]


def _record_of(fields: Mapping[str, str], holder: Holder) -> Record:
    return Record(
        key=fields["key"],
        token=fields["token"],
        fence=int(fields["fence"]),
        ttl=float(fields["ttl"]) if fields["ttl"] else None,
        acquired_at=from_microseconds(int(fields["acquired_at"])),
        renewed_at=from_microseconds(int(fields["renewed_at"])),
        expires_at=_instant(fields["expires_at"]),
        free_at=_instant(fields["free_at"]),
        holder=holder,
        wanted="wanted" in fields,
        stop_requested_at=_instant(fields.get("stop_requested_at")),
        shared="shared" in fields,
        renewed_until=_instant(fields.get("renewed_until")),
    )


def _instant(microseconds: str | None) -> datetime | None:
    return from_microseconds(int(microseconds)) if microseconds else None
