"""Claims: leases that queued tasks hold. They belong to no process until a run takes them over.

Of many calls of a debounced task, the arguments of the last one run. The number of a call is the
fence of its claim. A separate counter holds twice the highest number whose message is in the
broker, plus one after its run has begun. See docs/decisions/the-last-of-many-calls.md.

Functions that use a store raise `BackendUnavailable`, also if a transaction is in the way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from celery.utils.time import maybe_iso8601, maybe_make_aware

from ...backends.base import BaseLockBackend
from ...core.clock import monotonic
from ...core.errors import BackendUnavailable, LockError, LockNotAcquired
from ...core.keys import OWN_MARKER, UNIQUE_PREFIX, new_token, own_key
from ...core.logs import log_fields
from ...core.records import UNKNOWN, Grant, Record
from ...database.connections import Gone, when_gone
from ...handler import lock_backends
from ...locks import taking
from ...locks.attempts import Granted, release_unanswered
from ...locks.lease import Lease
from ...locks.state import Terms as Kept
from ...process import deferred_release
from ...signals import lock_acquired, tell
from ..jobs import WAIT, JobLock
from .deliveries import KEY, OF
from .terms import Terms

logger = logging.getLogger("django_distlock")

#: The prefix of the counters. These keys are never held.
_PREFIX: Final = f"{OWN_MARKER}calls:"
#: By token, a reference that releases the claim if its sender was interrupted.
_unsent: dict[str, Gone] = {}


class Claim:
    """The claim of a call about to be queued; released if garbage-collected before `publish`."""

    def __init__(self, lock: JobLock, grant: Grant):
        self.lock, self.grant = lock, grant
        _unsent[grant.token] = when_gone(self, partial(_give_up, lock, grant))


def reserve(
    lock: JobLock,
    terms: Terms,
    delay: float,
    unique_ttl: float | None,
    instead_of: Record | Grant | None = None,
) -> Claim:
    """Acquire a claim for a call that is about to be queued by `publish`.

    Args:
        delay: Seconds until it may begin.
        unique_ttl: Seconds that it keeps the claim after the delay; None: those of the terms.
        instead_of: The claim to replace; None: acquire a free one.

    Raises:
        LockNotAcquired: The key is held, or the claim to replace has ended.
        LockError: Leases of this store cannot be taken over by another process.
    """
    store = lock_backends[lock.backend]
    lock = replace(
        lock,
        ttl=queue_ttl(terms, store.config.max_ttl, delay, unique_ttl),
        hold=False,
        min_hold=0.0,
        basic=False,
        max_lifetime=None,
        is_queued=True,
    )
    if instead_of is not None:
        lease = replace_one(lock, instead_of)
    elif terms.debounce:
        lease = replace_any(lock)
    else:
        lease = lock.acquire()
    try:
        if lease._holding.goes_on:
            # A transaction has kept the lease of an ended run, with that run as the holder.
            ended, lease = lease, replace_one(lock, lease._holding.grant)
            ended._let_go()
        grant = lease._holding.grant
        lease._let_go()
        return Claim(lock, grant)
    except LockError:
        lease.release()
        raise
    except BaseException:
        # A signal's handler raised, maybe after `_let_go`. A transaction still keeps its own lease.
        if not lease._holding.goes_on:
            give_back(lock, lease._holding.grant)
        raise


def replace_any(lock: JobLock) -> Lease:
    """Acquire a claim, or replace that of the previous call, so that one call is the last."""
    store = lock_backends[lock.backend]
    until = monotonic() + WAIT
    while True:
        record = store.read(lock.key)
        try:
            return lock.acquire() if record is None else replace_one(lock, record)
        except LockNotAcquired:
            counter = store.counter(lock.key)
            is_paused = counter is not None and counter.paused_until is not None
            # If the key is not paused, another caller was faster: try again.
            if is_paused or monotonic() >= until:
                raise


def replace_one(lock: JobLock, record: Record | Grant) -> Lease:
    """Acquire a key by replacing a lease; `LockNotAcquired`: that lease has ended."""
    store = lock_backends[lock.backend]
    kept, token, permits = lock._terms(store), new_token(), taking.counted(lock)
    sent_at = store.monotonic()
    try:
        answer = store.acquire(
            lock.key, token, kept.ttl, kept.holder, replace=record.token, permits=permits
        )
        if isinstance(answer, Grant):
            tell(
                lock_acquired,
                type(store),
                alias=lock.backend,
                key=lock.key,
                fence=answer.fence,
                holder=kept.holder,
                waited=store.monotonic() - sent_at,
            )
            return lease_of(store, answer, sent_at, kept)
    except BaseException:
        # The key may have been granted: the answer was lost, or a signal's handler raised.
        at, shared = datetime.now(UTC), permits != 1
        release_unanswered(store, Grant(lock.key, token, 1, kept.ttl, at, None, shared=shared))
        raise
    raise LockNotAcquired(
        f"{lock.key!r} was taken by somebody else.", key=lock.key, holder=answer.holder
    )


def with_claim(
    options: dict[str, Any], header: str, fence: int, lock: JobLock | Lease, task_id: str | None
) -> dict[str, Any]:
    """Return a message's options with the fence and key of a claim or place added as headers."""
    own = {header: f"{fence:015d}", header + KEY: name_of(lock.key), OF: task_id}
    return {**options, "headers": {**(options.get("headers") or {}), **own}}


def name_of(key: str) -> str:
    """Return what `own_key` makes this key of: brokers may take no more than ASCII."""
    return key.removeprefix(OWN_MARKER)


