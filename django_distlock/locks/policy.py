"""Run, skip or retry work that does not get its lock. Jobs, schedules and views share this."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ..core.clock import monotonic
from ..core.errors import BackendUnavailable, InvalidArgument, LockError, LockNotAcquired, shown
from ..core.logs import log_fields
from ..handler import lock_backends
from .lease import Lease
from .lock import Lock
from .no_lease import tell_bypassed, tell_requeued, tell_skipped
from .several import Leases, LockSet

T = TypeVar("T")
R = TypeVar("R")

Refusal: TypeAlias = LockNotAcquired | BackendUnavailable

logger = logging.getLogger("django_distlock")


@contextmanager
def attempt(lock: AbstractContextManager[T]) -> Iterator[T | Refusal]:
    """Hold a lock around the block, or give the block the error that says why it is not held.

    Exceptions of the block are passed on, even if another lock has refused it.
    """
    entered = False
    try:
        with lock as lease:
            entered = True
            yield lease
            return
    except (LockNotAcquired, BackendUnavailable) as error:
        if entered:
            raise
        refusal: Refusal = error
    yield refusal


@asynccontextmanager
async def aattempt(lock: AbstractAsyncContextManager[T]) -> AsyncIterator[T | Refusal]:
    """See `attempt`."""
    entered = False
    try:
        async with lock as lease:
            entered = True
            yield lease
            return
    except (LockNotAcquired, BackendUnavailable) as error:
        if entered:
            raise
        refusal: Refusal = error
    yield refusal


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do with work that does not get its lock.

    Attributes:
        on_conflict: If the key is held: "run", "skip" or "retry"; otherwise the error is raised.
        on_unavailable: The same if the store is unavailable.
    """

    on_conflict: str
    on_unavailable: str

    @classmethod
    def of(cls, on_conflict: object, on_unavailable: object, *conflicts: str) -> Policy:
        """Validate and return a policy; `conflicts`: further values of `on_conflict`."""
        choice("on_conflict", on_conflict, ("skip", *conflicts, "raise", "run"))
        choice("on_unavailable", on_unavailable, ("raise", "skip", "run"))
        return cls(str(on_conflict), str(on_unavailable))

    def run(
        self,
        lock: Lock,
        body: Callable[[], T],
        skip: Callable[[Refusal], R],
        again: Callable[[Refusal], R] | None = None,
        around: LockSet | None = None,
    ) -> T | R:
        """Call the body under its lock, or do what the policy says.

        Args:
            around: Several locks to hold instead of `lock`, which is the first of them.
            skip: Returns a substitute for the result.
            again: Queues the work again, and returns a substitute for the result; or raises.
        """
        started_at = monotonic()
        held: AbstractContextManager[Lease | Leases] = around or lock
        with attempt(held) as answer:
            if isinstance(answer, Lease | Leases):
                return body()
        chosen, key = self._chosen(answer), answer.key or lock.key
        if chosen == "run":
            tell_bypassed(lock.backend, key, monotonic() - started_at, answer)
            return body()
        if chosen == "retry" and again is not None:
            result = again(answer)
            tell_requeued(lock.backend, key, answer)
            return result
        if chosen == "skip":
            return skip(answer)
        raise answer

    async def arun(
        self,
        lock: Lock,
        body: Callable[[], Awaitable[T]],
        skip: Callable[[Refusal], Awaitable[R]],
        again: Callable[[Refusal], Awaitable[R]] | None = None,
        around: LockSet | None = None,
    ) -> T | R:
        """See `run`. Receivers of signals are called in a thread, because they may block."""
        started_at = monotonic()
        held: AbstractAsyncContextManager[Lease | Leases] = around or lock
        async with aattempt(held) as answer:
            if isinstance(answer, Lease | Leases):
                return await body()
        chosen, key = self._chosen(answer), answer.key or lock.key
        tell = lock_backends[lock.backend].threads.run
        if chosen == "run":
            waited = monotonic() - started_at
            await tell(tell_bypassed, lock.backend, key, waited, answer)
            return await body()
        if chosen == "retry" and again is not None:
            result = await again(answer)
            await tell(tell_requeued, lock.backend, key, answer)
            return result
        if chosen == "skip":
            return await skip(answer)
        raise answer

    def _chosen(self, refusal: Refusal) -> str:
        if isinstance(refusal, LockNotAcquired):
            return self.on_conflict
        return where_unavailable(refusal, self.on_unavailable)


def where_unavailable(error: BackendUnavailable, chosen: str) -> str:
    """Return `on_unavailable`, or "raise" if the store denied access, which is no outage."""
    return "raise" if error.is_denied and chosen in ("skip", "run") else chosen


def skip(
    what: str, refusal: Refusal, backend: str, key: str, *, task: str | None = None
) -> dict[str, Any]:
    """Log and signal that work, named `what`, is skipped; return a substitute for its result."""
    level = logging.INFO if isinstance(refusal, LockNotAcquired) else logging.ERROR
    extra = log_fields("skipped", backend=backend, key=key, task=task, error=refusal)
    logger.log(level, "%s is skipped: %s", what, refusal, extra=extra)
    tell_skipped(backend, key, refusal)
    return skipped(refusal, key)


def skipped(error: LockError, key: str | None = None) -> dict[str, Any]:
    """Return the substitute for the result of skipped work, which JSON can represent."""
    holder = getattr(error, "holder", None)
    known = ("host", "pid", "task_id")
    return {
        "distlock": "skipped",
        "key": error.key or key,
        "why": error.code,
        "holder": None if holder is None else {name: getattr(holder, name) for name in known},
    }


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse an argument that is not one of `choices`, which the message names."""
    if value not in choices:
        known = ", ".join(f'"{each}"' for each in choices)
        raise InvalidArgument(f"{name} must be one of {known}, not {shown(value)}.")
