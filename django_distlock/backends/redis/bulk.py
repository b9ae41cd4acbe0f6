"""Many records of one server at once, by plain commands: a script for each takes far longer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ...core.errors import BackendUnavailable, LockError
from ...core.holders import Holder
from ...core.keys import whole_name
from ...core.records import SPOILED, Record, Unreadable
from .answers import recorded
from .lines import ThreadLines

#: Of a record, what is read. `free_at` is there as long as the record is.
_FIELDS: Final = (
    "free_at", "key", "token", "fence", "ttl", "acquired_at", "renewed_at", "expires_at", "holder",
    "wanted", "stop_requested_at", "shared", "renewed_until",
)  # fmt: skip


def live_records(
    line: ThreadLines, names: Sequence[str], again: Callable[[str], Record | None]
) -> Iterator[Record | Unreadable | None]:
    """Yield the records with these names, in their order; None: nobody holds the key.

    Args:
        line: The connections to the server that has them.
        again: Reads one by itself that the server had no answer for: it has moved, or is spoiled.
    """
    time, *answers = line.commands([("TIME",), *(("HMGET", name, *_FIELDS) for name in names)])
    if isinstance(time, Exception):
        raise time
    now = int(time[0]) * 1_000_000 + int(time[1])
    for name, answer in zip(names, answers, strict=True):
        try:
            if isinstance(answer, Exception):
                yield again(name)
                continue
            yield _live(answer, now)
        except BackendUnavailable:
            raise
        except (LockError, *SPOILED) as error:
            yield Unreadable.of(key_of(name), error)


def key_of(name: str) -> str:
    """Return the key that a record's name in the store is about."""
    return whole_name(name).partition("}:")[2]


def _live(answer: Sequence[str | bytes | None], now: int) -> Record | None:
    free_at, *_others = answer
    # "" is without expiry. A client of the project's own making may decode.
    if free_at is None or (free_at and int(free_at) <= now):
        return None
    fields = {
        field: value if isinstance(value, str) else str(value, "utf-8")
        for field, value in zip(_FIELDS, answer, strict=True)
        if value is not None
    }
    # A list names a holder that cannot be read.
    return recorded(fields, Holder.from_json(json.loads(fields["holder"])))


def waiting(line: ThreadLines, names: Sequence[str]) -> list[int]:
    """Return how many wait by each of these notes; 0: also where somebody has spoiled them."""
    if not names:
        return []
    seconds, micros = map(int, line.command("TIME"))
    after = f"({seconds * 1_000_000 + micros}"
    answers = line.commands([("ZCOUNT", name, after, "+inf") for name in names])
    return [each if isinstance(each, int) else 0 for each in answers]


def held_by(
    line: ThreadLines, names: Sequence[str], host: str | None, task_id: str | None
) -> list[bool]:
    """Say of each of these records whether it may be this holder's; None: any."""
    answers = line.commands([("HGET", name, "holder") for name in names])
    return [_is_of(answer, host, task_id) for answer in answers]


def _is_of(answer: object, host: str | None, task_id: str | None) -> bool:
    if answer is None:
        return False
    if not isinstance(answer, str | bytes):
        return True  # An error: let it be read by itself.
    try:
        holder = Holder.from_json(json.loads(answer))
    except SPOILED:
        return True  # The same.
    return host in (None, holder.host) and task_id in (None, holder.task_id)
