"""Metrics that are read at the time of a scrape, from this process and from the lock stores.

Queries of a store have a time limit. Their answers are kept for a while, and scrapers share them.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db.models import F, Q

from ...backends.base import BaseLockBackend
from ...backends.database import DatabaseBackend
from ...core.declarations import declarations
from ...core.errors import LockError
from ...core.keys import OWN_MARKER
from ...core.records import SPOILED, Holder, Record, from_microseconds
from ...database import vendors
from ...database.fields import number_in
from ...handler import lock_backends
from ...inspection.asking import PATIENCE, ask_each, begin_each
from ...locks import blocks
from ...locks.release import Release
from ...models import HeldLock
from ...process.heartbeat import heartbeat_of, held_here
from ...scheduling import overdue
from .instruments import (
    ACTIVE,
    HELD_PAST_EXPIRY,
    LAG,
    LOCKS_HELD,
    OLDEST,
    OVERDUE,
    OVERDUE_TICK,
    PROCESS_GAUGES,
    STORE_UP,
    WAITING,
    Instrument,
)

#: Seconds for which a scrape reuses an answer.
MAX_AGE: Final = 5.0
#: The maximum of locks that are counted.
MOST: Final = 100_000
#: Seconds for listing the locks of a store that cannot count them.
LONGEST_WALK: Final = 0.5
#: How many grants, the oldest ones, are looked at for their prefixes.
OLD: Final = 1000

#: Values by the labels of their instrument.
Values = dict[tuple[str, ...], float]
#: Keys, with seconds of each.
Ages = tuple[tuple[str, float], ...]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a store answers.

    Attributes:
        code: "ok", the code of the error, "misconfigured", or "timeout": no answer in time, or an
            error that is none of this package's.
        seconds: How long the round trip took; None: it did not succeed.
    """

    code: str
    seconds: float | None = None

    @property
    def is_up(self) -> bool:
        """Whether the store answers."""
        return self.code == "ok"


@dataclass(frozen=True, slots=True)
class Counted:
    """How many locks a store has, up to 100 000 each.

    Attributes:
        held: Keys that cannot be granted to another holder now.
        past_expiry: Records of leases that expired without a release.
        oldest: The 1000 oldest keys under which a holder works, with the seconds since their
            grants.
    """

    held: int
    past_expiry: int
    oldest: Ages


def health(*, max_age: float = MAX_AGE, patience: float = PATIENCE) -> dict[str, Health]:
    """Return whether each configured store answers, within `patience` seconds for all of them."""
    answers = ask_each(_look, max_age=max_age, patience=patience)
    return {alias: each or Health("timeout") for alias, each in answers.items()}


def process_numbers() -> Mapping[Instrument, Mapping[tuple[str, ...], float]]:
    """Return the values of each gauge of this process, by labels, without querying a store."""
    leases = [each.holding for each in held_here.all() if isinstance(each, Release)]
    active = Counter(each.backend for each in leases if each.held)
    # The leases of blocks that this process has entered and not left.
    entered = [each.lease for each in list(blocks.every) if not each.inner and each.is_open]
    overdue = Counter(each.backend for each in entered if each is not None and each.is_lost)
    found: dict[Instrument, dict[tuple[str, ...], float]] = {each: {} for each in PROCESS_GAUGES}
    for alias in lock_backends:
        try:
            store = lock_backends[alias]
        except ImproperlyConfigured:
            continue  # `check` says why.
        found[ACTIVE][alias,] = active[alias]
        found[OVERDUE][alias,] = overdue[alias]
        found[WAITING][alias,] = len(store.queues.all())
        found[LAG][alias,] = heartbeat_of(store).lag
    return found


def store_numbers(prefix_of: Callable[[str], str]) -> Mapping[Instrument, Values]:
    """Return the values of the gauges of all stores; unknown values are left out."""
    # All queries begin before this waits for the first answer.
    begin_each(_count, max_age=MAX_AGE)
    begin_each(_late, max_age=MAX_AGE)
    up = {alias: float(each.is_up) for alias, each in health().items()}
    held, over, oldest, late = Values(), Values(), Values(), Values()
    for alias, counted in _answers(_count):
        held[alias,] = counted.held
        over[alias,] = counted.past_expiry
        _put_highest(oldest, alias, counted.oldest, prefix_of)
    for alias, ages in _answers(_late):
        _put_highest(late, alias, ages, prefix_of)
    return {
        STORE_UP: {(alias,): each for alias, each in up.items()},
        LOCKS_HELD: held,
        HELD_PAST_EXPIRY: over,
        OLDEST: oldest,
        OVERDUE_TICK: late,
    }


