"""The leases that this process holds by its sessions."""

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

#: The answer about a lease: the server's time, and when a stop was requested.
Pong: TypeAlias = tuple[datetime, datetime | None] | Unknown | Error | None


@dataclass(slots=True, eq=False)
class Holding:
    """A lease: its session, the number of its advisory lock, and its record."""

    name: str
    number: int
    session: Session
    record: Record

    def is_cut_off(self) -> bool:
        """Whether the server has ended the session and said so."""
        session = self.session
        # If another thread uses the session, that one will see it. The mutex is only looked at,
        # because a signal's exception could come between acquiring and releasing it.
        if session.closed or session.mutex.locked():
            return session.closed
        with session.mutex:
            return session.look()


class Holdings:
    """The leases of a process, by token and by storage key."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty. Also called in a forked child, because the leases are the parent's."""
        self._mutex = threading.Lock()
        self._by_token: dict[str, Holding] = {}
        self._by_name: dict[str, Holding] = {}

    def of_token(self, token: str, name: str | None = None) -> Holding | None:
        """Return the lease of a token, if it is on this key (None: any)."""
        holding = self._by_token.get(token)
        return holding if holding is not None and name in (None, holding.name) else None

    def of_name(self, name: str) -> Holding | None:
        """Return the lease on a key, if this process holds one."""
        return self._by_name.get(name)

    def of_session(self, name: str, pid: int) -> Holding | None:
        """Return the lease on a key if the session `pid` of the server is this process's."""
        holding = self._by_name.get(name)
        if holding is None or holding.session.closed or holding.session.pid != pid:
            return None
        return holding

    def add(self, holding: Holding) -> bool:
        """Add a lease; False: its token holds another key."""
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
        """Change the record of a lease, and return it; a request to stop keeps its first time."""
        with self._mutex:
            if holding.record.stop_requested_at is not None:
                facts.pop("stop_requested_at", None)
            holding.record = replace(holding.record, **facts)
            return holding.record


def ping(holding: Holding, until: float) -> Pong:
    """Ask the session of a lease whether it still holds it: see `ping_many`.

    This runs in the holder's thread, where a signal's handler may raise between any two steps.
    `with` unlocks the mutex even then; `acquire(timeout=…)` could leave it locked, and a release
    would block for ever. Other threads keep the mutex no longer than their own time limits.
    """
    with holding.session.mutex:
        return _hear(holding, until, sent=_send(holding))


def ping_many(holdings: Collection[Holding], until: float) -> dict[Holding, Pong]:
    """Ask the sessions of leases whether they still hold them: send all, then receive all.

    This runs in the heartbeat's thread, where no signal's handler runs.

    Args:
        until: When to stop waiting, by `time.monotonic`.

    Returns:
        The answer for each; None: the lease is gone; `UNKNOWN`: no answer yet; or an error.
    """
    pongs: dict[Holding, Pong] = dict.fromkeys(holdings, UNKNOWN)
    sent: dict[Holding, bool] = {}
    with ExitStack() as stack:
        # All callers use the same order, so that they never deadlock.
        for each in sorted(holdings, key=lambda holding: holding.session.pid):
            if each.session.mutex.acquire(timeout=max(0.0, until - time.monotonic())):
                stack.callback(each.session.mutex.release)
                sent[each] = _send(each)
        for each in sent:
            pongs[each] = _hear(each, until, sent=sent[each])
    return pongs


def _send(holding: Holding) -> bool:
    """Send the request unless an earlier one has no answer yet; return whether it was sent."""
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
            # The late answer to an earlier request says nothing about now.
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
        # The table is locked. The lock itself does not need it, so it is not lost.
        session.send("distlock_ping", holding.number)
        return session.receive(until)
