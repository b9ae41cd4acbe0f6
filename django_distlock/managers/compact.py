"""The frequent operations on SQLite, with a few SQL statements each.

On SQLite, Django's own work takes most of the time: it builds statements, and wraps cursors. So
these statements go to the driver. The operations do the same as those of `HeldLockManager`, step by
step, but a release reads only what decides. All other operations are inherited.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction

from ..core.records import (
    Attempt,
    Contended,
    Freed,
    Grant,
    Holder,
    Record,
    from_microseconds,
    instant,
    next_fence,
    stored,
)
from ..database.connections import is_own
from ..database.server_functions import contended
from .lock import HeldLockManager

if TYPE_CHECKING:
    from sqlite3 import Connection

#: Runs a statement with the driver's own placeholders, and returns the driver's cursor.
Run = Callable[..., Any]

_NOBODY = Holder()

# See `Attempt.record`.
_IS_PASSED_ON = """
(free_at IS NULL OR free_at > excluded.acquired_at)
AND (expires_at = free_at OR holder = excluded.holder)
"""


class _Statements(NamedTuple):
    look: str = """
SELECT
    c.fence, c.paused_until, c.closed_until IS NOT NULL,
    l.token, l.fence, l.acquired_at, l.expires_at, l.free_at, l.wanted, l.holder
FROM (SELECT ? AS storage_key) asked
LEFT JOIN {fences} c ON c.storage_key = asked.storage_key
LEFT JOIN {locks} l ON l.storage_key = asked.storage_key
"""
    advance: str = """
INSERT INTO {fences} (storage_key, "key", fence) VALUES (?, ?, ?)
ON CONFLICT (storage_key) DO UPDATE SET fence = excluded.fence
"""
    grant: str = f"""
INSERT INTO {{locks}} (
    storage_key, "key", token, fence, ttl, acquired_at, renewed_at, expires_at, free_at, wanted,
    holder, holder_host, task_id, stop_requested_at
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, NULL)
ON CONFLICT (storage_key) DO UPDATE SET
    token = excluded.token, fence = excluded.fence, ttl = excluded.ttl,
    acquired_at = excluded.acquired_at, renewed_at = excluded.renewed_at,
    expires_at = CASE
        WHEN {_IS_PASSED_ON} AND renewed_until < coalesce(excluded.expires_at, renewed_until + 1)
        THEN renewed_until ELSE excluded.expires_at
    END,
    free_at = excluded.free_at, wanted = 0,
    holder = excluded.holder, holder_host = excluded.holder_host, task_id = excluded.task_id,
    stop_requested_at = CASE WHEN {_IS_PASSED_ON} THEN stop_requested_at END,
    renewed_until = CASE WHEN {_IS_PASSED_ON} THEN renewed_until END
"""  # noqa: S608 - a text of our own
    lease: str = """
SELECT
    token, fence, ttl, acquired_at, renewed_at, expires_at, free_at, stop_requested_at, wanted,
    renewed_until
FROM {locks} WHERE storage_key = ?
"""
    # The same rule as `Record.is_owned`.
    owned: str = """
SELECT acquired_at, wanted FROM {locks}
WHERE storage_key = ? AND token = ?
AND (free_at IS NULL OR (free_at > ? AND free_at IS NOT expires_at))
"""
    extend: str = """
