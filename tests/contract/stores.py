"""What a test can do to a store behind the backend's back."""

# ruff: noqa: D102 - the base classes describe the methods

from __future__ import annotations

import gc
import re
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import psycopg
from django.db import Error, connections

from django_distlock import conf
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.keys import normalize_key
from django_distlock.database.borrowing import LockConnections
from django_distlock.database.connections import _every
from django_distlock.database.sql import number
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.salted import SALT

#: Lets seconds pass for the keys of a test, without waiting.
Elapse = Callable[[float], None]


class Clock:
    """A monotonic clock that can be put forward."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset


class Store(ABC):
    """The records and counters behind a backend.

    Args:
        registered: The backend.
        mark: What every key of the test contains.
    """

    backend: BaseLockBackend

    def __init__(self, registered: Registered, mark: str):
        self.registered = registered
        self.mark = mark

    @abstractmethod
    def elapse(self, seconds: float) -> None:
        """Let seconds pass for the records of this test."""

    @abstractmethod
    def now(self) -> datetime:
        """Read the store's clock."""

    @abstractmethod
    def fence(self, key: str) -> int:
        """Read a fence counter; 0: there is none."""

    @abstractmethod
    def set_fence(self, key: str, fence: int) -> None:
        """Raise a fence counter, or make it."""

    @abstractmethod
    def has_record(self, key: str) -> bool:
        """Say whether the store keeps a record of the key, live or expired."""

    @abstractmethod
    def with_prefix(self, prefix: str) -> BaseLockBackend:
        """Make a backend on the same store with another key prefix."""

    @abstractmethod
    def stranger(self) -> Stranger:
        """Connect another client."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing behind."""

    def name(self, key: str) -> str:
        """Return what the store calls a key."""
        return self.backend._name(normalize_key(key))


class MemoryStore(Store):
    """The dictionaries of a memory backend that only one test uses."""

    def __init__(self, registered: Registered, mark: str):
        super().__init__(registered, mark)
        self.clock = Clock()
        self.memory = MemoryBackend(conf.backend_config(registered.alias), clock=self.clock)
        self.backend = self.memory

    def elapse(self, seconds: float) -> None:
        self.clock.offset += seconds

    def now(self) -> datetime:
        return self.memory._now()

    def fence(self, key: str) -> int:
        return self.memory._fences.get(self.name(key), 0)

    def set_fence(self, key: str, fence: int) -> None:
        self.memory._fences[self.name(key)] = fence

    def has_record(self, key: str) -> bool:
        return self.name(key) in self.memory._shelf.records

    def with_prefix(self, prefix: str) -> BaseLockBackend:
        return MemoryBackend(replace(self.memory.config, key_prefix=prefix), clock=self.clock)

    def close(self) -> None:
        self.memory = self.backend = MemoryBackend(self.memory.config)

    def stranger(self) -> Stranger:
        raise NotImplementedError("Tests with a stranger are marked with the stores that have one.")


