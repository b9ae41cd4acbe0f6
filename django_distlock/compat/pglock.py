"""`advisory` of django-pglock, and `advisory_lock` of django-pglocks and django-pgware.

Call sites change only their import. They then hold leases in the store of the lock backend. What
differs: a lost lease raises `LockLost` at the end of its block; inside of `atomic()`, the key is
free only after the transaction; the number 5 and "5" are one key.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from copy import copy
from datetime import timedelta
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

from django.db import DEFAULT_DB_ALIAS, OperationalError, connections, transaction

from ..core.bodies import whole
from ..core.durations import seconds
from ..core.errors import LockNotAcquired, LockUsageError, shown
from ..locks.blocks import Entered, Keeping, entered_by
from ..locks.lock import Lock, distlock
from ..locks.taking import UNSET, Unset
from ..locks.transactions import transaction_lock

P = ParamSpec("P")
T = TypeVar("T")


class Return:
    """The side effect that gives the block a bool: whether the lock was acquired."""


class Raise:
    """The side effect that raises `NotAcquired` if the lock was not acquired."""


class Skip:
    """The side effect that calls the decorated function only if the lock was acquired."""


class NotAcquired(LockNotAcquired, OperationalError):
    """An advisory lock was not acquired. Code that catches django-pglock's error catches it."""


class _Entered(threading.local):
    """The contexts that this thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


def _leave(entered: Entered, lock: advisory, *end: Any) -> None:
    (entered.left() or lock._entered.stack.pop()).__exit__(*end)


class advisory:  # noqa: N801 - its name in django-pglock
    """A lock with the signature of django-pglock's, as context manager, decorator or by calls.

    Args:
        lock_id: A text or a number. None, for a decorator: the module and name of its function.
        shared: Whether other shared holders may hold the lock at the same time.
        xact: Whether the lock lasts until the transaction ends: `transaction_lock()`.
        using: The database of the transaction. Without `xact`, the lock backend names the database.
        timeout: Seconds (or a `timedelta`) to wait; 0: one attempt; None or left out: for ever,
            whatever `lock_timeout` the server has.
        side_effect: `Return` (for blocks), `Raise` or `Skip` (for functions).
        backend: An alias in `DISTLOCK`.
    """

    def __init__(
        self,
        lock_id: int | str | None = None,
        *,
        shared: bool = False,
        xact: bool = False,
        using: str = DEFAULT_DB_ALIAS,
        timeout: float | timedelta | Unset | None = UNSET,
        side_effect: Any = None,
        backend: str = "default",
    ):
        if callable(lock_id):
            raise TypeError(
                f"Lock ID {shown(lock_id)} is not a string or int. Is the decorator written without"
                " parentheses? Write @advisory()."
            )
        wait = (
            None if isinstance(timeout, Unset) or timeout is None else seconds(timeout, "timeout")
        )
        self.lock_id, self.shared, self.xact, self.using = lock_id, shared, xact, using
        self.timeout = 0 if wait is not None and wait < 0.001 else wait
        is_instance = isinstance(side_effect, (Return, Raise, Skip))
        self.side_effect = type(side_effect) if is_instance else side_effect
        self.backend = backend
        self._is_decorator = False
        self._entered = _Entered()
        if not xact:
            _require_default(using, shown(lock_id))

    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Hold the lock during each call of a function."""
        function = whole(function)
        if inspect.iscoroutinefunction(function):
            raise LockUsageError("advisory() cannot decorate a coroutine function. Use distlock().")
        lock_id = self.lock_id or f"{function.__module__}.{function.__name__}"

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
            # A copy for each call: threads must not share entered contexts.
            call = copy(self)
            call.lock_id, call._is_decorator, call._entered = lock_id, True, _Entered()
            with call as acquired:
                return function(*args, **kwargs) if acquired else None

        return wrapper

    def acquire(self) -> bool:
        """Acquire the lock, and return whether that succeeded.

        The lock is renewed until `release()`, which the same thread has to call.

        Raises:
            NotAcquired: The lock was not acquired, and the side effect is `Raise`.
            RuntimeError: `xact` outside of a transaction.
            ValueError: There is no id, or the side effect does not fit.
            TypeError: The id is neither a text nor a number.
        """

        def enter(lock: Lock) -> None:
            lock.__enter__()
            self._entered.stack.append(lock)

        return self._acquired(enter)

    def _acquired(self, enter: Callable[[Lock], object]) -> bool:
        """Acquire by `enter`, or for the transaction with `xact`; see `acquire`."""
        if not self.lock_id:
            raise ValueError("Must supply a lock ID as the first argument.")
        effect: Any = self.side_effect or (Raise if self._is_decorator else Return)
        if effect not in (Return, Raise, Skip):
            raise ValueError(f"side_effect is Return, Raise or Skip, not {shown(effect)}.")
        if effect is (Return if self._is_decorator else Skip):
            raise ValueError(
                f"{effect.__name__} is for {'blocks' if effect is Return else 'decorators'}."
            )
        key = _key(self.lock_id)
        if self.xact and not connections[self.using].in_atomic_block:
            raise RuntimeError("Must be in a transaction to use xact=True.")
        try:
            if self.xact:
                transaction_lock(
                    key,
                    shared=self.shared,
                    wait=self.timeout,
                    using=self.using,
                    backend=self.backend,
                )
                return True
            enter(_lock(key, self.shared, self.timeout, self.backend))
        except LockNotAcquired as error:
            if effect is Raise:
                raise NotAcquired(str(error), key=key, holder=error.holder) from error
            return False
        return True

    def release(self) -> None:
        """Release the lock.

        Raises:
            RuntimeError: With `xact`, only the end of the transaction releases the lock.
            LockUsageError: This thread did not acquire the lock.
            LockLost: The lease had ended before.
        """
        if self.xact:
            raise RuntimeError("Advisory locks with xact=True cannot be manually released.")
        if not self._entered.stack:
            raise LockUsageError(f"advisory({shown(self.lock_id)}) was not acquired here.")
        self._entered.stack.pop().__exit__(None, None, None)

    def __enter__(self) -> bool:
        entered = entered_by(self)
        if self.xact and connections[self.using].in_atomic_block:
            raise RuntimeError(
                "Advisory locks with xact=True cannot run inside a transaction: use"
                " advisory(…, xact=True).acquire()."
            )
        with ExitStack() as opened:
            if self.xact:
                opened.enter_context(transaction.atomic(using=self.using, durable=True))
            acquired = self._acquired(opened.enter_context)
            if entered is None:
                self._entered.stack.append(opened.pop_all())
            else:
                entered.block = opened.pop_all()
        return acquired

    __exit__ = Keeping.by(_leave)


