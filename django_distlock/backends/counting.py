"""Count the rows of locks in a database, or estimate them if there are very many."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, models
from django.db.models import F, Max, Q

from ..conf import DEFAULT_TABLES, table
from ..core.records import to_microseconds
from ..database import vendors
from ..database.connections import rows_of
from ..models import FenceCounter, HeldLock, Waiter
from .counts import MOST, Count, Counts, Sizes, States, Strain, TableSize

if TYPE_CHECKING:
    from .tables import FenceTable

#: Above so many expected rows, PostgreSQL's estimate is used.
COUNTED: Final = 100_000

_TABLE = """
SELECT pg_total_relation_size(c.oid), greatest(c.reltuples, 0)::bigint, s.n_dead_tup,
    greatest(s.last_vacuum, s.last_autovacuum), s.n_tup_ins
FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.oid = to_regclass(%s)
"""
# The highest value that the last ANALYZE has seen, which need not be the highest of all.
_HIGHEST = """
SELECT greatest(
    (SELECT max(v) FROM unnest(histogram_bounds::text::bigint[]) v),
    (SELECT max(v) FROM unnest(most_common_vals::text::bigint[]) v)
) FROM pg_stats s JOIN pg_class c ON c.relname = s.tablename
    AND c.relnamespace = to_regnamespace(quote_ident(s.schemaname))
WHERE c.oid = to_regclass(%s) AND s.attname = 'fence'
"""
_SINCE = "SELECT stats_reset FROM pg_stat_database WHERE datname = current_database()"
_MYSQL_TABLE = """
SELECT data_length + index_length, table_rows FROM information_schema.tables
WHERE table_schema = %s AND table_name = %s
"""


def count_rows(store: FenceTable, *, locks: bool) -> Counts:
    """Count the rows of a backend, without locking any; `locks`: its locks are rows as well."""
    counts = store._connections.ask_within(lambda on: _count(store, on, locks=locks), long=True)
    return replace(
        counts, sizes=store._connections.ask_within(lambda on: _sizes(on, store), long=True)
    )


def count_states(store: FenceTable, soon: float) -> tuple[States, Strain]:
    """Count or estimate held keys by state, and the strain on the store."""
    return store._connections.ask_within(lambda on: _states(store, on, soon), long=True)


def _states(store: FenceTable, using: str, soon: float) -> tuple[States, Strain]:
    prefix = store._namespace()
    now = vendors.of(using).now()
    rows = store._own_rows(HeldLock, using)
    waiters = store._own_rows(Waiter, using).filter(until__gt=now)
    conditions = _conditions(now, soon)
    late: float | None = None
    if _is_many(rows):
        found = {
            name: Count(_expected(rows.filter(each)), False) for name, each in conditions.items()
        }
    else:
        numbers = rows.aggregate(
            **{name: models.Count("pk", filter=each) for name, each in conditions.items()},
            late=_late(now),
        )
        late = numbers.pop("late")
        found = {name: Count(number) for name, number in numbers.items()}
    most = waiters.values_list("storage_key").annotate(number=models.Count("pk"))
    waited = [(name[len(prefix) :], number) for name, number in most.order_by("-number")[:MOST]]
    return States(waiting=_number(waiters), **found), Strain.of([late], waited)


def _late(now: datetime) -> models.Aggregate:
    """Return the largest part of a ttl that has passed since a renewal: see `counts.overdue`."""
    gone = models.Value(to_microseconds(now)) - F("renewed_at")
    part = models.ExpressionWrapper(gone / (F("ttl") * 1e6), models.FloatField())
    renewed = Q(renewed_at__gt=F("acquired_at"), ttl__gt=0, free_at__gt=F("expires_at"))
    return Max(part, filter=renewed & Q(free_at__gt=now))


def _conditions(now: datetime, soon: float) -> dict[str, Q]:
    """Return the condition of each state: see `inspection.State`."""
    endless = Q(free_at__isnull=True)
    # A settled key is free when its lease ends.
    running = Q(expires_at__gt=now, free_at__gt=F("expires_at"))
    asked = Q(stop_requested_at__isnull=False)
    return {
        "held": endless | Q(free_at__gt=now),
        "ending_soon": running & Q(expires_at__lte=now + timedelta(seconds=soon)),
        # Also after the grace, until the key is acquired or the record removed.
        "past_expiry": Q(expires_at__lte=now, free_at__gt=F("expires_at")),
        "settled": Q(expires_at__gt=now, free_at=F("expires_at")),
        "no_expiry": endless & ~asked,
        "stop_requested": asked & (endless | running),
    }


def _count(store: FenceTable, using: str, *, locks: bool) -> Counts:
    counters = store._own_rows(FenceCounter, using)
    how_many = _number(counters)
    held = expired = waiters = None
    if locks:
        now = vendors.of(using).now()
        rows = store._own_rows(HeldLock, using)
        held = _number(rows.filter(Q(free_at__isnull=True) | Q(free_at__gt=now)), rows)
        expired = _number(rows.filter(free_at__lte=now), rows)
        waiters = _number(store._own_rows(Waiter, using).filter(until__gt=now))
    highest = _highest(store, using, counters, exact=how_many.is_exact)
    return Counts(held=held, expired=expired, waiters=waiters, counters=how_many, highest=highest)


def _number(rows: models.QuerySet[Any], among: models.QuerySet[Any] | None = None) -> Count:
    """Count rows, or estimate them if the query has to read very many: `among`, or the rows."""
    if _is_many(rows if among is None else among):
        return Count(_expected(rows), is_exact=False)
    return Count(rows.count())


def _is_many(rows: models.QuerySet[Any]) -> bool:
    """Whether PostgreSQL expects more rows than `COUNTED`."""
    return connections[rows.db].vendor == "postgresql" and _expected(rows) > COUNTED


def _expected(rows: models.QuerySet[Any]) -> int:
    """Return the number of rows that PostgreSQL's planner expects."""
    plan = json.loads(rows.order_by().explain(format="json"))
    return int(plan[0]["Plan"]["Plan Rows"])


def _highest(
    store: FenceTable, using: str, counters: models.QuerySet[Any], *, exact: bool
) -> Count | None:
    if exact:
        fence = counters.aggregate(highest=Max("fence"))["highest"]
    else:
        fences = store._connections.name("fences")
        fence = next(iter(rows_of(using, _HIGHEST, fences)), (None,))[0]
    return None if fence is None else Count(int(fence), exact)


def _sizes(using: str, store: FenceTable) -> Sizes:
    ours, database = store._connections, store.using
    names = {what: table(what) for what in DEFAULT_TABLES}
    vendor = connections[using].vendor
    if vendor == "postgresql":
        since = next(iter(rows_of(using, _SINCE)), (None,))[0]
        found = [
            TableSize(name=name, bytes=size, rows=rows, dead=dead, vacuumed_at=at, made=made)
            for what, name in names.items()
            for size, rows, dead, at, made in rows_of(using, _TABLE, ours.name(what))
        ]
        return Sizes(database=database, tables=tuple(found), made_since=since)
    if vendor == "mysql":
        found = [
            TableSize(name=name, bytes=None if size is None else int(size), rows=rows)
            for name in names.values()
            for size, rows in rows_of(using, _MYSQL_TABLE, ours.schema, name)
        ]
        return Sizes(database=database, tables=tuple(found))
    ((pages,),), ((size,),) = (
        rows_of(using, f"PRAGMA {what}") for what in ("page_count", "page_size")
    )
    return Sizes(database=database, tables=(), bytes=pages * size)