class DatabaseStore(Store):
    """The tables of a database that all tests of this process share."""

    def __init__(self, registered: Registered, mark: str):
        super().__init__(registered, mark)
        backend = lock_backends[registered.alias]
        assert isinstance(backend, DatabaseBackend)
        self.backend = self.database = backend
        self.locks, self.fences = conf.table("locks"), conf.table("fences")
        self._strangers: list[Stranger] = []

    @property
    def key_column(self) -> str:
        """Return the name of the column that MySQL has a keyword for."""
        return connections[self.registered.using].ops.quote_name("key")

    def elapse(self, seconds: float) -> None:
        find = "strpos" if self.registered.store == "postgresql" else "instr"
        where = f"{find}({self.key_column}, %s) > 0"
        past = int(seconds * 1_000_000)
        self.ask(
            f"UPDATE {self.locks} SET acquired_at = acquired_at - %s,"
            " renewed_at = renewed_at - %s, expires_at = expires_at - %s, free_at = free_at - %s,"
            f" renewed_until = renewed_until - %s WHERE {where}",
            [past, past, past, past, past, self.mark],
        )
        self.ask(
            f"UPDATE {self.fences} SET paused_until = paused_until - %s,"
            f" closed_until = closed_until - %s WHERE {where}",
            [past, past, self.mark],
        )

    def now(self) -> datetime:
        if self.registered.store == "sqlite":
            return datetime.now(UTC)
        if self.registered.store == "mysql":
            naive: datetime = self.ask("SELECT UTC_TIMESTAMP(6)")[0][0]
            return naive.replace(tzinfo=UTC)
        return cast(datetime, self.ask("SELECT clock_timestamp()")[0][0])

    def fence(self, key: str) -> int:
        found = self.ask(
            f"SELECT fence FROM {self.fences} WHERE storage_key = %s", [self.name(key)]
        )
        return int(found[0][0]) if found else 0

    def set_fence(self, key: str, fence: int) -> None:
        or_raise = (
            "ON DUPLICATE KEY UPDATE fence = VALUES(fence)"
            if self.registered.store == "mysql"
            else "ON CONFLICT (storage_key) DO UPDATE SET fence = excluded.fence"
        )
        self.ask(
            f"INSERT INTO {self.fences} (storage_key, {self.key_column}, fence)"
            f" VALUES (%s, %s, %s) {or_raise}",
            [self.name(key), key, fence],
        )

    def has_record(self, key: str) -> bool:
        return bool(
            self.ask(f"SELECT 1 FROM {self.locks} WHERE storage_key = %s", [self.name(key)])
        )

    def with_prefix(self, prefix: str) -> BaseLockBackend:
        return self.variant(key_prefix=prefix)

    def variant(self, using: str | None = None, **config: Any) -> DatabaseBackend:
        """Make a backend on the same tables, or on another database, with other settings."""
        changed = replace(self.database.config, **config)
        options = {**changed.options, **({"using": using} if using else {})}
        return DatabaseBackend(changed, **options)

    def sessions(self) -> list[int]:
        """Return the server's numbers for the sessions that this process asks for locks in."""
        function = "pg_backend_pid" if self.registered.store == "postgresql" else "connection_id"
        return [int(rows[0][0]) for rows in self.ask_everywhere(f"SELECT {function}()")]

    def ask_everywhere(self, statement: str) -> list[list[Any]]:
        """Ask in this thread's session, and in each of the package's own."""
        # Sessions idle for threads of earlier tests, and would be closed behind this.
        gc.collect()
        for pool in self._pools():
            pool.look()
        # What needs a transaction has a session of its own, which this opens.
        lock_backends[self.registered.alias].clock()
        answers = [self.ask(statement)]
        for own in [own for pool in self._pools() for own in pool._every]:
            # One whose session has ended is used by nobody.
            with suppress(Error), own.connection.cursor() as cursor:
                cursor.execute(statement)
                answers.append(list(cursor.fetchall()) if cursor.description else [])
        return answers

    def _pools(self) -> list[LockConnections]:
        pools = [each for each in list(_every) if isinstance(each, LockConnections)]
        return [pool for pool in pools if pool.alias == self.registered.using]

    def stranger(self) -> Stranger:
        kinds: dict[str, Callable[[DatabaseStore], Stranger]] = {
            "postgresql": Postgres,
            "mysql": MariaDB,
            "sqlite": SQLite,
        }
        made = kinds[self.registered.store](self)
        self._strangers.append(made)
        return made

    def close(self) -> None:
        for each in self._strangers:
            each.close()

    def ask(self, statement: str, arguments: list[Any] | None = None) -> list[Any]:
        """Run a statement on this thread's connection."""
        with connections[self.registered.using].cursor() as cursor:
            cursor.execute(statement, arguments or [])
            return list(cursor.fetchall()) if cursor.description else []


