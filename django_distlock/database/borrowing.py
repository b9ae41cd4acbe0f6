"""Lend connections to lock statements, and take them back.

A signal's handler may raise between any two steps, also at the end of a block. So nothing of the
caller's is changed that would have to be restored. A statement that commits by itself may run on
the thread's own connection; a transaction runs on a connection of this package, under an alias of
its own. An object that lives as long as the block stands for the borrower. If it dies before the
connection was given back, another thread closes the connection.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error as DjangoDatabaseError
from django.db.utils import OperationalError

from ..core import durations
from ..core.clock import monotonic
from ..core.durations import MAX_BOUND, MAX_STANDSTILL
from ..core.errors import BackendUnavailable, LockError
from ..core.threads import start_thread
from . import connections as settings
from .connections import (
    CONNECT_SECONDS,
    KEEPALIVES,
    WRITER_SECONDS,
    bound_opening,
    close_before_drop,
    has_open_transaction,
    has_the_file,
    in_test_case,
    is_free,
    keep_inherited,
    keeps_leases,
    leave_to_parent,
    own_connection,
    refuse_self_block,
)

T = TypeVar("T")

#: Seconds that a server may be silent, in addition to the time for locks of others.
ANSWER_SECONDS = 2.0

#: The same for a statement about very many rows.
LONG_SECONDS = 30.0

#: Seconds that the sweeper stays awake after the last statement.
LINGER_SECONDS = 2.0

#: Seconds between two looks at statements in progress.
TICK_SECONDS = 0.25

#: Seconds between two looks of a thread that waits for a connection: the one that was woken may
#: have been interrupted.
LOOK_SECONDS = 0.1


#: Default options that make a connection of this package notice a dead server.
_BOUNDS: Mapping[str, dict[str, Any]] = {
    "postgresql": {**KEEPALIVES, "connect_timeout": CONNECT_SECONDS},
    "mysql": {"connect_timeout": CONNECT_SECONDS},
}


#: Not None, which is a legal name of a database.
_NOTHING = object()


class NoConnectionFree(Exception):
    """All connections of this package were in use for as long as the caller could wait."""


class NeedsOwnSession(Exception):
    """The session of the thread has another isolation level or role, or may only read."""


class _Leaving:
    """A descriptor for `__exit__` that notices if the block ends without calling it.

    Python looks `__exit__` up before it calls `__enter__`, and keeps the result on its stack while
    the block is open. No traceback refers to it there: see `locks.blocks.Leaving`.
    """

    def __get__(self, use: Use, owner: type[Use]) -> Callable[..., None]:
        leave = partial(Use.leave, use)
        use.sweeper = _sweeping()
        use.reference = weakref.ref(leave, use.sweeper.gone.put)
        return leave


class Use:
    """A block in which a statement runs. It gives the alias to use.

    Args:
        bound: Seconds that a statement may wait for a lock of SQLite. PostgreSQL gets its bound
            with the statement.
        single: Whether it is one statement that commits by itself.
        patience: Seconds without an answer after which the connection is cut.

    Attributes:
        was_cut: Whether the connection was cut.
        silent_for: The seconds without an answer before that.
        sweeper: Cuts the connection, and closes it if the block ends without `__exit__`.

    Raises:
        BackendUnavailable: The time of the call is over.
        LockUsageError: On SQLite, this thread's own transaction blocks every other writer.
        NoConnectionFree: All connections were in use for a second.
    """

    sweeper: _Sweeper

    def __init__(
        self, pool: LockConnections, *, bound: float, writes: bool, single: bool, patience: float
    ):
        self.silent_for = 0.0
        self.was_cut = False
        self.until = self._since = math.inf
        self._patience = patience
        # Asked for here, because the thread that compares it has another context.
        self._end = durations.end()
        self._is_watched = False
        self.reference: weakref.ref[Any] | None = None
        self._pool = pool
        self._bound = bound
        self._writes = writes
        self._single = single
        self._lent: BaseDatabaseWrapper | None = None
        self._own: Own | None = None

    def __enter__(self) -> str:
        pool = self._pool
        if time.monotonic() >= self._end:
            raise BackendUnavailable(
                f"No time is left to ask the lock store {pool.alias!r}.", code="network_timeout"
            )
        template = connections[pool.alias]
        # A test run renames its databases under the same alias.
        if pool.prepared_for is not template.settings_dict["NAME"]:
            pool.prepare()
        if template.vendor != "sqlite":
            leave_to_parent(template)
        # An exclusive transaction of SQLite lets no other connection read, so it is used itself.
        if template.in_atomic_block and (
            (in_test_case(template) and not pool.apart)
            or (not self._writes and has_the_file(template))
        ):
            return pool.alias
        if self._may_lend(template):
            self._lent = template
            self._watch(template)
            return pool.alias
        if self._writes:
            refuse_self_block(template)
        own = self._own = pool.take(template, self.reference)
        # The ORM finds connections by alias. This alias is not in the settings or another thread.
        connections[own.name] = own.connection
        own.use = self
        if own.connection.connection is None:
            bound_opening(own.connection, template.settings_dict["OPTIONS"])
        self._watch(own.connection)
        self._open(own)
        return own.name

    __exit__ = _Leaving()

    def leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Give the connection back, or close it if an error has broken it."""
        if self._own is not None:
            with suppress(AttributeError):
                del connections[self._own.name]
            usable = _is_clean(self._own.connection, error)
            usable = usable and (error is None or not self._pool.has_moved(error))
            self._end_watch()
            self._own.use = None
            self._pool.give_back(self._own, error, usable=usable and not self.was_cut)
        elif self._lent is not None:
            if error is not None:
                _mend(self._lent, error)
            self._end_watch()
            if self.was_cut:
                self._lent.close()
        self.reference = None

    def begin_statement(self, more: float = 0.0) -> None:
        """Start to wait for an answer; `more`: additional seconds for this statement."""
        self._since = time.monotonic()
        self.until = min(self._since + self._patience + more, self._end)

    def cut(self) -> None:
        """Make a statement without an answer fail. Called in another thread."""
        own, lent = self._own, self._lent
        connection = lent if own is None else own.connection
        if connection is None or connection.connection is None:
            # It is connecting, for which the driver has a bound.
            self.begin_statement()
        elif _sweeping().watched.pop(self, None) is not None:
            self.silent_for = time.monotonic() - self._since
            if own is not None:
                # Otherwise the end of its transaction would connect again, and wait once more.
                connection.connect = _stay_closed  # type: ignore[method-assign]
            cut(connection)

    @property
    def is_abandoned(self) -> bool:
        """Whether the block has ended without `__exit__`."""
        reference = self.reference
        return reference is None or reference() is None

    def _may_lend(self, template: BaseDatabaseWrapper) -> bool:
        """Whether the thread's connection may be used; one whose session is over is reopened.

        That loses nothing, because the caller's settings have ended with the session.
        """
        until = min(self._end, time.monotonic() + MAX_BOUND)
        while self._is_free(template):
            if not _has_ended(template):
                return True
            # Unread data may be a notification, on a session that lives.
            self._lent = template
            self._watch(template)
            lives = _lives(template)
            self._end_watch()
            self._lent, self.was_cut = None, False
            if lives or time.monotonic() >= until:
                return True
            # The project's pool may return another connection whose session is over.
            template.close()
        return False

    def _is_free(self, template: BaseDatabaseWrapper) -> bool:
        if not self._single or template.connection is not None or template.in_atomic_block:
            return is_free(template, single=self._single)
        # Sixty threads that wait for locks would open sixty. A pool bounds how many they open, and
        # the main thread, as of a Celery worker, needs its own connection for its work.
        shares = threading.current_thread() is not threading.main_thread()
        if shares and not template.settings_dict["OPTIONS"].get("pool"):
            return False
        # Opening it takes several round trips.
        self._lent = template
        self._watch(template)
        try:
            return is_free(template, single=True)
        finally:
            self._end_watch()
            self._lent = None

    def _watch(self, connection: BaseDatabaseWrapper) -> None:
        # A file does not fall silent.
        if connection.vendor != "sqlite":
            self.begin_statement(CONNECT_SECONDS if connection.connection is None else 0.0)
            self._is_watched = True
            self.sweeper.watch(self)

    def _end_watch(self) -> None:
        if self._is_watched:
            self.was_cut = self.sweeper.watched.pop(self, None) is None

    def _open(self, own: Own) -> None:
        connection = own.connection
        try:
            if connection.connection is None:
                own.bound = None
                if connection.vendor == "sqlite":
                    # Statements of the project at the opening may wait for a writer as well.
                    connection.settings_dict["OPTIONS"]["timeout"] = self._writer_seconds()
                connection.ensure_connection()
                own.file = _file_of(connection)
            self.begin_statement()
            if connection.vendor == "sqlite":
                bound = f"PRAGMA busy_timeout = {int(self._writer_seconds() * 1000)}"
            elif connection.vendor == "mysql":
                bound = _standstill_of(connection)
            else:
                return
            if bound != own.bound:
                # Without Django's cursor, which takes more time than the statement.
                with connection.wrap_database_errors:
                    connection.connection.cursor().execute(bound)
                own.bound = bound
        except DjangoDatabaseError as error:
            self.leave(type(error), error)
            raise

    def _writer_seconds(self) -> float:
        return max(WRITER_SECONDS, min(self._bound, self._end - time.monotonic()))


