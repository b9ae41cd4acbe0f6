"""Releases that wait for the caller's transactions to end.

If a key became free before the data is committed, the next holder would read the old data. Django
calls hooks at a commit; at a rollback it only drops them. Both lead to the release here.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import partial
from typing import Any

from asgiref.sync import AsyncToSync
from django.db.backends.base.base import BaseDatabaseWrapper

from ..backends.base import BaseLockBackend
from ..core.durations import MAX_BOUND
from ..core.errors import LockUsageError
from ..core.threads import Bell, Underway, in_child
from ..database.connections import (
    Gone,
    Worker,
    before_drop,
    in_transaction,
    is_manual,
    opened_in,
    releases,
    servers_isolation,
    transactions_of,
    when_gone,
)
from .transaction_locks import kept_by

logger = logging.getLogger("django_distlock")

#: The thread that waits in `async_to_sync`. Read without `Local.__getattr__`, because a signal's
#: exception inside that could leave its lock taken for ever.
_EXECUTORS: Any = getattr(AsyncToSync.executors, "_storage", AsyncToSync.executors)
#: Newer versions of asgiref keep it in a context variable.
_DATA: Any = getattr(_EXECUTORS, "_data", None)
_HAS_DATA = isinstance(_DATA, ContextVar)


def home() -> int:
    """Return the thread whose transactions the running code works in.

    Async code that a thread waits for in `async_to_sync` works in the transactions of that thread.
    They are inspected from here, because a question to that thread would wait for its other work.
    """
    # Nearly always nothing is there, and finding that out by an `AttributeError` is slow.
    if not (_HAS_DATA and _DATA.get(None) is None):
        waiting = getattr(getattr(_EXECUTORS, "current", None), "_work_thread", None)
        if waiting is not None:
            return int(waiting.ident)
    return threading.get_ident()


def managed_transactions(here: int) -> list[BaseDatabaseWrapper]:
    """Return the connections with a transaction by `atomic()`, other than a `TestCase`'s.

    Raises:
        LockUsageError: A connection of this thread has autocommit off, or a transaction open,
            outside of `atomic()`: nobody would tell when it ends.
    """
    found = transactions_of(here)
    for connection in found:
        if is_manual(connection):
            how = (
                "has an open transaction that Django did not start (BEGIN, or the driver's own)"
                if connection.autocommit
                else "uses manual transactions (set_autocommit(False))"
            )
            raise LockUsageError(
                f"The connection {connection.alias!r} {how}, so the commit cannot be observed, and"
                " the key would become free before the data is committed. Use atomic().",
                code="unsupported",
            )
    return found


def open_transactions(thread: int | None = None) -> list[BaseDatabaseWrapper]:
    """Return the connections with an open transaction, other than that of a `TestCase`.

    Manual transactions count, too: their hooks run as well, or are found by `sweep`.

    Args:
        thread: The thread that has opened them; None: that of the running code, by `home`.
    """
    if thread is None:
        return transactions_of(home())
    return [each for each in opened_in(thread) if in_transaction(each) or is_manual(each)]


def reads_a_snapshot(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction keeps seeing the data as of its first read."""
    level = getattr(connection, "isolation_level", None)
    if connection.vendor == "mysql":
        # SERIALIZABLE locks the rows that it reads. An unknown level may be REPEATABLE READ.
        return (level or servers_isolation(connection)) in ("repeatable read", "")
    if connection.vendor != "postgresql":
        return False
    if "isolation_level" not in connection.settings_dict["OPTIONS"]:
        # Django reports READ COMMITTED whatever the server's default is.
        return servers_isolation(connection) in ("repeatable read", "serializable")
    return getattr(level, "name", "") in ("REPEATABLE_READ", "SERIALIZABLE")


