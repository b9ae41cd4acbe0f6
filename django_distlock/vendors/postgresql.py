"""PostgreSQL: advisory locks, bounds and durability that last for a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from ..conf import table
from ..core.keys import advisory_id
from ..fields import from_microseconds
from .base import Vendor

_BUSY = {"55P03", "40P01"}  # lock_not_available, deadlock_detected

#: By SQLSTATE, or by its beginning; the longest that fits counts.
_CODES: Mapping[str, str] = {
    "08": "service_unavailable",  # connection exception
    "25006": "service_unavailable",  # read-only transaction: a replica, or a failover
    "28": "auth_failed",
    "40": "service_unavailable",  # transaction rollback
    "42501": "auth_failed",  # insufficient privilege
    "53": "rate_limited",  # insufficient resources
    "55P03": "network_timeout",  # lock not available
    "57014": "network_timeout",  # statement timeout
    "57P": "service_unavailable",  # shutdown, crash, starting up
    "58": "service_unavailable",  # system error
}


class PostgreSQL(Vendor):
    """Settings are made for one transaction, so that none reaches a pooler's next client."""

    def now(self) -> datetime:
        microseconds = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        return from_microseconds(self._ask(microseconds)[0])

    @contextmanager
    def short_transaction(self, bound: float, *, writes: bool = True) -> Iterator[None]:
        nested = self.connection.in_atomic_block
        with super().short_transaction(bound):
            if not nested:
                self._ask("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            before, _ = self._ask(
                "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)",
                [str(milliseconds(bound))],
            )
            yield
            if nested:
                self._ask("SELECT set_config('lock_timeout', %s, true)", [before])

    def take_turn(self, name: str) -> bool:
        self._ask("SELECT pg_advisory_xact_lock(%s)", [advisory_key(name)])
        return True

    def make_durable(self) -> None:
        self._ask(
            "SELECT set_config('synchronous_commit', 'on', true)"
            " WHERE current_setting('synchronous_commit') <> 'remote_apply'"
        )

    def is_busy(self, error: BaseException) -> bool:
        return is_busy(error)

    def is_duplicate(self, error: BaseException) -> bool:
        return sqlstate(error) == "23505"

    def is_missing(self, error: BaseException) -> bool:
        state = sqlstate(error)
        return state.startswith("42") and state not in _CODES

    def known_code(self, error: BaseException) -> str | None:
        state = sqlstate(error)
        fitting = (_CODES[state[:length]] for length in (5, 3, 2) if state[:length] in _CODES)
        return next(fitting, "") if state else None


def sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE that PostgreSQL gave for `error`, or ""."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def is_busy(error: BaseException) -> bool:
    """Whether another transaction was in the way for longer than the bound."""
    return sqlstate(error) in _BUSY


def is_overflow(error: BaseException) -> bool:
    """Whether a key has used up its fences: no counter takes the next one."""
    return sqlstate(error) == "23514"


def milliseconds(bound: float) -> int:
    """Return a bound for `lock_timeout`, where 0 would mean for ever."""
    return max(1, int(bound * 1000))


def advisory_salt() -> str:
    """Return what keeps the turns of these tables apart from other uses of advisory locks."""
    return f"django_distlock:{table('locks')}"


def advisory_key(name: str) -> int:
    """Return the number of the advisory lock under which the acquirers of a key take turns."""
    return advisory_id(advisory_salt(), name)


def session_salt() -> str:
    """Return what keeps locks that last for a session apart from other advisory locks."""
    return f"django_distlock:session:{table('fences')}"
