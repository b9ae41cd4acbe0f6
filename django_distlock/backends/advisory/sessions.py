"""The sessions of this process: one for each lock that it holds, and spare ones."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from django.db import connections

from ...core import durations
from ...core.clock import monotonic
from ...core.durations import MAX_BOUND
from ...core.threads import Bell, start_thread
from ...database import connections as settings
from ...database.connections import Gone, close_before_drop, when_gone
from .session import Session

#: Seconds between two looks for a free place, because a wake-up reaches only one waiter.
_LOOK_SECONDS = 0.05


class AllInUse(Exception):
    """There may be no more sessions; the text says what all of them do."""


class Place:
    """The right to use a session, while this object lives."""

    __slots__ = ("__weakref__",)


class _Idle:
    """Sessions that nobody uses right now. Each is closed when it has idled for a while.

    May be closed by a finaliser, so nothing here takes a lock.
    """

    def __init__(self) -> None:
        self._idle: deque[tuple[Session, float]] = deque()
        self._reaper: threading.Timer | None = None

    def keep(self, session: Session) -> None:
        """Take a session that is not needed any more."""
        self._idle.append((session, monotonic()))
        if self._reaper is None:
            self._start_reaper()

    def take(self) -> Session | None:
        """Give the one that was used last; None: there is none."""
        try:
            return self._idle.pop()[0]
        except IndexError:
            return None

    def _start_reaper(self) -> None:
        self._reaper = threading.Timer(settings.IDLE_SECONDS, self._reap)
        self._reaper.daemon = True
        try:
            start_thread(self._reaper)
        except RuntimeError:
            self._reaper = None  # The interpreter ends, and takes no new threads.

    def _reap(self) -> None:
        self._reaper = None
        before = monotonic() - settings.IDLE_SECONDS
        for _ in range(len(self._idle)):
            try:
                session, since = self._idle.popleft()
            except IndexError:
                break
            if since <= before:
                session.close()
            else:
                self._idle.append((session, since))
        if self._idle:
            self._start_reaper()


class Sessions:
    """The sessions of one alias in one process.

    Nothing is counted up and down, because a signal's exception may come between the two: a session
    is out for as long as its place lives, which ends with the session where nobody puts it back.

    Args:
        prepared: Gives the statements that prepare what each session is asked.
    """

    def __init__(self, alias: str, limit: int, prepared: Callable[[], str]):
        self.alias = alias
        self.limit = limit
        self._prepared = prepared
        self._open: list[Gone] = []
        self._begin()
        # At the end of the backend or the interpreter, nobody else releases the locks.
        weakref.finalize(self, _close_each, self._open)
        close_before_drop(self)

    def take(self) -> Session:
        """Return a session that holds nothing, for the caller's use until it is put back.

        Raises:
            AllInUse: Each one holds a lock, or was in use for a second.
            PoolerInBetween: The connection does not lead to the server itself.
            django.db.Error: No session can be opened.
        """
        until = durations.end(MAX_BOUND)
        while (place := self._place()) is None:
            if sum(each.holds for each in _living(self._open)) >= self.limit:
                raise AllInUse("hold locks")
            if (left := until - time.monotonic()) <= 0:
                raise AllInUse("were in use for a second")
            self._changed.wait(min(left, _LOOK_SECONDS))
        session = self._spare() or self._opened()
        session.place = place
        return session

    def put_back(self, session: Session) -> None:
        """Take a session back that holds nothing any more, or is closed."""
        session.holds = False
        # The place dies at the end of this call, even if it is interrupted.
        _place, session.place = session.place, None
        if not session.closed:
            self._idle.keep(session)

    def keep_lock(self, session: Session) -> None:
        """Note that a session holds a lock now, and will not be put back soon."""
        session.holds = True
        # If all sessions hold locks now, waiting for one is pointless.
        self._changed.ring()

    def close_all(self) -> None:
        """Close all sessions, which releases their locks."""
        for session in _living(self._open):
            free = session.mutex.acquire(timeout=MAX_BOUND)
            session.close()
            if free:
                session.mutex.release()

    def leave_to_parent(self) -> None:
        """Forget the copies in a fork."""
        for session in _living(self._open):
            session.leave()
        self._open.clear()
        self._begin()

    def _begin(self) -> None:
        self._mutex = threading.Lock()
        self._changed = Bell()
        self._idle = _Idle()
        self._places: list[weakref.ref[Place]] = []

    def _place(self) -> Place | None:
        """Return a place for one more session; None: the limit is reached."""
        self._changed.clear()
        with self._mutex:
            self._places = list(filter(_lives, self._places))
            if len(self._places) >= self.limit:
                return None
            place = Place()
            self._places.append(weakref.ref(place, self._changed.put))
            return place

    def _spare(self) -> Session | None:
        name = connections[self.alias].settings_dict["NAME"]
        while (session := self._idle.take()) is not None:
            # A test run renames its databases under the same alias.
            if session.database == name and not session.look():
                return session
            session.close()
        return None

    def _opened(self) -> Session:
        session = Session(connections[self.alias], self._prepared())
        with self._mutex:
            self._open[:] = filter(_is_open, self._open)
            # If nobody refers to it any more after an interruption, it may still hold a lock.
            self._open.append(when_gone(session, session.ended()))
        return session


def _lives(place: weakref.ref[Place]) -> bool:
    return place() is not None


def _is_open(gone: Gone) -> bool:
    session = gone()
    return session is not None and not session.closed


def _living(sessions: list[Gone]) -> list[Session]:
    return [each for gone in list(sessions) if (each := gone()) is not None and not each.closed]


def _close_each(sessions: list[Gone]) -> None:
    for session in _living(sessions):
        session.close()
