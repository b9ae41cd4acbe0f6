"""What is in a store: locks, leases that nobody gave back, waiters, pauses. Only read."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from django.db.models import F, QuerySet

from ...backends.base import BaseLockBackend
from ...backends.database import DatabaseBackend
from ...backends.tables import FenceTable
from ...checks.configured import is_redis
from ...core.holders import Holder
from ...core.records import Record, known_holder
from ...core.wording import counted, instant, span
from ...database import vendors
from ...managers.rows import between
from ...models import FenceCounter, HeldLock, Waiter
from .findings import Notes
from .scanned import NAMED, Some, dead_or_not, scan_locks, whose

if TYPE_CHECKING:
    from ...backends.redis import RedisBackend

#: Waiters of one key that are too many.
MANY_WAITERS: Final = 100
#: Seconds that a pause may still last.
LONG_PAUSE: Final = 3600.0
#: Keys of a Redis above which it is not walked through: a walk takes seconds then.
MANY_KEYS: Final = 5_000_000
#: Waiters, or keys of a Redis, of a page.
PAGE: Final = 1000
#: Seconds after which no further waiters are looked at.
SECONDS: Final = 10.0


def scan(store: BaseLockBackend, notes: Notes, limit: int) -> None:
    """Note what is wrong with what a store keeps.

    Args:
        limit: How many locks to look at, and how many waiters.
    """
    if is_redis(store):
        keys = sum(map(int, store.store.of_each_server("DBSIZE").values()))
        if keys > MANY_KEYS:
            text = f"its Redis has {keys} keys, more than {MANY_KEYS}: not scanned"
            notes.skip("locks", text)
            return
    is_dead = dead_or_not()
    scan_locks(store, notes, limit, is_dead)
    if isinstance(store, DatabaseBackend):
        store._ask(lambda on: _note_over(store, on, notes), writes=False, long=True)

        def note_waiters(on: str) -> None:
            late = _of(Waiter, store, on).filter(until__lte=vendors.of(on).now()).count()
            _note_waiters(notes, _waiting_in(store, on), limit, is_dead, late)

        store._ask(note_waiters, writes=False, long=True)
    elif is_redis(store):
        _note_waiters(notes, _waiting_in_redis(store), limit, is_dead)
    _note_pauses(store, notes, limit)


# Leases that nobody gave back. Redis removes their records by itself.


def _note_over(store: DatabaseBackend, on: str, notes: Notes) -> None:
    now = vendors.of(on).now()
    # What is kept behind its run has ended as it was to.
    rows = _of(HeldLock, store, on).filter(free_at__lte=now).exclude(free_at=F("expires_at"))
    some = Some(number=rows.count())
    for row in rows.order_by("-free_at")[:NAMED]:
        each: Record = row.as_record()
        ago = span((now - each.free_at).total_seconds()) if each.free_at else "-"
        some.named[each.key] = f"{whose(each.holder)}, {ago} ago"
    if not some.number:
        notes.look("expired leases", "none that was not released")
        return
    notes.find(
        "D004",
        "expired leases",
        f"{counted(some.number, 'lease')} expired without a release: {some}",
        "Their holders have died, were frozen, or are still working without the lock. Check these"
        " processes, then remove the records with distlock_cleanup.",
        keys=some.keys,
    )


# Waiters


def _note_waiters(
    notes: Notes,
    waiting: Iterable[tuple[str, Sequence[Holder]]],
    limit: int,
    is_dead: Callable[[Holder], bool],
    late: int = 0,
) -> None:
    """Note who waits.

    Args:
        waiting: Keys, and who waits for them. A key may come several times.
        limit: How many waiters to look at.
        late: How many notes have lasted for longer than they were to.
    """
    crowd: Counter[str] = Counter()
    dead: Counter[str] = Counter()
    cut, until = "", time.monotonic() + SECONDS
    for key, holders in waiting:
        if crowd.total() >= limit or time.monotonic() > until:
            cut = f" (the first {crowd.total()}; there are more)"
            break
        crowd[key] += len(holders)
        dead[key] += sum(map(is_dead, holders))
    dead = +dead
    if late or dead:
        some = Some()
        for key in dead:
            some.add(key)
        of_dead = f", {dead.total()} of processes of this host that have ended: {some}"
        notes.find(
            "D002",
            "orphan waiters",
            f"records of dead waiters: {late} have expired{of_dead if dead else ''}{cut}",
            "They block nobody. distlock_cleanup removes the expired ones.",
            keys=some.keys,
        )
    else:
        notes.look("orphan waiters", f"none among {crowd.total()} waiters{cut}")
    crowded = [(key, number) for key, number in crowd.most_common() if number >= MANY_WAITERS]
    if crowded:
        named = crowded[:NAMED]
        notes.find(
            "D003",
            "waiters",
            f"{counted(len(crowded), 'key')} with {MANY_WAITERS} waiters or more: "
            + ", ".join(f"{key!r} ({number})" for key, number in named),
            "Check who holds them, and for how long. Shorten the wait of the callers, or lock"
            " less.",
            keys=[key for key, _number in named],
        )


def _waiting_in(store: DatabaseBackend, on: str) -> Iterator[tuple[str, list[Holder]]]:
    """Yield waiters page by page: without a cursor, which no pooler keeps."""
    rows = _of(Waiter, store, on).filter(until__gt=vendors.of(on).now()).order_by("pk")
    prefix, last = len(store._namespace()), 0
    while found := list(rows.filter(pk__gt=last).values_list("pk", "storage_key", "holder")[:PAGE]):
        yield from ((name[prefix:], [known_holder(holder)]) for _pk, name, holder in found)
        last = found[-1][0]


def _waiting_in_redis(store: RedisBackend) -> Iterator[tuple[str, list[Holder]]]:
    """Yield the keys that somebody waits for, and who."""
    for key in _keys_with(store, "waiters"):
        yield key, [each.holder for each in store.waiters.of(key)]


def _keys_with(store: RedisBackend, role: str) -> Iterator[str]:
    """Yield the keys that something is kept of, such as `"waiters"`, each once."""
    ours = re.compile(r"\{.{22}\}:(.*)", re.DOTALL)
    known: set[str] = set()
    for _line, page in store.store.walk(store._at(role, ""), "*", None, PAGE):
        for name, _place in page:
            if (match := ours.fullmatch(name)) and match[1] not in known:
                known.add(match[1])
                yield match[1]


# Pauses


def _note_pauses(store: BaseLockBackend, notes: Notes, limit: int) -> None:
    now = store.clock()
    some = Some()
    for key, until, by in _paused(store, now + timedelta(seconds=LONG_PAUSE), limit):
        left = span((until - now).total_seconds())
        some.add(key, f"by {by or 'nobody named'} for another {left}, until {instant(until)}")
    if not some.number:
        notes.look("pauses", "no key is paused for another hour")
        return
    notes.find(
        "D007",
        "pauses",
        f"{counted(some.number, 'key')} paused for another hour or more: {some}",
        "Ask the operator who paused them, and resume them (inspection.resume) when the reason no"
        " longer applies.",
        keys=some.keys,
    )


def _paused(
    store: BaseLockBackend, until: datetime, limit: int
) -> Iterator[tuple[str, datetime, str | None]]:
    """Yield keys that are paused until then or later: until when, and who wanted it."""
    if isinstance(store, FenceTable):

        def look(on: str) -> list[tuple[str, datetime, str | None]]:
            rows = _of(FenceCounter, store, on).filter(paused_until__gte=until)
            return list(rows.values_list("key", "paused_until", "paused_by")[:limit])

        yield from store._ask(look, writes=False, long=True)
    elif is_redis(store):
        for key in islice(_keys_with(store, "pause"), limit):
            counter = store.counter(key)
            if counter is not None and counter.paused_until and counter.paused_until >= until:
                yield key, counter.paused_until, counter.paused_by


def _of(model: type[Any], store: FenceTable, on: str) -> QuerySet[Any]:
    """Return the rows of a backend."""
    return between(model._default_manager.using(on), store._namespace(), None)
