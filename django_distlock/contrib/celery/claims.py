"""What a task holds while it is queued: leases of no process, which a later run takes over.

Of many calls of a debounced task the last one's arguments run. Each call has a number, the fence of
its claim. A counter of its own tells of the highest number, twice as much: even, its message is in
the broker; odd, its run has begun. See docs/decisions/the-last-of-many-calls.md.

What asks a store raises `BackendUnavailable` where that does not answer, or a transaction is in the
way.
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
from ...database.workers import Gone, when_gone
from ...handler import lock_backends
from ...locks import checking
from ...locks.attempts import Granted, release_unanswered
from ...locks.lease import Lease
from ...locks.state import Terms as Kept
from ...signals import lock_acquired, tell
from ..jobs import WAIT, JobLock
from .deliveries import OF
from .terms import Terms

logger = logging.getLogger("django_distlock")

#: What the counters are called. Nobody ever holds these keys.
_PREFIX: Final = f"{OWN_MARKER}calls:"
#: By token: what gives a claim back whose sender was interrupted before the message was sent.
_unsent: dict[str, Gone] = {}


class Claim:
    """A claim of a call that is about to be queued. Given back if it is dropped before."""

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
    """Take a claim for a call that is about to be queued: by `publish`.

    Args:
        delay: Seconds until it may begin.
        unique_ttl: Seconds that it keeps the claim behind those; None: what the terms say.
        instead_of: The claim to take over; None: a free one.

    Raises:
        LockNotAcquired: It is taken, or the other one is gone.
        LockError: A store whose leases no other process can take over.
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
            # The transaction has kept the lease of a run that has ended, and names that as holder.
            ended, lease = lease, replace_one(lock, lease._holding.grant)
            ended._let_go()
        grant = lease._holding.grant
        lease._let_go()
        return Claim(lock, grant)
    except LockError:
        lease.release()
        raise
    except BaseException:
        # A signal raised, perhaps after the lease was let go. A transaction's stays with that.
        if not lease._holding.goes_on:
            give_back(lock, lease._holding.grant)
        raise


def replace_any(lock: JobLock) -> Lease:
    """Take a claim, or take it over from the call before: of many, one is the last."""
    store = lock_backends[lock.backend]
    until = monotonic() + WAIT
    while True:
        record = store.read(lock.key)
        try:
            return lock.acquire() if record is None else replace_one(lock, record)
        except LockNotAcquired:
            counter = store.counter(lock.key)
            is_paused = counter is not None and counter.paused_until is not None
            # Unless it is, another caller had its turn.
            if is_paused or monotonic() >= until:
                raise


def replace_one(lock: JobLock, record: Record | Grant) -> Lease:
    """Take a key in the place of another lease; `LockNotAcquired`: that is gone."""
    store = lock_backends[lock.backend]
    kept, token, permits = lock._terms(store), new_token(), checking.counted(lock)
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
        # The store may have granted it: the answer was lost, or a signal raised.
        at, shared = datetime.now(UTC), permits != 1
        release_unanswered(store, Grant(lock.key, token, 1, kept.ttl, at, None, shared=shared))
        raise
    raise LockNotAcquired(
        f"{lock.key!r} was taken by somebody else.", key=lock.key, holder=answer.holder
    )


def with_claim(
    options: dict[str, Any], header: str, fence: int, task_id: str | None
) -> dict[str, Any]:
    """Return the options of a message that has a claim, or a place: a header names its fence."""
    headers = {**(options.get("headers") or {}), header: f"{fence:015d}", OF: task_id}
    return {**options, "headers": headers}


def publish(send: Callable[..., Any], header: str, claim: Claim, options: dict[str, Any]) -> Any:
    """Queue a task that has a claim; give the claim back if that fails."""
    try:
        return send(**with_claim(options, header, claim.grant.fence, claim.lock.task_id))
    except BaseException:
        give_back(claim.lock, claim.grant)
        raise
    finally:
        del _unsent[claim.grant.token]


def _give_up(lock: JobLock, grant: Grant) -> None:
    if _unsent.pop(grant.token, None) is not None:
        give_back(lock, grant)


def give_back(lock: JobLock, grant: Grant) -> None:
    """Give a claim back whose task was not queued."""
    try:
        lock_backends[lock.backend].release(grant)
    except LockError as error:
        extra = log_fields("release_failed", backend=lock.backend, key=lock.key, error=error)
        logger.warning(
            "%r stays held, and its task was not queued: %s", lock.key, error, extra=extra
        )


def lease_of(store: BaseLockBackend, grant: Grant, sent_at: float, kept: Kept) -> Lease:
    """Return the lease of a grant that was asked for at `sent_at`."""
    deadline = math.inf if grant.ttl is None else sent_at + grant.ttl
    waited = store.monotonic() - sent_at
    return Lease(store, Granted(grant, deadline, waited=waited), kept)


def queue_ttl(terms: Terms, longest: float, delay: float, unique_ttl: float | None = None) -> float:
    """Return the seconds for which a queued task keeps a claim; see `reserve`."""
    usual = max(terms.queued_for, terms.rules.lock.ttl or 0.0)
    return min(longest, (usual if unique_ttl is None else unique_ttl) + max(0.0, delay))


def seconds_until(when: object) -> float:
    """Return the seconds until a time; of a number, itself."""
    if isinstance(when, int | float):
        return float(when)
    if not when:
        return 0.0
    at = maybe_make_aware(maybe_iso8601(when))
    return float((at - datetime.now(UTC)).total_seconds())


def is_overtaken(lock: JobLock, grant: Grant) -> bool:
    """Note that the message of a call is in the broker; say whether a later call has begun already.

    Then that run may have begun before this call, whose message will give way to it: it has to be
    sent again.
    """
    store, name = lock_backends[lock.backend], _name(lock)
    if _raise(store, name, 2 * grant.fence):
        return False
    newest = _newest(store, name)
    if newest % 2 == 0 or newest <= 2 * grant.fence + 1:
        return False
    # A store that has lost its numbers, and not this counter, goes on above it.
    store.release(grant)
    store.raise_fences(newest // 2, key=lock.key)
    return True


def is_replaced(lock: JobLock, number: int) -> bool:
    """Whether a later call was sent, or has begun: this one has nothing to do."""
    store = lock_backends[lock.backend]
    record = store.read(lock.key)
    # Nobody has called since, wherever an operator has raised the counters to.
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
    """Give back a claim that still has the fence of a message. What has changed hands stays."""
    store = lock_backends[lock.backend]
    claims = (
        each
        for each in records_of(store, lock.key)
        if (each.fence, each.holder.task_id) == (fence, lock.task_id)
    )
    record = next(claims, None)
    if record is not None:
        release(store, record)


def release(store: BaseLockBackend, claim: Record) -> None:
    """Give a claim back; see `free`."""
    if store.release(claim.grant) is UNKNOWN:
        raise BackendUnavailable(
            f"The claim {claim.key!r} was not released: a transaction has locked its row.",
            key=claim.key,
        )


def records_of(store: BaseLockBackend, key: str) -> Sequence[Record]:
    """Return the records of all who hold a key."""
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
    """Raise a counter; say whether it was lower."""
    until = monotonic() + WAIT
    # Callers that count at the same moment are in each other's way for one of them at a time.
    while (answer := store.raise_fences(to, key=name)).left and monotonic() < until:
        continue
    if answer.left:
        raise BackendUnavailable(
            f"The calls {name!r} were not counted: a transaction holds the counter.", key=name
        )
    return bool(answer.raised)
