"""One delivery of a task, as its headers and its request tell of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from celery import Task
from celery._state import get_current_task

from ..jobs import Queued
from .terms import Call, Terms, terms_of

#: The fence of the lease that keeps others like this task from being queued.
UNIQUE: Final = "distlock_unique"
#: The fence of the lease that the sender of the task works under.
LEASE: Final = "distlock_lease"
#: Until when a task that did not get its lock is queued again, in seconds since 1970.
UNTIL: Final = "distlock_until"
#: How often that was done.
TIMES: Final = "distlock_times"
#: The key that it waits for in its queue, and the note by which people see that.
WAITS: Final = "distlock_waits"
#: Of which attempt they tell: the number of retries.
ATTEMPT: Final = "distlock_attempt"
#: Whether the same delivery was seen running.
AGAIN: Final = "distlock_again"

_OURS: Final = frozenset((UNTIL, TIMES, ATTEMPT, AGAIN, WAITS, "redelivered"))


@dataclass(frozen=True, slots=True)
class Delivery:
    """A task that was delivered, or called.

    Attributes:
        task: The task; None: the function was called, and no task.
        request: Its request; None: the same.
        call: The arguments.
    """

    task: Any
    request: Any
    call: Call

    @classmethod
    def of(cls, terms: Terms, function: Callable[..., Any], args: Any, kwargs: Any) -> Delivery:
        """Return what is being run by a call of a locked function."""
        is_bound = bool(args) and isinstance(args[0], Task)
        task = args[0] if is_bound else get_current_task()
        if not is_bound and terms_of(task) is not terms:
            task = None  # A plain call, in the body of another task.
        name = f"{function.__module__}.{function.__qualname__}" if task is None else task.name
        request = None if task is None else task.request
        return cls(task, request, Call(name, tuple(args), kwargs, is_bound))

    @property
    def is_traced(self) -> bool:
        """Whether Celery runs it, in a worker or eagerly: its end is told by a signal."""
        return self.request is not None and not self.request.called_directly

    @property
    def is_queued(self) -> bool:
        """Whether it came from a queue, and can go back to it."""
        return self.is_traced and not self.request.is_eager

    @property
    def id(self) -> str | None:
        """The id of the task; None: it was called."""
        return str(self.request.id) if self.is_traced else None

    @property
    def label(self) -> str:
        """What messages call it: its id, or the name of what was called."""
        return self.id or self.call.task

    @property
    def note(self) -> str:
        """The name of the note that it is finished: each retry of a task has its own."""
        return f"celery:{self.id}:{self.request.retries}"

    @property
    def is_acked_late(self) -> bool:
        """Whether it may be delivered again after it was begun."""
        return self.is_queued and bool(self.task.acks_late)

    @property
    def was_seen_running(self) -> bool:
        """Whether the one before it was running when this one came."""
        return bool(self._of_this_attempt(AGAIN))

    @property
    def is_redelivered(self) -> bool:
        """Whether it was delivered before."""
        if not self.is_queued:
            return False
        info = self.request.delivery_info or {}
        return bool(info.get("redelivered")) or self.was_seen_running

    @property
    def queued(self) -> Queued | None:
        """How often it was queued again; None: never."""
        times = self._of_this_attempt(TIMES)
        return None if times is None else Queued(0.0, int(times))

    @property
    def until(self) -> float | None:
        """Until when it is queued again, in seconds since 1970; None: not said yet."""
        until = self._of_this_attempt(UNTIL)
        return None if until is None else float(until)

    @property
    def waits(self) -> tuple[str, str] | None:
        """The key that it waited for in its queue, and the note about that; None: none."""
        waits = self._of_this_attempt(WAITS)
        return None if waits is None else (str(waits[0]), str(waits[1]))

    def header(self, name: str) -> Any:
        """Return a header; None: it has none."""
        return headers_of(self.request).get(name) if self.is_traced else None

    def _of_this_attempt(self, name: str) -> Any:
        # A retry of the task's own takes headers along that are about the attempt before.
        if self.header(ATTEMPT) != (self.request.retries if self.is_traced else None):
            return None
        return self.header(name)


def headers_of(request: Any) -> dict[str, Any]:
    """Return the headers that a request came with, beside Celery's."""
    return dict(getattr(request, "headers", None) or {})


def kept_headers(request: Any) -> dict[str, Any]:
    """Return those that the next attempt takes along."""
    return {name: value for name, value in headers_of(request).items() if name not in _OURS}


def now() -> float:
    """Return seconds since 1970."""
    return time.time()
