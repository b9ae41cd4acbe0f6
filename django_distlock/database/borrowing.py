"""The block in which a lock statement has a connection, and what becomes of that.

A signal's handler may raise between any two steps of this, also where a block ends. So nothing of
the caller's is changed, which would have to be put back: a statement that commits by itself may run
on the thread's connection, and whatever needs a transaction has a connection of our own, under an
alias of its own. Who borrows one is told by an object that lives as long as the block does. When it
has gone, and the connection was not given back, that is closed by another thread.
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
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error as DjangoDatabaseError
from django.db.utils import OperationalError

from ..core import budgets
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

#: Seconds that a server may be silent beyond what a statement may wait for the locks of others.
ANSWER_SECONDS = 2.0

#: The same for a statement about very many rows.
LONG_SECONDS = 30.0

#: Seconds for which statements are looked at behind the last one.
LINGER_SECONDS = 2.0

#: Seconds between two looks at statements that are under way.
TICK_SECONDS = 0.25

#: Seconds after which whoever waits for a connection looks by himself: who was woken in his place
#: may have been interrupted.
LOOK_SECONDS = 0.1


#: What tells a connection of ours of a server that is not there, where the project says nothing.
_BOUNDS: Mapping[str, dict[str, Any]] = {
    "postgresql": {**KEEPALIVES, "connect_timeout": CONNECT_SECONDS},
    "mysql": {"connect_timeout": CONNECT_SECONDS},
}


class NoConnectionFree(Exception):
    """All of our connections stayed in use for as long as the caller could wait."""


class _Leaving:
    """`__exit__` of a block, which tells also of the end that is never called.

    Python takes it from here before it calls `__enter__`, and keeps it for as long as the block is
    open, where no frame of a traceback refers to it.
    """

    def __get__(self, use: Use, owner: type[Use]) -> Callable[..., None]:
        leave = partial(Use.leave, use)
        use.sweeper = _sweeping()
        use.reference = weakref.ref(leave, use.sweeper.gone.put)
        return leave


class Use:
    """A block in which a statement is run. It gives the alias to run it on.

    Args:
        bound: Seconds that a statement may wait for a lock of SQLite's; PostgreSQL is told with
            the statement.
        single: Whether it is one statement, which commits by itself.
        patience: Seconds without an answer to a statement after which the connection is cut.

    Attributes:
        was_cut: Whether it was.
        silent_for: Seconds without an answer after which it was.
        sweeper: What cuts it, and gets to know that it was left without a word.

    Raises:
        BackendUnavailable: The time of the call is over.
        LockUsageError: SQLite, and this thread's own transaction is in the way of writing.
        NoConnectionFree: All of ours were in use for a second.
    """

    sweeper: _Sweeper

    def __init__(
        self, pool: LockConnections, *, bound: float, writes: bool, single: bool, patience: float
    ):
        self.silent_for = 0.0
        self.was_cut = False
        self.until = self._since = math.inf
        self._patience = patience
        # Asked here: another thread looks whether it has come.
        self._end = budgets.end()
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
        pool.prepare()
        template = connections[pool.alias]
        if template.vendor != "sqlite":
            leave_to_parent(template)
        # An exclusive transaction of SQLite lets no other connection read, so it is asked itself.
        if (in_test_case(template) and not pool.apart) or (
            not self._writes and has_the_file(template)
        ):
            return pool.alias
        if self._may_lend(template):
            self._lent = template
            self._watch(template)
            return pool.alias
        if self._writes:
            refuse_self_block(template)
        own = self._own = pool.take(template, self.reference)
        # The ORM finds its connection by alias. This one is in no settings, and in no other thread.
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
        """Give the connection back. An error that broke it ends it."""
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
        """Wait for its answer from now on, and for so many seconds more than for others."""
        self._since = time.monotonic()
        self.until = min(self._since + self._patience + more, self._end)

    def cut(self) -> None:
        """Let the statement fail that gets no answer. In another thread, while it waits."""
        own, lent = self._own, self._lent
        connection = lent if own is None else own.connection
        if connection is None or connection.connection is None:
            # It connects, for which the driver has a bound.
            self.begin_statement()
        elif _sweeping().watched.pop(self, None) is not None:
            self.silent_for = time.monotonic() - self._since
            if own is not None:
                # Else the end of its transaction would open it anew, and wait once more.
                connection.connect = _stay_closed  # type: ignore[method-assign]
            cut(connection)

    @property
    def is_abandoned(self) -> bool:
        """Whether it was left without a word."""
        reference = self.reference
        return reference is None or reference() is None

    def _may_lend(self, template: BaseDatabaseWrapper) -> bool:
        """Whether the thread's connection may be used, with a new session where its own is over.

        Whatever the caller has set on that has gone with it, and nothing was sent on it.
        """
        until = min(self._end, time.monotonic() + MAX_BOUND)
        while self._is_free(template):
            if not _has_ended(template):
                return True
            # A word of the server may be a notification, on a session that lives.
            self._lent = template
            self._watch(template)
            lives = _lives(template)
            self._end_watch()
            self._lent, self.was_cut = None, False
            if lives or time.monotonic() >= until:
                return True
            # A pool of the project's may give another one that is over.
            template.close()
        return False

    def _is_free(self, template: BaseDatabaseWrapper) -> bool:
        if not self._single or template.connection is not None or template.in_atomic_block:
            return is_free(template, single=self._single)
        # It is opened, which takes several answers.
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
                    # Statements that the project runs at the opening may wait for a writer, too.
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
                # Past Django, whose cursors take more time than this does.
                with connection.wrap_database_errors:
                    connection.connection.cursor().execute(bound)
                own.bound = bound
        except DjangoDatabaseError as error:
            self.leave(type(error), error)
            raise

    def _writer_seconds(self) -> float:
        return max(WRITER_SECONDS, min(self._bound, self._end - time.monotonic()))


class Own:
    """A connection of our own.

    Attributes:
        name: The alias under which its borrower finds it.
        user: Tells whether its borrower is still there; None: nobody uses it.
        is_counted: Whether its present use takes one of the places.
        bound: What the session was told last of how long to wait for others.
        file: Which one of SQLite's it is open on.
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
        """Whether who has borrowed it is gone: nobody knows what its next answer would be."""
        user = self.user
        return user is not None and user() is None

    def _begin_statement(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        if (use := self.use) is not None:
            use.begin_statement()
        return execute(*arguments)

    @property
    def takes_place(self) -> bool:
        """Whether another borrower may have to wait for its end."""
        return self.is_counted and self.user is not None and not self.is_abandoned

    @property
    def has_ended(self) -> bool:
        """Whether its session is over, or others have opened another file in the place of its own.

        Who has replaced a file, such as by a backup, has not ended what is open on it.
        """
        file = _file_of(self.connection)
        return _has_ended(self.connection) or (file is not None and file != self.file)

    @property
    def holds_file(self) -> bool:
        """Whether it may have locks on an SQLite file."""
        return self.user is not None and self.connection.vendor == "sqlite"


def _standstill_of(connection: Any) -> str:
    # PostgreSQL is told with each transaction. MySQL ends what idles, in a transaction or not: ours
    # idle for shorter, or are seen to have ended.
    if connection.mysql_is_mariadb:
        idle = f"idle_transaction_timeout = {math.ceil(MAX_STANDSTILL)}"
    else:
        idle = f"wait_timeout = {math.ceil(settings.IDLE_SECONDS + 2 * MAX_STANDSTILL)}"
    # A server or a project may limit what is selected, and so hide who shares a key; or speak
    # another dialect, as that of Oracle.
    mode = "SESSION sql_mode = 'STRICT_ALL_TABLES'"
    return f"SET SESSION {idle}, SESSION sql_select_limit = {2**64 - 1}, {mode}"


def _stay_closed() -> None:
    raise OperationalError("This session was cut, because it gave no answer.")


def _nobody() -> None:
    """Be the user of a connection that is to be closed."""


class LockConnections:
    """The connections of one alias in one process.

    Args:
        limit: How many connections of our own at most, beside those that keep leases.
        apart: Stay outside of the transaction of a `TestCase` too: somebody else's sessions have
            to see what is written.
    """

    def __init__(self, alias: str, limit: int, *, apart: bool = False):
        self.alias = alias
        self.limit = limit
        self.apart = apart
        self._begin()
        close_before_drop(self)

    def _begin(self) -> None:
        # A C lock: who is interrupted in its block leaves it unlocked.
        self._mutex = threading.Lock()
        self._every: list[Own] = []
        self._freed: SimpleQueue[None] = SimpleQueue()
        #: Who waits for a connection, and what wakes them.
        self._waiting: list[tuple[Any, SimpleQueue[None]]] = []
        #: The driver's connections of threads that have borrowed: ours end with them.
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

    def prepare(self) -> None:
        """Find out what has to be known before a connection is borrowed."""

    def has_moved(self, error: BaseException) -> bool:
        """Whether a new session may reach another server, which accepts writes."""
        return False

    def take(self, template: BaseDatabaseWrapper, user: Any) -> Own:
        """Lend a connection of ours, for as long as `user` lives; or raise `NoConnectionFree`."""
        if self._pid != os.getpid():
            for each in self._every:
                keep_inherited(each.connection)
            self._begin()
        # A place in our own queue is not contention: it is waited for also with a bound of 0.
        # Whoever waits goes first: under many threads one would wait in vain.
        queue = bool(self._waiting) and not keeps_leases()
        own = None if queue else self._taken(template, user)
        if own is None:
            own = self._waited_for(template, user)
        self._follow(template.connection)
        return own

    def _waited_for(self, template: BaseDatabaseWrapper, user: Any) -> Own:
        until = budgets.end(MAX_BOUND)
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
        # There may be one for the next of them, too.
        self.tell_waiting()
        if own is None:
            raise NoConnectionFree(f"All {self.limit} lock connections of {self.alias!r} in use.")
        return own

    def _turns(self) -> list[tuple[Any, SimpleQueue[None]]]:
        """Return those who wait, the first one first, without who was interrupted."""
        for turn in [each for each in list(self._waiting) if each[0]() is None]:
            with suppress(ValueError):
                self._waiting.remove(turn)
        return list(self._waiting)

    def give_back(self, own: Own, error: BaseException | None, *, usable: bool) -> None:
        """Keep a connection for the next one, or close it."""
        if usable:
            own.idle_since = monotonic()
            own.user = None
        else:
            own.user = _nobody
            if isinstance(error, DjangoDatabaseError):
                # The server went away: those that idled meanwhile are as stale.
                self._doom_idle()
            # Not in this thread: Django's objects have finalisers, which lose a signal's exception.
            _sweeping().gone.put(None)
        self.tell_waiting()

    def close_idle(self, idle_for: float = 0.0) -> None:
        """Close the connections that nobody uses right now, and has not for so many seconds."""
        if self._pid != os.getpid():
            return  # Copied by a fork: a word on their sockets would end the parent's sessions.
        self._doom_idle(idle_for)
        self.sweep()

    def close_all(self) -> None:
        """Close our connections; wait a second for those in use."""
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
        """Wait until no connection to an SQLite file is in use: until then at the latest."""
        while any(own.holds_file for own in [*self._every]) and time.monotonic() < until:
            with suppress(Empty):
                self._freed.get(timeout=LOOK_SECONDS)

    def look(self) -> float | None:
        """Close what nobody needs any more; return when to look again, in seconds; None: never."""
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
        # Asked when it is taken: who forks looks behind that, or is seen here.
        if own is not None and own.holds_file and _forking:
            own.user = None
            return None
        return own

    def _chosen(self, template: BaseDatabaseWrapper, user: Any) -> Own | None:
        with self._mutex:
            # Never counted, but looked at: a place that is lost with its borrower is free.
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
        # Used by one thread at a time, but not by the same one every time.
        made.inc_thread_sharing()
        # The first name that none has: what is left in a thread under it is overwritten.
        taken = {own.name for own in self._every}
        names = (f"distlock:{self.alias}:{id(self)}:{number}" for number in range(len(taken) + 1))
        return Own(made, next(name for name in names if name not in taken), user)

    def tell_waiting(self) -> None:
        """Wake the first of those who wait for a connection."""
        for _user, bell in self._turns()[:1] if self._waiting else []:
            bell.put(None)
        if self._freed.empty():
            self._freed.put(None)

    def _follow(self, raw: Any) -> None:
        # When Django closes the thread's connection, its driver's object dies: ours go with it.
        # By no function of Python's, in which a signal's exception would be lost. Where a driver's
        # connections take no weak references, as SQLite's, time closes ours.
        takes_one = raw is not None and type(raw).__weakrefoffset__ != 0
        if takes_one and all(each() is not raw for each in self._followed):
            self._followed.append(weakref.ref(raw, _sweeping().gone.put))


class _Sweeper:
    """Closes connections that nobody uses any more, in a thread of its own.

    Attributes:
        gone: Takes references whose objects have died, from wherever that is, or None.
        pools: Those with connections.
        watched: What may not take for ever: the uses of connections, and what is opened.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.gone: SimpleQueue[object] = SimpleQueue()
        self.pools: dict[LockConnections, None] = {}
        self.watched: dict[Use | _Opening, bool] = {}
        # Until its first look it hears of what is watched by being woken.
        self._sleeps = True
        self._ticks_until = 0.0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="distlock-connections", daemon=True
                )
                start_thread(self._thread)

    def watch(self, use: Use | _Opening) -> None:
        """Cut what gets no answer in time."""
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
        # Another one was started in its place, which has to hear of what this one took.
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
        # Says so first: whoever comes behind this look wakes it.
        self._sleeps = True
        if self.watched:
            self._ticks_until = now + LINGER_SECONDS
        if now >= self._ticks_until:
            return pause
        # It stays awake for a while: to be woken by each statement would cost more than it does.
        self._sleeps = False
        return TICK_SECONDS if pause is None else min(pause, TICK_SECONDS)


class Opening:
    """A block in which a connection is opened, which takes several answers, until the call ends."""

    def __init__(self, cut: Callable[[], None]):
        self._watched = _Opening(self, cut)

    def __enter__(self) -> None:
        if self._watched.until < math.inf:
            _sweeping().watch(self._watched)

    def __exit__(self, *_: object) -> None:
        _sweeping().watched.pop(self._watched, None)


class _Opening:
    """What the sweeper knows of an `Opening`, which it does not keep alive: a signal may end it."""

    def __init__(self, block: Opening, cut: Callable[[], None]):
        self.until = budgets.end()
        self._block = weakref.ref(block)
        self._cut = cut

    @property
    def is_abandoned(self) -> bool:
        """Whether the block was left without its end."""
        return self._block() is None

    def cut(self) -> None:
        """Let it fail, in another thread."""
        if _sweeping().watched.pop(self, None):
            self._cut()


_sweeper = _Sweeper()

#: The threads that fork right now.
_forking: set[int] = set()


def _before_fork() -> None:
    """Let no fork come amid a transaction of ours on an SQLite file; wait a second for its end.

    SQLite notes in the process which locks it has on a file. A child would find the file locked
    for as long as it lives, because nothing in it ends the transaction.
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
    """Return what sweeps in this process."""
    global _sweeper  # noqa: PLW0603 - one for each process
    if _sweeper.pid != os.getpid():
        _sweeper = _Sweeper()  # A fork copies no threads.
    _sweeper.start()
    return _sweeper


#: What refers to the connection that has it, in Django and here.
_PARTS = (
    "client", "creation", "features", "introspection", "ops", "validation", "wrap_database_errors",
    "execute_wrappers",
)  # fmt: skip


def _take_apart(connection: BaseDatabaseWrapper) -> None:
    """Leave nothing of a connection that is closed for good to the garbage collector.

    That runs in any thread, and for so long that a signal often comes meanwhile. The first Python
    behind it would be one of Django's finalisers, in which what the signal raises is lost.
    """
    for name in _PARTS:
        vars(connection).pop(name, None)


def _is_clean(connection: BaseDatabaseWrapper, error: BaseException | None) -> bool:
    """Whether a connection of ours is as its next borrower has to find it."""
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
    """Close the thread's connection where an error broke it, so that its next statement reconnects.

    Not by `close_if_unusable_or_obsolete()`: that ends the session of a healthy connection too,
    where CONN_MAX_AGE is 0, and with it what the caller has set on it.
    """
    if isinstance(error, LockError):
        return
    if not isinstance(error, DjangoDatabaseError):
        # Interrupted in the middle of the protocol, perhaps by a signal's handler: nobody knows
        # what the next answer would be.
        connection.close()
    elif connection.errors_occurred:
        if connection.connection is not None and _lives(connection):
            connection.errors_occurred = False
        else:
            connection.close()


def _lives(connection: BaseDatabaseWrapper) -> bool:
    """Ask the thread's connection whether its session lives."""
    try:
        return connection.is_usable()
    except BaseException:
        # Interrupted by a signal: nobody knows what its next answer would be.
        connection.close()
        raise


def cut(connection: BaseDatabaseWrapper) -> None:
    """End what a connection waits for. Its owner gets an error, and closes it."""
    database: Any = connection.Database  # type: ignore[attr-defined]
    try:
        wire = _wire(connection)
        number = wire.fileno()
        with socket.socket(fileno=os.dup(number)) as same:
            # Not yet closed, so the number was no other connection's when it was copied.
            if wire.fileno() == number:
                same.shutdown(socket.SHUT_RDWR)
    except (OSError, ValueError, AttributeError, database.Error):
        pass  # It has no socket, or that is closed.


def _has_ended(connection: BaseDatabaseWrapper) -> bool:
    """Whether a session that idles is over: the driver knows it, or the server has sent a word."""
    raw = connection.connection
    if getattr(raw, "closed", False) or not getattr(raw, "open", True):
        return True
    database: Any = connection.Database  # type: ignore[attr-defined]
    try:
        # Asked for, and not read: a read waits for an answer under gevent.
        return is_readable(_wire(connection).fileno())
    except (OSError, ValueError, AttributeError, database.Error):
        return False  # It has no socket: its next statement tells.


def _file_of(connection: BaseDatabaseWrapper) -> tuple[int, int] | None:
    """Return which file a new connection would open; None: SQLite has none there, or elsewhere."""
    if connection.vendor != "sqlite":
        return None
    try:
        found = os.stat(connection.settings_dict["NAME"])  # noqa: PTH116 - also where it is a text
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _wire(connection: BaseDatabaseWrapper) -> Any:
    """Return what has the number of a connection's socket. PyMySQL shows the socket alone."""
    return getattr(connection.connection, "_sock", connection.connection)


def is_readable(number: int, seconds: float = 0.0, *, or_writable: bool = False) -> bool:
    """Whether a socket has something to read, in so many seconds, or its other end is closed."""
    seconds = max(0.0, seconds)
    if not hasattr(select, "poll"):
        written = [number] if or_writable else []
        return any(select.select([number], written, [], seconds))  # Windows.
    poll = select.poll()
    poll.register(number, select.POLLIN | (select.POLLOUT if or_writable else 0))
    return bool(poll.poll(math.ceil(seconds * 1000)))


def _close(connection: BaseDatabaseWrapper) -> None:
    """Close a connection of ours that nobody uses, in any thread.

    Django's own `close()` refuses in the thread of an event loop.
    """
    raw = connection.connection
    database: Any = connection.Database  # type: ignore[attr-defined]
    if raw is not None:
        with suppress(OSError, database.Error):
            raw.close()
