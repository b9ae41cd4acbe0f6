"""Values that say how much a store keeps."""

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

#: How many of the keys with the most waiters are named.
MOST: Final = 8


@dataclass(frozen=True, slots=True)
class Count:
    """A number, and whether it is exact or estimated."""

    number: int
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much a backend keeps; None: unknown, or not applicable.

    The numbers are those of this backend alone, if not said otherwise.

    Attributes:
        held: Leases that are held now; each holder of a shared key counts.
        expired: Records of expired leases that nobody has removed yet.
        waiters: Waiters that are noted.
        sizes: The tables, which other backends on the database share.
        memory: Bytes that its servers use, for all of their data.
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
    """Signs of overload; see `inspection.Summary`."""

    overdue: float | None = None
    most_waited: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, overdue: Iterable[float | None], waited: Iterable[tuple[str, int]]) -> Strain:
        """Return the worst of these values."""
        known = [each for each in overdue if each is not None and math.isfinite(each)]
        waited = sorted((each for each in waited if each[1]), key=lambda each: (-each[1], each[0]))
        return cls(max(known, default=None), tuple(waited[:MOST]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """Statistics of a table; None: unknown to the database.

    Attributes:
        bytes: The size with indexes.
        rows: An estimate for all backends that share the table.
        dead: An estimate of the dead tuples that wait for a vacuum.
        vacuumed_at: When the last vacuum was.
        made: How many rows were inserted since `Sizes.made_since`.
    """

    name: str
    bytes: int | None = None
    rows: int | None = None
    dead: int | None = None
    vacuumed_at: datetime | None = None
    made: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the tables of locks.

    Attributes:
        bytes: The size of the whole database, if that of tables is unknown.
        made_since: When PostgreSQL began to count inserted rows; None: when it was set up.
    """

    database: str
    bytes: int | None = None
    made_since: datetime | None = None
    tables: tuple[TableSize, ...]


def counted(counts: object, kind: type[Counts | States]) -> dict[str, Any]:
    """Return the numbers for JSON; `estimated` lists those that are estimates."""
    names = [name for name in kind.__dataclass_fields__ if name not in ("sizes", "memory")]
    found: dict[str, Count | None] = {name: getattr(counts, name) for name in names}
    numbers = {name: None if each is None else each.number for name, each in found.items()}
    about = [name for name, each in found.items() if each is not None and not each.is_exact]
    return {**numbers, "estimated": about}


def every_record(store: BaseLockBackend, **filters: str) -> Iterator[Record]:
    """Yield all held locks, page by page; the filters are those of `BaseLockBackend.list`."""
    cursor = None
    while True:
        page = store.list(cursor=cursor, limit=1000, **filters)
        yield from page.records
        if (cursor := page.cursor) is None:
            return


def listed_states(store: BaseLockBackend, soon: float) -> tuple[States, Strain]:
    """Count page by page, for stores that cannot count."""
    found: Counter[str] = Counter()
    late: list[float | None] = []
    now = store.clock()
    for record in every_record(store):
        found.update(tally(record, now, soon))
        late.append(overdue(record, now))
    # Listings do not contain keys that are free again.
    found["past_expiry"] = max(found["past_expiry"], len(store.expired(limit=10_000)))
    if not store.supports_ttl:
        found["no_expiry"] = 0  # Session locks end with their sessions.
    counts = {name: Count(found[name]) for name in States.__dataclass_fields__ if name != "waiting"}
    return States(waiting=None, **counts), Strain.of(late, ())


def overdue(record: Record, now: datetime) -> float | None:
    """Return the part of the ttl that has passed since the last renewal; None: not renewed yet."""
    # Only another program writes a ttl of 0, or one that is not a number.
    if not record.ttl or record.renewed_at == record.acquired_at or record.is_settled:
        return None
    return max(0.0, (now - record.renewed_at).total_seconds()) / record.ttl


def tally(record: Record, now: datetime, soon: float) -> Iterator[str]:
    """Yield the states of a live record that are counted. `counting` has the same rules in SQL."""
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
