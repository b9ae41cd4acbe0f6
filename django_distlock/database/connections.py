"""What a connection is doing, and which ones are ours.

A lock that nobody sees before the caller commits is no lock, and a rollback would hand the same
fence out twice. So a lock statement runs where it commits by itself: see `borrowing`.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, Protocol

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ..core import budgets
from ..core.errors import LockUsageError

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
before_drop: list[Callable[[], object]] = []

#: What libpq calls a connection with a statement, with a transaction, and with a failed one.
_OPEN = (1, 2, 3)
#: And one that takes a statement: without a transaction, or in the middle of one.
_ANSWERING = (0, 2)
#: What MySQL's protocol calls a session with a transaction.
_IN_TRANSACTION = 1

_own_threads = threading.local()
_every: weakref.WeakSet[Closing] = weakref.WeakSet()
#: Connections that a fork copied. Kept, so that no destructor speaks on the parent's socket.
_inherited: list[Any] = []
#: The connections of threads that were opened. No set or dictionary of weak references: those are
#: cleared by functions of Python's, in which an exception that a signal raises would be lost.
_opened: list[weakref.ref[BaseDatabaseWrapper]] = []
#: The attributes of a connection that say which process has opened it, and what `servers_isolation`
#: has found, in which session.
_PROCESS = "_django_distlock_process"
_ISOLATION = "_django_distlock_isolation"


def use_own_connections(*, keeps_leases: bool = False) -> None:
    """Say that this thread is ours: nobody closes its connections at the end of a request.

    Where it keeps the leases of others, it must not wait for those who want something.
    """
    _own_threads.active, _own_threads.keeps_leases = True, keeps_leases


def keeps_leases() -> bool:
    """Whether this thread waits for no connection that others use."""
    return getattr(_own_threads, "keeps_leases", False)


def opened_here() -> list[BaseDatabaseWrapper]:
    """Return the connections of this thread.

    Another thread may add an alias meanwhile, which Django's own walk over them does not survive.
    """
    handler: Any = connections
    opened = handler._connections
    # Asked once: to find that no event loop runs costs asgiref an exception.
    storage = getattr(opened, "_get_storage", lambda: opened)()
    return [
        each for alias in [*handler.settings] if (each := getattr(storage, alias, None)) is not None
    ]


def close_here() -> None:
    """Close the connections of this thread: see `opened_here`."""
    # Without settings nothing was opened: `help()` looks at classes, and so makes blocks.
    for each in opened_here() if settings.configured else []:
        each.close()


def rows_of(using: str, statement: str, *arguments: Any, **named: Any) -> list[Any]:
    """Run a statement on the connection of an alias; return its rows.

    Without arguments, a `%` stands for itself.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(statement, named or arguments or None)
        return list(cursor.fetchall()) if cursor.description else []


def in_test_case(connection: BaseDatabaseWrapper) -> bool:
    """Whether the outermost transaction is a `TestCase`'s, which is always rolled back."""
    blocks = connection.atomic_blocks
    return bool(blocks) and getattr(blocks[0], "_from_testcase", False)


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether the caller has a transaction open, other than that of a `TestCase`.

    Closed amid it, it is over, and Django tells of no end.
    """
    is_open = connection.in_atomic_block and not connection.closed_in_transaction
    return is_open and not in_test_case(connection)


def is_manual(connection: BaseDatabaseWrapper) -> bool:
    """Whether it has autocommit off, or a transaction open, outside of `atomic()`."""
    if connection.connection is None:
        return False
    if connection.autocommit:
        return has_open_transaction(connection)
    # Where autocommit was off before atomic(), that does not commit at its end.
    return not (connection.in_atomic_block and connection.commit_on_exit)


def has_the_file(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction of SQLite's has been the one writer of its file from its beginning."""
    mode = getattr(connection, "transaction_mode", None)
    return in_transaction(connection) and mode in ("IMMEDIATE", "EXCLUSIVE")


def has_open_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether the driver says that a transaction is open, or a statement: it asks no server.

    mysqlclient does not tell.
    """
    raw = connection.connection
    if raw is None:
        return False
    if connection.vendor == "postgresql":
        return raw.info.transaction_status in _OPEN
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    return bool(getattr(raw, "server_status", 0) & _IN_TRANSACTION)


#: What tells the isolation level of a session in the last column of a row.
_ISOLATION_OF = {
    "postgresql": "SHOW default_transaction_isolation",
    "mysql": "SHOW VARIABLES LIKE 't%_isolation'",  # whichever name it has
}


def servers_isolation(connection: BaseDatabaseWrapper) -> str:
    """Return the isolation level of the server's transactions where Django asks for none.

    A role or a database may have been given another one. Each session is asked once, from the
    thread that it belongs to, and by a statement that takes no snapshot. "": it cannot be asked.
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
            # Past Django: it is no query of the caller's.
            with raw.cursor() as cursor:
                cursor.execute(_ISOLATION_OF[connection.vendor])
                level = str(cursor.fetchone()[-1]).lower().replace("-", " ")
        except database.Error:
            return ""  # The caller's next statement says why.
        vars(connection)[_ISOLATION] = (weakref.ref(raw), level)
    return str(level)


