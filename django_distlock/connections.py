"""Which connection a lock statement runs on.

A lock that nobody sees before the caller commits is no lock, and a rollback would hand the same
fence out twice. So a lock statement runs where it commits by itself: on the thread's connection
while that is idle in autocommit, else on one of a few connections of our own.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from django.db import connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.utils import Error as DjangoDatabaseError

from .core.durations import MAX_BOUND
from .core.errors import LockError, LockUsageError

#: Seconds after which an unused connection of our own is closed.
IDLE_SECONDS = 10.0

#: Seconds to wait at least for the place of SQLite's one writer. It is taken for milliseconds, by
#: whoever locks any key: without this, trying once for a free key would fail now and then.
WRITER_SECONDS = 0.1

#: What tells a connection of our own to PostgreSQL about a server that vanished, in half a minute:
#: without it, a statement on a dead network hangs for a quarter of an hour.
KEEPALIVES: dict[str, Any] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

#: Seconds that PostgreSQL may take to let us in: the driver waits for ever, unless it is told.
CONNECT_SECONDS = 5

#: What has to come to an end before a database can be dropped.
before_drop: list[Callable[[], None]] = []

_own_threads = threading.local()
_every: weakref.WeakSet[Closing] = weakref.WeakSet()
#: Connections that a fork copied. Kept, so that no destructor speaks on the parent's socket.
_inherited: list[Any] = []
#: Which process opened the connection of a thread.
_opened_by: weakref.WeakKeyDictionary[BaseDatabaseWrapper, int] = weakref.WeakKeyDictionary()
#: Nobody's work is in them.
_own: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()


class NoConnectionFree(Exception):
    """All of our connections stayed in use for as long as the caller could wait."""


def use_own_connections() -> None:
    """Say that this thread is ours: nobody closes its connections at the end of a request."""
    _own_threads.active = True


def in_test_case(connection: BaseDatabaseWrapper) -> bool:
    """Whether the outermost transaction is a `TestCase`'s, which is always rolled back."""
    blocks = connection.atomic_blocks
    return bool(blocks) and getattr(blocks[0], "_from_testcase", False)


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether the caller has a transaction open, other than that of a `TestCase`."""
    return connection.in_atomic_block and not in_test_case(connection)


def require_transaction(connection: BaseDatabaseWrapper) -> Any:
    """Return the outermost block of `atomic()`, other than a `TestCase`'s.

    Raises:
        LockUsageError: None is open.
    """
    blocks = [
        each for each in connection.atomic_blocks if not getattr(each, "_from_testcase", False)
    ]
    if not (connection.in_atomic_block and blocks):
        raise LockUsageError(
            f"guard() holds until a transaction ends, and none is open on {connection.alias!r}:"
            f" call it inside of atomic(), or use lease.atomic()."
        )
    return blocks[0]


class OpenTransaction:
    """The outermost transaction of a connection, other than a `TestCase`'s.

    Raises:
        LockUsageError: None is open.
    """

    def __init__(self, connection: BaseDatabaseWrapper):
        block = require_transaction(connection)
        self._connection = weakref.ref(connection)
        # A decorator enters the same block with each call. This one is told from the next by a
        # copy in its place; blocks leave by their place.
        self._block = copy(block)
        blocks = connection.atomic_blocks
        blocks[blocks.index(block)] = self._block

    @property
    def is_open(self) -> bool:
        """Whether it goes on; from any thread."""
        connection = self._connection()
        return connection is not None and self._block in connection.atomic_blocks


class Closing(Protocol):
    """What has connections open that are in the way of dropping a database."""

    def close_all(self) -> None:
        """Close them."""


def close_before_drop(these: Closing) -> None:
    """Let a test run close these connections before it drops its database."""
    _every.add(these)
    connection_created.connect(_close_before_drop, dispatch_uid="django_distlock")


def keep_inherited(connection: Any) -> None:
    """Leave a connection that a fork copied to its owner, for as long as this process lives."""
    _inherited.append(connection)


C = TypeVar("C")


class IdleConnections(Generic[C]):
    """Connections that nobody uses right now. Each is closed when it has idled for a while.

    May be closed by a finaliser, so nothing here takes a lock.

    Args:
        close: Closes one, from wherever a finaliser may run.
    """

    def __init__(self, close: Callable[[C], None]):
        self._close = close
        self._idle: deque[tuple[C, float]] = deque()
        self._reaper: threading.Timer | None = None

    def __iter__(self) -> Iterator[C]:
        return iter([connection for connection, _since in self._idle])

    def keep(self, connection: C) -> None:
        """Take a connection that is not needed any more."""
        self._idle.append((connection, time.monotonic()))
        if self._reaper is None:
            self._start_reaper()

    def take(self) -> C | None:
        """Give the one that was used last; None: there is none."""
        try:
            return self._idle.pop()[0]
        except IndexError:
            return None

    def close_all(self) -> None:
        """Close them."""
        while self._idle:
            try:
                connection, _since = self._idle.popleft()
            except IndexError:
                return
            self._close(connection)

    def _start_reaper(self) -> None:
        self._reaper = threading.Timer(IDLE_SECONDS, self._reap)
        self._reaper.daemon = True
        try:
            self._reaper.start()
        except RuntimeError:
            self._reaper = None  # The interpreter ends, and takes no new threads.

    def _reap(self) -> None:
        self._reaper = None
        before = time.monotonic() - IDLE_SECONDS
        for _ in range(len(self._idle)):
            try:
                connection, since = self._idle.popleft()
            except IndexError:
                break
            if since <= before:
                self._close(connection)
            else:
                self._idle.append((connection, since))
        if self._idle:
            self._start_reaper()


class LockConnections:
    """The connections of one alias in one process.

    Args:
        alias: The database that holds the lock tables.
        limit: How many connections of our own at most.
        apart: Stay outside of the transaction of a `TestCase` too: somebody else's sessions have
            to see what is written.
    """

    def __init__(self, alias: str, limit: int, *, apart: bool = False):
        self.alias = alias
        self.limit = limit
        self._apart = apart
        self._reset()
        close_before_drop(self)

    @contextmanager
    def use(
        self, bound: float = MAX_BOUND, *, writes: bool = True
    ) -> Iterator[BaseDatabaseWrapper]:
        """Make `connections[alias]` one on which a statement commits by itself.

        Args:
            bound: Seconds that a statement may wait for a lock of SQLite's; PostgreSQL is told
                with the statement.
            writes: Whether the statements write.

        Raises:
            LockUsageError: SQLite, and this thread's own transaction is in the way of writing.
            NoConnectionFree: All of ours were in use for a second.
        """
        connection = connections[self.alias]
        _leave_to_parent(connection)
        if in_test_case(connection) and not self._apart:
            yield connection
        elif self._is_free(connection):
            with _left_usable(connection):
                yield connection
        else:
            if writes:
                _refuse_self_block(connection)
            with self._borrowed(connection, bound) as borrowed:
                # The ORM finds its connection by alias. Nothing else runs in this thread now.
                connections[self.alias] = borrowed
                try:
                    yield borrowed
                finally:
                    connections[self.alias] = connection

    def close_idle(self) -> None:
        """Close the connections that nobody uses right now."""
        if self._pid != os.getpid():
            return  # Copied by a fork: a word on their sockets would end the parent's sessions.
        self._idle.close_all()

    def close_all(self) -> None:
        """Close our connections; wait a second for those in use."""
        slots, taken = self._slots, 0
        until = time.monotonic() + MAX_BOUND
        while taken < self.limit and slots.acquire(timeout=max(0.0, until - time.monotonic())):
            taken += 1
        self.close_idle()
        for _ in range(taken):
            slots.release()

    def _is_free(self, connection: BaseDatabaseWrapper) -> bool:
        if getattr(_own_threads, "active", False) or connection.in_atomic_block:
            return False
        if connection.vendor == "sqlite":
            # Ours begin their transactions with IMMEDIATE: a deferred one that comes to write
            # fails at once where another one writes, whatever the timeout. A database in memory
            # is only seen by the connections that share it.
            return bool(connection.is_in_memory_db())  # type: ignore[attr-defined]
        # Django opens it to tell.
        _open_in_time(connection)
        return connection.get_autocommit()

    # Connections of our own

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: IdleConnections[BaseDatabaseWrapper] = IdleConnections(_close)
        self._slots = threading.BoundedSemaphore(self.limit)
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def _borrowed(
        self, template: BaseDatabaseWrapper, bound: float
    ) -> Iterator[BaseDatabaseWrapper]:
        if self._pid != os.getpid():
            _inherited.extend(self._idle)
            self._reset()
        slots = self._slots
        # A place in our own queue is not contention: it is waited for also with a bound of 0.
        if not slots.acquire(timeout=MAX_BOUND):
            raise NoConnectionFree(f"All {self.limit} lock connections of {self.alias!r} in use.")
        try:
            connection = self._open(template)
            try:
                with _left_usable(connection):
                    if connection.vendor == "sqlite":
                        with connection.cursor() as cursor:
                            wait = max(bound, WRITER_SECONDS)
                            cursor.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
                    yield connection
            finally:
                if connection.connection is not None:
                    self._keep(template, connection)
                else:
                    # The server went away: those that idled meanwhile are as stale.
                    self.close_idle()
        finally:
            slots.release()

    def _open(self, template: BaseDatabaseWrapper) -> BaseDatabaseWrapper:
        while (connection := self._idle.take()) is not None:
            # A test run renames its databases under the same alias.
            if connection.settings_dict["NAME"] == template.settings_dict["NAME"]:
                return connection
            connection.close()
        more = {**KEEPALIVES, "connect_timeout": CONNECT_SECONDS}
        made = own_connection(template, **(more if template.vendor == "postgresql" else {}))
        # Used by one thread at a time, but not by the same one every time.
        made.inc_thread_sharing()
        return made

    def _keep(self, template: BaseDatabaseWrapper, connection: BaseDatabaseWrapper) -> None:
        self._idle.keep(connection)
        self._watch(template.connection)

    def _watch(self, raw: Any) -> None:
        # When Django closes the thread's connection, its driver's object dies: ours go with it.
        try:
            if raw is not None and raw not in self._watched:
                self._watched.add(raw)
                weakref.finalize(raw, self.close_idle)
        except TypeError:
            pass  # A driver whose connections take no weak references: the reaper remains.


def _note_process(connection: BaseDatabaseWrapper, **_: Any) -> None:
    _opened_by[connection] = os.getpid()


connection_created.connect(_note_process, dispatch_uid="django_distlock.process")


def opened_in(thread: int) -> list[BaseDatabaseWrapper]:
    """Return the connections that another thread has opened, without those of our own."""
    # A copy in one step: that thread goes on opening some.
    known = [reference() for reference in _opened_by.keyrefs()]
    return [
        each
        for each in known
        if each is not None
        and each._thread_ident == thread  # type: ignore[attr-defined]
        and each not in _own
        and _opened_by.get(each) == os.getpid()
    ]


def _leave_to_parent(connection: BaseDatabaseWrapper) -> None:
    """Let go of a connection that a fork copied: two processes would read each other's answers."""
    if connection.vendor == "sqlite" or connection.connection is None or connection.in_atomic_block:
        return
    if _opened_by.get(connection, os.getpid()) != os.getpid():
        _inherited.append(connection.connection)
        connection.connection = None


