"""Oracle. Written from its manuals, and never run: see docs/howto/choose-a-database.md.

Rows are locked as on MySQL, by way of a fence counter that is committed first. A statement that
changes or locks a row waits without a bound of its own, so the driver's bound on round trips is
used: https://python-oracledb.readthedocs.io/en/latest/user_guide/connection_handling.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import ClassVar

from ..fields import from_microseconds
from .base import Vendor

_BUSY = {
    "ORA-00054",  # NOWAIT
    "ORA-00060",  # deadlock
    "ORA-03136",  # a call took longer than its bound
    "ORA-03156",
    "ORA-30006",  # WAIT
    "DPI-1067",
    "DPY-4024",
}
_MISSING = {"ORA-00904", "ORA-00942"}  # no such column, table

_CODES: Mapping[str, str] = {
    "ORA-00018": "rate_limited",  # too many sessions
    "ORA-00020": "rate_limited",  # too many processes
    "ORA-00028": "service_unavailable",  # session killed
    "ORA-01017": "auth_failed",  # user or password
    "ORA-01031": "auth_failed",  # privileges
    "ORA-01033": "service_unavailable",  # starting up, shutting down
    "ORA-01034": "service_unavailable",  # not there
    "ORA-01089": "service_unavailable",  # shutting down
    "ORA-02391": "rate_limited",  # too many sessions of a user
    "ORA-03113": "service_unavailable",  # end of file on the channel
    "ORA-03114": "service_unavailable",  # not connected
    "ORA-12541": "service_unavailable",  # no listener
    "ORA-16000": "service_unavailable",  # read-only: a standby
    "ORA-28000": "auth_failed",  # account locked
    "DPY-1001": "service_unavailable",  # not connected
    "DPY-4011": "service_unavailable",  # connection closed by the other side
    "DPY-6005": "service_unavailable",  # cannot connect
}


class Oracle(Vendor):
    """Commits are durable unless the session says otherwise."""

    turns_by_counter: ClassVar[bool] = True

    def now(self) -> datetime:
        # One reading of the clock, taken apart without a detour over local time.
        row = self._ask(
            "SELECT EXTRACT(DAY FROM d) * 86400000000 + EXTRACT(HOUR FROM d) * 3600000000"
            " + EXTRACT(MINUTE FROM d) * 60000000 + EXTRACT(SECOND FROM d) * 1000000"
            " FROM (SELECT SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00' AS d"
            " FROM DUAL)"
        )
        return from_microseconds(int(row[0]))

    @contextmanager
    def short_transaction(self, bound: float, *, writes: bool = True) -> Iterator[None]:
        nested = self.connection.in_atomic_block
        with super().short_transaction(bound):
            raw = self.connection.connection
            before, raw.call_timeout = raw.call_timeout, max(1, int(bound * 1000))
            try:
                if not nested:
                    self._ask("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                yield
            finally:
                raw.call_timeout = before

    def is_busy(self, error: BaseException) -> bool:
        return _code(error) in _BUSY

    def is_duplicate(self, error: BaseException) -> bool:
        return _code(error) == "ORA-00001"

    def is_missing(self, error: BaseException) -> bool:
        return _code(error) in _MISSING

    def known_code(self, error: BaseException) -> str | None:
        code = _code(error)
        if code in _BUSY:
            return "network_timeout"
        return _CODES.get(code, "") if code else None


def _code(error: BaseException) -> str:
    """Return the code that server or driver gave for `error`, such as `"ORA-00054"`, or ""."""
    arguments = getattr(error.__cause__, "args", ())
    return getattr(arguments[0], "full_code", "") if arguments else ""
