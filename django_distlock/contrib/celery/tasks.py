"""The decorator `locked_task`, and the base class `LockedTask`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from celery import Task
from celery.contrib.django.task import DjangoTask
from celery.local import Proxy

from ...core.bodies import refuse_function, signature_of, whole
from ...core.durations import Duration
from ...core.errors import InvalidArgument
from ..jobs import MAX_WAIT, Limit, OnConflict, only_function
from . import declaring, queueing
from .deliveries import SERIALIZER, own_headers
from .runs import run
from .terms import Full, KeyOf, Terms, Unavailable, Until

P = ParamSpec("P")
T = TypeVar("T")


def locked_task(  # noqa: PLR0913 - each says one thing, by name
    lock: KeyOf | None = None,
    *,
    locks: Sequence[Limit] | None = None,
    unique: KeyOf | None = None,
    unique_until: Until | None = None,
    debounce: Duration | None = None,
    max_queued: int | None = None,
    on_full: Full | None = None,
    on_conflict: OnConflict | None = None,
    on_unavailable: Unavailable | None = None,
    max_wait: Duration = MAX_WAIT,
    inherit: bool = False,
    **options: Any,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Hold a lock around each run of a task. Write it below `@shared_task` or `@app.task`.

    ::

        @shared_task(acks_late=True)
        @locked_task("invoice:{invoice_id}", ttl=60)
        def capture(invoice_id): ...

    The task that a bound function gets is not passed to the key.

    Args:
        lock: The key that one run at a time holds: a template of the function's parameters, a
            function that is called with the task's arguments and returns the key, or True for the
            task's name and all of its arguments. None: no such key if `unique` or `locks` is
            given, else True.
        locks: Several keys instead of one, held all or none: `[("tenant:{tenant}", 3), ("stripe",
            10)]`, each with its number of holders. A key without a number has one holder.
        unique: The key of which at most one task is queued or running, given as for `lock`. Needs
            `@shared_task(base=LockedTask)`. A further `delay()` returns the result of the first.
        unique_until: Until when `unique` keeps others from being queued. "done", or None: until
            the result is stored. "start": until the body begins. A call that is queued during a
            run then runs after it, because runs hold `lock`, or else a key of their own.
        debounce: Seconds (or a `timedelta`), at least 1, by which a call of a `unique` task is
            delayed. Of the calls that have not begun, the last one's arguments run, once. The
            other calls end with a marker. For the rest, `debounce` works like "start".
        max_queued: How many calls may wait for the key, or for the first of `locks`, from 1 to
            10,000: calls sent but not begun. Needs `@shared_task(base=LockedTask)`.
        on_full: What happens to one more call. "raise", or None: `LockNotAcquired`, with the code
            "backlog_full". "drop": it is not queued, and its result is a marker. "replace": it is
            queued, and the oldest waiting call ends with a marker.
        on_conflict: What happens if another holder has the key. "skip": the task succeeds, with a
            marker as its result. "retry": it is queued again, which does not count as a retry.
            "wait": it waits in its worker. "raise": `LockNotAcquired`. "run": it runs without the
            lock. None: "retry" with `acks_late`, `unique_until="start"` or `debounce`, else
            "skip".
        on_unavailable: The same for an unavailable store, without "wait". None: "retry" with
            `acks_late`, else "raise": `BackendUnavailable`.
        max_wait: Seconds (or a `timedelta`) after the first attempt until which "retry" continues;
            None: no limit.
        inherit: Whether the task runs under the lease of its sender, if the sender has the key.
        options: `retry`: a `Retry` with the pauses of "retry". `wait`: seconds to wait in the
            worker, 5 with "wait", else 0. `grace`: seconds for which the parent waits for the
            death of a process that was told to end. `unique_ttl`: seconds that a queued task keeps
            its `unique` key, or its place among `max_queued`, before it starts.
            `redelivery_window`: seconds for which a finished delivery of an `acks_late` task is
            remembered. All others are those of `distlock()`.

    Raises:
        InvalidArgument: An argument breaks a rule, or the function is a task already.
        LockUsageError: Its body would run after its call returns, like that of a coroutine.
    """
    if _is_task(lock):
        raise InvalidArgument('locked_task needs a key, as in @locked_task("…").')
    refuse_function(lock, "locked_task")
    given = {
        "lock": lock, "locks": locks, "unique": unique, "unique_until": unique_until,
        "debounce": debounce, "max_queued": max_queued, "on_full": on_full,
        "on_conflict": on_conflict, "on_unavailable": on_unavailable, "max_wait": max_wait,
        "inherit": inherit, **options,
    }  # fmt: skip

    def decorate(*args: Any, **kwargs: Any) -> Any:
        return _wrapped(only_function(lock, args, kwargs), given)

    return decorate


