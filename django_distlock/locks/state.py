"""What keeps a lease alive, and what notices when it is not: the part that timers talk to."""

from __future__ import annotations

import logging
import math
import os
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn

from ..backends.base import BaseLockBackend
from ..core.errors import BackendUnavailable, LockError, LockLost
from ..core.holders import Holder
from ..core.interruptions import Underway
from ..core.logs import log_fields
from ..core.records import Grant
from ..core.renewing import Renewing
from ..core.retry import Retry
from ..process import deferred_release
from ..process.at_exit import held_here
from ..process.deadlines import alarms
from ..process.heartbeat import Answer, heartbeat_of
from ..process.host import monotonic
from ..signals import lock_extended, lock_lost, tell
from .attempts import Granted
from .blocks import Block
from .callbacks import Losses, apart, warn

logger = logging.getLogger("django_distlock")

OVER = "its deadline has passed"
OVER_AT_LAST = "its max_lifetime is over"
GONE = "the store does not know it any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a lease is held for.

    Attributes:
        ttl: Seconds of an extend that does not say; None: no expiry.
        holder: Who holds it.
        retry: Pauses between questions about it.
        hold: Seconds from the grant for which the key stays taken behind a release; 0: none.
        max_lifetime: Seconds from the grant until which a heartbeat renews it; None: for ever.
        basic: Whether nothing ever renews it.
    """

    ttl: float | None
    holder: Holder
    retry: Retry
    hold: float = 0.0
    max_lifetime: float | None = None
    basic: bool = False


class KeptLease:
    """The state of a lease: until when it is held, and how it was lost.

    Args:
        granted: The grant, and by when its holder must have stopped.
        block: What ends it where it does not reach who asked for it.
    """

    def __init__(
        self,
        backend: BaseLockBackend,
        granted: Granted,
        terms: Terms,
        block: Block | None = None,
    ):
        self.key = granted.grant.key
        self.backend = backend.alias
        self.token = granted.grant.token
        self.fence = granted.grant.fence
        self.deadline = granted.deadline
        self._store = backend
        self._grant = granted.grant
        self._terms = terms
        self._granted_at = monotonic()
        self._held_for = 0.0
        self._pid = os.getpid()
        self._state: Literal["held", "lost", "released"] = "held"
        self._losses = Losses()
        # What a renewal said of it, where its time has not passed.
        self._lost_by: str | None = None
        # Seconds of the shortest extend that got no answer: the store may hear it behind others.
        self._unheard = math.inf
        self._thread = threading.current_thread()
        # Held while the store is asked, so that an extend, a renewal and a release cannot cross.
        # Whoever only looks does not take it: the store may hang.
        self._mutex = threading.RLock()
        self.renewing = Renewing(
            backend.config.heartbeat,
            math.inf
            if terms.max_lifetime is None
            else self.deadline - (self._grant.ttl or 0.0) + terms.max_lifetime,
        )
        self._is_renewed = self._is_watched = False
        self._releasing = Underway()
        #: What it is renewed for; None: for whoever said so, or a transaction.
        self._block: Block | None = None
        if block is not None:
            block.lease = self
        held_here.add(self)
        if block is not None:
            # From here on the lease stands for the grant.
            block.attempts = None

    @property
    def held(self) -> bool:
        """Whether the lease can be worked under: neither released, nor lost, nor another's."""
        return self._pid == os.getpid() and self._state == "held" and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the lease ended before it was released. Once True it stays so.

        It ends by its deadline, or by what the store says without being asked, if it does that.
        """
        # What a fork copied says nothing, and a release that was sent in time is a clean one.
        says = self._pid == os.getpid() and not self._releasing
        if self._state == "held" and says and self.is_over():
            self._state = "lost"
        return self._state == "lost"

    @property
    def is_watched(self) -> bool:
        """Whether somebody has to be told of its end."""
        return self._is_watched

    # For the heartbeat

    def keep(self) -> None:
        """Let the heartbeat renew the lease until it ends."""
        if self._grant.ttl is None or self._terms.basic or self._is_renewed:
            return
        if self._store.can_renew:
            self._is_renewed = True
            self.renewing.renewed(self.deadline - self._grant.ttl, self._grant.ttl)
            heartbeat_of(self._store).add(self)

    def begin_renewal(self) -> Grant | None:
        """Return the grant with the ttl to extend it by; None: not now."""
        now, ttl = monotonic(), self._grant.ttl
        is_over = self._ended() or now >= self.deadline or self._losses.is_orphaned
        if ttl is None or is_over:
            # Put back by an extend that another thread's release has overtaken, or over.
            heartbeat_of(self._store).discard(self)
            return None
        seconds = self.renewing.ttl(now, ttl)
        # A renewal never shortens: without its reply, the holder would not know. And what the
        # holder has extended beyond the lifetime is not cut short.
        if seconds is None or (seconds < ttl and now + seconds <= self.deadline):
            self.renewing.due_at = math.inf
            return None
        # Who extends it right now renews it, and who releases it ends it.
        if not self._mutex.acquire(blocking=False):
            left = min(self.renewing.interval, self.deadline - now)
            self.renewing.due_at = now + max(0.01, left / 10)
            return None
        if self._ended():
            self._mutex.release()
            self.renewing.due_at = math.inf
            return None
        return self._grant if seconds == ttl else replace(self._grant, ttl=seconds)

    def end_renewal(self, sent_at: float, answer: Answer) -> None:
        """Take the answer: renewed, gone, or unknown."""
        lost = None
        slack = 0.0
        try:
            now = monotonic()
            slack = max(0.0, self.deadline - now)
            if isinstance(answer, Grant) and answer.ttl is not None:
                deadline = sent_at + self._counted(answer.ttl)
                if not self.is_lost and now < deadline:
                    # What a maximum lifetime has cut short is not what the next renewal asks for.
                    self._grant = replace(answer, ttl=self._grant.ttl)
                    self.renewing.renewed(sent_at, self._counted(self._grant.ttl))
                    self.deadline = deadline
            elif answer is None:
                lost = GONE
            else:
                if isinstance(answer, LockError):
                    self._unheard = self._counted(self._grant.ttl)
                if self.renewing.failed(now):
                    lost = f"{self.renewing.failures} renewals in a row had no answer"
            if lost is not None and self._state == "held":
                self._lost_by, self._state = lost, "lost"
        finally:
            self._mutex.release()
        if lost is not None:
            self._end_keeping()
            self.report_lost(lost, by_timer=True)
        elif lock_extended.has_listeners(type(self._store)):
            cause = answer if isinstance(answer, Exception) else None
            if cause is None and not isinstance(answer, Grant):
                cause = BackendUnavailable(
                    f"{self.key!r} could not be renewed in time: a transaction is in the way in the"
                    " store, or a part of it did not answer.",
                    key=self.key,
                    code="network_timeout",
                )
            # A receiver may take long, and the next beat must not wait for it.
            deferred_release.tell_later(
                partial(self._tell, lock_extended, ttl=self._grant.ttl, slack=slack, cause=cause)
            )

    # For the timer

    def watch(self) -> None:
        """Let the timer say when the lease is over, or about to be."""
        # Also without an end: an extend may give it one.
        self._is_watched = True
        if self.deadline < math.inf:
            alarms.watch(self)

    def next_alarm(self) -> float:
        """Return when there is something to tell."""
        if self._releasing:
            return math.inf  # The store's answer decides.
        return min(self.deadline, self._losses.next_warning(self.deadline))

    def alarm(self) -> None:
        """Tell what is due: a warning, or the loss."""
        # In this order: a release that begins behind the first look sees that it is over.
        is_over = self.is_over()
        if self._releasing:
            return
        if self not in held_here:
            # Watched anew by an extend that crossed with its end.
            self._end_keeping()
            return
        if is_over:
            self._end_keeping()
            self._state = "lost"
            self.report_lost(self._why_over(), by_timer=True)
        elif callbacks := self._losses.warnings(self.deadline, monotonic()):
            apart(partial(warn, callbacks, self))

    def is_over(self) -> bool:
        """Whether its time has passed, or the store has said that it is gone."""
        return monotonic() >= self.deadline or self._is_cut_off()

    def _why_over(self) -> str:
        now = monotonic()
        if self._lost_by is not None:
            return self._lost_by
        if now < self.deadline:
            return GONE
        return OVER_AT_LAST if now >= self.renewing.ends_at else OVER

    def _keep_on(self) -> None:
        """Tell the timers that the lease may end sooner, or at all."""
        if self._is_renewed:
            heartbeat_of(self._store).add(self)
        if self._is_watched and self.deadline < math.inf:
            alarms.watch(self)
        if self._ended():
            self._end_keeping()  # It crossed with an end.

    def _end_keeping(self) -> None:
        """Neither renew nor watch the lease any more."""
        self._is_renewed = self._is_watched = False
        heartbeat_of(self._store).discard(self)
        alarms.drop(self)

    # The loss

    def report_lost(self, cause: str, *, by_timer: bool = False) -> None:
        """Tell that the lease is lost, unless that has been told.

        Args:
            by_timer: Let those who are told take their time in a thread of their own.
        """
        if not self._losses.claim():
            return
        self._losses.cancel()
        if by_timer:
            apart(partial(self._tell_lost, cause))
        else:
            self._tell_lost(cause)

    def _tell_lost(self, cause: str) -> None:
        held_for = monotonic() - self._granted_at
        extra = self._fields("lost")
        logger.warning(
            "The lease on %r (fence %d) is lost: %s", self.key, self.fence, cause, extra=extra
        )
        self._tell(lock_lost, held_for=held_for, cause=cause)
        self._losses.call(self)

    def _lose(self, cause: str) -> NoReturn:
        self.report_lost(cause)
        raise LockLost(
            f"The lease on {self.key!r} (fence {self.fence}) is lost: {cause}.", key=self.key
        )

    def _counted(self, ttl: float | None) -> float:
        """Return for how many seconds an extend counts: a shorter one may be heard behind it."""
        return self._unheard if ttl is None else min(ttl, self._unheard)

    def _ended(self) -> bool:
        """Whether there is nothing to keep; what waits for a transaction's end is kept."""
        is_left = self._block is not None and not self._block.is_open
        return is_left or self not in held_here or self._state == "lost"

    def _is_cut_off(self) -> bool:
        # What a fork copied says nothing: the parent's lease is the parent's.
        return self._pid == os.getpid() and self._store.is_cut_off(self._grant)

    def _tell(self, signal: Any, **facts: Any) -> None:
        tell(
            signal,
            type(self._store),
            alias=self.backend,
            key=self.key,
            fence=self.fence,
            holder=self._terms.holder,
            **facts,
        )

    def _fields(self, event: str, error: BaseException | None = None) -> dict[str, Any]:
        """Return the `extra` of a log record about this lease."""
        return log_fields(
            event,
            backend=self.backend,
            key=self.key,
            fence=self.fence,
            holder=self._terms.holder,
            error=error,
        )

    def release_at_exit(self, patience: float) -> None:
        """Release within so many seconds: the interpreter ends."""
        raise NotImplementedError
