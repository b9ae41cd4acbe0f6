"""A session of a PostgreSQL server, which holds one advisory lock at most.

It uses `psycopg.pq`, which can wait for an answer with a time limit, ask several sessions at the
same time, and see without a query that the server has ended a session.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import ConnStatus, ExecStatus

from ...core import durations
from ...database.borrowing import Opening, cut, is_readable
from ...database.connections import (
    CONNECT_SECONDS,
    KEEPALIVES,
    bound_opening,
    keep_inherited,
    own_connection,
)

#: Seconds to wait for an answer to a statement that waits for nothing in the server.
ANSWER_SECONDS = 5.0

#: Milliseconds that a statement waits for another lock. Short, because a guard may keep a fence row
#: locked for a long transaction; other locks on the tables last for moments.
_LOCK_TIMEOUT = 20

Row = Sequence[str | None]


class NoAnswer(Exception):
    """The server has not answered in time."""


class PoolerInBetween(Exception):
    """The answer came from a pooler, and not from the server's session itself."""


class Session:
    """A connection of this package's own, outside any pool.

    Errors of the server are raised as Django's.

    Attributes:
        mutex: Held while the session is used, so that no two threads use it at once.
        pid: The server's id of the session.
        closed: Whether it has ended, as far as this process knows.
        awaits: Whether an answer is still to come. There is one query at a time.
        place: Its place among the sessions of the process while it is in use.

    Raises:
        PoolerInBetween: The connection does not lead to the server itself.
        django.db.Error: It cannot be opened.
    """

    def __init__(self, template: BaseDatabaseWrapper, prepared: str):
        self.mutex = threading.Lock()
        self.database = template.settings_dict["NAME"]
        self.holds = False
        self.closed = False
        self.awaits = False
        self.place: object = None
        self._process = os.getpid()
        self._wrapper = own_connection(template, **KEEPALIVES, connect_timeout=CONNECT_SECONDS)
        bound_opening(self._wrapper, template.settings_dict["OPTIONS"])
        with Opening(partial(cut, self._wrapper)):
            self._wrapper.ensure_connection()
        self._raw: psycopg.Connection[Any] = self._wrapper.connection
        self._pgconn = self._raw.pgconn
        self.pid = self._pgconn.backend_pid
        try:
            with self._errors():
                self._pgconn.send_query(self._preparation(prepared).encode())
                self.awaits = True
                until = durations.end(ANSWER_SECONDS)
                self._flush(until)
                first = self._receive(until)[0]
        except BaseException as error:
            self.close()
            if getattr(error.__cause__, "sqlstate", None) == "22012":
                raise PoolerInBetween from error
            raise
        #: The value of `synchronous_commit` that makes a commit of this session durable.
        self.durable = "remote_apply" if first[1] == "remote_apply" else "on"

    def ask(self, statement: str, *arguments: object) -> Row:
        """Run a prepared statement, and return its one row; `NoAnswer`: the session is closed."""
        try:
            self.send(statement, *arguments)
            return self.receive(durations.end(ANSWER_SECONDS))
        except NoAnswer:
            self.close()
            raise

    def send(self, statement: str, *arguments: object) -> None:
        """Begin to run a prepared statement."""
        with self._errors():
            values = [None if each is None else str(each).encode() for each in arguments]
            self._pgconn.send_query_prepared(statement.encode(), values)
            self.awaits = True
            self._flush(durations.end(ANSWER_SECONDS))

    def receive(self, until: float) -> Row:
        """Return the one row of the answer; `NoAnswer`: it has not come yet, see `catch_up`."""
        with self._errors():
            return self._receive(until)[0]

    def catch_up(self, until: float) -> None:
        """Discard a late answer; `NoAnswer`: it has not come yet."""
        if self.awaits:
            with self._errors():
                # The answer may have been read already, by a caller that was interrupted then.
                self._receive(until)

    def look(self) -> bool:
        """Return whether the server has ended the session, without sending or waiting."""
        with suppress(psycopg.Error):
            while not self.closed and is_readable(self._pgconn.socket):
                self._pgconn.consume_input()
            return self.closed
        self.close()
        return True

    def close(self) -> None:
        """End the session, and with it the lock that it holds."""
        self.closed = True
        self.place = None
        if self._process == os.getpid():
            with suppress(psycopg.Error):
                self._raw.close()

    def ended(self) -> Callable[[], None]:
        """Return a function that ends the session and does not refer to this object."""
        return self._raw.close

    def leave(self) -> None:
        """Forget the copy in a fork: closing it properly would end the parent's session."""
        self.closed = True
        keep_inherited(self._raw)

    def _preparation(self, prepared: str) -> str:
        options = {**KEEPALIVES, **self._wrapper.settings_dict["OPTIONS"]}
        values = {
            "application_name": "distlock",
            "default_transaction_isolation": "read committed",
            "lock_timeout": _LOCK_TIMEOUT,
            "idle_session_timeout": 0,
            # Fences follow the clock, so they keep growing even if a crash loses a commit.
            "synchronous_commit": "off",
            "plan_cache_mode": "force_generic_plan",
            # Statements name tables with their schema. Objects of others must not be found first.
            "search_path": "pg_catalog, pg_temp",
            "tcp_keepalives_idle": int(options["keepalives_idle"]),
            "tcp_keepalives_interval": int(options["keepalives_interval"]),
            "tcp_keepalives_count": int(options["keepalives_count"]),
            "tcp_user_timeout": int(options["tcp_user_timeout"]),
        }
        sets = ", ".join(
            f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in values.items()
        )
        return (
            # Behind a pooler, this fails before anything changes a session that others use.
            f"SELECT 1 / (pg_catalog.pg_backend_pid() = {self.pid})::int,"
            f" pg_catalog.current_setting('synchronous_commit');"
            f" SELECT {sets}; {prepared}"
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with self._wrapper.wrap_database_errors:
                yield
        finally:
            if not self.closed and self._pgconn.status != ConnStatus.OK:
                self.close()

    def _receive(self, until: float) -> list[Row]:
        """Return the first row of each result of the answer."""
        rows: list[Row] = []
        failed = None
        while (result := self._result(until)) is not None:
            if result.status == ExecStatus.TUPLES_OK:
                rows.append(_first_row(result))
            elif result.status == ExecStatus.FATAL_ERROR:
                failed = psycopg.errors.error_from_result(result)
        self.awaits = False
        if failed is not None:
            raise failed
        return rows

    def _result(self, until: float) -> Any:
        while self._pgconn.is_busy():
            if not is_readable(self._pgconn.socket, until - time.monotonic()):
                raise NoAnswer
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _flush(self, until: float) -> None:
        while self._pgconn.flush():
            if not is_readable(self._pgconn.socket, until - time.monotonic(), or_writable=True):
                raise NoAnswer
            # The server may not read on before its output is read.
            if is_readable(self._pgconn.socket):
                self._pgconn.consume_input()


def _first_row(result: Any) -> Row:
    values = (result.get_value(0, column) for column in range(result.nfields))
    return [None if each is None else each.decode() for each in values]
