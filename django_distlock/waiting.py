"""Drivers of the algorithms in `core`: with calls, and with awaits."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.dispatch import Signal

from . import transactions
from .backends.base import BaseLockBackend
from .core.acquiring import Attempt, GiveBack, Outcome, Pause, Reply, acquiring
from .core.durations import MAX_BOUND
from .core.errors import BackendUnavailable, LockError, LockNotAcquired
from .core.holders import Holder
from .core.insisting import Answer, insisting
from .core.keys import new_token
from .core.records import Contended, Grant
from .core.retry import Retry
from .host import monotonic
from .signals import lock_acquired, lock_not_acquired, tell

A = TypeVar("A", bound=Answer)

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asks for: a key, for how long, and how long to keep trying."""

    key: str
    ttl: float | None
    wait: float | None
    holder: Holder
    retry: Retry


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant, and by when its holder must have stopped.

    Attributes:
        deadline: By `host.monotonic`. It counts from before the request was sent: the store
            cannot have granted earlier than that.
    """

    grant: Grant
    deadline: float


def acquire(backend: BaseLockBackend, request: Request) -> Granted:
    """Wait for a key.

    Raises:
        LockNotAcquired: Somebody else had it for all of the wait.
        BackendUnavailable: The store did not answer until the end of the wait.
    """
    attempts = _Attempts(backend, request)
    try:
        return attempts.conclude(_drive(attempts))
    except BaseException as error:
        # Interrupted behind the grant, by a time limit in a receiver: nobody would release it.
        if not attempts.concluded or attempts.granted:
            attempts.fail(error)
        raise


async def aacquire(backend: BaseLockBackend, request: Request) -> Granted:
    """See `acquire`. Cancelled, it leaves nothing held, not even by an attempt in flight."""
    attempts = _Attempts(backend, request)
    try:
        outcome = await _adrive(attempts)
        if attempts.has_listeners():
            # Receivers run on our threads: one that blocks must not stop the event loop.
            return await backend.run_async(attempts.conclude, outcome)
        return attempts.conclude(outcome)
    except BaseException as error:
        # Cancelled behind the grant: nobody gets to know of it, so nobody would release it.
        if not attempts.concluded or isinstance(error, asyncio.CancelledError):
            await backend.run_async(attempts.fail, error)
        raise


def insist(question: Callable[[float], A], deadline: float, retry: Retry) -> A:
    """Ask a store about a lease of one's own until it knows.

    Args:
        question: Is given the seconds that it may wait inside the store.
        deadline: When the lease is over, by `host.monotonic`.

    Raises:
        BackendUnavailable: The store did not answer, twice.
    """
    steps = insisting(now=monotonic(), deadline=deadline, pauses=retry.pauses())
    step = next(steps)
    try:
        while True:
            answer: Answer = None
            if isinstance(step, Attempt):
                try:
                    answer = question(step.bound)
                except BackendUnavailable as error:
                    answer = error
            else:
                time.sleep(step.seconds)
            step = steps.send((monotonic(), answer))
    except StopIteration as stop:
        if isinstance(stop.value, BackendUnavailable):
            raise stop.value from stop.value.__cause__
        return stop.value  # type: ignore[no-any-return]


def _drive(attempts: _Attempts) -> Outcome:
    steps = attempts.steps()
    try:
        step = next(steps)
        while True:
            outcome = None
            if isinstance(step, Attempt):
                outcome = attempts.attempt(step.bound)
            elif isinstance(step, GiveBack):
                attempts.give_back(step.grant)
            else:
                time.sleep(step.seconds)
            step = steps.send(Reply(monotonic(), outcome))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def _adrive(attempts: _Attempts) -> Outcome:
    steps, backend = attempts.steps(), attempts.backend
    try:
        step = next(steps)
        while True:
            outcome = None
            if isinstance(step, Attempt):
                outcome = await backend.run_async(attempts.attempt, step.bound)
            elif isinstance(step, GiveBack):
                await backend.run_async(attempts.give_back, step.grant)
            else:
                await asyncio.sleep(step.seconds)
            step = steps.send(Reply(monotonic(), outcome))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class _Attempts:
    """The attempts of one caller: one token, and what became of it."""

    def __init__(self, backend: BaseLockBackend, request: Request):
        self.backend = backend
        self.request = request
        self.concluded = False
        self._started = monotonic()
        self._token = new_token()
        self._sent_at = self._started
        # Whether an attempt got no answer: it may have been granted.
        self._unanswered = False
        self._granted: Grant | None = None
        self._abandoned = False
        # Held by an attempt in flight, so that whoever gives up waits for it and undoes it.
        self._mutex = threading.Lock()

    def steps(self) -> Generator[Attempt | Pause | GiveBack, Reply, Outcome]:
        request = self.request
        return acquiring(now=self._started, wait=request.wait, pauses=request.retry.pauses())

    def attempt(self, bound: float) -> Outcome:
        request = self.request
        with self._mutex:
            if self._abandoned:
                return Contended(busy=True)
            self._sent_at = monotonic()
            try:
                outcome: Outcome = self.backend.acquire(
                    request.key,
                    self._token,
                    request.ttl,
                    request.holder,
                    # A grant whose reply was lost is in our own way: it is ours to take over.
                    replace=self._token if self._unanswered else None,
                    bound=bound,
                )
            except BackendUnavailable as error:
                self._unanswered = True
                return error
            except LockError:
                raise
            except BaseException:
                # Such as a time limit that a signal's handler raises: the request is on its way.
                self._unanswered = True
                raise
            if isinstance(outcome, Grant):
                self._granted = outcome
            return outcome

    def give_back(self, grant: Grant) -> None:
        self._granted = None
        try:
            self.backend.release(grant)
        except BackendUnavailable:
            logger.warning("%r was granted but not used, and could not be released", grant.key)
            self._release_later()

    def conclude(self, outcome: Outcome) -> Granted:
        """Return the grant, or raise why there is none."""
        self.concluded = True
        request = self.request
        if isinstance(outcome, Grant):
            self._tell(lock_acquired, fence=outcome.fence, holder=request.holder)
            return Granted(
                outcome, math.inf if outcome.ttl is None else self._sent_at + outcome.ttl
            )
        if self._unanswered:
            self._release_later()
        error = outcome if isinstance(outcome, BackendUnavailable) else _contended(request, outcome)
        holder = getattr(error, "holder", None)
        self._tell(lock_not_acquired, fence=None, holder=holder, cause=error)
        raise error

    def fail(self, error: BaseException) -> None:
        """Leave nothing held, and tell."""
        with self._mutex:
            self._abandoned = True
            if self._granted is not None:
                self.give_back(self._granted)
        if self._unanswered:
            self._release_later()
        if not self.concluded:
            self.concluded = True
            self._tell(lock_not_acquired, fence=None, holder=None, cause=error)

    @property
    def granted(self) -> bool:
        return self._granted is not None

    def has_listeners(self) -> bool:
        sender = type(self.backend)
        return lock_acquired.has_listeners(sender) or lock_not_acquired.has_listeners(sender)

    def _release_later(self) -> None:
        """Release what an attempt without answer may have been granted, now and once more.

        A server that lost its client goes on waiting for its turn, and may grant behind the first
        release: as long as the bound for each of the two rows that it waits for.
        """
        transactions.later(self._release_unanswered)
        transactions.later(self._release_unanswered, 2.5 * MAX_BOUND)

    def _release_unanswered(self) -> None:
        request, now = self.request, datetime.now(UTC)
        try:
            self.backend.release(Grant(request.key, self._token, 1, request.ttl, now, None))
        except BackendUnavailable:
            logger.debug("%r may stay taken for its ttl: the store is away", request.key)

    def _tell(self, signal: Signal, **facts: Any) -> None:
        tell(
            signal,
            type(self.backend),
            alias=self.backend.alias,
            key=self.request.key,
            waited=monotonic() - self._started,
            **facts,
        )


def _contended(request: Request, outcome: Contended) -> LockNotAcquired:
    if request.wait is None:
        waited = "by the last retry"
    else:
        waited = f"within {request.wait:g} s" if request.wait else "at once"
    holder = outcome.holder
    if outcome.paused:
        why = "it is paused"
    elif holder is not None:
        held_for = outcome.held_for or 0.0
        who = f"{holder.process or 'a process'} (pid {holder.pid}) on {holder.host}"
        why = f"{who} has held it for {held_for:.1f} s"
    else:
        why = "a transaction is in the way" if outcome.busy else "it is held"
    return LockNotAcquired(
        f"The key {request.key!r} was not granted {waited}: {why}.",
        key=request.key,
        holder=holder,
        held_for=outcome.held_for,
        expires_in=outcome.expires_in,
    )
