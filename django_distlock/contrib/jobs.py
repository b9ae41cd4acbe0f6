"""What becomes of a job that does not get its lock. The queues that run jobs share it."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

from ..bypassing import tell_bypassed, tell_requeued, tell_skipped
from ..core.choices import choice
from ..core.durations import Duration, seconds
from ..core.errors import BackendUnavailable, InvalidArgument, LockNotAcquired, shown
from ..core.keys import KeyTemplate
from ..core.logs import log_fields
from ..core.markers import skipped
from ..core.retry import Retry
from ..handler import lock_backends
from ..host import monotonic
from ..keeping import Terms
from ..locks import Lock, distlock

T = TypeVar("T")

OnConflict: TypeAlias = Literal["skip", "retry", "wait", "raise", "run"]
OnUnavailable: TypeAlias = Literal["raise", "skip", "run"]
#: The result of a job whose body did not run: JSON.
Marker: TypeAlias = dict[str, Any]
Refusal: TypeAlias = LockNotAcquired | BackendUnavailable

#: Seconds since its first attempt for which a job is queued again.
MAX_WAIT: Final = 3600.0
#: Seconds that a job waits in its worker: the holder may need that worker to come to its end.
WAIT: Final = 5.0
#: The pauses of a job that is queued again.
RETRY: Final = Retry(delay=1.0, factor=2.0, cap=60.0)
_PARENTHESES: Final = "Is it written without parentheses? Write @locked_task(…)."

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLock(Lock):
    """A lock whose holder is known by the id of its job, too.

    Attributes:
        task_id: The id; None: unknown.
        is_queued: Whether the job holds it from the queue: then no process does, and the end of
            the one that sent it says nothing.
    """

    task_id: str | None = None
    is_queued: bool = False

    def _terms(self) -> Terms:
        # By name: a class with slots is made anew, and `super()` would mean the first one.
        terms = Lock._terms(self)
        holder = replace(terms.holder, task_id=self.task_id)
        if self.is_queued:
            holder = holder.as_queued()
        return replace(terms, holder=holder)


@dataclass(frozen=True, slots=True)
class Queued:
    """How often a job was queued again. It travels with the job.

    Attributes:
        since: When it was tried first, in seconds since 1970 by that worker's clock.
        times: How often it was queued since.
    """

    since: float
    times: int = 0

    def again(self) -> Queued:
        """Return what to say of the next one."""
        return Queued(self.since, self.times + 1)

    def as_json(self) -> list[float]:
        """Return a list that `from_json` reads."""
        return [self.since, self.times]

    @classmethod
    def from_json(cls, data: object) -> Queued:
        """Return what has travelled.

        Raises:
            InvalidArgument: It is something else.
        """
        try:
            since, times = cast("Any", data)
            return cls(float(since), int(times))
        except (TypeError, ValueError):
            raise InvalidArgument(f"{shown(data)} does not tell how a job was queued.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one decorator was told.

    Attributes:
        lock: The lock, but for key and job.
        on_conflict: What is done if somebody else has the key.
        on_unavailable: What is done if the store does not answer.
        max_wait: Seconds since the first attempt for which a job is queued again; None: for ever.
        retry: The pauses until then.
    """

    lock: JobLock
    on_conflict: OnConflict
    on_unavailable: OnUnavailable
    max_wait: float | None
    retry: Retry

    @classmethod
    def of(
        cls,
        *,
        on_conflict: OnConflict,
        on_unavailable: OnUnavailable,
        max_wait: Duration | None,
        **options: Any,
    ) -> Rules:
        """Return rules that were checked.

        Args:
            on_conflict: See `Rules`.
            on_unavailable: See `Rules`.
            max_wait: See `Rules`.
            options: Those of `distlock()`. `retry` is about the pauses in the queue, where there
                are any. `wait` is 0 if it is left out, or 5 where the job is to wait.

        Raises:
            InvalidArgument: An argument breaks a rule.
        """
        choice("on_conflict", on_conflict, ("skip", "retry", "wait", "raise", "run"))
        choice("on_unavailable", on_unavailable, ("raise", "skip", "run"))
        options.setdefault("wait", WAIT if on_conflict == "wait" else 0)
        lock = distlock("?", on_conflict="run" if on_conflict == "run" else "raise", **options)
        values = {each.name: getattr(lock, each.name) for each in fields(lock)}
        if on_conflict == "retry":
            values["retry"] = None
        return cls(
            lock=JobLock(**values),
            on_conflict=on_conflict,
            on_unavailable=on_unavailable,
            max_wait=None if max_wait is None else seconds(max_wait, "max_wait"),
            retry=lock.retry or RETRY,
        )

    def lock_of(self, key: str, task_id: str | None) -> JobLock:
        """Return the lock of one job."""
        return replace(self.lock, key=key, task_id=task_id)

    def pause(self, queued: Queued, now: float) -> float | None:
        """Return the seconds until the next attempt; None: there is none.

        The pauses have full jitter, for many jobs may have met one holder. The last attempt is at
        the end of `max_wait`, or when a worker comes to it.

        Args:
            queued: What has travelled with the job.
            now: Seconds since 1970.
        """
        left = math.inf if self.max_wait is None else queued.since + self.max_wait - now
        steps = self.retry.pauses(lambda: 1.0)
        step = next(itertools.islice(steps, queued.times, None), None)
        if step is None or left <= 0:
            return None
        return min(left, random.uniform(0, step))  # noqa: S311 - to spread load

    def run(
        self, lock: Lock, body: Callable[[], T], again: Callable[[LockNotAcquired], Marker]
    ) -> T | Marker:
        """Call the body under its lock, or do what the rules say.

        What the body raises is its own, also where it is a `LockNotAcquired`.

        Args:
            lock: From `lock_of`.
            body: The work.
            again: Queues the job again because of the error, or raises it.
        """
        started_at, entered = monotonic(), False
        try:
            with lock:
                entered = True
                return body()
        except (LockNotAcquired, BackendUnavailable) as error:
            if entered:
                raise
            refusal = error
        if self._runs_without(refusal):
            tell_bypassed(lock.backend, lock.key, monotonic() - started_at, refusal)
            return body()
        if isinstance(refusal, LockNotAcquired) and self.on_conflict == "retry":
            marker = again(refusal)
            tell_requeued(lock.backend, lock.key, refusal)
            return marker
        return self._skip(refusal, lock)

    async def arun(
        self,
        lock: Lock,
        body: Callable[[], Awaitable[T]],
        again: Callable[[LockNotAcquired], Awaitable[Marker]],
    ) -> T | Marker:
        """See `run`."""
        started_at, entered = monotonic(), False
        try:
            async with lock:
                entered = True
                return await body()
        except (LockNotAcquired, BackendUnavailable) as error:
            if entered:
                raise
            refusal = error
        if self._runs_without(refusal):
            store = lock_backends[lock.backend]
            waited = monotonic() - started_at
            await store.run_async(tell_bypassed, lock.backend, lock.key, waited, refusal)
            return await body()
        if isinstance(refusal, LockNotAcquired) and self.on_conflict == "retry":
            marker = await again(refusal)
            store = lock_backends[lock.backend]
            await store.run_async(tell_requeued, lock.backend, lock.key, refusal)
            return marker
        return await lock_backends[lock.backend].run_async(self._skip, refusal, lock)

    def _runs_without(self, refusal: Refusal) -> bool:
        # A conflict that is to be run through is left to the lock.
        return isinstance(refusal, BackendUnavailable) and self.on_unavailable == "run"

    def _skip(self, refusal: Refusal, lock: Lock) -> Marker:
        """Say so, or raise what is not to be skipped."""
        conflict = isinstance(refusal, LockNotAcquired)
        if (self.on_conflict if conflict else self.on_unavailable) != "skip":
            raise refusal
        level = logging.INFO if conflict else logging.ERROR
        extra = log_fields("skipped", backend=lock.backend, key=lock.key, error=refusal)
        logger.log(level, "The job of %r is skipped: %s", lock.key, refusal, extra=extra)
        tell_skipped(lock.backend, lock.key, refusal)
        return skipped(refusal, lock.key)


