"""What differs between databases in a lock's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from django.db import connections, transaction
from django.db.utils import DatabaseError

from .conf import table
from .core.keys import advisory_id
from .fields import from_microseconds

#: Databases that this release runs on.
SUPPORTED = ("postgresql", "sqlite")

_PG_BUSY = {"55P03", "40P01"}  # lock_not_available, deadlock_detected
_SQLITE_BUSY = {5, 6}  # SQLITE_BUSY, SQLITE_LOCKED
_SQLITE_DUPLICATE = {1555, 2067}  # SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE

#: SQLite's code for a statement that it cannot make sense of, such as one about a missing table.
SQLITE_ERROR = 1


def sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE that PostgreSQL gave for `error`, or ""."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def sqlite_code(error: BaseException) -> int:
    """Return SQLite's primary result code for `error`, or 0."""
    # The extended codes carry the primary one in their low byte.
    return getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: DatabaseError) -> bool:
    """Whether another transaction was in the way for longer than the bound."""
    return sqlstate(error) in _PG_BUSY or sqlite_code(error) in _SQLITE_BUSY


def is_duplicate(error: BaseException) -> bool:
    """Whether a row with this value of a unique column exists already."""
    code = getattr(error.__cause__, "sqlite_errorcode", 0)
    return sqlstate(error) == "23505" or code in _SQLITE_DUPLICATE


def milliseconds(bound: float) -> int:
    """Return a bound for PostgreSQL's `lock_timeout`, where 0 would mean for ever."""
    return max(1, int(bound * 1000))


def now(using: str) -> datetime:
    """Return the store's clock, read now and not when the transaction began."""
    connection = connections[using]
    if connection.vendor != "postgresql":
        # SQLite has no clock of its own: the host's it is.
        return datetime.now(UTC)
    with connection.cursor() as cursor:
        cursor.execute("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
        return from_microseconds(cursor.fetchone()[0])


@contextmanager
def short_transaction(using: str, bound: float, *, writes: bool = True) -> Iterator[None]:
    """Open a transaction that sees what others commit and waits at most `bound` for their locks.

    In a `TestCase` it is a savepoint of the test's transaction. On SQLite, whoever only reads needs
    none: it would take the one writer's place.
    """
    connection = connections[using]
    if connection.vendor == "sqlite" and not writes:
        yield
        return
    nested = connection.in_atomic_block
    with transaction.atomic(using=using):
        if connection.vendor != "postgresql":
            yield
            return
        with connection.cursor() as cursor:
            if not nested:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(
                "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)",
                [str(milliseconds(bound))],
            )
            before = cursor.fetchone()[0]
            yield
            if nested:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [before])


def advisory_key(name: str) -> int:
    """Return the number of the advisory lock under which the acquirers of a key take turns."""
    return advisory_id(f"django_distlock:{table('locks')}", name)


def take_turn(using: str, name: str) -> None:
    """Wait for the other acquirers of a key, so that two cannot create it at once."""
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [advisory_key(name)])


def make_durable(using: str) -> None:
    """Let this transaction's commit survive a crash of the server. A stronger setting stays."""
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', true)"
                " WHERE current_setting('synchronous_commit') <> 'remote_apply'"
            )


def has_no_key_locks(using: str) -> bool:
    """Whether a row can be locked against changes of anything but its key."""
    return bool(connections[using].features.has_select_for_no_key_update)
