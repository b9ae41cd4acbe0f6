"""The leases that the current thread or task holds, by the blocks it is in."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from ..backends.base import BaseLockBackend
from ..core import durations
from ..core.errors import LockError
from ..core.keys import Key, stored_key
from ..core.records import Grant, Unknown
from . import blocks
from .acquire import insist
from .attempts import Granted, Request
from .blocks import Block
from .changing import ask_to_extend
from .lease import Lease
from .state import GONE, Holding, Terms


def current_lease(key: Key | None = None) -> Lease | None:
    """Return the lease of the innermost block around the running code, or None.

    A lease that was lost inside the block is returned as well, so that its `check()` raises
    `LockLost`.

    Args:
        key: Only consider leases on this key.
    """
    wanted = None if key is None else stored_key(key)
    leases = (each for each in blocks.around() if each.held or each.is_lost)
    return next((each for each in leases if wanted is None or each.key == wanted), None)


def entered_here() -> dict[tuple[str, str], bool]:
    """Return the keys that this thread or task holds until it leaves its blocks.

    Each comes with whether it is shared.
    """
    held = [each._holding for each in _held()]
    if not held:
        return {}
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    lasting = (each for each in held if each.lasts and each.is_entered_by(task))
    return {each.name: each.grant.shared for each in lasting}


def bind(lease: Lease) -> Block:
    """Let the current context hold a lease that somebody else will release; see `drop`."""
    block = blocks.enter(lease, lease.backend, lease.key)
    block.lease, block.release, block.inner = lease, lease._release, True
    return block


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
        lasts, ttl = kept.deadline, terms.ttl
        until = min(lasts, sent_at + wait)
        # Nothing renews it until the transaction ends, so what is left of it is not cut short.
        if ttl is not None and terms.basic and not kept.is_renewed:
            ttl = None if kept.deadline == math.inf else max(ttl, kept.deadline - sent_at)

        def question(bound: float) -> Grant | Unknown | None:
            kept.shorten(store.monotonic() + kept.counted(ttl))
            return ask_to_extend(kept, ttl, bound)

        answer = durations.spend(end, insist, store, question, until, terms.retry)
        if answer is None:
            kept.lost_by = GONE
        if not isinstance(answer, Grant):
            return None
        deadline = sent_at + kept.counted(answer.ttl)
        if store.monotonic() >= deadline:
            return None  # The answer came too late to be used.
        # The successor keeps the holder and permits of the lease. There is no window: see `adopt`.
        terms = replace(terms, ttl=ttl, holder=kept.terms.holder, permits=kept.terms.permits)
        lease = Lease(store, Granted(answer, deadline, kept.unheard), terms, block)
        lease._holding.go_on(kept, block.home, lasts)
        return lease


def _held() -> list[Lease]:
    return [each for each in blocks.around() if each.held]
