"""The state of one lease: until when it is held, and why it was lost.

The heartbeat and the deadline timer work on a `Holding`. It knows neither the `Lease` that users
see, nor the `Release` that ends it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from ..backends.base import BaseLockBackend
from ..core.errors import BackendUnavailable, LockLost, LockUsageError
from ..core.logs import log_fields
from ..core.records import Grant, Holder
from ..core.retry import Retry
from ..core.threads import Underway
from ..process import deferred_release
from ..process.heartbeat import Answer, Heartbeat, Renewing, alarms, heartbeat_of, held_here
from ..signals import lock_extended, lock_lost, tell
from .attempts import Granted
from .callbacks import Losses, apart, warn

T = TypeVar("T")

logger = logging.getLogger("django_distlock")

OVER = "its deadline has passed"
OVER_AT_LAST = "its max_lifetime has passed"
GONE = "the store no longer has it"


@dataclass(slots=True, kw_only=True)
class Terms:
    """The conditions under which a lease is held.

    Attributes:
        ttl: Seconds of an extend without a ttl of its own; None: no expiry.
        holder: Who holds it.
        retry: Pauses between attempts to extend or release it.
        hold: Seconds from the grant for which the key stays taken after a release; 0: none.
        max_lifetime: Seconds from the grant until which a heartbeat renews it; None: for ever.
        basic: Whether nothing ever renews it.
        permits: How many may hold the key at the same time; None: any number.
    """

    ttl: float | None
    holder: Holder
    retry: Retry
    hold: float = 0.0
    max_lifetime: float | None = None
    basic: bool = False
    permits: int | None = 1


def hold_from(later: datetime, hold: float, first: datetime) -> float:
    """Return the rest of `hold` at a later grant, when it counts from the first one."""
    # The store's clock may have gone back.
    return max(0.0, hold - max(0.0, (later - first).total_seconds()))


class Keeper(Protocol):
    """What keeps a lease renewed: a block, or the owner of a lease without a block."""

    @property
    def is_open(self) -> bool:
        """Whether it still does."""


class Holding:
    """One holding of a key, from its grant to its end."""

    #: Whether signals, logs and callbacks report it; False where a test lets somebody else hold it.
    tells = True
    #: The thread whose transactions kept the lease that this one continues; 0: it continues none.
    goes_on = 0
    #: For how many seconds the lease before had been held by then.
    held_before = 0.0

    def __init__(self, store: BaseLockBackend, granted: Granted, terms: Terms):
        self.key = granted.grant.key
        self.backend = store.alias
        self.name = store.alias, granted.grant.key
        self.token = granted.grant.token
        self.fence = granted.grant.fence
        self.deadline = granted.deadline
        self.store = store
        self.monotonic = store.monotonic
        self.grant = granted.grant
        self.terms = terms
        self.granted_at = store.monotonic()
        self.pid = os.getpid()
        self.state: Literal["held", "lost", "released"] = "held"
        self.losses = Losses(threading.Lock())
        # Why it was lost, if not by its deadline.
        self.lost_by: str | None = None
        # The ttl of the shortest request that got no answer: see `Granted`.
        self.unheard = granted.unheard
        self.waited = granted.waited
        # Whether a release got no answer: the store may carry it out at any time.
        self.given_up = False
        self.thread = threading.current_thread()
        # Held during a request to the store, so that extend, renewal and release never overlap.
        # Readers of the state do not take it, because the store may hang.
        self.mutex = threading.RLock()
        self.renewing = Renewing(
            store.config.heartbeat,
            math.inf
            if terms.max_lifetime is None
            else self.deadline - (self.grant.ttl or 0.0) + terms.max_lifetime,
        )
        #: Whether the heartbeat renews it, and whether the timer reports its loss.
        self.is_renewed = self.is_watched = False
        # The ttl of the renewal in flight.
        self._asked_for = math.inf
        self._heartbeat: Heartbeat | None = None
        self.releasing = Underway()
        #: What it is renewed for; None: it is renewed until somebody ends that.
        self.block: Keeper | None = None

    @property
    def held(self) -> bool:
        """Whether work may rely on it: it is neither released, lost, nor another process's."""
        is_ours = self.pid == os.getpid() and not self.given_up
        return is_ours and self.state == "held" and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the lease ended before it was released. Once True, it stays True.

        It ends by its deadline, or because the store has reported its end (session locks).
        """
        # A fork's copy proves nothing, and a release that was sent in time is a clean one.
        if (
            self.state == "held"
            and self.is_over()
            and not self.releasing
            and self.pid == os.getpid()
            # Last: a release may have ended during this look.
            and self.state == "held"
        ):
            self.state = "lost"
        return self.state == "lost"

    @property
    def lasts(self) -> bool:
        """Whether it has no end of its own while this process lives."""
        is_renewed = self.is_renewed and self.renewing.ends_at == math.inf
        return is_renewed or self.deadline == math.inf

    def is_entered_by(self, task: asyncio.Task[object] | None) -> bool:
        """Whether a block of this thread holds it: of this task, or of no task if None."""
        return self.thread is threading.current_thread() and self.losses.is_task(task)

    def begin_block(
        self,
        *,
        heartbeat: bool,
        task: asyncio.Task[object] | None = None,
        cancels: bool = True,
        block: Keeper | None = None,
    ) -> None:
        """Let a block hold the lease.

        Args:
            heartbeat: Renew the lease during the block.
            task: The task that works in the block.
            cancels: Whether a loss cancels the task.
            block: Renew it while this block is open; None: until somebody ends that.
        """
        self.block = block
        if task is not None:
            self.losses.works_under(task, cancels=cancels)
        if heartbeat:
            self.keep()
        self.watch()

    def require_process(self) -> None:
        """Raise `LockUsageError` in a fork of the process that acquired the lease."""
        if self.pid != os.getpid():
            raise LockUsageError(
                f"The lease on {self.key!r} belongs to process {self.pid}, not to this fork of it."
                " Acquire the lock in the process that does the work.",
                key=self.key,
                code="foreign_context",
            )

    def alone(self, work: Callable[[], T]) -> T:
        """Run `work` with the mutex of the lease held.

        Raises:
            LockLost: The lease is lost. This is reported without the mutex, because a callback may
                wait for a thread that extends or releases the lease.
            LockUsageError: This is a fork of the process that acquired the lease. A thread of the
                parent may have held the mutex.
        """
        self.require_process()
        try:
            with self.mutex:
                return work()
        except LockLost:
            self.report_lost(self.why_over())
            raise

    def check(self, *, tells: bool = True) -> None:
        """Raise unless the lease is held: see `Lease.check`; for `tells`, see `lose`."""
        self.require_process()
        if self.state == "released":
            raise LockUsageError(f"The lease on {self.key!r} was released.", key=self.key)
        if self.is_lost:
            self.lose(self.why_over(), tells=tells)
        if self.given_up:
            raise LockUsageError(
                f"The lease on {self.key!r} was given up by a release or downgrade that was not"
                " answered and may still arrive. Call release() again, then acquire the lock"
                " again.",
                key=self.key,
            )

    def overtaken(self, using: str, *, hold: bool) -> int | None:
        """Return the fence of the key if somebody was granted it since; otherwise None.

        Args:
            using: The database of the caller's transaction.
            hold: Where the locks are in that database, grant the key to nobody until it ends.

        Raises:
            BackendUnavailable: The store is unavailable.
        """
        # Some backends cannot guard, and none can in a database without its locks.
        with suppress(LockUsageError):
            if hold and self.store.guards.hold(self.grant, using):
                return None
        counter = self.store.counter(self.key, beside=using)
        return None if counter is None or counter.fence <= self.fence else counter.fence

    # For the heartbeat

    def keep(self) -> None:
        """Let the heartbeat renew the lease until it ends."""
        if self.grant.ttl is None or self.terms.basic or self.is_renewed:
            return
        if self.store.can_renew:
            self.is_renewed = True
            self.renewing.renewed(self.deadline - self.grant.ttl, self.grant.ttl)
            self._heartbeat = heartbeat_of(self.store)
            self._heartbeat.add(self)

    def go_on(self, kept: Holding, home: int, lasts: float) -> None:
        """Continue a lease that a thread's transactions have kept; renew it if that was renewed.

        Args:
            kept: The lease.
            home: The thread.
            lasts: Until when it would have lasted. If this one is to end earlier, but is not basic,
                it is renewed until then: the key stays taken for as long as it was to be.
        """
        self.goes_on, is_renewed = home, kept.is_renewed
        expires_at, ttl, first = self.grant.expires_at, self.grant.ttl, self.grant.acquired_at
        if expires_at is None or ttl is None:
            self.held_before = kept.held_before + self.granted_at - kept.granted_at
        else:
            self.held_before = (expires_at - timedelta(seconds=ttl) - first).total_seconds()
        self.keep_window(self.terms.hold)
        kept.end_keeping()
        if is_renewed or not self.terms.basic:
            ends_at = kept.renewing.ends_at if is_renewed else lasts
            self.renewing.ends_at = max(self.renewing.ends_at, ends_at)
            self.terms.basic = False
            self.keep()

    def keep_window(self, hold: float) -> None:
        """Set the seconds, from the latest grant on, for which a release keeps the key taken."""
        self.terms.hold = hold and self.held_before + hold

    def begin_renewal(self) -> Grant | None:
        """Return the grant to renew, with the ttl to ask for; None: not now."""
        now, ttl = self.monotonic(), self.grant.ttl
        is_over = self._ended() or now >= self.deadline or self.losses.is_orphaned
        if ttl is None or is_over:
            # It is over, or an extend has registered it again after another thread's release.
            heartbeat_of(self.store).discard(self)
            return None
        seconds = self.renewing.ttl(now, ttl)
        # A renewal never shortens the lease: if its answer is lost, the holder would not know. And
        # an extend by the holder beyond the maximum lifetime is not cut short.
        if seconds is None or (seconds < ttl and now + seconds <= self.deadline):
            self.renewing.due_at = math.inf
            return None
        # Somebody extends it right now, which renews it too, or releases it.
        if not self.mutex.acquire(blocking=False):
            left = min(self.renewing.interval, self.deadline - now)
            self.renewing.due_at = now + max(0.01, left / 10)
            return None
        if self._ended():
            self.mutex.release()
            self.renewing.due_at = math.inf
            return None
        self._asked_for = seconds
        return self.grant if seconds == ttl else replace(self.grant, ttl=seconds)

    def end_renewal(self, sent_at: float, answer: Answer) -> None:
        """Process the answer to a renewal: extended, gone, or unknown."""
        lost = None
        slack = 0.0
        try:
            now = self.monotonic()
            slack = max(0.0, self.deadline - now)
            if isinstance(answer, Grant) and answer.ttl is not None:
                deadline = sent_at + self.counted(answer.ttl)
                if not self.is_lost and now < deadline:
                    # The last renewal before `max_lifetime` is shorter; the lease keeps its ttl.
                    self.grant = replace(answer, ttl=self.grant.ttl)
                    self.renewing.renewed(sent_at, self.counted(self.grant.ttl))
                    self.deadline = deadline
            elif answer is None:
                lost = GONE
            else:
                # `UNKNOWN` also stands for a part of the store, such as a node, without an answer.
                self.unheard = self.counted(self._asked_for)
                if self.renewing.failed(now):
                    lost = f"{self.renewing.failures} renewals in a row had no answer"
            if lost is not None and self.state == "held":
                self.lost_by, self.state = lost, "lost"
        finally:
            self.mutex.release()
        if lost is not None:
            self.end_keeping()
            # The end of an interrupted block does not wait for a renewal that is under way.
            if self.state == "lost" or self in held_here:
                self.report_lost(lost, by_timer=True)
        elif lock_extended.has_listeners(type(self.store)):
            cause = answer if isinstance(answer, Exception) else None
            if cause is None and not isinstance(answer, Grant):
                cause = BackendUnavailable(
                    f"{self.key!r} could not be renewed in time: a transaction in the store blocks"
                    " it, or part of the store did not answer.",
                    key=self.key,
                    code="network_timeout",
                )
            # A receiver may take long, and must not delay the next heartbeat.
            deferred_release.tell_later(
                partial(self.tell, lock_extended, ttl=self.grant.ttl, slack=slack, cause=cause)
            )

    # For the timer

    def watch(self) -> None:
        """Let the timer report when the lease is over, or about to be."""
        # Set even without a deadline: an extend may give it one.
        self.is_watched = True
        if self.deadline < math.inf:
            alarms.add(self)

    def alarm_in(self) -> float:
        """Return the seconds until there is something to report."""
        if self.releasing:
            return math.inf  # The answer to the release decides.
        due = self.losses.next_due(self.deadline) if self.losses.warns else self.deadline
        return due - self.monotonic()

    def alarm(self) -> None:
        """Report what is due: a warning, or the loss."""
        # In this order: a release that begins after this line sees for itself that it is over.
        is_over = self.is_over()
        if self.releasing:
            return
        if self not in held_here:
            # An extend that overlapped with the release has registered it again.
            self.end_keeping()
            return
        if is_over:
            self.end_keeping()
            self.state = "lost"
            self.report_lost(self.why_over(), by_timer=True)
        elif callbacks := self.losses.warnings(self.deadline, self.monotonic()):
            apart(partial(warn, callbacks))

    def is_over(self) -> bool:
        """Whether its deadline has passed, or the store has reported that it is gone."""
        if self.monotonic() >= self.deadline:
            return True
        # In a fork, the connection of the lease is the parent's.
        return self.pid == os.getpid() and self.store.is_cut_off(self.grant)

    def why_over(self) -> str:
        """Return why a lease is lost."""
        now = self.monotonic()
        if self.lost_by is not None:
            return self.lost_by
        if now < self.deadline:
            return GONE
        return OVER_AT_LAST if now >= self.renewing.ends_at else OVER

    def renew_soon(self) -> None:
        """Let the heartbeat renew the lease at once: its deadline may be nearer than before."""
        self.renewing.due_at = min(self.renewing.due_at, self.monotonic())
        self.keep_on()

    def shorten(self, deadline: float) -> None:
        """Move the deadline nearer before a shorter ttl is asked for: the answer may be lost."""
        if deadline < self.deadline:
            self.deadline = deadline
            # Here, because a signal's handler may raise before the answer has come.
            self.renew_soon()

    def keep_on(self) -> None:
        """Let the heartbeat and the timer look at the lease again: its deadline has changed."""
        if self.is_renewed and self._heartbeat is not None:
            self._heartbeat.add(self)
        if self.is_watched and self.deadline < math.inf:
            alarms.add(self)
        if self._ended():
            self.end_keeping()  # The lease ended meanwhile, in another thread.

    def end_keeping(self) -> None:
        """Stop renewing and watching the lease."""
        self.is_renewed = self.is_watched = False
        if self._heartbeat is not None:
            self._heartbeat.discard(self)
        alarms.discard(self)

    # The loss

    def report_lost(self, cause: str, *, by_timer: bool = False) -> None:
        """Report the loss once; `by_timer`: in a thread of its own."""
        if not self.losses.claim():
            return
        self.losses.cancel()
        if by_timer:
            apart(partial(self._tell_lost, cause))
        else:
            self._tell_lost(cause)

    def _tell_lost(self, cause: str) -> None:
        if not self.tells:
            return
        held_for = self.monotonic() - self.granted_at
        extra = self.log_fields("lost")
        logger.warning(
            "The lease on %r (fence %d) is lost: %s", self.key, self.fence, cause, extra=extra
        )
        self.tell(lock_lost, held_for=held_for, cause=cause)
        self.losses.call()

    def lose(self, cause: str, *, tells: bool = True) -> NoReturn:
        """Report the loss and raise `LockLost`; without `tells`, `alone` reports it later."""
        if tells:
            self.report_lost(cause)
        else:
            self.state, self.lost_by = "lost", cause
        raise LockLost(
            f"The lease on {self.key!r} (fence {self.fence}) is lost: {cause}.", key=self.key
        )

    def counted(self, ttl: float | None) -> float:
        """Return for how many seconds an extend counts.

        A shorter request without an answer may still reach the store after it.
        """
        return self.unheard if ttl is None else min(ttl, self.unheard)

    def _ended(self) -> bool:
        """Whether renewing it has become pointless. Not while a transaction keeps it."""
        is_left = self.block is not None and not self.block.is_open
        return is_left or self.given_up or self not in held_here or self.state == "lost"

    def tell(self, signal: Any, **facts: Any) -> None:
        """Send a signal about this lease."""
        if self.tells and signal.receivers:
            tell(
                signal,
                type(self.store),
                alias=self.backend,
                key=self.key,
                fence=self.fence,
                holder=self.terms.holder,
                **facts,
            )

    def log_fields(self, event: str, error: BaseException | None = None) -> dict[str, Any]:
        """Return the `extra` of a log record about this lease."""
        return log_fields(
            event,
            backend=self.backend,
            key=self.key,
            fence=self.fence,
            holder=self.terms.holder,
            error=error,
        )
