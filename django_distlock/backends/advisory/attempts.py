"""How the advisory backend asks for a key: one statement, on a session that holds nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from django.core.exceptions import SynchronousOnlyOperation
from django.db import Error

from ...core import budgets
from ...core.durations import MAX_BOUND
from ...core.errors import BackendUnavailable, InvalidArgument, LockError, LockUsageError
from ...core.fences import FENCE_MAX, check_fence
from ...core.records import Attempt, Contended, Grant
from ...database.sql import side_table
from ...database.vendors.postgresql import is_busy, is_overflow, no_secret
from .holdings import Holding
from .session import NoAnswer, PoolerInBetween, Row, Session
from .sessions import AllInUse, Sessions
from .sql import Seen, granted_at, instant
from .views import SessionViews


class SessionAttempts(SessionViews):
    """Attempts of the advisory backend, and the sessions that they run on."""

    alias: str
    _sessions: Sessions

    def _attempt(self, attempt: Attempt) -> Grant | Contended:
        """Try once on a session that holds nothing."""
        session = self._taken(attempt.key)
        if session is None:
            # Nothing can be prepared while the table is locked, but who holds the key is told.
            busy = self._busy(attempt.name)
            return replace(busy, busy=busy.fence is None)
        try:
            with session.mutex:
                answer = self._try(session, attempt)
        except LockError:
            self._sessions.put_back(session)
            raise
        except BaseException:
            # Interrupted, it may hold the lock.
            session.close()
            raise
        if not session.holds:
            self._sessions.put_back(session)
        return answer

    def _hand_over(self, held: Holding, attempt: Attempt) -> Grant | Contended | None:
        """Grant a key with the session that holds it; None: that one is gone."""
        session = held.session
        with session.mutex:
            if session.closed or self._holdings.of_token(held.record.token) is not held:
                return None
            try:
                session.catch_up(budgets.end(MAX_BOUND))
                # The same holder is still to stop.
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
                # Paused since the statement began.
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
            # What was locked stays locked, though the statement failed.
            contended = self._undo(session, attempt)
            if is_overflow(error):
                raise self._refused(error, attempt.key) from error
            return contended

    def _ask_for(
        self, session: Session, statement: str, attempt: Attempt, *, keeps_stop: bool = False
    ) -> Row:
        row = session.ask(statement, attempt.name, attempt.key, session.durable, keeps_stop)
        if row[4] is None:
            raise self._translated(no_secret(side_table("salt")), attempt.key)
        return row

    def _granted(
        self, session: Session, attempt: Attempt, number: object, fence: int, now: datetime
    ) -> Grant:
        at = granted_at(fence, now)
        record = replace(attempt.record(fence, at), expires_at=None, free_at=None)
        if not self._holdings.add(Holding(attempt.name, int(str(number)), session, record)):
            # Another thread was granted another key for this token meanwhile.
            session.close()
            raise second_key(attempt.key)
        self._sessions.keep_lock(session)
        check_fence(attempt.key, fence)
        return attempt.grant(fence, at, None)

    def _undo(self, session: Session, attempt: Attempt) -> Contended:
        """Give back what a failed attempt may have locked, and say who was in its way."""
        try:
            if session.ask("distlock_undo", attempt.name)[0] == "t":
                return Contended(busy=True)
            # The whole table was locked: this attempt never had its turn.
            lost = self._lost(session, attempt)
        except (NoAnswer, Error):
            session.close()
            return Contended(busy=True)
        return replace(lost, busy=lost.fence is None)

    def _lost(self, session: Session, attempt: Attempt, *, paused: bool = False) -> Contended:
        now, *who = session.ask("distlock_lost", attempt.name)
        if who[0] is None:
            return Contended(observed_at=instant(now), paused=paused)
        record = self._record(attempt.name, Seen.read(who), instant(now))
        return record.contended(instant(now), paused=paused)

    # Trouble

    def _taken(self, key: str | None) -> Session | None:
        """Return a session that holds nothing; None: somebody's lock keeps it from being opened."""
        try:
            return self._sessions.take()
        except AllInUse as error:
            number = self._sessions.limit
            what = "hold locks" if error.all_hold else "were in use for a second"
            raise BackendUnavailable(
                f"All {number} sessions of {self.using!r} {what} (max_connections of"
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
            raise self._in_coroutine(key) from error

    def _no_answer(self, key: str | None) -> BackendUnavailable:
        return BackendUnavailable(
            f"The lock store {self.using!r} did not answer in time.",
            key=key,
            code="network_timeout",
        )

    def _refused(self, error: Error, key: str | None) -> LockError:
        if is_overflow(error):
            return LockError(f"The key {key!r} has used all its fences ({FENCE_MAX}).", key=key)
        return self._translated(error, key)


def second_key(key: str) -> InvalidArgument:
    """Return why a token that holds a key is not granted another one."""
    return InvalidArgument("This token already holds another key.", key=key)
