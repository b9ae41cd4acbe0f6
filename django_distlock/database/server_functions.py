"""The lock's transactions as PostgreSQL functions: one statement, one round trip.

The same operations as `HeldLockManager` has, with the same answers; the bodies are in
`sql/postgresql/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

from django.db import connections, transaction
from django.db.utils import DatabaseError

from ..core.durations import GRACE, MAX_BOUND
from ..core.records import (
    UNKNOWN,
    Attempt,
    Contended,
    Freed,
    Grant,
    Holder,
    InTheWay,
    KeysAsked,
    Unknown,
    all_or_none,
    check_fence,
    from_microseconds,
    instant,
    known_holder,
    used_up,
)
from ..core.sharing import DOOR_SECONDS
from . import vendors
from .borrowing import NeedsOwnSession
from .connections import is_own
from .sql import function_name
from .vendors.postgresql import milliseconds, sqlstate

#: Seconds of the longest wait that the server takes.
_LONGEST = 2_147_483.0


#: By SQLSTATE: another isolation level, a read-only session, a role without the right.
_OF_THE_SESSION = ("25001", "25006", "42501")


#: Microseconds for which nobody joins behind who waits to be alone.
DOOR = round(DOOR_SECONDS * 1_000_000)
#: The holder that a server told last, as JSON and as it was read.
_last_told: list[tuple[Any, Holder]] = [({}, Holder())]
#: What stands for the arguments of each function.
_PLACEHOLDERS = {
    "acquire": f"%s, %s, %s, %s, {GRACE}, %s::jsonb, %s, %s, %s, %s",
    "share": f"%s, %s, %s, %s, {GRACE}, %s::jsonb, %s, %s, %s, %s, %s, %s::integer, {DOOR}",
    "acquire_many": (
        f"%s::text[], %s::text[], %s::text[], %s::text[], %s, {GRACE}, %s::jsonb, %s, %s,"
        f" %s::integer, {DOOR}"
    ),
    "extend": f"%s, %s, %s, {GRACE}, %s",
    "extend_many": f"%s::text[], %s::text[], %s::double precision[], {GRACE}, %s",
    "release": "%s, %s, %s, %s",
    "transaction_lock": "%s, %s, %s, %s, %s",
}


class ServerFunctions:
    """Acquire, extend and release by one function call each.

    Args:
        named: Gives the name of a function as it is called: quoted, with its schema.
        follows_clock: Whether no fence is below what the store's clock says.
    """

    def __init__(self, using: str, named: Callable[[str], str], *, follows_clock: bool = False):
        self._using = using
        self._named = named
        self._follows_clock = follows_clock
        #: Who asked last, and as which JSON.
        self._said: tuple[Holder | None, str] = None, ""

    def db_manager(self, using: str) -> ServerFunctions:
        """Return the same functions on another alias."""
        if using == self._using:
            return self
        return ServerFunctions(using, self._named, follows_clock=self._follows_clock)

    def acquire(self, attempt: Attempt) -> Grant | Contended | None:
        """Grant the key if it is free; None: it is shared, or was: see `share`."""
        outcome, *facts = _parts(self._call("acquire", self._asked(attempt)), 7)
        return None if outcome == "shared" else acquired(attempt, outcome, *facts)

    def share(self, attempt: Attempt) -> Grant | Contended:
        """Grant a key that several share, or that somebody wants alone: see `in_the_way`."""
        arguments = [*self._asked(attempt), attempt.place, attempt.permits]
        return acquired(attempt, *_parts(self._call("share", arguments), 7))

    def acquire_many(self, attempts: Sequence[Attempt]) -> list[Grant] | InTheWay:
        """Grant several keys, or none of them; they differ in key and token alone."""
        first = attempts[0]
        arguments = [
            [each.name for each in attempts],
            [each.key for each in attempts],
            [each.token for each in attempts],
            [each.place for each in attempts],
            first.ttl,
            self._json(first.holder),
            self._follows_clock,
            milliseconds(first.bound),
            first.permits,
        ]
        place, answers = json.loads(self._call("acquire_many", arguments))
        if place:
            attempts, answers = attempts[place - 1 : place], [answers]
        told = zip(attempts, answers, strict=True)
        found = [acquired(attempt, *_padded(answer, 7)) for attempt, answer in told]
        return all_or_none(found, attempts)

    def _asked(self, attempt: Attempt) -> list[Any]:
        return [
            attempt.name, attempt.key, attempt.token, attempt.ttl,
            self._json(attempt.holder), attempt.wanted, attempt.replace,
            self._follows_clock, _bound(attempt.bound),
        ]  # fmt: skip

    def _json(self, holder: Holder) -> str:
        if holder.metadata:  # These may change.
            return json.dumps(holder.as_json())
        known, said = self._said
        if holder is not known:
            said = json.dumps(holder.as_json())
            self._said = holder, said
        return said

    def extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        """Replace the ttl of a lease."""
        arguments = [name, grant.token, ttl, _bound(bound)]
        return _extended(grant, ttl, json.loads(self._call("extend", arguments)))

    def extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        """Extend each lease by its own ttl; a row that somebody holds is skipped as unknown."""
        arguments = [
            [name for name, _grant in named],
            [grant.token for _name, grant in named],
            [grant.ttl for _name, grant in named],
            _bound(MAX_BOUND),
        ]
        answers = json.loads(self._call("extend_many", arguments))
        return [
            _extended(grant, grant.ttl, answer)
            for (_name, grant), answer in zip(named, answers, strict=True)
        ]

    def release(
        self, name: str, grant: Grant, *, held: float | None = None, bound: float
    ) -> Freed | Unknown:
        """Give the key back, or keep it taken for `held` seconds since the grant."""
        arguments = [name, grant.token, held, _bound(bound)]
        outcome = self._call("release", arguments)
        return UNKNOWN if outcome == "busy" else cast("Freed", outcome)

    def transaction_lock(
        self, names: Sequence[str], asked: KeysAsked
    ) -> tuple[str, str | None, list[Any]]:
        """Lock keys for the transaction of this alias.

        Returns:
            The outcome, the key that it is about, and what there is to say about that: see
            `sql/postgresql/transaction_lock.sql`.
        """
        bound = int(min(asked.bound, _LONGEST) * 1000)
        shared = ["t" if each else "f" for each in asked.keys.values()]
        arguments: list[Any] = [
            _array(names),
            _array(shared),
            _array(asked.tokens),
            bound,
            asked.keep,
        ]
        with connections[self._using].cursor() as cursor:
            cursor.execute(self._statement("transaction_lock"), arguments)
            outcome, *facts, place = _parts(cursor.fetchone()[0], 8)
        return outcome, None if place is None else [*asked.keys][place - 1], facts

    def _call(self, operation: str, arguments: list[Any]) -> str:
        statement = self._statement(operation)
        connection = connections[self._using]
        try:
            # In a test case's transaction, an error must not take the test's own work with it.
            savepoint = transaction.atomic(self._using) if connection.in_atomic_block else None
            with savepoint or nullcontext(), connection.cursor() as cursor:
                cursor.execute(statement, arguments)
                return str(cursor.fetchone()[0])
        except DatabaseError as error:
            state, inside = sqlstate(error), connection.in_atomic_block
            if state in _OF_THE_SESSION and not (inside or is_own(connection)):
                raise NeedsOwnSession from error
            # The server's default, which a transaction can change.
            if state != "25001" or inside:
                raise
        with vendors.of(self._using).short_transaction(MAX_BOUND), connection.cursor() as cursor:
            cursor.execute(statement, arguments)
            return str(cursor.fetchone()[0])

    def _statement(self, operation: str) -> str:
        # The caller's connection may look for names in another schema.
        function = self._named(function_name(operation)).replace("%", "%%")
        return f"SELECT {function}({_PLACEHOLDERS[operation]})"


def acquired(attempt: Attempt, outcome: str, *facts: Any) -> Grant | Contended:
    """Return what a server says of an attempt: see `sql/postgresql/acquire.sql`, `contended`."""
    if outcome == "granted":
        _now, fence, acquired_at, expires_at, *_ = facts
        check_fence(attempt.key, fence)
        return attempt.grant(fence, from_microseconds(acquired_at), instant(expires_at))
    if outcome == "overflow":
        raise used_up(attempt.key)
    return contended(outcome, *facts)


def contended(
    outcome: str,
    now: int,
    fence: int | None,
    acquired_at: int | None,
    expires_at: int | None,
    free_at: int | None,
    told: Any,
    shared: bool = False,
) -> Contended:
    """Return what a server says of a key that it did not grant: see `acquired`.

    Args:
        told: Who holds the key, as JSON that was read; None: nobody.
    """
    return Contended(
        holder=None if told is None else _holder(told),
        fence=fence,
        acquired_at=instant(acquired_at),
        expires_at=instant(expires_at),
        free_at=instant(free_at),
        observed_at=instant(now),
        busy=outcome == "busy",
        paused=outcome == "paused",
        shared=shared,
    )


def _holder(told: Any) -> Holder:
    # Who waits is told of the same holder again and again.
    known, holder = _last_told[0]
    if told != known:
        holder = known_holder(told)
        if not holder.metadata:  # These may change.
            _last_told[0] = told, holder
    return holder


def _bound(seconds: float) -> str:
    return str(milliseconds(seconds))


def _array(texts: Iterable[str]) -> str:
    """Return an array as text: a driver takes ten times as long for one of twenty keys."""
    every = list(texts)
    together = "".join(every)
    if "\\" in together or '"' in together:
        every = [each.replace("\\", "\\\\").replace('"', '\\"') for each in every]
    return '{"' + '","'.join(every) + '"}' if every else "{}"


def _parts(answer: str, length: int) -> list[Any]:
    """Return a JSON array, with None for what is left out at its end."""
    return _padded(json.loads(answer), length)


def _padded(parts: list[Any], length: int) -> list[Any]:
    return parts + [None] * (length - len(parts))


def _extended(grant: Grant, ttl: float | None, answer: list[Any]) -> Grant | Unknown | None:
    outcome, fence, acquired_at, expires_at, stop_requested = _padded(answer, 5)
    if outcome != "extended":
        return UNKNOWN if outcome == "busy" else None
    granted_at = from_microseconds(acquired_at)
    return grant.renewed(ttl, fence, granted_at, instant(expires_at), stop_requested)
