"""Drivers of the algorithms in `core`: with calls, and with awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context

from ..backends.base import BaseLockBackend
from ..core.acquiring import Attempt, GiveBack, LineUp, Pause, Read, Reply, Step
from ..core.durations import MAX_BOUND
from ..core.insisting import A, insisting
from ..core.pacing import Outcome
from ..core.retry import Retry
from ..core.threads import Bell
from .attempts import NOTE_AFTER, Attempts, Granted, Request
from .blocks import Block

#: Seconds of one sleep at most: an infinite one cannot be asked for.
_LONGEST = 3600.0


def acquire(backend: BaseLockBackend, request: Request, block: Block) -> Granted:
    """Wait for a key.

    Args:
        block: Ends what was begun where this is interrupted.

    Raises:
        LockNotAcquired: Somebody else had it for all of the wait.
        BackendUnavailable: The store is unavailable until the end of the wait.
    """
    attempts = block.attempts = Attempts(backend, request)
    try:
        return attempts.conclude(_Calls(attempts).drive())
    except Exception as error:
        if not attempts.concluded:
            attempts.fail(error)
        raise


async def aacquire(backend: BaseLockBackend, request: Request, block: Block) -> Granted:
    """See `acquire`. Cancelled, it leaves nothing held, not even by an attempt in flight."""
    attempts = block.attempts = Attempts(backend, request)
    try:
        outcome = await _Awaits(attempts).drive()
        if attempts.has_listeners():
            # Receivers run on our threads: one that blocks must not stop the event loop. They see
            # the caller's context, as those of `sync_to_async` do.
            return await backend.threads.run(copy_context().run, attempts.conclude, outcome)
        return attempts.conclude(outcome)
    except (Exception, asyncio.CancelledError) as error:
        # Cancelled behind the grant: nobody gets to know of it, so nobody would release it.
        if not attempts.concluded or isinstance(error, asyncio.CancelledError):
            await backend.threads.run(copy_context().run, attempts.fail, error)
        raise


def insist(
    store: BaseLockBackend, question: Callable[[float], A], deadline: float, retry: Retry
) -> A:
    """Ask a store about a lease of one's own until it knows.

    Args:
        question: Is given the seconds that it may wait inside the store.
        deadline: When the lease is over, by the store's `monotonic`.

    Raises:
        BackendUnavailable: The store is unavailable, twice.
    """
    return insisting(
        question,
        clock=store.monotonic,
        sleep=time.sleep,
        deadline=deadline,
        pauses=retry.pauses(),
    )


class _Calls:
    """Carries out the steps of waiting, with calls."""

    def __init__(self, attempts: Attempts):
        self._attempts = attempts
        self._backend = attempts.backend
        self._monotonic = attempts.backend.monotonic
        self._woken = Bell()

    def drive(self) -> Outcome:
        steps = self._attempts.steps()
        try:
            step = next(steps)
            while True:
                step = steps.send(self._do(step))
        except StopIteration as stop:
            outcome: Outcome = stop.value
        # Ended otherwise, it leaves where the attempts fail.
        rest = self._attempts.leave()
        if rest is not None:
            rest()
        return outcome

    def _do(self, step: Step) -> Reply:
        attempts = self._attempts
        if isinstance(step, Attempt):
            # Whatever comes from here on concerns what the attempt does not see any more.
            self._woken.clear()
            outcome = attempts.attempt(step)
            return Reply(self._monotonic(), outcome)
        if isinstance(step, LineUp):
            return self._line_up(step.until)
        if isinstance(step, Read):
            record = attempts.read()
            return Reply(self._monotonic(), record=record)
        if isinstance(step, GiveBack):
            attempts.give_back(step.grant)
            return Reply(self._monotonic())
        return self._pause(step)

    def _line_up(self, until: float) -> Reply:
        attempts = self._attempts
        queued = attempts.join(self._ring)
        while attempts.queues and (left := min(until - self._monotonic(), attempts.patience)) > 0:
            self._sleep(left)
            self._woken.clear()
        bound = min(MAX_BOUND, max(0.0, until - self._monotonic()))
        listening = attempts.is_first and self._backend.listen(bound)
        return Reply(self._monotonic(), listening=listening, queued=queued)

    def _pause(self, step: Pause) -> Reply:
        self._sleep(step.seconds)
        return Reply(self._monotonic(), listening=self._backend.listen())

    def _sleep(self, seconds: float) -> None:
        """Sleep until woken; people get to see it when it takes long."""
        if self._attempts.instead is not None:
            return
        until = self._monotonic() + seconds
        if seconds > NOTE_AFTER and not self._attempts.may_be_noted:
            self._woken.wait(NOTE_AFTER)
        if self._attempts.may_be_noted and not self._woken.is_rung:
            self._attempts.note()
        self._woken.wait(min(_LONGEST, until - self._monotonic()))

    def _ring(self) -> bool:
        self._woken.ring()
        return True


class _Awaits:
    """Carries out the steps of waiting, with awaits."""

    def __init__(self, attempts: Attempts):
        self._attempts = attempts
        self._backend = attempts.backend
        self._monotonic = attempts.backend.monotonic
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    async def drive(self) -> Outcome:
        steps = self._attempts.steps()
        try:
            step = next(steps)
            while True:
                step = steps.send(await self._do(step))
        except StopIteration as stop:
            outcome: Outcome = stop.value
        # Ended otherwise, it leaves where the attempts fail.
        rest = self._attempts.leave()
        if rest is not None:
            await self._backend.threads.run(rest)
        return outcome

    async def _do(self, step: Step) -> Reply:
        attempts, run = self._attempts, self._backend.threads.run
        if isinstance(step, Attempt):
            self._woken.clear()
            outcome = await run(attempts.attempt, step)
            return Reply(self._monotonic(), outcome)
        if isinstance(step, LineUp):
            return await self._line_up(step.until)
        if isinstance(step, Read):
            record = await run(attempts.read)
            return Reply(self._monotonic(), record=record)
        if isinstance(step, GiveBack):
            await run(attempts.give_back, step.grant)
            return Reply(self._monotonic())
        return await self._pause(step)

    async def _line_up(self, until: float) -> Reply:
        attempts = self._attempts
        queued = attempts.join(self._ring)
        while attempts.queues and (left := min(until - self._monotonic(), attempts.patience)) > 0:
            await self._sleep(left)
            self._woken.clear()
        listening = self._backend.is_listening
        if attempts.is_first and not listening:
            bound = min(MAX_BOUND, max(0.0, until - self._monotonic()))
            listening = await self._backend.threads.run(self._backend.listen, bound)
        return Reply(self._monotonic(), listening=listening, queued=queued)

    async def _pause(self, step: Pause) -> Reply:
        await self._sleep(step.seconds)
        return Reply(self._monotonic(), listening=self._backend.listen())

    async def _sleep(self, seconds: float) -> None:
        if self._attempts.instead is not None:
            return
        until = self._monotonic() + seconds
        if seconds > NOTE_AFTER and not self._attempts.may_be_noted:
            await self._wait(NOTE_AFTER)
        if self._attempts.may_be_noted and not self._woken.is_set():
            await self._backend.threads.run(self._attempts.note)
        await self._wait(min(_LONGEST, max(0.0, until - self._monotonic())))

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    def _ring(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            return False  # The loop was closed.
        return True
