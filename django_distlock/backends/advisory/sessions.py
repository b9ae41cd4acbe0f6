"""The sessions of a process: as many as it holds locks, and spares for the next ones."""

from __future__ import annotations

import threading
import time
import weakref

from django.db import connections

from ...connections import IdleConnections, close_before_drop
from ...core.durations import MAX_BOUND
from .session import Session


class AllInUse(Exception):
    """There may be no more sessions.

    Args:
        all_hold: Whether each of them holds a lock.
    """

    def __init__(self, *, all_hold: bool):
        super().__init__()
        self.all_hold = all_hold


class Sessions:
    """The sessions of one alias in one process.

    Args:
        alias: The database.
        limit: How many there are at most.
        prepared: Statements that prepare what each session is asked.
    """

    def __init__(self, alias: str, limit: int, prepared: str):
        self.alias = alias
        self.limit = limit
        self._prepared = prepared
        self._open: set[Session] = set()
        self._begin()
        # With the backend, or the interpreter, nobody is left to give back what is held.
        weakref.finalize(self, _close_each, self._open)
        close_before_drop(self)

    def take(self) -> Session:
        """Give a session that holds nothing, and that nobody else uses until it is put back.

        Raises:
            AllInUse: Each holds a lock, or stayed in use for a second.
            PoolerInBetween: It does not go to the server.
            django.db.Error: It cannot be opened.
        """
        until = time.monotonic() + MAX_BOUND
        with self._changed:
            while self._opening + len(self._used()) >= self.limit:
                if sum(each.holds for each in self._used()) >= self.limit:
                    raise AllInUse(all_hold=True)
                if not self._changed.wait(until - time.monotonic()):
                    raise AllInUse(all_hold=False)
            self._opening += 1
        session = None
        try:
            session = self._spare() or self._opened()
        finally:
            with self._changed:
                self._opening -= 1
                if session is not None:
                    self._out.add(session)
                self._changed.notify()
        return session

    def put_back(self, session: Session) -> None:
        """Take a session back, which holds nothing any more or is closed."""
        session.holds = False
        session.heard.clear()
        with self._changed:
            self._out.discard(session)
            if not session.closed:
                self._idle.keep(session)
            self._changed.notify()

    def keep_lock(self, session: Session) -> None:
        """Note that a session was granted a lock: it stays away."""
        with self._changed:
            session.holds = True
            # Whoever waits for one may now do so in vain.
            self._changed.notify_all()

    def close_all(self) -> None:
        """Close all sessions, and free what they hold."""
        for session in list(self._open):
            free = session.mutex.acquire(timeout=MAX_BOUND)
            session.close()
            if free:
                session.mutex.release()

    def leave_to_parent(self) -> None:
        """Let go of what a fork copied."""
        for session in list(self._open):
            session.leave()
        self._open.clear()
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._idle: IdleConnections[Session] = IdleConnections(Session.close)
        self._out: set[Session] = set()
        self._opening = 0

    def _used(self) -> set[Session]:
        self._out = {each for each in self._out if not each.closed}
        return self._out

    def _spare(self) -> Session | None:
        name = connections[self.alias].settings_dict["NAME"]
        while (session := self._idle.take()) is not None:
            # A test run renames its databases under the same alias.
            if session.database == name and not session.look():
                session.heard.clear()
                return session
            session.close()
        return None

    def _opened(self) -> Session:
        session = Session(connections[self.alias], self._prepared)
        with self._changed:
            self._open -= {each for each in self._open if each.closed}
            self._open.add(session)
        return session


def _close_each(sessions: set[Session]) -> None:
    for session in sessions:
        session.close()
