"""A process that stood still."""

from __future__ import annotations

import math
from contextlib import ExitStack

from ..core.durations import GRACE, Duration
from ..core.durations import seconds as in_seconds
from ..core.errors import LockUsageError
from ..locks.lease import Lease
from ..process.deadlines import alarms
from .others import steal, taken
from .telling import telling_here
from .timeline import Timeline, current

#: How far time goes at once where it is not far enough.
_STEP = 0.01


def simulate_pause(
    lease: Lease, seconds: Duration | None = None, *, taken_by_other: bool = False
) -> Lease | None:
    """Let this process have stood still for longer than its lease lived. It goes on now.

    As behind a SIGSTOP, a suspended machine or a long collection of garbage: nothing was renewed
    meanwhile, the key is free, `lease.is_lost` is True, and who is to be called back, has been. The
    code that runs goes on where it was, and knows only if it asks.

    Inside of `memory_locks()` the time of all its locks passes. On another backend the store's time
    cannot be put ahead: there the store forgets this one lease, and its deadline is now.

    Args:
        seconds: Seconds (or a `timedelta`) that it stood still; None: until the key was free. Only
            inside of `memory_locks()`. A pause may be too short to lose anything.
        taken_by_other: Whether somebody else has taken the key meanwhile.

    Returns:
        The lease of who has the key now; None: nobody.

    Raises:
        LockUsageError: The lease is not held, or has no expiry, or `seconds` on another backend.
        LockLost: It had ended before.
        LockNotAcquired: The pause is too short for somebody else to take the key.
    """
    lease.check()
    if lease.deadline == math.inf:
        raise LockUsageError(
            f"The lease on {lease.key!r} has no expiry: no pause is too long for it.", key=lease.key
        )
    timeline = current()
    if timeline is not None and timeline.owns(lease._holding):
        return _stand_still(timeline, lease, seconds, taken_by_other=taken_by_other)
    if seconds is not None:
        raise LockUsageError(
            "A pause can only have a length inside memory_locks(): time cannot be advanced in the"
            f" store {lease.backend!r}.",
            key=lease.key,
        )
    return _lose(lease, taken_by_other=taken_by_other)


def _stand_still(
    timeline: Timeline, lease: Lease, seconds: Duration | None, *, taken_by_other: bool
) -> Lease | None:
    here = {lease._holding, *(each for each in timeline.leases() if each.tells)}
    store = lease._holding.store
    with telling_here() as teller:
        with ExitStack() as standing:
            # No thread of a process that stands still asks the store.
            for each in here:
                standing.enter_context(each.mutex)
            if seconds is not None:
                until = timeline() + in_seconds(seconds, "seconds")
                timeline.pass_until(until, teller, standing=here)
            else:
                timeline.pass_until(lease.deadline + GRACE, teller, standing=here)
                while store.read_token(lease.token) is not None:
                    timeline.pass_until(timeline() + _STEP, teller, standing=here)
            permits = lease._holding.terms.permits
            other = taken(store, lease.key, permits=permits) if taken_by_other else None
        timeline.do_what_is_due()
    timeline.go_on()
    return other


def _lose(lease: Lease, *, taken_by_other: bool) -> Lease | None:
    other, store = None, lease._holding.store
    with telling_here():
        with lease._holding.mutex:
            if taken_by_other:
                other = steal(lease)
            elif store.supports_ttl:
                store.release(lease._holding.grant)
            lease._holding.deadline = min(lease.deadline, store.monotonic())
        alarms.ring()
    return other
