"""Which leases the current context holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar

from ..core.errors import LockError, LockUsageError
from ..core.keys import stored_key
from ..handler import lock_backends
from ..process import deferred_release
from . import blocks
from .blocks import Block
from .lease import Lease
from .state import Terms

#: The blocks around the code that runs, the innermost last. A tuple, because a context that was
#: copied for a task or a thread must not see what its original changes.
_bound: ContextVar[tuple[Block, ...]] = ContextVar("distlock_leases", default=())


def current_lease(key: str | None = None) -> Lease | None:
    """Return the lease of the innermost block around the code that runs.

    Args:
        key: Only that of this key.
    """
    wanted = None if key is None else stored_key(key)
    return next((each for each in _held() if wanted is None or each.key == wanted), None)


def holds(backend: str, key: str) -> Lease | None:
    """Return what a block around the code that runs holds of a key."""
    return next((each for each in _held() if (each.backend, each.key) == (backend, key)), None)


def entered_here() -> tuple[tuple[str, str], ...]:
    """Return what this very thread or task holds by its blocks, for as long as it is in them."""
    if not _bound.get():
        return ()
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    mine = (each for each in _held() if each.lasts and each.is_entered_by(task))
    return tuple((each.backend, each.key) for each in mine)


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


def enter(owner: object, backend: str, key: str) -> Block:
    """Return the block that `owner` enters, which the current context is in from now on."""
    block = blocks.opened(owner)
    block.enter((backend, key))
    # What a signal's exception has broken out of is left here, and not open any more.
    around = _bound.get()
    _bound.set((*(each for each in around if each.is_open), block) if around else (block,))
    return block


def bind(owner: object, lease: Lease, *, inner: bool = False) -> Lease:
    """Let the current context hold `lease` until `owner` leaves its block.

    Args:
        inner: A block around this one holds it, and releases it.
    """
    block = enter(owner, lease.backend, lease.key)
    block.lease, block.inner = lease, inner
    return lease


def unbind(owner: object, block: Block | None = None) -> tuple[Block | None, LockUsageError | None]:
    """Return the block that is left, and that the current context is in no more.

    Where another thread or task entered the block, the error says so. The block is returned with it
    if there is no doubt which one it is: its lease can still be released.

    Args:
        owner: Whose it is.
        block: The one that a statement `with` leaves; None, or not entered: the last of its owner.
    """
    held, every = _bound.get(), [block]
    if block is None or block.lease is None:
        if block is not None:
            block.close()
        every = [each for each in held if each.owner is owner and each.is_open]
        block = every[-1] if every else None
    if block in held:
        _bound.set(tuple([each for each in held if each is not block]))
        return block, None
    if block is None:
        entered = [each for each in list(blocks.every) if each.owner is owner]
        every = [each for each in entered if each.lease is not None]
    return every[0] if len(every) == 1 else None, LockUsageError(
        "This block was entered in another thread or task. Enter and leave it in one, or use"
        " acquire() and release().",
        code="foreign_context",
    )


def drop(block: Block) -> None:
    """Leave a block that got nothing, or that has ended what it had."""
    held = _bound.get()
    if block in held:
        _bound.set(tuple([each for each in held if each is not block]))
    block.close()


def adopt(backend: str, key: str, terms: Terms, wait: float | None, block: Block) -> Lease | None:
    """Return a lease that goes on with one that waits for a transaction of this thread to end.

    Args:
        wait: Seconds to keep trying where a transaction holds its record.
        block: What ends it where it does not reach who asked for it.
    """
    waiting = deferred_release.waiting_release((backend, key))
    return None if waiting is None else _adopt(waiting, terms, wait, block)


async def aadopt(
    backend: str, key: str, terms: Terms, wait: float | None, block: Block
) -> Lease | None:
    """See `adopt`."""
    waiting = deferred_release.waiting_release((backend, key))
    if waiting is None:
        return None
    store = lock_backends[backend]
    adopting = asyncio.ensure_future(store.threads.run(_adopt, waiting, terms, wait, block))
    try:
        return await asyncio.shield(adopting)
    except asyncio.CancelledError:
        adopted = await adopting
        if adopted is not None:
            await adopted.arelease()
        raise


def _adopt(
    waiting: deferred_release.Deferred, terms: Terms, wait: float | None, block: Block
) -> Lease | None:
    # Claimed first: the end of the transaction must not release what goes on.
    block.adopting = waiting
    if not waiting.claim(block):
        block.adopting = None
        return None
    adopted: Lease | None = None
    try:
        adopted = waiting.owner.adopt(terms, wait, block)
    except LockError:
        waiting.give_back()
        block.adopting = None
        raise
    if adopted is None:
        waiting.give_back()
    else:
        waiting.settle()
    block.adopting = None
    return adopted


def _held() -> Iterator[Lease]:
    # A copied context may still show what its original has released since.
    return (
        each.lease
        for each in reversed(_bound.get())
        if each.lease is not None and each.lease.held and each.is_open
    )
