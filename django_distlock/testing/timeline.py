"""Simulated time for the locks of `memory_locks`, and simulated pauses of processes."""

from __future__ import annotations

import math
from collections.abc import Set
from contextlib import ExitStack

from ..backends import base
from ..backends.base import BaseLockBackend
from ..core.clock import monotonic
from ..core.durations import GRACE, Duration
from ..core.durations import seconds as in_seconds
from ..core.errors import LockUsageError
from ..locks.lease import Lease
from ..locks.state import Holding
from ..process import heartbeat as beats
from ..process.heartbeat import Alarms, Heartbeat, alarms, held_here
from .others import steal, taken
from .telling import Teller, telling_here

#: Seconds of each further step, while the key is not free yet.
_STEP = 0.01
#: The timelines of all `memory_locks()`; the innermost comes last.
_timelines: list[Timeline] = []


def advance(seconds: Duration) -> None:
    """Move time forward, as if the process had lived through it.

    It moves for the stores of the innermost `memory_locks()` and for the holders of their locks:
    leases expire or are renewed at their times, in order, and their callbacks have run. The time
    of other stores, and `time.time()`, stay. A waiter in another thread is woken and looks again.

    Args:
        seconds: Seconds, or a `timedelta`.

    Raises:
        LockUsageError: There is no `memory_locks()` around.
    """
    timeline = current()
    if timeline is None:
        raise LockUsageError("Time can only be advanced inside memory_locks().")
    timeline.advance(seconds)


def simulate_pause(
    lease: Lease, seconds: Duration | None = None, *, taken_by_other: bool = False
) -> Lease | None:
    """Simulate that this process stood still for longer than its lease lasted, and goes on now.

    As after a SIGSTOP, a suspended machine or a long garbage collection: nothing was renewed
    meanwhile, the key is free, `lease.is_lost` is True, and the callbacks have run. The running
    code goes on where it was, and learns of the loss only if it checks.

    Inside `memory_locks()`, the time of all its locks moves forward. The time of another backend's
    store cannot be moved: there, the store forgets this one lease, and its deadline is now.

    Args:
        seconds: Seconds (or a `timedelta`) of the pause; None: until the key is free. Only inside
            `memory_locks()`. A pause may be too short to lose the lease.
        taken_by_other: Whether another holder has acquired the key meanwhile.

    Returns:
        The lease of the other holder; None: there is none.

    Raises:
        LockUsageError: The lease is not held or has no expiry, or `seconds` is given for another
            backend.
        LockLost: The lease had ended before.
        LockNotAcquired: The pause is too short for another holder to acquire the key.
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
            # No thread of a process that stands still calls the store.
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


def current() -> Timeline | None:
    """Return the timeline of the innermost `memory_locks`; None: there is none."""
    return _timelines[-1] if _timelines else None


class Timeline:
    """The time of one `memory_locks`: real time plus the seconds that it was moved forward.

    It is callable, as the clock of its stores and of the holders of their locks.
    """

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        """Return the time of its stores."""
        return monotonic() + self._ahead

    def begin(self) -> None:
        """Become the innermost timeline."""
        _timelines.append(self)

    def end(self) -> None:
        """End all that was held, and all threads."""
        for lease in self.leases():
            lease.end_keeping()
            held_here.discard(lease)
            if lease.state == "held":
                lease.state = "released"
        for watched in self._watched():
            alarms.discard(watched)
        for heartbeat in self._heartbeats():
            for renewed in heartbeat.all():
                heartbeat.discard(renewed)
        for timer in self._timers():
            timer.end_idle()
        _timelines.remove(self)

    def advance(self, seconds: Duration) -> None:
        """See the function `advance`."""
        if current() is not self:
            raise LockUsageError(
                "The time of a memory_locks() that has ended or contains another one cannot be"
                " advanced."
            )
        until = self() + in_seconds(seconds, "seconds")
        with telling_here() as teller:
            self.pass_until(until, teller)
        self.go_on()

    def pass_until(
        self, until: float, teller: Teller, *, standing: Set[Holding] = frozenset()
    ) -> None:
        """Move time forward, and do what is due; if leases are `standing`, no alarm rings."""
        while (at := self._next_event(standing)) <= until:
            self._go_to(at)
            self.do_what_is_due(standing)
            teller.tell()
        self._go_to(until)

    def do_what_is_due(self, standing: Set[Holding] = frozenset()) -> None:
        """Renew leases and ring alarms whose time has come, in this thread."""
        if not standing:
            alarms.ring()
        now = self()
        for heartbeat in self._heartbeats():
            leases = [each for each in heartbeat.all() if each not in standing]
            if due := [each for each in leases if each.renewing.due_at <= now]:
                heartbeat.renew(due)

    def go_on(self) -> None:
        """Wake the threads that sleep until a time which may have come, to look at the clock."""
        for timer in self._timers():
            timer.look()
        for store in self.stores():
            for turn in store.queues.all():
                turn.ring()

    # Its leases and stores

    def leases(self) -> list[Holding]:
        """Return the leases that are held in its stores."""
        held = [each.holding for each in held_here.all()]
        return [each for each in held if isinstance(each, Holding) and self.owns(each)]

    def owns(self, lease: Holding) -> bool:
        """Whether a lease is held in one of its stores."""
        return lease.store.monotonic is self

    def stores(self) -> list[BaseLockBackend]:
        """Return the stores whose clock this is."""
        return [each for each in list(base.every) if each.monotonic is self]

    def _heartbeats(self) -> list[Heartbeat]:
        return [each for each in map(beats.every.get, self.stores()) if each is not None]

    def _watched(self) -> list[Holding]:
        return [each for each in alarms.all() if isinstance(each, Holding) and self.owns(each)]

    def _timers(self) -> list[Alarms | Heartbeat]:
        return [alarms, *self._heartbeats()]

    # Its clock

    def _next_event(self, standing: Set[Holding]) -> float:
        """Return when something is due next, by this clock."""
        times = [
            lease.renewing.due_at
            for heartbeat in self._heartbeats()
            for lease in heartbeat.all()
            if lease not in standing
        ]
        if not standing:
            times += [each.alarm_in() + self() for each in self._watched()]
        return min(times, default=math.inf)

    def _go_to(self, at: float) -> None:
        self._ahead += max(0.0, at - self())
