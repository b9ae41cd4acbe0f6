"""Simulated actions of another holder on a key, and assertions of whether a key is held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..backends.base import BaseLockBackend
from ..core.clock import monotonic
from ..core.durations import MAX_BOUND, Duration, ttl_seconds
from ..core.errors import LockNotAcquired, LockUsageError
from ..core.keys import new_token
from ..core.records import Contended, Holder, Record
from ..handler import lock_backends
from ..locks.attempts import Granted
from ..locks.lease import Lease
from ..locks.state import Terms
from ..process import deferred_release

#: Seconds between two attempts on a busy store.
_PAUSE = 0.01

#: The default holder.
ELSEWHERE = Holder(host="elsewhere", process="another process", pid=1)


class OthersLease(Lease):
    """A lease of another holder. This process sends no signals about it."""

    def __init__(self, store: BaseLockBackend, granted: Granted, terms: Terms):
        super().__init__(store, granted, terms)
        self._holding.tells = False

    def release(self, *, strict: bool = False) -> bool:
        """Release the key now, whatever transactions this process has open."""
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
    """Let another holder have a key while the block runs.

    Args:
        ttl: Seconds (or a `timedelta`), from 0.1 to `MAX_TTL`; None: the `TTL` of the backend.
        holder: The holder; None: another process, on a host called "elsewhere".
        heartbeat: Whether the lease is renewed, as that of a live process. False: it expires
            after its ttl, as that of a dead one.

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
    """Grant the key to another holder, as after a pause; the old holder has not noticed.

    The store knows only the new holder, with a higher fence. The old holder trusts its lease until
    its deadline has passed, or its next renewal is refused.

    Args:
        ttl: Seconds (or a `timedelta`) of the new lease; None: the `TTL` of the backend.
        holder: The new holder; None: another process, on a host called "elsewhere".

    Returns:
        The new holder's lease. Nothing renews it; release it, or let it expire.

    Raises:
        LockNotAcquired: Another holder has the key already, and does not share it.
        LockLost: The lease has ended, and the old holder can know.
    """
    lease.check()
    store, permits = lease._holding.store, lease._holding.terms.permits
    return taken(store, lease.key, ttl=ttl, holder=holder, replace=lease.token, permits=permits)


def expire(key: str, *, backend: str = "default") -> None:
    """Expire all leases on a key: the key is free, and no holder has noticed.

    As if the holder had died or stopped a ttl ago. With session locks the session ends, which a
    holder may notice immediately.

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
    """Remove a lease from a store, without raising the fence if that is possible."""
    # Settled leases, and those of sessions, cannot be released by their token.
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
    """Acquire a key once for another holder: exclusively, or else shared if permits allow that.

    If the store is busy, the attempt is repeated for a second.
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
        AssertionError: Nobody holds it.
    """
    if _record(key, backend) is None:
        raise AssertionError(f"{key!r} is not locked on {backend!r}: nobody holds it.")


def assert_not_locked(key: str, *, backend: str = "default") -> None:
    """Fail if somebody holds the key now, or if it is settled.

    Raises:
        AssertionError: The key is held; the message says by which holder, and since when.
    """
    record = _record(key, backend)
    if record is not None:
        verb = "has kept it" if record.is_settled else "has held it"
        raise AssertionError(
            f"{key!r} is locked on {backend!r}: {record.holder.who} {verb} since"
            f" {record.acquired_at.isoformat(' ', 'milliseconds')} (fence {record.fence})."
        )


def _record(key: str, backend: str) -> Record | None:
    # Wait for releases of this process that a rollback has started.
    deferred_release.flush((backend, key))
    return lock_backends[backend].read(key)
