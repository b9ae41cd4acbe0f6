"""Work that a schedule starts on every node, and that one node does."""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast, overload

from .backends.base import BaseLockBackend
from .core.bodies import require_function, whole
from .core.clock import monotonic
from .core.declarations import Declaration, Kind, declared
from .core.durations import MIN_TTL, Duration, seconds
from .core.errors import BackendUnavailable, InvalidArgument, LockError, shown
from .core.keys import OWN_MARKER, KeyTemplate, own_key
from .core.logs import log_fields
from .core.retry import Retry
from .handler import FALLBACK, lock_backends
from .locks.checking import for_call
from .locks.lease import Lease
from .locks.lock import Lock, distlock
from .locks.policy import Refusal, aattempt, attempt, skip, skipped

logger = logging.getLogger("django_distlock")

#: Arguments of `distlock()` that a schedule does not take.
_OWN = frozenset({"ttl", "wait", "on_conflict"})
#: The start of a schedule's key, before its name.
PREFIX: Final = f"{OWN_MARKER}schedule:"
#: The pauses between two attempts at a tick while the store is unavailable.
RETRY: Final = Retry(delay=0.5, cap=15.0)
#: The most seconds between two ticks, and the seconds for which the time of the last run is kept.
LONGEST: Final = 366 * 86_400.0
KNOWN: Final = 10 * LONGEST

P = ParamSpec("P")
T = TypeVar("T")
#: The result of a call that did not run its function.
M = TypeVar("M", covariant=True)


class RunScope(enum.Enum):
    """Where a tick of a schedule is run.

    Attributes:
        REQUIRE_GLOBAL: On one node: the one that is granted the key of the tick.
        PREFER_GLOBAL: The same. Without a distributed backend, in one thread of each process: with
            `DISTLOCK = {}`, or if the backend is one of a single process.
        NODE_LOCAL: On every node, without a lock.
    """

    REQUIRE_GLOBAL = "require_global"
    PREFER_GLOBAL = "prefer_global"
    NODE_LOCAL = "node_local"


class Skipped(dict[str, Any]):
    """The result of a call that was left to others. It is false, and JSON for queues of tasks.

    Attributes:
        key: The key of the tick.
        why: The error: a conflict, or an unavailable store.
    """

    def __init__(self, key: str, why: LockError):
        super().__init__(skipped(why, key))
        self.key = key
        self.why = why

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> Any:
        return Skipped, (self.key, self.why)


