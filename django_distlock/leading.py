"""One leader among many: a candidate waits for a key, and leads while it holds the key."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, Final

from .core.clock import monotonic
from .core.durations import Duration, seconds
from .core.errors import (
    BackendUnavailable,
    FenceRejected,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from .core.keys import normalize_key, own_key
from .core.logs import log_fields
from .core.records import LEADER, Holder
from .core.threads import Bell
from .handler import lock_backends
from .locks.blocks import Entered, Keeping, entered_by
from .locks.lease import Lease
from .locks.lock import Lock, distlock

logger = logging.getLogger("django_distlock")

#: Seconds of one attempt, after which a candidate checks whether another thread has stopped it.
PATIENCE: Final = 5.0
#: Seconds until a candidate campaigns again after a term, or an error of the store.
AGAIN: Final = 1.0
#: Seconds between two checks of whether an operator has requested a stop.
LOOK: Final = 1.0


def leader(
    name: str,
    *,
    ttl: Duration | None = None,
    backend: str = "default",
    steal_if_dead: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Leader:
    """Describe an election in which this process is a candidate.

    Args:
        name: The name of the election; a part of its key.
        ttl: Seconds (or a `timedelta`) of the leader's lease; None: the `TTL` of the backend. A
            leader that is dead, or stands still, is replaced a second after that at the latest.
        backend: An alias in `DISTLOCK`.
        steal_if_dead: See `distlock`.
        metadata: See `distlock`. Its `"role"` is `"leader"`.

    Raises:
        InvalidArgument: An argument breaks a rule.
    """
    told = {**(metadata or {}), **LEADER}
    key = _key(name)
    lock = distlock(key, ttl=ttl, backend=backend, steal_if_dead=steal_if_dead, metadata=told)
    return Leader(name, lock)


def leader_of(name: str, *, backend: str = "default") -> Holder | None:
    """Return the leader of an election; None: nobody leads. The store is only read.

    A dead leader is returned until another one may lead: for its ttl and a second.

    Raises:
        BackendUnavailable: The store is unavailable.
    """
    record = lock_backends[backend].read(_key(name))
    return None if record is None else record.holder


def _key(name: str) -> str:
    return own_key(f"leader:{normalize_key(name)}")


class Leadership:
    """The leadership of this process, while it has it. Used by one thread.

    Args:
        lock: The lock whose holder leads.
        who: The name of this process's candidate in the log.
        does: The verb for a leader's work in the log.
        word: The first word of events in the log.
    """

    def __init__(self, lock: Lock, who: str, *, does: str = "does", word: str = "leader"):
        self._lock = lock
        self._who, self._does, self._word = who, does, word
        self._lease: Lease | None = None
        self._state = ""

    @property
    def held(self) -> bool:
        """Whether this process leads, as its lease says, without a call to the store."""
        return self._lease is not None and self._lease.held

    def gain(self, patience: float, block: ExitStack) -> Lease | None:
        """Lead from here on, unless another candidate leads for all of `patience` seconds.

        Args:
            block: The block that holds the key. If attempts may be interrupted, each needs its own.
        """
        self.give_up(block)
        try:
            self._lease = block.enter_context(replace(self._lock, wait=patience))
        except LockNotAcquired as error:
            why = f"{error.holder.who} leads" if error.holder else error
            self._say("follows", logging.INFO, "%s stands by: %s", self._who, why)
            return None
        except BackendUnavailable as error:
            self.trouble(error)
            return None
        self.succeeded()
        return self._lease

    def give_up(self, block: ExitStack) -> None:
        """Let the next candidate lead immediately, if this one leads; for `block`, see `gain`."""
        was_lost = self._lease is not None and self._lease.is_lost
        self._lease = None
        # A lost lease raises here, too, although the leader knows of the loss.
        with suppress(LockError):
            block.close()
        # In an outage, the log already says that this one does nothing.
        if was_lost and self._state != "trouble":
            self._say(
                "lost", logging.ERROR, "%s no longer leads, and %s nothing", self._who, self._does
            )

    def succeeded(self) -> None:
        """Log that this process leads, unless that was logged last."""
        self._say("leads", logging.INFO, "%s leads", self._who)

    def trouble(self, error: LockError) -> None:
        """Log once that the store is unavailable."""
        self._say("trouble", logging.ERROR, "%s %s nothing: %s", self._who, self._does, error)

    def _say(self, state: str, level: int, message: str, *arguments: object) -> None:
        """Log a new state, unless it was logged last."""
        if state != self._state:
            self._state = state
            extra = log_fields(
                f"{self._word}_{state}", backend=self._lock.backend, key=self._lock.key
            )
            logger.log(level, message, *arguments, extra=extra)


class _Stopped(BaseException):
    """Ends a campaign immediately: raised by the handler of a signal."""


class Term:
    """The time for which a leader leads. It is true while it lasts.

    It ends when the lease is lost, an operator requests a stop, or the leader is stopped, by
    `stop()` or by SIGTERM. Then the leader must finish its work.
    """

    def __init__(self, lease: Lease, leader: Leader):
        self._lease = lease
        self._leader = leader
        #: Whether the leader has been told of the end.
        self._is_told = False

    def __bool__(self) -> bool:
        lease = self._lease
        lasts = lease.held and not (lease.stop_requested or self._leader._is_stopped)
        self._is_told = self._is_told or not lasts
        return lasts

    @property
    def fence(self) -> int:
        """The number of the term, higher than those of earlier terms. Store it with your writes."""
        return self._lease.fence

    @property
    def lease(self) -> Lease:
        """The lease of the leader, for guards and fenced rows."""
        return self._lease

    def check(self) -> None:
        """Raise if another candidate may lead: call it before a step that must not be done twice.

        Raises:
            LockLost: The lease ended first.
        """
        self._is_told = self._is_told or not self._lease.held
        self._lease.check()

    def _is_confirmed(self) -> bool:
        """Whether the store confirms the lease: the last heartbeat may be outdated."""
        try:
            self._lease.extend()
        except (BackendUnavailable, LockLost):
            return False
        return True

    def _is_gone(self) -> bool:
        """Whether the store says that the lease is gone, which no heartbeat has seen yet."""
        try:
            self._lease.extend()
        except LockLost:
            return True
        except BackendUnavailable:
            pass
        return False

    def wait(self, duration: Duration) -> bool:
        """Sleep, but not beyond the end of the term; return whether it lasts.

        Args:
            duration: Seconds (or a `timedelta`).
        """
        until, bell = monotonic() + seconds(duration, "wait"), self._leader._bell
        while True:
            # A ring from here on ends the wait below.
            bell.clear()
            if not self:
                return False
            if (left := until - monotonic()) <= 0:
                return True
            bell.wait(min(left, LOOK))


def _leave(entered: Entered, leader: Leader, *end: object) -> None:
    left = entered.left() or (leader._by_hand or entered).left()
    if left is None:
        return
    term, block = left
    # The release may be the first to find out that the lease is gone.
    block.close()
    was_lost = term.lease.is_lost
    # A leader that was not told may have worked at the same time as another one.
    if was_lost and end[0] is None and not term._is_told:
        term.check()


class Leader:
    """A candidate, made by `leader()`. Used by one thread, except for `stop()`.

    As a context manager, it campaigns until it leads, returns the `Term`, and steps down after the
    block. In the main thread, SIGTERM stops it, unless SIGTERM is ignored: the term ends, the
    earlier handler is called, too, and a second SIGTERM has the earlier effect.
    """

    def __init__(self, name: str, lock: Lock):
        self._leadership = Leadership(lock, f"Leader {name!r}")
        self._lock = lock
        self._bell = Bell()
        self._is_stopped = self._is_used = self._campaigns = False
        self._by_hand: Entered | None = None

    def stop(self) -> None:
        """Step down, or campaign no more, for good. For any thread, and for handlers of signals.

        A leader is told immediately; a candidate checks within 5 seconds.
        """
        self._is_stopped = True
        self._bell.ring()

    def run(self, work: Callable[[Term], object]) -> None:
        """Call `work(term)` in each term that this process is elected for, until it is stopped.

        It also ends if `work` returns while its term lasts. If the term has ended, and `work`
        returns or raises `LockLost` or `FenceRejected`, the process campaigns again.

        Raises:
            Exception: Any other error of `work`; another candidate may lead immediately.
            LockUsageError: The candidate is already in use.
        """
        with self._listening():
            while self._leads_once(work):
                # The pause lets others lead, as an operator may have requested.
                self._pause()

    def _leads_once(self, work: Callable[[Term], object]) -> bool:
        """Call `work` in the next term; return whether to campaign again."""
        # Kept by this call alone, so that a signal that interrupts it releases the key.
        block = ExitStack()
        try:
            term = self._elected(block)
            if term is None:
                return False
            try:
                work(term)
                return not term or term._is_gone()
            except (LockLost, FenceRejected):
                # The error is about another lease, if this process still leads.
                if term._is_confirmed():
                    raise
                return True
        finally:
            self._leadership.give_up(block)

    def __enter__(self) -> Term:
        entered = entered_by(self)
        with ExitStack() as stack:
            stopped = stack.enter_context(self._listening())
            block = ExitStack()
            stack.callback(self._leadership.give_up, block)
            term = self._elected(block)
            if term is None:
                stack.close()
                if stopped:
                    # Nothing is held, so the signal has its usual effect.
                    signal.raise_signal(signal.SIGTERM)
                raise LockNotAcquired(
                    f"{self._lock.key!r}: the candidate was stopped before it became the leader.",
                    key=self._lock.key,
                    code="aborted",
                )
            if entered is None:
                entered = self._by_hand = Entered()
            entered.block = term, stack.pop_all()
        return term

    __exit__ = Keeping.by(_leave)

    def _elected(self, block: ExitStack) -> Term | None:
        """Campaign until this process leads; None: it was stopped first."""
        try:
            self._campaigns = True
            while not self._is_stopped:
                since = monotonic()
                if (lease := self._leadership.gain(PATIENCE, block)) is not None:
                    self._campaigns = False
                    lease.on_lost(lambda _lease: self._bell.ring())
                    return Term(lease, self)
                # Some attempts end immediately: those with errors, or if `RETRY` allows few.
                if monotonic() - since < AGAIN:
                    self._pause()
        except _Stopped:
            self._leadership.give_up(block)
        finally:
            self._campaigns = False
        return None

    def _pause(self) -> None:
        """Wait a while, unless the candidate is stopped."""
        # The loss of a term has rung the bell.
        self._bell.clear()
        if not self._is_stopped:
            self._bell.wait(AGAIN)

    @contextmanager
    def _listening(self) -> Iterator[list[int]]:
        """Let SIGTERM stop this one, in the main thread; yield the signals without a handler."""
        if self._is_used:
            raise LockUsageError(
                f"The candidate for {self._lock.key!r} is already in use. Call leader() for each"
                " block or run().",
                key=self._lock.key,
                code="unsupported",
            )
        unhandled: list[int] = []
        before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = _own_handler(signal.getsignal(signal.SIGTERM))

        def told(signum: int, frame: FrameType | None) -> None:
            if _own_handler(told) is not told:
                # A forked child is no leader, nor is one that has left: use the earlier handler.
                signal.signal(signal.SIGTERM, _own_handler(told))
                signal.raise_signal(signum)
                return
            handler = _own_handler(before)
            signal.signal(signal.SIGTERM, handler)
            self.stop()
            if callable(handler):
                handler(signum, frame)
            else:
                unhandled.append(signum)
            if self._campaigns:
                raise _Stopped

        vars(told).update(distlock_pid=os.getpid(), distlock_before=before)
        try:
            self._is_used = True
            # None means a handler that Python did not install.
            if before not in (None, signal.SIG_IGN):
                signal.signal(signal.SIGTERM, told)
            yield unhandled
        finally:
            self._is_used = False
            # A leader that entered and leaves later then restores the handler before this one.
            vars(told).update(distlock_pid=None)
            if before is not None and signal.getsignal(signal.SIGTERM) is told:
                signal.signal(signal.SIGTERM, _own_handler(before))


def _own_handler(handler: Any) -> Any:
    """Return this process's own handler, not that of a leader in a parent, or that has left."""
    while getattr(handler, "distlock_pid", os.getpid()) != os.getpid():
        handler = handler.distlock_before
    return handler