class Deferred:
    """A release that waits for all transactions that are open in a thread now.

    Args:
        name: The backend and the key.
        owner: The holding that is released; a later block may take it over.
        release: Releases, in any thread; False: not possible yet, call it again later.
        transactions: The connections with those transactions.
        thread: The thread of the transactions; None: that of `home`.
    """

    _is_registered = _is_settled = False

    def __init__(
        self,
        name: tuple[str, str],
        owner: Any,
        release: Callable[[], bool],
        transactions: list[BaseDatabaseWrapper],
        thread: int | None = None,
    ):
        self.owner = owner
        self.thread = home() if thread is None else thread
        self.done = Bell()
        self._name = name
        self._release = release
        self._transactions = len(transactions)
        self._ends: list[tuple[BaseDatabaseWrapper, Gone]] = []
        self._mutex = threading.Lock()
        self._claimed_by: object = None
        self._registering = Underway()
        with self._registering:
            _waiting.add(name, self)
            for connection in transactions:
                # Without savepoint ids: the rollback to a savepoint does not end the transaction.
                hooks: list[Any] = connection.run_on_commit
                end = _End(self)
                # Not "robust": Django would swallow the exception of a signal's handler.
                hooks.append((set(), end, False))
                self._ends.append((connection, when_gone(end, partial(self._dropped, end.claim))))
                if not (in_transaction(connection) or is_manual(connection)):
                    end.is_over = True  # It ended meanwhile, in its own thread.
            # If another thread is in the midst of a rollback, Django has dropped all hooks, and
            # neither calls nor drops one that is added now.
            if thread is not None or any(each.autocommit for each in transactions):
                self._poll()
            self._is_registered = True

    @property
    def waits(self) -> bool:
        """Whether the hooks are in place; False: a signal's exception came before that."""
        return self._is_registered or bool(self._registering)

    @property
    def has_window(self) -> bool:
        """Whether its lease has `hold` or `min_hold`, so that no later block takes it over."""
        return bool(self.owner.terms.hold)

    @property
    def is_over(self) -> bool:
        """Whether the last of the transactions has ended."""
        if self._is_settled:
            return True
        ends = [gone() for _connection, gone in self._ends]
        return len(ends) >= self._transactions and all(end is None or end.is_over for end in ends)

    def sweep(self) -> None:
        """Release if the transactions have ended without calling or dropping the hooks."""
        for connection, gone in self._ends:
            end = gone()
            if end is None or end.is_over:
                continue
            if all(each[1] is not end for each in connection.run_on_commit) or not (
                connection.in_atomic_block or is_manual(connection)
            ):
                end.is_over = True
                _worker.put(self._release_apart)

    def _poll(self) -> None:
        """Poll, because Django's hooks miss the end of a transaction that it does not manage."""
        self.sweep()
        if not self.is_over:
            later(self._poll, MAX_BOUND)

    def claim(self, claim: object = True) -> bool:
        """Take the release over; False: somebody else did, or it has been carried out."""
        with self._mutex:
            if self._claimed_by is None:
                self._claimed_by = claim
                return True
            return False

    def unclaim(self) -> None:
        """Undo a claim."""
        with self._mutex:
            self._claimed_by = None

    def give_back(self) -> None:
        """Undo a claim; the transactions may have ended meanwhile."""
        self.unclaim()
        if self.is_over:
            _worker.put(self._release_apart)

    def end(self) -> None:
        """Undo a claim, and release at once: the lease is gone from the store."""
        self._transactions, self._ends = 0, []
        self.unclaim()
        self.release_if_over()

    def settle(self) -> None:
        """Mark the claimed release as done, or as no longer needed."""
        _waiting.remove(self._name, self)
        # Set last, so that after an interruption the release is carried out once more.
        self._is_settled = True
        # The hooks refer to this object. It need not keep its claimer alive.
        self._ends, self._claimed_by = [], True
        self.done.ring()

    def release_if_over(self, claim: object = True) -> None:
        """Release once, when all transactions have ended."""
        if self._is_settled or not (self.is_over and self.claim(claim)):
            return
        if self._release():
            self.settle()
        else:
            # A transaction has locked the record. Later blocks must not wait for that.
            self.done.ring()
            self.unclaim()
            later(self._release_apart, MAX_BOUND)

    def _release_apart(self) -> None:
        apart(self._name[0], self.release_if_over)

    def _dropped(self, claim: object) -> None:
        """Handle a dropped hook: the transaction was rolled back, or its release interrupted."""
        if self._claimed_by is claim:
            self.unclaim()
        self._release_apart()


