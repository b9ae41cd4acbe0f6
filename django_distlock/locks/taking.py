"""Acquire, enter and leave a lock: all that happens between a `Lock` and its `Lease`.

Each function exists twice, sync and async. A `Block` owns what is acquired from the first step on,
so that an exception of a signal's handler leaves nothing held: see `blocks`.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ..backends.base import BaseLockBackend
from ..core.durations import MIN_TTL, seconds, ttl_seconds
from ..core.errors import InvalidArgument, LockError, LockNotAcquired, LockUsageError, shown
from ..handler import lock_backends
from ..process import deferred_release
from ..process.host import current_holder
from ..process.transaction_locks import keeps
from . import blocks, context
from .acquire import aacquire, acquire
from .attempts import KeptHere, Request
from .blocks import Block
from .lease import Lease
from .no_lease import NoLease, tell_bypassed
from .owning import Owner, callers_level, callers_place
from .state import Terms

if TYPE_CHECKING:
    from .lock import Lock


class Unset:
    """The type of `UNSET`."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        # There is one: whatever is copied with it stays equal.
        return "UNSET"


#: Matches a field of a template.
_FIELD: Final = re.compile(r"\{[^\W\d]\w*[^{}\"']*\}")

#: The default of arguments where the setting decides, and None has a meaning of its own.
UNSET: Final = Unset()


# Without a block


def by_call(lock: Lock, wait: float | Unset | None, *, heartbeat: bool) -> Lease:
    """Acquire the key without a block: see `Lock.acquire`."""
    _check_heartbeat(lock, heartbeat)
    block = Block(lock)
    # The sentinel is on the interpreter's stack alone, where no traceback keeps it alive.
    return (block.watched(), _by_call(lock, wait, block, heartbeat=heartbeat))[1]


async def aby_call(lock: Lock, wait: float | Unset | None, *, heartbeat: bool) -> Lease:
    """See `by_call`."""
    _check_heartbeat(lock, heartbeat)
    block = Block(lock)
    return (block.watched(), await _aby_call(lock, wait, block, heartbeat=heartbeat))[1]


def _check_heartbeat(lock: Lock, heartbeat: object) -> None:
    if not isinstance(heartbeat, bool):
        raise InvalidArgument(f"heartbeat must be True or False, not {shown(heartbeat)}.")
    if heartbeat and lock.basic:
        raise InvalidArgument(
            f"acquire(heartbeat=True) renews the lease on {lock.key!r}, and a lock with basic=True"
            " has no heartbeat: leave one of them out.",
            key=lock.key,
        )


def _by_call(lock: Lock, wait: float | Unset | None, block: Block, *, heartbeat: bool) -> Lease:
    try:
        store = lock_backends[lock.backend]
        lease = _take(lock, store, wait, block, store.monotonic())
        if heartbeat or lease._holding.is_renewed:
            lease._holding.begin_block(heartbeat=True, block=Owner(lease, callers_place()))
    except LockError:
        block.close()
        raise
    # This is the last step: no signal's handler runs between here and the caller.
    del blocks.every[block]
    return lease


async def _aby_call(
    lock: Lock, wait: float | Unset | None, block: Block, *, heartbeat: bool
) -> Lease:
    try:
        store = lock_backends[lock.backend]
        lease = await _atake(lock, store, wait, block, store.monotonic())
        if heartbeat or lease._holding.is_renewed:
            lease._holding.begin_block(heartbeat=True, block=Owner(lease, callers_place()))
    except (LockError, asyncio.CancelledError):
        block.close()
        raise
    del blocks.every[block]
    return lease


# By a block


def enter(lock: Lock) -> Lease:
    """Acquire the key for the block that is entered."""
    block = blocks.enter(lock, lock.backend, lock.key)
    try:
        again = _enter_again(lock, block)
        if again is not None:
            return again
        store = lock_backends[lock.backend]
        since = store.monotonic()
        try:
            lease = _take(lock, store, lock.wait, block, since)
        except LockNotAcquired as error:
            return _bypass(lock, error, store.monotonic() - since, block)
        lease._holding.begin_block(heartbeat=lock.heartbeat, block=block)
        return lease
    except LockError:
        blocks.drop(block)
        raise


async def aenter(lock: Lock) -> Lease:
    """See `enter`."""
    block = blocks.enter(lock, lock.backend, lock.key)
    try:
        again = _enter_again(lock, block)
        if again is not None:
            return again
        store = lock_backends[lock.backend]
        since = store.monotonic()
        try:
            lease = await _atake(lock, store, lock.wait, block, since)
        except LockNotAcquired as error:
            waited = store.monotonic() - since
            return await store.threads.run(_bypass, lock, error, waited, block)
        lease._holding.begin_block(
            heartbeat=lock.heartbeat,
            task=asyncio.current_task(),
            cancels=lock.on_lost == "raise",
            block=block,
        )
        return lease
    except (LockError, asyncio.CancelledError):
        blocks.drop(block)
        raise