class Own:
    """A connection of this package.

    Attributes:
        name: The alias under which its borrower finds it.
        user: Returns None once the borrower is gone; None: nobody uses the connection.
        is_counted: Whether its present use counts for the limit.
        bound: The bound that the session was given last.
        file: The id of the SQLite file that it has open.
    """

    bound: str | None = None
    file: tuple[int, int] | None = None

    def __init__(self, connection: BaseDatabaseWrapper, name: str, user: Callable[[], object]):
        self.connection = connection
        self.name = name
        self.user: Callable[[], object] | None = user
        self.is_counted = True
        self.use: Use | None = None
        # A file does not fall silent.
        if connection.vendor != "sqlite":
            connection.execute_wrappers.append(self._begin_statement)
        self.idle_since = 0.0

    @property
    def is_abandoned(self) -> bool:
        """Whether its borrower is gone, so that an answer may still be on its way."""
        user = self.user
        return user is not None and user() is None

    def _begin_statement(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        if (use := self.use) is not None:
            use.begin_statement()
        return execute(*arguments)

    @property
    def takes_place(self) -> bool:
        """Whether it is in use and counts for the limit."""
        return self.is_counted and self.user is not None and not self.is_abandoned

    @property
    def has_ended(self) -> bool:
        """Whether its session is over, or its SQLite file was replaced.

        Replacing a file, such as by a backup, does not end the connections to the old one.
        """
        file = _file_of(self.connection)
        return _has_ended(self.connection) or (file is not None and file != self.file)

    @property
    def holds_file(self) -> bool:
        """Whether it may have locks on an SQLite file."""
        return self.user is not None and self.connection.vendor == "sqlite"


def _standstill_of(connection: Any) -> str:
    # PostgreSQL gets this with each transaction. MySQL ends idle sessions; those of this package
    # are closed sooner, or are seen to have ended.
    if connection.mysql_is_mariadb:
        idle = f"idle_transaction_timeout = {math.ceil(MAX_STANDSTILL)}"
    else:
        idle = f"wait_timeout = {math.ceil(settings.IDLE_SECONDS + 2 * MAX_STANDSTILL)}"
    # A server or project may limit the rows of a SELECT, which would hide some who share a key, or
    # use another dialect, such as Oracle's.
    mode = "SESSION sql_mode = 'STRICT_ALL_TABLES'"
    return f"SET SESSION {idle}, SESSION sql_select_limit = {2**64 - 1}, {mode}"


def _stay_closed() -> None:
    raise OperationalError("This session was cut, because it gave no answer.")


def _nobody() -> None:
    """Stand for the user of a connection that is to be closed."""


class LockConnections:
    """The connections of one alias in one process.

    Args:
        limit: How many connections of this package there are at most, besides the heartbeat's.
        apart: Stay outside the transaction of a `TestCase`, because other sessions have to see the
            rows.
    """

    def __init__(self, alias: str, limit: int, *, apart: bool = False):
        self.alias = alias
        self.limit = limit
        self.apart = apart
        #: The name of the database for which `prepare` has found out what is needed.
        self.prepared_for: object = _NOTHING
        self._begin()
        close_before_drop(self)

    def _begin(self) -> None:
        # A lock in C: an interruption in its block leaves it unlocked.
        self._mutex = threading.Lock()
        self._every: list[Own] = []
        self._freed: SimpleQueue[None] = SimpleQueue()
        #: Those who wait for a connection, and the queues that wake them.
        self._waiting: list[tuple[Any, SimpleQueue[None]]] = []
        #: The driver's connections of the threads that have borrowed. Ours are closed with them.
        self._followed: list[weakref.ref[Any]] = []
        self._pid = os.getpid()

    def use(
        self,
        bound: float = MAX_BOUND,
        *,
        writes: bool = True,
        single: bool = False,
        patience: float | None = None,
    ) -> Use:
        """Return a block in which a statement commits by itself: see `Use`."""
        seconds = bound + ANSWER_SECONDS if patience is None else patience
        return Use(self, bound=bound, writes=writes, single=single, patience=seconds)

    def ask(
        self,
        operation: Callable[[str], T],
        *,
        bound: float = MAX_BOUND,
        busy: Callable[[], T] | None = None,
        writes: bool = True,
        single: bool = False,
        long: bool = False,
        key: str | None = None,
    ) -> T:
        """Run an operation outside the caller's transactions.

        Args:
            operation: Called with the alias to use.
            busy: Returns the answer if other transactions were in the way; None: raise.
            single: Whether the operation is one statement that commits by itself.
            long: Whether a statement reads or writes very many rows, and may take long.
            key: What it is about, for errors.
        """
        patience = LONG_SECONDS if long else None
        use = self.use(bound, writes=writes, single=single, patience=patience)
        try:
            try:
                with use as on:
                    return operation(on)
            except NeedsOwnSession:
                use = self.use(bound, writes=writes, patience=patience)
                with use as on:
                    return operation(on)
        except (DjangoDatabaseError, NoConnectionFree, SynchronousOnlyOperation) as error:
            others_are_in_the_way = self.is_busy(error, use)
            if busy is None or not others_are_in_the_way:
                raise self.explained(error, use, key) from error
        return busy()

    def is_busy(self, error: Exception, use: Use) -> bool:
        """Whether an operation has failed because others were in the way."""
        return isinstance(error, NoConnectionFree)

    def explained(self, error: Exception, use: Use, key: str | None) -> LockError:
        """Return what the caller of a failed operation is told, or raise the error itself."""
        if not isinstance(error, NoConnectionFree):
            raise error
        return BackendUnavailable(str(error), key=key, code="network_timeout")

    def prepare(self) -> None:
        """Find out what is needed before a connection is borrowed."""
        self.prepared_for = connections[self.alias].settings_dict["NAME"]

    def has_moved(self, error: BaseException) -> bool:
        """Whether a new session may reach another server, which accepts writes."""
        return False

    def take(self, template: BaseDatabaseWrapper, user: Any) -> Own:
        """Lend a connection while `user` lives; or raise `NoConnectionFree`."""
        if self._pid != os.getpid():
            for each in self._every:
                keep_inherited(each.connection)
            self._begin()
        # Waiting for a connection is not contention, so it happens even with a bound of 0.
        # First come, first served; otherwise, with many threads, some would wait in vain.
        queue = bool(self._waiting) and not keeps_leases()
        own = None if queue else self._taken(template, user)
        if own is None:
            own = self._waited_for(template, user)
        self._follow(template.connection)
        return own

    def _waited_for(self, template: BaseDatabaseWrapper, user: Any) -> Own:
        until = durations.end(MAX_BOUND)
        bell: SimpleQueue[None] = SimpleQueue()
        turn = user, bell
        self._waiting.append(turn)
        own = None
        while own is None and (left := until - time.monotonic()) > 0:
            if self._turns()[0] is turn:
                own = self._taken(template, user)
            if own is None:
                with suppress(Empty):
                    bell.get(timeout=min(left, LOOK_SECONDS))
        self._waiting.remove(turn)
        # There may be a connection for the next waiter, too.
        self.tell_waiting()
        if own is None:
            raise NoConnectionFree(f"All {self.limit} lock connections of {self.alias!r} in use.")
        return own

    def _turns(self) -> list[tuple[Any, SimpleQueue[None]]]:
        """Return those who wait, in order, except those who were interrupted."""
        for turn in [each for each in list(self._waiting) if each[0]() is None]:
            with suppress(ValueError):
                self._waiting.remove(turn)
        return list(self._waiting)

    def give_back(self, own: Own, error: BaseException | None, *, usable: bool) -> None:
        """Keep a connection for the next borrower, or close it."""
        if usable:
            own.idle_since = monotonic()
            own.user = None
        else:
            own.user = _nobody
            if isinstance(error, DjangoDatabaseError):
                # If the server is gone, idle connections are broken as well.
                self._doom_idle()
            # In another thread, because Django's finalisers would lose a signal's exception.
            _sweeping().gone.put(None)
        self.tell_waiting()

    def close_idle(self, idle_for: float = 0.0) -> None:
        """Close the connections that were idle for so many seconds."""
        if self._pid != os.getpid():
            return  # Copies in a fork: closing them would end the parent's sessions.
        self._doom_idle(idle_for)
        self.sweep()

    def close_all(self) -> None:
        """Close all connections, waiting a second for those in use."""
        until = time.monotonic() + MAX_BOUND
        self.close_idle()
        while self._every and self._pid == os.getpid() and time.monotonic() < until:
            with suppress(Empty):
                self._freed.get(timeout=LOOK_SECONDS)
            self.close_idle()

    def sweep(self) -> None:
        """Close the connections whose borrowers are gone."""
        for own in [each for each in self._every if each.is_abandoned]:
            _close(own.connection)
            _take_apart(own.connection)
            with self._mutex:
                self._every = list(filter(lambda each: each is not own, self._every))
            self.tell_waiting()

    def finish_files(self, until: float) -> None:
        """Wait until no connection to an SQLite file is in use, or until that time."""
        while any(own.holds_file for own in [*self._every]) and time.monotonic() < until:
            with suppress(Empty):
                self._freed.get(timeout=LOOK_SECONDS)

    def look(self) -> float | None:
        """Close unneeded connections; return the seconds until the next look; None: no look."""
        left = [each for each in self._followed if each() is None]
        for each in left:
            self._followed.remove(each)
        self.close_idle(0.0 if left else settings.IDLE_SECONDS)
        with self._mutex:
            if not self._every:
                _sweeping().pools.pop(self, None)
                return None
            every = [*self._every]
        ends = [each.idle_since for each in every if each.user is None]
        since = min(ends, default=monotonic())
        return max(0.01, since + settings.IDLE_SECONDS - monotonic())

    def _doom_idle(self, idle_for: float = 0.0) -> None:
        before = monotonic() - idle_for

        def is_idle(own: Own) -> bool:
            return own.user is None and own.idle_since <= before

        with self._mutex:
            for own in filter(is_idle, self._every):
                own.user = _nobody

    def _taken(self, template: BaseDatabaseWrapper, user: Any) -> Own | None:
        own = self._chosen(template, user)
        # Checked after it was taken: a thread that forks either sees that, or is seen here.
        if own is not None and own.holds_file and _forking:
            own.user = None
            return None
        return own

    def _chosen(self, template: BaseDatabaseWrapper, user: Any) -> Own | None:
        with self._mutex:
            # There is no counter: the place of a borrower that is gone is free by itself.
            counts = not keeps_leases()
            may_be_full = counts and len(self._every) >= self.limit
            if may_be_full and sum(own.takes_place for own in self._every) >= self.limit:
                return None
            if (own := self._spare(template)) is not None:
                own.is_counted = counts
                own.user = user
                return own
            own = self._made(template, user)
            own.is_counted = counts
            self._every.append(own)
            sweeping = _sweeping()
            sweeping.pools[self] = None
        sweeping.gone.put(None)
        return own

    def _spare(self, template: BaseDatabaseWrapper) -> Own | None:
        for own in reversed(self._every):
            if own.user is None:
                # A test run renames its databases under the same alias.
                same = own.connection.settings_dict["NAME"] == template.settings_dict["NAME"]
                if same and not own.has_ended:
                    return own
                own.user = _nobody
        return None

    def _made(self, template: BaseDatabaseWrapper, user: Any) -> Own:
        made = own_connection(template, **_BOUNDS.get(template.vendor, {}))
        # One thread at a time uses it, but not always the same one.
        made.inc_thread_sharing()
        # The first free name. A connection that is left under it in a thread is replaced.
        taken = {own.name for own in self._every}
        names = (f"distlock:{self.alias}:{id(self)}:{number}" for number in range(len(taken) + 1))
        return Own(made, next(name for name in names if name not in taken), user)

    def tell_waiting(self) -> None:
        """Wake the first one who waits for a connection."""
        for _user, bell in self._turns()[:1] if self._waiting else []:
            bell.put(None)
        if self._freed.empty():
            self._freed.put(None)

    def _follow(self, raw: Any) -> None:
        # When Django closes the thread's connection, the driver's object dies, and ours are closed
        # as well. The callback is not a Python function, which could lose a signal's exception.
        # SQLite's connections allow no weak references; there ours are closed after some time.
        takes_one = raw is not None and type(raw).__weakrefoffset__ != 0
        if takes_one and all(each() is not raw for each in self._followed):
            self._followed.append(weakref.ref(raw, _sweeping().gone.put))


class _Sweeper:
    """Closes unused connections, and cuts silent ones, in a thread of its own.

    Attributes:
        gone: The queue of weak references whose objects have died; None only wakes the thread.
        pools: The pools with connections.
        watched: The uses and openings of connections that must end in time.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.gone: SimpleQueue[object] = SimpleQueue()
        self.pools: dict[LockConnections, None] = {}
        self.watched: dict[Use | _Opening, bool] = {}
        # While it sleeps, it has to be woken for each new use.
        self._sleeps = True
        self._ticks_until = 0.0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if necessary."""
        if self._thread is not None and self._thread.is_alive():
            return
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="distlock-connections", daemon=True
                )
                start_thread(self._thread)

    def watch(self, use: Use | _Opening) -> None:
        """Watch a use or an opening, and cut it if it gets no answer in time."""
        self.watched[use] = True
        if self._sleeps:
            self._sleeps = False
            self.gone.put(None)

    def _run(self) -> None:
        seconds: float | None = None
        while self._thread is threading.current_thread():
            with suppress(Empty):
                self.gone.get(timeout=seconds)
            seconds = self._look()
        # Another thread has replaced this one, and may miss what this one has taken.
        self.gone.put(None)

    def _look(self) -> float | None:
        now = time.monotonic()
        for use in list(self.watched):
            if use.is_abandoned:
                self.watched.pop(use, None)
            elif now >= use.until:
                use.cut()
        found = [pool.look() for pool in list(self.pools)]
        pause = min((each for each in found if each is not None), default=None)
        # Set before the last look, so that later uses wake the thread.
        self._sleeps = True
        if self.watched:
            self._ticks_until = now + LINGER_SECONDS
        if now >= self._ticks_until:
            return pause
        # It stays awake for a while, because waking it for each statement would cost more.
        self._sleeps = False
        return TICK_SECONDS if pause is None else min(pause, TICK_SECONDS)


