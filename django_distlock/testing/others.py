"""What somebody else does to a key, on another host; and whether anybody holds it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..backends.base import BaseLockBackend
from ..core.clock import monotonic
from ..core.durations import MAX_BOUND, Duration, ttl_seconds
from ..core.errors import LockNotAcquired, LockUsageError
from ..core.holders import Holder
from ..core.keys import new_token
from ..core.records import Contended, Record
from ..handler import lock_backends
from ..locks.attempts import Granted
from ..locks.lease import Lease
from ..locks.state import Terms
from ..process import deferred_release

#: Seconds between two questions to a store that is busy.
_PAUSE = 0.01

#: Who holds a key where a test does not say.
ELSEWHERE = Holder(host="elsewhere", process="another process", pid=1)


class OthersLease(Lease):
    """A lease of somebody else. No receiver of this process hears what happens to it."""

    def __init__(self, store: BaseLockBackend, granted: Granted, terms: Terms):
        super().__init__(store, granted, terms)
        self._holding.tells = False

    def release(self, *, strict: bool = False) -> bool:
        """Give the key back, whatever transactions this process has open."""
        return self._release.by_call(strict=strict, defers=False)

    async def arelease(self, *, strict: bool = False) -> bool:
        """See `release`."""
        return await self._holding.store.threads.run(partial(self.release, strict=strict))


@contextmanager
def hold(
    key: str,
    *,
    backend: str = "default",
    ttl: Duration | None = None,
    holder: Holder | None = None,
    heartbeat: bool = True,
) -> Iterator[Lease]:
    """Let somebody else hold a key while the block runs.

    Args:
        ttl: Seconds (or a `timedelta`), from 0.1 to `MAX_TTL`; None: the `TTL` of the backend.
        holder: Who it is; None: another process, on a host called "elsewhere".
        heartbeat: Whether the lease is renewed, as that of a process which lives. False: it ends
            with its ttl, as that of one which died.

    Raises:
        LockNotAcquired: The key is held.
    """
    lease = taken(lock_backends[backend], key, ttl=ttl, holder=holder)
    try:
        if heartbeat:
            lease._holding.keep()
        yield lease
    finally:
        lease._release.quietly()


def steal(lease: Lease, *, ttl: Duration | None = None, holder: Holder | None = None) -> Lease:
    """Let somebody else have got the key, as after a pause; its holder has not noticed.

    The store knows the new holder alone, with a higher fence. The old one believes in its lease
    until its deadline has passed, or its next renewal is refused.

    Args:
        ttl: Seconds (or a `timedelta`) of the new lease; None: the `TTL` of the backend.
        holder: Who has it now; None: another process, on a host called "elsewhere".

    Returns:
        The new holder's lease. Nothing renews it; release it, or let it end.

    Raises:
        LockNotAcquired: Somebody else has the key already, and does not share it.
        LockLost: The lease has ended, and its holder can know.
    """
    lease.check()
    store, permits = lease._holding.store, lease._holding.terms.permits
    return taken(store, lease.key, ttl=ttl, holder=holder, replace=lease.token, permits=permits)


def expire(key: str, *, backend: str = "default") -> None:
    """Let all leases on a key be over: the key is free, and no holder has noticed.

    So it looks when the holder died, or stopped, its ttl ago. With session locks the session ends,
    which a holder may notice at once.

    Raises:
        LockUsageError: Nobody holds the key, or a guarded transaction keeps it.
    """
    store = lock_backends[backend]
    record = store.read(key)
    if record is None:
        raise LockUsageError(f"Nobody holds {key!r} on {backend!r}.", key=key)
    for each in store.records.sharing(key) or (record,):
        forget(store, each)


def forget(store: BaseLockBackend, record: Record) -> None:
    """Let a store know nothing of a lease any more; the fence stays where it is, if it can."""
    # What is settled, and what a session holds, cannot be released by its token.
    if record.token and store.release(record.grant):
        return
    if isinstance(store.force_release(record.key), Contended):
        raise LockUsageError(
            f"A transaction keeps {record.key!r}: it cannot end now.", key=record.key
        )


def taken(
    store: BaseLockBackend,
    key: str,
    *,
    ttl: Duration | None = None,
    holder: Holder | None = None,
    replace: str | None = None,
    permits: int | None = 1,
) -> OthersLease:
    """Acquire a key for somebody else, once: alone, or else beside others if permits say so.

    A store that is busy is asked again for a second.
    """
    config, holder = store.config, holder or ELSEWHERE
    lives = ttl_seconds(config.ttl if ttl is None else ttl, maximum=config.max_ttl)
    deadline = store.monotonic() + lives
    ask = partial(store.acquire, key, new_token(), lives, holder, replace=replace)
    answer, until = ask(), monotonic() + MAX_BOUND
    while isinstance(answer, Contended) and answer.busy and monotonic() < until:
        time.sleep(_PAUSE)
        answer = ask()
    if isinstance(answer, Contended) and permits != 1:
        answer = ask(permits=permits)
    if isinstance(answer, Contended):
        raise LockNotAcquired(
            f"{key!r} cannot be held by another holder: it is held on {store.alias!r}.",
            key=key,
            holder=answer.holder,
            held_for=answer.held_for,
            expires_in=answer.expires_in,
        )
    terms = Terms(
        ttl=lives, holder=holder, retry=config.retry, permits=permits if answer.shared else 1
    )
    return OthersLease(store, Granted(answer, deadline), terms)


def assert_locked(key: str, *, backend: str = "default") -> None:
    """Fail unless somebody holds the key now.

    Raises:
        AssertionError: Nobody does.
    """
    if _record(key, backend) is None:
        raise AssertionError(f"{key!r} is not locked on {backend!r}: nobody holds it.")


def assert_not_locked(key: str, *, backend: str = "default") -> None:
    """Fail if somebody holds the key now, or if it is kept after its holder.

    Raises:
        AssertionError: Somebody does; the message says who, and since when.
    """
    record = _record(key, backend)
    if record is not None:
        verb = "has kept it" if record.is_settled else "has held it"
        raise AssertionError(
            f"{key!r} is locked on {backend!r}: {record.holder.who} {verb} since"
            f" {record.acquired_at.isoformat(' ', 'milliseconds')} (fence {record.fence})."
        )


def _record(key: str, backend: str) -> Record | None:
    # What this process has given up in a rollback is not held any more.
    deferred_release.flush((backend, key))
    return lock_backends[backend].read(key)
