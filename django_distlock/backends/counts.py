"""How much a store keeps of locks, as values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from ..core.records import Record

if TYPE_CHECKING:
    from .base import BaseLockBackend

#: Keys that are named, of those that most wait for.
MOST: Final = 8


@dataclass(frozen=True, slots=True)
class Count:
    """A number, and whether it is just that, or about that."""

    number: int
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much a backend keeps; None: its store cannot tell, or has nothing of the kind.

    The numbers are of this backend alone.

    Attributes:
        held: Leases that are held now, of a shared key each.
        expired: Records of leases that are over, which nobody has removed yet.
        waiters: Who waits, and is noted.
        sizes: Of the tables that it shares with others of its database.
        memory: Bytes that its servers use for all that they keep.
    """

    held: Count | None = None
    expired: Count | None = None
    waiters: Count | None = None
    counters: Count | None = None
    highest: Count | None = None
    sizes: Sizes | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """How many keys are in which state; see `inspection.Summary`."""

    held: Count
    waiting: Count | None
    ending_soon: Count
    past_expiry: Count
    settled: Count
    no_expiry: Count
    stop_requested: Count


@dataclass(frozen=True, slots=True)
class Strain:
    """Where it is tight; see `inspection.Summary`."""

    overdue: float | None = None
    most_waited: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, overdue: Iterable[float | None], waited: Iterable[tuple[str, int]]) -> Strain:
        """Return what of all this is the worst."""
        known = [each for each in overdue if each is not None and math.isfinite(each)]
        waited = sorted((each for each in waited if each[1]), key=lambda each: (-each[1], each[0]))
        return cls(max(known, default=None), tuple(waited[:MOST]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """A table, as its database tells of it; None: it does not.

    Attributes:
        bytes: With indexes.
        rows: About how many, of all backends that share the table.
        dead: About how many dead tuples wait for a vacuum.
        vacuumed_at: When the last vacuum was.
        made: How many rows were made since the database has counted that.
    """

    name: str
    bytes: int | None = None
    rows: int | None = None
    dead: int | None = None
    vacuumed_at: datetime | None = None
    made: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the tables of locks take.

    Attributes:
        bytes: Of all of the database, where it cannot tell by table.
        made_since: Since when PostgreSQL has counted what was made; None: since it was set up.
    """

    database: str
    bytes: int | None = None
    made_since: datetime | None = None
    tables: tuple[TableSize, ...]


def counted(counts: object, kind: type[Counts | States]) -> dict[str, Any]:
    """Return the numbers of counts for JSON; `estimated` names those that are about so."""
    names = [name for name in kind.__dataclass_fields__ if name not in ("sizes", "memory")]
    found: dict[str, Count | None] = {name: getattr(counts, name) for name in names}
    numbers = {name: None if each is None else each.number for name, each in found.items()}
    about = [name for name, each in found.items() if each is not None and not each.is_exact]
    return {**numbers, "estimated": about}


def every_record(store: BaseLockBackend, **filters: str) -> Iterator[Record]:
    """Yield what is held, page by page; the filters are those of `BaseLockBackend.list`."""
    cursor = None
    while True:
        page = store.list(cursor=cursor, limit=1000, **filters)
        yield from page.records
        if (cursor := page.cursor) is None:
            return


def listed_states(store: BaseLockBackend, soon: float) -> tuple[States, Strain]:
    """Count page by page: of stores that cannot count."""
    found: Counter[str] = Counter()
    late: list[float | None] = []
    now = store.clock()
    for record in every_record(store):
        found.update(tally(record, now, soon))
        late.append(overdue(record, now))
    # Those that are free again are in no listing.
    found["past_expiry"] = max(found["past_expiry"], len(store.expired(limit=10_000)))
    if not store.supports_ttl:
        found["no_expiry"] = 0  # They end with their sessions.
    counts = {name: Count(found[name]) for name in States.__dataclass_fields__ if name != "waiting"}
    return States(waiting=None, **counts), Strain.of(late, ())


def overdue(record: Record, now: datetime) -> float | None:
    """Return which part of its ttl has gone since a lease was renewed, of one that has been."""
    # Of a ttl of 0, or one that is no number, somebody else is the author.
    if not record.ttl or record.renewed_at == record.acquired_at or record.is_settled:
        return None
    return max(0.0, (now - record.renewed_at).total_seconds()) / record.ttl


def tally(record: Record, now: datetime, soon: float) -> Iterator[str]:
    """Yield in which of the counted states a live record is. As `counting` asks a database."""
    yield "held"
    if record.expires_at is None:
        yield "no_expiry" if record.stop_requested_at is None else "stop_requested"
    elif record.is_settled:
        yield "settled"
    elif record.expires_at <= now:
        yield "past_expiry"
    else:
        if record.stop_requested_at is not None:
            yield "stop_requested"
        if record.expires_at <= now + timedelta(seconds=soon):
            yield "ending_soon"