class Opening:
    """A block in which a connection is opened or asked, within the time of the call.

    Args:
        seconds: The time of the block, if that is shorter.
    """

    def __init__(self, cut: Callable[[], None], seconds: float = math.inf):
        self._watched = _Opening(self, cut, seconds)

    def __enter__(self) -> None:
        if self._watched.until < math.inf:
            _sweeping().watch(self._watched)

    def __exit__(self, *_: object) -> None:
        _sweeping().watched.pop(self._watched, None)


class _Opening:
    """The part of an `Opening` that the sweeper refers to, so that it does not keep that alive."""

    def __init__(self, block: Opening, cut: Callable[[], None], seconds: float):
        self.until = durations.end(seconds)
        self._block = weakref.ref(block)
        self._cut = cut

    @property
    def is_abandoned(self) -> bool:
        """Whether the block has ended without `__exit__`."""
        return self._block() is None

    def cut(self) -> None:
        """Make the opening fail. Called in another thread."""
        if _sweeping().watched.pop(self, None):
            self._cut()


_sweeper = _Sweeper()

#: The threads that fork right now.
_forking: set[int] = set()


def _before_fork() -> None:
    """Before a fork, wait up to a second until no transaction of ours on an SQLite file is open.

    SQLite keeps its locks on files in memory of the process. A child would find the file locked for
    ever, because nothing there ends the transaction.
    """
    if _sweeper.pid == os.getpid():
        _forking.add(threading.get_ident())
        until = time.monotonic() + MAX_BOUND
        for pool in list(_sweeper.pools):
            pool.finish_files(until)


