"""What is seen of locks that other sessions hold, and what an operator does to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import DatabaseError, Error, InterfaceError, connections

from ... import vendors
from ...borrowing import NoConnectionFree
from ...core.durations import MAX_BOUND
from ...core.errors import BackendUnavailable
from ...core.keys import advisory_id
from ...core.records import Contended, Page, Record
from ...vendors.postgresql import session_salt
from ..tables import FenceTable
from .holdings import Holdings, stop_word
from .sql import (
    EVERYBODY,
    LOCK_FENCE,
    NUMBERS,
    SHOWN,
    TERMINATE,
    Seen,
    halves,
    hashed_names,
    instant,
    shown,
    who_holds,
)


class SessionViews(FenceTable):
    """Reads and operators of the advisory backend: they ask on ordinary connections.

    A lease of this process is shown whole. Of another process's lock the server knows the address
    of its host, the session, and by its fence since when; not its holder, its token or its ttl. A
    request to stop is seen by the holder alone.
    """

    _holdings: Holdings

    def _read(self, name: str) -> Record | None:
        found = self._ask(partial(self._find, name, MAX_BOUND), writes=False)
        return None if found is None else found[0]

    def _list(
        self, prefix: str, cursor: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> Page:
        found = self._ask(self._find_all, writes=False, long=True)
        records = [
            (name, record)
            for name, record in sorted(found.items())
            if (cursor is None or name > cursor)
            and record.key.startswith(prefix)
            and host in (None, record.holder.host)
            and task_id in (None, record.holder.task_id)
        ]
        page = records[:limit]
        return Page(
            tuple(record for _name, record in page), page[-1][0] if len(records) > limit else None
        )

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        force = partial(self._force, name, key, fence, bound)
        busy = partial(self._busy, name)
        done, record = self._ask(force, bound=bound, busy=lambda: (False, None), key=key)
        return record if done else busy()

    def _request_stop(
        self, name: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        request = partial(self._send_stop, name, fence, bound)
        return self._ask(request, bound=bound, busy=partial(self._busy, name))

    # In the server

    def _find(self, name: str, bound: float, on: str) -> tuple[Record, int] | None:
        """Return the record of a held key, and the session that holds it."""
        with vendors.of(on).short_transaction(bound, writes=False):
            return self._see(name, on)

    def _see(self, name: str, on: str) -> tuple[Record, int] | None:
        rows = _rows(
            on, who_holds(self._fences), name, *halves(self._number(name)), self._shown(name)
        )
        if not rows:
            return None
        now, *who = rows[0]
        return self._record(name, Seen.read(who), instant(now)), who[0]

    def _find_all(self, on: str) -> dict[str, Record]:
        """Return the records of all held keys of this key prefix, by storage key.

        A session that shows a hash is found by the fence counter of its key. Without that nobody
        can tell the key, and the lock is not shown.
        """
        with vendors.of(on).short_transaction(MAX_BOUND, writes=False):
            rows = _rows(on, EVERYBODY)
            hashes = [app.removeprefix(SHOWN) for _now, _number, app, *_who in rows]
            hashed = [name for (name,) in _rows(on, hashed_names(self._fences), hashes)]
            names = dict(self._names(rows, hashed))
            fences = dict(self._counters_on(on).filter(pk__in=names).values_list("pk", "fence"))
        return {
            name: self._record(name, Seen.read([*who, fences.get(name)]), now)
            for name, (now, who) in names.items()
        }

    def _names(
        self, rows: Sequence[Any], hashed: Sequence[str]
    ) -> Iterator[tuple[str, tuple[Any, Any]]]:
        ours = [name for name in hashed if name.startswith(self._namespace())]
        by_number = {self._number(name): name for name in ours}
        for now, number, app, *who in rows:
            name = self._namespace(app.removeprefix(SHOWN))
            if self._number(name) != number:
                # Another prefix's, or a hash.
                name = by_number.get(number, "")
            if name:
                yield name, (instant(now), who)

    def _held_among(self, on: str, names: Sequence[str]) -> Collection[str]:
        numbers = {number for (number,) in _rows(on, NUMBERS)}
        return [name for name in names if self._number(name) in numbers]

    def _force(
        self, name: str, key: str, fence: int | None, bound: float, on: str
    ) -> tuple[bool, Record | None]:
        """Move the fence on, then end the session; False: somebody else is about to."""
        # One at a time, also behind the commit that moved the fence.
        turn = advisory_id(f"{session_salt(self._fences)}:force", name)
        if not _rows(on, "SELECT pg_try_advisory_lock(%s)", turn)[0][0]:
            return False, None
        try:
            found = self._move_fence(name, key, fence, bound, on)
            if found is None:
                return True, None
            # Its guarded writes fail by now.
            record, pid, moved = found
            self._terminate(name, key, pid, moved, on)
            return True, record
        finally:
            with suppress(Error):
                _rows(on, "SELECT pg_advisory_unlock(%s)", turn)

    def _move_fence(
        self, name: str, key: str, fence: int | None, bound: float, on: str
    ) -> tuple[Record, int, int] | None:
        if self._find(name, bound, on) is None:
            return None  # And no counter is made for a key that nobody ever held.
        counters = self._counters_on(on)
        with counters.turn(name, key, bound):
            counter = counters.lock(name)
            found = self._see(name, on)
            if found is None or not found[0].is_seen(fence):
                return None
            store = vendors.of(on)
            store.make_durable()
            return *found, counters.advance(name, key, counter, store.now())

    def _terminate(self, name: str, key: str, pid: int, moved: int, on: str) -> None:
        patience = int(MAX_BOUND * 1000)
        with vendors.of(on).short_transaction(MAX_BOUND):
            # Nobody is granted the key while its counter is locked. If somebody was since it moved,
            # maybe with the same session, then the holder has given it back by itself.
            if _rows(on, LOCK_FENCE.format(fences=self._fences), name) != [(moved,)]:
                return
            number = halves(self._number(name))
            rows = _rows(on, TERMINATE, patience, *number, pid, self._shown(name))
        if rows and not rows[0][0]:
            raise BackendUnavailable(
                f"The session {pid} that holds {key!r} was told to end and has not yet.",
                key=key,
                code="network_timeout",
            )

    def _send_stop(self, name: str, fence: int | None, bound: float, on: str) -> Record | None:
        found = self._find(name, bound, on)
        if found is None or not found[0].is_seen(fence):
            return None
        record, pid = found
        now = vendors.of(on).now()
        mine = self._holdings.of_session(name, pid)
        if mine is not None and mine.record.is_seen(record.fence):
            return self._holdings.change(mine, stop_requested_at=now)
        word = stop_word(self._number(name), record.fence)
        _rows(on, "SELECT pg_notify(%s, %s)", f"distlock_{pid}", word)
        return replace(record, stop_requested_at=now)

    def _busy(self, name: str) -> Contended:
        try:
            with self._connections.use(0, writes=False) as on:
                found = self._find(name, 0, on)
                now = vendors.of(on).now()
        except (Error, NoConnectionFree):
            found = None
        return Contended(busy=True) if found is None else found[0].contended(now, busy=True)

    # What these share

    @property
    def _fences(self) -> str:
        """The table of the fence counters, quoted and with its schema."""
        try:
            return self._connections.name("fences")
        except (DatabaseError, InterfaceError) as error:
            raise self._translated(error, None) from error

    def _number(self, name: str) -> int:
        return advisory_id(session_salt(self._fences), name)

    def _shown(self, name: str) -> str:
        """Return what the session that holds a key is called."""
        return shown(name.removeprefix(self._namespace()), name)

    def _record(self, name: str, seen: Seen, now: Any) -> Record:
        """Return what is known about a lock: all of it, if it is this process's."""
        mine = self._holdings.of_session(name, seen.pid)
        if mine is not None:
            return mine.record
        return seen.record(name.removeprefix(self._namespace()), now)


def _rows(on: str, statement: str, *arguments: Any) -> list[Any]:
    with connections[on].cursor() as cursor:
        cursor.execute(statement, arguments)
        return list(cursor.fetchall())
