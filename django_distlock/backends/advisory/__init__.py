"""Session locks: PostgreSQL keeps each one until its session ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from django.core.exceptions import SynchronousOnlyOperation
from django.db import Error

from ...conf import BackendConfig
from ...core import durations
from ...core.durations import MAX_BOUND
from ...core.errors import BackendUnavailable, InvalidArgument, LockError, LockUsageError
from ...core.records import UNKNOWN, Attempt, Contended, Grant, Unknown, check_fence, used_up
from ...database.connections import rows_of
from ...database.schemas import TableConnections
from ...database.sql import side_table
from ...database.vendors.postgresql import is_busy, is_overflow, no_secret
from ...exceptions import InvalidLockBackend
from ..base import BaseLockBackend
from ..counting import count_rows
from ..counts import Counts
from .holdings import Holding, Holdings, Pong, ping, ping_many
from .session import NoAnswer, PoolerInBetween, Row, Session
from .sessions import AllInUse, Sessions
from .sql import Statements, granted_at, instant
from .views import SessionViews, table_names


class AdvisoryBackend(SessionViews, BaseLockBackend):
    """Holds each lock by a PostgreSQL session of its own, and counts fences in the table.

    The server frees a lock when its session ends: at once if the process dies, within half a minute
    if its host vanishes. Leases do not expire. The ttl only says when a holder that gets no answers
    must stop; without a release, the key stays taken while the process lives. If the server ends a
    session, its lock is lost, and `check()` sees that without a query.

    Each held lock needs a connection to the server itself; poolers are refused, even in session
    mode. Fences always follow the clock. A lease belongs to the process that acquired it; other
    processes cannot use its token.

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
        # Sessions see only committed rows, so nothing may stay in the transaction of a TestCase.
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
            raise InvalidArgument("This token already holds another key.", key=attempt.key)
        replace = attempt.replace
        held = None if replace is None else self._holdings.of_token(replace, attempt.name)
        answer = None if held is None else self._hand_over(held, attempt)
        return self._attempt(attempt) if answer is None else answer

    def _attempt(self, attempt: Attempt) -> Grant | Contended:
        """Make one attempt on a session that holds nothing."""
        session = self._taken(attempt.key)
        if session is None:
            # No statement can be prepared while the table is locked, but a read finds the holder.
            busy = self._busy(attempt.name)
            return replace(busy, busy=busy.fence is None)
        try:
            with session.mutex:
                answer = self._try(session, attempt)
        except LockError:
            self._sessions.put_back(session)
            raise
        except BaseException:
            # After an interruption, the session may hold the lock.
            session.close()
            raise
        if not session.holds:
            self._sessions.put_back(session)
        return answer

    def _hand_over(self, held: Holding, attempt: Attempt) -> Grant | Contended | None:
        """Grant a key to the session that already holds it; None: that session has ended."""
        session = held.session
        with session.mutex:
            if session.closed or self._holdings.of_token(held.record.token) is not held:
                return None
            try:
                session.catch_up(durations.end(MAX_BOUND))
                # A request to stop stays with the same holder.
                is_same = held.record.holder == attempt.holder
                turn, paused, fence, now, number, _ = self._ask_for(
                    session, "distlock_hand_over", attempt, keeps_stop=is_same
                )
            except NoAnswer as error:
                raise self._no_answer(attempt.key) from error
            except Error as error:
                if session.closed:
                    return None
                if is_busy(error):
                    return self._busy(attempt.name)
                raise self._refused(error, attempt.key) from error
            except BaseException:
                session.close()
                raise
            if fence is not None:
                self._holdings.drop(held)
                return self._granted(session, attempt, number, int(fence), instant(now))
            if "t" in (turn, paused):
                return held.record.contended(instant(now), paused=True)
            session.close()
            return None

    def _try(self, session: Session, attempt: Attempt) -> Grant | Contended:
        try:
            turn, paused, fence, now, number, _ = self._ask_for(
                session, "distlock_acquire", attempt
            )
            if fence is not None:
                return self._granted(session, attempt, number, int(fence), instant(now))
            if turn == "t":
                # The key was paused after the statement began.
                session.ask("distlock_release", number)
                return Contended(observed_at=instant(now), paused=True)
            mine = self._holdings.of_name(attempt.name)
            if mine is not None and not mine.is_cut_off():
                return mine.record.contended(instant(now), paused=paused == "t")
            return self._lost(session, attempt, paused=paused == "t")
        except NoAnswer as error:
            raise self._no_answer(attempt.key) from error
        except Error as error:
            if session.closed or not (is_busy(error) or is_overflow(error)):
                session.close()
                raise self._refused(error, attempt.key) from error
            # A failed statement does not unlock what it has locked.
            contended = self._undo(session, attempt)
            if is_overflow(error):
                raise self._refused(error, attempt.key) from error
            return contended

    def _ask_for(
        self, session: Session, statement: str, attempt: Attempt, *, keeps_stop: bool = False
    ) -> Row:
        row = session.ask(statement, attempt.name, attempt.key, session.durable, keeps_stop)
        if row[4] is None:
            raise self._connections.translated(no_secret(side_table("salt")), attempt.key)
        return row

    def _granted(
        self, session: Session, attempt: Attempt, number: object, fence: int, now: datetime
    ) -> Grant:
        at = granted_at(fence, now)
        record = replace(attempt.record(fence, at), expires_at=None, free_at=None)
        if not self._holdings.add(Holding(attempt.name, int(str(number)), session, record)):
            # Meanwhile another thread was granted another key with this token.
            session.close()
            raise InvalidArgument("This token already holds another key.", key=attempt.key)
        self._sessions.keep_lock(session)
        check_fence(attempt.key, fence)
        return attempt.grant(fence, at, None)

    def _undo(self, session: Session, attempt: Attempt) -> Contended:
        """Unlock what a failed attempt may have locked, and return who was in its way."""
        try:
            if session.ask("distlock_undo", attempt.name)[0] == "t":
                return Contended(busy=True)
            # The whole table was locked, so this attempt decided nothing.
            lost = self._lost(session, attempt)
        except (NoAnswer, Error):
            session.close()
            return Contended(busy=True)
        return replace(lost, busy=lost.fence is None)

    def _lost(self, session: Session, attempt: Attempt, *, paused: bool = False) -> Contended:
        now, *who = session.ask("distlock_lost", attempt.name)
        if who[0] is None:
            return Contended(observed_at=instant(now), paused=paused)
        record = self._record(attempt.name, who, instant(now))
        return record.contended(instant(now), paused=paused)

    def _extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        holding = self._holdings.of_token(grant.token, name)
        if holding is None:
            return None
        pong = ping(holding, durations.end(MAX_BOUND))
        if isinstance(pong, Error):
            raise self._refused(pong, grant.key) from pong
        return self._extended(holding, grant, ttl, pong)

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        # Each session is a connection of its own, so there cannot be one round trip for all.
        found = [self._holdings.of_token(grant.token, name) for name, grant in named]
        known = {holding for holding in found if holding is not None}
        pongs = ping_many(known, durations.end(MAX_BOUND))
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
                # Forgotten after it, so that after an interruption it is released once more.
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
            session.catch_up(durations.end(MAX_BOUND))
            return session.ask("distlock_release", holding.number)[0] == "t"
        except NoAnswer:
            # An earlier question may be unanswered, too. The key is free at the session's end.
            session.close()
            raise
        except Error:
            # If the session had ended, it held nothing; if not, closing it frees the key.
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
        """Open a session, and return the number of sessions that the server allows in total."""
        session = self._taken(None)
        if session is not None:
            self._sessions.put_back(session)
        most = (
            "SELECT current_setting('max_connections')::int"
            " - current_setting('superuser_reserved_connections')::int"
        )
        return int(self._connections.ask(lambda on: rows_of(on, most))[0][0])

    def _cleanup(self, before: datetime, limit: int) -> int:
        # Records do not outlive their locks. Besides notes, only rows of ended sessions are left.
        # Table names have their percent signs doubled, for statements with arguments.
        self._connections.ask(
            lambda on: rows_of(on, self._statements.forget_ended() % ()), busy=list
        )
        return self._remove_notes(before, limit)

    def _counts(self) -> Counts:
        # Held locks are in no table.
        return replace(count_rows(self, locks=False), held=super()._counts().held)

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        self._holdings.forget()
        self._sessions.leave_to_parent()

    # Trouble

    def _taken(self, key: str | None) -> Session | None:
        """Return a session that holds nothing; None: a lock in the server keeps it from opening."""
        try:
            return self._sessions.take()
        except AllInUse as error:
            number = self._sessions.limit
            raise BackendUnavailable(
                f"All {number} sessions of {self.using!r} {error} (max_connections of"
                f" DISTLOCK[{self.alias!r}]). Each lock uses a connection. Hold fewer locks at"
                " once, or raise max_connections and the server's limit.",
                key=key,
                code="rate_limited",
            ) from error
        except PoolerInBetween as error:
            raise LockUsageError(
                f"A connection pooler (such as PgBouncer) stands between {self.using!r} and its"
                " server. Session locks are not reliable through a pooler in any mode. Give"
                f" DISTLOCK[{self.alias!r}] a database alias that connects to PostgreSQL directly.",
                key=key,
                code="unsupported",
            ) from error
        except NoAnswer as error:
            raise self._no_answer(key) from error
        except Error as error:
            if is_busy(error):
                return None
            raise self._refused(error, key) from error
        except SynchronousOnlyOperation as error:
            raise self._connections.in_coroutine(key) from error

    def _no_answer(self, key: str | None) -> BackendUnavailable:
        return BackendUnavailable(
            f"The lock store {self.using!r} did not answer in time.",
            key=key,
            code="network_timeout",
        )

    def _refused(self, error: Error, key: str | None) -> LockError:
        return used_up(key) if is_overflow(error) else self._connections.translated(error, key)


def _prepared(tables: TableConnections) -> str:
    return Statements(*table_names(tables)).preparation()
