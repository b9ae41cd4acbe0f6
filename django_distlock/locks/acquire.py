"""Run the algorithms of `core`: sync and async."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from ..backends.base import BaseLockBackend
from ..core.acquiring import Attempt, GiveBack, LineUp, Pause, Read, Reply
from ..core.durations import MAX_BOUND
from ..core.insisting import A, insisting
from ..core.pacing import Outcome
from ..core.retry import Retry
from ..core.threads import Bell
from .attempts import NOTE_AFTER, Attempts, Granted, Request
from .blocks import Block

#: A blocking step: a call to make, or the seconds to sleep unless woken.
Blocking = Callable[[], Any] | float

#: The longest sleep, in seconds: a timeout cannot be infinite.
_LONGEST = 3600.0


def acquire(backend: BaseLockBackend, request: Request, block: Block) -> Granted:
    """Acquire a key. If this is interrupted, the block cleans up."""
    attempts = block.attempts = Attempts(backend, request)
    try:
        return attempts.conclude(_drive(attempts))
    except Exception as error:
        if not attempts.concluded:
            attempts.fail(error)
        raise


async def aacquire(backend: BaseLockBackend, request: Request, block: Block) -> Granted:
    """See `acquire`. A cancellation leaves nothing held, not even by an attempt in flight."""
    attempts = block.attempts = Attempts(backend, request)
    try:
        outcome = await _adrive(attempts)
        if attempts.has_listeners():
            # Receivers run in a thread, because they may block. They see the caller's context, as
            # with `sync_to_async`.
            return await backend.threads.run(copy_context().run, attempts.conclude, outcome)
        return attempts.conclude(outcome)
    except (Exception, asyncio.CancelledError) as error:
        # If cancelled after the grant, nobody gets the lease, so nobody else would release it.
        if not attempts.concluded or isinstance(error, asyncio.CancelledError):
            await backend.threads.run(copy_context().run, attempts.fail, error)
        raise


def insist(
    store: BaseLockBackend, question: Callable[[float], A], deadline: float, retry: Retry
) -> A:
    """Repeat a request about a lease until the store answers, or the lease is over: `insisting`."""
    return insisting(
        question,
        clock=store.monotonic,
        sleep=time.sleep,
        deadline=deadline,
        pauses=retry.pauses(),
    )


def _drive(attempts: Attempts) -> Outcome:
    """Acquire a key, and return the outcome of the last attempt."""
    answer, waiting = None, _Waiting(attempts, Bell)
    steps = waiting.steps()
    while True:
        try:
            blocking = steps.send(answer)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        if callable(blocking):
            answer = blocking()
        else:
            waiting.bell.wait(blocking)


async def _adrive(attempts: Attempts) -> Outcome:
    """See `_drive`."""
    answer, waiting = None, _Waiting(attempts, _TaskBell)
    steps, run = waiting.steps(), attempts.backend.threads.run
    while True:
        try:
            blocking = steps.send(answer)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        answer = await (run(blocking) if callable(blocking) else waiting.bell.wait(blocking))


class _TaskBell:
    """A `Bell` that a task awaits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()
        self.clear = self._rung.clear

    @property
    def is_rung(self) -> bool:
        return self._rung.is_set()

    def ring(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:
            return False  # The loop was closed.
        return True

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._rung.wait()


class _Waiting:
    """The steps of acquiring a key, except the blocking ones, which the driver carries out."""

    def __init__(self, attempts: Attempts, new_bell: Callable[[], Bell | _TaskBell]):
        self._attempts, self._new_bell = attempts, new_bell
        self._backend, self._monotonic = attempts.backend, attempts.backend.monotonic
        # Nearly always, nobody has to be woken.
        self._bell: Bell | _TaskBell | None = None

    @property
    def bell(self) -> Any:
        """What wakes the caller."""
        if self._bell is None:
            self._bell = self._new_bell()
        return self._bell

    def steps(self) -> Generator[Blocking, Any, Outcome]:
        """Yield the blocking steps, and return the outcome of the last attempt."""
        steps = self._attempts.steps()
        try:
            step = next(steps)
            while True:
                if isinstance(step, Attempt):
                    # A wake-up from here on may be about a change that the attempt does not see.
                    if self._bell is not None:
                        self._bell.clear()
                    answer = yield partial(self._attempts.attempt, step)
                    step = steps.send(Reply(self._monotonic(), answer))
                else:
                    step = steps.send((yield from self._reply(step)))
        except StopIteration as stop:
            outcome: Outcome = stop.value
        # After an exception, `Attempts.fail` leaves the queue.
        if (rest := self._attempts.leave()) is not None:
            yield rest
        return outcome

    def _reply(self, step: LineUp | Read | Pause | GiveBack) -> Generator[Blocking, Any, Reply]:
        if isinstance(step, LineUp):
            return (yield from self._line_up(step.until))
        if isinstance(step, Read):
            record = yield self._attempts.read
            return Reply(self._monotonic(), record=record)
        if isinstance(step, GiveBack):
            yield partial(self._attempts.give_back, step.grant)
            return Reply(self._monotonic())
        yield from self._sleep(step.seconds)
        return Reply(self._monotonic(), listening=self._backend.listen())

    def _line_up(self, until: float) -> Generator[Blocking, Any, Reply]:
        # Made here, in the caller's thread, before others can ring it.
        attempts, bell = self._attempts, self.bell
        queued = attempts.join(self._ring)
        while attempts.queues and (left := min(until - self._monotonic(), attempts.patience)) > 0:
            yield from self._sleep(left)
            bell.clear()
        bound = min(MAX_BOUND, max(0.0, until - self._monotonic()))
        listening = attempts.is_first and (yield partial(self._backend.listen, bound))
        return Reply(self._monotonic(), listening=listening, queued=queued)

    def _sleep(self, seconds: float) -> Generator[Blocking, Any, None]:
        """Sleep until woken; a long wait is noted in the store, where people can see it."""
        if self._attempts.instead is not None:
            return
        until = self._monotonic() + seconds
        if seconds > NOTE_AFTER and not self._attempts.may_be_noted:
            yield NOTE_AFTER
        if self._attempts.may_be_noted and not self.bell.is_rung:
            yield self._attempts.note
        yield min(_LONGEST, until - self._monotonic())

    def _ring(self) -> bool:
        woken: bool = self.bell.ring()
        return woken
