"""Locks in the memory of one process, as a reference: the contract in a dictionary.

Threads and coroutines of one process exclude each other; other processes see nothing. This is for
tests and the development server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal

from django.db import DEFAULT_DB_ALIAS, connections

from ..conf import BackendConfig
from ..core.clock import monotonic
from ..core.errors import InvalidArgument
from ..core.keys import whole_name
from ..core.records import (
    Attempt,
    Contended,
    Counter,
    Grant,
    Page,
    Raised,
    Record,
    Session,
    Unknown,
    clock_fence,
    lease_ends,
    next_fence,
)
from ..core.sharing import DOOR_SECONDS, in_the_way, last_to_end
from ..database.connections import OpenTransaction
from .base import BaseLockBackend
from .shelf import Shelf


class MemoryBackend(BaseLockBackend):
    """Keeps locks in the memory of this process.

    A mutex makes each operation atomic, so no answer is `UNKNOWN`.

    Args:
        clock: Returns seconds that never go back. Its leases count by it as well.
    """

    supports_wakeups: ClassVar[bool] = True
    time_authority: Literal["server", "client"] = "client"
    storage_key_limit: ClassVar[int] = 10_000

    def __init__(
        self, config: BackendConfig, *, clock: Callable[[], float] = monotonic, **unknown: Any
    ):
        super().__init__(config, **unknown)
        self.monotonic = clock
        # The wall clock is read once; after that only the monotonic clock counts.
        self._epoch = datetime.now(UTC) - timedelta(seconds=clock())
        # Never shrinks, because a fence must outlive every lock on its key.
        self._fences: dict[str, int] = {}
        #: For paused keys: until when, and by whom.
        self._pauses: dict[str, tuple[datetime, str | None]] = {}
        #: The fence of each note, and until when it is kept.
        self._notes: dict[str, tuple[int, datetime]] = {}
        self._begin()

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        name, key, token = attempt.name, attempt.key, attempt.token
        with self._mutex:
            now = self._now()
            if (kept := self._in_the_way(attempt, now)) is not None:
                return kept
            if name in self._guards and self._is_guarded(name):
                return Contended(observed_at=now, busy=True, guarded=True)
            if (own := self._shelf.names.get(token)) and whole_name(own) != name:
                raise InvalidArgument("This token already holds another key.", key=key)
            fence = self._next_fence(name, key, now)
            over = self._shelf.over(attempt, now)
            for each in over.values():
                # The mark goes with the record, so its waiter has to mark the next one.
                self._wake(each, name)
            self._shelf.replace(over, attempt.place, attempt.record(fence, now, over.values()))
            return attempt.grant(fence, now, lease_ends(now, attempt.ttl)[0])

    def _extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        with self._mutex:
            now = self._now()
            record = self._shelf.owned(name, grant.token, now)
            extended = record and record.extended(now, ttl)
            if record is None or extended is None:
                return None
            self._shelf.put(name, extended)
            self._wake_if_sooner(record, name)
            return record.renewal(grant, ttl, now)

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        with self._mutex:
            return [self._extend(name, grant, grant.ttl, bound=0) for name, grant in named]

    def _release(self, name: str, grant: Grant, held: float | None, *, bound: float) -> bool:
        with self._mutex:
            now = self._now()
            record = self._shelf.owned(name, grant.token, now)
            if record is None:
                return False
            until = now if held is None else record.acquired_at + timedelta(seconds=held)
            if record.wanted:
                self.queues.note_wanted(name)
                self.queues.ring(name)
            if now < until:
                self._shelf.put(name, changed(record, expires_at=until, free_at=until))
            else:
                self._shelf.drop(name)
            return True

    def _open_door(self, name: str) -> None:
        with self._mutex:
            self._shelf.doors.pop(name, None)

    def _alias_in_database(self, using: str | None) -> str:
        # There is no database, so any alias will do.
        return DEFAULT_DB_ALIAS if using is None else using

    def _guard(self, name: str, grant: Grant, using: str, *, bound: float) -> bool:
        transaction = OpenTransaction(connections[using])
        with self._mutex:
            if self._fences.get(name) != grant.fence:
                return False
            self._guards.setdefault(name, []).append(transaction)
            return True

    def _read(self, name: str) -> Record | None:
        with self._mutex:
            holders = self._shelf.holders(name, self._now())
            return last_to_end(holders) if holders else None

    def _sharing(self, name: str) -> list[Record]:
        with self._mutex:
            return self._shelf.sharing(name, self._now())

    def _read_token(self, token: str) -> Record | None:
        with self._mutex:
            name = self._shelf.names.get(token)
            return None if name is None else self._shelf.owned(name, token, self._now())

    def _list(
        self, prefix: str, cursor: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> Page:
        with self._mutex:
            now = self._now()
            records = dict(self._shelf.records)
        live = {name: each for name, each in records.items() if each.is_live(now)}
        return Page.of(live, prefix, cursor, host=host, task_id=task_id, limit=limit)

    def _expired(self, name: str | None, limit: int) -> Sequence[Record]:
        with self._mutex:
            now = self._now()
            records = [*self._shelf.records.items()]
        found = [
            each for place, each in records
            if name in (None, whole_name(place)) and each.is_expired(now)
        ]  # fmt: skip
        return sorted(found, key=lambda each: each.expires_at or now, reverse=True)[:limit]

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        with self._mutex:
            now = self._now()
            record = self._shelf.live(name, now)
            if record is None or not record.is_seen(fence):
                return None
            if self._is_guarded(name):
                return record.contended(now, busy=True)
            self._next_fence(whole_name(name), key, now)
            self._wake(record, name)
            self._shelf.drop(name)
            return record

    def _request_stop(
        self, name: str, within: float | None, token: str | None, fence: int | None, *, bound: float
    ) -> Record | None:
        with self._mutex:
            now = self._now()
            record = self._shelf.owned(name, token, now)
            if record is None or not record.is_seen(fence):
                return None
            asked = record.asked_to_stop(now, within)
            self._shelf.put(name, asked)
            self._wake_if_sooner(record, name)
            return asked

    def _pause(self, name: str, key: str, until: datetime, by: str | None, *, bound: float) -> None:
        with self._mutex:
            self._pauses[name] = until, by

    def _resume(self, name: str, *, bound: float) -> bool:
        with self._mutex:
            was_paused = self._pause_of(name, self._now()) is not None
            self._pauses.pop(name, None)
            self.queues.ring(name)
            return was_paused

    def _time(self) -> datetime:
        return self._now()

    def _counter(self, name: str) -> Counter | None:
        with self._mutex:
            fence = self._fences.get(name, 0)
            pause = self._pause_of(name, self._now())
            return Counter(fence, *(pause or ())) if fence or pause else None

    def _guards_of(self, name: str) -> tuple[Session, ...]:
        with self._mutex:
            guards = self._guards.get(name, ()) if self._is_guarded(name) else ()
            return tuple(Session(os.getpid()) for _each in guards)

    def _raise_fences(
        self, to: int | None, name: str | None, key: str | None, *, cursor: str | None, limit: int
    ) -> Raised:
        with self._mutex:
            now = self._now()
            fence = clock_fence(now) if to is None else to
            if name is not None:
                self._fences.setdefault(name, 0)
            rest = sorted(filter(lambda each: cursor is None or each > cursor, self._fences))
            names = rest[:limit] if name is None else [name]
            low = set(filter(lambda each: self._fences[each] < fence, names))
            held = sorted(filter(self._read, low))
            self._fences |= dict.fromkeys(low.difference(held), fence)
            more = name is None and len(rest) > limit
            keys = tuple(record.key for record in map(self._read, held) if record is not None)
            return Raised(len(low) - len(held), keys, names[-1] if more else None)

    def _cleanup(self, before: datetime, limit: int) -> int:
        def is_over(name: str) -> bool:
            free_at = self._shelf.records[name].free_at
            return free_at is not None and free_at <= before

        with self._mutex:
            before = min(before, self._now())
            self._shelf.open_doors(before)
            over = sorted(filter(is_over, self._shelf.records))
            for name in over[:limit]:
                self._shelf.drop(name)
            return len(over[:limit])

    def _note(self, name: str, fence: int, seconds: float) -> None:
        with self._mutex:
            now = self._now()
            self._notes = dict(filter(lambda each: each[1][1] > now, self._notes.items()))
            self._notes[name] = (fence, now + timedelta(seconds=seconds))

    def _noted(self, name: str) -> int | None:
        with self._mutex:
            fence, until = self._notes.get(name, (0, self._now()))
            return fence if self._now() < until else None

    @property
    def is_listening(self) -> bool:
        """Always True, because every release happens in this process."""
        return True

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        # A thread of the parent may have held the mutex, and does not exist here.
        self._begin()

    def _begin(self) -> None:
        """Start empty. Also called in a forked child, because the locks are the parent's."""
        self._mutex = threading.RLock()
        self._shelf = Shelf()
        self._guards: dict[str, list[OpenTransaction]] = {}

    # Parts of the operations, called with the mutex held. A signal's exception may end them after
    # any step, so waiters are woken before a change: they wait for the mutex, and see it then.

    def _now(self) -> datetime:
        return self._epoch + timedelta(0, self.monotonic())

    def _pause_of(self, name: str, now: datetime) -> tuple[datetime, str | None] | None:
        pause = self._pauses.get(name)
        return pause if pause is not None and now < pause[0] else None

    def _is_guarded(self, name: str) -> bool:
        guards = [each for each in self._guards.pop(name, ()) if each.is_open]
        if guards:
            self._guards[name] = guards
        return bool(guards)

    def _in_the_way(self, attempt: Attempt, now: datetime) -> Contended | None:
        """Return why the key is not available, and mark its holders: `HeldLockManager.share`."""
        holders, doors = self._shelf.holders(attempt.name, now), self._shelf.doors
        closed_until = doors.get(attempt.name)
        paused_until, _by = self._pauses.get(attempt.name, (None, None))
        kept = in_the_way(attempt, holders, closed_until, paused_until, now)
        if kept is not None and attempt.wanted:
            self._shelf.mark(attempt.name, holders)
            if not attempt.shared and holders and holders[0].shared:
                doors[attempt.name] = now + timedelta(seconds=DOOR_SECONDS)
        return kept

    def _wake(self, record: Record | None, name: str) -> None:
        if record is not None and record.wanted:
            self.queues.ring(name)

    def _wake_if_sooner(self, before: Record, name: str) -> None:
        free_at = self._shelf.records[name].free_at
        if free_at is not None and (before.free_at is None or free_at < before.free_at):
            self._wake(before, name)

    def _next_fence(self, name: str, key: str, now: datetime) -> int:
        floor = now if self.config.fence_floor else None
        fence = next_fence(key, self._fences.get(name, 0), floor)
        self._fences[name] = fence
        return fence
