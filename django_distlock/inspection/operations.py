"""The operations of an operator on a key. Each is reported and recorded with its actor and reason.

All take `actor`, `reason` and `fence` as `force_release` does; an optional reason may be "".
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ..backends.base import BaseLockBackend
from ..core.documents import Document
from ..core.durations import Duration, seconds
from ..core.errors import InvalidArgument, LockError, LockUsageError, shown
from ..core.keys import stored_key
from ..core.records import Contended, Record, Session
from ..handler import lock_backends
from .held import HeldKey
from .journal import Operation, Order

#: The longest time that may be given in seconds: ten years.
MAX_SPAN = 10 * 366 * 24 * 3600.0


class Result(enum.StrEnum):
    """The result of an operation, in a word.

    `NOTHING`: there was nothing to change: the key was not held, or not with the expected fence,
    it was not paused, no record had expired. `BUSY`: a transaction is in the way, and nothing was
    changed; of a key that several share, the lease of a holder was left.
    """

    DONE = "done"
    NOTHING = "nothing"
    BUSY = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Document):
    """The outcome of an operation on a key, or of a cleanup.

    Attributes:
        key: The key, normalised; "" for a cleanup.
        held: The lock: as it was when it was force-released, else as it is now, which may be
            another holder's than expected; None: the key was not held, or was not looked up.
        fence_before: The key's fence before; None: not known, or the key was never granted.
        fence_after: The key's fence after. Only a force-release, or a grant that came right after,
            makes it higher.
        sessions: Busy: those whose transactions are in the way; (): they have ended meanwhile, or
            something else was in the way; None: the store cannot tell.
        removed: How many records a cleanup has removed.
    """

    operation: Operation
    backend: str
    key: str
    result: Result
    held: HeldKey | None = None
    fence_before: int | None = None
    fence_after: int | None = None
    sessions: tuple[Session, ...] | None = ()
    removed: int = 0

    @property
    def is_done(self) -> bool:
        """Whether something was changed."""
        return self.result is Result.DONE

    @property
    def is_busy(self) -> bool:
        """Whether a transaction was in the way."""
        return self.result is Result.BUSY


def force_release(
    key: str, *, backend: str = "default", fence: int | None = None, actor: Any, reason: str
) -> Outcome:
    """Force-release a key: raise its fence first, then remove its record.

    While a guarded transaction of the holder is open, nothing is changed. The outcome is busy
    without a wait, and names the sessions that hold the guard.

    Args:
        fence: The fence of the expected holder (`HeldKey.fence`), which the store compares in the
            same step: if another holder has the key by then, nothing is done, and `held` of the
            outcome shows that holder. None: any holder.
        actor: Who does it: a user of the project, or a text of 1 to 200 characters.
        reason: Why, in 1 to 200 characters.

    Raises:
        InvalidArgument: An argument breaks a rule.
        InvalidLockBackend: There is no such backend.
        BackendUnavailable: The store is unavailable. The key may have been released.
    """
    order = Order(Operation.FORCE_RELEASE, actor, reason)
    return _on_holder(
        order, backend, key, fence, lambda store, seen: store.force_release(key, fence=seen)
    )


def expire_soon(
    key: str,
    within: Duration,
    *,
    backend: str = "default",
    fence: int | None = None,
    actor: Any,
    reason: str = "",
) -> Outcome:
    """Allow renewals of a lease for these seconds at most; the lease never gets longer.

    This requests a stop: the holder sees `stop_requested` at its next heartbeat, and loses its
    lease at the first heartbeat after that time. Nobody else is granted the key before the holder
    must have noticed: the key is free when the holder releases it, or when its last renewal has
    expired (`outcome.held.free_at`). A `min_hold` still counts from then on; shorten that, too. To
    free the key immediately, use `force_release`.

    Args:
        within: Seconds, or a `timedelta`.

    Raises:
        LockUsageError: The lease has no expiry, or leases of this backend do not end at a time.
    """
    order, left = Order(Operation.EXPIRE_SOON, actor, reason), seconds(within, "within")

    def shorten(store: BaseLockBackend, seen: int | None) -> Record | Contended | None:
        record = store.request_stop(key, left, fence=seen)
        if isinstance(record, Record) and record.expires_at is None:
            raise LockUsageError(
                f"The lease on {key!r} has no expiry, so it cannot be shortened. Request a stop,"
                " or force-release the key.",
                key=key,
                code="unsupported",
            )
        return record

    return _on_holder(order, backend, key, fence, shorten, {"within": left})


def request_stop(
    key: str, *, backend: str = "default", fence: int | None = None, actor: Any, reason: str = ""
) -> Outcome:
    """Request a stop: the holder sees `stop_requested` at its next heartbeat or extend."""
    order = Order(Operation.REQUEST_STOP, actor, reason)
    return _on_holder(
        order, backend, key, fence, lambda store, seen: store.request_stop(key, fence=seen)
    )


def pause(
    key: str, until: datetime | Duration, *, backend: str = "default", actor: Any, reason: str = ""
) -> Outcome:
    """Pause a key: until a time, it is granted to nobody. A holder keeps its lease.

    Args:
        until: An aware datetime, or seconds (or a `timedelta`) from now, by the store's clock.
    """
    order, store = Order(Operation.PAUSE, actor, reason), lock_backends[backend]
    key = stored_key(key)
    end = _end_of_pause(until, store.clock())
    answer = store.pause(key, end, by=order.by)
    return _about_pause(order, store, key, answer, {"until": end.isoformat()})


def resume(key: str, *, backend: str = "default", actor: Any, reason: str = "") -> Outcome:
    """End the pause of a key. `Result.NOTHING`: it was not paused."""
    order, store = Order(Operation.RESUME, actor, reason), lock_backends[backend]
    key = stored_key(key)
    return _about_pause(order, store, key, store.pause(key, None))


def cleanup(
    *,
    backend: str = "default",
    older_than: Duration = 0,
    batch: int = 1000,
    actor: Any,
    reason: str = "",
    progress: Callable[[int], object] = lambda removed: None,
) -> Outcome:
    """Remove the records of ended leases, batch by batch, but never a fence counter.

    Args:
        older_than: Only of leases that ended at least these seconds ago, by the store's clock.
        batch: Records per transaction, from 1 to 100 000.
        progress: Called after each batch with the number of records removed so far.
    """
    order, store = Order(Operation.CLEANUP, actor, reason), lock_backends[backend]
    age = timedelta(seconds=seconds(older_than, "older_than", maximum=MAX_SPAN))
    before = store.clock() - age
    removed = 0
    try:
        while gone := store.cleanup(before, batch):
            removed += gone
            progress(removed)
    finally:
        # Also after an error: some batches may have been removed before it.
        if removed:
            details = {"removed": removed, "before": before.isoformat()}
            order.record(store, "", details=details)
    outcome = _nothing(order, store, "", None)
    return replace(outcome, result=Result.DONE, removed=removed) if removed else outcome


def _on_holder(
    order: Order,
    backend: str,
    key: str,
    seen: int | None,
    act: Callable[[BaseLockBackend, int | None], Record | Contended | None],
    details: dict[str, Any] | None = None,
) -> Outcome:
    """Do something to a held key, and return the outcome."""
    key, store = stored_key(key), lock_backends[backend]
    # Before the change: an unavailable store gets no request for one.
    now = store.clock()
    fences: list[int | None] = [seen]
    if seen is None and (sharing := store.records.sharing(key)):
        # Each is recorded, even if the next one fails. Leases that cannot be shortened come last.
        fences = [each.fence for each in sorted(sharing, key=lambda each: each.expires_at is None)]
    done: Record | None = None
    is_busy = False
    for each in fences:
        answer = act(store, each)
        is_busy = is_busy or isinstance(answer, Contended)
        if isinstance(answer, Record):
            done = answer
            order.record(store, key, fence=done.fence, holder=done.holder, details=details)
    outcome = _nothing(order, store, key, _fence(store, key))
    if is_busy:
        sessions = _sessions(store, key)
        return replace(outcome, result=Result.BUSY, held=_held(store, key, now), sessions=sessions)
    if done is not None:
        held = HeldKey.of(store, done, now)
        return replace(outcome, result=Result.DONE, held=held, fence_before=done.fence)
    return replace(outcome, held=None if seen is None else _held(store, key, now))


def _about_pause(
    order: Order,
    store: BaseLockBackend,
    key: str,
    answer: bool | Contended,
    details: dict[str, Any] | None = None,
) -> Outcome:
    """Return the outcome of a pause, or of its end."""
    outcome = _nothing(order, store, key, _fence(store, key))
    if isinstance(answer, Contended):
        return replace(outcome, result=Result.BUSY, sessions=_sessions(store, key))
    if not answer:
        return outcome
    order.record(store, key, fence=outcome.fence_after, details=details)
    return replace(outcome, result=Result.DONE)


def _nothing(order: Order, store: BaseLockBackend, key: str, fence: int | None) -> Outcome:
    return Outcome(
        operation=order.operation,
        backend=store.alias,
        key=key,
        result=Result.NOTHING,
        fence_before=fence,
        fence_after=fence,
    )


# Look-ups after an operation. They may fail, because the result is known without them.


def _fence(store: BaseLockBackend, key: str) -> int | None:
    with suppress(LockError):
        counter = store.counter(key)
        return None if counter is None else counter.fence or None
    return None


def _held(store: BaseLockBackend, key: str, now: datetime) -> HeldKey | None:
    with suppress(LockError):
        record = store.read(key)
        return None if record is None else HeldKey.of(store, record, now)
    return None


def _sessions(store: BaseLockBackend, key: str) -> tuple[Session, ...] | None:
    with suppress(LockError):
        return store.guards.sessions(key)
    return None


def _end_of_pause(until: datetime | Duration, now: datetime) -> datetime:
    if not isinstance(until, datetime):
        return now + timedelta(seconds=seconds(until, "until", maximum=MAX_SPAN))
    if until.utcoffset() is None:
        raise InvalidArgument(f"until must be an aware datetime, not {shown(until)}.")
    if until <= now:
        raise InvalidArgument(
            f"until must be in the future. The store's time is {now.astimezone(UTC).isoformat()}."
        )
    return until
