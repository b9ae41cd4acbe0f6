"""What is in a store: locks, leases that nobody gave back, waiters, pauses. Only read."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from ...backends.base import BaseLockBackend
from ...core.records import Record
from ...core.wording import instant, span
from .findings import Notes
from .kinds import redis_servers
from .scanned import NAMED, Some, counted, dead_or_not, scan_locks
from .waiting import Crowd, crowd_of, over_of, paused_of

#: Waiters of one key that are too many.
MANY_WAITERS: Final = 100
#: Seconds that a pause may still last.
LONG_PAUSE: Final = 3600.0
#: Keys of a Redis above which it is not walked through: a walk takes seconds then.
MANY_KEYS: Final = 5_000_000


def scan(store: BaseLockBackend, notes: Notes, limit: int) -> None:
    """Note what is wrong with what a store keeps.

    Args:
        limit: How many locks to look at, and how many waiters.

    Raises:
        LockError: The store did not answer.
    """
    servers = redis_servers(store)
    keys = 0 if servers is None else sum(map(int, servers("DBSIZE").values()))
    if keys > MANY_KEYS:
        text = f"its Redis has {keys} keys, more than {MANY_KEYS}: not walked through"
        notes.look("locks", text, skipped=True)
        return
    is_dead = dead_or_not()
    scan_locks(store, notes, limit, is_dead)
    _note_over(notes, over_of(store, NAMED))
    crowd = crowd_of(store, limit, many=MANY_WAITERS, is_dead=is_dead)
    if crowd is not None:
        _note_waiters(notes, crowd)
    _note_pauses(store, notes, limit)


def _note_over(notes: Notes, over: tuple[int, list[Record], datetime] | None) -> None:
    if over is None:
        return
    number, records, now = over
    if not number:
        notes.look("expired leases", "none that nobody gave back")
        return
    some = Some()
    for each in records:
        ago = span((now - each.free_at).total_seconds()) if each.free_at else "-"
        some.add(
            each.key, f"{each.holder.process}[{each.holder.pid}] on {each.holder.host}, {ago} ago"
        )
    some.number = number
    notes.find(
        "D004",
        "expired leases",
        f"{counted(number, 'lease')} ended by expiry, and nobody gave them back: {some}",
        "Their holders died, stood still, or work on without a lock. Look at those processes, and"
        " remove the records with distlock_cleanup.",
        keys=some.keys,
    )


def _note_waiters(notes: Notes, crowd: Crowd) -> None:
    cut = f" (the first {crowd.looked_at}; there are more)" if crowd.is_cut else ""
    if crowd.over or crowd.dead:
        some = Some()
        for key in crowd.dead:
            some.add(key)
        of_dead = f", {sum(crowd.dead.values())} of processes of this host that have ended"
        notes.find(
            "D002",
            "orphan waiters",
            f"notes of waiters that died: {crowd.over} whose time is over"
            f"{f'{of_dead}: {some}' if crowd.dead else ''}{cut}",
            "They keep nobody from anything. distlock_cleanup removes those whose time is over.",
            keys=some.keys,
        )
    else:
        notes.look("orphan waiters", f"none among {crowd.looked_at} waiters{cut}")
    if crowd.crowded:
        named = dict(list(crowd.crowded.items())[:NAMED])
        notes.find(
            "D003",
            "waiters",
            f"{counted(len(crowd.crowded), 'key')} with {MANY_WAITERS} waiters or more: "
            + ", ".join(f"{key!r} ({number})" for key, number in named.items()),
            "Look at who holds them, and for how long. Let waiters give up sooner, or lock less.",
            keys=list(named),
        )


def _note_pauses(store: BaseLockBackend, notes: Notes, limit: int) -> None:
    now = store.clock()
    some = Some()
    for key, until, by in paused_of(store, now + timedelta(seconds=LONG_PAUSE), limit):
        left = span((until - now).total_seconds())
        some.add(key, f"by {by or 'nobody named'} for another {left}, until {instant(until)}")
    if not some.number:
        notes.look("pauses", "no key is paused for another hour")
        return
    notes.find(
        "D007",
        "pauses",
        f"{counted(some.number, 'key')} granted to nobody for another hour or more: {some}",
        "Ask who paused them, and resume them (inspection.resume) once that is over.",
        keys=some.keys,
    )