class LockedTask(DjangoTask):  # type: ignore[misc]
    """The base class of tasks that are unique, or that declare their lock by attributes.

    ::

        class Capture(LockedTask):
            lock = "invoice:{invoice_id}"
            lock_options = {"ttl": 60}

            def run(self, invoice_id): ...

    Attributes:
        lock: See `locked_task`; None: no lock.
        unique: See `locked_task`.
        lock_options: The other arguments of `locked_task`.
    """

    abstract = True
    #: Distinguishes its tasks from tasks that use the same attribute names for something else.
    distlock_base: ClassVar[bool] = True

    lock: ClassVar[Any] = None
    unique: ClassVar[Any] = None
    lock_options: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        keys = (cls.lock, cls.unique, cls.lock_options.get("locks"))
        run = inspect.getattr_static(cls, "run")
        is_locked = any(each is not None for each in keys)
        if is_locked and run is inspect.getattr_static(Task, "run"):
            return
        function = run.__func__ if isinstance(run, staticmethod) else run
        given = {"lock": cls.lock, "unique": cls.unique, **cls.lock_options} if is_locked else None
        # The body and the attributes may both come from a base class or a mixin.
        if getattr(function, "distlock_given", None) == given:
            return
        # A base class may have wrapped the body by other attributes.
        made: Any = getattr(function, "distlock_by_class", function)
        if given is not None:
            body, made = made, _wrapped(made, given)
            made.distlock_by_class, made.distlock_given = body, given
        cls.run = staticmethod(made) if isinstance(run, staticmethod) else made

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        unique_ttl: Duration | None = None,
        **options: Any,
    ) -> Any:
        """Queue the task, or return the result of the one that is queued or running already.

        Args:
            unique_ttl: Seconds (or a `timedelta`) after its `countdown` or `eta` that this call
                keeps its `unique` key, or its place among `max_queued`, before it starts. None:
                those of `locked_task`. A signature that is sent, such as one in a chain, takes
                only seconds.

        Raises:
            InvalidArgument: `unique_ttl` is not a valid time, or the task is not unique.
            LockNotAcquired: `max_queued` calls wait already.
            BackendUnavailable: The store is unavailable, and nothing was queued.
        """
        send = super().apply_async
        named = {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        options |= {name: value for name, value in named.items() if value is not None}
        serializer = options.get("serializer")
        if options.get("headers") or serializer is not None:
            options["headers"] = own_headers(options.get("headers"), task_id)
            # The header may come from another task, whose headers are sent on.
            options["headers"].pop(SERIALIZER, None)
            options["headers"] |= {} if serializer is None else {SERIALIZER: serializer}
        arguments = tuple(args or ()), dict(kwargs or {})
        return queueing.send(self, send, *arguments, task_id, options, unique_ttl)

    def signature_from_request(
        self,
        request: Any = None,
        args: Any = None,
        kwargs: Any = None,
        queue: Any = None,
        **extra_options: Any,
    ) -> Any:
        """Let a retry keep the unique key of the run that sends it, if its key is the same."""
        request = self.request if request is None else request
        args = request.args if args is None else args
        kwargs = request.kwargs if kwargs is None else kwargs
        headers = extra_options.pop("headers", None)
        headers = queueing.headers_of_retry(self, request, headers, args, kwargs)
        extra_options["headers"] = headers
        if SERIALIZER in headers:
            extra_options.setdefault("serializer", headers[SERIALIZER])
        return super().signature_from_request(request, args, kwargs, queue, **extra_options)


def _is_task(value: object) -> bool:
    # Not `isinstance`, which asks a proxy for its `__class__`, and that finalizes the app.
    return issubclass(type(value), (Task, Proxy))


def _wrapped(function: Callable[P, T], given: dict[str, Any]) -> Callable[P, T]:
    if _is_task(function):
        raise InvalidArgument(
            "locked_task is written below @shared_task or @app.task: it wraps the function, and"
            " this is a task already."
        )
    if not callable(function):
        raise InvalidArgument(f"locked_task wraps a function, not {function!r}.")
    if getattr(function, "distlock_terms", None) is not None:
        raise InvalidArgument(f"{function.__qualname__} is locked already.")
    # Celery does not await coroutines.
    function = whole(function, awaits=False)
    terms = Terms.of(function, **given)

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        return cast("T", run(terms, function, args, kwargs))

    wrapper: Any = locked
    wrapper.distlock_terms = terms
    # Celery checks the arguments of `delay()` by attributes of the function itself.
    wrapper.__signature__ = signature_of(function)
    declaring.declare(locked, terms)
    return locked