class Stranger(ABC):
    """Another client of the store, in a transaction that lasts until `commit` or `rollback`."""

    def __init__(self, store: DatabaseStore):
        self.store = store

    @abstractmethod
    def execute(self, statement: str, *arguments: Any) -> list[Any]:
        """Run a statement with `%s` placeholders inside the transaction."""

    @abstractmethod
    def hold(self, key: str) -> None:
        """Lock the key's record against every change."""

    @abstractmethod
    def queue(self, key: str) -> None:
        """Stand where those wait who found the key free."""

    @abstractmethod
    def guard(self, key: str) -> None:
        """Lock the key's fence as the guard of a lease does."""

    @abstractmethod
    def hold_table(self, *, from_readers: bool = False) -> None:
        """Lock the table of records against every change; it can be read.

        Args:
            from_readers: It cannot, nor can that of the fences.
        """

    @abstractmethod
    def wait_until_blocked(self, clients: int = 1, patience: float = 20) -> None:
        """Return when this many clients wait for this transaction, or for those who do."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo the transaction."""

    @abstractmethod
    def close(self) -> None:
        """Undo the transaction and leave."""

    def extend(self, key: str, seconds: float) -> None:
        """Let the record of a key end in so many seconds, as an extend does."""
        free_at = self.store.now() + timedelta(seconds=seconds + 1)
        microseconds = int(free_at.timestamp() * 1_000_000)
        self.execute(
            f"UPDATE {self.store.locks} SET expires_at = %s, free_at = %s WHERE storage_key = %s",
            microseconds - 1_000_000,
            microseconds,
            self.store.name(key),
        )

    def give_to(self, key: str, token: str) -> None:
        """Let another token hold a key, as a takeover does."""
        self.execute(
            f"UPDATE {self.store.locks} SET token = %s, fence = fence + 1 WHERE storage_key = %s",
            token,
            self.store.name(key),
        )


class Session(Stranger):
    """A session of a server, which knows of the others that it has."""

    #: What the server calls a lock that others may share.
    share = "FOR SHARE"

    def hold(self, key: str) -> None:
        self._lock(self.store.locks, key, "FOR UPDATE")

    def guard(self, key: str) -> None:
        self._lock(self.store.fences, key, self.share)

    def _lock(self, table: str, key: str, how: str) -> None:
        find = f"SELECT 1 FROM {table} WHERE storage_key = %s {how}"
        assert self.execute(find, self.store.name(key)), f"no row of {key!r} to lock"

    def wait_until_blocked(self, clients: int = 1, patience: float = 20) -> None:
        give_up = time.monotonic() + patience
        while len(self.blocked()) < clients and time.monotonic() < give_up:
            time.sleep(0.01)

    @abstractmethod
    def blocked(self) -> list[int]:
        """Return the sessions on this database that wait for another one."""

    @abstractmethod
    def cut(self, session: int) -> None:
        """End a session."""

    @abstractmethod
    def cancel(self, session: int) -> None:
        """End the statement that a session runs."""


class Postgres(Session):
    """A session of PostgreSQL."""

    def __init__(self, store: DatabaseStore):
        super().__init__(store)
        self._raw = psycopg.connect(**_address(store.registered.using))
        self._watch = psycopg.connect(**_address(store.registered.using), autocommit=True)

    def execute(self, statement: str, *arguments: Any) -> list[Any]:
        cursor = self._raw.execute(statement, arguments or None)
        return cursor.fetchall() if cursor.description else []

    def hold_table(self, *, from_readers: bool = False) -> None:
        if from_readers:
            both = f"{self.store.locks}, {self.store.fences}"
            self.execute(f"LOCK TABLE {both} IN ACCESS EXCLUSIVE MODE")
        else:
            self.execute(f"LOCK TABLE {self.store.locks} IN EXCLUSIVE MODE")

    def queue(self, key: str) -> None:
        turn = f"SELECT pg_advisory_xact_lock({number('turn', '%s')}) FROM {SALT} s"
        self.execute(turn, self.store.name(key))

    def blocked(self) -> list[int]:
        # Those behind others that wait count too.
        found = self._watch.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0"
        )
        return [session for (session,) in found]

    def cut(self, session: int) -> None:
        self._watch.execute("SELECT pg_terminate_backend(%s, 5000)", [session])

    def cancel(self, session: int) -> None:
        self._watch.execute("SELECT pg_cancel_backend(%s)", [session])

    def commit(self) -> None:
        self._raw.commit()

    def rollback(self) -> None:
        self._raw.rollback()

    def close(self) -> None:
        self._raw.close()
        self._watch.close()


_WAITING = re.compile(r"^LOCK WAIT .*\n.* thread id (\d+),", re.MULTILINE)
_WAITING_ON_MYSQL = (
    "SELECT t.processlist_id FROM performance_schema.data_lock_waits w"
    " JOIN performance_schema.threads t ON t.thread_id = w.requesting_thread_id"
)


