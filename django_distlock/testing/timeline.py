"""Time that passes at once: for the locks of `memory_locks`, and for those who hold them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack
from threading import Thread, current_thread

from ..backends import base
from ..backends.base import BaseLockBackend
from ..core.durations import MAX_BOUND, Duration
from ..core.durations import seconds as in_seconds
from ..core.errors import LockUsageError
from ..locks.state import Holding
from ..process import heartbeat as beats
from ..process import host
from ..process.at_exit import held_here
from ..process.deadlines import Alarms, alarms
from ..process.heartbeat import Heartbeat
from ..process.host import monotonic
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
        raise LockUsageError("Time can only be put ahead inside of memory_locks().")
    timeline.advance(seconds)


def current() -> Timeline | None:
    """Return the time of the innermost `memory_locks`."""
    return _timelines[-1] if _timelines else None


class Timeline:
    """The time of one `memory_locks`: real time, and what was let pass at once.

    Called, it is the clock of its stores.
    """

    def __init__(self) -> None:
        self._began_ahead = self._ahead = host.ahead

    def __call__(self) -> float:
        """Return the time of its stores."""
        return host.real_time() + self._ahead

    def begin(self) -> None:
        """Be the time that passes."""
        _timelines.append(self)

    def end(self) -> None:
        """Take back the time, and leave nothing that was held, and no thread."""
        for lease in self.leases():
            lease.end_keeping()
            held_here.discard(lease)
            if lease.state == "held":
                lease.state = "released"
        for watched in list(alarms._leases.values()):
            if isinstance(watched, Holding) and self.owns(watched):
                alarms.discard(watched)
        for heartbeat in self._heartbeats():
            heartbeat._leases.clear()
        threads = [each._thread for each in self._heartbeats()]
        if not alarms._leases:
            threads.append(alarms._thread)
        # They linger for a while when there is nothing to do. That while is over.
        self._put_ahead(self._ahead + max(Alarms.linger, Heartbeat.linger))
        _wake_timers()
        for thread in threads:
            _wait_for(thread)
        self._put_ahead(self._began_ahead)
        _let_timers_look()
        _timelines.remove(self)

    def advance(self, seconds: Duration) -> None:
        """See the function."""
        if current() is not self:
            raise LockUsageError(
                "The time of a memory_locks() that is over, or that has another one inside,"
                " cannot be put ahead."
            )
        until = monotonic() + in_seconds(seconds, "seconds")
        with telling_here() as teller:
            self.pass_until(until, teller)
        self.go_on()

    def pass_until(
        self, until: float, teller: Teller, *, standing: Set[Holding] = frozenset()
    ) -> None:
        """Let time pass, and do what is due meanwhile.

        Args:
            until: By `host.monotonic`.
            teller: Who tells of it.
            standing: The leases of a process that stands still. Then no alarm rings.
        """
        while (at := self._next_event(standing)) <= until:
            self._go_to(at)
            self.do_what_is_due(standing)
            teller.tell()
        self._go_to(until)

    def do_what_is_due(self, standing: Set[Holding] = frozenset()) -> None:
        """Renew leases and ring alarms whose time has come, in this thread."""
        if not standing:
            alarms.ring()
        now = monotonic()
        for heartbeat in self._heartbeats():
            leases = list(heartbeat._leases.values())
            due = [each for each in leases if each.renewing.due_at <= now and each not in standing]
            if due:
                heartbeat._renew(due)

    def go_on(self) -> None:
        """Let threads look at the clock that sleep until a time which may have come."""
        _wake_timers()
        for store in self.stores():
            for queue in list(store.queues._queues.values()):
                for turn in list(queue):
                    turn.ring()

    # What there is

    def leases(self) -> list[Holding]:
        """Return what is held in its stores."""
        return [each for each in _all_leases() if self.owns(each)]

    def owns(self, lease: Holding) -> bool:
        """Whether a lease is one of its stores'."""
        return self._is_clock_of(lease.store)

    def stores(self) -> list[BaseLockBackend]:
        """Return what it is the clock of."""
        return [each for each in list(base._every) if self._is_clock_of(each)]

    def _heartbeats(self) -> list[Heartbeat]:
        return [each for each in map(beats._every.get, self.stores()) if each is not None]

    def _is_clock_of(self, store: BaseLockBackend) -> bool:
        return getattr(store, "_clock", None) is self

    # Its clock

    def _next_event(self, standing: Set[Holding]) -> float:
        """Return when something is due next, by `host.monotonic`."""
        times = [
            lease.renewing.due_at
            for heartbeat in self._heartbeats()
            for lease in list(heartbeat._leases.values())
            if lease not in standing
        ]
        if not standing:
            times += [
                each.next_alarm()
                for each in list(alarms._leases.values())
                if isinstance(each, Holding) and self.owns(each)
            ]
        return min(times, default=math.inf)

    def _go_to(self, at: float) -> None:
        step = at - monotonic()
        if step > 0:
            self._put_ahead(self._ahead + step)

    def _put_ahead(self, ahead: float) -> None:
        """Set the clocks. Leases of other stores move with them: for those no time has passed."""
        step = ahead - self._ahead
        others = [each for each in _all_leases() if not self.owns(each)]
        with ExitStack() as unchanged:
            for lease in others:
                unchanged.enter_context(lease.mutex)
            # A deadline may be too late for a moment, and never too soon.
            if step < 0:
                host.ahead = ahead
            for lease in others:
                lease.deadline += step
                lease.granted_at += step
                lease.renewing.due_at += step
                lease.renewing.ends_at += step
            self._ahead = host.ahead = ahead


def _all_leases() -> Iterator[Holding]:
    held = [each.holding for each in list(held_here._by_token.values())]
    return (each for each in held if isinstance(each, Holding))


def _wake_timers() -> list[Alarms | Heartbeat]:
    """Let the threads of timers look at the clock; return those that have one."""
    timers: list[Alarms | Heartbeat] = [alarms, *beats._every.values()]
    for each in timers:
        with each._changed:
            # Where they have not looked yet, whatever comes now comes too soon for them.
            each._looks_at = math.inf
            each._changed.notify_all()
    return [each for each in timers if each._thread is not None]


def _let_timers_look() -> None:
    """Wait until the threads of timers have looked: they must not remember another time."""
    until = host.real_time() + MAX_BOUND
    for each in _wake_timers():
        while each._looks_at == math.inf and each._thread and host.real_time() < until:
            time.sleep(0.001)


def _wait_for(thread: Thread | None) -> None:
    if thread is not None and thread is not current_thread():
        thread.join(MAX_BOUND)
