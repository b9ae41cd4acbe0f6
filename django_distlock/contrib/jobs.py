"""Rules for a job that does not get its lock, shared by all queues that run jobs."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, Self, TypeAlias, cast

from ..backends.base import BaseLockBackend
from ..core.bodies import signature_of
from ..core.durations import Duration, seconds
from ..core.errors import InvalidArgument, shown
from ..core.keys import KeyTemplate, normalize_key
from ..core.logs import log_fields
from ..core.retry import Retry
from ..core.sharing import Permits
from ..locks.checking import for_call
from ..locks.lock import Lock, distlock
from ..locks.policy import Policy, Refusal
from ..locks.several import LockSet
from ..locks.state import Terms
from ..locks.taking import counted

OnConflict: TypeAlias = Literal["skip", "retry", "wait", "raise", "run"]
OnUnavailable: TypeAlias = Literal["raise", "skip", "run"]
#: One of several locks of a job: its key and its number of holders; a key alone has one holder.
Limit: TypeAlias = str | Callable[..., str] | tuple[str | Callable[..., str], Permits]
#: The result of a job whose body did not run: JSON.
Marker: TypeAlias = dict[str, Any]

#: Seconds after its first attempt until which a job is queued again.
MAX_WAIT: Final = 3600.0
#: Seconds that a job waits in its worker: no longer, because the holder may need that worker.
WAIT: Final = 5.0
#: The pauses of a job that is queued again.
RETRY: Final = Retry(delay=1.0, factor=2.0, cap=60.0)

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLock(Lock):
    """A lock whose holder also has the id of its job.

    Attributes:
        task_id: The id; None: unknown.
        is_queued: Whether a queued job is the holder. Then no process is, and the death of the
            process that sent the job does not free the key.
    """

    task_id: str | None = None
    is_queued: bool = False

    def _terms(self, store: BaseLockBackend) -> Terms:
        # Not `super()`: `slots=True` makes the class again, and `super()` would use the first one.
        terms = Lock._terms(self, store)
        holder = replace(terms.holder, task_id=self.task_id)
        if self.is_queued:
            holder = holder.as_queued()
        return replace(terms, holder=holder)


@dataclass(frozen=True, slots=True)
class Queued:
    """How often a job was queued again, and since when (seconds since 1970); sent with the job."""

    since: float
    times: int = 0

    def again(self) -> list[float]:
        """Return the JSON that is sent with the next attempt, which `from_json` reads."""
        return [self.since, self.times + 1]

    @classmethod
    def from_json(cls, data: object) -> Queued:
        """Return the `Queued` from the JSON of `again`, or raise `InvalidArgument`."""
        try:
            since, times = cast("Any", data)
            return cls(float(since), int(times))
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgument(f"{shown(data)} does not tell how a job was queued.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The validated arguments of one decorator.

    Attributes:
        lock: The lock, without its key and job.
        policy: What is done instead of the job.
        max_wait: Seconds after the first attempt until which a job is queued again; None: no limit.
    """

    lock: JobLock
    policy: Policy
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
        """Validate arguments, and return them as rules.

        Args:
            options: Those of `distlock()`. `retry` sets the pauses in the queue, if a job is queued
                again. The default of `wait` is 0, or 5 with `on_conflict="wait"`.
        """
        policy = Policy.of(on_conflict, on_unavailable, "retry", "wait")
        options.setdefault("wait", WAIT if on_conflict == "wait" else 0)
        lock = distlock("?", on_conflict="run" if on_conflict == "run" else "raise", **options)
        values = {each.name: getattr(lock, each.name) for each in fields(lock)}
        if on_conflict == "retry":
            values["retry"] = None
        return cls(
            lock=JobLock(**values),
            policy=policy,
            max_wait=None if max_wait is None else seconds(max_wait, "max_wait"),
            retry=lock.retry or RETRY,
        )

    def with_permits(self, permits: Permits | None) -> Self:
        """Return the rules of one of several locks; None: those of the only lock."""
        if permits is None:
            return self
        # Several keys are held all or none: the policy decides whether a job runs without them.
        return replace(self, lock=replace(self.lock, permits=permits, on_conflict="raise"))

    def lock_of(
        self, key: str, task_id: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> JobLock:
        """Return the lock of one job, whose arguments are passed to `permits` if it is callable."""
        return for_call(self.lock, key, args, kwargs, task_id=task_id)

    def pause(self, queued: Queued, now: float) -> float | None:
        """Return the seconds until the next attempt; None: there is none.

        The pauses have full jitter, because many jobs may wait for one holder. The last attempt is
        at the end of `max_wait`, or when a worker gets to it. `now` is in seconds since 1970.
        """
        left = math.inf if self.max_wait is None else queued.since + self.max_wait - now
        steps = self.retry.pauses(lambda: 1.0)
        step = next(itertools.islice(steps, queued.times, None), None)
        if step is None or left <= 0:
            return None
        return min(left, random.uniform(0, step))  # noqa: S311 - to spread load


def lock_set(locks: list[JobLock]) -> LockSet | None:
    """Return a set that holds several locks, all or none; None: there is only one lock.

    If two limits of a job have the same key, the lower one counts.
    """
    if len(locks) == 1:
        return None
    return LockSet(sorted(locks, key=counted, reverse=True))


def limits_of(
    key: object, locks: Sequence[Limit] | None, options: Mapping[str, Any]
) -> list[tuple[Any, Permits | None]]:
    """Return the keys of a job, each with its number of permits; None: those of its options."""
    if locks is None:
        return [(key, None)]
    if clashes := sorted({"permits", "shared"} & options.keys()):
        raise InvalidArgument(f"locks says how many may hold each key: leave {clashes[0]} out.")
    if key is not None:
        raise InvalidArgument("Give one key, or several as locks=[…], not both.")
    if isinstance(locks, str) or not isinstance(locks, Sequence) or not locks:
        raise InvalidArgument(f"locks is a list of keys and permits, not {shown(locks)}.")
    found: list[tuple[Any, Permits | None]] = []
    for each in locks:
        pair = each if isinstance(each, tuple) else (each, 1)
        if len(pair) != 2 or not (isinstance(pair[0], str) or callable(pair[0])):
            raise InvalidArgument(
                "Each of locks is a key, or a key and how many may hold it, such as"
                f' ("tenant:{{tenant}}", 3), not {shown(each)}.'
            )
        found.append((pair[0], pair[1]))
    return found


def queued_again(error: Refusal, key: str, task_id: str, pause: float) -> Marker:
    """Log that a job was queued again as another one, and return its result."""
    key = error.key or key
    logger.info(
        "The job of %r is queued again as %s in %.1f s: %s",
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
    """Return a function from a job's arguments to its key; `hidden`: first parameters left out."""
    if callable(key):
        made = key
        return lambda *args, **kwargs: normalize_key(made(*args, **kwargs))
    signature = signature_of(function)

    def visible(*_: Any, **__: Any) -> None:
        """Have the signature of the function as its callers see it."""

    parameters = list(signature.parameters.values())[hidden:]
    visible.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    visible.__qualname__ = function.__qualname__
    return KeyTemplate.for_function(key, visible).of


def only_function(key: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the function that a decorator is called with, or refuse the arguments of a task."""
    if len(args) == 1 and not kwargs and (callable(args[0]) or not callable(key)):
        return args[0]
    raise InvalidArgument(
        "locked_task wraps a function, not the arguments of a call. Is it written without"
        " parentheses? Write @locked_task(…)."
    )
