"""The SQL of session locks, and how its rows are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...core.records import Holder, Record, from_microseconds, to_microseconds
from ...database.sql import HELD_LOCKS, LOCK_NUMBER, NOW, number

# Each step depends on the one before, which sets their order: a loser writes nothing, and only the
# session with the lock counts the fence. An error after the lock does not unlock it.
_ACQUIRE = """
PREPARE {prepared} (text, text, text, boolean) AS
WITH paused AS MATERIALIZED (
    SELECT {number} AS number, EXISTS (
        SELECT FROM {fences} WHERE storage_key = $1 AND paused_until > {now}
    ) AS yes
), turn AS MATERIALIZED (
    SELECT CASE WHEN paused.yes THEN false ELSE {take} END AS yes FROM paused
), granted AS (
    INSERT INTO {fences} AS c (storage_key, key, fence)
        SELECT $1, $2, {now} / 10 FROM turn WHERE turn.yes
    ON CONFLICT (storage_key) DO UPDATE SET fence = greatest(c.fence + 1, {now} / 10)
        WHERE c.paused_until IS NULL OR c.paused_until <= {now}
    RETURNING fence
), noted AS (
    INSERT INTO {sessions} AS x (pid, storage_key, fence)
        SELECT pg_backend_pid(), $1, granted.fence FROM granted
    ON CONFLICT (pid) DO UPDATE SET
        storage_key = excluded.storage_key, fence = excluded.fence,
        stop_requested_at = CASE WHEN $4 THEN x.stop_requested_at END
)
SELECT
    done.turn, done.paused, done.fence, done.now, done.number,
    -- Ahead of the clock, a fence would come again behind a crash that undid it.
    CASE WHEN done.fence > done.now / 10 THEN set_config('synchronous_commit', $3, true) END
FROM (
    SELECT turn.yes AS turn, paused.yes AS paused, granted.fence, {now} AS now, paused.number
    FROM paused CROSS JOIN turn LEFT JOIN granted ON true OFFSET 0
) done
"""

_OWN = (
    f"EXISTS (SELECT FROM {HELD_LOCKS} AND l.pid = pg_backend_pid() AND {LOCK_NUMBER} = {{number}})"
)

# The grants that their sessions still hold. A stranger that has locked the number of a key has no
# row, and a session that went on to another key has the row of that key.
_HELD = f"""
SELECT l.pid, host(a.client_addr) AS host,
    (date_part('epoch', a.backend_start) * 1000000)::bigint AS began,
    (date_part('epoch', a.state_change) * 1000000)::bigint AS changed,
    x.fence, x.stop_requested_at, x.storage_key
