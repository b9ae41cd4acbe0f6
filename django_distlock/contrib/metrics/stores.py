"""What only the stores know: whether they answer, and how much they have."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.db.models import F, Q

from ... import vendors
from ...backends.base import BaseLockBackend
from ...backends.database import DatabaseBackend
from ...core.errors import LockError
from ...core.records import Record
from ...handler import lock_backends
from ...models import HeldLock
from ...rows import between
from .asking import ask_each, begin_each
from .instruments import HELD_PAST_EXPIRY, LOCKS_HELD, STORE_UP, Instrument

#: Seconds that a question may take before it counts as without an answer.
PATIENCE: Final = 2.0
#: Seconds for which an answer is good enough for a scrape.
MAX_AGE: Final = 5.0
#: Locks that are counted at most.
MOST: Final = 100_000
#: Seconds that a store is listed for, where it cannot count.
LONGEST_WALK: Final = 0.5


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a store answers.

    Attributes:
        code: "ok", the code of the error, "misconfigured", or "timeout": no answer in time.
        seconds: How long the round trip took; None: there was none.
    """

    code: str
    seconds: float | None = None

    @property
    def is_up(self) -> bool:
        """Whether it does."""
        return self.code == "ok"


@dataclass(frozen=True, slots=True)
class Counted:
    """How many locks a store has, up to 100 000 each.

    Attributes:
        held: Keys that nobody else can have now.
        past_expiry: Records of leases that ended without a release.
    """

    held: int
    past_expiry: int


def health(*, max_age: float = MAX_AGE, patience: float = PATIENCE) -> dict[str, Health]:
    """Say of each configured store whether it answers, all within `patience` seconds.

    Args:
        max_age: Seconds since when it may be known.
        patience: Seconds, of all of them together.
    """
    answers = ask_each(_look, max_age=max_age, patience=patience)
    return {alias: each or Health("timeout") for alias, each in answers.items()}


def store_numbers() -> Mapping[str, Mapping[Instrument, float]]:
    """Return the values of the gauges of each store, by alias; what is not known is left out."""
    # Begun before anybody waits for the first answer.
    begin_each(_count, max_age=MAX_AGE)
    found: dict[str, dict[Instrument, float]] = {
        alias: {STORE_UP: float(each.is_up)} for alias, each in health().items()
    }
    # Who has not said whether it is up has had its time.
    is_slow = any(each[STORE_UP] == 0 for each in found.values())
    patience = 0.0 if is_slow else PATIENCE
    for alias, counted in ask_each(_count, max_age=MAX_AGE, patience=patience).items():
        if counted is not None and alias in found:
            found[alias][LOCKS_HELD] = counted.held
            found[alias][HELD_PAST_EXPIRY] = counted.past_expiry
    return found


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
        return store._ask(partial(_count_rows, store), writes=False, long=True)
    return _count_listed(store) if store.supports_listing else None


def _count_rows(store: DatabaseBackend, using: str) -> Counted:
    now = vendors.of(using).now()
    rows = between(HeldLock._default_manager.using(using), store._namespace(), None)
    held = rows.filter(Q(free_at__isnull=True) | Q(free_at__gt=now))
    # What is kept behind its run on purpose has no grace.
    over = rows.filter(expires_at__lte=now).exclude(free_at=F("expires_at"))
    return Counted(held[:MOST].count(), over[:MOST].count())


def _count_listed(store: BaseLockBackend) -> Counted | None:
    until = time.monotonic() + LONGEST_WALK
    now, cursor, held, over = store.clock(), None, 0, 0
    while held < MOST:
        page = store.list(cursor=cursor, limit=1000)
        held += len(page.records)
        over += sum(_is_over(each, now) for each in page.records)
        if (cursor := page.cursor) is None:
            # Those whose keys are free again are in no listing.
            return Counted(held, max(over, len(store.expired(limit=10_000))))
        if time.monotonic() > until:
            return None
    return Counted(held, over)


def _is_over(record: Record, now: datetime) -> bool:
    ends = record.expires_at
    return ends is not None and ends <= now and record.free_at != ends