class Decorator(Protocol[M]):
    """A decorator of functions and of coroutine functions, which may return M as well."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T | M]]: ...

    @overload
    def __call__(self, function: Callable[P, T], /) -> Callable[P, T | M]: ...


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The arguments of a schedule, with times in seconds."""

    name: str
    lock: Lock
    scope: RunScope
    expected: float
    margin: float
    jitter: float
    every: float | None = None

    def lock_of(self, key: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lock:
        """Return the lock of one tick."""
        return for_call(self.lock, key, args, kwargs, backend=self.backend)

    @property
    def backend(self) -> str:
        """The alias of the lock backend.

        A backend that is not distributed needs no fallback: its locks end with this process anyway.
        """
        # If any backend is configured, an unknown alias is a mistake, and is raised.
        if self.scope is RunScope.PREFER_GLOBAL and not list(lock_backends):
            return FALLBACK
        return self.lock.backend

    def pause(self) -> float:
        """Return the seconds to wait before the tick."""
        return random.uniform(0, self.jitter)  # noqa: S311 - to spread load

    def retries(self, since: float) -> Iterator[float]:
        """Yield the pauses between attempts, for half of the margin.

        The other half is for clocks that differ: a late grant must not come after the time for
        which the grant of another node holds the key.
        """
        for pause in RETRY.pauses():
            if (left := since + self.margin / 2 - monotonic()) <= 0:
                return
            yield min(pause, left)

    def again(self, key: str, error: LockError, pauses: Iterator[float]) -> float | None:
        """Return the seconds until the next attempt; None: there is none."""
        # The holder of the key does the work. If the store is unavailable, maybe nobody does.
        pause = next(pauses, None) if isinstance(error, BackendUnavailable) else None
        if pause is not None:
            extra = self._fields("retried", key, error)
            logger.warning("The tick %r is retried in %.1f s: %s", key, pause, error, extra=extra)
        return pause

    def skip(self, key: str, error: Refusal) -> Skipped:
        """Report that another node does the work, or none."""
        skip(f"The tick {key!r}", error, self.backend, key)
        return Skipped(key, error)

    def note_run(self, key: str) -> None:
        """Record in the store that a tick runs now, if the schedule has `every`."""
        if self.every is None:
            return
        try:
            note_run(lock_backends[self.backend], PREFIX + self.name)
        except LockError as error:
            # The tick runs anyway, and the next one is recorded again.
            extra = self._fields("note_failed", key, error)
            logger.warning("It could not be recorded that %r has run: %s", key, error, extra=extra)

    @contextmanager
    def timed(self, key: str, lease: Lease) -> Iterator[None]:
        """Log a warning if a run takes longer than the schedule allows."""
        clock = lease._holding.monotonic
        began = clock()
        try:
            yield
        finally:
            took, allowed = clock() - began, cast("float", self.lock.ttl)
            if took > allowed:
                logger.warning(
                    "The run of %r took %.1f s, but %.1f s were declared (%.1f s expected). Later"
                    " ticks may have been skipped during this overrun",
                    key,
                    took,
                    allowed,
                    self.expected,
                    extra=self._fields("overrun", key),
                )

    def _fields(self, event: str, key: str, error: LockError | None = None) -> dict[str, Any]:
        return log_fields(event, backend=self.lock.backend, key=key, error=error)


def scheduled(
    name: str,
    *,
    scope: RunScope = RunScope.REQUIRE_GLOBAL,
    expected: Duration,
    margin: Duration | None = None,
    hold: bool = True,
    jitter: Duration = 0,
    every: Duration | None = None,
    backend: str = "default",
    **options: Any,
) -> Decorator[Skipped]:
    """Let one node do what a schedule starts on all of them: cron, Celery beat, `django.tasks`.

    The first node that is granted the key `〈schedule:<name>` runs; the others return `Skipped`
    immediately. With `hold`, the key stays held until `expected + margin` seconds after the grant:
    a node whose clock is late finds it held although the work is done. So keep this time below that
    between two ticks, and above the difference between clocks.

    The lease of a longer run is renewed, so that no second run begins, and an overrun is logged.

    Args:
        name: The name of the schedule; a template of the function's parameters, if it has any.
        scope: Where a tick runs.
        expected: Seconds (or a `timedelta`) that a run takes.
        margin: Seconds above that; None: half of `expected`. In the first half of it, a tick is
            retried if the store is unavailable, or if a transaction locks what it needs.
        hold: Whether the key stays held after a run that was shorter.
        jitter: The longest wait before a tick, in seconds; each is random, to spread load. With
            `hold`, it must be below `expected` and half of `margin`: a node that waits for longer
            would run the tick once more.
        every: Seconds between two ticks, from 0.1 to 366 days; the longest, if they differ. The
            store then keeps the time of the last run, and metrics report how overdue the next is.
        backend: The alias of the lock backend.
        options: Others of `distlock()`, such as `steal_if_dead` and `metadata`, but not `ttl`,
            `wait` and `on_conflict`, which a schedule sets itself.

    Raises:
        InvalidArgument: An argument breaks a rule; or what is decorated is no plain function.
        LockUsageError: The function's body would run after its call.
    """
    if not isinstance(scope, RunScope):
        raise InvalidArgument(f"scope must be a RunScope, not {shown(scope)}.")
    if own := _OWN & options.keys():
        names = ", ".join(sorted(own))
        raise InvalidArgument(
            f"A schedule does not accept {names}: its ttl is expected + margin, and a node that"
            " does not get the key skips the tick."
        )
    expects = seconds(expected, "expected")
    spare = expects / 2 if margin is None else seconds(margin, "margin")
    if expects + spare < MIN_TTL:
        raise InvalidArgument(
            f"expected + margin must be at least {MIN_TTL:g} s, not {expects + spare:g}."
        )
    waits = seconds(jitter, "jitter")
    # A retry may come after half of the margin.
    if hold and scope is not RunScope.NODE_LOCAL and waits and waits >= expects + spare / 2:
        raise InvalidArgument(
            f"jitter must be below expected + margin / 2 ({expects + spare / 2:g} s), not"
            f" {waits:g} s: a node that waits for longer would run the tick once more."
        )
    if every is not None and scope is RunScope.NODE_LOCAL:
        raise InvalidArgument(
            "every requires a lock, and every node runs this schedule itself. Remove every."
        )
    schedule = Schedule(
        name=name,
        lock=distlock("?", ttl=expects + spare, wait=0, hold=hold, backend=backend, **options),
        scope=scope,
        expected=expects,
        margin=spare,
        jitter=waits,
        every=None if every is None else seconds(every, "every", minimum=MIN_TTL, maximum=LONGEST),
    )

    def decorate(function: Callable[..., Any]) -> Any:
        require_function(function, "scheduled")
        function = whole(function)
        template = KeyTemplate.for_function(PREFIX.removeprefix(OWN_MARKER) + name, function)
        if inspect.iscoroutinefunction(function):
            wrapper: Any = _awaited(schedule, template, function)
        else:
            wrapper = _called(schedule, template, function)
        made = functools.wraps(function)(wrapper)
        declaration = Declaration(
            Kind.SCHEDULE,
            PREFIX + name,
            schedule.lock,
            "skip",
            scope=scope.value,
            every=schedule.every,
        )
        declared[made] = (declaration,)
        return made

    return cast("Decorator[Skipped]", decorate)


def note_run(store: BaseLockBackend, name: str) -> None:
    """Record that a schedule of this name, such as `〈schedule:nightly`, runs now."""
    store.notes.put(name, int(store.clock().timestamp() * 1000), KNOWN)


def overdue(store: BaseLockBackend, schedule: Declaration) -> float:
    """Return by how many seconds a tick is overdue; 0: none is.

    If the store does not know the schedule, its time counts from now on.
    """
    noted = store.notes.get(schedule.key)
    if noted is None:
        note_run(store, schedule.key)
        return 0.0
    allowed: float = cast("float", schedule.every) + schedule.lock.ttl
    return max(0.0, store.clock().timestamp() - noted / 1000 - allowed)


def _called(
    schedule: Schedule, template: KeyTemplate, function: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(schedule.pause())
        if schedule.scope is RunScope.NODE_LOCAL:
            return function(*args, **kwargs)
        key = own_key(template.render(args, kwargs))
        pauses = schedule.retries(monotonic())
        while True:
            with attempt(schedule.lock_of(key, args, kwargs)) as answer:
                if isinstance(answer, Lease):
                    with schedule.timed(key, answer):
                        schedule.note_run(key)
                        return function(*args, **kwargs)
            pause = schedule.again(key, answer, pauses)
            if pause is None:
                return schedule.skip(key, answer)
            time.sleep(pause)

    return run


def _awaited(
    schedule: Schedule, template: KeyTemplate, function: Callable[..., Any]
) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(schedule.pause())
        if schedule.scope is RunScope.NODE_LOCAL:
            return await function(*args, **kwargs)
        key = own_key(template.render(args, kwargs))
        lock, pauses = schedule.lock_of(key, args, kwargs), schedule.retries(monotonic())
        while True:
            async with aattempt(lock) as answer:
                if isinstance(answer, Lease):
                    with schedule.timed(key, answer):
                        if schedule.every is not None:
                            store = lock_backends[lock.backend]
                            await store.threads.run(schedule.note_run, key)
                        return await function(*args, **kwargs)
            pause = schedule.again(key, answer, pauses)
            if pause is None:
                return await lock_backends[lock.backend].threads.run(schedule.skip, key, answer)
            await asyncio.sleep(pause)

    return run
