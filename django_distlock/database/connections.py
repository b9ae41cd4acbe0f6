"""The state of connections, which of them belong to this package, and its worker threads.

A lock that others see only after the caller's commit would exclude nobody, and a rollback would let
a fence be granted twice. So lock statements commit by themselves: see `borrowing`. Work that no
other thread may wait for or be interrupted in, such as the release of an interrupted block, is done
by a `Worker`.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ..core import durations
from ..core.clock import monotonic
from ..core.durations import MAX_BOUND
from ..core.errors import LockUsageError
from ..core.logs import log_fields
from ..core.threads import Bell, start_thread

logger = logging.getLogger("django_distlock")

#: Seconds after which an idle connection of this package is closed.
IDLE_SECONDS = 10.0

#: Seconds to wait at least to become SQLite's only writer. Every acquire takes that place for
#: milliseconds; without a wait, a single attempt for a free key would sometimes fail.
WRITER_SECONDS = 0.1

#: Options with which a connection to PostgreSQL notices in half a minute that its server is gone.
#: Without them, a statement on a dead network hangs for a quarter of an hour.
KEEPALIVES: dict[str, Any] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

#: Seconds to wait for a connection to PostgreSQL; the driver's default is for ever.
CONNECT_SECONDS = 5

#: Called before a test database is dropped, to end all that uses it.
before_drop: list[Callable[[], object]] = []

#: libpq's transaction states: a statement in progress, in a transaction, in a failed transaction.
_OPEN = (1, 2, 3)
#: libpq's states that accept a statement: idle, or in a transaction.
_ANSWERING = (0, 2)
#: The flag of MySQL's protocol for a session with an open transaction.
_IN_TRANSACTION = 1

_own_threads = threading.local()
_every: weakref.WeakSet[Closing] = weakref.WeakSet()
#: Connections copied by a fork. They are kept, so that no destructor closes the parent's session.
_inherited: list[Any] = []
#: All opened connections of threads. Not a `WeakSet`, whose callbacks are Python functions that
#: could lose a signal's exception.
_opened: list[weakref.ref[BaseDatabaseWrapper]] = []
#: Attributes of a connection: the process that has opened it, and the answer of
#: `servers_isolation` with its session.
_PROCESS = "_django_distlock_process"
_ISOLATION = "_django_distlock_isolation"


def use_own_connections(*, keeps_leases: bool = False) -> None:
    """Mark this thread as one of this package, whose connections no end of a request closes.

    Args:
        keeps_leases: Whether it renews leases, and so must not wait for a connection.
    """
    _own_threads.active, _own_threads.keeps_leases = True, keeps_leases


def keeps_leases() -> bool:
    """Whether this thread renews leases: see `use_own_connections`."""
    return getattr(_own_threads, "keeps_leases", False)


def opened_here() -> list[BaseDatabaseWrapper]:
    """Return the connections of this thread.

    Django's own iteration over them fails if another thread adds an alias meanwhile.
    """
    handler: Any = connections
    opened = handler._connections
    # Fetched once, because without an event loop asgiref has to handle an exception each time.
    storage = getattr(opened, "_get_storage", lambda: opened)()
    return [
        each for alias in [*handler.settings] if (each := getattr(storage, alias, None)) is not None
    ]


def close_here() -> None:
    """Close the connections of this thread: see `opened_here`."""
    # Without settings, nothing was opened. (`help()` looks attributes up, and so creates blocks.)
    for each in opened_here() if settings.configured else []:
        each.close()


def rows_of(using: str, statement: str, *arguments: Any, **named: Any) -> list[Any]:
    """Run a statement on the connection of an alias; return its rows.

    Without arguments, a `%` is not special.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(statement, named or arguments or None)
        return list(cursor.fetchall()) if cursor.description else []


