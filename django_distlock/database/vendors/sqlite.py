"""SQLite: one writer per file, and no clock of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from .base import Vendor

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
    busy: ClassVar[Collection[int]] = (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED
    # SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE
    duplicate: ClassVar[Collection[int]] = (1555, 2067)
    missing: ClassVar[Collection[int]] = (1,)  # any statement that makes no sense
    overtaken: ClassVar[Collection[int]] = (517,)  # SQLITE_BUSY_SNAPSHOT
    read_only: ClassVar[Collection[int]] = (8,)
    unavailable: ClassVar[Mapping[Any, str]] = _CODES

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

    def codes(self, error: BaseException) -> Sequence[int]:
        extended = getattr(error.__cause__, "sqlite_errorcode", 0)
        # The extended codes carry the primary one in their low byte.
        return (extended, extended & 0xFF) if extended else ()
