"""Wake-ups on PostgreSQL: a connection that only listens."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from django.db import connections
from psycopg import sql

from ..database.borrowing import is_readable
from ..database.connections import CONNECT_SECONDS, KEEPALIVES, own_connection
from ..database.sql import channel, word
from ..database.vendors.postgresql import no_secret
from .listening import NoWakeUps
from .queues import Queues

#: Seconds to wait for an answer to a statement that waits for nothing in the server.
ANSWER_SECONDS = 5.0

#: The application name of the session, unless the project sets one.
_SHOWN = "distlock wake-ups"


class NotifyLine:
    """A session that listens, on a connection of its own outside any pool.

    Args:
        using: The alias of the database, on a primary server.
        salt: Returns the table of the secret, quoted and with its schema.
        backend: The alias of the lock backend, for messages.
        queues: The waiters, which are given the names that wake-ups use for their keys.

    Raises:
        NoWakeUps: A pooler stands in between, or the server is a standby.
        django.db.Error, psycopg.Error: It cannot be opened.
    """

    def __init__(self, using: str, salt: Callable[[], str], backend: str, queues: Queues):
        self._owner = threading.get_ident()
        self._raw = _opened(using)
        self._pgconn = self._raw.pgconn
        # A duplicate, because the connection may be closed while another thread waits for it.
        self._wire = socket.fromfd(self._pgconn.socket, socket.AF_INET, socket.SOCK_STREAM)
        try:
            heard_as = self._subscribe(salt(), f"DISTLOCK[{backend!r}]: {using!r}")
            queues.call_by(lambda name: _called(heard_as, name))
        except BaseException:
            self.close()
            raise

    def hear(self, seconds: float) -> list[str]:
        """See `Line`."""
        if not self._readable(seconds):
            self._ping()
        self._pgconn.consume_input()
        heard = []
        while (notice := self._pgconn.notifies()) is not None:
            heard.append(notice.extra.decode())
        return heard

    def close(self) -> None:
        """See `Line`."""
        if threading.get_ident() == self._owner:
            self._wire.close()
            with suppress(Exception):
                self._raw.close()
        else:
            with suppress(OSError):
                self._wire.shutdown(socket.SHUT_RDWR)

    def _subscribe(self, salt: str, where: str) -> str:
        """Listen; return the secret that names are hashed with."""
        remedy = "Set OPTIONS['listen_using'] to an alias that connects to the primary directly."
        # First, because behind a pooler the session may be that of others.
        row = self._raw.execute("SELECT pg_backend_pid(), pg_is_in_recovery()").fetchone()
        if row is None or row[0] != self._raw.info.backend_pid:
            raise NoWakeUps(
                f"{where} connects through a pooler, which does not forward wake-ups. {remedy}"
            )
        if row[1]:
            raise NoWakeUps(f"{where} is a standby, which has no wake-ups. {remedy}")
        # The session is idle for as long as no wake-up comes.
        stays = "pg_catalog.set_config('idle_session_timeout', '0', false)"
        asked = f"SELECT {channel()}, {word()}, {stays} FROM {salt} s"  # noqa: S608
        found = self._raw.execute(asked).fetchone()
        if found is None:
            raise no_secret(salt)
        self._raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(found[0])))
        return str(found[1])

    def _ping(self) -> None:
        until = time.monotonic() + ANSWER_SECONDS
        self._pgconn.send_query(b"SELECT 1")
        self._pgconn.flush()
        result: object = self
        while result is not None:
            while self._pgconn.is_busy():
                if not self._readable(until - time.monotonic()):
                    raise TimeoutError(f"the server has not answered for {ANSWER_SECONDS:g} s")
                self._pgconn.consume_input()
            result = self._pgconn.get_result()

    def _readable(self, seconds: float) -> bool:
        return is_readable(self._pgconn.socket, seconds)


def _called(word: str, name: str) -> str:
    """Return the payload of a wake-up for a storage key, as `sql.called` does in the server."""
    return hashlib.sha256(f"{word}{name}".encode()).hexdigest()[:32]


def _opened(using: str) -> psycopg.Connection[Any]:
    wrapper = own_connection(
        connections[using],
        **KEEPALIVES,
        connect_timeout=CONNECT_SECONDS,
        fallback_application_name=_SHOWN,
    )
    try:
        wrapper.ensure_connection()
    except BaseException:
        # A receiver of `connection_created` may have failed after the connection was opened.
        if wrapper.connection is not None:
            wrapper.connection.close()
        raise
    opened: psycopg.Connection[Any] = wrapper.connection
    return opened