class MariaDB(Session):
    """A session of MariaDB or MySQL, and one that locks tables: that would end a transaction."""

    share = "LOCK IN SHARE MODE"

    def __init__(self, store: DatabaseStore):
        super().__init__(store)
        connection = connections[store.registered.using]
        self._raw, self._tables, self._watch = (
            connection.get_new_connection(connection.get_connection_params()) for _ in range(3)
        )
        for raw in (self._tables, self._watch):
            raw.autocommit(True)

    def execute(self, statement: str, *arguments: Any) -> list[Any]:
        return _rows(self._raw, statement, *arguments)

    def queue(self, key: str) -> None:
        # There are no advisory locks: the acquirers of a key take turns on its fence.
        name = self.store.name(key)
        _rows(
            self._watch,
            f"INSERT IGNORE INTO {self.store.fences} (storage_key, `key`, fence)"
            " VALUES (%s, %s, 0)",
            name,
            key,
        )
        self.execute(f"SELECT 1 FROM {self.store.fences} WHERE storage_key = %s FOR UPDATE", name)

    def hold_table(self, *, from_readers: bool = False) -> None:
        locks, fences = self.store.locks, self.store.fences
        what = f"{locks} WRITE, {fences} WRITE" if from_readers else f"{locks} READ"
        _rows(self._tables, f"LOCK TABLES {what}")

    def blocked(self) -> list[int]:
        ours = _rows(
            self._watch,
            "SELECT id, state FROM information_schema.processlist WHERE db = DATABASE()",
        )
        # Not from `innodb_trx`, which shows nothing new to those who ask ten times a second.
        if connections[self.store.registered.using].mysql_is_mariadb:  # type: ignore[attr-defined]
            ((_, _, status),) = _rows(self._watch, "SHOW ENGINE INNODB STATUS")
            waiting = {int(session) for session in _WAITING.findall(status)}
        else:
            # Whose status leaves out what only shares a row.
            waiting = {session for (session,) in _rows(self._watch, _WAITING_ON_MYSQL)}
        return [
            session
            for session, state in ours
            if session in waiting or (state or "").startswith("Waiting for table")
        ]

    def cut(self, session: int) -> None:
        _rows(self._watch, f"KILL CONNECTION {session}")

    def cancel(self, session: int) -> None:
        _rows(self._watch, f"KILL QUERY {session}")

    def commit(self) -> None:
        self._raw.commit()
        _rows(self._tables, "UNLOCK TABLES")

    def rollback(self) -> None:
        self._raw.rollback()
        _rows(self._tables, "UNLOCK TABLES")

    def close(self) -> None:
        for raw in (self._raw, self._tables, self._watch):
            raw.close()


def _rows(raw: Any, statement: str, *arguments: Any) -> list[Any]:
    """Run a statement on a connection of MySQL's drivers."""
    with raw.cursor() as cursor:
        cursor.execute(statement, arguments or None)
        return list(cursor.fetchall()) if cursor.description else []


class SQLite(Stranger):
    """A connection to the file. Its transaction holds the only right to write there is."""

    def __init__(self, store: DatabaseStore):
        super().__init__(store)
        self._raw = sqlite3.connect(
            connections[store.registered.using].settings_dict["NAME"],
            isolation_level=None,
            check_same_thread=False,
            timeout=5,
        )

    def execute(self, statement: str, *arguments: Any) -> list[Any]:
        self.hold_table()
        return self._raw.execute(statement.replace("%s", "?"), arguments).fetchall()

    def hold(self, key: str = "", *, from_readers: bool = False) -> None:
        if not self._raw.in_transaction:
            self._raw.execute("BEGIN IMMEDIATE")

    hold_table = queue = guard = hold

    def wait_until_blocked(self, clients: int = 1, patience: float = 20) -> None:
        # Nobody can ask SQLite who waits. What tests do while waiting comes after a first read.
        time.sleep(0.1)

    def commit(self) -> None:
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        self._raw.execute("ROLLBACK")

    def close(self) -> None:
        self._raw.close()


def _address(using: str) -> dict[str, Any]:
    given = connections[using].settings_dict
    named = {
        "dbname": given["NAME"],
        "user": given["USER"],
        "password": given["PASSWORD"],
        "host": given["HOST"],
        "port": given["PORT"],
    }
    return {name: value for name, value in named.items() if value} | {
        name: value for name, value in given["OPTIONS"].items() if name in ("host", "sslmode")
    }