@contextmanager
def _left_usable(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Close the connection where an error broke it, so that the next statement reconnects."""
    try:
        yield
    except LockError:
        raise
    except DjangoDatabaseError:
        # Not `close_if_unusable_or_obsolete()`: that ends the session of a healthy connection too,
        # where CONN_MAX_AGE is 0, and with it what the caller has set on it.
        if connection.errors_occurred and not connection.in_atomic_block:
            # MySQL's wrapper cannot be asked where it never connected.
            if connection.connection is not None and connection.is_usable():
                connection.errors_occurred = False
            else:
                connection.close()
        raise
    except BaseException:
        # Interrupted in the middle of the protocol, perhaps by a signal's handler: nobody knows
        # what the next answer would be.
        connection.close()
        raise


def _close(connection: BaseDatabaseWrapper) -> None:
    """Close a connection of ours that nobody uses, from wherever a finaliser may run.

    Django's own `close()` refuses in the thread of an event loop.
    """
    raw, connection.connection = connection.connection, None
    with suppress(Exception):
        raw.close()


def _open_in_time(connection: BaseDatabaseWrapper) -> None:
    """Open a connection of the project's with a bound, where its settings give none."""
    settings = connection.settings_dict
    options = settings["OPTIONS"]
    if connection.connection is not None or connection.vendor != "postgresql":
        return
    if not {"pool", "connect_timeout"}.isdisjoint(options):
        return
    more = {**options, "connect_timeout": CONNECT_SECONDS}
    connection.settings_dict = {**settings, "OPTIONS": more}
    try:
        connection.ensure_connection()
    finally:
        connection.settings_dict = settings


def own_connection(template: BaseDatabaseWrapper, **defaults: Any) -> BaseDatabaseWrapper:
    """Return a connection of our own to the database of another one; it is not open yet.

    Args:
        defaults: `OPTIONS` where the project's settings say nothing else.
    """
    made = type(template)(_own_settings(template, defaults), template.alias)
    _own.add(made)
    return made


def _own_settings(template: BaseDatabaseWrapper, defaults: dict[str, Any]) -> dict[str, Any]:
    options = {**defaults, **template.settings_dict["OPTIONS"]}
    # A pooled connection keeps what a session left on it, and the project counted its own.
    options.pop("pool", None)
    if template.vendor == "sqlite":
        options["transaction_mode"] = "IMMEDIATE"
    return {
        **template.settings_dict,
        "OPTIONS": options,
        "AUTOCOMMIT": True,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": False,
    }


def _refuse_self_block(connection: BaseDatabaseWrapper) -> None:
    if connection.vendor != "sqlite":
        return
    file = database_file(connection)
    for other in connections.all(initialized_only=True):
        if in_transaction(other) and other.vendor == "sqlite" and database_file(other) == file:
            raise LockUsageError(
                f"SQLite has one writer per file, and this thread has a transaction open on the"
                f" file of the locks, through the alias {other.alias!r} ({file}). Take the lock"
                f" outside of atomic(), or give the locks an alias with a file of its own.",
                code="self_blocked",
            )


def database_file(connection: BaseDatabaseWrapper) -> str:
    """Return what tells one SQLite database from another."""
    name = str(connection.settings_dict["NAME"])
    return name if name.startswith(("file:", ":memory:")) else str(Path(name).resolve())


def _close_before_drop(connection: BaseDatabaseWrapper, **_: Any) -> None:
    # A test run that drops its database first connects to none: ours would be in the way.
    if connection.alias == NO_DB_ALIAS:
        for finish in before_drop:
            finish()
        for each in list(_every):
            each.close_all()
