"""SQLite: one writer per file, and no clock of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import ClassVar, Literal

from .base import Vendor

_ERROR = 1  # a statement that makes no sense, such as one about a missing table
_BUSY = {5, 6}  # SQLITE_BUSY, SQLITE_LOCKED
_SNAPSHOT = 517  # SQLITE_BUSY_SNAPSHOT
_READ_ONLY = 8
_DUPLICATE = {1555, 2067}  # SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE

#: Seconds that a statement waits for the file at most: no signal interrupts it.
_LONGEST = 0.25

#: By primary result code.
_CODES: Mapping[int, str] = {
    5: "network_timeout",  # busy
    6: "network_timeout",  # locked
    8: "service_unavailable",  # read-only
    10: "service_unavailable",  # I/O error
    11: "service_unavailable",  # corrupt
    13: "rate_limited",  # full
    14: "service_unavailable",  # cannot open
    26: "service_unavailable",  # not a database
}


class SQLite(Vendor):
    """Whoever writes has the file to himself, from the transaction's beginning."""

    time_authority: ClassVar[Literal["server", "client"]] = "client"

    def now(self) -> datetime:
        return datetime.now(UTC)

    @contextmanager
    def short_transaction(self, bound: float, *, writes: bool = True) -> Iterator[None]:
        # The bound is the connection's: see LockConnections. A transaction to read would take the
        # one writer's place.
        if not writes:
            yield
            return
        with super().short_transaction(bound):
            yield

    def lock_row(self, table: str, name: str, bound: float, *, shared: bool) -> bool:
        # Whoever writes has the whole file, whatever the row.
        (before,) = self._ask("PRAGMA busy_timeout")
        milliseconds = int(min(bound, _LONGEST) * 1000)
        self._ask(f"PRAGMA busy_timeout = {milliseconds}")
        try:
            table = table.replace("%", "%%")
            statement = f"UPDATE {table} SET fence = fence WHERE storage_key = %s"  # noqa: S608
            with self.connection.cursor() as cursor:
                cursor.execute(statement, [name])
                return bool(cursor.rowcount)
        finally:
            self._ask(f"PRAGMA busy_timeout = {before}")

    def is_overtaken(self, error: BaseException) -> bool:
        return _extended(error) == _SNAPSHOT

    def is_read_only(self, error: BaseException) -> bool:
        return _primary(error) == _READ_ONLY

    def is_busy(self, error: BaseException) -> bool:
        return _primary(error) in _BUSY

    def is_duplicate(self, error: BaseException) -> bool:
        return _extended(error) in _DUPLICATE

    def is_missing(self, error: BaseException) -> bool:
        return _primary(error) == _ERROR

    def known_code(self, error: BaseException) -> str | None:
        code = _primary(error)
        return _CODES.get(code, "") if code else None


def _extended(error: BaseException) -> int:
    return getattr(error.__cause__, "sqlite_errorcode", 0)


def _primary(error: BaseException) -> int:
    # The extended codes carry the primary one in their low byte.
    return _extended(error) & 0xFF
