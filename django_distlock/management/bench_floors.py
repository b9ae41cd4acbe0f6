"""The least that a pair can cost on a store: one durable write and one trivial round trip.

Both go by the driver and the settings of the locks' own alias. What is written is the bench's own:
its fence counters, which may rise, or values in Redis that vanish. No table is made.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.db.utils import DatabaseError, InterfaceError

from .. import vendors
from ..backends.base import BaseLockBackend
from ..backends.tables import FenceTable
from ..connections import own_connection
from ..core.errors import BackendUnavailable, LockError
from ..models import FenceCounter
from .targets import is_redis

#: Milliseconds that a value in Redis is kept.
_KEPT = "60000"
#: Seconds that the floor waits for SQLite's one writer, with others that write as fast as they can.
_WRITER_SECONDS = 15

#: What stands for a lock in memory.
_mutexes: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


class Floor(ABC):
    """What a store is asked without any lock, by one thread.

    Attributes:
        store: What keeps the locks, for people.
        what: What the floor is, for people.
    """

    store: str
    what: str

    @abstractmethod
    def write(self) -> None:
        """Write durably, as an acquire has to.

        Raises:
            LockError: The store did not answer, or refused.
        """

    @abstractmethod
    def trip(self) -> None:
        """Go to the store and back, as a release has to.

        Raises:
            LockError: The store did not answer, or refused.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Close what was opened for it."""


class TableFloor(Floor):
    """An update of a fence counter, over a connection of its own.

    Args:
        using: The database of the locks.
        name: The storage key of a counter that is there.
    """

    what = "an update of one row by its key, and SELECT 1, by Django's cursor"

    def __init__(self, using: str, name: str):
        self._name = name
        self._using = using
        template = connections[using]
        # Commits by itself, whatever the alias says.
        self._connection = own_connection(template)
        with self._translated():
            if template.vendor == "sqlite":
                self._run(f"PRAGMA busy_timeout = {_WRITER_SECONDS * 1000}")
            version = ".".join(map(str, self._connection.get_database_version()))
            self._update = self._statement()
        self.store = f"{template.display_name} {version}"
        self._select = f"SELECT 1{self._connection.features.bare_select_suffix}"

    def write(self) -> None:
        """See `Floor`: higher each time, or a store would see that there is nothing to write."""
        with self._translated():
            changed = self._run(self._update, [self._name])
        if changed != 1:
            raise LockError(f"{self._name!r} has no fence counter in {self._using!r}.")

    def trip(self) -> None:
        """See `Floor`."""
        with self._translated():
            self._run(self._select)

    def close(self) -> None:
        """See `Floor`."""
        self._connection.close()

    def _statement(self) -> str:
        quoted, fields = self._connection.ops.quote_name, FenceCounter._meta
        columns: list[Any] = [fields.get_field(name) for name in ("fence", "storage_key")]
        table = quoted(fields.db_table)
        fence, key = (quoted(each.column) for each in columns)
        durable = ""
        if self._connection.vendor == "postgresql" and not self._is_durable():
            # As an acquire does it, and for this transaction alone: behind a pooler, a session's
            # setting would reach others.
            durable = " FROM (SELECT set_config('synchronous_commit', 'on', true)) AS durable"
        return f"UPDATE {table} SET {fence} = {fence} + 1{durable} WHERE {key} = %s"  # noqa: S608

    def _is_durable(self) -> bool:
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('synchronous_commit')")
            return cursor.fetchone()[0] in ("on", "remote_apply")

    def _run(self, statement: str, arguments: list[Any] | None = None) -> int:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, arguments)
            if cursor.description:
                cursor.fetchall()
            return int(cursor.rowcount)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DatabaseError, InterfaceError) as error:
            code = vendors.of(self._using).unavailable_code(error)
            message = f"The database {self._using!r} cannot be asked: {error}"
            if code is None:
                raise LockError(message) from error
            raise BackendUnavailable(message, code=code) from error


class RedisFloor(Floor):
    """A value that is set and read, over the connections of the locks."""

    store = "Redis"
    what = "SET and GET"

    def __init__(self, store: Any, key: str):
        self._store = store.store
        # A role of its own: no key of a lock is called like that.
        self._name = f"{store.key_prefix}:bench:{key}" if store.key_prefix else f"bench:{key}"

    def write(self) -> None:
        """See `Floor`: as durable as that server's locks are."""
        self._store.command("SET", self._name, "1", "PX", _KEPT)

    def trip(self) -> None:
        """See `Floor`."""
        self._store.command("GET", self._name)


class MemoryFloor(Floor):
    """A mutex that is taken and given back."""

    store = "in memory"
    what = "a threading.Lock, taken and released"

    def __init__(self, key: str):
        self._mutex = _mutexes[key]

    def write(self) -> None:
        """See `Floor`."""
        with self._mutex:
            pass

    def trip(self) -> None:
        """See `Floor`: there is nowhere to go."""


def floor_of(store: BaseLockBackend, key: str) -> Floor | None:
    """Return the floor of a backend; None: nothing is known about its store.

    Args:
        key: One that was granted before: it has a counter.

    Raises:
        LockError: The store did not answer, or refused.
    """
    if isinstance(store, FenceTable):
        return TableFloor(store.using, store.storage_name(key))
    if is_redis(store):
        return RedisFloor(store, key)
    return None if store.distributed else MemoryFloor(key)