FROM {{sessions}} x
    JOIN (SELECT l.pid, {LOCK_NUMBER} AS number FROM {HELD_LOCKS}) l
        ON l.pid = x.pid AND l.number = {{number}}
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
"""


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements of session locks.

    Args:
        fences: The table of fence counters. All tables are quoted and with their schema.
        sessions: The table of the last grant of each session.
        salt: The table of the secret.
    """

    fences: str
    sessions: str
    salt: str

    def preparation(self) -> str:
        """Return the statements that prepare the others in a session."""
        ways = {
            "distlock_acquire": "pg_try_advisory_lock(paused.number)",
            # The lock is not acquired again, because it would have to be released as often.
            "distlock_hand_over": _OWN.format(number="paused.number"),
        }
        acquires = [
            self._named(_ACQUIRE, prepared=prepared, take=take, number=self._number("$1"))
            for prepared, take in ways.items()
        ]
        own = _OWN.format(number="$1")
        # Only losers ask this. As a part of the statement above, it would double its time.
        lost = f"SELECT {NOW}, who.* FROM (SELECT 1) one LEFT JOIN ({self._held('$1')}) who ON true"
        asked = (
            f"SELECT x.stop_requested_at FROM {self.sessions} x"
            " WHERE x.pid = pg_backend_pid() AND x.fence = $2"
        )
        others = {
            "distlock_lost (text)": f"{lost} LIMIT 1",
            "distlock_release (bigint)": "SELECT pg_advisory_unlock($1)",
            "distlock_undo (text)": f"SELECT pg_advisory_unlock({self._number('$1')})",
            "distlock_ping (bigint)": f"SELECT {NOW}, {own}, NULL",
            "distlock_look (bigint, bigint)": f"SELECT {NOW}, {own}, ({asked})",
        }
        return "; ".join(
            [*acquires, *(f"PREPARE {name} AS {each}" for name, each in others.items())]
        )

    def who_holds(self) -> str:
        """Return the query for the clock and the holder of a storage key."""
        return f"SELECT {NOW}, who.* FROM ({self._held('%(name)s')}) who"

    def everybody(self) -> str:
        """Return the same query for all storage keys with a prefix."""
        held = self._named(_HELD, number=self._number("x.storage_key"))
        return f"SELECT {NOW}, who.* FROM ({held}) who WHERE starts_with(who.storage_key, %s)"

    def taken(self) -> str:
        """Return the query for those of some storage keys whose numbers are locked."""
        return (
            "SELECT n.name FROM unnest(%s::text[]) n(name)"
            f" WHERE {self._number('n.name')} IN (SELECT {LOCK_NUMBER} FROM {HELD_LOCKS})"
        )

    def call(self, function: str, use: str) -> str:
        """Return the query that calls a function with the number of a storage key for a use."""
        return f"SELECT {function}({number(use, '%s')}) FROM {self.salt} s"

    def lock_fence(self) -> str:
        """Return the statement that locks the fence row of a key until the transaction ends."""
        return f"SELECT fence FROM {self.fences} WHERE storage_key = %s FOR NO KEY UPDATE"

    def terminate(self) -> str:
        """Return the statement that ends the session `pid` if it holds a key still."""
        held = self._held("%(name)s")
        return (
            f"SELECT pg_terminate_backend(held.pid, %(patience)s) FROM ({held}) held"
            " WHERE held.pid = %(pid)s"
        )

    def request_stop(self) -> str:
        """Return the statement that requests a stop of a session with a storage key and fence."""
        return (
            f"UPDATE {self.sessions} SET stop_requested_at = coalesce(stop_requested_at, %s)"
            " WHERE pid = %s AND storage_key = %s AND fence = %s RETURNING stop_requested_at"
        )

    def forget_ended(self) -> str:
        """Return the statement that removes unlocked rows of sessions that have ended."""
        return (
            f"DELETE FROM {self.sessions} WHERE pid IN (SELECT x.pid FROM {self.sessions} x WHERE"
            " NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = x.pid)"
            " FOR UPDATE SKIP LOCKED)"
        )

    def _held(self, name: str) -> str:
        held = self._named(_HELD, number=self._number(name))
        return f"{held} WHERE x.storage_key = {name}"

    def _number(self, name: str) -> str:
        # A subquery and not a join, because the planner does not know that there is one row.
        return f"(SELECT {number('session', name)} FROM {self.salt} s)"

    def _named(self, statement: str, **more: str) -> str:
        return statement.format(
            fences=self.fences, sessions=self.sessions, salt=self.salt, now=NOW, **more
        )


def instant(microseconds: object) -> datetime:
    """Return the time of an answer, given in microseconds."""
    return from_microseconds(int(str(microseconds)))


def granted_at(fence: int, now: datetime) -> datetime:
    """Return when a fence was granted: it follows the clock, unless its counter was ahead."""
    return from_microseconds(min(fence * 10, to_microseconds(now)))


def record_of(key: str, row: Sequence[Any], now: datetime) -> Record:
    """Return what can be known about a lock of another process, by a row of `_HELD`."""
    pid, host, began, changed, fence, stop, *_ = row
    at = granted_at(int(fence), now)
    # We may not know when that session was opened, or when it was last asked something.
    began = now if began is None else instant(began)
    if not began <= at < now:
        # The counter was ahead of the clock.
        at = began
    changed = at if changed is None else max(at, instant(changed))
    holder = Holder(host=host or "local", metadata={"session": int(pid)})
    stop = None if stop is None else instant(stop)
    return Record(
        key, "", int(fence), None, at, changed, None, None, holder, stop_requested_at=stop
    )