UPDATE {locks} SET ttl = ?, renewed_at = ?, expires_at = ?, free_at = ? WHERE storage_key = ?
"""
    settle: str = "UPDATE {locks} SET expires_at = ?, free_at = ? WHERE storage_key = ?"
    # Marks the grant in the way, so that its process leaves the key to others for a moment.
    mark: str = "UPDATE {locks} SET wanted = 1 WHERE storage_key = ? AND fence = ? AND NOT wanted"
    delete: str = "DELETE FROM {locks} WHERE storage_key = ?"


class OwnTransaction:
    """A transaction of the only writer, on a connection of this package's own.

    A signal's exception may leave it open. Then the connection is closed: see `borrowing`.
    """

    def __init__(self, connection: Connection):
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *error: Any) -> None:
        # Rolled back also where it cannot commit: without WAL, readers may be in the way of that,
        # and nobody else could write meanwhile.
        self._connection.__exit__(*error)


class CompactLockManager(HeldLockManager):
    """Operations on held locks, the frequent ones without the ORM. For SQLite.

    A transaction is the only writer of the file from its beginning, so what it reads cannot change.
    There are no wake-ups.
    """

    _statements: _Statements

    @classmethod
    def of(cls, locks: HeldLockManager) -> CompactLockManager:
        """Return one that replaces another manager of the same rows."""
        compact = locks.replaced_by(cls)
        tables = dict(zip(("locks", "fences"), locks._tables, strict=True))
        compact._statements = _Statements(*(each.format(**tables) for each in _Statements()))
        return compact

    def acquire(self, attempt: Attempt) -> Grant | Contended | None:
        name, key, holder = attempt.name, attempt.key, attempt.holder
        with self._asking() as (run, writing):
            # Read first, so that a refused attempt neither locks nor writes anything.
            kept, _, _, unmarked, is_shared = self._in_the_way(run, attempt)
            if kept is not None:
                if attempt.wanted and unmarked:
                    run(self._statements.mark, [name, kept.fence])
                return kept
            if is_shared:
                return None
            with writing():
                kept, last, at, _, is_shared = self._in_the_way(run, attempt)
                if kept is not None or is_shared:
                    return kept
                floor = from_microseconds(at) if self.follows_clock else None
                fence = next_fence(key, last, floor)
                granted, ends = attempt.granted(fence, at)
                values: list[Any] = [
                    name, key, attempt.token, fence, attempt.ttl,
                    at, at, *ends,
                    json.dumps(holder.as_json()), holder.host, holder.task_id,
                ]  # fmt: skip
                run(self._statements.advance, [name, key, fence])
                run(self._statements.grant, values)
        return granted

    def extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        with self._asking() as (run, writing), writing():
            record, now = self._owned_record(run, name, grant)
            extended = None if record is None else record.extended(now, ttl)
            if record is None or extended is None:
                return None
            times = stored(now, extended.expires_at, extended.free_at)
            run(self._statements.extend, [ttl, *times, name])
        return record.renewal(grant, ttl, now)

    def release(self, name: str, grant: Grant, *, held: float | None = None, bound: float) -> Freed:
        with self._asking() as (run, writing), writing():
            at = time.time_ns() // 1000
            owned = run(self._statements.owned, [name, grant.token, at]).fetchone()
            if owned is None:
                return "gone"
            acquired_at, wanted = owned
            until = 0 if held is None else acquired_at + round(held * 1e6)
            if until <= at:
                run(self._statements.delete, [name])
            else:
                run(self._statements.settle, [until, until, name])
        return "wanted" if wanted else "released"

    @contextmanager
    def _asking(self) -> Iterator[tuple[Run, Callable[[], AbstractContextManager[None]]]]:
        """Yield a function that runs statements, and one that opens a transaction.

        A connection of the caller is used through Django, which may count, log or refuse
        statements. In a transaction of the caller, such as that of a `TestCase`, a savepoint is
        used.
        """
        connection = connections[self.db]
        # This raises in the thread of an event loop, as Django's cursors do.
        with connection.cursor() as cursor, connection.wrap_database_errors:
            if is_own(connection):
                raw = connection.connection
                yield raw.execute, partial(OwnTransaction, raw)
            else:
                yield partial(_through, cursor), partial(transaction.atomic, self.db)

    def _in_the_way(
        self, run: Run, attempt: Attempt
    ) -> tuple[Contended | None, int, int, bool, bool]:
        """Return why the key is not available, if so, its last fence, the time, and two flags.

        The time is in microseconds since 1970. The flags are: whether an exclusive holder is not
        marked yet; and whether the key is shared, or was.
        """
        found = run(self._statements.look, [attempt.name]).fetchone()
        last, paused_until, is_shared, token, *lease = found
        fence, acquired_at, expires_at, free_at, wanted, told = lease
        at = time.time_ns() // 1000
        paused = paused_until is not None and at < paused_until
        if token is None or (free_at is not None and free_at <= at):
            kept = Contended(observed_at=from_microseconds(at), paused=True) if paused else None
        elif (
            token == attempt.replace
            and not paused
            and (token != attempt.token or free_at is None or free_at != expires_at)
        ):
            kept = None
        else:
            outcome = "paused" if paused else "contended"
            facts = fence, acquired_at, expires_at, free_at, json.loads(told)
            kept = contended(outcome, at, *facts)
        is_held = kept is not None and kept.fence is not None
        return kept, last or 0, at, is_held and not wanted, bool(is_shared)

    def _owned_record(self, run: Run, name: str, grant: Grant) -> tuple[Record | None, datetime]:
        """Return the record of a grant, without its holder, and the time; None: it is gone."""
        row = run(self._statements.lease, [name]).fetchone()
        now = datetime.now(UTC)
        if row is None:
            return None, now
        token, fence, ttl, acquired_at, renewed_at, expires_at, free_at, stop, wanted, until = row
        record = Record(
            key=grant.key,
            token=token,
            fence=fence,
            ttl=ttl,
            acquired_at=from_microseconds(acquired_at),
            renewed_at=from_microseconds(renewed_at),
            expires_at=instant(expires_at),
            free_at=instant(free_at),
            holder=_NOBODY,
            wanted=bool(wanted),
            stop_requested_at=instant(stop),
            renewed_until=instant(until),
        )
        return record if record.is_owned(grant.token, now) else None, now


def _through(cursor: Any, statement: str, values: list[Any]) -> Any:
    cursor.execute(statement.replace("%", "%%").replace("?", "%s"), values)
    return cursor
