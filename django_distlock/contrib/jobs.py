"""What becomes of a job that does not get its lock. The queues that run jobs share it."""

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
from ..locks.checking import counted, for_call
from ..locks.lock import Lock, distlock
from ..locks.policy import Policy, Refusal
from ..locks.several import LockSet
from ..locks.state import Terms

OnConflict: TypeAlias = Literal["skip", "retry", "wait", "raise", "run"]
OnUnavailable: TypeAlias = Literal["raise", "skip", "run"]
#: One of several locks of a job: its key, and how many may hold it; a key alone: one.
Limit: TypeAlias = str | Callable[..., str] | tuple[str | Callable[..., str], Permits]
#: The result of a job whose body did not run: JSON.
Marker: TypeAlias = dict[str, Any]

#: Seconds since its first attempt for which a job is queued again.
MAX_WAIT: Final = 3600.0
#: Seconds that a job waits in its worker: the holder may need that worker to come to its end.
WAIT: Final = 5.0
#: The pauses of a job that is queued again.
RETRY: Final = Retry(delay=1.0, factor=2.0, cap=60.0)

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

    def _terms(self, store: BaseLockBackend) -> Terms:
        # By name: a class with slots is made anew, and `super()` would mean the first one.
        terms = Lock._terms(self, store)
        holder = replace(terms.holder, task_id=self.task_id)
        if self.is_queued:
            holder = holder.as_queued()
        return replace(terms, holder=holder)


@dataclass(frozen=True, slots=True)
class Queued:
    """How often a job was queued again, and since when, in seconds since 1970. It travels along."""

    since: float
    times: int = 0

    def again(self) -> list[float]:
        """Return what the next one carries, which `from_json` reads."""
        return [self.since, self.times + 1]

    @classmethod
    def from_json(cls, data: object) -> Queued:
        """Return what has travelled, or refuse what has not."""
        try:
            since, times = cast("Any", data)
            return cls(float(since), int(times))
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgument(f"{shown(data)} does not tell how a job was queued.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one decorator was told.

    Attributes:
        lock: The lock, but for key and job.
        policy: What is done in place of the job.
        max_wait: Seconds since the first attempt for which a job is queued again; None: for ever.
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
        """Return rules that were checked.

        Args:
            options: Those of `distlock()`. `retry` is about the pauses in the queue, where there
                are any. `wait` is 0 if it is left out, or 5 where the job is to wait.
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
        """Return the rules of one of several locks; None: those of the only one."""
        if permits is None:
            return self
        # A block that holds several keys has all or none: what runs without, the policy says.
        return replace(self, lock=replace(self.lock, permits=permits, on_conflict="raise"))

    def lock_of(
        self, key: str, task_id: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> JobLock:
        """Return the lock of one job; its arguments are for `permits`, where that is a function."""
        return for_call(self.lock, key, args, kwargs, task_id=task_id)

    def pause(self, queued: Queued, now: float) -> float | None:
        """Return the seconds until the next attempt; None: there is none.

        The pauses have full jitter, for many jobs may have met one holder. The last attempt is at
        the end of `max_wait`, or when a worker comes to it. `now` is in seconds since 1970.
        """
        left = math.inf if self.max_wait is None else queued.since + self.max_wait - now
        steps = self.retry.pauses(lambda: 1.0)
        step = next(itertools.islice(steps, queued.times, None), None)
        if step is None or left <= 0:
            return None
        return min(left, random.uniform(0, step))  # noqa: S311 - to spread load


def lock_set(locks: list[JobLock]) -> LockSet | None:
    """Return what holds several locks, all or none; None: there is one, which holds itself.

    Where two limits of a job have one key, the lower one counts.
    """
    if len(locks) == 1:
        return None
    return LockSet(sorted(locks, key=counted, reverse=True))


def limits_of(
    key: object, locks: Sequence[Limit] | None, options: Mapping[str, Any]
) -> list[tuple[Any, Permits | None]]:
    """Return the keys of a job, each with its number of permits; None: what its options say."""
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
    """Return the result of a job in whose place another one is in the queue, and say so."""
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
    """Return what makes a key of a job's arguments; so many of its first parameters are hidden."""
    if callable(key):
        made = key
        return lambda *args, **kwargs: normalize_key(made(*args, **kwargs))
    signature = signature_of(function)

    def visible(*_: Any, **__: Any) -> None:
        """Stand for the function as its callers see it."""

    parameters = list(signature.parameters.values())[hidden:]
    visible.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    visible.__qualname__ = function.__qualname__
    return KeyTemplate.for_function(key, visible).of


def only_function(key: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a decorator is called with, or refuse the arguments of a task that is run."""
    if len(args) == 1 and not kwargs and (callable(args[0]) or not callable(key)):
        return args[0]
    raise InvalidArgument(
        "locked_task wraps a function, not the arguments of a call. Is it written without"
        " parentheses? Write @locked_task(…)."
    )
