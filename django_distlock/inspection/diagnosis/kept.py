"""Examines the data of a store: locks, expired leases, waiters, pauses. It only reads."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from django.core import checks
from django.db.models import F

from ...backends.base import BaseLockBackend
from ...backends.database import DatabaseBackend
from ...backends.tables import FenceTable
from ...checks.configured import is_redis
from ...core.keys import UNIQUE_PREFIX
from ...core.records import Holder, Record, known_holder
from ...core.wording import counted, instant, span
from ...database import vendors
from ...models import FenceCounter, HeldLock, Waiter
from ...process.host import current_holder, is_gone
from .findings import Notes

if TYPE_CHECKING:
    from ...backends.redis import RedisBackend

#: Waiters of one key that are too many.
MANY_WAITERS: Final = 100
#: Seconds that are left of a pause that is too long.
LONG_PAUSE: Final = 3600.0
#: Keys of a Redis above which it is not scanned: a scan takes seconds then.
MANY_KEYS: Final = 5_000_000
#: Locks, waiters, or keys of a Redis, of a page.
PAGE: Final = 1000
#: The most keys that a finding names.
NAMED: Final = 3
#: Seconds after which no further locks of a backend are looked at, and no further waiters.
LOCK_SECONDS: Final = 20.0
WAITER_SECONDS: Final = 10.0
#: Seconds by which a grant may lie ahead of the store's clock: a cluster has several clocks.
AHEAD: Final = 1.0


def scan(store: BaseLockBackend, notes: Notes, limit: int) -> None:
    """Note what is wrong with a store's data, in at most `limit` locks and `limit` waiters."""
    if is_redis(store):
        keys = sum(map(int, store.store.of_each_server("DBSIZE").values()))
        if keys > MANY_KEYS:
            text = f"its Redis has {keys} keys, more than {MANY_KEYS}: not scanned"
            notes.skip("locks", text)
            return
    is_dead = _dead_or_not()
    _note_locks(store, notes, limit, is_dead)
    if isinstance(store, DatabaseBackend):
        store._connections.ask(lambda on: _note_over(store, on, notes), writes=False, long=True)

        def note_waiters(on: str) -> None:
            late = store._own_rows(Waiter, on).filter(until__lte=vendors.of(on).now()).count()
            _note_waiters(notes, _waiting_in(store, on), limit, is_dead, late)

        store._connections.ask(note_waiters, writes=False, long=True)
    elif is_redis(store):
        waited = _keys_with(store, "waiters")
        waiting = ((key, [each.holder for each in store.waiters.of(key)]) for key in waited)
        _note_waiters(notes, waiting, limit, is_dead)
    _note_pauses(store, notes, limit)


class _Trouble(NamedTuple):
    """A trouble of locks, and what is reported about it."""

    id: str
    what: str
    level: int
    text: str
    hint: str


_ENDLESS: Final = _Trouble(
    "D005",
    "holders",
    checks.ERROR,
    "held without expiry by processes of this host that have ended",
    "They are never released. Release them with distlock_release.",
)
_DEAD: Final = _Trouble(
    "D005",
    "holders",
    checks.WARNING,
    "held by processes of this host that have ended",
    "They expire by themselves, unless their work was handed over to another process. To free"
    " them now, use distlock_release.",
)
_OVER: Final = _Trouble(
    "D004",
    "holders",
    checks.WARNING,
    "whose leases have expired, in the grace period",
    "Their holders have not renewed them. Check whether these processes are frozen.",
)
_HIGHER: Final = _Trouble(
    "D006",
    "fences",
    checks.ERROR,
    "held with a fence above their counters, for example after a restore of the store",
    "Once they are released, raise the counters (distlock_fence raise --all --clock), and set"
    " FENCE_FLOOR to 'clock'.",
)
_SPOILED: Final = _Trouble(
    "D021",
    "records",
    checks.ERROR,
    "with unreadable records: another program writes to this store",
    "Find the other program. When no holder works under these locks any more, remove the records"
    " by hand and keep the fences. The runbook has the statements.",
)
_AHEAD: Final = _Trouble(
    "D012",
    "clock",
    checks.WARNING,
    "acquired in the future: the store's clock has stepped back",
    "Their leases last longer than intended. Find out what set the clock.",
)

