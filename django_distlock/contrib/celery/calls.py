"""Of many calls of a debounced task the last one's arguments run: which call that is.

Each call has a number, the fence of its claim. A counter of its own tells of the highest number,
twice as much: even, its message is in the broker; odd, its run has begun. See
docs/decisions/the-last-of-many-calls.md. All of it raises `BackendUnavailable` where the store does
not answer, or a transaction is in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...backends.base import BaseLockBackend
from ...core.clock import monotonic
from ...core.errors import BackendUnavailable
from ...core.keys import OWN_MARKER, UNIQUE_PREFIX, own_key
from ...core.records import UNKNOWN, Grant, Record
from ...handler import lock_backends
from ..jobs import WAIT, JobLock

#: What the counters are called. Nobody ever holds these keys.
_PREFIX: Final = f"{OWN_MARKER}calls:"


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
