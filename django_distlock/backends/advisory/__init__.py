"""Locks that PostgreSQL keeps for as long as a session lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from django.db import Error

from ...conf import BackendConfig
from ...core import budgets
from ...core.durations import MAX_BOUND
from ...core.records import UNKNOWN, Attempt, Contended, Grant, Unknown
from ...database.connections import rows_of
from ...database.schemas import TableConnections
from ...exceptions import InvalidLockBackend
from ..base import BaseLockBackend
from ..counting import count_rows
from ..counts import Counts
from .attempts import SessionAttempts, second_key
from .holdings import Holding, Holdings, Pong, ping, ping_many
from .session import NoAnswer
from .sessions import Sessions
from .sql import Statements
from .views import table_names


class AdvisoryBackend(SessionAttempts, BaseLockBackend):
    """Hold each lock by a PostgreSQL session of its own, and count fences in the table.

    The server frees a lock when its session ends: at once when the process dies, within half a
    minute when its host vanishes. No lease ends by its ttl, which only tells a holder without
    answers when to stop: who never releases keeps the key for as long as the process lives. A
    session that is cut off loses its lock, and `check()` sees it without a query.

    Each lock that is held is a connection to the server itself: a pooler in between is refused,
    also one that pools sessions. Fences always follow the clock. A lease belongs to the process
    that took it; in every other one its token means nothing.

    Args:
        using: The alias of the database; None: `default`, which no router may contradict.
        max_connections: How many sessions this process opens at most, and so how many locks it
            holds at once.
    """

    distributed: ClassVar[bool] = True
    supports_ttl: ClassVar[bool] = False

    def __init__(
        self,
        config: BackendConfig,
        *,
        using: str | None = None,
        max_connections: int = 20,
        **unknown: Any,
    ):
        super().__init__(config, **unknown)
        where = f"DISTLOCK[{self.alias!r}]"
        limit = max_connections
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidLockBackend(
                f"{where}: max_connections must be an int of at least 1, not {limit!r}."
            )
        # Sessions see what is committed, so nothing may stay in the transaction of a TestCase.
        vendor = self._use_database(using, apart=True)
        if vendor != "postgresql":
            raise InvalidLockBackend(
                f"{where}: using: {self.using!r} is a {vendor} database. Only PostgreSQL has"
                " session locks."
            )
        self._counters.who_is_held = self._held_among
        self._holdings = Holdings()
        self.max_connections = limit
        self._sessions = Sessions(self.using, limit, partial(_prepared, self._connections))

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        other = self._holdings.of_token(attempt.token)
        if other is not None and other.name != attempt.name and not other.session.closed:
            raise second_key(attempt.key)
        replace = attempt.replace
        held = None if replace is None else self._holdings.of_token(replace, attempt.name)
        answer = None if held is None else self._hand_over(held, attempt)
        return self._attempt(attempt) if answer is None else answer

    def _extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        holding = self._holdings.of_token(grant.token, name)
        if holding is None:
            return None
        pong = ping(holding, budgets.end(MAX_BOUND))
        if isinstance(pong, Error):
            raise self._refused(pong, grant.key) from pong
        return self._extended(holding, grant, ttl, pong)

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        # Each session is a connection of its own, so there is no one round trip to all of them.
        found = [self._holdings.of_token(grant.token, name) for name, grant in named]
        known = {holding for holding in found if holding is not None}
        pongs = ping_many(known, budgets.end(MAX_BOUND))
        return [
            None if holding is None else self._extended(holding, grant, grant.ttl, pongs[holding])
            for holding, (_name, grant) in zip(found, named, strict=True)
        ]

    def _extended(
        self, holding: Holding, grant: Grant, ttl: float | None, pong: Pong
    ) -> Grant | Unknown | None:
        if not isinstance(pong, tuple):
            return None if pong is None else UNKNOWN
        now, stop_requested_at = pong
        facts: dict[str, Any] = {"ttl": ttl, "renewed_at": now}
        if stop_requested_at is not None:
            facts["stop_requested_at"] = stop_requested_at
        record = self._holdings.change(holding, **facts)
        stops = record.stop_requested_at is not None
        return grant.renewed(ttl, record.fence, record.acquired_at, None, stops)

    def _release(self, name: str, grant: Grant, held: float | None, *, bound: float) -> bool:
        holding = self._holdings.of_token(grant.token, name)
        if holding is None:
            return False
        session = holding.session
        with session.mutex:
            if self._holdings.of_token(grant.token, name) is not holding:
                return False
            try:
                # Forgotten behind it: interrupted before, it is released once more.
                freed = not session.closed and self._unlock(holding)
            except NoAnswer as error:
                self._forget(holding)
                raise self._no_answer(grant.key) from error
            self._forget(holding)
            return freed

    def _forget(self, holding: Holding) -> None:
        self._holdings.drop(holding)
        self._sessions.put_back(holding.session)

    def _unlock(self, holding: Holding) -> bool:
        session = holding.session
        try:
            session.catch_up(budgets.end(MAX_BOUND))
            return session.ask("distlock_release", holding.number)[0] == "t"
        except Error:
            # Cut off, it held nothing any more; alive, it frees the key by its end.
            was_cut_off = session.closed
            session.close()
            return not was_cut_off

    def is_cut_off(self, grant: Grant) -> bool:
        """See `BaseLockBackend`. A server that ends a session closes its connection."""
        holding = self._holdings.of_token(grant.token)
        if holding is None or not holding.is_cut_off():
            return False
        # Unless it was released meanwhile.
        return self._holdings.of_token(grant.token) is holding

    def most_sessions(self) -> int:
        """Open a session, and return how many the server takes from everybody together."""
        session = self._taken(None)
        if session is not None:
            self._sessions.put_back(session)
        most = (
            "SELECT current_setting('max_connections')::int"
            " - current_setting('superuser_reserved_connections')::int"
        )
        return int(self._ask(lambda on: rows_of(on, most))[0][0])

    def _cleanup(self, before: datetime, limit: int) -> int:
        # No record outlives its lock: beside notes, what goes is what ended sessions have left.
        # It has no arguments, for which names of tables have their signs doubled.
        self._ask(lambda on: rows_of(on, self._statements.forget_ended() % ()), busy=list)
        return self._remove_notes(before, limit)

    def _counts(self) -> Counts:
        # What is held is in no table.
        return replace(count_rows(self, locks=False), held=super()._counts().held)

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        self._holdings.forget()
        self._sessions.leave_to_parent()


def _prepared(tables: TableConnections) -> str:
    return Statements(*table_names(tables)).preparation()
