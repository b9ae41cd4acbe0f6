"""Which leases the current context holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from . import transactions
from .core.errors import LockUsageError
from .core.keys import normalize_key
from .handler import lock_backends
from .keeping import Terms
from .leases import Lease


class Bound(NamedTuple):
    """A block that a context is in.

    Attributes:
        owner: Whose block it is.
        lease: What it holds.
        inner: Whether a block around it holds the lease, and will release it.
    """

    owner: object
    lease: Lease
    inner: bool = False


#: What is held by blocks around the code that runs, the innermost last. A tuple, because a context
#: that was copied for a task or a thread must not see what its original changes.
_bound: ContextVar[tuple[Bound, ...]] = ContextVar("distlock_leases", default=())

#: The same by owner, whatever the context: a lease whose block is left elsewhere is not forgotten.
_entered: dict[int, list[Bound]] = {}


def current_lease(key: str | None = None) -> Lease | None:
    """Return the lease of the innermost block around the code that runs.

    Args:
        key: Only that of this key.
    """
    wanted = None if key is None else normalize_key(key)
    return next((each for each in _held() if wanted is None or each.key == wanted), None)


def holds(backend: str, key: str) -> Lease | None:
    """Return what a block around the code that runs holds of a key."""
    return next((each for each in _held() if (each.backend, each.key) == (backend, key)), None)


def refuse_reentry(backend: str, key: str) -> None:
    """Refuse a key that the current context holds: it would wait for itself.

    Raises:
        LockUsageError: A block around this one holds it.
    """
    if holds(backend, key) is not None:
        raise LockUsageError(
            f"A block around this one holds {key!r}: waiting for it would never end."
            " Use reentrant=True to enter it again, or current_lease() to work under it.",
            key=key,
            code="reentrant",
        )


def bind(owner: object, lease: Lease, *, inner: bool = False) -> Lease:
    """Let the current context hold `lease` until `owner` leaves its block.

    Args:
        inner: A block around this one holds it, and releases it.
    """
    bound = Bound(owner, lease, inner)
    _bound.set((*_bound.get(), bound))
    _entered.setdefault(id(owner), []).append(bound)
    return lease


def unbind(owner: object) -> tuple[Bound | None, LockUsageError | None]:
    """Return the block that `owner` entered last, and that the current context is in no more.

    Where another thread or task entered the block, the error says so. The block is returned with it
    if there is no doubt which one it is: its lease can still be released.
    """
    held = _bound.get()
    for index in range(len(held) - 1, -1, -1):
        if held[index].owner is owner:
            _bound.set(held[:index] + held[index + 1 :])
            _forget(owner, held[index])
            return held[index], None
    entered = _entered.get(id(owner), [])
    only = entered[0] if len(entered) == 1 else None
    if only is not None:
        _forget(owner, only)
    return only, LockUsageError(
        "This block was entered in another thread or task. Enter and leave it in one, or use"
        " acquire() and release().",
        code="foreign_context",
    )


def abandon(owner: object) -> None:
    """Let what `owner` holds end by its ttl: a signal's exception has broken into `unbind`."""
    for bound in (*_bound.get(), *_entered.get(id(owner), ())):
        if bound.owner is owner and not bound.inner:
            bound.lease._end_keeping()


def _forget(owner: object, bound: Bound) -> None:
    entered = _entered.get(id(owner), [])
    if bound in entered:
        entered.remove(bound)
    if not entered:
        _entered.pop(id(owner), None)


def adopt(backend: str, key: str, terms: Terms, wait: float | None) -> Lease | None:
    """Return a lease that goes on with one that waits for a transaction of this thread to end.

    Args:
        wait: Seconds to keep trying where a transaction holds its record.
    """
    waiting = transactions.waiting_release((backend, key))
    return None if waiting is None else _adopt(waiting, terms, wait)


async def aadopt(backend: str, key: str, terms: Terms, wait: float | None) -> Lease | None:
    """See `adopt`."""
    waiting = transactions.waiting_release((backend, key))
    if waiting is None:
        return None
    store = lock_backends[backend]
    adopting = asyncio.ensure_future(store.run_async(_adopt, waiting, terms, wait))
    try:
        return await asyncio.shield(adopting)
    except asyncio.CancelledError:
        adopted = await adopting
        if adopted is not None:
            await adopted.arelease()
        raise


def _adopt(waiting: transactions.Deferred, terms: Terms, wait: float | None) -> Lease | None:
    # Claimed first: the end of the transaction must not release what goes on.
    if not waiting.claim():
        return None
    try:
        adopted: Lease | None = waiting.owner.adopt(terms, wait)
    except BaseException:
        waiting.give_back()
        raise
    if adopted is None:
        waiting.give_back()
    else:
        waiting.settle()
    return adopted


def _held() -> Iterator[Lease]:
    # A copied context may still show what its original has released since.
    return (each.lease for each in reversed(_bound.get()) if each.lease.held)
