"""A lease: one holding of a lock, from its grant to its end."""

from __future__ import annotations

import logging
import math
import os
import threading
from datetime import datetime
from typing import Any, Literal, NoReturn

from . import transactions
from .backends.base import BaseLockBackend
from .core.durations import Duration, ttl_seconds
from .core.errors import BackendUnavailable, LockLost, LockUsageError
from .core.holders import Holder
from .core.records import UNKNOWN, Grant, Unknown
from .core.retry import Retry
from .exits import held_here
from .host import monotonic
from .signals import lock_extended, lock_lost, lock_released, tell
from .waiting import Granted, insist

logger = logging.getLogger("django_distlock")

_OVER = "its deadline has passed"
_GONE = "the store does not know it any more"


class Lease:
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

    def __init__(
        self,
        backend: BaseLockBackend,
        granted: Granted,
        *,
        ttl: float | None,
        holder: Holder,
        retry: Retry,
    ):
        self.key = granted.grant.key
        self.backend = backend.alias
        self.token = granted.grant.token
        self.fence = granted.grant.fence
        self.deadline = granted.deadline
        self._store = backend
        self._grant = granted.grant
        self._ttl = ttl
        self._holder = holder
        self._retry = retry
        self._granted_at = monotonic()
        self._pid = os.getpid()
        self._state: Literal["held", "lost", "released"] = "held"
        self._told_lost = False
        self._telling = threading.Lock()
        self._thread = threading.current_thread()
        # Held while the store is asked, so that an extend and a release cannot cross. Whoever only
        # looks does not take it: the store may hang.
        self._mutex = threading.RLock()
        held_here.add(self)

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else "held" if self.held else "released"
        return f"<Lease {self.key!r} fence={self.fence} {state} {self.remaining():.1f} s>"

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
    def held(self) -> bool:
        """Whether the lease can be worked under: neither released, nor lost, nor another's."""
        return self._pid == os.getpid() and self._state == "held" and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether the lease ended before it was released. Once True it stays so.

        It ends by its deadline, or by what the store says without being asked, if it does that.
        """
        if self._state == "held" and (monotonic() >= self.deadline or self._is_cut_off()):
            self._state = "lost"
        return self._state == "lost"

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
        self._require_process()
        if self._state == "released":
            raise LockUsageError(f"The lease on {self.key!r} was released.", key=self.key)
        if self.is_lost:
            self._lose(_OVER if monotonic() >= self.deadline else _GONE)

    def extend(self, ttl: Duration | None = None) -> None:
        """Make the lease end `ttl` seconds from now, be it later or sooner than before.

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
            seconds = self._ttl if ttl is None else ttl_seconds(ttl, maximum=longest)
            before, deadline = self.deadline, self.deadline

            def question(bound: float) -> Grant | Unknown | None:
                nonlocal deadline
                deadline = math.inf if seconds is None else monotonic() + seconds
                # A shorter lease may begin with the request and its answer be lost.
                self.deadline = min(self.deadline, deadline)
                return self._store.extend(self._grant, seconds, bound=bound)

            try:
                answer = insist(question, before, self._retry)
            except Exception as error:
                self._tell(lock_extended, ttl=seconds, cause=error)
                raise
            if isinstance(answer, Grant):
                self._grant = answer
            # Seen as lost by anybody, it stays lost, whatever the store says now.
            if not isinstance(answer, Grant) or self._state == "lost" or monotonic() >= deadline:
                self._state = "lost"
                self._lose(_GONE if answer is None else "no answer came before its deadline")
            self.deadline = deadline
        self._tell(lock_extended, ttl=answer.ttl, cause=None)

    async def aextend(self, ttl: Duration | None = None) -> None:
        """See `extend`."""
        await self._store.run_async(self.extend, ttl)

    def release(self) -> bool:
        """Give the key back: at once, or when the transactions of this thread have ended.

        Returns:
            True once, for the call that gave it up; False if it was given up or gone before.

        Raises:
            BackendUnavailable: The store did not answer. May be called again.
        """
        if self._pid != os.getpid() or self._state == "released":
            return False
        if transactions.defer(self._name, self, self._release_deferred):
            self._state = "released"
            return True
        return self._release_now() is True

    async def arelease(self) -> bool:
        """See `release`. Once begun, it is carried out whatever is cancelled."""
        if self._pid != os.getpid() or self._state == "released":
            return False
        if await transactions.adefer(self._name, self, self._release_deferred):
            self._state = "released"
            return True
        return await self._store.run_async(self._release_now) is True

    # For holding, which binds leases to blocks

    def adopt(self, ttl: float | None, wait: float | None) -> Lease | None:
        """Return a lease that goes on with this one, which a transaction keeps from its end.

        None: the store does not know it any more, or does not answer within `wait`.
        """
        sent_at = monotonic()
        until = self.deadline if wait is None else min(self.deadline, sent_at + wait)
        answer = insist(
            lambda bound: self._store.extend(self._grant, ttl, bound=bound), until, self._retry
        )
        if not isinstance(answer, Grant):
            return None
        deadline = math.inf if ttl is None else sent_at + ttl
        return Lease(
            self._store, Granted(answer, deadline), ttl=ttl, holder=self._holder, retry=self._retry
        )

    def end_block(self, error: BaseException | None) -> None:
        """Release behind a block that raised `error`, or did not.

        Raises:
            LockLost: The block succeeded, but the lease had ended before.
        """
        if self._pid != os.getpid() or self._state == "released":
            return
        was_lost = self.is_lost
        if not transactions.defer(self._name, self, self._release_deferred):
            self._release_quietly()
            was_lost = was_lost or self.is_lost
        self._end_of_block(error, was_lost=was_lost)

    async def aend_block(self, error: BaseException | None) -> None:
        """See `end_block`."""
        if self._pid != os.getpid() or self._state == "released":
            return
        was_lost = self.is_lost
        if not await transactions.adefer(self._name, self, self._release_deferred):
            await self._store.run_async(self._release_quietly)
            was_lost = was_lost or self.is_lost
        self._end_of_block(error, was_lost=was_lost)

    def _end_of_block(self, error: BaseException | None, *, was_lost: bool) -> None:
        if not was_lost:
            self._state = "released"
            return
        self._state = "lost"
        try:
            self._lose("it ended before the block did")
        except LockLost:
            # The body's own exception says more about what went wrong, and is never hidden.
            if error is None:
                raise

    # The end

    @property
    def _name(self) -> tuple[str, str]:
        return self.backend, self.key

    def _release_now(self, patience: float = math.inf) -> bool | Unknown:
        """Ask the store, and tell what came of it.

        Args:
            patience: Seconds to ask again where a transaction holds the record; at least one
                attempt is made.

        Returns:
            What the store answered; `UNKNOWN`: the record is held, and the lease not over.
        """
        if self._pid != os.getpid():
            return False
        in_time = min(max(patience, 1.0), max(1.0, self.deadline - monotonic()), 1e6)
        if not self._mutex.acquire(timeout=in_time):
            raise BackendUnavailable(
                f"{self.key!r} cannot be released: an extend of it has no answer.", key=self.key
            )
        try:
            if self not in held_here:
                return False
            held_for = monotonic() - self._granted_at
            was_over = monotonic() >= self.deadline
            until = min(self.deadline, monotonic() + patience)
            try:
                answer = insist(
                    lambda bound: self._store.release(self._grant, bound=bound), until, self._retry
                )
            except Exception as error:
                self._tell(lock_released, held_for=held_for, released=False, cause=error)
                raise
            if answer is UNKNOWN and monotonic() < self.deadline:
                return UNKNOWN
            held_here.discard(self)
            if was_over or not answer:
                # Over before it was given up; or taken away, by an operator or a store's loss.
                self._state = "lost"
                self._report_lost(_GONE if answer is False and not was_over else _OVER)
            elif self._state != "lost":
                self._state = "released"
        finally:
            self._mutex.release()
        if answer is UNKNOWN:
            logger.warning("%r stays taken while a transaction holds its record", self.key)
        self._tell(lock_released, held_for=held_for, released=bool(answer), cause=None)
        return answer

    def _release_deferred(self) -> bool:
        """Release behind a transaction; False: the record is held, try again later."""
        return self._release_quietly(0.0) is not UNKNOWN

    def release_at_exit(self, patience: float) -> None:
        """Release although a transaction may be open: with the process it rolls back.

        Not where a thread still works under it, a daemon: what it does in its last moments is
        protected by the ttl.
        """
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            self._release_quietly(patience)

    def _release_quietly(self, patience: float = math.inf) -> bool | Unknown:
        # Whatever goes wrong here must not replace what the block has raised or returned.
        try:
            return self._release_now(patience)
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "%r could not be released and stays taken for its ttl: %s", self.key, error
            )
            return False

    def _is_cut_off(self) -> bool:
        # What a fork copied says nothing: the parent's lease is the parent's.
        return self._pid == os.getpid() and self._store.is_cut_off(self._grant)

    def _lose(self, cause: str) -> NoReturn:
        self._report_lost(cause)
        raise LockLost(
            f"The lease on {self.key!r} (fence {self.fence}) is lost: {cause}.", key=self.key
        )

    def _report_lost(self, cause: str) -> None:
        with self._telling:
            first, self._told_lost = not self._told_lost, True
        if first:
            held_for = monotonic() - self._granted_at
            self._tell(lock_lost, held_for=held_for, cause=cause)

    def _require_process(self) -> None:
        if self._pid != os.getpid():
            raise LockUsageError(
                f"The lease on {self.key!r} belongs to process {self._pid}, not to this fork of it."
                " Take the lock in the process that does the work.",
                key=self.key,
                code="foreign_context",
            )

    def _tell(self, signal: Any, **facts: Any) -> None:
        tell(
            signal,
            type(self._store),
            alias=self.backend,
            key=self.key,
            fence=self.fence,
            holder=self._holder,
            **facts,
        )
