"""Time that passes at once: for the locks of `memory_locks`, and for those who hold them."""

from __future__ import annotations

import math
from collections.abc import Set

from ..backends import base
from ..backends.base import BaseLockBackend
from ..core.clock import monotonic
from ..core.durations import Duration
from ..core.durations import seconds as in_seconds
from ..core.errors import LockUsageError
from ..locks.state import Holding
from ..process import heartbeat as beats
from ..process.at_exit import held_here
from ..process.deadlines import Alarms, alarms
from ..process.heartbeat import Heartbeat
from .telling import Teller, telling_here

#: The innermost comes last.
_timelines: list[Timeline] = []


def advance(seconds: Duration) -> None:
    """Let time pass at once, as if the process had lived through it.

    For the stores of the innermost `memory_locks()` and for who holds their locks: leases end or
    are renewed at their times, in order; who is to be called back, has been. The time of other
    stores, and `time.time()`, stay as they are. A caller that waits in another thread is woken and
    looks again.

    Args:
        seconds: Seconds, or a `timedelta`.

    Raises:
        LockUsageError: There is no `memory_locks()` around.
    """
    timeline = current()
    if timeline is None:
        raise LockUsageError("Time can only be advanced inside memory_locks().")
    timeline.advance(seconds)


def current() -> Timeline | None:
    """Return the time of the innermost `memory_locks`."""
    return _timelines[-1] if _timelines else None


class Timeline:
    """The time of one `memory_locks`: real time, and what was let pass at once.

    Called, it is the clock of its stores, and of who holds their locks.
    """

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        """Return the time of its stores."""
        return monotonic() + self._ahead

    def begin(self) -> None:
        """Be the time that passes."""
        _timelines.append(self)

    def end(self) -> None:
        """Leave nothing that was held, and no thread."""
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
        """See the function."""
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
        """Let time pass, and do what is due meanwhile; leases of who stands still ring no alarm."""
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
        """Let threads look at the clock that sleep until a time which may have come."""
        for timer in self._timers():
            timer.look()
        for store in self.stores():
            for turn in store.queues.all():
                turn.ring()

    # What there is

    def leases(self) -> list[Holding]:
        """Return what is held in its stores."""
        held = [each.holding for each in held_here.all()]
        return [each for each in held if isinstance(each, Holding) and self.owns(each)]

    def owns(self, lease: Holding) -> bool:
        """Whether a lease is one of its stores'."""
        return lease.store.monotonic is self

    def stores(self) -> list[BaseLockBackend]:
        """Return what it is the clock of."""
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