def _behind_fork() -> None:
    _forking.discard(threading.get_ident())
    for pool in list(_sweeper.pools):
        pool.tell_waiting()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_behind_fork, after_in_child=_forking.clear
    )


@atexit.register
def _close_idle() -> None:
    for pool in list(_sweeper.pools):
        pool.close_idle()


def _sweeping() -> _Sweeper:
    """Return the sweeper of this process."""
    global _sweeper  # noqa: PLW0603 - one for each process
    if _sweeper.pid != os.getpid():
        _sweeper = _Sweeper()  # A fork copies no threads.
    _sweeper.start()
    return _sweeper


#: Attributes of a connection whose values refer back to it, in Django and here.
_PARTS = (
    "client", "creation", "features", "introspection", "ops", "validation", "wrap_database_errors",
    "execute_wrappers",
)  # fmt: skip


def _take_apart(connection: BaseDatabaseWrapper) -> None:
    """Break the reference cycles of a closed connection, so that it needs no garbage collection.

    That may run in any thread, and takes long enough for a signal to arrive. Its handler would run
    inside a finaliser of Django, which loses exceptions.
    """
    for name in _PARTS:
        vars(connection).pop(name, None)


def _is_clean(connection: BaseDatabaseWrapper, error: BaseException | None) -> bool:
    """Whether a connection can be given to the next borrower."""
    if connection.connection is None:
        return False
    if not (error is None or isinstance(error, LockError | DjangoDatabaseError)):
        return False  # Interrupted in the middle of the protocol.
    if connection.in_atomic_block or not connection.autocommit:
        return False
    if connection.errors_occurred and not connection.is_usable():
        return False
    connection.errors_occurred = False
    return not has_open_transaction(connection)


