"""The lock's transactions as PostgreSQL functions: one statement, one round trip.

The same operations as `HeldLockManager` has, with the same answers; the bodies are in
`sql/postgresql/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from django.db import connections, transaction
from django.db.utils import DatabaseError

from . import vendors
from .core.durations import GRACE, MAX_BOUND
from .core.errors import LockError
from .core.holders import Holder
from .core.records import FENCE_MAX, UNKNOWN, Contended, Grant, Unknown
from .fields import from_microseconds
from .managers import check_fence
from .sql import function_name


class ServerFunctions:
    """Acquire, extend and release by one function call each.

    Args:
        using: The alias whose connection is called on.
    """

    def __init__(self, using: str):
        self._using = using

    def acquire(
        self,
        name: str,
        key: str,
        token: str,
        ttl: float | None,
        holder: Holder,
        *,
        wanted: bool,
        replace: str | None,
        bound: float,
    ) -> Grant | Contended:
        """Grant the key if it is free."""
        row = self._call(
            "acquire",
            "%s, %s, %s, %s, %s, %s, %s::jsonb, %s, %s, %s, %s, %s",
            [
                name, key, vendors.advisory_key(name), token, ttl, GRACE,
                json.dumps(holder.as_json()), holder.host, holder.task_id,
                wanted, replace, vendors.milliseconds(bound),
            ],
        )[0]  # fmt: skip
        outcome, now, fence, acquired_at, expires_at, free_at, holder_json = row
        if outcome == "granted":
            check_fence(key, fence)
            ends = _instant(expires_at)
            return Grant(key, token, fence, ttl, from_microseconds(acquired_at), ends)
        if outcome == "overflow":
            raise LockError(f"The key {key!r} has used up its fences ({FENCE_MAX}).", key=key)
        return Contended(
            holder=None if holder_json is None else Holder.from_json(json.loads(holder_json)),
            fence=fence,
            acquired_at=_instant(acquired_at),
            expires_at=_instant(expires_at),
            free_at=_instant(free_at),
            observed_at=_instant(now),
            busy=outcome == "busy",
            paused=outcome == "paused",
        )

    def extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        """Replace the ttl of a lease."""
        arguments = [name, grant.token, ttl, GRACE, vendors.milliseconds(bound)]
        row = self._call("extend", "%s, %s, %s, %s, %s", arguments)[0]
        return _extended(grant, ttl, *row)

    def extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        """Extend each lease by its own ttl; a row that somebody holds is skipped as unknown."""
        rows = self._call(
            "extend_many",
            "%s::text[], %s::text[], %s::double precision[], %s, %s",
            [
                [name for name, _grant in named],
                [grant.token for _name, grant in named],
                [grant.ttl for _name, grant in named],
                GRACE,
                vendors.milliseconds(MAX_BOUND),
            ],
        )
        return [
            _extended(grant, grant.ttl, *row)
            for (_name, grant), row in zip(named, rows, strict=True)
        ]

    def release(
        self, name: str, grant: Grant, *, held: float | None = None, bound: float
    ) -> bool | Unknown:
        """Give the key back, or keep it taken for `held` seconds since the grant."""
        arguments = [name, grant.token, held, vendors.milliseconds(bound)]
        outcome = self._call("release", "%s, %s, %s, %s", arguments)[0][0]
        return UNKNOWN if outcome == "busy" else outcome == "released"

    def _call(self, operation: str, placeholders: str, arguments: list[Any]) -> list[Any]:
        # Of the settings' table name, which is an identifier, and of this module's placeholders.
        statement = f'SELECT * FROM "{function_name(operation)}"({placeholders})'  # noqa: S608
        connection = connections[self._using]
        try:
            # In a test case's transaction, an error must not take the test's own work with it.
            savepoint = transaction.atomic(self._using) if connection.in_atomic_block else None
            with savepoint or nullcontext(), connection.cursor() as cursor:
                cursor.execute(statement, arguments)
                return list(cursor.fetchall())
        except DatabaseError as error:
            if vendors.sqlstate(error) != "25001" or connection.in_atomic_block:
                raise
        # The server's default is another isolation level: say it, at the price of round trips.
        with vendors.short_transaction(self._using, MAX_BOUND), connection.cursor() as cursor:
            cursor.execute(statement, arguments)
            return list(cursor.fetchall())


def _extended(
    grant: Grant,
    ttl: float | None,
    outcome: str,
    fence: int,
    acquired_at: int,
    expires_at: int | None,
    stop_requested: bool,
) -> Grant | Unknown | None:
    if outcome != "extended":
        return UNKNOWN if outcome == "busy" else None
    granted_at = from_microseconds(acquired_at)
    return Grant(
        grant.key, grant.token, fence, ttl, granted_at, _instant(expires_at), stop_requested
    )


def _instant(value: int | None) -> Any:
    return None if value is None else from_microseconds(value)
