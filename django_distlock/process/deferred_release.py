"""Releases that wait for the caller's transactions to end.

A key that becomes free before the data is committed protects nothing: the next holder would read
what was there before. Django tells about a commit, and about a rollback only by dropping what was
registered; both end the wait.
"""

from __future__ import annotations

import logging
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
from ..core.interruptions import Underway
from ..core.threads import Bell, in_child
from ..database import workers
from ..database.connections import (
    before_drop,
    in_transaction,
    is_manual,
    opened_in,
    servers_isolation,
    transactions_of,
)
from ..database.workers import Gone, Worker, when_gone
from .transaction_locks import kept_by

logger = logging.getLogger("django_distlock")

#: Who waits in `async_to_sync`. Not by way of `Local.__getattr__`, which a signal's exception can
#: leave locked, for everybody.
_EXECUTORS: Any = getattr(AsyncToSync.executors, "_storage", AsyncToSync.executors)
#: Where all of that is in one variable, as in newer versions of asgiref.
_DATA: Any = getattr(_EXECUTORS, "_data", None)
_HAS_DATA = isinstance(_DATA, ContextVar)


def home() -> int:
    """Return the thread whose transactions the running code works in.

    Asynchronous code that a thread waits for in `async_to_sync` works in those of that thread. They
    are looked at from here: to ask in the thread itself would wait for whatever else it does.
    """
    # Nearly always nothing is there. To be told so by an `AttributeError` takes many times as long.
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
    """Return the connections with a transaction, other than a `TestCase`'s: see `home`.

    One that is managed by hand since the acquire counts: its hooks run as well, or are swept.

    Args:
        thread: Those that this one has opened; None: those of the running code.
    """
    if thread is None:
        return transactions_of(home())
    return [each for each in opened_in(thread) if in_transaction(each) or is_manual(each)]


