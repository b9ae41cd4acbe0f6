"""Run tasks of `django.tasks`, and of its backport `django_tasks`, under a lock."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from typing import Any, Final, NamedTuple, cast

from django.utils import timezone

from ..core.bodies import refuse_function, signature_of, whole
from ..core.declarations import Declaration, Kind, declared
from ..core.durations import Duration
from ..core.errors import InvalidArgument, LockUsageError, shown
from ..core.sharing import Permits
from ..handler import lock_backends
from ..locks.policy import Refusal, skip
from ..scheduling import Decorator
from .jobs import (
    MAX_WAIT,
    JobLock,
    Limit,
    Marker,
    OnConflict,
    OnUnavailable,
    Queued,
    Rules,
    key_maker,
    limits_of,
    lock_set,
    only_function,
    queued_again,
)

#: The same framework twice. Neither is imported here: the code of a task has imported its package.
PACKAGES: Final = ("django.tasks", "django_tasks")
#: The keyword argument that carries `Queued`, because a task can carry nothing but arguments.
TRAVELS: Final = "_distlock"

#: The results of the tasks that run in this context, the innermost last.
_running: ContextVar[tuple[Any, ...]] = ContextVar("distlock_tasks", default=())


def locked_task(
    key: str | Callable[..., str] | None = None,
    *,
    locks: Sequence[Limit] | None = None,
    on_conflict: OnConflict | None = None,
    on_unavailable: OnUnavailable = "raise",
    max_wait: Duration | None = MAX_WAIT,
    backend: str = "default",
    **options: Any,
) -> Decorator[Marker]:
    """Hold a lock around each run of a task, sync or async. Write it below `@task`.

    Args:
        key: A template of the task's arguments, such as `"invoice:{invoice_id}"`, or a function
            that is called with them and returns the key. A first parameter `context` is left out.
        locks: Several keys instead of one, held all or none: `[("tenant:{tenant}", 3), ("stripe",
            10)]`, each with its number of holders. A key without a number has one holder.
        on_conflict: What happens if the key is not granted within `wait`. `"skip"`: the task
            succeeds without running its body, and its result says so. `"retry"`: it is queued
            again, with growing pauses, and its result names the new task. `"wait"`: as `"raise"`,
            but the default of `wait` is 5 s instead of 0. `"raise"`: it fails with
            `LockNotAcquired`. `"run"`: the body runs without the lock. None: `"retry"` if the
            backend of the task can run one later (`supports_defer`), else `"raise"`.
        on_unavailable: What happens if the store is unavailable. `"raise"`: the task fails with
            `BackendUnavailable`. `"skip"` and `"run"`: as above.
        max_wait: Seconds (or a `timedelta`) after the first attempt until which a task is queued
            again; None: no limit. After that it fails with `LockNotAcquired`.
        backend: The alias of the lock backend.
        options: Others of `distlock()`, such as `ttl` and `wait`. `retry` sets the pauses in the
            queue, unless nothing is queued again.

    Raises:
        InvalidArgument: An argument breaks a rule, or the template names no argument of the task.
        LockUsageError: It is written above `@task`, or on a function whose body would run after
            its call returns, such as a generator.
    """
    refuse_function(key, "locked_task")
    limits = limits_of(key, locks, options)
    if locks is None and not (isinstance(key, str) or callable(key)):
        raise InvalidArgument(
            f"locked_task takes a key, or several as locks=[…], not {shown(key)}."
        )
    rules = Rules.of(
        on_conflict="retry" if on_conflict is None else on_conflict,
        on_unavailable=on_unavailable,
        max_wait=max_wait,
        backend=backend,
        **options,
    )

    def decorate(*args: Any, **kwargs: Any) -> Any:
        function = only_function(key, args, kwargs)
        if not inspect.isfunction(function):
            raise LockUsageError(
                f"locked_task decorates the function of a task, not {shown(function)}: put it below"
                " @task().",
                code="unsupported",
            )
        function = whole(function)
        _listen()
        made = _Locked(function, rules, limits, insists=on_conflict == "retry").wrapped()
        # The default policy depends on the backend of the task that is made of this function.
        policy = on_conflict or "retry or raise"
        declared[made] = tuple(
            Declaration.of(Kind.DJANGO_TASK, each, rules.with_permits(permits).lock, policy)
            for each, permits in limits
        )
        return made

    return cast("Decorator[Marker]", decorate)


class _Run(NamedTuple):
    """One run of a task, or a call of its function.

    Attributes:
        result: The `TaskResult`; None: a call, or a backend that does not report the running task.
        locks: The locks of the run.
        queued: The value that was sent with the task.
        kwargs: The arguments by name, without that value.
    """

    result: Any
    locks: list[JobLock]
    queued: Queued
    kwargs: dict[str, Any]

    def left(self, refusal: Refusal) -> Marker:
        """Report that the body is not run; return the value that replaces its result."""
        lock = self.locks[0]
        key = refusal.key or lock.key
        return skip(f"The job of {key!r}", refusal, lock.backend, key)


class _Locked:
    """The function of a task, and its rules."""

    def __init__(
        self,
        function: Callable[..., Any],
        rules: Rules,
        limits: list[tuple[Any, Permits | None]],
        *,
        insists: bool,
    ):
        names = list(signature_of(function).parameters)
        if TRAVELS in names:
            raise InvalidArgument(
                f"{function.__qualname__} has a parameter {TRAVELS}, which locked_task uses to"
                " count how often a task was queued. Rename the parameter."
            )
        # Both packages require this name and this position for the context of a task.
        self._names = [name for name in names[:1] if name == "context"]
        self._hidden = len(self._names)
        self._limits = [
            (key_maker(key, function, hidden=self._hidden), rules.with_permits(permits))
            for key, permits in limits
        ]
        self._function = function
        self._rules = rules
        self._insists = insists

    def wrapped(self) -> Callable[..., Any]:
        """Return the function that replaces the original one."""
        policy = self._rules.policy
        if inspect.iscoroutinefunction(self._function):

            @wraps(self._function)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                run = self._run(args, kwargs)

                async def again(error: Refusal) -> Marker:
                    task, pause, named = self._later(run, error)
                    result = await task.aenqueue(*run.result.args, **named)
                    return queued_again(error, run.locks[0].key, str(result.id), pause)

                async def left(refusal: Refusal) -> Marker:
                    threads = lock_backends[run.locks[0].backend].threads
                    return await threads.run(run.left, refusal)

                body = partial(self._function, *args, **run.kwargs)
                return await policy.arun(run.locks[0], body, left, again, lock_set(run.locks))

            return asynchronous

        @wraps(self._function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            run = self._run(args, kwargs)

            def again(error: Refusal) -> Marker:
                task, pause, named = self._later(run, error)
                result = task.enqueue(*run.result.args, **named)
                return queued_again(error, run.locks[0].key, str(result.id), pause)

            body = partial(self._function, *args, **run.kwargs)
            return policy.run(run.locks[0], body, run.left, again, lock_set(run.locks))

        return synchronous

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
        result = self._result_of(args, kwargs)
        if self._insists and result is not None and not _defers(result):
            backend = result.task.get_backend()
            raise LockUsageError(
                f'{result.task.module_path} is locked with on_conflict="retry", but its backend'
                f" {backend.alias!r} ({type(backend).__name__}) cannot run a task later"
                " (supports_defer). Use one that can; or leave on_conflict out, to raise"
                " LockNotAcquired where it cannot.",
                code="unsupported",
            )
        queued = Queued.from_json(kwargs[TRAVELS]) if TRAVELS in kwargs else Queued(time.time())
        kwargs = {name: value for name, value in kwargs.items() if name != TRAVELS}
        own, task_id = args[self._hidden :], None if result is None else str(result.id)
        named = {name: value for name, value in kwargs.items() if name not in self._names}
        locks = [
            rules.lock_of(make(*own, **named), task_id, own, named) for make, rules in self._limits
        ]
        return _Run(result, locks, queued, kwargs)

    def _result_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = next(iter(_running.get()[-1:]), None)
        if self._hidden and args:
            known = (sys.modules[name] for name in PACKAGES if name in sys.modules)
            kinds: Any = tuple(each.TaskContext for each in known)
            if isinstance(args[0], kinds):
                result, args = args[0].task_result, args[1:]
        # The body of a task may call functions of tasks, also its own, without running a task.
        if (
            result is not None
            and inspect.unwrap(result.task.func) is inspect.unwrap(self._function)
            and (result.args, result.kwargs) == (list(args), kwargs)
        ):
            return result
        return None

    def _later(self, run: _Run, error: Refusal) -> tuple[Any, float, dict[str, Any]]:
        """Return the task to queue, the seconds until it runs, and its arguments by name."""
        if run.result is None:
            error.add_note(
                "Nothing was queued again. The function was called directly, or its backend does"
                " not report the running task (takes_context=True does)."
            )
            raise error
        if not _defers(run.result):
            error.add_note("Its backend cannot run a task later (supports_defer).")
            raise error
        pause = self._rules.pause(run.queued, time.time())
        if pause is None:
            since = time.time() - run.queued.since
            error.add_note(f"Queued again {run.queued.times} times, in {since:.0f} s.")
            raise error
        # `using` keeps the queue and the priority of the running task.
        task = run.result.task.using(run_after=timezone.now() + timedelta(seconds=pause))
        return task, pause, {**run.kwargs, TRAVELS: run.queued.again()}


def _defers(result: Any) -> bool:
    return bool(result.task.get_backend().supports_defer)


def _listen() -> None:
    """Connect to the signals by which the backends of imported packages report running tasks."""
    for package in PACKAGES:
        if package in sys.modules:
            signals = import_module(f"{package}.signals")
            signals.task_started.connect(_started, dispatch_uid=__name__)
            signals.task_finished.connect(_finished, dispatch_uid=__name__)


def _started(*, task_result: Any, **_: Any) -> None:
    _running.set((*_running.get(), task_result))


def _finished(*, task_result: Any, **_: Any) -> None:
    running = _running.get()
    ids = [each.id for each in running]
    if task_result.id in ids:
        _running.set(running[: ids.index(task_result.id)])
