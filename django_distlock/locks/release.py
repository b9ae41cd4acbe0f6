"""Release a lease: by a call, with its block, after a transaction, or at the interpreter's exit.

A `Release` asks the store, and records the outcome in the `Holding` of the lease.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass

from ..core.errors import BackendUnavailable, LockError, LockLost, LockUsageError
from ..core.records import UNKNOWN, Unknown
from ..process import deferred_release
from ..process.deadlocks import waits
from ..process.heartbeat import held_here
from ..signals import lock_released
from .acquire import insist
from .attempts import release_once_more
from .state import GONE, Holding

logger = logging.getLogger("django_distlock")

#: Seconds to wait for an extend in flight before the lease of an interrupted block is released.
LEFT_PATIENCE = 0.05


@dataclass(eq=False)
class Release:
    """Releases one lease, once."""

    holding: Holding
    #: Whether the block that acquired it has ended.
    _left: bool = False
    #: Whether a block was left without its `__exit__`, or in the midst of it.
    _is_left: bool = False
    #: Whether a release after a transaction is in progress, or was interrupted.
    _is_ending: bool = False
    #: Whether a request to release had no answer: the store may have carried it out.
    _is_unheard: bool = False

    def by_call(self, *, strict: bool = False, defers: bool = True) -> bool:
        """Release, after the open transactions of this thread if `defers`: see `Lease.release`."""
        was_told = self.holding.losses.told
        answer = self._by_transaction() if defers else None
        if answer is None:
            answer = self.now() is True
        return answer or self._was_not_held(strict=strict, was_told=was_told)

    async def aby_call(self, *, strict: bool = False) -> bool:
        """See `by_call`."""
        was_told, answer = self.holding.losses.told, self._by_transaction()
        if answer is None:
            answer = await self.holding.store.threads.run(self.now) is True
        return answer or self._was_not_held(strict=strict, was_told=was_told)

    def _was_not_held(self, *, strict: bool, was_told: bool) -> bool:
        """Return False. Report a loss, or log it if that `was_told`; raise it if `strict`."""
        holding = self.holding
        if holding.pid == os.getpid() and holding.is_lost:
            try:
                holding.lose(holding.why_over())
            except LockLost as error:
                if strict:
                    raise
                if was_told and holding.tells:
                    fields = holding.log_fields("released_late")
                    logger.warning("Nothing was released: %s", error, extra=fields)
        return False

    def _by_transaction(self) -> bool | None:
        """Let the open transactions of this thread release when they end; None: none is open."""
        if self._is_over:
            return False
        if not self._defer():
            return None
        if self.holding.is_lost:
            return False
        self.holding.state = "released"
        return True

    # Blocks

    def end_block(self, error: BaseException | None, *, raises: bool = True) -> None:
        """Release at the end of a block.

        Args:
            error: What the block has raised.
            raises: Whether a loss is raised.

        Raises:
            LockLost: The block succeeded, but the lease was lost before it ended.
        """
        if self._is_over:
            return
        holding, self._left = self.holding, True
        was_lost = holding.is_lost
        if not self._defer():
            self.quietly()
            # The deadline does not count any more: the body ended in time, however long this took.
            was_lost = was_lost or holding.state == "lost"
        self._end_of_block(error, was_lost=was_lost, raises=raises)

    async def aend_block(self, error: BaseException | None, *, raises: bool = True) -> None:
        """See `end_block`. If the loss has cancelled the task, `LockLost` replaces that."""
        if self._is_over:
            return
        holding, self._left = self.holding, True
        cancelled = holding.losses.left_block(error)
        was_lost = holding.is_lost
        if not self._defer():
            # If the task is cancelled here, the release is carried out all the same.
            await holding.store.threads.run(self.quietly)
            was_lost = was_lost or holding.state == "lost"
        self._end_of_block(None if cancelled else error, was_lost=was_lost, raises=raises)

    def end_left_block(self, thread: int) -> None:
        """Release at the end of a block without an `__exit__`, or interrupted in the midst of it.

        As a regular end does, this waits for the open transactions of the block's thread.
        """
        holding, self._is_left = self.holding, True
        holding.end_keeping()
        if holding not in held_here:
            return  # The block was interrupted after its release.
        release = deferred_release.defer_for(thread, holding.name, holding, self._deferred)
        if not release.is_over:
            self._keep_for_transactions()
        if holding.state == "held":
            holding.state = "released"
        release.release_if_over()

    def end_inner_block(self, error: BaseException | None, *, raises: bool = True) -> None:
        """End a block that has entered the lock again: the outer block still holds the lease."""
        holding = self.holding
        if holding.pid != os.getpid() or error is not None or not raises:
            return
        if holding.state != "released":
            if holding.is_lost:
                holding.lose(holding.why_over())
        elif self._left:
            # This block runs in another task or thread, and worked without the lock from then on.
            raise LockLost(
                f"The lease on {holding.key!r} (fence {holding.fence}) was released by the outer"
                " block, which ended first.",
                key=holding.key,
            )

    def _end_of_block(self, error: BaseException | None, *, was_lost: bool, raises: bool) -> None:
        if not was_lost:
            self.holding.state = "released"
            return
        self.holding.state = "lost"
        try:
            self.holding.lose("it ended before the block did")
        except LockLost:
            # An exception of the body itself is never replaced.
            if error is None and raises:
                raise

    # The end

    @property
    def _is_over(self) -> bool:
        return self.holding.pid != os.getpid() or self.holding.state == "released"

    def _defer(self) -> bool:
        """Let the open transactions of this thread release when they end; False: none is open."""
        holding = self.holding
        is_deferred = deferred_release.defer(holding.name, holding, self._deferred, holding.goes_on)
        if is_deferred:
            self._keep_for_transactions()
        return is_deferred

    def _keep_for_transactions(self) -> None:
        """Renew the lease, which its holder has released, until the transactions end."""
        holding = self.holding
        holding.block = None
        if holding.state == "held":
            holding.keep()
            holding.watch()
            if holding not in held_here:
                holding.end_keeping()  # It ended meanwhile, in another thread.
        waits.deferred(holding.name)

    def now(self, patience: float = math.inf) -> bool | Unknown:
        """Release in the store, and report the outcome.

        Args:
            patience: Seconds for further attempts while a transaction has locked the record.

        Returns:
            Whether the lease was held until now; `UNKNOWN`: the record is still locked, and the
            lease not over.
        """
        holding = self.holding
        if holding.pid != os.getpid():
            return False
        in_time = max(1.0, min(patience, holding.deadline - holding.monotonic(), 1e6))
        was_over = holding.is_over()
        # A release that is sent in time is a clean one, however late its answer comes.
        with nullcontext() if was_over else holding.releasing:
            # A block may have been interrupted while it held the mutex.
            has_turn = holding.mutex.acquire(timeout=LEFT_PATIENCE if self._is_left else in_time)
            if not (has_turn or self._is_left):
                raise BackendUnavailable(
                    f"{holding.key!r} cannot be released: an extend of it has not been answered.",
                    key=holding.key,
                )
            try:
                if holding not in held_here:
                    holding.end_keeping()  # An interrupted release has ended it already.
                    return False
                now = holding.monotonic()
                held_for = now - holding.granted_at
                until = min(holding.deadline, now + patience)
                answer = self._give_up(until, held_for, was_over=was_over)
            finally:
                if has_turn:
                    holding.mutex.release()
                if holding in held_here:
                    holding.keep_on()
        if answer is None:
            return holding.state == "released"
        if holding.state == "lost":
            # Reported without the mutex: see `Holding.alone`.
            holding.report_lost(holding.why_over())
        if answer is UNKNOWN and holding in held_here:
            return UNKNOWN
        if answer is UNKNOWN:
            logger.warning(
                "%r stays held while a transaction has locked its record",
                holding.key,
                extra=holding.log_fields("release_failed"),
            )
        self._tell_release(held_for, released=bool(answer))
        return holding.state == "released"

    def _give_up(self, until: float, held_for: float, *, was_over: bool) -> bool | Unknown | None:
        """Release or settle in the store, and return the answer.

        None: another thread has ended the lease, and reports that.
        """
        holding = self.holding
        try:
            answer = insist(holding.store, self._ask, until, holding.terms.retry)
            if answer is UNKNOWN and holding.monotonic() < holding.deadline:
                return UNKNOWN
            # If the lease is gone before its deadline, the store has carried out a release that was
            # interrupted, or had no answer.
            is_unheard = self._is_unheard and holding.monotonic() < holding.deadline
            answer = answer or (not was_over and (self._is_left or is_unheard))
            if not held_here.discard(holding):
                return None
        except LockError as error:
            self._tell_release(held_for, released=False, cause=error)
            raise
        holding.end_keeping()
        if was_over or not answer:
            # It was over before; or an operator took it away, or the store lost it.
            holding.state = "lost"
            if answer is False and not was_over:
                holding.lost_by = GONE
        elif holding.state != "lost":
            holding.state = "released"
            queues = holding.store.queues
            if queues.released_wanted:  # Nearly always empty.
                queues.note_held(queues.name_of(holding.key), held_for)
        if holding.unheard < math.inf:
            # A late acquire with its token may reach the store after the release.
            release_once_more(holding.store, holding.grant)
        return answer

    def _tell_release(
        self, held_for: float, *, released: bool, cause: LockError | None = None
    ) -> None:
        holding = self.holding
        waited = holding.waited
        holding.tell(
            lock_released, held_for=held_for, waited=waited, released=released, cause=cause
        )

    def _ask(self, bound: float) -> bool | Unknown:
        holding = self.holding
        # True until there is an answer. An earlier attempt may still be without one.
        given_up, holding.given_up = holding.given_up, True
        is_unheard, self._is_unheard = self._is_unheard, True
        try:
            answer = holding.store.release(holding.grant, holding.terms.hold or None, bound=bound)
        except LockUsageError:
            # Refused before anything was sent, such as a sync call in a coroutine.
            holding.given_up, self._is_unheard = given_up, is_unheard
            raise
        holding.given_up, self._is_unheard = given_up, is_unheard
        return answer

    def _deferred(self) -> bool:
        """Release after a transaction; False: the record is locked, try again later."""
        # If the last call did not come to its end, it was interrupted, and may have left the mutex
        # locked.
        self._is_left = self._is_left or self._is_ending
        self._is_ending = True
        is_done = self.quietly(0.0) is not UNKNOWN
        self._is_ending = False
        return is_done

    def at_exit(self, patience: float) -> None:
        """Release at the exit of the interpreter, which rolls back any open transaction.

        A lease under which a daemon thread still works is left to its ttl.
        """
        if self.holding.store._is_elsewhere:
            return  # The database of a test run has been dropped.
        thread = self.holding.thread
        # Not by `is_alive()`: a thread that Python did not start never says that it has ended.
        if thread is threading.current_thread() or thread not in threading.enumerate():
            self.quietly(patience)

    def quietly(self, patience: float = math.inf) -> bool | Unknown:
        """See `now`; an error of the store is logged, and the result is False.

        It must not replace what the block has raised or returned.
        """
        try:
            return self.now(patience)
        except LockError as error:
            # Nobody holds it any more: renewed, it would never end.
            self.holding.end_keeping()
            logger.warning(
                "%r could not be released and stays held for its ttl: %s",
                self.holding.key,
                error,
                extra=self.holding.log_fields("release_failed", error),
            )
            return False
