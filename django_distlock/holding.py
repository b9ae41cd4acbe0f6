"""Which leases the current context holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar

from . import transactions
from .core.errors import LockUsageError
from .core.keys import normalize_key
from .leases import Lease

#: What is held by blocks around the code that runs, the innermost last. A tuple, because a context
#: that was copied for a task or a thread must not see what its original changes.
_bound: ContextVar[tuple[tuple[object, Lease], ...]] = ContextVar("distlock_leases", default=())

#: The same by owner, whatever the context: a lease whose block is left elsewhere is not forgotten.
_entered: dict[int, list[Lease]] = {}


def current_lease(key: str | None = None) -> Lease | None:
    """Return the lease of the innermost block around the code that runs.

    Args:
        key: Only that of this key.
    """
    wanted = None if key is None else normalize_key(key)
    for _owner, lease in _held():
        if wanted is None or lease.key == wanted:
            return lease
    return None


def refuse_reentry(backend: str, key: str) -> None:
    """Refuse a key that the current context holds: it would wait for itself.

    Raises:
        LockUsageError: A block around this one holds it.
    """
    for _owner, lease in _held():
        if (lease.backend, lease.key) == (backend, key):
            raise LockUsageError(
                f"A block around this one holds {key!r}: waiting for it would never end."
                " Use current_lease() to work under it.",
                key=key,
                code="reentrant",
            )


def bind(owner: object, lease: Lease) -> Lease:
    """Let the current context hold `lease` until `owner` leaves its block."""
    _bound.set((*_bound.get(), (owner, lease)))
    _entered.setdefault(id(owner), []).append(lease)
    return lease


def unbind(owner: object) -> tuple[Lease | None, LockUsageError | None]:
    """Return the lease that `owner` bound last, which the current context holds no more.

    Where another thread or task entered the block, the error says so. The lease is returned with it
    if there is no doubt which one it is: it can still be released.
    """
    bound = _bound.get()
    for index in range(len(bound) - 1, -1, -1):
        if bound[index][0] is owner:
            _bound.set(bound[:index] + bound[index + 1 :])
            lease = bound[index][1]
            _forget(owner, lease)
            return lease, None
    entered = _entered.get(id(owner), [])
    only = entered[0] if len(entered) == 1 else None
    if only is not None:
        _forget(owner, only)
    return only, LockUsageError(
        "This block was entered in another thread or task. Enter and leave it in one, or use"
        " acquire() and release().",
        code="foreign_context",
    )


def _forget(owner: object, lease: Lease) -> None:
    entered = _entered.get(id(owner), [])
    if lease in entered:
        entered.remove(lease)
    if not entered:
        _entered.pop(id(owner), None)


def adopt(backend: str, key: str, ttl: float | None, wait: float | None) -> Lease | None:
    """Return a lease that goes on with one that waits for a transaction of this thread to end.

    Args:
        wait: Seconds to keep trying where a transaction holds its record.
    """
    waiting = transactions.waiting_release((backend, key))
    # Claimed first: the end of the transaction must not release what goes on.
    if waiting is None or not waiting.claim():
        return None
    try:
        adopted: Lease | None = waiting.owner.adopt(ttl, wait)
    except BaseException:
        waiting.give_back()
        raise
    if adopted is None:
        waiting.give_back()
    else:
        waiting.settle()
    return adopted


async def aadopt(backend: str, key: str, ttl: float | None, wait: float | None) -> Lease | None:
    """See `adopt`. The transactions are those of the thread that waits for this event loop."""
    adopting = asyncio.ensure_future(
        transactions.run_where_waited_for(adopt, backend, key, ttl, wait)
    )
    try:
        return await asyncio.shield(adopting)
    except asyncio.CancelledError:
        adopted = await adopting
        if adopted is not None:
            await adopted.arelease()
        raise


def _held() -> Iterator[tuple[object, Lease]]:
    # A copied context may still show what its original has released since.
    return (each for each in reversed(_bound.get()) if each[1].held)
