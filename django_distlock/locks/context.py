"""The leases that the current thread or task holds, by the blocks it is in."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace

from ..backends.base import BaseLockBackend
from ..core import durations
from ..core.errors import LockError, LockUsageError
from ..core.keys import Key, stored_key
from ..core.records import Grant, Unknown
from ..process import deferred_release
from . import blocks
from .acquire import insist
from .attempts import Granted, Request
from .blocks import Block
from .changing import ask_to_extend
from .lease import Lease
from .state import GONE, Holding, Terms

#: The blocks around the running code, the innermost last. A tuple, because a task or thread with a
#: copy of the context must not see later changes of the original.
_bound: ContextVar[tuple[Block, ...]] = ContextVar("distlock_leases", default=())


def current_lease(key: Key | None = None) -> Lease | None:
    """Return the lease of the innermost block around the running code, or None.

    A lease that was lost inside the block is returned as well, so that its `check()` raises
    `LockLost`.

    Args:
        key: Only consider leases on this key.
    """
    wanted = None if key is None else stored_key(key)
    leases = (each for each in _around() if each.held or each.is_lost)
    return next((each for each in leases if wanted is None or each.key == wanted), None)


def has_blocks() -> bool:
    """Whether the running code is inside a block of any lock."""
    return bool(_bound.get())


def holds(backend: str, key: str) -> Lease | None:
    """Return the lease that an outer block holds on a key, or None."""
    for each in _around():
        # `held` costs most, so it is asked last.
        if each.key == key and each.backend == backend and each.held:
            return each
    return None


def entered_here() -> tuple[tuple[str, str], ...]:
    """Return the keys that this thread or task holds until it leaves its blocks."""
    held = [each._holding for each in _held()]
    if not held:
        return ()
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return tuple(each.name for each in held if each.lasts and each.is_entered_by(task))


def enter(owner: object, backend: str, key: str) -> Block:
    """Return the block that `owner` enters, and add it to the current context."""
    block = blocks.opened(owner)
    block.name, block.home = (backend, key), deferred_release.home()
    # Blocks that a signal's exception has broken out of are still listed, but not open.
    around = _bound.get()
    _bound.set((*(each for each in around if each.is_open), block) if around else (block,))
    return block


def bind(lease: Lease) -> Block:
    """Let the current context hold a lease that somebody else will release; see `drop`."""
    block = enter(lease, lease.backend, lease.key)
    block.lease, block.release, block.inner = lease, lease._release, True
    return block


def unbind(owner: object, block: Block | None = None) -> tuple[Block | None, LockUsageError | None]:
    """Take the block that is left out of the current context, and return it.

    If another thread or task entered the block, an error is returned that says so. The block is
    returned with it if there is no doubt which one it is, because its lease can still be released.

    Args:
        owner: The object that is left.
        block: The block of the `with` statement; None, or never entered: the owner's last one.
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
        "This block was entered in another thread or task. Enter and leave it in the same one, or"
        " use acquire() and release().",
        code="foreign_context",
    )


def drop(block: Block) -> None:
    """Close a block that holds nothing (any more), and take it out of the current context."""
    held = _bound.get()
    if block in held:
        _bound.set(tuple([each for each in held if each is not block]))
    block.close()


def adopt(store: BaseLockBackend, request: Request, terms: Terms, block: Block) -> Lease | None:
    """Take over the lease of an earlier block, kept until a transaction of this thread ends.

    Returns:
        The lease that continues it; None: there is none, it is gone from the store, or the store
        does not answer in time. The block releases a lease that does not reach the caller.
    """
    waiting = request.passed
    # Claimed first, so that the end of the transaction does not release it meanwhile.
    block.adopting = waiting
    if waiting is None or waiting.has_window or not waiting.claim(block):
        block.adopting = None
        return None
    # If this is interrupted, the transactions keep it again, also for a lease without a block.
    block.home = request.home
    wait = math.inf if request.wait is None else request.wait
    end = time.monotonic() + wait + durations.PATIENCE
    adopted: Lease | None = None
    try:
        adopted = _successor(waiting.owner, store, terms, wait, block, end)
    except LockError:
        waiting.give_back()
        block.adopting = None
        raise
    if adopted is not None:
        waiting.settle()
    elif waiting.owner.lost_by == GONE:
        durations.spend(end, waiting.end)
    else:
        waiting.give_back()
    block.adopting = None
    return adopted


async def aadopt(
    store: BaseLockBackend, request: Request, terms: Terms, block: Block
) -> Lease | None:
    """See `adopt`."""
    adopting = store.threads.submit(adopt, store, request, terms, block)
    try:
        adopted = await asyncio.shield(asyncio.wrap_future(adopting))
    except asyncio.CancelledError:
        # `threads.run` finishes the work even if the task is cancelled again.
        await store.threads.run(_end_adopted, adopting, request.home)
        raise
    if adopted is not None:
        # `adopt` ran in a thread of the backend.
        adopted._holding.thread = threading.current_thread()
    return adopted


def _end_adopted(adopting: Future[Lease | None], home: int) -> None:
    """Let the transactions keep a lease again: the task that asked for it was cancelled."""
    with suppress(LockError):
        if (adopted := adopting.result()) is not None:
            adopted._release.end_left_block(home)


def _successor(
    kept: Holding, store: BaseLockBackend, terms: Terms, wait: float, block: Block, end: float
) -> Lease | None:
    with kept.mutex:
        if kept.given_up:
            return None
        sent_at = store.monotonic()
        until = min(kept.deadline, sent_at + wait)

        def question(bound: float) -> Grant | Unknown | None:
            kept.shorten(store.monotonic() + kept.counted(terms.ttl))
            return ask_to_extend(kept, terms.ttl, bound)

        answer = durations.spend(end, insist, store, question, until, terms.retry)
        if answer is None:
            kept.lost_by = GONE
        if not isinstance(answer, Grant):
            return None
        deadline = sent_at + kept.counted(answer.ttl)
        if store.monotonic() >= deadline:
            return None  # The answer came too late to be used.
        # The successor keeps the holder and permits of the lease. There is no window: see `adopt`.
        terms = replace(terms, holder=kept.terms.holder, permits=kept.terms.permits)
        lease = Lease(store, Granted(answer, deadline, kept.unheard), terms, block)
        lease._holding.go_on(kept, block.home)
        return lease


def _held() -> list[Lease]:
    return [each for each in _around() if each.held]


def _around() -> list[Lease]:
    # A copied context may list blocks that the original has left, or is leaving right now.
    return [
        lease for block in reversed(_bound.get())
        if (lease := block.lease) is not None and block.is_open
    ]  # fmt: skip
