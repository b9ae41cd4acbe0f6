"""Find the PostgreSQL sessions that keep a key from being granted: by its fence, or by its number.

Callers give table names quoted and with their schema, and keys as storage keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, transaction

from ..conf import table
from ..core.records import KeptKey, Session
from ..database.connections import rows_of
from ..database.sql import HELD_LOCKS, LOCK_NUMBER, mark, number

#: With more fence counters than this, locked keys are shown by number only.
MOST_NAMES = 10_000

_LOCKERS = 'SELECT xmax::text FROM "%s" WHERE storage_key = %%s AND xmax <> 0'

#: If several transactions lock a row, its xmax is the id of a list of them.
_MEMBERS = "SELECT xid::text FROM pg_get_multixact_members(%s::xid)"

# The same id may be that of an unrelated transaction. Only sessions with a lock on the table count.
_SESSIONS = """
SELECT DISTINCT a.pid, a.application_name, a.usename, host(a.client_addr), a.xact_start
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
    AND l.transactionid::text = ANY(%s) AND l.pid <> pg_backend_pid()
    AND EXISTS (
        SELECT 1 FROM pg_locks t
        WHERE t.pid = l.pid AND t.locktype = 'relation' AND t.granted
            AND t.relation = to_regclass(%s) AND t.mode = 'RowShareLock'
    )
ORDER BY a.xact_start, a.pid
"""

# An acquire in progress has locked the number of its key as well, but not the mark.
_KEEPERS = f"""
WITH numbers AS MATERIALIZED (
    SELECT {number("turn", "%s")} AS turn, {mark()} AS mark FROM {{salt}} s
)
SELECT a.pid, a.application_name, a.usename, host(a.client_addr), a.xact_start
FROM pg_stat_activity a
WHERE a.pid IN (SELECT l.pid FROM {HELD_LOCKS} AND {LOCK_NUMBER} = (SELECT turn FROM numbers))
    AND a.pid IN (SELECT l.pid FROM {HELD_LOCKS} AND {LOCK_NUMBER} = (SELECT mark FROM numbers))
    AND a.pid <> pg_backend_pid()
ORDER BY a.xact_start, a.pid
"""  # noqa: S608 - of expressions of our own


# Finding the name of a number takes a hash of every key that was ever granted, so it is limited.
_KEPT_KEYS = f"""
WITH secret AS MATERIALIZED (
    SELECT {mark()} AS mark FROM {{salt}} s
), held AS MATERIALIZED (
    SELECT l.pid, {LOCK_NUMBER} AS number, l.mode, l.granted,
        l.waitstart
    FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
), known AS (
    SELECT c.key, {number("turn", "c.storage_key")} AS number
    FROM (
        SELECT key, storage_key FROM {{fences}}
        WHERE starts_with(storage_key, %s) ORDER BY storage_key LIMIT {MOST_NAMES}
    ) c, {{salt}} s
)
SELECT coalesce(known.key, ''), held.number, held.mode = 'ShareLock', NOT held.granted,
    coalesce(held.waitstart, a.xact_start),
    a.pid, a.application_name, a.usename, host(a.client_addr), a.xact_start
FROM secret, held JOIN pg_stat_activity a ON a.pid = held.pid
LEFT JOIN known ON known.number = held.number
WHERE held.number <> secret.mark AND held.pid <> pg_backend_pid()
    AND held.pid IN (SELECT m.pid FROM held m WHERE m.number = secret.mark AND m.granted)
ORDER BY a.xact_start, a.pid, 1, 2 LIMIT %s
"""  # noqa: S608 - of expressions of our own


def postgresql_kept_keys(
    using: str, tables: Mapping[str, str], namespace: str, limit: int
) -> tuple[KeptKey, ...]:
    """Return the keys that transactions have locked or wait for, the longest one first."""
    escaped = {what: name.replace("%", "%%") for what, name in tables.items()}
    rows = rows_of(using, _KEPT_KEYS.format(**escaped), namespace, limit)
    return tuple(
        KeptKey(key, number, shared, waits, since, _session(*session))
        for key, number, shared, waits, since, *session in rows
    )


def postgresql_keepers(using: str, salt: str, name: str) -> tuple[Session, ...]:
    """Return the sessions whose transactions have locked a key, the longest one first."""
    rows = rows_of(using, _KEEPERS.format(salt=salt.replace("%", "%%")), name)
    return tuple(_session(*row) for row in rows)


def postgresql_guards(using: str, fences: str, name: str) -> tuple[Session, ...]:
    """Return the sessions that have locked the fence counter of a key, the longest one first.

    This neither locks nor waits for anything.
    """
    lockers = [xmax for (xmax,) in rows_of(using, _LOCKERS % table("fences"), name)]
    for each in [*lockers]:
        # The number may be no list of lockers, or one that PostgreSQL has removed.
        with suppress(DatabaseError), transaction.atomic(using=using):
            lockers += [xid for (xid,) in rows_of(using, _MEMBERS, each)]
    rows = rows_of(using, _SESSIONS, lockers, fences) if lockers else []
    return tuple(_session(*row) for row in rows)


def _session(
    pid: int, application: str | None, user: str | None, client: str | None, since: Any
) -> Session:
    return Session(pid, application or "", user or "", client or "", since)