def leave(
    block: Block,
    lock: Lock,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Release the lease of the block that is left, unless an outer block holds it."""
    left, foreign = blocks.unbind(lock, block)
    if left is not None:
        if left.inner:
            left.release.end_inner_block(exc, raises=lock.on_lost == "raise")
        elif left.release is not None and _is_elsewhere(left, foreign):
            left.release.end_left_block(left.home)
        elif left.release is not None:
            left.release.end_block(exc, raises=lock.on_lost == "raise")
        left.close()
    if foreign is not None:
        _raise_behind(foreign, exc)


def aleave(
    block: Block,
    lock: Lock,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> Any:
    """See `leave`, and await what this returns."""
    left, foreign = blocks.unbind(lock, block)
    ending = _end_awaited(left, foreign, exc, raises=lock.on_lost == "raise")
    if left is not None:
        # The `with` statement drops what it has called, and keeps this coroutine until it is done.
        left.watch(ending)
    return ending


async def _end_awaited(
    left: Block | None,
    foreign: LockUsageError | None,
    exc: BaseException | None,
    *,
    raises: bool,
) -> None:
    if left is not None:
        if left.inner:
            left.release.end_inner_block(exc, raises=raises)
        elif left.release is not None and _is_elsewhere(left, foreign):
            await left.release.holding.store.threads.run(left.release.end_left_block, left.home)
        elif left.release is not None:
            await left.release.aend_block(exc, raises=raises)
        left.close()
    if foreign is not None:
        _raise_behind(foreign, exc)


def _is_elsewhere(left: Block, foreign: LockUsageError | None) -> bool:
    """Whether a block is left in another thread, such as a generator's that is closed there.

    The transactions that keep its key are those of its own thread.
    """
    return foreign is not None and left.home not in (0, deferred_release.home())


def _raise_behind(error: LockUsageError, body: BaseException | None) -> None:
    """Raise `error`; if the block has raised, add a note to that exception instead."""
    if body is None:
        raise error
    body.add_note(f"{type(error).__name__}: {error}")


def _enter_again(lock: Lock, block: Block) -> Lease | None:
    """Return the lease of an outer block on the same key, if this lock is reentrant."""
    around: Lease | None = blocks.holds(lock.backend, lock.key) if block.nested else None
    if around is None:
        return None
    if not lock.reentrant:
        raise LockUsageError(
            f"An outer block holds {lock.key!r}, so this would wait forever. Use reentrant=True to"
            " enter it again, or current_lease() to use its lease.",
            key=lock.key,
            code="reentrant",
        )
    if around.shared and not (lock.shared or lock.permits != 1):
        raise _upgrade(lock.key)
    block.lease, block.release, block.inner = around, around._release, True
    return around


def _bypass(lock: Lock, error: LockNotAcquired, waited: float, block: Block) -> Lease:
    """Return a `NoLease` if the block may run without a lease; otherwise raise the error."""
    if lock.on_conflict == "raise":
        raise error
    if lock.on_conflict == "run":
        tell_bypassed(lock.backend, lock.key, waited, error)
    block.lease = lease = NoLease(lock.backend, lock.key, lock.on_conflict)
    return lease


# The taking


def _take(
    lock: Lock, store: BaseLockBackend, wait: float | Unset | None, block: Block, since: float
) -> Lease:
    home = block.home or deferred_release.home()
    terms = _begin(lock, store, home)
    name = block.name = lock.backend, lock.key
    # Releases that a rollback or an interruption has left are waited for first.
    blocks.flush(name)
    kept = deferred_release.flush(name, home)
    request = _request(lock, store, terms, wait, since, home, kept)
    adopted = context.adopt(store, request, terms, block) if request.passed else None
    if adopted is not None:
        return adopted
    try:
        return Lease(store, acquire(store, request, block), terms, block)
    except KeptHere:
        # Meanwhile another block has ended, and left its lease to the transaction.
        now = store.monotonic()
        return _take(lock, store, _left(request.wait, now - since), block, now)
    except LockNotAcquired as error:
        error.lock = lock
        raise


async def _atake(
    lock: Lock, store: BaseLockBackend, wait: float | Unset | None, block: Block, since: float
) -> Lease:
    home = block.home or deferred_release.home()
    terms = _begin(lock, store, home)
    name = block.name = lock.backend, lock.key
    await blocks.aflush(store, name)
    kept = await deferred_release.aflush(store, name, home)
    request = _request(lock, store, terms, wait, since, home, kept)
    adopted = await context.aadopt(store, request, terms, block) if request.passed else None
    if adopted is not None:
        return adopted
    try:
        return Lease(store, await aacquire(store, request, block), terms, block)
    except KeptHere:
        now = store.monotonic()
        return await _atake(lock, store, _left(request.wait, now - since), block, now)
    except LockNotAcquired as error:
        error.lock = lock
        raise


def _begin(lock: Lock, store: BaseLockBackend, home: int) -> Terms:
    terms = lock._terms(store)
    name = lock.backend, lock.key
    for connection in deferred_release.managed_transactions(home):
        if keeps(connection, *name) and deferred_release.waiting_release(name, home) is None:
            raise LockUsageError(
                f"The transaction on {connection.alias!r} has locked {lock.key!r} by"
                " transaction_lock() until it ends, and a lease would wait for that. Acquire the"
                " lease outside atomic(), or rely on the transaction lock.",
                key=lock.key,
                code="self_blocked",
            )
        if deferred_release.reads_a_snapshot(connection):
            warnings.warn(
                f"The transaction on {connection.alias!r} reads from a snapshot that may be older"
                " than the lock, and may not see what the previous holder wrote. Acquire the lock"
                " outside atomic(), or use READ COMMITTED.",
                RuntimeWarning,
                stacklevel=callers_level(),
            )
    return terms


def _request(
    lock: Lock,
    store: BaseLockBackend,
    terms: Terms,
    wait: float | Unset | None,
    since: float,
    home: int,
    kept: deferred_release.Deferred | None,
) -> Request:
    if kept is not None and kept.owner.grant.shared and terms.permits == 1:
        raise _upgrade(lock.key)
    return Request(
        key=lock.key,
        ttl=terms.ttl,
        wait=store.config.wait if isinstance(wait, Unset) else wait,
        holder=terms.holder,
        retry=terms.retry,
        since=since,
        steal_if_dead=lock.steal_if_dead,
        home=home,
        inside=context.entered_here,
        passed=kept,
        permits=terms.permits,
        answered=lock._answered,
    )


def _upgrade(key: str) -> LockUsageError:
    return LockUsageError(
        f"{key!r} is shared by an outer block or transaction and cannot be locked exclusively"
        " inside it: two such holders would wait for each other. Acquire it exclusively from the"
        " start, and share it later by lease.downgrade().",
        key=key,
        code="reentrant",
    )


def _left(wait: float | None, waited: float) -> float | None:
    return None if wait is None else max(0.0, wait - waited)


# Rules that depend on settings


def terms_of(lock: Lock, store: BaseLockBackend) -> Terms:
    """Return the terms of a lease, with the settings for arguments that are left out."""
    if "{" in lock.key and not lock._filled:
        _warn_of_field(lock.key)
    ttl = lock.ttl
    if ttl is not None:
        ttl = ttl_seconds(ttl, maximum=store.config.max_ttl)
    elif not lock.basic:
        ttl = store.config.ttl
    if lock.max_lifetime is not None:
        check_lifetime(lock, ttl)
    hold = (ttl or 0.0) if lock.hold else lock.min_hold
    if hold > store.config.max_ttl:
        raise InvalidArgument(
            f"min_hold must be at most MAX_TTL ({store.config.max_ttl:g} s), not {hold:g}."
        )
    if hold and not store.supports_ttl:
        raise LockUsageError(
            f"The lock backend {lock.backend!r} ({type(store).__name__}) does not support hold"
            " or min_hold: its leases do not expire.",
            key=lock.key,
            code="unsupported",
        )
    return Terms(
        ttl=ttl,
        holder=current_holder(lock.metadata),
        retry=lock.retry or store.config.retry,
        hold=hold,
        max_lifetime=lock.max_lifetime,
        basic=lock.basic,
        permits=None if lock.shared else counted(lock),
    )


def check_lifetime(lock: Lock, ttl: float | None) -> None:
    """Refuse a `max_lifetime` below the ttl, because a lease lasts for its ttl at least."""
    lifetime = seconds(lock.max_lifetime, "max_lifetime", minimum=MIN_TTL)
    if ttl is not None and lifetime < ttl:
        raise InvalidArgument(f"max_lifetime ({lifetime:g} s) is below the ttl ({ttl:g} s).")


def counted(lock: Lock) -> int:
    """Return the number of permits; refuse a function, which needs the arguments of a call."""
    if callable(lock.permits):
        raise LockUsageError(
            f"permits of {lock.key!r} is a function of a call's arguments: it goes with decorators."
            " Give a number here.",
            key=lock.key,
            code="unsupported",
        )
    return lock.permits


def _warn_of_field(key: str) -> None:
    """Warn if the key of a block looks like a template: all blocks would share that key."""
    found = _FIELD.search(key)
    if found is not None:
        warnings.warn(
            f"The key {key!r} has {found[0]!r} in it, which is filled only where the lock is a"
            f' decorator. In a block, write an f-string: distlock(f"…").',
            RuntimeWarning,
            stacklevel=callers_level(),
        )