@contextmanager
def advisory_lock(
    lock_id: str | int | tuple[int, int],
    shared: bool = False,
    wait: bool = True,
    using: str | None = None,
    *,
    comment: bool | None = None,
    backend: str = "default",
) -> Iterator[bool]:
    """Hold a lock with the signature of django-pglocks and django-pgware, and yield a bool.

    Args:
        lock_id: A text, a number, or two integers.
        shared: See `advisory`.
        wait: True: wait for ever. False: try once.
        using: The default database, or None: the lock backend names the database.
        comment: Not True: a lease has no statement for a comment.
        backend: An alias in `DISTLOCK`.
    """
    with _of_pglocks(lock_id, shared, wait, using, comment, backend) as lease:
        yield lease.held


@asynccontextmanager
async def async_advisory_lock(
    lock_id: str | int | tuple[int, int], *, shared: bool = False, wait: bool = True,
    using: str | None = None, comment: bool | None = None, backend: str = "default",
) -> AsyncIterator[bool]:  # fmt: skip
    """See `advisory_lock`."""
    async with _of_pglocks(lock_id, shared, wait, using, comment, backend) as lease:
        yield lease.held


def prioritize(*_: object, **__: object) -> NoReturn:
    """Raise `LockUsageError`: a lease is not taken from a holder that works."""
    raise LockUsageError(
        "prioritize() ends blocking sessions, and a lease has no session. To free a key, use the"
        " command distlock_release, which moves the fence first. steal_if_dead=True takes over"
        " from a holder that has died."
    )


def model(*_: object, **__: object) -> NoReturn:
    """Raise `LockUsageError`: leases lock keys, not tables."""
    raise LockUsageError(
        "model() locks tables, and leases lock keys. Keep pglock.model, or agree on a key and use"
        " transaction_lock()."
    )


def _of_pglocks(
    lock_id: object, shared: bool, wait: bool, using: str | None, comment: bool | None, backend: str
) -> Lock:
    _require_default(using or DEFAULT_DB_ALIAS, shown(lock_id))
    if comment:
        raise LockUsageError("comment=True is for SQL statements, and a lease has none. Remove it.")
    if isinstance(lock_id, (list, tuple)):
        if len(lock_id) != 2 or not all(type(each) is int for each in lock_id):
            raise ValueError(f"A pair of lock ids is two integers, not {shown(lock_id)}.")
        lock_id = f"{lock_id[0]},{lock_id[1]}"
    return _lock(_key(lock_id), shared, None if wait else 0, backend, "yield")


def _lock(
    key: str,
    shared: bool,
    wait: float | None,
    backend: str,
    on_conflict: Literal["raise", "yield"] = "raise",
) -> Lock:
    # Reentrant, as a session may acquire an advisory lock that it already holds.
    return distlock(
        key, shared=shared, wait=wait, backend=backend, reentrant=True, on_conflict=on_conflict
    )


def _key(lock_id: object) -> str:
    if isinstance(lock_id, bool) or not isinstance(lock_id, (str, int)):
        raise TypeError(f"Lock ID {shown(lock_id)} is not a string or int.")
    return str(lock_id)


def _require_default(using: str, what: str) -> None:
    if using != DEFAULT_DB_ALIAS:
        raise LockUsageError(
            f"The lock {what} cannot have using={using!r}: its lock backend names the database."
            " Choose another one with backend=."
        )
