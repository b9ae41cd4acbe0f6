"""The leases that a process holds by sessions of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeAlias

from django.db import Error

from ...core.records import UNKNOWN, Record, Unknown
from ...database.vendors.postgresql import is_busy
from .session import NoAnswer, Row, Session
from .sql import instant

#: What a session answers about its lease: the time, and since when the holder is asked to stop.
Pong: TypeAlias = tuple[datetime, datetime | None] | Unknown | Error | None


@dataclass(slots=True, eq=False)
class Holding:
    """A lease: its session, the number of its advisory lock, and what this process knows of it."""

    name: str
    number: int
    session: Session
    record: Record

    def is_cut_off(self) -> bool:
        """Whether the server has ended the session, as far as it has said so."""
        session = self.session
        # Whoever uses the session right now sees it too. Not acquired without waiting: a signal's
        # exception could come between that and its release.
        if session.closed or session.mutex.locked():
            return session.closed
        with session.mutex:
            return session.look()


class Holdings:
    """The leases of a process, by token and by storage key."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Hold nothing. In a forked child too: its parent's leases are held by its parent."""
        self._mutex = threading.Lock()
        self._by_token: dict[str, Holding] = {}
        self._by_name: dict[str, Holding] = {}

    def of_token(self, token: str, name: str | None = None) -> Holding | None:
        """Return what a token holds, if it is this key."""
        holding = self._by_token.get(token)
        return holding if holding is not None and name in (None, holding.name) else None

    def of_name(self, name: str) -> Holding | None:
        """Return the lease on a key, if this process has one."""
        return self._by_name.get(name)

    def of_session(self, name: str, pid: int) -> Holding | None:
        """Return the lease on a key if the server's session `pid` is one of ours."""
        holding = self._by_name.get(name)
        if holding is None or holding.session.closed or holding.session.pid != pid:
            return None
        return holding

    def add(self, holding: Holding) -> bool:
        """Take a lease in; False: its token holds another key."""
        with self._mutex:
            before = self._by_token.get(holding.record.token)
            if before is not None and before.name != holding.name and not before.session.closed:
                return False
            self._by_token[holding.record.token] = self._by_name[holding.name] = holding
            return True

    def drop(self, holding: Holding) -> None:
        """Forget a lease."""
        with self._mutex:
            if self._by_token.get(holding.record.token) is holding:
                del self._by_token[holding.record.token]
                if self._by_name.get(holding.name) is holding:
                    del self._by_name[holding.name]

    def change(self, holding: Holding, **facts: Any) -> Record:
        """Change what is known about a lease; return its record.

        A request to stop keeps its first time.
        """
        with self._mutex:
            if holding.record.stop_requested_at is not None:
                facts.pop("stop_requested_at", None)
            holding.record = replace(holding.record, **facts)
            return holding.record


def ping(holding: Holding, until: float) -> Pong:
    """Ask the session of a lease whether it still holds it: see `ping_many`.

    Called by the holder, in whose thread a signal may raise between any two steps. `with` unlocks
    the mutex even then. An acquire with a time limit may leave it locked, and the release of the
    lease would wait for it for ever. No other thread keeps it for longer than its own time limit.
    """
    with holding.session.mutex:
        return _hear(holding, until, sent=_send(holding))


def ping_many(holdings: Collection[Holding], until: float) -> dict[Holding, Pong]:
    """Ask the sessions of leases whether they still hold them: first all, then hear all.

    Called in the thread of a heartbeat, in which no handler of a signal runs.

    Args:
        until: When to stop waiting, by `time.monotonic`.

    Returns:
        For each, see `Pong`; None: it is gone; `UNKNOWN`: no answer yet; or an error.
    """
    pongs: dict[Holding, Pong] = dict.fromkeys(holdings, UNKNOWN)
    sent: dict[Holding, bool] = {}
    with ExitStack() as stack:
        # In one order, so that no two of these wait for each other.
        for each in sorted(holdings, key=lambda holding: holding.session.pid):
            if each.session.mutex.acquire(timeout=max(0.0, until - time.monotonic())):
                stack.callback(each.session.mutex.release)
                sent[each] = _send(each)
        for each in sent:
            pongs[each] = _hear(each, until, sent=sent[each])
    return pongs


def _send(holding: Holding) -> bool:
    """Send the question, unless an earlier one has no answer yet; return whether it was sent."""
    if holding.session.awaits:
        return False
    with suppress(Error, NoAnswer):
        holding.session.send("distlock_look", holding.number, holding.record.fence)
        return True
    return False


def _hear(holding: Holding, until: float, *, sent: bool) -> Pong:
    session = holding.session
    try:
        if not sent:
            # An earlier answer was late: it says nothing about now.
            session.catch_up(until)
            session.send("distlock_look", holding.number, holding.record.fence)
        now, holds, stop = _answer(holding, until)
    except NoAnswer:
        return UNKNOWN
    except Error as error:
        return None if session.closed else error
    if holds != "t":
        session.close()
        return None
    return instant(now), None if stop is None else instant(stop)


def _answer(holding: Holding, until: float) -> Row:
    session = holding.session
    try:
        return session.receive(until)
    except Error as error:
        if session.closed or not is_busy(error):
            raise
        # Somebody has the table locked, which is no reason to lose a lock that needs none.
        session.send("distlock_ping", holding.number)
        return session.receive(until)