def queued_again(error: LockNotAcquired, key: str, task_id: str, pause: float) -> Marker:
    """Return the result of a job in whose place another one is in the queue, and say so."""
    logger.info(
        "The job of %r is queued again as %s, in %.1f s: %s",
        key,
        task_id,
        pause,
        error,
        extra=log_fields("queued_again", key=key, task=task_id, error=error),
    )
    return {"distlock": "queued again", "key": key, "as": task_id}


def key_maker(
    key: str | Callable[..., str], function: Callable[..., Any], *, hidden: int = 0
) -> Callable[..., str]:
    """Return what makes a key of the arguments of a job.

    Args:
        key: A template of the function's parameters, or what returns the key.
        function: The body of the job.
        hidden: How many of its first parameters are no arguments of the job.

    Raises:
        InvalidArgument: The template is malformed, or names what is no argument of the job.
    """
    if callable(key):
        return key
    signature = inspect.signature(function)

    def visible(*_: Any, **__: Any) -> None:
        """Stand for the function as its callers see it."""

    parameters = list(signature.parameters.values())[hidden:]
    visible.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    visible.__qualname__ = function.__qualname__
    return KeyTemplate.for_function(key, visible).of


def refuse_function(key: object) -> None:
    """Refuse the function of a task where a key is expected, if the two can be told apart.

    A function of a module that makes keys has its name there by now, and one that is being
    decorated has not. Of functions inside of others, and of classes, nobody knows: `only_function`
    says so when the task runs.

    Raises:
        InvalidArgument: It is no key.
    """
    if not inspect.isfunction(key) or not key.__qualname__.isidentifier():
        return
    module = sys.modules.get(key.__module__)
    if module is not None and key.__qualname__ not in vars(module):
        raise InvalidArgument(f"locked_task has got {key.__qualname__} for a key. {_PARENTHESES}")


def only_function(key: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a decorator is called with, unless a task is being run.

    Args:
        key: What the decorator was given.
        args: What it is called with.
        kwargs: The same.

    Raises:
        InvalidArgument: These are the arguments of a task.
    """
    if len(args) == 1 and not kwargs and (callable(args[0]) or not callable(key)):
        return args[0]
    raise InvalidArgument(
        f"locked_task wraps a function, not the arguments of a call. {_PARENTHESES}"
    )