def _mend(connection: BaseDatabaseWrapper, error: BaseException) -> None:
    """Close the thread's connection if an error has broken it, so that the next use reconnects.

    Not by `close_if_unusable_or_obsolete()`, which with CONN_MAX_AGE=0 would end the session of a
    healthy connection as well, and with it the caller's settings.
    """
    if isinstance(error, LockError):
        return
    if not isinstance(error, DjangoDatabaseError):
        # It was interrupted during a request, perhaps by a signal's handler, and the answer may
        # still come.
        connection.close()
    elif connection.errors_occurred:
        if connection.connection is not None and _lives(connection):
            connection.errors_occurred = False
        else:
            connection.close()


def _lives(connection: BaseDatabaseWrapper) -> bool:
    """Whether the session of the thread's connection lives; this sends a query."""
    try:
        return connection.is_usable()
    except BaseException:
        # It was interrupted by a signal, and the answer may still come.
        connection.close()
        raise


def cut(connection: BaseDatabaseWrapper) -> None:
    """Shut the socket of a connection down. Its owner gets an error, and closes it."""
    database: Any = connection.Database  # type: ignore[attr-defined]
    try:
        wire = _wire(connection)
        number = wire.fileno()
        with socket.socket(fileno=os.dup(number)) as same:
            # It is not closed yet, so the number has always been that of this connection.
            if wire.fileno() == number:
                same.shutdown(socket.SHUT_RDWR)
    except (OSError, ValueError, AttributeError, database.Error):
        pass  # It has no socket, or it is closed.


