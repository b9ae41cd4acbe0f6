"""What the advisory backend asks the server, and how it reads who holds a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...core.holders import Holder
from ...core.keys import key_hash
from ...core.records import Record
from ...fields import from_microseconds, to_microseconds

#: What the names of sessions that hold a lock begin with.
SHOWN = "distlock:"
#: Bytes that PostgreSQL keeps of a session's name.
_NAME_BYTES = 63

_NOW = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"
_LOCKS = """
    FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_FACTS = """
    l.pid, host(a.client_addr) AS host,
    (date_part('epoch', a.backend_start) * 1000000)::bigint AS began,
    (date_part('epoch', a.state_change) * 1000000)::bigint AS changed
"""

# The steps depend on each other, and so have an order: whoever loses has written nothing, and the
# fence is counted by who has the lock. An error behind the lock does not undo it.
_ACQUIRE = """
PREPARE {statement} (text, text, bigint, oid, oid, text, text) AS
WITH paused AS MATERIALIZED (
    SELECT EXISTS (
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
)
SELECT
    done.turn, done.paused, done.fence, done.now,
    CASE WHEN done.fence IS NOT NULL THEN set_config('application_name', $7, false) END,
    -- Ahead of the clock, a fence would come again behind a crash that undid it.
    CASE WHEN done.fence > done.now / 10 THEN set_config('synchronous_commit', $6, true) END
FROM (
    SELECT turn.yes AS turn, paused.yes AS paused, granted.fence, {now} AS now
    FROM paused CROSS JOIN turn LEFT JOIN granted ON true OFFSET 0
) done
"""

# Asked by who has lost. In the statement above, it would double the price of winning.
_LOST = """
PREPARE distlock_lost (text, oid, oid, text) AS
SELECT {now}, who.* FROM (SELECT 1) one LEFT JOIN ({who}) who ON true
"""

_OWN = """EXISTS (
    SELECT FROM pg_locks l WHERE l.pid = pg_backend_pid() AND l.locktype = 'advisory'
        AND l.objsubid = 1 AND l.granted AND l.classid = {high} AND l.objid = {low}
)"""

# Of 64 bits two keys can be found that have the same ones, so the session has to have our name.
_WHO = """
SELECT {facts}, (SELECT c.fence FROM {fences} c WHERE c.storage_key = {name}) AS fence
{locks} AND l.classid = {high} AND l.objid = {low} AND a.application_name = {shown} LIMIT 1
"""

_HOLDER = "SELECT {now}, who.* FROM ({who}) who"

# Only keys that cannot be shown themselves are hashed.
_HASHED = """
SELECT storage_key FROM {fences} WHERE (octet_length(key) > {longest} OR key ~ '[^ -~]')
    AND rtrim(translate(encode(
        substring(sha256(convert_to(storage_key, 'UTF8')) FOR 16), 'base64'
    ), '+/', '-_'), '=') = ANY(%s)
"""


def preparation(fences: str) -> str:
    """Return the statements that prepare what a session is asked.

    Args:
        fences: The table of the fence counters, quoted.
    """
    ways = {
        "distlock_acquire": "pg_try_advisory_lock($3)",
        # Not taken a second time: it would have to be given back as often.
        "distlock_hand_over": _OWN.format(high="$4", low="$5"),
    }
    acquires = [
        _ACQUIRE.format(statement=statement, take=take, fences=fences, now=_NOW)
        for statement, take in ways.items()
    ]
    lost = _LOST.format(now=_NOW, who=_who(fences, name="$1", high="$2", low="$3", shown="$4"))
    release = (
        "PREPARE distlock_release (bigint) AS SELECT pg_advisory_unlock($1),"
        " set_config('application_name', 'distlock', false)"
    )
    ping = f"PREPARE distlock_ping (oid, oid) AS SELECT {_NOW}, {_OWN.format(high='$1', low='$2')}"
    return "; ".join([*acquires, lost, release, ping])


def who_holds(fences: str) -> str:
    """Return the query for the holder of one key, by storage key, number halved, and name."""
    who = _who(fences, name="%s", high="%s::oid", low="%s::oid", shown="%s")
    return _HOLDER.format(now=_NOW, who=who)


def _who(fences: str, *, name: str, high: str, low: str, shown: str) -> str:
    return _WHO.format(
        facts=_FACTS, locks=_LOCKS, fences=fences, name=name, high=high, low=low, shown=shown
    )


#: All locks of the database: the clock, the lock's number, the session's name, and who holds it.
EVERYBODY = (
    f"SELECT {_NOW}, (l.classid::bigint << 32) | l.objid::bigint, a.application_name, {_FACTS}"
    f" {_LOCKS} AND a.application_name LIKE '{SHOWN}%%'"
)

#: The numbers of all locks that last for a session.
NUMBERS = f"SELECT (l.classid::bigint << 32) | l.objid::bigint {_LOCKS}"

#: Keeps a key from being granted until the end of the transaction, and tells its fence.
LOCK_FENCE = "SELECT fence FROM {fences} WHERE storage_key = %s FOR NO KEY UPDATE"

#: Ends the session that holds a lock, if it still is the one that was seen.
TERMINATE = f"""
    SELECT pg_terminate_backend(l.pid, %s) {_LOCKS}
        AND l.classid = %s::oid AND l.objid = %s::oid AND l.pid = %s
        AND a.application_name = %s
"""


def hashed_names(fences: str) -> str:
    """Return the query for the storage keys of which sessions show the hash.

    It looks through all of them.
    """
    return _HASHED.format(fences=fences, longest=_NAME_BYTES - len(SHOWN))


def shown(key: str, name: str) -> str:
    """Return what a session that holds a key is called.

    Args:
        name: The storage key, whose hash stands for what PostgreSQL would spoil or cut off.
    """
    readable = key.isascii() and key.isprintable() and len(SHOWN + key) <= _NAME_BYTES
    return SHOWN + (key if readable else key_hash(name))


def halves(number: int) -> tuple[int, int]:
    """Return the two numbers as which PostgreSQL shows the number of a lock."""
    return divmod(number % 2**64, 2**32)


def instant(microseconds: object) -> datetime:
    """Return the time that a session told."""
    return from_microseconds(int(str(microseconds)))


def granted_at(fence: int, now: datetime) -> datetime:
    """Return when a fence was given: it is the clock's, unless its counter was ahead of that."""
    return from_microseconds(min(fence * 10, to_microseconds(now)))


@dataclass(frozen=True, slots=True)
class Seen:
    """What the server tells about the session that holds a lock.

    Attributes:
        began: When the session was opened; None: we may not know, as of `changed`.
        changed: When it was last asked something.
        fence: What the counter says; None: there is none.
    """

    pid: int
    host: str | None
    began: datetime | None
    changed: datetime | None
    fence: int | None

    @classmethod
    def read(cls, row: Sequence[Any]) -> Seen:
        """Return what a row says, in this order."""
        pid, host, began, changed, fence = row
        return cls(
            int(pid),
            host,
            None if began is None else instant(began),
            None if changed is None else instant(changed),
            None if fence is None else int(fence),
        )

    def record(self, key: str, now: datetime) -> Record:
        """Return what can be known about a lock of another process."""
        fence, began = self.fence or 0, self.began or now
        at = granted_at(fence, now)
        if not began <= at < now:
            # The counter was ahead of the clock, or is not the one of this grant any more.
            at = began
        holder = Holder(host=self.host or "local", metadata={"session": self.pid})
        return Record(key, "", fence, None, at, max(at, self.changed or at), None, None, holder)
