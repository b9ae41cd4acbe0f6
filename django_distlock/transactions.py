"""Releases that wait for the caller's transactions to end.

A key that becomes free before the data is committed protects nothing: the next holder would read
what was there before. Django tells about a commit, and about a rollback only by dropping what was
registered; both end the wait.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from asgiref.sync import AsyncToSync
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .backends.base import BaseLockBackend
from .connections import before_drop, in_transaction, opened_in, use_own_connections
from .core.durations import MAX_BOUND
from .core.errors import LockUsageError
from .core.logs import log_fields

logger = logging.getLogger("django_distlock")


def home() -> int:
    """Return the thread whose transactions the running code works in.

    Asynchronous code that a thread waits for in `async_to_sync` works in those of that thread. They
    are looked at from here: to ask in the thread itself would wait for whatever else it does.
    """
    executors = getattr(AsyncToSync, "executors", None)
    waiting = getattr(getattr(executors, "current", None), "_work_thread", None)
    return threading.get_ident() if waiting is None else int(waiting.ident)


def _connections() -> list[BaseDatabaseWrapper]:
    here = list(connections.all(initialized_only=True))
    thread = home()
    return here if thread == threading.get_ident() else [*here, *opened_in(thread)]


def refuse_manual_transactions() -> None:
    """Refuse where a transaction is managed by hand: nobody would tell when it ends.

    Raises:
        LockUsageError: A connection of this thread has autocommit off, outside of `atomic()`.
    """
    for connection in _connections():
        if _is_manual(connection):
            raise LockUsageError(
                f"The connection {connection.alias!r} manages its transactions by hand"
                f" (set_autocommit(False)), so nothing tells when one is committed, and the key"
                f" would be free before the data is. Use atomic().",
                code="unsupported",
            )


def open_transactions() -> list[BaseDatabaseWrapper]:
    """Return the connections with a transaction, other than a `TestCase`'s: see `home`.

    One whose autocommit was switched off behind the acquire counts: its hooks run as well.
    """
    return [each for each in _connections() if in_transaction(each) or _is_manual(each)]


def _is_manual(connection: BaseDatabaseWrapper) -> bool:
    if connection.connection is None or connection.autocommit:
        return False
    # Where autocommit was off before atomic(), that does not commit at its end.
    return not (connection.in_atomic_block and connection.commit_on_exit)


def reads_a_snapshot(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction goes on seeing what was committed when it began to read."""
    level = getattr(connection, "isolation_level", None)
    if connection.vendor == "mysql":
        # None is the server's default, which is this. What is serializable locks what it reads.
        return level in ("repeatable read", None)
    if connection.vendor != "postgresql" or level is None:
        return False
    return getattr(level, "name", "") in ("REPEATABLE_READ", "SERIALIZABLE")


class Deferred:
    """A release that waits for all transactions that are open in this thread now.

    Args:
        name: What is released: backend and key.
        owner: Who is released, for whoever goes on with it.
        release: Releases, in any thread; False: not yet, ask again.
    """

    def __init__(
        self,
        name: tuple[str, str],
        owner: Any,
        release: Callable[[], bool],
        transactions: list[BaseDatabaseWrapper],
    ):
        self.owner = owner
        self.thread = home()
        self.done = threading.Event()
        self._name = name
        self._release = release
        self._transactions = len(transactions)
        self._hooks: list[tuple[BaseDatabaseWrapper, weakref.ref[_End]]] = []
        # Filled by finalisers, which may take no lock; appending to a list needs none.
        self._ended: list[None] = []
        self._mutex = threading.Lock()
        self._claimed = False
        _waiting.add(name, self)
        _worker.start()
        for connection in transactions:
            # No savepoint ids: a savepoint that is rolled back does not end the transaction.
            # Robust: an error elsewhere must not cost the release.
            hooks: list[Any] = connection.run_on_commit
            end = _End(self)
            hooks.append((set(), end, True))
            self._hooks.append((connection, weakref.ref(end)))

    @property
    def is_over(self) -> bool:
        """Whether the last of the transactions has ended."""
        return len(self._ended) >= self._transactions

    def committed(self) -> None:
        """Release, in this thread, if that was the last of the transactions."""
        self._ended.append(None)
        self.release_if_over()

    def dropped(self) -> None:
        """Let the worker release if that was the last: any thread may run this, amid anything."""
        self._ended.append(None)
        _worker.put(self.release_if_over)

    def sweep(self) -> None:
        """Release if the transactions are over and the garbage collector is slow to tell."""
        for connection, reference in self._hooks:
            end = reference()
            if end is not None and all(each[1] is not end for each in connection.run_on_commit):
                end.drop()

    def claim(self) -> bool:
        """Take the release over; False: somebody did, or it has been carried out."""
        with self._mutex:
            claimed, self._claimed = not self._claimed, True
            return claimed

    def unclaim(self) -> None:
        """Undo a claim."""
        with self._mutex:
            self._claimed = False

    def give_back(self) -> None:
        """Undo a claim, behind which the transactions may have ended."""
        self.unclaim()
        if self.is_over:
            _worker.put(self.release_if_over)

    def settle(self) -> None:
        """Say that the claimed release is needed no more."""
        _waiting.remove(self._name, self)
        self.done.set()

    def release_if_over(self) -> None:
        """Release once, when all transactions have ended."""
        if not (self.is_over and self.claim()):
            return
        finished = True
        try:
            finished = self._release()
        except Exception:
            alias, key = self._name
            logger.exception(
                "The release of %r behind a transaction failed",
                key,
                extra=log_fields("release_failed", backend=alias, key=key),
            )
        if finished:
            self.settle()
        else:
            # Somebody holds the record. Others shall not wait behind it.
            self.done.set()
            self.unclaim()
            later(self.release_if_over, MAX_BOUND)


