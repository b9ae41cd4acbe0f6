"""What the advisory backend asks the server, and how it reads who holds a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...core.holders import Holder
from ...core.records import Record
from ...database.fields import from_microseconds, to_microseconds
from ...database.sql import HELD_LOCKS, LOCK_NUMBER, NOW, number

# The steps depend on each other, and so have an order: whoever loses has written nothing, and the
# fence is counted by who has the lock. An error behind the lock does not undo it.
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

# What was granted to a session, and is still held by it. A stranger that has taken the number of
# a key has no row, and a session that went on to another key has one of that key.
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
    """What is asked about session locks.

    Args:
        fences: The table of the fence counters, quoted and with its schema, as the next two.
        sessions: That of what each session was granted last.
        salt: That of the secret.
    """

    fences: str
    sessions: str
    salt: str

    def preparation(self) -> str:
        """Return the statements that prepare what a session is asked."""
        ways = {
            "distlock_acquire": "pg_try_advisory_lock(paused.number)",
            # Not taken a second time: it would have to be given back as often.
            "distlock_hand_over": _OWN.format(number="paused.number"),
        }
        acquires = [
            self._named(_ACQUIRE, prepared=prepared, take=take, number=self._number("$1"))
            for prepared, take in ways.items()
        ]
        own = _OWN.format(number="$1")
        # Asked by who has lost. In the statement above, it would double the price of winning.
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
        """Return the query for the clock and the holder of a key, by its storage key."""
        return f"SELECT {NOW}, who.* FROM ({self._held('%(name)s')}) who"

    def everybody(self) -> str:
        """Return the same query for all keys whose storage keys begin with a text."""
        held = self._named(_HELD, number=self._number("x.storage_key"))
        return f"SELECT {NOW}, who.* FROM ({held}) who WHERE starts_with(who.storage_key, %s)"

    def taken(self) -> str:
        """Return the query for which of these storage keys have a number that somebody locks."""
        return (
            "SELECT n.name FROM unnest(%s::text[]) n(name)"
            f" WHERE {self._number('n.name')} IN (SELECT {LOCK_NUMBER} FROM {HELD_LOCKS})"
        )

    def call(self, function: str, use: str) -> str:
        """Return the query that calls a function on a number that a storage key has for a use."""
        return f"SELECT {function}({number(use, '%s')}) FROM {self.salt} s"

    def lock_fence(self) -> str:
        """Return what keeps a key from being granted until the transaction ends; its fence."""
        return f"SELECT fence FROM {self.fences} WHERE storage_key = %s FOR NO KEY UPDATE"

    def terminate(self) -> str:
        """Return what ends the session `pid` if it still holds a key, within `patience` ms."""
        held = self._held("%(name)s")
        return (
            f"SELECT pg_terminate_backend(held.pid, %(patience)s) FROM ({held}) held"
            " WHERE held.pid = %(pid)s"
        )

    def request_stop(self) -> str:
        """Return what asks a holder to stop: when, the session, the storage key and the fence."""
        return (
            f"UPDATE {self.sessions} SET stop_requested_at = coalesce(stop_requested_at, %s)"
            " WHERE pid = %s AND storage_key = %s AND fence = %s RETURNING stop_requested_at"
        )

    def forget_ended(self) -> str:
        """Return what removes the rows of sessions that have ended, but for those in use."""
        return (
            f"DELETE FROM {self.sessions} WHERE pid IN (SELECT x.pid FROM {self.sessions} x WHERE"
            " NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = x.pid)"
            " FOR UPDATE SKIP LOCKED)"
        )

    def _held(self, name: str) -> str:
        held = self._named(_HELD, number=self._number(name))
        return f"{held} WHERE x.storage_key = {name}"

    def _number(self, name: str) -> str:
        # Not joined: that there is one row of it, the planner does not know.
        return f"(SELECT {number('session', name)} FROM {self.salt} s)"

    def _named(self, statement: str, **more: str) -> str:
        return statement.format(
            fences=self.fences, sessions=self.sessions, salt=self.salt, now=NOW, **more
        )


def instant(microseconds: object) -> datetime:
    """Return the time that a session told."""
    return from_microseconds(int(str(microseconds)))


def granted_at(fence: int, now: datetime) -> datetime:
    """Return when a fence was given: it is the clock's, unless its counter was ahead of that."""
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
