"""The locks of a store, page by page: whose holders are gone, and whose fences are wrong."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Final, NamedTuple

from django.core import checks

from ...backends.base import BaseLockBackend
from ...core.holders import Holder
from ...core.keys import UNIQUE_PREFIX
from ...core.records import Record
from ...core.wording import counted, instant, span
from ...process.host import current_holder, is_gone
from .findings import Notes

#: Locks of a page.
PAGE: Final = 1000
#: Keys that a finding names at most.
NAMED: Final = 3
#: Seconds after which the scan of a backend's locks stops.
SECONDS: Final = 20.0
#: Seconds by which a grant may lie ahead of the store's clock: that of a cluster is several.
AHEAD: Final = 1.0


class Trouble(NamedTuple):
    """What is said of locks with which something is wrong."""

    id: str
    what: str
    level: int
    text: str
    hint: str


_ENDLESS: Final = Trouble(
    "D005",
    "holders",
    checks.ERROR,
    "held without expiry by processes of this host that have ended",
    "They are never released. Release them with distlock_release.",
)
_DEAD: Final = Trouble(
    "D005",
    "holders",
    checks.WARNING,
    "held by processes of this host that have ended",
    "They expire by themselves, unless their work was handed over to another process. To free"
    " them now, use distlock_release.",
)
_OVER: Final = Trouble(
    "D004",
    "holders",
    checks.WARNING,
    "whose leases have expired, in the grace period",
    "Their holders have not renewed them. Check whether these processes are frozen.",
)
_HIGHER: Final = Trouble(
    "D006",
    "fences",
    checks.ERROR,
    "held with a fence above their counters, for example after a restore of the store",
    "Once they are released, raise the counters (distlock_fence raise --all --clock), and set"
    " FENCE_FLOOR to 'clock'.",
)
_SPOILED: Final = Trouble(
    "D021",
    "records",
    checks.ERROR,
    "with unreadable records: another program writes to this store",
    "Find the other program. When no holder works under these locks any more, remove the records"
    " by hand and keep the fences. The runbook has the statements.",
)
_AHEAD: Final = Trouble(
    "D012",
    "clock",
    checks.WARNING,
    "acquired in the future: the store's clock has stepped back",
    "Their leases last longer than intended. Find out what set the clock.",
)

#: Nothing is wrong: they are counted.
_QUEUED: Final = Trouble("", "locks", checks.DEBUG, "held by queued tasks", "")


@dataclass(slots=True)
class Some:
    """How many there are, and a few of them."""

    number: int = 0
    named: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, about: str = "") -> None:
        """Count one in."""
        self.number += 1
        if len(self.named) < NAMED:
            self.named[key] = about

    @property
    def keys(self) -> list[str]:
        """The few."""
        return list(self.named)

    def __str__(self) -> str:
        names = [f"{key!r} ({about})" if about else repr(key) for key, about in self.named.items()]
        return ", ".join(names) + (" …" if self.number > len(names) else "")


def scan_locks(
    store: BaseLockBackend, notes: Notes, limit: int, is_dead: Callable[[Holder], bool]
) -> None:
    """Note what is wrong with the locks that are held.

    Args:
        limit: How many to look at.
        is_dead: See `dead_or_not`.
    """
    if not store.supports_listing:
        notes.skip("locks", "this store cannot list them")
        return
    wrong: dict[Trouble, Some] = defaultdict(Some)
    locks, cut, cursor, until = 0, "", None, time.monotonic() + SECONDS
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
    queued = wrong.pop(_QUEUED, Some()).number
    of_tasks = f", {queued} of them held by queued tasks" if queued else ""
    notes.look("locks", f"{counted(locks, 'lock')} checked{of_tasks}{cut}")
    for trouble, some in wrong.items():
        text = f"{counted(some.number, 'key')} {trouble.text}: {some}"
        level, hint = trouble.level, trouble.hint
        notes.find(trouble.id, trouble.what, text, hint, level=level, keys=some.keys)


def dead_or_not() -> Callable[[Holder], bool]:
    """Return what says whether a holder was a process of this host, and is gone.

    Each process is looked for once. Not by its name: this command has the name that the settings
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


def whose(holder: Holder) -> str:
    """Return where a holder runs, as far as the store tells."""
    process = f"{holder.process}[{holder.pid}]" if holder.pid else holder.process
    return " on ".join(each for each in (process, holder.host) if each) or "somebody"


def _troubles(
    record: Record, fence: int | None, now: datetime, is_dead: Callable[[Holder], bool]
) -> Iterator[tuple[Trouble, str]]:
    """Yield what is to be said of a lock."""
    holder, left = record.holder, record.free_at
    # A key that is kept behind its run has no process, on purpose.
    if not record.is_settled:
        gone = is_dead(holder)
        # A worker that ended may have left it to the retry of its task; else it ends soon.
        if holder.is_queued or (gone and left and record.key.startswith(UNIQUE_PREFIX)):
            yield _QUEUED, ""
        elif gone and left:
            yield _DEAD, f"{whose(holder)}, free at {instant(left)}"
        elif gone:
            yield _ENDLESS, f"{whose(holder)}, without expiry"
        elif record.expires_at is not None and record.expires_at <= now:
            yield _OVER, whose(holder)
    if (ahead := (record.acquired_at - now).total_seconds()) > AHEAD:
        yield _AHEAD, f"{span(ahead)} ahead"
    if fence is not None and fence < record.fence:
        yield _HIGHER, f"held with {record.fence}, counter at {fence}"