class _End:
    """Called when a transaction is committed, dropped when it is rolled back."""

    def __init__(self, deferred: Deferred):
        self._deferred = deferred
        self._dropped = weakref.finalize(self, deferred.dropped)
        self._dropped.atexit = False

    def __call__(self) -> None:
        if self._dropped.detach() is not None:
            self._deferred.committed()

    def drop(self) -> None:
        """Say that Django has dropped it, which a frame or a cycle may still refer to."""
        if self._dropped.detach() is not None:
            self._deferred.dropped()


class _Waiting:
    """The releases that wait for transactions, by name."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._mutex = threading.Lock()
        self._by_name: dict[tuple[str, str], list[Deferred]] = {}

    def add(self, name: tuple[str, str], deferred: Deferred) -> None:
        with self._mutex:
            self._by_name.setdefault(name, []).append(deferred)

    def remove(self, name: tuple[str, str], deferred: Deferred) -> None:
        with self._mutex:
            left = [each for each in self._by_name.pop(name, []) if each is not deferred]
            if left:
                self._by_name[name] = left

    def all(self) -> list[Deferred]:
        with self._mutex:
            return [each for deferred in self._by_name.values() for each in deferred]

    def of(self, name: tuple[str, str]) -> list[Deferred]:
        if not self._by_name:
            return []
        with self._mutex:
            return list(self._by_name.get(name, []))


class _Worker:
    """Does what finalisers may only queue, in a thread of its own.

    A simple queue, because it alone may be filled from a finaliser.
    """

    def __init__(self, name: str):
        self._name = name
        self._pid: int | None = None
        self.forget()

    def forget(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the thread where it is safe to: a finaliser may not."""
        with self._starting:
            if self._pid != os.getpid():
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._pid = os.getpid()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def finish(self) -> None:
        """Wait until what is queued has been done, for a second at most."""
        if self._pid == os.getpid():
            finished = threading.Event()
            self.put(finished.set)
            finished.wait(MAX_BOUND)

    def _run(self) -> None:
        use_own_connections()
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:
                logger.exception("What was put off failed", extra=log_fields("telling_failed"))
            finally:
                # What a signal's receiver opened here, no end of a request would ever close.
                connections.close_all()


_waiting = _Waiting()
_worker = _Worker("distlock-releases")
#: A receiver may take its time: no key waits for it.
_teller = _Worker("distlock-signals")
before_drop.append(_worker.finish)


def defer(name: tuple[str, str], owner: Any, release: Callable[[], bool]) -> bool:
    """Let `release` wait if a transaction is open in this thread; return whether it does."""
    transactions = open_transactions()
    if transactions:
        Deferred(name, owner, release, transactions)
    return bool(transactions)


def waiting_release(name: tuple[str, str]) -> Deferred | None:
    """Return the release of this name that waits for a transaction of this thread: see `home`."""
    if not (waiting := _waiting.of(name)):
        return None
    thread = home()
    return next((each for each in waiting if each.thread == thread), None)


def flush(name: tuple[str, str]) -> None:
    """Wait until releases of this name, whose transactions have ended, are carried out.

    After a rollback the next acquire must not meet the lease that the rollback gave up. A store
    that hangs holds it up for a second at most.
    """
    for deferred in _waiting.of(name):
        if deferred.is_over:
            deferred.done.wait(MAX_BOUND)


def sweep() -> None:
    """Find the transactions that were rolled back unnoticed: something still refers to them."""
    for deferred in _waiting.all():
        deferred.sweep()


async def aflush(backend: BaseLockBackend, name: tuple[str, str]) -> None:
    """See `flush`. The event loop's thread does not wait."""
    if any(each.is_over for each in _waiting.of(name)):
        await backend.run_async(flush, name)


def later(work: Callable[[], None], seconds: float = 0.0) -> None:
    """Let the worker do it, in some seconds."""
    _worker.start()
    if seconds:
        timer = threading.Timer(seconds, _worker.put, (work,))
        timer.daemon = True
        timer.start()
    else:
        _worker.put(work)


def tell_later(work: Callable[[], None]) -> None:
    """Let what others have to say to a signal take its time in a thread for that."""
    _teller.start()
    _teller.put(work)


def _forget_parent() -> None:
    # The parent's threads may have held the locks, and its releases are its own.
    _waiting.forget()
    _worker.forget()
    _teller.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
