"""A lease: one holding of a lock, from its grant to its end."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn, Protocol, TypeVar

from asgiref.sync import sync_to_async
from django.db import transaction

from ..core import budgets
from ..core.durations import MAX_BOUND, Duration, seconds, ttl_seconds
from ..core.errors import InvalidArgument, LockError, LockUsageError
from ..core.holders import Holder
from ..core.records import Grant, Unknown
from ..core.renewing import DANGER_PART
from ..process import deferred_release
from ..process.at_exit import held_here
from ..process.host import monotonic
from ..signals import lock_extended
from . import transfer
from .acquire import insist
from .attempts import Granted
from .blocks import Block
from .callbacks import Callback
from .release import EndingLease
from .state import GONE, Terms

Fenceable = TypeVar("Fenceable", bound="HasFence")


class HasFence(Protocol):
    """A row that can be fenced."""

    def raise_fence(self, lease: Any) -> None:
        """Raise its fence to that of a lease, and load the row anew."""


class Lease(EndingLease):
    """The right to work on a key until a deadline.

    Made by `Lock`; a lease belongs to the process that took it. Times of the store (`acquired_at`,
    `expires_at`) are for people; the holder's own decision to stop is made by `deadline`.

    Attributes:
        key: The key, normalised.
        backend: The alias of its backend.
        token: The proof of ownership. A bearer secret: not in the lease's `repr`.
        fence: Grows with every grant of the key.
        deadline: When to stop, in seconds of this process's monotonic clock (`host.monotonic`);
            infinite without expiry. Counted from before the request, so never too late.
    """

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else "held" if self.held else "released"
        return f"<Lease {self.key!r} fence={self.fence} {state} {self.remaining():.1f} s>"

    def __bool__(self) -> bool:
        """Whether it is `held`."""
        return self.held

    def __reduce__(self) -> NoReturn:
        raise TypeError("A lease belongs to the process that took it and cannot be pickled.")

    @property
    def fence_token(self) -> str:
        """The fence as 15 digits, whose order as text is that of the numbers."""
        return f"{self.fence:015d}"

    @property
    def acquired_at(self) -> datetime:
        """When the key was granted, by the store's clock, aware."""
        return self._grant.acquired_at

    @property
    def expires_at(self) -> datetime | None:
        """When the lease ends if nobody extends it, by the store's clock; None: no expiry."""
        return self._grant.expires_at

    @property
    def stop_requested(self) -> bool:
        """Whether an operator asked the holder to finish, as of the last extend."""
        return self._grant.stop_requested

    @property
    def is_released(self) -> bool:
        """Whether it was given up. Inside a transaction the key is freed at its end."""
        return self._state == "released"

    def remaining(self) -> float:
        """Return the seconds left, at least 0; infinite without expiry."""
        return max(0.0, self.deadline - monotonic()) if self.held else 0.0

    def check(self) -> None:
        """Raise unless the lease is held: call it before a step that must not be done twice.

        Raises:
            LockLost: It ended first.
            LockUsageError: It was released, or belongs to another process.
        """
        self.require_process()
        if self._state == "released":
            raise LockUsageError(f"The lease on {self.key!r} was released.", key=self.key)
        if self.is_lost:
            self._lose(self._why_over())

    def on_lost(self, callback: Callback) -> None:
        """Call `callback(lease)` when the lease is lost, at its deadline at the latest.

        Once, in a thread of its own, unless `check()` or the end of the block finds out first;
        never behind a clean release. Where the lease is lost already, at once.

        Raises:
            InvalidArgument: It cannot be called, or would have to be awaited.
        """
        self.require_process()
        self._losses.on_lost(callback, self)
        if self.is_lost:
            self.report_lost(self._why_over())
        elif self._state == "held":
            self.watch()

    def on_danger(self, callback: Callback, before: Duration | None = None) -> None:
        """Call `callback(lease)` when the lease will be lost soon, unless it is extended by then.

        Called again if the lease was extended meanwhile and comes into danger once more.

        Args:
            before: Seconds (or a `timedelta`) before the deadline, less than the ttl; None: a
                quarter of the ttl. A heartbeat has failed twice by then.

        Raises:
            InvalidArgument: The callback cannot be called, or `before` breaks a rule.
        """
        self.require_process()
        ttl = math.inf if self._grant.ttl is None else self._grant.ttl
        if before is None:
            before = 0.0 if ttl == math.inf else ttl * DANGER_PART
        before = seconds(before, "before")
        if before >= ttl:
            raise InvalidArgument(
                f"before ({before:g} s) must be below the ttl ({ttl:g} s), or it would be called"
                " with every renewal.",
                key=self.key,
            )
        self._losses.on_danger(callback, before)
        if self._state == "held":
            self.watch()

    def extend(self, ttl: Duration | None = None) -> None:
        """Make the lease end `ttl` seconds from now, be it later or sooner than before.

        Where a shorter extend got no answer, the lease ends after its seconds at the latest from
        then on: the store may hear it late.

        Args:
            ttl: Seconds (or a `timedelta`), from 0.1 to `MAX_TTL`; None: the lock's ttl.

        Raises:
            LockLost: It ended first.
            BackendUnavailable: The store did not answer. The lease stands until its deadline.
            InvalidArgument: `ttl` breaks a rule.
            LockUsageError: It was released, or belongs to another process.
        """
        with self._mutex:
            self.check()
            longest = self._store.config.max_ttl
            new = self._terms.ttl if ttl is None else ttl_seconds(ttl, maximum=longest)
            before, sent_at, deadline = self.deadline, 0.0, self.deadline

            def question(bound: float) -> Grant | Unknown | None:
                nonlocal sent_at, deadline
                sent_at = monotonic()
                deadline = sent_at + self._counted(new)
                # A shorter lease may begin with the request and its answer be lost.
                if deadline < self.deadline:
                    self.deadline = deadline
                    # The heartbeat has to ask in time, whatever interrupts this.
                    self.renewing.due_at = min(self.renewing.due_at, monotonic())
                    self._keep_on()
                return self._ask_to_extend(new, bound)

            try:
                answer = insist(question, before, self._terms.retry)
            except LockError as error:
                # Its end may have come nearer: the heartbeat has to ask in time.
                self.renewing.due_at = min(self.renewing.due_at, monotonic())
                self._keep_on()
                self._tell(lock_extended, ttl=new, slack=_left(before), cause=error)
                raise
            slack = _left(before)
            if isinstance(answer, Grant):
                self._grant = answer
            # Seen as lost by anybody, it stays lost, whatever the store says now.
            if not isinstance(answer, Grant) or self._state == "lost" or monotonic() >= deadline:
                self._state = "lost"
                self._lose(GONE if answer is None else "no answer came before its deadline")
            self.deadline = deadline
            self.renewing.renewed(sent_at, self._counted(answer.ttl))
        self._keep_on()
        self._tell(lock_extended, ttl=answer.ttl, slack=slack, cause=None)

    def _ask_to_extend(self, ttl: float | None, bound: float) -> Grant | Unknown | None:
        answered = False
        try:
            # With a ttl in the grant: an argument of None would mean that of the last extend.
            answer = self._store.extend(replace(self._grant, ttl=ttl), bound=bound)
            answered = True
            return answer
        finally:
            if not answered:
                self._unheard = self._counted(ttl)

    async def aextend(self, ttl: Duration | None = None) -> None:
        """See `extend`."""
        await self._store.threads.run(self.extend, ttl)

    # Fencing at the write

    def guard(self, using: str | None = None) -> None:
        """Let nobody else be granted the key until the caller's transaction ends.

        Or the savepoint that it was called in is rolled back.

        Call it inside of `atomic()`, on the database of the locks: what is read and written from
        here to the commit is done under the lock, whatever becomes of the lease meanwhile. The
        heartbeat goes on; a takeover waits. On PostgreSQL, the server ends the transaction where
        this process sends no statement for longer than the ttl and a second.

        Args:
            using: Another alias of that database; None: the one of the locks.

        Raises:
            LockLost: The lease ended first, or the key was granted anew.
            LockUsageError: No transaction is open; it is on another database, or may only read;
                the backend cannot do that; or the lease was released.
            BackendUnavailable: The store did not answer within a second, or the time left.
        """
        # A wrong use is told before the state of the lease.
        self._store.guards.alias(using)
        self.check()
        if not self._store.guards.hold(self._grant, using, bound=min(MAX_BOUND, self.remaining())):
            self._state = "lost"
            self._lose(GONE)

    @contextmanager
    def atomic(self, using: str | None = None) -> Iterator[None]:
        """Open a transaction, and guard it: see `guard`."""
        with transaction.atomic(using=self._store.guards.alias(using)):
            self.guard(using)
            yield

    def fenced(self, instance: Fenceable) -> Fenceable:
        """Raise the fence of a row to ours, and load the row anew behind that.

        From here on no older lease writes it, and `save()` is fenced by this one.

        Args:
            instance: Of a `FencedModel`.

        Returns:
            The same instance.

        Raises:
            FenceRejected: The row has a higher fence.
            LockUsageError: It belongs to another key; or it is not of a `FencedModel`.
        """
        if not hasattr(instance, "raise_fence"):
            raise LockUsageError(
                f"A {type(instance).__name__} cannot be fenced: it is no FencedModel.", key=self.key
            )
        instance.raise_fence(self)
        return instance

    async def afenced(self, instance: Fenceable) -> Fenceable:
        """See `fenced`."""
        return await sync_to_async(self.fenced)(instance)

    # Handing it over

    def dump(self) -> str:
        """Give the lease away, as a text for `Lease.load` in another process.

        This process neither renews nor releases it any more: until somebody loads it, it lives for
        what is left of its ttl. The text is signed with the project's secret and holds the token:
        send it as you would send a password.

        Raises:
            LockLost: It ended first.
            LockUsageError: A transaction is open; or the lease was released, belongs to another
                process, or its backend keeps leases in the process that took them.
        """
        if deferred_release.open_transactions():
            raise LockUsageError(
                f"The lease on {self.key!r} cannot be given away inside a transaction: another"
                " process would work under it before the data is committed. Call dump() behind"
                " atomic(), or in a function that is given to transaction.on_commit().",
                key=self.key,
                code="unsupported",
            )
        return self.let_go()

    def let_go(self) -> str:
        """Neither renew nor release the lease any more; return what `dump` does.

        Raises:
            LockError: See `dump`, which also refuses inside of transactions.
        """
        with self._mutex:
            self.check()
            text = transfer.dump(
                self._store, self._grant, hold=self._terms.hold, ttl=self._terms.ttl
            )
            self._end_keeping()
            held_here.discard(self)
            self._state = "released"
            return text

    @classmethod
    def load(cls, text: str) -> Lease:
        """Take over what `dump` gave away: once, with a new token and a higher fence.

        The lease is bound to no block: extend and release it yourself.

        Raises:
            InvalidArgument: It is no such text, or was signed with another secret.
            LockLost: The lease is over, or somebody has loaded it.
            LockNotAcquired: The key is paused. May be called again while the lease lives.
            BackendUnavailable: The store did not answer.
        """
        loaded = transfer.load(text)
        retry = loaded.store.config.retry
        terms = Terms(ttl=loaded.ttl, holder=loaded.holder, retry=retry, hold=loaded.hold)
        return cls(loaded.store, loaded.granted, terms)

    # For holding, which binds leases to blocks

    def begin_block(
        self,
        *,
        heartbeat: bool,
        task: asyncio.Task[object] | None = None,
        block: Block | None = None,
    ) -> None:
        """Let a block hold the lease.

        Args:
            heartbeat: Renew it while it does.
            task: What to cancel when the lease is lost.
            block: Renew it for as long as this one is open; None: until somebody ends that.
        """
        self._block = block
        self._losses.cancels(task)
        if heartbeat:
            self.keep()
        self.watch()

    @property
    def lasts(self) -> bool:
        """Whether it does not end by itself for as long as this process lives."""
        is_renewed = self._is_renewed and self.renewing.ends_at == math.inf
        return is_renewed or self.deadline == math.inf

    def is_entered_by(self, task: asyncio.Task[object] | None) -> bool:
        """Whether a block of this thread holds it, or one of a task of this thread."""
        return self._thread is threading.current_thread() and self._losses.cancels_only(task)

    def adopt(self, terms: Terms, wait: float | None, block: Block) -> Lease | None:
        """Return a lease that goes on with this one, which a transaction keeps from its end.

        None: the store does not know it any more, or does not answer within `wait`.

        Args:
            block: What ends it where it does not reach who asked for it.
        """
        with self._mutex:
            sent_at = monotonic()
            until = self.deadline if wait is None else min(self.deadline, sent_at + wait)

            def question(bound: float) -> Grant | Unknown | None:
                return self._ask_to_extend(terms.ttl, bound)

            end = time.monotonic() + (math.inf if wait is None else wait) + budgets.PATIENCE
            answer = budgets.spend(end, insist, question, until, terms.retry)
            if not isinstance(answer, Grant):
                return None
            self._end_keeping()
        deadline = sent_at + self._counted(answer.ttl)
        # What this one has promised, its successor keeps.
        terms = replace(terms, hold=max(terms.hold, self._terms.hold), holder=self._terms.holder)
        adopted = Lease(self._store, Granted(answer, deadline), terms, block)
        adopted._unheard = self._unheard
        return adopted

    # For fencing

    @property
    def holder(self) -> Holder:
        """Who holds it, as the store shows it to others."""
        return self._terms.holder

    def overtaken(self, using: str, *, hold: bool) -> int | None:
        """Return the fence of the key, if somebody was granted it since; None: nobody was.

        Args:
            using: The database of a transaction that has made a row.
            hold: Let nobody be granted the key from here to its end, if the locks are there, too.

        Raises:
            BackendUnavailable: The store did not answer.
        """
        # Many a backend cannot, and none can in the database of another.
        with suppress(LockUsageError):
            if hold and self._store.guards.hold(self._grant, using):
                return None
        counter = self._store.counter(self.key, beside=using)
        return None if counter is None or counter.fence <= self.fence else counter.fence

    def require_process(self) -> None:
        """Refuse to be used by a fork of the process that took it.

        Raises:
            LockUsageError: It is.
        """
        if self._pid != os.getpid():
            raise LockUsageError(
                f"The lease on {self.key!r} belongs to process {self._pid}, not to this fork of it."
                " Take the lock in the process that does the work.",
                key=self.key,
                code="foreign_context",
            )


def _left(deadline: float) -> float | None:
    """Return the seconds until a deadline; None: there is none."""
    return None if deadline == math.inf else max(0.0, deadline - monotonic())
