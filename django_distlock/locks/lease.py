"""A lease: the right to work on a key until a deadline, as its holder sees it.

The state is in its `Holding`, and a `Release` ends it; `Lease` is the interface to both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn, Protocol, TypeVar

from asgiref.sync import sync_to_async
from django.db import transaction

from ..backends.base import BaseLockBackend
from ..core.durations import MAX_BOUND, Duration
from ..core.errors import LockUsageError
from ..core.records import Holder
from ..process import deferred_release
from ..process.heartbeat import held_here
from . import transfer
from .attempts import Granted
from .blocks import Block
from .callbacks import Callback, Callbacks, before_end
from .changing import downgrade, extend
from .release import Release
from .state import GONE, Holding, Terms

Fenceable = TypeVar("Fenceable", bound="HasFence")


class HasFence(Protocol):
    """A model instance that can be fenced."""

    def raise_fence(self, lease: Any) -> None:
        """Raise its fence to that of a lease, and reload it."""


class Lease:
    """The right to work on a key until a deadline.

    Made by `Lock`. It belongs to the process that acquired it. Times of the store (`acquired_at`,
    `expires_at`) are for people; the holder decides by `deadline` when to stop.

    Attributes:
        key: The key, normalised.
        backend: The alias of its backend.
        token: The proof of ownership. A bearer secret: not in the lease's `repr`.
        fence: Grows with every grant of the key.
    """

    #: The callbacks of a renewed lease without a block; otherwise its holding has them.
    _callbacks: Callbacks | None = None

    def __init__(
        self, store: BaseLockBackend, granted: Granted, terms: Terms, block: Block | None = None
    ):
        holding = self._holding = Holding(store, granted, terms)
        self._release = Release(holding)
        self.key, self.backend = granted.grant.key, store.alias
        self.token, self.fence = granted.grant.token, granted.grant.fence
        if block is not None:
            block.lease, block.release = self, self._release
        held_here.add(self._release)
        if block is not None:
            # From here on the lease owns the grant, and not the attempts.
            block.attempts = None

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
        """The fence as 15 digits, so that texts sort as the numbers do."""
        return f"{self.fence:015d}"

    @property
    def shared(self) -> bool:
        """Whether others may hold the key at the same time: its lock has `shared` or `permits`."""
        return self._holding.grant.shared

    @property
    def held(self) -> bool:
        """Whether work may rely on it: it is neither released, lost, nor another process's."""
        return self._holding.held

    @property
    def is_lost(self) -> bool:
        """Whether it ended before it was released. Once True, it stays True."""
        return self._holding.is_lost

    @property
    def is_released(self) -> bool:
        """Whether it was released. Inside a transaction, the key is free when that ends."""
        return self._holding.state == "released"

    @property
    def deadline(self) -> float:
        """When to stop, in seconds of this process's monotonic clock; infinite without expiry.

        It counts from before the request was sent, so it is never too late.
        """
        return self._holding.deadline

    @property
    def ttl(self) -> float | None:
        """Seconds that the last grant or extend gave; None: no expiry."""
        return self._holding.grant.ttl

    @property
    def holder(self) -> Holder:
        """Who holds it, as the store shows it to others."""
        return self._holding.terms.holder

    @property
    def acquired_at(self) -> datetime:
        """When the key was granted, by the store's clock, aware."""
        return self._holding.grant.acquired_at

    @property
    def expires_at(self) -> datetime | None:
        """When the lease ends if nobody extends it, by the store's clock; None: no expiry."""
        return self._holding.grant.expires_at

    @property
    def stop_requested(self) -> bool:
        """Whether an operator requested a stop, as of the last extend."""
        return self._holding.grant.stop_requested

    def remaining(self) -> float:
        """Return the seconds left, at least 0; infinite without expiry."""
        return max(0.0, self.deadline - self._holding.monotonic()) if self.held else 0.0

    def check(self) -> None:
        """Raise unless the lease is held: call it before a step that must not be done twice.

        Raises:
            LockLost: The lease was lost.
            LockUsageError: It was released, or belongs to another process.
        """
        self._holding.check()

    def on_lost(self, callback: Callback) -> None:
        """Call `callback(lease)` when the lease is lost, at its deadline at the latest.

        It is called once, in a new thread, unless `check()` or the end of the block finds the loss
        first; never after a clean release. If the lease is lost already, it is called at once.

        Raises:
            InvalidArgument: It is not callable, or a coroutine function.
        """
        holding = self._holding
        holding.require_process()
        holding.losses.on_lost(callback, self)
        if holding.is_lost:
            holding.report_lost(holding.why_over())
        elif holding.state == "held":
            holding.watch()

    def on_danger(self, callback: Callback, before: Duration | None = None) -> None:
        """Call `callback(lease)` when the lease will be lost soon.

        It is called again if the lease was extended meanwhile, and is in danger once more.

        Args:
            before: Seconds (or a `timedelta`) ahead of the deadline, less than the ttl; None: a
                quarter of the ttl, when two renewals have failed.

        Raises:
            InvalidArgument: The callback cannot be called, or `before` breaks a rule.
        """
        holding = self._holding
        holding.require_process()
        holding.losses.on_danger(callback, before_end(before, self.ttl, self.key), self)
        if holding.state == "held":
            holding.watch()

    def extend(self, ttl: Duration | None = None) -> None:
        """Make the lease end `ttl` seconds from now, later or sooner than before.

        After a shorter extend without an answer, no extend counts for longer than that: the store
        may carry the lost request out late.

        Args:
            ttl: Seconds (or a `timedelta`), from 0.1 to `MAX_TTL`; None: the lock's ttl.

        Raises:
            LockLost: The lease was lost.
            BackendUnavailable: The store is unavailable. The lease stands until its deadline.
            InvalidArgument: `ttl` breaks a rule.
            LockUsageError: It was released, or belongs to another process.
        """
        extend(self._holding, ttl)

    async def aextend(self, ttl: Duration | None = None) -> None:
        """See `extend`."""
        await self._holding.store.threads.run(self.extend, ttl)

    def downgrade(self) -> None:
        """Share the key from now on, with a new token and fence, and let waiting readers join.

        Nobody gets the key exclusively in between. The other direction is refused: two holders that
        share a key and wait to have it exclusively would wait for each other.

        Raises:
            LockLost: The lease was lost.
            LockNotAcquired: The key is paused, or a transaction keeps it. The lease stands.
            BackendUnavailable: Two attempts got no answer. The lease is given up, as the store may
                have carried one out: it is not `held` any more.
            LockUsageError: A transaction is open; or the lease was released, or its backend does
                not support this.
        """
        if not self.shared:
            self._refuse_inside("shared", "readers", "downgrade()")
        self._share()

    async def adowngrade(self) -> None:
        """See `downgrade`."""
        if not self.shared:
            # Here, because the threads of the backend have other transactions.
            self._refuse_inside("shared", "readers", "adowngrade()")
        await self._holding.store.threads.run(self._share)

    def _share(self) -> None:
        downgrade(self._holding)
        self.token, self.fence = self._holding.token, self._holding.fence

    def _refuse_inside(self, what: str, who: str, call: str) -> None:
        """Refuse to let others use the key before the data of a transaction is committed."""
        if deferred_release.open_transactions():
            raise LockUsageError(
                f"The lease on {self.key!r} cannot be {what} inside a transaction: {who} would use"
                f" it before the data is committed. Call {call} after atomic(), or in a function"
                " passed to transaction.on_commit().",
                key=self.key,
                code="unsupported",
            )

    def release(self, *, strict: bool = False) -> bool:
        """Release the key: at once, or when the open transactions of this thread have ended.

        Any thread may call this, also while a heartbeat renews the lease.

        Args:
            strict: Raise `LockLost` if the lease was lost before; otherwise that is logged.

        Returns:
            True for the call that released it; False if it was released or lost before. The record
            of a lost lease is removed all the same, unless somebody else has the key by now.

        Raises:
            LockLost: The lease was lost, and `strict` is True.
            BackendUnavailable: The store is unavailable. The lease is not held any more, because
                the request may still reach the store. `release` may be called again.
        """
        return self._release.by_call(strict=strict)

    async def arelease(self, *, strict: bool = False) -> bool:
        """See `release`. A cancellation does not stop it."""
        return await self._release.aby_call(strict=strict)

    def guard(self, using: str | None = None) -> None:
        """Grant the key to nobody else until the caller's transaction ends.

        A rollback to an earlier savepoint ends this, too. Call it inside `atomic()`, on the
        database of the locks: what is read and written from here to the commit is done under the
        lock, even if the lease is lost meanwhile. A takeover waits. PostgreSQL ends the transaction
        if it is idle for longer than the ttl and a second.

        Args:
            using: Another alias of that database; None: the one of the locks.

        Raises:
            LockLost: The lease was lost, or the key was granted to somebody else.
            LockUsageError: No transaction is open; it is on another database, or read-only; the
                backend does not support this; or the lease was released.
            BackendUnavailable: The store is unavailable for a second, or for the rest of the lease.
        """
        # Wrong usage is reported before the state of the lease.
        holding = self._holding
        holding.store.guards.alias(using)
        self.check()
        bound = min(MAX_BOUND, self.remaining())
        if not holding.store.guards.hold(holding.grant, using, bound=bound):
            holding.state = "lost"
            holding.lose(GONE)

    @contextmanager
    def atomic(self, using: str | None = None) -> Iterator[None]:
        """Open a transaction, and call `guard` in it."""
        with transaction.atomic(using=self._holding.store.guards.alias(using)):
            self.guard(using)
            yield

    def fenced(self, instance: Fenceable) -> Fenceable:
        """Raise the fence of a row to that of this lease, and then reload the row.

        From here on no older lease can write it, and `save()` is fenced by this one.

        Args:
            instance: An instance of a `FencedModel`.

        Returns:
            The same instance.

        Raises:
            FenceRejected: The row has a higher fence.
            LockUsageError: It belongs to another key, or is not of a `FencedModel`.
        """
        if not hasattr(instance, "raise_fence"):
            raise LockUsageError(
                f"A {type(instance).__name__} cannot be fenced: it is not a FencedModel.",
                key=self.key,
            )
        instance.raise_fence(self)
        return instance

    async def afenced(self, instance: Fenceable) -> Fenceable:
        """See `fenced`."""
        return await sync_to_async(self.fenced)(instance)

    def dump(self) -> str:
        """Hand the lease over, as a text for `Lease.load` in another process.

        This process no longer renews or releases it. Until somebody loads it, the rest of its ttl
        runs. The text is signed with the project's secret and contains the token: treat it like a
        password.

        Raises:
            LockLost: The lease was lost.
            LockUsageError: A transaction is open; or the lease was released, belongs to another
                process, or its backend cannot hand leases over.
        """
        self._refuse_inside("handed over", "another process", "dump()")
        return self._let_go()

    def _let_go(self) -> str:
        """Do the same as `dump`, also inside transactions."""
        return transfer.dump(self._holding)

    @classmethod
    def load(cls, text: str) -> Lease:
        """Take over a lease that `dump` handed over: once, with a new token and a higher fence.

        The lease has no block: extend and release it yourself.

        Raises:
            InvalidArgument: It is not such a text, or was signed with another secret.
            LockLost: The lease is over, or somebody has loaded it already.
            LockNotAcquired: The key is paused. May be called again while the lease lives.
            BackendUnavailable: The store is unavailable.
        """
        return cls(*transfer.load(text))