def publish(send: Callable[..., Any], header: str, claim: Claim, options: dict[str, Any]) -> Any:
    """Queue a task with a claim, which is released if that fails."""
    try:
        lock = claim.lock
        return send(**with_claim(options, header, claim.grant.fence, lock, lock.task_id))
    except BaseException:
        give_back(claim.lock, claim.grant)
        raise
    finally:
        del _unsent[claim.grant.token]


def _give_up(lock: JobLock, grant: Grant) -> None:
    if _unsent.pop(grant.token, None) is not None:
        deferred_release.apart(lock.backend, partial(give_back, lock, grant))


def give_back(lock: JobLock, grant: Grant) -> None:
    """Release the claim of a task that was not queued."""
    try:
        lock_backends[lock.backend].release(grant)
    except LockError as error:
        extra = log_fields("release_failed", backend=lock.backend, key=lock.key, error=error)
        logger.warning(
            "%r stays held, and its task was not queued: %s", lock.key, error, extra=extra
        )


def lease_of(store: BaseLockBackend, grant: Grant, sent_at: float, kept: Kept) -> Lease:
    """Return the lease of a grant whose request was sent at `sent_at`."""
    deadline = math.inf if grant.ttl is None else sent_at + grant.ttl
    waited = store.monotonic() - sent_at
    return Lease(store, Granted(grant, deadline, waited=waited), kept)


def queue_ttl(terms: Terms, longest: float, delay: float, unique_ttl: float | None = None) -> float:
    """Return the seconds for which a queued task keeps a claim; see `reserve`."""
    usual = max(terms.queued_for, terms.rules.lock.ttl or 0.0)
    return min(longest, (usual if unique_ttl is None else unique_ttl) + max(0.0, delay))


def seconds_until(when: object) -> float:
    """Return the seconds until a time; a number is returned as it is."""
    if isinstance(when, int | float):
        return float(when)
    if not when:
        return 0.0
    at = maybe_make_aware(maybe_iso8601(when))
    return float((at - datetime.now(UTC)).total_seconds())


def is_overtaken(lock: JobLock, grant: Grant) -> bool:
    """Note that the message of a call is in the broker; return whether a later call has begun.

    If so, that run may have begun before this call was made, and the message of this call would
    give way to it. So the call has to be sent again.
    """
    store, name = lock_backends[lock.backend], _name(lock)
    if _raise(store, name, 2 * grant.fence):
        return False
    newest = _newest(store, name)
    if newest % 2 == 0 or newest <= 2 * grant.fence + 1:
        return False
    # If the store has lost the fences but not this counter, later fences start above it.
    store.release(grant)
    store.raise_fences(newest // 2, key=lock.key)
    return True


def is_replaced(lock: JobLock, number: int) -> bool:
    """Whether a later call was sent or has begun, so that this one has nothing to do."""
    store = lock_backends[lock.backend]
    record = store.read(lock.key)
    # The claim is still that of this call, even if an operator has raised the counters.
    is_last = record is not None and record.fence == number
    return not is_last and _newest(store, _name(lock)) > 2 * number + 1


def begin(lock: JobLock, number: int) -> bool:
    """Note that the run of a call begins; False: a later call was sent meanwhile."""
    if is_replaced(lock, number):
        return False
    store = lock_backends[lock.backend]
    _raise(store, _name(lock), 2 * number + 1)
    free(lock, number)
    return True


def free(lock: JobLock, fence: int) -> None:
    """Release a message's claim if the key is still held with that fence by that task."""
    store = lock_backends[lock.backend]
    record = _record_of(store, lock, fence)
    if record is not None:
        release(store, record)


def extend(store: BaseLockBackend, kept: Sequence[tuple[JobLock, int]], ttl: float) -> bool:
    """Extend a message's claims, given with their fences; return False if one could not be."""
    found = [_record_of(store, lock, fence) for lock, fence in kept]
    grants = [
        # A call may have asked for a longer time than the others.
        replace(each.grant, ttl=max(ttl, each.ttl or 0.0))
        for each in found
        if each is not None
    ]
    return UNKNOWN not in store.extend_many(grants)


def _record_of(store: BaseLockBackend, lock: JobLock, fence: int) -> Record | None:
    claims = (
        each
        for each in records_of(store, lock.key)
        if (each.fence, each.holder.task_id) == (fence, lock.task_id)
    )
    return next(claims, None)


def release(store: BaseLockBackend, claim: Record) -> None:
    """Release a claim; see `free`."""
    if store.release(claim.grant) is UNKNOWN:
        raise BackendUnavailable(
            f"The claim {claim.key!r} was not released: a transaction has locked its row.",
            key=claim.key,
        )


def records_of(store: BaseLockBackend, key: str) -> Sequence[Record]:
    """Return the records of all holders of a key."""
    record = store.read(key)
    if record is None:
        return ()
    return store.records.sharing(key) if record.shared else (record,)


def _name(lock: JobLock) -> str:
    return own_key(_PREFIX + lock.key.removeprefix(UNIQUE_PREFIX))


def _newest(store: BaseLockBackend, name: str) -> int:
    counter = store.counter(name)
    return 0 if counter is None else counter.fence


def _raise(store: BaseLockBackend, name: str, to: int) -> bool:
    """Raise a counter; return whether it was lower."""
    until = monotonic() + WAIT
    # Callers at the same moment lock the counter one after the other.
    while (answer := store.raise_fences(to, key=name)).left and monotonic() < until:
        continue
    if answer.left:
        raise BackendUnavailable(
            f"The calls {name!r} were not counted: a transaction holds the counter.", key=name
        )
    return bool(answer.raised)