class _End:
    """The hook of one transaction: called at the commit, dropped at the rollback."""

    def __init__(self, deferred: Deferred):
        self.is_over = False
        #: Identifies it in a claim, which must not keep the hook itself alive.
        self.claim = object()
        self._deferred = deferred

    def __call__(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._deferred.release_if_over(self.claim)


class _Waiting(dict[tuple[str, str], list["Deferred"]]):
    """The releases that wait for transactions, by name. It is nearly always empty."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._mutex = threading.Lock()
        self.clear()

    def add(self, name: tuple[str, str], deferred: Deferred) -> None:
        with self._mutex:
            self.setdefault(name, []).append(deferred)

    def remove(self, name: tuple[str, str], deferred: Deferred) -> None:
        with self._mutex:
            those = self.get(name, [])
            if deferred in those:
                those.remove(deferred)
            if not those:
                self.pop(name, None)

    def all(self) -> list[Deferred]:
        with self._mutex:
            every = [each for deferred in self.values() for each in deferred]
        return self._left(every)

    def of(self, name: tuple[str, str]) -> list[Deferred]:
        with self._mutex:
            those = list(self.get(name, []))
        return self._left(those)

    def _left(self, those: list[Deferred]) -> list[Deferred]:
        # An interrupted one is registered again if there is anything left to release.
        for each in those:
            if not each.waits:
                self.remove(each._name, each)
        return [each for each in those if each.waits]


_waiting = _Waiting()
_worker = releases
#: Calls receivers of signals, which may be slow, apart from the releases.
teller = Worker("distlock-signals")
before_drop.append(_worker.finish)


def defer(name: tuple[str, str], owner: Any, release: Callable[[], bool], thread: int = 0) -> bool:
    """Defer `release` if a transaction is open in this thread; return whether it was deferred.

    Args:
        thread: Another thread whose transactions count as well; 0: none.
    """
    elsewhere = open_transactions(thread) if thread and thread != home() else []
    transactions = [*open_transactions(), *elsewhere]
    if transactions:
        Deferred(name, owner, release, transactions, thread if elsewhere else None)
    return bool(transactions)


def defer_for(
    thread: int, name: tuple[str, str], owner: Any, release: Callable[[], bool]
) -> Deferred:
    """Defer `release` until the open transactions of another thread have ended, if any."""
    return Deferred(name, owner, release, open_transactions(thread), thread)


def waiting_release(name: tuple[str, str], thread: int | None = None) -> Deferred | None:
    """Return the release of this name that waits for a transaction of a thread (default: `home`).

    If there are several, one that a later block can take over is preferred.
    """
    found = waiting_releases(name, thread) if _waiting else []
    return min(found, key=lambda each: each.has_window, default=None)


def waiting_releases(name: tuple[str, str], thread: int | None = None) -> list[Deferred]:
    """Return all of them: with permits, a transaction may keep several; see `waiting_release`."""
    if not (waiting := _waiting.of(name)):
        return []
    return _of_thread(waiting, home() if thread is None else thread)


def has_waiting() -> bool:
    """Whether any release waits for a transaction."""
    return bool(_waiting.all())


def kept_by_thread(name: tuple[str, str], thread: int) -> list[bool]:
    """Return whether each lease on this key is shared that a thread's transactions keep."""
    kept = (each for each in _waiting.of(name) if each.thread == thread)
    return [each.owner.grant.shared for each in kept if not each.is_over and each.owner.lasts]


def kept_beside(names: Collection[tuple[str, str]], thread: int) -> str | None:
    """Return a key outside `names` that the transactions of a thread keep; None: there is none."""
    # Events are deferred as well, without an owner.
    leases = [each for each in _waiting.all() if each.owner is not None]
    kept = [each._name for each in _of_thread(leases, thread) if not each.is_over]
    for connection in transactions_of(thread):
        kept += [(each.backend, key) for each in kept_by(connection) for key in each.keys]
    return next((each[1] for each in kept if each not in names), None)


def _of_thread(those: list[Deferred], thread: int) -> list[Deferred]:
    """Return those of one thread, after a look whether its transactions have ended.

    A rollback drops the hook, but the traceback of an error may still keep it alive.
    """
    own = [each for each in those if each.thread == thread]
    for each in own:
        each.sweep()
    return own


def flush(name: tuple[str, str], thread: int | None = None) -> Deferred | None:
    """Wait until releases of this name whose transactions have ended are carried out.

    After a rollback, the next acquire must not be refused for a lease that the rollback released.
    It waits for `MAX_BOUND` seconds at most.

    Args:
        thread: The thread of the transactions; None: that of `home`.

    Returns:
        The release that still waits: see `waiting_release`.
    """
    if not _waiting:
        return None
    for deferred in _named(name):
        if deferred.is_over:
            deferred.done.wait(MAX_BOUND)
    return waiting_release(name, thread)


def _named(name: tuple[str, str]) -> list[Deferred]:
    if waiting := _waiting.of(name):
        _of_thread(waiting, home())
    return waiting


def sweep() -> None:
    """Find transactions that were rolled back while something keeps their hooks alive."""
    for deferred in _waiting.all():
        deferred.sweep()


async def aflush(
    backend: BaseLockBackend, name: tuple[str, str], thread: int | None = None
) -> Deferred | None:
    """See `flush`; the event loop does not block."""
    if any(each.is_over for each in _named(name)):
        await backend.threads.run(flush, name)
    return waiting_release(name, thread)


def later(work: Callable[[], object], seconds: float = 0.0) -> None:
    """Let the worker's thread do something, after some seconds."""
    _worker.start()
    _worker.put(work, seconds)


def apart(backend: str, work: Callable[[], None], most: float = math.inf) -> bool:
    """Do work of the worker in the thread of a backend: see `Releases.apart`."""
    return _worker.apart(backend, work, most)


def tell_later(work: Callable[[], None]) -> None:
    """Send a signal in a thread for that, because its receivers may be slow."""
    teller.start()
    teller.put(work)


def _forget_parent() -> None:
    # The parent's threads may have held these mutexes, and its releases are not the child's.
    _waiting.forget()
    _worker.forget()
    teller.forget()


in_child(_forget_parent)