def is_free(connection: BaseDatabaseWrapper, *, single: bool) -> bool:
    """Whether the thread's connection may be used.

    Args:
        single: For one statement, which commits by itself. For a transaction it may not: a signal
            in the middle would leave it open, or autocommit off.
    """
    if getattr(_own_threads, "active", False) or connection.in_atomic_block:
        return False
    if connection.vendor == "sqlite":
        # A database in memory is only seen by the connections that share it.
        return bool(connection.is_in_memory_db())  # type: ignore[attr-defined]
    if not single:
        return False
    # Django opens it to tell.
    _open_in_time(connection)
    return connection.get_autocommit() and not has_open_transaction(connection)


def require_transaction(
    connection: BaseDatabaseWrapper, what: str = "guard()", instead: str = "use lease.atomic()"
) -> Any:
    """Return the outermost block of `atomic()`, other than a `TestCase`'s; or refuse."""
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
    """Return why a transaction with an older snapshot locks no key."""
    return LockUsageError(
        f"The transaction on {using!r} reads from a snapshot: it would not see a lease that was"
        " granted since it began. Use READ COMMITTED, or take a lease around atomic().",
        code="unsupported",
    )


class OpenTransaction:
    """The outermost transaction of a connection, other than a `TestCase`'s; there has to be one."""

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
    """Return the connections that another thread has opened, without those of our own."""
    # A copy in one step: that thread goes on opening some.
    known = [reference() for reference in list(_opened)]
    return [
        each
        for each in known
        if each is not None
        and each._thread_ident == thread  # type: ignore[attr-defined]
        and vars(each)[_PROCESS] == os.getpid()
    ]


def transactions_of(thread: int) -> list[BaseDatabaseWrapper]:
    """Return those of this thread, and of that one, with a transaction of the caller's."""
    found = opened_here()
    if thread != threading.get_ident():
        found += opened_in(thread)
    return [each for each in found if in_transaction(each) or is_manual(each)]


def is_own(connection: BaseDatabaseWrapper) -> bool:
    """Whether nobody's work is in a connection but ours."""
    return isinstance(connection.settings_dict, _OwnSettings)


def leave_to_parent(connection: BaseDatabaseWrapper) -> None:
    """Let go of a connection that a fork copied: two processes would read each other's answers."""
    if connection.connection is None or connection.in_atomic_block:
        return
    if vars(connection).get(_PROCESS, os.getpid()) != os.getpid():
        _inherited.append(connection.connection)
        connection.connection = None


def _open_in_time(connection: BaseDatabaseWrapper) -> None:
    """Open a connection of the project's with a bound, where its settings give none."""
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
        # Interrupted before Django has switched autocommit on, it would keep what is saved.
        connection.close()
        raise
    finally:
        connection.settings_dict = settings


def _opening_seconds(options: Mapping[str, Any]) -> Any:
    """Return `connect_timeout`: the project's, or as much of it as the call has left."""
    given = options.get("connect_timeout", CONNECT_SECONDS)
    if (left := budgets.left()) == math.inf:
        return given
    # Drivers take whole seconds, and two at least.
    return max(2, int(min(left, float(given) or left)))


def bound_opening(own: BaseDatabaseWrapper, options: Mapping[str, Any]) -> None:
    """Let a connection of our own be opened in the time that the call has; see `own_connection`."""
    if own.vendor in ("postgresql", "mysql"):
        own.settings_dict["OPTIONS"]["connect_timeout"] = _opening_seconds(options)


class _OwnSettings(dict[str, Any]):
    """The settings of a connection of our own: nobody's work is in it."""


def own_connection(template: BaseDatabaseWrapper, **defaults: Any) -> BaseDatabaseWrapper:
    """Return a connection of our own, not open yet; `defaults` where the project has no option."""
    options = {**defaults, **template.settings_dict["OPTIONS"]}
    # A pooled connection keeps what a session left on it, and the project counted its own.
    options.pop("pool", None)
    if template.vendor == "sqlite":
        options["transaction_mode"] = "IMMEDIATE"
    elif template.vendor == "mysql":
        # A key has any characters, also where the project's texts may not.
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
    """Refuse to wait for a writer of SQLite's that waits for us: this thread's transaction."""
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
