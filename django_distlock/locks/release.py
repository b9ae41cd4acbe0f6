"""How a lease ends: by a call, with its block, behind a transaction, or with the interpreter.

`Release` asks the store once, and takes the answer; it works on the `Holding` of the lease.
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
from ..process.at_exit import held_here
from ..process.deadlocks import waits
from ..signals import lock_released
from .acquire import insist
from .attempts import release_once_more
from .state import GONE, Holding

logger = logging.getLogger("django_distlock")

#: Seconds to wait for an extend in flight, before a lease is released whose block is gone.
LEFT_PATIENCE = 0.05


@dataclass(eq=False)
class Release:
    """The end of a holding, which comes once."""

    holding: Holding
    #: Whether the block that took it has been left.
    _left: bool = False
    #: Whether it was left without its end.
    _is_left: bool = False
    #: Whether a release behind a transaction is going on, or was interrupted.
    _is_ending: bool = False

    def by_call(self, *, strict: bool = False, defers: bool = True) -> bool:
        """Give the key back, behind the transactions of this thread: see `Lease.release`."""
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
        """Return False, and log a loss unless that `was_told`; or raise it, if `strict`."""
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
        """Leave the release to the transactions of this thread; None: none is open."""
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
        """Release behind a block that raised `error`, or did not.

        Raises:
            LockLost: The block succeeded, but the lease had ended before, and `raises` it.
        """
        if self._is_over:
            return
        holding, self._left = self.holding, True
        was_lost = holding.is_lost
        if not self._defer():
            self.quietly()
            # Not by its deadline: the body has ended in time, whatever its release took.
            was_lost = was_lost or holding.state == "lost"
        self._end_of_block(error, was_lost=was_lost, raises=raises)

    async def aend_block(self, error: BaseException | None, *, raises: bool = True) -> None:
        """See `end_block`. A task that was cancelled for the loss gets to know of the loss."""
        if self._is_over:
            return
        holding, self._left = self.holding, True
        cancelled = holding.losses.left_block(error)
        was_lost = holding.is_lost
        if not self._defer():
            # Cancelled here, it is carried out all the same, and ends what keeps the lease.
            await holding.store.threads.run(self.quietly)
            was_lost = was_lost or holding.state == "lost"
        self._end_of_block(None if cancelled else error, was_lost=was_lost, raises=raises)

    def end_left_block(self, thread: int) -> None:
        """Release behind a block of a thread that was left without its end, or in its midst.

        As the end does: behind the transactions of that thread which are still open.
        """
        holding, self._is_left = self.holding, True
        holding.end_keeping()
        if holding not in held_here:
            return  # Interrupted behind its release.
        release = deferred_release.defer_for(thread, holding.name, holding, self._deferred)
        if not release.is_over:
            self._keep_for_transactions()
        if holding.state == "held":
            holding.state = "released"
        release.release_if_over()

    def end_inner_block(self, error: BaseException | None, *, raises: bool = True) -> None:
        """Leave a block that entered the lock again: what the outer one holds goes on."""
        holding = self.holding
        if holding.pid != os.getpid() or error is not None or not raises:
            return
        if holding.state != "released":
            if holding.is_lost:
                holding.lose(holding.why_over())
        elif self._left:
            # In a task or a thread of its own: from then on it worked without the lock.
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
            # The body's own exception says more about what went wrong, and is never hidden.
            if error is None and raises:
                raise

    # The end

    @property
    def _is_over(self) -> bool:
        return self.holding.pid != os.getpid() or self.holding.state == "released"

    def _defer(self) -> bool:
        """Leave the release to the transactions that are open in this thread, if there are any."""
        holding = self.holding
        is_deferred = deferred_release.defer(holding.name, holding, self._deferred, holding.goes_on)
        if is_deferred:
            self._keep_for_transactions()
        return is_deferred

    def _keep_for_transactions(self) -> None:
        """Keep the lease alive, which its holder has given up, until the data is committed."""
        holding = self.holding
        holding.block = None
        if holding.state == "held":
            holding.keep()
            holding.watch()
            if holding not in held_here:
                holding.end_keeping()  # It crossed with an end, in another thread.
        waits.deferred(holding.name)

    def now(self, patience: float = math.inf) -> bool | Unknown:
        """Ask the store, and tell what came of it.

        Args:
            patience: Seconds to ask again where a transaction holds the record; at least one
                attempt is made.

        Returns:
            Whether the lease was held until now; `UNKNOWN`: its record is held, and it is not over.
        """
        holding = self.holding
        if holding.pid != os.getpid():
            return False
        in_time = max(1.0, min(patience, holding.deadline - holding.monotonic(), 1e6))
        was_over = holding.is_over()
        # A release that is sent in time is a clean one, whenever its answer comes.
        with nullcontext() if was_over else holding.releasing:
            # A block that was left may have been interrupted with the mutex in its hands.
            has_turn = holding.mutex.acquire(timeout=LEFT_PATIENCE if self._is_left else in_time)
            if not (has_turn or self._is_left):
                raise BackendUnavailable(
                    f"{holding.key!r} cannot be released: an extend of it has not been answered.",
                    key=holding.key,
                )
            try:
                if holding not in held_here:
                    holding.end_keeping()  # Given up by a release that was interrupted.
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
            # Without the mutex: see `Holding.alone`.
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
        """Ask the store to release the lease, or to settle it, and return its answer.

        None: another thread has ended the lease, and tells of it.
        """
        holding = self.holding
        try:
            answer = insist(holding.store, self._ask, until, holding.terms.retry)
            if answer is UNKNOWN and holding.monotonic() < holding.deadline:
                return UNKNOWN
            # Gone in its time: a release was interrupted that the store has heard.
            answer = answer or (self._is_left and not was_over)
            if not held_here.discard(holding):
                return None
        except LockError as error:
            self._tell_release(held_for, released=False, cause=error)
            raise
        holding.end_keeping()
        if was_over or not answer:
            # Over before it was given up; or taken away, by an operator or a store's loss.
            holding.state = "lost"
            if answer is False and not was_over:
                holding.lost_by = GONE
        elif holding.state != "lost":
            holding.state = "released"
            queues = holding.store.queues
            if queues.released_wanted:  # As hardly ever.
                queues.note_held(queues.name_of(holding.key), held_for)
        if holding.unheard < math.inf:
            # An acquire of its may be heard behind its end.
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
        # Until an answer has come. One that was refused its turn before has none, and stays so.
        given_up, holding.given_up = holding.given_up, True
        try:
            answer = holding.store.release(holding.grant, holding.terms.hold or None, bound=bound)
        except LockUsageError:
            # It was refused before anything was sent, as a plain call in a coroutine is.
            holding.given_up = given_up
            raise
        holding.given_up = given_up
        return answer

    def _deferred(self) -> bool:
        """Release behind a transaction; False: the record is held, try again later."""
        # Interrupted, it has not come to its last line: the mutex may be locked for ever.
        self._is_left = self._is_left or self._is_ending
        self._is_ending = True
        is_done = self.quietly(0.0) is not UNKNOWN
        self._is_ending = False
        return is_done

    def at_exit(self, patience: float) -> None:
        """Release although a transaction may be open: with the process it rolls back.

        Not where a thread still works under it, a daemon: what it does in its last moments is
        protected by the ttl.
        """
        if self.holding.store._is_elsewhere:
            return  # Its database was that of a test run, and has been dropped.
        thread = self.holding.thread
        if thread is threading.current_thread() or not thread.is_alive():
            self.quietly(patience)

    def quietly(self, patience: float = math.inf) -> bool | Unknown:
        """See `now`; an error of the store is logged, and answers False."""
        # Whatever goes wrong here must not replace what the block has raised or returned.
        try:
            return self.now(patience)
        except LockError as error:
            # Nobody has it any more: kept alive, it would never end.
            self.holding.end_keeping()
            logger.warning(
                "%r could not be released and stays held for its ttl: %s",
                self.holding.key,
                error,
                extra=self.holding.log_fields("release_failed", error),
            )
            return False
