"""How a lease ends: by a release now or behind a transaction, with its block or its interpreter."""

from __future__ import annotations

import logging
import math
import os
import threading
from contextlib import nullcontext

from ..core.errors import BackendUnavailable, LockError, LockLost
from ..core.records import UNKNOWN, Unknown
from ..process import deferred_release
from ..process.at_exit import held_here
from ..process.deadlocks import waits
from ..process.host import monotonic
from ..signals import lock_released
from .acquire import insist
from .state import GONE, KeptLease

logger = logging.getLogger("django_distlock")


#: Seconds to wait for an extend in flight, before a lease is released whose block is gone.
LEFT_PATIENCE = 0.05


class EndingLease(KeptLease):
    """A lease that can be given up, once."""

    #: Whether the block that took it has been left.
    _left = False
    #: Whether it was left without its end.
    _is_left = False
    #: Whether a release behind a transaction is going on, or was interrupted.
    _is_ending = False

    def release(self) -> bool:
        """Give the key back: at once, or when the transactions of this thread have ended.

        Returns:
            True once, for the call that gave it up; False if it was given up, over or gone before.
            What was over is given back all the same, if nobody else has the key by now.

        Raises:
            BackendUnavailable: The store did not answer. May be called again.
        """
        if self._pid != os.getpid() or self._state == "released":
            return False
        if deferred_release.defer(self._name, self, self._release_deferred):
            self._keep_for_transactions()
            if self.is_lost:
                return False
            self._state = "released"
            return True
        return self._release_now() is True

    async def arelease(self) -> bool:
        """See `release`. Once begun, it is carried out whatever is cancelled."""
        if self._pid != os.getpid() or self._state == "released":
            return False
        if deferred_release.defer(self._name, self, self._release_deferred):
            self._keep_for_transactions()
            if self.is_lost:
                return False
            self._state = "released"
            return True
        return await self._store.threads.run(self._release_now) is True

    # Blocks

    def end_block(self, error: BaseException | None) -> None:
        """Release behind a block that raised `error`, or did not.

        Raises:
            LockLost: The block succeeded, but the lease had ended before.
        """
        if self._pid != os.getpid() or self._state == "released":
            return
        self._left = True
        was_lost = self.is_lost
        if deferred_release.defer(self._name, self, self._release_deferred):
            self._keep_for_transactions()
        else:
            self._release_quietly()
            self._end_keeping()
            # Not by its deadline: the body has ended in time, whatever its release took.
            was_lost = was_lost or self._state == "lost"
        self._end_of_block(error, was_lost=was_lost)

    async def aend_block(self, error: BaseException | None) -> None:
        """See `end_block`. A task that was cancelled for the loss gets to know of the loss."""
        if self._pid != os.getpid() or self._state == "released":
            return
        self._left = True
        cancelled = self._losses.left_block(error)
        was_lost = self.is_lost
        if deferred_release.defer(self._name, self, self._release_deferred):
            self._keep_for_transactions()
        else:
            # Cancelled here, it is carried out all the same, and ends what keeps the lease.
            await self._store.threads.run(self._release_quietly)
            self._end_keeping()
            was_lost = was_lost or self._state == "lost"
        self._end_of_block(None if cancelled else error, was_lost=was_lost)

    def end_left_block(self, thread: int) -> None:
        """Release behind a block of a thread that was left without its end, or in its midst.

        As the end does: behind the transactions of that thread which are still open.
        """
        self._is_left = True
        self._end_keeping()
        if self not in held_here:
            return  # Interrupted behind its release.
        release = deferred_release.defer_for(thread, self._name, self, self._release_deferred)
        if not release.is_over:
            self._keep_for_transactions()
        if self._state == "held":
            self._state = "released"
        release.release_if_over()

    def end_inner_block(self, error: BaseException | None) -> None:
        """Leave a block that entered the lock again: what the outer one holds goes on."""
        if self._pid != os.getpid() or error is not None:
            return
        if self._state != "released":
            if self.is_lost:
                self._lose(self._why_over())
        elif self._left:
            # In a task or a thread of its own: from then on it worked without the lock.
            raise LockLost(
                f"The lease on {self.key!r} (fence {self.fence}) was given up by the block around"
                " this one, which ended first.",
                key=self.key,
            )

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

    def _keep_for_transactions(self) -> None:
        """Keep the lease alive, which its holder has given up, until the data is committed."""
        self._block = None
        if self._state == "held":
            self.keep()
            self.watch()
        waits.deferred(self._name)

    @property
    def _name(self) -> tuple[str, str]:
        return self.backend, self.key

    def _release_now(self, patience: float = math.inf) -> bool | Unknown:
        """Ask the store, and tell what came of it.

        Args:
            patience: Seconds to ask again where a transaction holds the record; at least one
                attempt is made.

        Returns:
            Whether the lease was held until now; `UNKNOWN`: its record is held, and it is not over.
        """
        if self._pid != os.getpid():
            return False
        in_time = min(max(patience, 1.0), max(1.0, self.deadline - monotonic()), 1e6)
        was_over = self.is_over()
        # A release that is sent in time is a clean one, whenever its answer comes.
        with nullcontext() if was_over else self._releasing:
            # A block that was left may have been interrupted with the mutex in its hands.
            has_turn = self._mutex.acquire(timeout=LEFT_PATIENCE if self._is_left else in_time)
            if not (has_turn or self._is_left):
                raise BackendUnavailable(
                    f"{self.key!r} cannot be released: an extend of it has no answer.",
                    key=self.key,
                )
            try:
                if self not in held_here:
                    self._end_keeping()  # Given up by a release that was interrupted.
                    return False
                until = min(self.deadline, monotonic() + patience)
                answer = self._give_up(until, was_over=was_over)
            finally:
                if has_turn:
                    self._mutex.release()
                if self in held_here:
                    self._keep_on()
        if answer is UNKNOWN and self in held_here:
            return UNKNOWN
        if answer is UNKNOWN:
            logger.warning(
                "%r stays taken while a transaction holds its record",
                self.key,
                extra=self._fields("release_failed"),
            )
        self._tell(lock_released, held_for=self._held_for, released=bool(answer), cause=None)
        return self._state == "released"

    def _give_up(self, until: float, *, was_over: bool) -> bool | Unknown:
        """Ask the store to release the lease, or to settle it, and take the answer."""
        self._held_for = monotonic() - self._granted_at
        try:
            answer = insist(self._ask_to_end, until, self._terms.retry)
            if answer is UNKNOWN and monotonic() < self.deadline:
                return UNKNOWN
            # Gone in its time: a release was interrupted that the store has heard.
            answer = answer or (self._is_left and not was_over)
            held_here.discard(self)
        except LockError as error:
            self._tell(lock_released, held_for=self._held_for, released=False, cause=error)
            raise
        self._end_keeping()
        if was_over or not answer:
            # Over before it was given up; or taken away, by an operator or a store's loss.
            self._state = "lost"
            self.report_lost(GONE if answer is False and not was_over else self._why_over())
        elif self._state != "lost":
            self._state = "released"
        return answer

    def _ask_to_end(self, bound: float) -> bool | Unknown:
        if self._terms.hold:
            return self._store.release(self._grant, self._terms.hold, bound=bound)
        return self._store.release(self._grant, bound=bound)

    def _release_deferred(self) -> bool:
        """Release behind a transaction; False: the record is held, try again later."""
        # Interrupted, it has not come to its last line: the mutex may be locked for ever.
        self._is_left = self._is_left or self._is_ending
        self._is_ending = True
        is_done = self._release_quietly(0.0) is not UNKNOWN
        self._is_ending = False
        return is_done

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
        except LockError as error:
            # Nobody has it any more: kept alive, it would never end.
            self._end_keeping()
            logger.warning(
                "%r could not be released and stays taken for its ttl: %s",
                self.key,
                error,
                extra=self._fields("release_failed", error),
            )
            return False