#: Nothing is wrong with these locks: they are only counted.
_QUEUED: Final = _Trouble("", "locks", checks.DEBUG, "held by queued tasks", "")


@dataclass(slots=True)
class _Some:
    """A number of keys, and the names of a few of them."""

    number: int = 0
    named: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, about: str = "") -> None:
        """Count a key."""
        self.number += 1
        if len(self.named) < NAMED:
            self.named[key] = about

    @property
    def keys(self) -> list[str]:
        """The few keys that are named."""
        return list(self.named)

    def __str__(self) -> str:
        names = [f"{key!r} ({about})" if about else repr(key) for key, about in self.named.items()]
        return ", ".join(names) + (" …" if self.number > len(names) else "")


def _note_locks(
    store: BaseLockBackend, notes: Notes, limit: int, is_dead: Callable[[Holder], bool]
) -> None:
    """Note what is wrong with the locks that are held."""
    if not store.supports_listing:
        notes.skip("locks", "this store cannot list them")
        return
    wrong: dict[_Trouble, _Some] = defaultdict(_Some)
    locks, cut, cursor, until = 0, "", None, time.monotonic() + LOCK_SECONDS
    while True:
        page = store.list(cursor=cursor, limit=min(PAGE, limit - locks))
        now = store.clock()
        for spoiled in page.unreadable:
            wrong[_SPOILED].add(spoiled.key)
        fences = store._fences_of([store.queues.name_of(each.key) for each in page.records])
        for record, fence in zip(page.records, fences, strict=True):
            for trouble, about in _troubles(record, fence, now, is_dead):
                wrong[trouble].add(record.key, about)
        locks += len(page.unreadable) + len(page.records)
        if (cursor := page.cursor) is None:
            break
        if locks >= limit or time.monotonic() > until:
            cut = "; there are more"
            break
    queued = wrong.pop(_QUEUED, _Some()).number
    of_tasks = f", {queued} of them held by queued tasks" if queued else ""
    notes.look("locks", f"{counted(locks, 'lock')} checked{of_tasks}{cut}")
    for trouble, some in wrong.items():
        text = f"{counted(some.number, 'key')} {trouble.text}: {some}"
        level, hint = trouble.level, trouble.hint
        notes.find(trouble.id, trouble.what, text, hint, level=level, keys=some.keys)


def _dead_or_not() -> Callable[[Holder], bool]:
    """Return a function that tells whether a holder was a process of this host that has ended.

    Each process is looked up once. Not by its name: this command has the name that the settings
    give to workers.
    """
    ours = current_holder().boot_id

    @lru_cache(maxsize=10_000)
    def is_over(host: str, pid: int, started_at: float | None) -> bool:
        return is_gone(Holder(host=host, boot_id=ours, pid=pid, started_at=started_at))

    def is_dead(holder: Holder) -> bool:
        if ours == "" or holder.boot_id != ours:
            return False
        return is_over(holder.host, holder.pid, holder.started_at)

    return is_dead


def _whose(holder: Holder) -> str:
    """Return where a holder runs, as far as the store reports it."""
    process = f"{holder.process}[{holder.pid}]" if holder.pid else holder.process
    return " on ".join(each for each in (process, holder.host) if each) or "somebody"


