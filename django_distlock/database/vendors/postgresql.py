"""PostgreSQL: advisory locks, bounds and durability that last for a transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar

from django.db.utils import OperationalError

from ...core.durations import GRACE, MAX_STANDSTILL
from ...core.records import Grant, from_microseconds
from ..sql import NOW, SCHEMA_OF, called, channel, number, quoted, side_table
from .base import Vendor

_BUSY = {"55P03", "40P01"}  # lock_not_available, deadlock_detected

#: By SQLSTATE, or by its beginning; the longest that fits counts.
_CODES: Mapping[str, str] = {
    "08": "service_unavailable",  # connection exception
    "25P03": "service_unavailable",  # idle-in-transaction timeout
    "25P04": "service_unavailable",  # transaction timeout
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

#: Milliseconds of the longest timeout that PostgreSQL takes.
_LONGEST = 2**31 - 1

# One round trip. The settings are made before the row is locked, because the lock is taken on top
# of the join; the clock is read after that, and the caller's own bound is put back last.
_GUARD = """
WITH settings AS MATERIALIZED (
    SELECT
        current_setting('lock_timeout') AS before,
        current_setting('idle_in_transaction_session_timeout') AS idle_before,
        set_config('lock_timeout', %%s, true) AS bound,
        CASE WHEN asked.most > 0 AND (
            current.idle = interval '0' OR current.idle > asked.most * interval '1 millisecond'
        ) THEN
            set_config('idle_in_transaction_session_timeout', asked.most::text, true)
        END AS idle,
        asked.until
    FROM
        (
            SELECT %%s::bigint AS most,
                coalesce(%%s::timestamptz, 'infinity') AS until
        ) asked,
        (SELECT current_setting('idle_in_transaction_session_timeout')::interval AS idle) current
), guarded AS MATERIALIZED (
    SELECT c.fence FROM settings s, %s c
        WHERE c.storage_key = %%s AND c.fence = %%s AND s.bound IS NOT NULL FOR SHARE OF c
), timed AS MATERIALIZED (
    SELECT g.fence, clock_timestamp() AS at FROM guarded g
)
SELECT
    timed.fence,
    set_config('lock_timeout', settings.before, true),
    CASE WHEN timed.fence IS NULL THEN
        set_config('idle_in_transaction_session_timeout', settings.idle_before, true)
    END
FROM settings LEFT JOIN timed ON timed.at < settings.until
"""


class PostgreSQL(Vendor):
    """Settings are made for one transaction, so that none reaches a pooler's next client."""

    schema_of: ClassVar[str | None] = SCHEMA_OF
    clock: ClassVar[str | None] = NOW
    supports_guard: ClassVar[bool] = True
    busy: ClassVar[Collection[str]] = _BUSY
    duplicate: ClassVar[Collection[str]] = ("23505",)
    overtaken: ClassVar[Collection[str]] = ("40001",)
    read_only: ClassVar[Collection[str]] = ("25006",)
    unavailable: ClassVar[Mapping[Any, str]] = _CODES

    def now(self) -> datetime:
        microseconds = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        return from_microseconds(self._ask(microseconds)[0])

    @contextmanager
    def short_transaction(self, bound: float, *, writes: bool = True) -> Iterator[None]:
        nested = self.connection.in_atomic_block
        with super().short_transaction(bound):
            if not nested:
                self._ask("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            limits = {"lock_timeout": bound}
            if not nested:
                limits["idle_in_transaction_session_timeout"] = MAX_STANDSTILL
            sets = ", ".join(f"set_config('{name}', %s, true)" for name in limits)
            before, *_ = self._ask(
                f"SELECT current_setting('lock_timeout'), {sets}",
                [str(milliseconds(each)) for each in limits.values()],
            )
            yield
            if nested:
                self._ask("SELECT set_config('lock_timeout', %s, true)", [before])

    def take_turn(self, name: str, *, shared: bool = False) -> bool:
        kind = "_shared" if shared else ""
        self._salted(f"pg_catalog.pg_advisory_xact_lock{kind}({number('turn', '%s')})", name)
        return True

    def make_durable(self) -> None:
        self._ask(
            "SELECT set_config('synchronous_commit', 'on', true)"
            " WHERE current_setting('synchronous_commit') <> 'remote_apply'"
        )

    def call_out(self, name: str) -> None:
        self._salted(f"pg_catalog.pg_notify({channel()}, {called('%s')})", name)

    def guard(
        self, fences: str, name: str, fence: int, bound: float, lease: Grant | None = None
    ) -> bool:
        ttl, until = (None, None) if lease is None else (lease.ttl, lease.expires_at)
        most = 0 if ttl is None else min(milliseconds(ttl + GRACE), _LONGEST)
        arguments = [str(milliseconds(bound)), most, until, name, fence]
        found = self._ask(_GUARD % fences.replace("%", "%%"), arguments)
        return found[0] is not None

    @contextmanager
    def looking(self, name: str) -> Iterator[bool]:
        self._salted(f"pg_catalog.pg_advisory_xact_lock({number('look', '%s')})", name)
        yield True

    def _salted(self, call: str, name: str) -> None:
        """Call a function with what the secret makes of a storage key."""
        salt = side_table("salt")
        if self._ask(f"SELECT {call} FROM {quoted(salt)} s", [name]) is None:  # noqa: S608
            raise no_secret(salt)

    def codes(self, error: BaseException) -> Sequence[str]:
        state = sqlstate(error)
        return (state, state[:3], state[:2]) if state else ()

    def is_missing(self, error: BaseException) -> bool:
        state = sqlstate(error)
        # A pooler has given the session of another client, who has prepared that statement.
        is_prepared = state == "42P05"
        return state.startswith("42") and state not in _CODES and not is_prepared


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


def no_secret(salt: str) -> OperationalError:
    """Return why nothing can be locked where the secret of the numbers is gone from its table."""
    return OperationalError(f"The table {salt} is empty: run manage.py migrate.")
