"""The state of one holding of a key: until when it is held, and how it was lost.

The heartbeat and the timer work on it. It knows neither the `Lease` that its user has, nor the
`Release` that ends it.
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
from ..core.holders import Holder
from ..core.interruptions import Underway
from ..core.logs import log_fields
from ..core.records import Grant
from ..core.renewing import Renewing
from ..core.retry import Retry
from ..process import deferred_release
from ..process.at_exit import held_here
from ..process.deadlines import alarms
from ..process.heartbeat import Answer, Heartbeat, heartbeat_of
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
    """What a lease is held for.

    Attributes:
        ttl: Seconds of an extend that does not say; None: no expiry.
        holder: Who holds it.
        retry: Pauses between questions about it.
        hold: Seconds from the grant for which the key stays taken behind a release; 0: none.
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
    """Return for how long a key stays taken from a later grant, in the place of the first one."""
    # The clock of a store may have gone back.
    return max(0.0, hold - max(0.0, (later - first).total_seconds()))


class Keeper(Protocol):
    """What keeps a lease: a block, or who acquired it by a call."""

    @property
    def is_open(self) -> bool:
        """Whether it does so still."""


class Holding:
    """One holding of a key, from its grant to its end."""

    #: Whether this process tells what becomes of it; not of what a test lets somebody else hold.
    tells = True
    #: The thread whose transactions have kept the lease that it continues; 0: it continues none.
    goes_on = 0
    #: For how many seconds that had been held by then.
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
        self.losses = Losses()
        # Why it is lost, unless its time has passed.
        self.lost_by: str | None = None
        # Of the shortest question that got no answer: see `Granted`.
        self.unheard = granted.unheard
        self.waited = granted.waited
        # Whether a release got no answer: the store may hear it at any time.
        self.given_up = False
        self.thread = threading.current_thread()
        # Held while the store is asked, so that an extend, a renewal and a release cannot cross.
        # Whoever only looks does not take it: the store may hang.
        self.mutex = threading.RLock()
        self.renewing = Renewing(
            store.config.heartbeat,
            math.inf
            if terms.max_lifetime is None
            else self.deadline - (self.grant.ttl or 0.0) + terms.max_lifetime,
        )
        #: Whether the heartbeat renews it, and whether somebody has to be told of its end.
        self.is_renewed = self.is_watched = False
        # Seconds of the renewal that is on its way.
        self._asked_for = math.inf
        self._heartbeat: Heartbeat | None = None
        self.releasing = Underway()
        #: What it is renewed for; None: for whoever said so, or a transaction.
        self.block: Keeper | None = None

    @property
    def held(self) -> bool:
        """Whether the lease can be worked under: neither released, nor lost, nor another's."""
        is_ours = self.pid == os.getpid() and not self.given_up
        return is_ours and self.state == "held" and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the lease ended before it was released. Once True it stays so.

        It ends by its deadline, or by what the store says without being asked, if it does that.
        """
        # What a fork copied says nothing, and a release that was sent in time is a clean one.
        if (
            self.state == "held"
            and self.is_over()
            and not self.releasing
            and self.pid == os.getpid()
        ):
            self.state = "lost"
        return self.state == "lost"

    @property
    def lasts(self) -> bool:
        """Whether it does not end by itself for as long as this process lives."""
        is_renewed = self.is_renewed and self.renewing.ends_at == math.inf
        return is_renewed or self.deadline == math.inf

    def is_entered_by(self, task: asyncio.Task[object] | None) -> bool:
        """Whether a block of this thread holds it, or one of a task of this thread."""
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
            heartbeat: Renew it while it does.
            task: What works in the block.
            cancels: Whether the task is cancelled when the lease is lost.
            block: Renew it for as long as this one is open; None: until somebody ends that.
        """
        self.block = block
        if task is not None:
            self.losses.works_under(task, cancels=cancels)
        if heartbeat:
            self.keep()
        self.watch()

    def require_process(self) -> None:
        """Refuse to be used by a fork of the process that took it, by a `LockUsageError`."""
        if self.pid != os.getpid():
            raise LockUsageError(
                f"The lease on {self.key!r} belongs to process {self.pid}, not to this fork of it."
                " Acquire the lock in the process that does the work.",
                key=self.key,
                code="foreign_context",
            )

    def alone(self, work: Callable[[], T]) -> T:
        """Do some work while nobody else asks the store about the lease.

        Raises:
            LockLost: It was lost before, or by that. This is told behind the work: a callback may
                wait for threads that extend or release the lease, too.
            LockUsageError: A fork of the process that took it does. A thread of the parent may have
                had the mutex.
        """
        self.require_process()
        try:
            with self.mutex:
                return work()
        except LockLost:
            self.report_lost(self.why_over())
            raise

    def check(self, *, tells: bool = True) -> None:
        """Raise unless the lease is held: see `Lease.check`, and `lose`."""
        self.require_process()
        if self.state == "released":
            raise LockUsageError(f"The lease on {self.key!r} was released.", key=self.key)
        if self.is_lost:
            self.lose(self.why_over(), tells=tells)
        if self.given_up:
            raise LockUsageError(
                f"The lease on {self.key!r} was given up by a release that was not answered and"
                " may still arrive. Call release() again, then acquire the lock again.",
                key=self.key,
            )

    def overtaken(self, using: str, *, hold: bool) -> int | None:
        """Return the fence of the key, if somebody was granted it since; None: nobody was.

        Args:
            using: The database of a transaction that has made a row.
            hold: Let nobody be granted the key from here to its end, if the locks are there, too.

        Raises:
            BackendUnavailable: The store is unavailable.
        """
        # Many a backend cannot, and none can in the database of another.
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

    def go_on(self, kept: Holding, home: int) -> None:
        """Continue a lease that the transactions of a thread have kept, renewed as that was."""
        self.goes_on, is_renewed = home, kept.is_renewed
        expires_at, ttl, first = self.grant.expires_at, self.grant.ttl, self.grant.acquired_at
        if expires_at is None or ttl is None:
            self.held_before = kept.held_before + self.granted_at - kept.granted_at
        else:
            self.held_before = (expires_at - timedelta(seconds=ttl) - first).total_seconds()
        self.keep_window(self.terms.hold)
        kept.end_keeping()
        if is_renewed:
            self.renewing.ends_at = max(self.renewing.ends_at, kept.renewing.ends_at)
            self.terms.basic = False
            self.keep()

    def keep_window(self, hold: float) -> None:
        """Keep the key taken behind a release: for so many seconds since it was asked for last."""
        self.terms.hold = hold and self.held_before + hold

    def begin_renewal(self) -> Grant | None:
        """Return the grant with the ttl to extend it by; None: not now."""
        now, ttl = self.monotonic(), self.grant.ttl
        is_over = self._ended() or now >= self.deadline or self.losses.is_orphaned
        if ttl is None or is_over:
            # Put back by an extend that another thread's release has overtaken, or over.
            heartbeat_of(self.store).discard(self)
            return None
        seconds = self.renewing.ttl(now, ttl)
        # A renewal never shortens: without its reply, the holder would not know. And what the
        # holder has extended beyond the lifetime is not cut short.
        if seconds is None or (seconds < ttl and now + seconds <= self.deadline):
            self.renewing.due_at = math.inf
            return None
        # Who extends it right now renews it, and who releases it ends it.
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
        """Take the answer: renewed, gone, or unknown."""
        lost = None
        slack = 0.0
        try:
            now = self.monotonic()
            slack = max(0.0, self.deadline - now)
            if isinstance(answer, Grant) and answer.ttl is not None:
                deadline = sent_at + self.counted(answer.ttl)
                if not self.is_lost and now < deadline:
                    # What a maximum lifetime has cut short is not what the next renewal asks for.
                    self.grant = replace(answer, ttl=self.grant.ttl)
                    self.renewing.renewed(sent_at, self.counted(self.grant.ttl))
                    self.deadline = deadline
            elif answer is None:
                lost = GONE
            else:
                # `UNKNOWN` is also a part of the store that did not answer.
                self.unheard = self.counted(self._asked_for)
                if self.renewing.failed(now):
                    lost = f"{self.renewing.failures} renewals in a row had no answer"
            if lost is not None and self.state == "held":
                self.lost_by, self.state = lost, "lost"
        finally:
            self.mutex.release()
        if lost is not None:
            self.end_keeping()
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
            # A receiver may take long, and the next beat must not wait for it.
            deferred_release.tell_later(
                partial(self.tell, lock_extended, ttl=self.grant.ttl, slack=slack, cause=cause)
            )

    # For the timer

    def watch(self) -> None:
        """Let the timer say when the lease is over, or about to be."""
        # Also without an end: an extend may give it one.
        self.is_watched = True
        if self.deadline < math.inf:
            alarms.add(self)

    def alarm_in(self) -> float:
        """Return in how many seconds there is something to tell."""
        if self.releasing:
            return math.inf  # The store's answer decides.
        return self.losses.next_due(self.deadline) - self.monotonic()

    def alarm(self) -> None:
        """Tell what is due: a warning, or the loss."""
        # In this order: a release that begins behind the first look sees that it is over.
        is_over = self.is_over()
        if self.releasing:
            return
        if self not in held_here:
            # Watched anew by an extend that crossed with its end.
            self.end_keeping()
            return
        if is_over:
            self.end_keeping()
            self.state = "lost"
            self.report_lost(self.why_over(), by_timer=True)
        elif callbacks := self.losses.warnings(self.deadline, self.monotonic()):
            apart(partial(warn, callbacks))

    def is_over(self) -> bool:
        """Whether its time has passed, or the store has said that it is gone."""
        if self.monotonic() >= self.deadline:
            return True
        # What a fork copied says nothing: the parent's lease is the parent's.
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
        """Let the heartbeat ask in time: the end of the lease may have come nearer."""
        self.renewing.due_at = min(self.renewing.due_at, self.monotonic())
        self.keep_on()

    def shorten(self, deadline: float) -> None:
        """Count on nothing beyond an end that is asked for: its answer may be lost."""
        if deadline < self.deadline:
            self.deadline = deadline
            # Whatever interrupts this.
            self.renew_soon()

    def keep_on(self) -> None:
        """Tell the timers that the lease may end sooner, or at all."""
        if self.is_renewed and self._heartbeat is not None:
            self._heartbeat.add(self)
        if self.is_watched and self.deadline < math.inf:
            alarms.add(self)
        if self._ended():
            self.end_keeping()  # It crossed with an end.

    def end_keeping(self) -> None:
        """Neither renew nor watch the lease any more."""
        self.is_renewed = self.is_watched = False
        if self._heartbeat is not None:
            self._heartbeat.discard(self)
        alarms.discard(self)

    # The loss

    def report_lost(self, cause: str, *, by_timer: bool = False) -> None:
        """Tell that the lease is lost, unless that was told; `by_timer`: in a thread of its own."""
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
        """Raise `LockLost`, and tell of it before; or leave that to `alone`."""
        if tells:
            self.report_lost(cause)
        else:
            self.state, self.lost_by = "lost", cause
        raise LockLost(
            f"The lease on {self.key!r} (fence {self.fence}) is lost: {cause}.", key=self.key
        )

    def counted(self, ttl: float | None) -> float:
        """Return for how many seconds an extend counts: a shorter one may be heard behind it."""
        return self.unheard if ttl is None else min(ttl, self.unheard)

    def _ended(self) -> bool:
        """Whether there is nothing to keep; what waits for a transaction's end is kept."""
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