def in_test_case(connection: BaseDatabaseWrapper) -> bool:
    """Whether the outermost transaction is a `TestCase`'s, which is always rolled back."""
    blocks = connection.atomic_blocks
    return bool(blocks) and getattr(blocks[0], "_from_testcase", False)


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether the caller has an open transaction, other than that of a `TestCase`.

    If the connection was closed inside it, it is over, without a hook being called.
    """
    is_open = connection.in_atomic_block and not connection.closed_in_transaction
    return is_open and not in_test_case(connection)


def is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Whether it has autocommit off, or an open transaction, outside `atomic()`."""
    if connection.connection is None:
        return False
    if connection.autocommit:
        return has_open_transaction(connection)
    # If autocommit was off before atomic(), the end of that does not commit.
    return not (connection.in_atomic_block and connection.commit_on_exit)


def has_the_file(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction on SQLite has been the only writer of the file from its beginning."""
    mode = getattr(connection, "transaction_mode", None)
    return in_transaction(connection) and mode in ("IMMEDIATE", "EXCLUSIVE")


def has_open_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether the driver reports an open transaction or statement, without asking the server.

    mysqlclient does not report it.
    """
    raw = connection.connection
    if raw is None:
        return False
    if connection.vendor == "postgresql":
        return raw.info.transaction_status in _OPEN
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    return bool(getattr(raw, "server_status", 0) & _IN_TRANSACTION)


#: Queries for the isolation level of a session, in the last column of a row.
_ISOLATION_OF = {
    "postgresql": "SHOW default_transaction_isolation",
    "mysql": "SHOW VARIABLES LIKE 't%_isolation'",  # whichever name it has
}


def servers_isolation(connection: BaseDatabaseWrapper) -> str:
    """Return the server's default isolation level in a session; "": unknown.

    It may be set for a role or a database. Each session is asked once, in its own thread, by a
    statement that takes no snapshot.
    """
    raw = connection.connection
    session, level = vars(connection).get(_ISOLATION, (None, ""))
    if session is None or session() is not raw:
        here = connection._thread_ident == threading.get_ident()  # type: ignore[attr-defined]
        if raw is None or not here:
            return ""
        if connection.vendor == "postgresql" and raw.info.transaction_status not in _ANSWERING:
            return ""
        database: Any = connection.Database  # type: ignore[attr-defined]
        try:
            # Without Django's cursor, because this is not a query of the caller.
            with raw.cursor() as cursor:
                cursor.execute(_ISOLATION_OF[connection.vendor])
                level = str(cursor.fetchone()[-1]).lower().replace("-", " ")
        except database.Error:
            return ""  # The caller's next statement will report the error.
        vars(connection)[_ISOLATION] = (weakref.ref(raw), level)
    return str(level)


def is_free(connection: BaseDatabaseWrapper, *, single: bool) -> bool:
    """Whether the thread's connection may be used for a lock statement.

    Args:
        single: Whether it is one statement that commits by itself. A transaction must not run
            there, because a signal could leave it open, or autocommit off.
    """
    if getattr(_own_threads, "active", False) or connection.in_atomic_block:
        return False
    if connection.vendor == "sqlite":
        # Other connections do not see a database in memory.
        return bool(connection.is_in_memory_db())  # type: ignore[attr-defined]
    if not single:
        return False
    # The next line would open it.
    _open_in_time(connection)
    return connection.get_autocommit() and not has_open_transaction(connection)


def require_transaction(
    connection: BaseDatabaseWrapper, what: str = "guard()", instead: str = "use lease.atomic()"
) -> Any:
    """Return the outermost block of `atomic()`, other than a `TestCase`'s; or raise."""
    blocks = [
        each for each in connection.atomic_blocks if not getattr(each, "_from_testcase", False)
    ]
    if not (connection.in_atomic_block and blocks):
        raise LockUsageError(
            f"{what} holds until a transaction ends, and none is open on {connection.alias!r}:"
            f" call it inside of atomic(using={connection.alias!r}), or {instead}."
        )
    return blocks[0]


def older_snapshot(using: str) -> LockUsageError:
    """Return the error for a transaction lock in a transaction that reads a snapshot."""
    return LockUsageError(
        f"The transaction on {using!r} reads from a snapshot: it would not see a lease that was"
        " granted since it began. Use READ COMMITTED, or take a lease around atomic().",
        code="unsupported",
    )


class OpenTransaction:
    """The outermost transaction of a connection, other than a `TestCase`'s; there must be one."""

    def __init__(self, connection: BaseDatabaseWrapper):
        block = require_transaction(connection)
        self._connection = weakref.ref(connection)
        # A decorator enters the same block object with each call. A copy in its place makes this
        # transaction distinct from the next one; Django leaves blocks by their place.
        self._block = copy(block)
        blocks = connection.atomic_blocks
        blocks[blocks.index(block)] = self._block

    @property
    def is_open(self) -> bool:
        """Whether it is still open. May be called in any thread."""
        connection = self._connection()
        return connection is not None and self._block in connection.atomic_blocks


class Closing(Protocol):
    """An object with connections that would prevent a database from being dropped."""

    def close_all(self) -> None:
        """Close them."""


def close_before_drop(these: Closing) -> None:
    """Close these connections before a test run drops its database."""
    _every.add(these)
    connection_created.connect(_close_before_drop, dispatch_uid="django_distlock")


def keep_inherited(connection: Any) -> None:
    """Keep a connection that a fork has copied alive, so that it is never closed here."""
    _inherited.append(connection)


def _note_process(connection: BaseDatabaseWrapper, **_: Any) -> None:
    if is_own(connection):
        return
    is_new = _PROCESS not in vars(connection)
    vars(connection)[_PROCESS] = os.getpid()
    if is_new:
        for each in [each for each in list(_opened) if each() is None]:
            with suppress(ValueError):
                _opened.remove(each)
        _opened.append(weakref.ref(connection))


connection_created.connect(_note_process, dispatch_uid="django_distlock.process")


def opened_in(thread: int) -> list[BaseDatabaseWrapper]:
    """Return the connections that another thread has opened, without those of this package."""
    known = [reference() for reference in list(_opened)]
    return [
        each
        for each in known
        if each is not None
        and each._thread_ident == thread  # type: ignore[attr-defined]
        and vars(each)[_PROCESS] == os.getpid()
    ]


def transactions_of(thread: int) -> list[BaseDatabaseWrapper]:
    """Return the connections of this thread and another one with a transaction of the caller."""
    found = opened_here()
    if thread != threading.get_ident():
        found += opened_in(thread)
    return [each for each in found if in_transaction(each) or is_manual(each)]


def is_own(connection: BaseDatabaseWrapper) -> bool:
    """Whether a connection belongs to this package, and so has none of the project's work."""
    return isinstance(connection.settings_dict, _OwnSettings)


def leave_to_parent(connection: BaseDatabaseWrapper) -> None:
    """Drop a connection that a fork has copied: two processes would read each other's answers."""
    if connection.connection is None or connection.in_atomic_block:
        return
    if vars(connection).get(_PROCESS, os.getpid()) != os.getpid():
        _inherited.append(connection.connection)
        connection.connection = None


def _open_in_time(connection: BaseDatabaseWrapper) -> None:
    """Open a connection of the project, with a time limit if its settings have none."""
    settings = connection.settings_dict
    options = settings["OPTIONS"]
    if connection.connection is not None or connection.vendor != "postgresql":
        return
    if "pool" in options:
        return
    more = {**options, "connect_timeout": _opening_seconds(options)}
    connection.settings_dict = {**settings, "OPTIONS": more}
    try:
        connection.ensure_connection()
    except BaseException:
        # If Django was interrupted before it has set autocommit, nothing would be committed.
        connection.close()
        raise
    finally:
        connection.settings_dict = settings


def _opening_seconds(options: Mapping[str, Any]) -> Any:
    """Return `connect_timeout`: the project's, or the rest of the call's time if that is less."""
    given = options.get("connect_timeout", CONNECT_SECONDS)
    if (left := durations.left()) == math.inf:
        return given
    # Drivers accept whole seconds, and at least two.
    return max(2, int(min(left, float(given) or left)))


def bound_opening(own: BaseDatabaseWrapper, options: Mapping[str, Any]) -> None:
    """Limit the opening of a connection to the call's time; see `own_connection`."""
    if own.vendor in ("postgresql", "mysql"):
        own.settings_dict["OPTIONS"]["connect_timeout"] = _opening_seconds(options)


class _OwnSettings(dict[str, Any]):
    """The settings of a connection of this package."""


def own_connection(template: BaseDatabaseWrapper, **defaults: Any) -> BaseDatabaseWrapper:
    """Return a new connection; `defaults`: options for those that the project does not set."""
    options = {**defaults, **template.settings_dict["OPTIONS"]}
    # No pool: its connections may have settings of others, and its limit is the project's.
    options.pop("pool", None)
    if template.vendor == "sqlite":
        options["transaction_mode"] = "IMMEDIATE"
    elif template.vendor == "mysql":
        # Keys may have any characters, even if the project's texts may not.
        options["charset"] = "utf8mb4"
        options.pop("collation", None)
    settings = {
        **template.settings_dict,
        "OPTIONS": options,
        "AUTOCOMMIT": True,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": False,
    }
    return type(template)(_OwnSettings(settings), template.alias)


def refuse_self_block(connection: BaseDatabaseWrapper) -> None:
    """Refuse to wait for this thread's own transaction, which is SQLite's only writer."""
    if connection.vendor != "sqlite":
        return
    for other in opened_here():
        if other.vendor != "sqlite" or not in_transaction(other):
            continue
        if (file := database_file(connection)) == database_file(other):
            raise LockUsageError(
                f"SQLite has one writer per file, and this thread has a transaction open on the"
                f" file of the locks, through the alias {other.alias!r} ({file}). Take the lock"
                f" outside of atomic(), or give the locks an alias with a file of its own.",
                code="self_blocked",
            )


def database_file(connection: BaseDatabaseWrapper) -> str:
    """Return an id of an SQLite database."""
    name = str(connection.settings_dict["NAME"])
    return name if name.startswith(("file:", ":memory:")) else str(Path(name).resolve())


def _close_before_drop(connection: BaseDatabaseWrapper, **_: Any) -> None:
    # Before a test run drops its database, it connects to none, and ours must be closed.
    if connection.alias == NO_DB_ALIAS:
        for finish in before_drop:
            finish()
        for each in list(_every):
            each.close_all()


# Work in a thread of this package


class Gone(weakref.ref[Any]):
    """A weak reference with work for the worker, which gets it when the object has died.

    No Python code runs where the object dies: a signal's exception could interrupt a finaliser,
    which would swallow it.
    """

    __slots__ = ("work",)

    work: Callable[[], object]


@dataclass(order=True, slots=True)
class _Late:
    """Work to be done at a time, by `monotonic`."""

    at: float
    work: Callable[[], object] = field(compare=False)


class Worker:
    """Does work in a thread of its own, which finalisers may queue.

    It has a `SimpleQueue`, the only kind that a finaliser may put something into.
    """

    def __init__(self, name: str):
        self._name = name
        self._pid: int | None = None
        self._thread: threading.Thread | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all work: in a forked child, it is the parent's."""
        self.queue: SimpleQueue[Callable[[], object] | Gone | _Late] = SimpleQueue()
        #: Work for later, as a heap. Only the thread itself uses it.
        self.late: list[_Late] = []
        self._starting = threading.Lock()
        self._works = False
        # The process in which the thread runs.
        self._works_in: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work is waiting or in progress."""
        return self._works or not self.queue.empty()

    @property
    def backlog(self) -> int:
        """How much work is waiting that is not for later."""
        return self.queue.qsize()

    def start(self) -> None:
        """Start the thread if necessary. A finaliser must not call this."""
        if self._works_in == os.getpid():
            return
        with self._starting:
            if not self._is_running():
                # Stored before it starts, so that a signal's exception leads to no second one.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._pid = os.getpid()
                start_thread(self._thread)

    def put(self, work: Callable[[], object], seconds: float = 0.0) -> None:
        """Add work: it is done after all earlier work, or after some seconds."""
        self.queue.put(_Late(monotonic() + seconds, work) if seconds else work)

    def finish(self) -> None:
        """Wait until all queued work is done, for a second at most."""
        if self._is_running():
            finished = Bell()
            self.put(finished.ring)
            finished.wait(MAX_BOUND)

    def _is_running(self) -> bool:
        thread = self._thread
        return thread is not None and self._pid == os.getpid() and thread.is_alive()

    def _run(self) -> None:
        with self._starting:
            if self._thread is not threading.current_thread():
                return  # Another thread has replaced this one.
        use_own_connections(keeps_leases=True)
        try:
            self._works_in = self._pid
            self._work()
        finally:
            self._works_in = None

    def _work(self) -> None:
        while True:
            self._works = False
            work = self._next()
            self._works = True
            try:
                try:
                    if isinstance(work, Gone):
                        work.work()
                    else:
                        work()
                finally:
                    # No end of a request closes the connections that a receiver opens here.
                    close_here()
            except BaseException:
                logger.exception("A deferred operation failed", extra=log_fields("telling_failed"))

    def _next(self) -> Callable[[], object] | Gone:
        """Wait for work."""
        while True:
            left = self.late[0].at - monotonic() if self.late else math.inf
            if left <= 0:
                return heapq.heappop(self.late).work
            with suppress(Empty):
                found = self.queue.get(timeout=None if left == math.inf else left)
                if not isinstance(found, _Late):
                    return found
                heapq.heappush(self.late, found)


class Releases(Worker):
    """A worker with a thread for each backend besides: a silent store delays no other."""

    def forget(self) -> None:
        """Forget all work, and the threads of the parent."""
        super().forget()
        # Only the thread itself adds to them.
        self._of_backends: dict[str, Worker] = {}

    @property
    def is_busy(self) -> bool:
        """Whether work is waiting or in progress, also that of a backend."""
        # In this order: what is handed over in between is found there.
        return super().is_busy or any(each.is_busy for each in list(self._of_backends.values()))

    def finish(self) -> None:
        """Wait until all queued work is done, for a second at most, and one for each backend."""
        super().finish()
        for each in list(self._of_backends.values()):
            each.finish()

    def apart(self, backend: str, work: Callable[[], object], most: float = math.inf) -> bool:
        """Do work in the thread of a backend; False: as much as `most` is waiting there already.

        Only this worker's own thread calls it.
        """
        worker = self._of_backends.get(backend)
        if worker is None:
            worker = self._of_backends[backend] = Worker(f"distlock-releases-{backend}")
        try:
            worker.start()
        except RuntimeError:
            # No thread can be started: the interpreter is exiting, or there are too many.
            work()
            return True
        if worker.backlog >= most:
            return False
        worker.put(work)
        return True


#: Releases leases of interrupted blocks, and those that have waited for a transaction.
releases = Releases("distlock-releases")


def when_gone(watched: object, work: Callable[[], object]) -> Gone:
    """Let the worker do something when an object has died; keep the returned reference until then.

    Args:
        watched: The object; `work` must not refer to it.
    """
    releases.start()
    gone = Gone(watched, releases.queue.put)
    gone.work = work
    return gone


def has_gone() -> bool:
    """Whether an object has died whose work may not be done yet."""
    return releases.is_busy