def _answers(question: Callable[[str], T | None]) -> Iterator[tuple[str, T]]:
    for alias, answer in ask_each(question, max_age=MAX_AGE, patience=PATIENCE).items():
        if answer is not None:
            yield alias, answer


def _put_highest(values: Values, alias: str, ages: Ages, prefix_of: Callable[[str], str]) -> None:
    for key, seconds in ages:
        labels = alias, prefix_of(key)
        values[labels] = max(seconds, values.get(labels, 0.0))


def _look(alias: str) -> Health:
    started_at = time.monotonic()
    try:
        lock_backends[alias].clock()
    except LockError as error:
        return Health(error.code)
    except ImproperlyConfigured:
        return Health("misconfigured")
    return Health("ok", time.monotonic() - started_at)


def _count(alias: str) -> Counted | None:
    store = lock_backends[alias]
    if isinstance(store, DatabaseBackend):
        return store._connections.ask(partial(_count_rows, store), writes=False, long=True)
    return _count_listed(store) if store.supports_listing else None


def _count_rows(store: DatabaseBackend, using: str) -> Counted:
    now = vendors.of(using).now()
    rows = store._own_rows(HeldLock, using)
    held = rows.filter(Q(free_at__isnull=True) | Q(free_at__gt=now))
    # A key that is kept after its run has no grace, so its two times are the same.
    over = rows.filter(expires_at__lte=now).exclude(free_at=F("expires_at"))
    old = held.order_by("acquired_at")
    times = map(number_in, ("acquired_at", "expires_at", "free_at"))
    grants: list[tuple[str, datetime]] = []
    for key, since, ends, free, holder in old.values_list("key", *times, "holder")[: 2 * OLD]:
        if (ends is None or ends != free) and _works(key, holder):
            with suppress(*SPOILED):
                grants.append((key, from_microseconds(since)))
    return Counted(held[:MOST].count(), over[:MOST].count(), _oldest(grants, now))


def _count_listed(store: BaseLockBackend) -> Counted | None:
    until = time.monotonic() + LONGEST_WALK
    now, cursor, held, over = store.clock(), None, 0, 0
    grants: list[tuple[str, datetime]] = []
    while held < MOST:
        page = store.list(cursor=cursor, limit=1000)
        grants += [
            (each.key, each.acquired_at)
            for each in page.records
            if not each.is_settled and _works(each.key, each.holder)
        ]
        held += len(page.records)
        over += sum(_is_over(each, now) for each in page.records)
        if (cursor := page.cursor) is None:
            # A listing does not contain expired records whose keys are free again.
            over = max(over, len(store.expired(limit=10_000)))
            return Counted(held, over, _oldest(grants, now))
        if time.monotonic() > until:
            return None
    return Counted(held, over, _oldest(grants, now))


def _late(alias: str) -> Ages:
    """Return the schedules with a declared interval, and the seconds that each is overdue."""
    told = {each.key: each for _made, each in declarations() if each.every is not None}
    store = lock_backends[alias]
    # The memory of one process does not show what other processes ran.
    ours = (each for each in told.values() if each.lock.backend == alias and store.distributed)
    return tuple((each.key, overdue(store, each)) for each in ours)


def _oldest(grants: Iterable[tuple[str, datetime]], now: datetime) -> Ages:
    oldest = heapq.nsmallest(OLD, grants, key=lambda each: each[1])
    return tuple((key, max(0.0, (now - since).total_seconds())) for key, since in oldest)


def _works(key: str, holder: Holder | Mapping[str, object]) -> bool:
    """Whether a holder works under a key: no queued task, no leader and no mark of a beat."""
    try:
        holder = holder if isinstance(holder, Holder) else Holder.from_json(holder)
    except SPOILED:
        return False
    is_mark = not holder.pid and key.startswith(OWN_MARKER)
    return not (holder.is_queued or holder.leads or is_mark)


def _is_over(record: Record, now: datetime) -> bool:
    ends = record.expires_at
    return ends is not None and ends <= now and record.free_at != ends
