"""MariaDB and MySQL, with InnoDB: the fence counter is the mutex of its key.

Locking a row that is not there locks the gap where it would be, and two who do so deadlock. So the
counter is committed first, and locked by primary key alone, under READ COMMITTED.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from typing import Any, ClassVar

from django.db import models
from django.db.utils import Error

from ...conf import table
from ...core.keys import advisory_id
from ...core.records import Grant, from_microseconds, to_microseconds
from .base import LOOK_SECONDS, Vendor

#: The server's numbers for a statement that it has ended.
INTERRUPTED, MAX_STATEMENT_TIME, MAX_EXECUTION_TIME = 1317, 1969, 3024
_BUSY = {
    1205,  # lock wait timeout, and NOWAIT on MariaDB
    1213,  # deadlock
    MAX_STATEMENT_TIME,  # on MariaDB
    MAX_EXECUTION_TIME,  # on MySQL
    3572,  # NOWAIT on MySQL
}
#: Seconds that a statement with a bound may take at least: it is cut off also while it works.
SHORTEST = 0.1

#: Seconds that a statement waits for a row at most: not every driver can be interrupted in it.
_LONGEST = 10.0

#: Numbers of the client library: no connection, or lost.
_CLIENT = range(2000, 3000)

_CODES: Mapping[int, str] = {
    1021: "rate_limited",  # disk full
    1040: "rate_limited",  # too many connections
    1041: "rate_limited",  # out of memory
    1044: "auth_failed",  # access denied to a database
    1045: "auth_failed",  # access denied
    1047: "service_unavailable",  # a node of a Galera cluster that has lost the others
    1049: "service_unavailable",  # unknown database
    1053: "service_unavailable",  # shutdown in progress
    1114: "rate_limited",  # table full, as where the disk is
    1129: "service_unavailable",  # too many connections of a host have failed
    1130: "auth_failed",  # access denied to a host
    1142: "auth_failed",  # access denied to a table
    1143: "auth_failed",  # access denied to a column
    1152: "service_unavailable",  # aborted connection
    1203: "rate_limited",  # too many connections of a user
    1205: "network_timeout",  # lock wait timeout
    1213: "service_unavailable",  # deadlock
    1226: "rate_limited",  # a user's resources are used up
    1290: "service_unavailable",  # read-only: a replica, or a failover
    INTERRUPTED: "network_timeout",
    1698: "auth_failed",  # access denied, without a password
    1792: "service_unavailable",  # read-only transaction
    1820: "auth_failed",  # password expired
    1836: "service_unavailable",  # read-only mode
    1862: "auth_failed",  # password expired, without a session
    1927: "service_unavailable",  # connection killed
    MAX_STATEMENT_TIME: "network_timeout",
    MAX_EXECUTION_TIME: "network_timeout",
    3572: "network_timeout",  # NOWAIT
    4031: "service_unavailable",  # disconnected for being idle
    4151: "auth_failed",  # account locked
    **dict.fromkeys(_CLIENT, "service_unavailable"),
}

_CLOCK = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
# The inner one reads from the transaction's snapshot, the outer one what is committed. The clock is
# read after the wait: all but SYSDATE() tell when the statement began.
_GUARD = (
    "SELECT c.fence, (SELECT s.fence FROM {fences} s WHERE s.storage_key = c.storage_key),"
    " {clock} + TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))"
    " FROM {fences} c WHERE c.storage_key = %s LOCK IN SHARE MODE"
)
_DELETE = "DELETE FROM %s WHERE %s = %%s"


class MySQL(Vendor):
    """Durable as `innodb_flush_log_at_trx_commit` says, which no session can change."""

    turns_by_counter: ClassVar[bool] = True
    # UTC, because a local time occurs twice in autumn.
    clock: ClassVar[str | None] = _CLOCK
    schema_of: ClassVar[str | None] = "SELECT DATABASE(), DATABASE() IS NOT NULL"
    # A small table is scanned for `IN (…)`, whatever its key.
    locks_what_it_scans: ClassVar[bool] = True
    writes_values_out: ClassVar[bool] = True
    supports_guard: ClassVar[bool] = True
    busy: ClassVar[Collection[int]] = _BUSY
    duplicate: ClassVar[Collection[int]] = (1062,)
    missing: ClassVar[Collection[int]] = (1054, 1146)  # unknown column, no such table
    overtaken: ClassVar[Collection[int]] = (1020,)  # with innodb_snapshot_isolation
    deadlock: ClassVar[Collection[int]] = (1213,)
    read_only: ClassVar[Collection[int]] = (1792,)
    unavailable: ClassVar[Mapping[Any, str]] = _CODES

    def now(self) -> datetime:
        return from_microseconds(self._ask(f"SELECT {self.clock}")[0])

    @contextmanager
    def short_transaction(self, bound: float, *, writes: bool = True) -> Iterator[None]:
        bounded = self.connection.execute_wrapper(_WithBound(bound, self._is_mariadb))
        settings = nullcontext() if self._is_mariadb or not writes else self._session_bound(bound)
        with settings, bounded:
            if not writes:
                # Each statement sees what is committed, whatever the isolation level.
                yield
                return
            nested = self.connection.in_atomic_block
            with super().short_transaction(bound):
                if not nested:
                    # For this transaction only. It begins with the first statement on a table.
                    self._ask("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                yield
                if not nested:
                    # Here and not by Django after us, because a backup may hold up commits.
                    self._ask("COMMIT")

    def delete(self, rows: models.QuerySet[Any], names: Sequence[str | int]) -> int:
        # One at a time, see `locks_what_it_scans`: no hint keeps a scan away from a small table.
        # Past the ORM, which takes twice as long for each as the server does.
        quote, meta = self.connection.ops.quote_name, rows.model._meta
        statement = _DELETE % (quote(meta.db_table), quote(meta.pk.column))
        gone = 0
        with self.connection.cursor() as cursor:
            for name in names:
                cursor.execute(statement, [name])
                gone += cursor.rowcount
        return gone

    def guard(
        self, fences: str, name: str, fence: int, bound: float, lease: Grant | None = None
    ) -> bool:
        guard = _GUARD.format(fences=fences.replace("%", "%%"), clock=_CLOCK)
        found = self._ask_within(bound, guard, name)
        # With a snapshot from before the grant, what is read after this would be older than it.
        if found is None or found[:2] != (fence, fence):
            return False
        until = None if lease is None else lease.expires_at
        return until is None or bool(found[2] < to_microseconds(until))

    def lock_row(self, table: str, name: str, bound: float, *, shared: bool) -> bool:
        how = "LOCK IN SHARE MODE" if shared else "FOR UPDATE"
        table = table.replace("%", "%%")
        statement = f"SELECT fence FROM {table} WHERE storage_key = %s {how}"  # noqa: S608
        return self._ask_within(min(bound, _LONGEST), statement, name) is not None

    @contextmanager
    def looking(self, name: str) -> Iterator[bool]:
        look = str(advisory_id(f"{table('locks')}:look", name))
        # MySQL rounds it down.
        is_alone = self._ask("SELECT GET_LOCK(%s, %s)", [look, LOOK_SECONDS])[0] == 1
        try:
            yield is_alone
        finally:
            if is_alone:
                # A session that broke has lost it, and the first error tells more.
                with suppress(Error):
                    self._ask("SELECT RELEASE_LOCK(%s)", [look])

    def has_rolled_back(self, error: BaseException) -> bool:
        if 1205 not in self.codes(error):
            return self.is_deadlock(error) or self.is_overtaken(error)
        # Django refuses queries in a transaction that needs a rollback: nothing can be asked.
        return self.connection.needs_rollback or bool(
            self._ask("SELECT @@innodb_rollback_on_timeout")[0]
        )

    def _ask_within(self, bound: float, statement: str, name: str) -> Any:
        # Spelt out: the characters that the caller's session sends may not be all that a key has.
        statement %= f"_utf8mb4 0x{name.encode().hex()}"
        # Nothing is set on the caller's connection, which a signal could leave behind.
        if self._is_mariadb:
            return self._ask(_with_bound(bound) + statement)
        return self._ask(_READS.sub(_with_hint(_limit(bound)), statement))

    @contextmanager
    def _session_bound(self, bound: float) -> Iterator[None]:
        """Bound waits for whole seconds: MySQL knows no shorter ones where something is written."""
        before = self._ask("SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout")
        statement = "SET SESSION innodb_lock_wait_timeout = %s, SESSION lock_wait_timeout = %s"
        try:
            self._ask(statement, [_seconds(bound)] * 2)
            yield
        finally:
            # A connection that broke has nothing to put back, and the first error tells more.
            with suppress(Error):
                self._ask(statement, list(before))

    @property
    def _is_mariadb(self) -> bool:
        return bool(self.connection.mysql_is_mariadb)  # type: ignore[attr-defined]

    def codes(self, error: BaseException) -> Sequence[int]:
        number, *_ = getattr(error.__cause__, "args", ()) or (0,)
        return (number,) if number and isinstance(number, int) else ()

    def has_answered(self, error: BaseException) -> bool:
        codes = self.codes(error)
        return bool(codes) and codes[0] not in _CLIENT


#: Also after a comment that a wrapper of the project's put in front, and in a union.
_BEGINS = r"\A(?:\s|\(|/\*.*?\*/)*"
_MAY_WAIT, _READS = (
    re.compile(rf"{_BEGINS}(?:{which})\b", re.DOTALL | re.IGNORECASE)
    for which in ("SELECT|INSERT|UPDATE|DELETE|COMMIT", "SELECT")
)


class _WithBound:
    """Bound each statement by itself, without a setting that had to be put back."""

    def __init__(self, bound: float, is_mariadb: bool):
        if is_mariadb:
            self._which, self._bounded = _MAY_WAIT, rf"{_with_bound(bound)}\g<0>"
            return
        whole = _seconds(bound)
        hint = _limit(bound) if bound < whole else f"SET_VAR(lock_wait_timeout={whole})"
        self._which, self._bounded = _READS, _with_hint(hint)

    def __call__(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        return execute(self._which.sub(self._bounded, sql), params, many, context)


def _seconds(bound: float) -> int:
    return max(1, math.ceil(bound))


def _limit(bound: float) -> str:
    """Return MySQL's limit on a statement that only reads or locks; it ends also its waits."""
    return f"MAX_EXECUTION_TIME({max(bound, SHORTEST) * 1000:.0f})"


def _with_hint(hint: str) -> str:
    return rf"\g<0> /*+ {hint} */"


def _with_bound(bound: float) -> str:
    """Return what stands before a statement of MariaDB's that may wait for so many seconds."""
    seconds = math.ceil(bound)
    limits = [f"innodb_lock_wait_timeout={seconds}", f"lock_wait_timeout={seconds}"]
    if bound < seconds:
        # Waits end after whole seconds. A part of one is a limit on the statement.
        limits.append(f"max_statement_time={max(bound, SHORTEST):.6f}")
    return f"SET STATEMENT {', '.join(limits)} FOR "
