"""Who waits, which leases nobody gave back, and what is paused: as each store keeps it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final

from django.db.models import Count, F, QuerySet

from ... import vendors
from ...backends.base import BaseLockBackend
from ...backends.database import DatabaseBackend
from ...backends.tables import FenceTable
from ...core.holders import Holder
from ...core.keys import prefix_end
from ...core.records import Record, known_holder
from ...models import FenceCounter, HeldLock, Waiter
from .kinds import is_redis

#: Waiters of a page.
PAGE: Final = 1000
#: Seconds after which no further ones are looked at.
SECONDS: Final = 10.0


@dataclass(slots=True)
class Crowd:
    """Who waits in a store, as far as it shows that.

    Attributes:
        looked_at: How many notes of waiters.
        is_cut: Whether there are more.
        over: How many notes have lasted for longer than they were to.
        dead: Keys for which processes of this host wait that have ended, with how many.
        crowded: Keys that very many wait for, with how many, the most first.
    """

    looked_at: int = 0
    is_cut: bool = False
    over: int = 0
    dead: Counter[str] = field(default_factory=Counter)
    crowded: dict[str, int] = field(default_factory=dict)


def crowd_of(
    store: BaseLockBackend, limit: int, *, many: int, is_dead: Callable[[Holder], bool]
) -> Crowd | None:
    """Return who waits; None: this store does not show that.

    Args:
        limit: How many waiters to look at.
        many: How many waiters of a key are very many.
    """
    if isinstance(store, DatabaseBackend):
        return store._ask(
            lambda on: _crowd_of_rows(store, on, limit, many, is_dead), writes=False, long=True
        )
    if is_redis(store):
        return _crowd_of_redis(store, limit, many, is_dead)
    return None


def over_of(store: BaseLockBackend, named: int) -> tuple[int, list[Record], datetime] | None:
    """Return how many leases ended without release, the last ones, and the store's clock.

    None: this store removes their records by itself.
    """
    if not isinstance(store, DatabaseBackend):
        return None

    def look(on: str) -> tuple[int, list[Record], datetime]:
        now = vendors.of(on).now()
        # What is kept behind its run has ended as it was to.
        rows = _of(HeldLock, store, on).filter(free_at__lte=now)
        rows = rows.exclude(free_at=F("expires_at"))
        last = [row.as_record() for row in rows.order_by("-free_at")[:named]]
        return rows.count(), last, now

    return store._ask(look, writes=False, long=True)


def paused_of(
    store: BaseLockBackend, until: datetime, limit: int
) -> Iterator[tuple[str, datetime, str | None]]:
    """Yield keys that are paused until then or later: until when, and who wanted it."""
    if isinstance(store, FenceTable):

        def look(on: str) -> list[tuple[str, datetime, str | None]]:
            rows = _of(FenceCounter, store, on).filter(paused_until__gte=until)
            return list(rows.values_list("key", "paused_until", "paused_by")[:limit])

        yield from store._ask(look, writes=False, long=True)
    elif is_redis(store):
        # Its driver need not be installed for the others.
        from .walked import keys_with

        for key in dict.fromkeys(islice(keys_with(store, "pause"), limit)):  # type: ignore[arg-type]
            counter = store.counter(key)
            if counter is not None and counter.paused_until and counter.paused_until >= until:
                yield key, counter.paused_until, counter.paused_by


def _crowd_of_rows(
    store: DatabaseBackend, on: str, limit: int, many: int, is_dead: Callable[[Holder], bool]
) -> Crowd:
    now, rows = vendors.of(on).now(), _of(Waiter, store, on)
    there = rows.filter(until__gt=now)
    crowd = Crowd(over=rows.filter(until__lte=now).count())
    prefix = len(store._namespace())
    for name, holder in _by_page(there, limit):
        crowd.looked_at += 1
        if is_dead(known_holder(holder)):
            crowd.dead[name[prefix:]] += 1
    crowd.is_cut = there.count() > crowd.looked_at
    numbers = there.values_list("storage_key").annotate(number=Count("pk")).filter(number__gte=many)
    crowd.crowded = {name[prefix:]: number for name, number in numbers.order_by("-number")}
    return crowd


def _crowd_of_redis(
    store: BaseLockBackend, limit: int, many: int, is_dead: Callable[[Holder], bool]
) -> Crowd:
    from .walked import keys_with

    crowd, known, until = Crowd(), set(), time.monotonic() + SECONDS
    for key in keys_with(store, "waiters"):  # type: ignore[arg-type]
        if crowd.looked_at >= limit or time.monotonic() > until:
            crowd.is_cut = True
            break
        if key in known:
            continue
        known.add(key)
        waiting = store.waiters(key)
        crowd.looked_at += max(1, len(waiting))
        if dead := sum(is_dead(each.holder) for each in waiting):
            crowd.dead[key] = dead
        if len(waiting) >= many:
            crowd.crowded[key] = len(waiting)
    crowd.crowded = dict(sorted(crowd.crowded.items(), key=lambda each: -each[1]))
    return crowd


def _by_page(rows: QuerySet[Any], limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and holders of waiters: without a cursor, which no pooler keeps."""
    last, until = 0, time.monotonic() + SECONDS
    while limit > 0 and time.monotonic() < until:
        page = rows.filter(pk__gt=last).order_by("pk")[: min(PAGE, limit)]
        found = list(page.values_list("pk", "storage_key", "holder"))
        yield from ((name, holder) for _pk, name, holder in found)
        if len(found) < PAGE:
            return
        last, limit = found[-1][0], limit - len(found)


def _of(model: type[Any], store: FenceTable, on: str) -> QuerySet[Any]:
    """Return the rows of a backend."""
    prefix = store._namespace()
    rows: QuerySet[Any] = model._default_manager.using(on).filter(storage_key__gte=prefix)
    end = prefix_end(prefix)
    return rows if end is None else rows.filter(storage_key__lt=end)