def _has_ended(connection: BaseDatabaseWrapper) -> bool:
    """Whether an idle session is over: the driver knows it, or the server has sent something."""
    raw = connection.connection
    if getattr(raw, "closed", False) or not getattr(raw, "open", True):
        return True
    database: Any = connection.Database  # type: ignore[attr-defined]
    try:
        # Polled and not read, because under gevent a read would block.
        return is_readable(_wire(connection).fileno())
    except (OSError, ValueError, AttributeError, database.Error):
        return False  # It has no socket, so the next statement will find out.


def _file_of(connection: BaseDatabaseWrapper) -> tuple[int, int] | None:
    """Return the id of the file that a new connection would open; None: there is no such file."""
    if connection.vendor != "sqlite":
        return None
    try:
        found = os.stat(connection.settings_dict["NAME"])  # noqa: PTH116 - also where it is a text
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _wire(connection: BaseDatabaseWrapper) -> Any:
    """Return an object with the file number of a connection's socket."""
    return getattr(connection.connection, "_sock", connection.connection)


def is_readable(number: int, seconds: float = 0.0, *, or_writable: bool = False) -> bool:
    """Whether a socket has something to read within so many seconds, or was closed."""
    seconds = max(0.0, seconds)
    if not hasattr(select, "poll"):
        written = [number] if or_writable else []
        return any(select.select([number], written, [], seconds))  # Windows.
    poll = select.poll()
    poll.register(number, select.POLLIN | (select.POLLOUT if or_writable else 0))
    return bool(poll.poll(math.ceil(seconds * 1000)))


def _close(connection: BaseDatabaseWrapper) -> None:
    """Close an unused connection, in any thread.

    Django's own `close()` raises in the thread of an event loop.
    """
    raw = connection.connection
    database: Any = connection.Database  # type: ignore[attr-defined]
    if raw is not None:
        with suppress(OSError, database.Error):
            raw.close()
