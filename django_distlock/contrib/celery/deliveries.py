"""Read one delivery of a task from its headers and its request, and queue the task again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from celery import Task
from celery._state import get_current_task
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import EncodeError

from ...core.errors import BackendUnavailable, LockError, LockNotAcquired
from ...core.interruptions import pass_on
from ...core.logs import log_fields
from ...handler import lock_backends
from ...locks.attempts import NOTE_LIVES
from ...locks.policy import Refusal
from ...process.host import current_holder
from ..jobs import Queued, Rules
from .terms import Call, Terms, terms_of

logger = logging.getLogger("django_distlock")

#: The fence of the lease on the task's unique key.
UNIQUE: Final = "distlock_unique"
#: Behind the name of a header with a fence: the key of that claim. A function may make another key
#: of the arguments in the message, or another day.
KEY: Final = "_key"
#: The fence of the lease that the sender of the task works under.
LEASE: Final = "distlock_lease"
#: The serializer that the sender chose, because Celery loses it between two attempts.
SERIALIZER: Final = "distlock_serializer"
#: Until when a task without its lock is queued again, in seconds since 1970.
UNTIL: Final = "distlock_until"
#: How often the task was queued again.
TIMES: Final = "distlock_times"
#: The key that the task waits for in its queue, and the note of that wait in the store.
WAITS: Final = "distlock_waits"
#: Until when the claims of the message need not be extended, in seconds since 1970.
KEPT: Final = "distlock_kept"
#: The attempt that these headers describe: the number of retries.
ATTEMPT: Final = "distlock_attempt"
#: Whether the previous delivery was still running.
AGAIN: Final = "distlock_again"

#: The shortest wait in a queue, in seconds. Celery stores the state RETRY after it has sent the
#: message. If the next run has ended by then, RETRY overwrites its result.
_STORED_WITHIN: Final = 0.1

#: The id of the task that these headers describe, because it may copy them to tasks it sends.
OF: Final = "distlock_of"

_OURS: Final = frozenset((UNTIL, TIMES, ATTEMPT, AGAIN, WAITS, KEPT, "redelivered"))
#: Headers that RabbitMQ adds to a delayed message. It may drop a message that is sent with them.
_DEATHS: Final = ("x-death", "x-first-death-", "x-last-death-")


class HandedBack(Reject, Ignore):  # type: ignore[misc]
    """Makes the broker deliver a message again; an `Ignore`, which `autoretry_for` re-raises."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A task that was delivered, or called.

    Attributes:
        task: The task; None: the function was called directly.
        request: Its request; None: the function or the task was called directly.
    """

    task: Any
    request: Any
    call: Call

    @classmethod
    def of(cls, terms: Terms, function: Callable[..., Any], args: Any, kwargs: Any) -> Delivery:
        """Return the delivery that a call of a locked function belongs to."""
        is_bound = bool(args) and isinstance(args[0], Task)
        task = args[0] if is_bound else get_current_task()
        if not is_bound and terms_of(task) is not terms:
            task = None  # A plain call in the body of another task.
        name = f"{function.__module__}.{function.__qualname__}" if task is None else task.name
        request = None if task is None else traced(task)
        if run_of(request) is not None:
            # A plain call in the task's own body. Celery has copied this attribute as a header.
            (task.request.headers or {}).pop("distlock_run", None)
            request = None
        return cls(task, request, Call(name, tuple(args), kwargs, is_bound))

    @property
    def is_traced(self) -> bool:
        """Whether Celery runs it, in a worker or eagerly, and sends a signal at its end."""
        return self.request is not None and not self.request.called_directly

    @property
    def is_queued(self) -> bool:
        """Whether the task came from a queue, and can go back to it."""
        return self.is_traced and not self.request.is_eager

    @property
    def id(self) -> str | None:
        """The id of the task; None: the task was called."""
        return str(self.request.id) if self.is_traced else None

    @property
    def label(self) -> str:
        """The name for log messages: the id of the task, or the name of the function."""
        return self.id or self.call.task

    @property
    def note(self) -> str:
        """The name of the note that the task has finished, one for each retry and replacement."""
        return f"celery:{self.id}:{self.request.replaced_task_nesting}:{self.request.retries}"

    @property
    def is_acked_late(self) -> bool:
        """Whether the task may be delivered again after it has started."""
        return self.is_queued and bool(self.task.acks_late)

    @property
    def was_seen_running(self) -> bool:
        """Whether the previous delivery was running when this one arrived."""
        return bool(self._of_this_attempt(AGAIN))

    @property
    def is_redelivered(self) -> bool:
        """Whether the task was delivered before."""
        if not self.is_queued:
            return False
        info = self.request.delivery_info or {}
        return bool(info.get("redelivered")) or self.was_seen_running

    @property
    def times(self) -> int:
        """How often the task was queued again."""
        return int(self._of_this_attempt(TIMES) or 0)

    @property
    def until(self) -> float | None:
        """Until when the task is queued again, in seconds since 1970; None: not decided yet."""
        until = self._of_this_attempt(UNTIL)
        return None if until is None else float(until)

    @property
    def kept_until(self) -> float:
        """Until when the claims of the message need not be extended, in seconds since 1970."""
        return float(self._of_this_attempt(KEPT) or 0.0)

    @property
    def waits(self) -> tuple[str, str] | None:
        """The key that the task waited for in its queue, and the note of that wait; None: none."""
        waits = self._of_this_attempt(WAITS)
        return None if waits is None else (str(waits[0]), str(waits[1]))

    def header(self, name: str) -> Any:
        """Return a header; None: the message does not have it."""
        return headers_of(self.request).get(name) if self.is_traced else None

    def _of_this_attempt(self, name: str) -> Any:
        # A retry by the task itself copies the headers of the previous attempt.
        if self.header(ATTEMPT) != (self.request.retries if self.is_traced else None):
            return None
        return self.header(name)


def traced(task: Any) -> Any:
    """Return the request that Celery runs a task with; each call of the task pushes a copy."""
    request = task.request
    return next((each for each in task.request_stack.stack if each.id == request.id), request)


def run_of(request: Any) -> Any:
    """Return the run of a traced request; None: not begun, or its result is stored."""
    return getattr(request, "distlock_run", None)


def headers_of(request: Any) -> dict[str, Any]:
    """Return the headers of a request, without those of Celery."""
    return own_headers(getattr(request, "headers", None), getattr(request, "id", None))


def own_headers(headers: Mapping[str, Any] | None, task_id: str | None) -> dict[str, Any]:
    """Return headers without those of this package that describe another task."""
    is_own = (headers or {}).get(OF, task_id) == task_id
    return {
        name: value
        for name, value in (headers or {}).items()
        if is_own or not name.startswith("distlock_")
    }


def kept_headers(request: Any) -> dict[str, Any]:
    """Return the headers for the next attempt."""
    return {
        name: value
        for name, value in headers_of(request).items()
        if name not in _OURS and not name.startswith(_DEATHS)
    }


def queue_again(
    delivery: Delivery, rules: Rules, error: Refusal, keep: Callable[[float], float]
) -> Retry:
    """Queue the same task again, and return the exception that ends this run.

    It does not count as a retry, because `max_retries` is about the task's own retries.

    Args:
        keep: Extends the claims of the message for a pause, and returns the next `kept_until`.

    Raises:
        LockNotAcquired: `max_wait` has ended, or no pause is left.
        BackendUnavailable: The same, if the store is unavailable.
        EncodeError: The arguments came in a format that the task itself does not use.
        Reject: The message could not be sent, so the broker delivers this one again.
    """
    at = time.time()
    until = delivery.until
    if until is None:
        until = None if rules.max_wait is None else at + rules.max_wait
    since = at if until is None or rules.max_wait is None else until - rules.max_wait
    pause = rules.pause(Queued(since, delivery.times), at)
    if pause is None:
        raise error
    pause = _kept(delivery, max(pause, _STORED_WITHIN))
    waits = _note(delivery, rules, error, pause)
    is_silent = isinstance(error, BackendUnavailable)
    kept = delivery.kept_until if is_silent else keep(pause)
    _send(delivery, pause, {UNTIL: until, TIMES: delivery.times + 1, WAITS: waits, KEPT: kept})
    why = f"{error.key!r} is held"
    if is_silent:
        why = "The store of its locks is unavailable"
        extra = log_fields("queued_again", task=delivery.id, error=error)
        logger.warning(
            "The task %s is queued again in %.1f s: %s", delivery.id, pause, error, extra=extra
        )
    return Retry(f"{why}: queued again in {pause:.1f} s", exc=error, when=pause)


def queue_behind_itself(delivery: Delivery, rules: Rules, error: LockNotAcquired) -> Ignore:
    """Queue a task again whose previous delivery is still running; return what ends this one.

    It waits without limit, because it waits for itself. It sets no state: the run sets that.
    """
    endless = replace(rules, max_wait=None, retry=replace(rules.retry, max_retries=None))
    pause = endless.pause(Queued(0.0, delivery.times), time.time()) or 0.0
    # The lower bound lets a run of an hour cause a hundred more deliveries, not millions.
    pause = _kept(delivery, max(pause, min(rules.retry.delay, 1.0) / 2))
    extra = log_fields("queued_again", task=delivery.id, error=error)
    logger.info(
        "The task %s was redelivered and waits for its own run: %s", delivery.id, error, extra=extra
    )
    _send(delivery, pause, {UNTIL: delivery.until, TIMES: delivery.times + 1, AGAIN: True})
    return Ignore(f"{error.key!r} is held by the same task: queued again in {pause:.1f} s")


def forget_wait(alias: str, waits: tuple[str, str] | None) -> None:
    """Remove the note that a task waits in its queue, because it runs or has ended."""
    if waits is not None:
        # If this fails, the note expires. A note of another kind of store may not be a number.
        with suppress(LockError, ValueError):
            lock_backends[alias].waiters.drop(*waits)


def _note(delivery: Delivery, rules: Rules, error: Refusal, pause: float) -> tuple[str, str] | None:
    """Note that the task waits in its queue; return the arguments of `forget_wait`."""
    waits, alias = delivery.waits, rules.lock.backend
    if error.key is None or isinstance(error, BackendUnavailable):
        return waits
    if waits is not None and waits[0] != error.key:
        forget_wait(alias, waits)
        waits = None
    holder = replace(current_holder().as_queued(), task_id=delivery.id)
    earlier = None if waits is None else waits[1]
    # No decision depends on the note.
    with suppress(LockError, ValueError):
        note = lock_backends[alias].waiters.note(error.key, holder, pause + NOTE_LIVES, earlier)
        return None if note is None else (error.key, note)
    return waits


def _kept(delivery: Delivery, pause: float) -> float:
    """Return a pause that is short enough for the broker's redelivery of messages."""
    app = delivery.task.app
    # With quorum queues, RabbitMQ delays the messages, and Celery allows no pause below a second.
    arguments = [each.queue_arguments or {} for each in app.amqp.queues.values()]
    if any(each.get("x-queue-type") == "quorum" for each in arguments):
        pause = max(pause, 1.0)
    options = app.conf.broker_transport_options or {}
    timeout = options.get("visibility_timeout")
    return pause if timeout is None else min(pause, float(timeout) / 2)


def _send(delivery: Delivery, pause: float, ours: dict[str, Any]) -> None:
    request = delivery.request
    headers = {**kept_headers(request), **ours, ATTEMPT: request.retries, OF: request.id}
    # What the sender shows in logs and events, instead of arguments that are secret.
    shown = {name: getattr(request, name, None) for name in ("argsrepr", "kwargsrepr")}
    signature = delivery.task.signature_from_request(
        request, countdown=pause, retries=request.retries, headers=headers, **shown
    )
    try:
        signature.apply_async()
    except Exception as error:
        pass_on(error)
        if isinstance(error, EncodeError) or not delivery.task.acks_late:
            raise
        raise HandedBack(error, requeue=True) from error
