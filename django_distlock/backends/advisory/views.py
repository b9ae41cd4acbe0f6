"""Reads of locks that other sessions hold, and the operators' actions on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from django.db import DatabaseError, Error, InterfaceError

from ...core.durations import MAX_BOUND
from ...core.errors import BackendUnavailable
from ...core.records import Contended, Page, Record, to_microseconds
from ...database import vendors
from ...database.connections import rows_of
from ...database.schemas import TableConnections
from ...database.sql import side_table
from ...database.vendors.postgresql import no_secret
from ..tables import FenceTable
from .holdings import Holdings
from .sql import Statements, instant, record_of


class SessionViews(FenceTable):
    """Reads and operators' actions of session locks, on ordinary connections.

    A lease of this process is shown in full. About another process's lock the server knows the
    address of its host, the session, when it was granted (by its fence), and whether a stop was
    requested; but not its holder, token or ttl.
    """

    _holdings: Holdings

    def _read(self, name: str) -> Record | None:
        found = self._connections.ask(partial(self._find, name, MAX_BOUND), writes=False)
        return None if found is None else found[0]

    def _read_many(self, names: Sequence[str]) -> Sequence[Record | None]:
        found = self._connections.ask_within(self._find_all, long=True)
        return [found.get(name) for name in names]

    def _list(
        self, prefix: str, cursor: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> Page:
        found = self._connections.ask_within(self._find_all, long=True)
        return Page.of(found, prefix, cursor, host=host, task_id=task_id, limit=limit)

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        force = partial(self._force, name, key, fence, bound)
        done, record = self._connections.ask(
            force, bound=bound, busy=lambda: (False, None), key=key
        )
        return record if done else self._busy(name)

    def _request_stop(
        self, name: str, within: float | None, token: str | None, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        request = partial(self._send_stop, name, fence, bound)
        return self._connections.ask(request, bound=bound, busy=partial(self._busy, name))

    # In the server

    def _find(self, name: str, bound: float, on: str) -> tuple[Record, int] | None:
        """Return the record of a held key, and the id of its session."""
        with vendors.of(on).short_transaction(bound, writes=False):
            return self._see(name, on)

    def _see(self, name: str, on: str) -> tuple[Record, int] | None:
        rows = rows_of(on, self._statements.who_holds(), name=name)
        if not rows:
            return None
        now, *who = rows[0]
        return self._record(name, who, instant(now)), who[0]

    def _find_all(self, on: str) -> dict[str, Record]:
        """Return the records of all held keys of this key prefix, by storage key."""
        rows = rows_of(on, self._statements.everybody(), self._namespace())
        return {name: self._record(name, who, instant(now)) for now, *who, name in rows}

    def _held_among(self, on: str, names: Sequence[str]) -> Collection[str]:
        return [name for (name,) in rows_of(on, self._statements.taken(), [*names])]

    def _force(
        self, name: str, key: str, fence: int | None, bound: float, on: str
    ) -> tuple[bool, Record | None]:
        """Raise the fence, then end the session; False: another operator does so right now."""
        said = self._statements
        alone = rows_of(on, said.call("pg_try_advisory_lock", "force"), name)
        if not alone:
            raise no_secret(said.salt)
        if not alone[0][0]:
            return False, None
        try:
            found = self._move_fence(name, key, fence, bound, on)
            if found is None:
                return True, None
            # The holder's guarded writes fail from here on.
            record, pid, moved = found
            self._terminate(name, key, pid, moved, on)
            return True, record
        finally:
            with suppress(Error):
                rows_of(on, said.call("pg_advisory_unlock", "force"), name)

    def _move_fence(
        self, name: str, key: str, fence: int | None, bound: float, on: str
    ) -> tuple[Record, int, int] | None:
        if self._find(name, bound, on) is None:
            return None  # And no counter is created for a key that nobody ever held.
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
            # Nobody is granted the key while its counter is locked. If somebody was granted it
            # since, maybe with the same session, the holder had released it before.
            said = self._statements
            if rows_of(on, said.lock_fence(), name) != [(moved,)]:
                return
            rows = rows_of(on, said.terminate(), patience=patience, name=name, pid=pid)
        if rows and not rows[0][0]:
            raise BackendUnavailable(
                f"The session {pid} that holds {key!r} was terminated but has not ended yet.",
                key=key,
                code="network_timeout",
            )

    def _send_stop(self, name: str, fence: int | None, bound: float, on: str) -> Record | None:
        found = self._find(name, bound, on)
        if found is None or not found[0].is_seen(fence):
            return None
        record, pid = found
        now = vendors.of(on).now()
        asked = to_microseconds(now), pid, name, record.fence
        rows = rows_of(on, self._statements.request_stop(), *asked)
        if not rows:
            return None  # Its session went on to another key.
        now = instant(rows[0][0])
        mine = self._holdings.of_session(name, pid)
        if mine is not None and mine.record.is_seen(record.fence):
            return self._holdings.change(mine, stop_requested_at=now)
        return replace(record, stop_requested_at=now)

    def _look_at_once(self, name: str, on: str) -> Record | None:
        found = self._find(name, 0, on)
        return None if found is None else found[0]

    # What these share

    @property
    def _statements(self) -> Statements:
        try:
            found = table_names(self._connections)
        except (DatabaseError, InterfaceError) as error:
            raise self._connections.translated(error, None) from error
        # Escaped, because the statements have placeholders.
        return Statements(*(each.replace("%", "%%") for each in found))

    def _record(self, name: str, row: Sequence[Any], now: datetime) -> Record:
        """Return the record of a lock: the full one if this process holds it."""
        mine = self._holdings.of_session(name, int(row[0]))
        if mine is not None:
            return mine.record
        return record_of(name.removeprefix(self._namespace()), row, now)


def table_names(tables: TableConnections) -> tuple[str, str, str]:
    """Return the names of the tables for `Statements`, quoted and with their schema."""
    session, salt = (tables.named(side_table(each)) for each in ("session", "salt"))
    return tables.name("fences"), session, salt