def reads_a_snapshot(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction goes on seeing what was committed when it began to read."""
    level = getattr(connection, "isolation_level", None)
    if connection.vendor == "mysql":
        # What is serializable locks what it reads. Where the server does not tell, it may be this.
        return (level or servers_isolation(connection)) in ("repeatable read", "")
    if connection.vendor != "postgresql":
        return False
    if "isolation_level" not in connection.settings_dict["OPTIONS"]:
        # Django takes the server's default for READ COMMITTED.
        return servers_isolation(connection) in ("repeatable read", "serializable")
    return getattr(level, "name", "") in ("REPEATABLE_READ", "SERIALIZABLE")


class Deferred:
    """A release that waits for all transactions that are open in this thread now.

    Args:
        name: What is released: backend and key.
        owner: Who is released, for whoever goes on with it.
        release: Releases, in any thread; False: not yet, ask again.
        thread: Whose transactions they are, by `home`.
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
                # No savepoint ids: a savepoint that is rolled back does not end the transaction.
                hooks: list[Any] = connection.run_on_commit
                end = _End(self)
                # Not "robust": Django would swallow the exception of a signal that comes amid it.
                hooks.append((set(), end, False))
                self._ends.append((connection, when_gone(end, partial(self._dropped, end.claim))))
                if not (in_transaction(connection) or is_manual(connection)):
                    end.is_over = True  # It ended meanwhile, in its own thread.
            # Amid a rollback in its own thread, Django has dropped all hooks, and neither calls nor
            # drops one that is added then.
            if thread is not None or any(each.autocommit for each in transactions):
                self._poll()
            self._is_registered = True

    @property
    def waits(self) -> bool:
        """Whether the transactions will tell it of their ends; False: a signal came before."""
        return self._is_registered or bool(self._registering)

    @property
    def has_window(self) -> bool:
        """Whether its lease holds the key for a window: no other block goes on with that."""
        return bool(self.owner.terms.hold)

    @property
    def is_over(self) -> bool:
        """Whether the last of the transactions has ended."""
        if self._is_settled:
            return True
        ends = [gone() for _connection, gone in self._ends]
        return len(ends) >= self._transactions and all(end is None or end.is_over for end in ends)

    def sweep(self) -> None:
        """Release if the transactions are over, and nobody or the garbage collector tells."""
        for connection, gone in self._ends:
            end = gone()
            if end is None or end.is_over:
                continue
            if all(each[1] is not end for each in connection.run_on_commit) or not (
                connection.in_atomic_block or is_manual(connection)
            ):
                end.is_over = True
                _worker.put(self.release_if_over)

    def _poll(self) -> None:
        """Poll: Django tells of no end of a transaction that it does not know."""
        self.sweep()
        if not self.is_over:
            later(self._poll, MAX_BOUND)

    def claim(self, claim: object = True) -> bool:
        """Take the release over; False: somebody did, or it has been carried out."""
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
        """Undo a claim, behind which the transactions may have ended."""
        self.unclaim()
        if self.is_over:
            _worker.put(self.release_if_over)

    def end(self) -> None:
        """Undo a claim of what the store no longer has, and wait for no transaction any more."""
        self._transactions, self._ends = 0, []
        self.unclaim()
        self.release_if_over()

    def settle(self) -> None:
        """Say that the claimed release is needed no more."""
        _waiting.remove(self._name, self)
        # Interrupted before, it is carried out once more. Others still have it in their hands.
        self._is_settled = True
        # Nobody has to be told of their ends. They keep this, and need not keep who claimed it.
        self._ends, self._claimed_by = [], True
        self.done.ring()

    def release_if_over(self, claim: object = True) -> None:
        """Release once, when all transactions have ended."""
        if self._is_settled or not (self.is_over and self.claim(claim)):
            return
        if self._release():
            self.settle()
        else:
            # Somebody holds the record. Others shall not wait behind it.
            self.done.ring()
            self.unclaim()
            later(self.release_if_over, MAX_BOUND)

    def _dropped(self, claim: object) -> None:
        """Release if that was the last end; also what was interrupted in the midst of a release."""
        if self._claimed_by is claim:
            self.unclaim()
        self.release_if_over()


class _End:
    """Called when a transaction is committed, dropped when it is rolled back."""

    def __init__(self, deferred: Deferred):
        self.is_over = False
        #: What stands for it where it must not be kept alive.
        self.claim = object()
        self._deferred = deferred

    def __call__(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._deferred.release_if_over(self.claim)


class _Waiting(dict[tuple[str, str], list["Deferred"]]):
    """The releases that wait for transactions, by name. Nearly always there are none."""

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
        # Who was interrupted registers anew, if there is anything left to release.
        for each in those:
            if not each.waits:
                self.remove(each._name, each)
        return [each for each in those if each.waits]


_waiting = _Waiting()
_worker = workers.releases
#: A receiver may take its time: no key waits for it.
teller = Worker("distlock-signals")
before_drop.append(_worker.finish)


def defer(name: tuple[str, str], owner: Any, release: Callable[[], bool], thread: int = 0) -> bool:
    """Let `release` wait if a transaction is open in this thread; return whether it does.

    Args:
        thread: Another one, for whose transactions it waits as well; 0: none.
    """
    elsewhere = open_transactions(thread) if thread and thread != home() else []
    transactions = [*open_transactions(), *elsewhere]
    if transactions:
        Deferred(name, owner, release, transactions, thread if elsewhere else None)
    return bool(transactions)


def defer_for(
    thread: int, name: tuple[str, str], owner: Any, release: Callable[[], bool]
) -> Deferred:
    """Let `release` wait for the transactions of another thread, if there are any."""
    return Deferred(name, owner, release, open_transactions(thread), thread)


def waiting_release(name: tuple[str, str], thread: int | None = None) -> Deferred | None:
    """Return the release of this name that waits for a transaction of a thread: see `home`.

    Of several, one that another block goes on with, if there is any.
    """
    found = waiting_releases(name, thread) if _waiting else []
    return min(found, key=lambda each: each.has_window, default=None)


def waiting_releases(name: tuple[str, str], thread: int | None = None) -> list[Deferred]:
    """See `waiting_release`: of a key with permits, a transaction may keep several."""
    if not (waiting := _waiting.of(name)):
        return []
    return _of_thread(waiting, home() if thread is None else thread)


def has_waiting() -> bool:
    """Whether any release waits for a transaction."""
    return bool(_waiting.all())


def keepers(name: tuple[str, str]) -> set[int]:
    """Return the threads whose transactions keep what is called so for as long as they last."""
    kept = _waiting.of(name)
    return {each.thread for each in kept if not each.is_over and each.owner.lasts}


def kept_beside(names: Collection[tuple[str, str]], thread: int) -> str | None:
    """Return another key that the transactions of a thread keep; None: they keep none."""
    # Events wait as well. They are nobody's lease.
    leases = [each for each in _waiting.all() if each.owner is not None]
    kept = [each._name for each in _of_thread(leases, thread) if not each.is_over]
    for connection in transactions_of(thread):
        kept += [(each.backend, key) for each in kept_by(connection) for key in each.keys]
    return next((each[1] for each in kept if each not in names), None)


def _of_thread(those: list[Deferred], thread: int) -> list[Deferred]:
    """Return those of the caller's own transactions, which it sees for itself.

    A rollback drops what tells of it, but the traceback of an error may still refer to that.
    """
    own = [each for each in those if each.thread == thread]
    for each in own:
        each.sweep()
    return own


def flush(name: tuple[str, str]) -> None:
    """Wait until releases of this name, whose transactions have ended, are carried out.

    After a rollback the next acquire must not meet the lease that the rollback gave up. A store
    that hangs holds it up for a second at most.
    """
    for deferred in _named(name) if _waiting else []:
        if deferred.is_over:
            deferred.done.wait(MAX_BOUND)


def _named(name: tuple[str, str]) -> list[Deferred]:
    if waiting := _waiting.of(name):
        _of_thread(waiting, home())
    return waiting


def sweep() -> None:
    """Find the transactions that were rolled back unnoticed: something still refers to them."""
    for deferred in _waiting.all():
        deferred.sweep()


async def aflush(backend: BaseLockBackend, name: tuple[str, str]) -> None:
    """See `flush`. The event loop's thread does not wait."""
    if any(each.is_over for each in _named(name)):
        await backend.threads.run(flush, name)


def later(work: Callable[[], None], seconds: float = 0.0) -> None:
    """Let the worker do it, in some seconds."""
    _worker.start()
    _worker.put(work, seconds)


def tell_later(work: Callable[[], None]) -> None:
    """Let what others have to say to a signal take its time in a thread for that."""
    teller.start()
    teller.put(work)


def _forget_parent() -> None:
    # The parent's threads may have held the locks, and its releases are its own.
    _waiting.forget()
    _worker.forget()
    teller.forget()


in_child(_forget_parent)