def _troubles(
    record: Record, fence: int | None, now: datetime, is_dead: Callable[[Holder], bool]
) -> Iterator[tuple[_Trouble, str]]:
    """Yield the troubles of a lock, each with details."""
    holder, left = record.holder, record.free_at
    # A key that is kept after its run has no process, on purpose.
    if not record.is_settled:
        gone = is_dead(holder)
        # A worker that ended may have left the lock to the retry of its task; else it expires soon.
        if holder.is_queued or (gone and left and record.key.startswith(UNIQUE_PREFIX)):
            yield _QUEUED, ""
        elif gone and left:
            yield _DEAD, f"{_whose(holder)}, free at {instant(left)}"
        elif gone:
            yield _ENDLESS, f"{_whose(holder)}, without expiry"
        elif record.expires_at is not None and record.expires_at <= now:
            yield _OVER, _whose(holder)
    if (ahead := (record.acquired_at - now).total_seconds()) > AHEAD:
        yield _AHEAD, f"{span(ahead)} ahead"
    if fence is not None and fence < record.fence:
        yield _HIGHER, f"held with {record.fence}, counter at {fence}"


def _note_over(store: DatabaseBackend, on: str, notes: Notes) -> None:
    """Note leases that expired without a release. Redis removes their records by itself."""
    now = vendors.of(on).now()
    # A key that was kept after its run expires on purpose.
    rows = store._own_rows(HeldLock, on).filter(free_at__lte=now).exclude(free_at=F("expires_at"))
    some = _Some(number=rows.count())
    last = rows.order_by("-free_at").values_list("key", "free_at", "holder")[:NAMED]
    for key, since, holder in last:
        ago = span((now - since).total_seconds())
        some.named[key] = f"{_whose(known_holder(holder))}, {ago} ago"
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


def _note_waiters(
    notes: Notes,
    waiting: Iterable[tuple[str, Sequence[Holder]]],
    limit: int,
    is_dead: Callable[[Holder], bool],
    late: int = 0,
) -> None:
    """Note the waiters: keys may come several times; `late` is the number of expired records."""
    crowd: Counter[str] = Counter()
    dead: Counter[str] = Counter()
    cut, until = "", time.monotonic() + WAITER_SECONDS
    for key, holders in waiting:
        if crowd.total() >= limit or time.monotonic() > until:
            cut = f" (the first {crowd.total()}; there are more)"
            break
        crowd[key] += len(holders)
        dead[key] += sum(map(is_dead, holders))
    dead = +dead
    if late or dead:
        some = _Some(len(dead), dict.fromkeys(list(dead)[:NAMED], ""))
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
    """Yield waiters page by page, without a server's cursor, which no pooler keeps."""
    rows = store._own_rows(Waiter, on).filter(until__gt=vendors.of(on).now()).order_by("pk")
    prefix, last = len(store._namespace()), 0
    while found := list(rows.filter(pk__gt=last).values_list("pk", "storage_key", "holder")[:PAGE]):
        yield from ((name[prefix:], [known_holder(holder)]) for _pk, name, holder in found)
        last = found[-1][0]


def _keys_with(store: RedisBackend, role: str) -> Iterator[str]:
    """Yield the keys for which something is kept, such as `"waiters"`, each key once."""
    ours = re.compile(r"\{.{22}\}:(.*)", re.DOTALL)
    known: set[str] = set()
    for _line, page in store.store.walk(store._at(role, ""), "*"):
        for name, _place in page:
            if (match := ours.fullmatch(name)) and match[1] not in known:
                known.add(match[1])
                yield match[1]


def _note_pauses(store: BaseLockBackend, notes: Notes, limit: int) -> None:
    now = store.clock()
    some = _Some()
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
    """Yield keys that are paused until this time or later, with the pause's end and actor."""
    if isinstance(store, FenceTable):

        def look(on: str) -> list[tuple[str, datetime, str | None]]:
            rows = store._own_rows(FenceCounter, on).filter(paused_until__gte=until)
            return list(rows.values_list("key", "paused_until", "paused_by")[:limit])

        yield from store._connections.ask(look, writes=False, long=True)
    elif is_redis(store):
        for key in islice(_keys_with(store, "pause"), limit):
            counter = store.counter(key)
            if counter is not None and counter.paused_until and counter.paused_until >= until:
                yield key, counter.paused_until, counter.paused_by
