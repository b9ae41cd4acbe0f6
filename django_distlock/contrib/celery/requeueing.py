"""How a task that did not get its lock is queued again."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from ...attempts import NOTE_LIVES
from ...core.errors import BackendUnavailable, LockError, LockNotAcquired
from ...core.interruptions import pass_on
from ...core.logs import log_fields
from ...handler import lock_backends
from ...host import current_holder
from ..jobs import Queued, Refusal, Rules
from .deliveries import AGAIN, ATTEMPT, TIMES, UNTIL, WAITS, Delivery, kept_headers, now

logger = logging.getLogger("django_distlock")


def queue_again(delivery: Delivery, rules: Rules, error: Refusal) -> Retry:
    """Queue the task again, as the same one, and return what its run ends with.

    It does not count as a retry: `max_retries` is about what the task itself tries.

    Raises:
        LockNotAcquired: `max_wait` is over, or its pauses are.
        BackendUnavailable: The same, where the store does not answer.
        Reject: It could not be sent: the broker delivers it again.
    """
    at = now()
    until = delivery.until
    if until is None:
        until = None if rules.max_wait is None else at + rules.max_wait
    times = 0 if delivery.queued is None else delivery.queued.times
    since = at if until is None or rules.max_wait is None else until - rules.max_wait
    pause = rules.pause(Queued(since, times), at)
    if pause is None:
        raise error
    pause = _visible(delivery, pause)
    waits = _note(delivery, rules, error, pause)
    _send(delivery, pause, {UNTIL: until, TIMES: times + 1, WAITS: waits})
    why = f"{error.key!r} is taken"
    if isinstance(error, BackendUnavailable):
        why = "The store of its locks does not answer"
        logger.warning(
            "The task %s is queued again, in %.1f s: %s",
            delivery.id,
            pause,
            error,
            extra=log_fields("queued_again", task=delivery.id, error=error),
        )
    return Retry(f"{why}: queued again, in {pause:.1f} s", exc=error, when=pause)


def queue_behind_itself(delivery: Delivery, rules: Rules, error: LockNotAcquired) -> Ignore:
    """Queue a delivery again whose first run goes on, and return what ends this one.

    Without an end, for what it waits for is itself; and without a state, for that is the run's.
    """
    times = 0 if delivery.queued is None else delivery.queued.times
    endless = replace(rules, max_wait=None, retry=replace(rules.retry, max_retries=None))
    pause = endless.pause(Queued(0.0, times), now()) or 0.0
    # Not at once: a run that goes on for an hour is asked for a hundred times and not for millions.
    pause = _visible(delivery, max(pause, min(rules.retry.delay, 1.0) / 2))
    logger.info(
        "The task %s was delivered again and waits for its own run: %s",
        delivery.id,
        error,
        extra=log_fields("queued_again", task=delivery.id, error=error),
    )
    _send(delivery, pause, {UNTIL: delivery.until, TIMES: times + 1, AGAIN: True})
    return Ignore(f"{error.key!r} is taken by the same task: queued again, in {pause:.1f} s")


def forget_wait(alias: str, waits: tuple[str, str] | None) -> None:
    """Let nobody see any more that a task waits in its queue: it runs, or has ended."""
    if waits is not None:
        # Left there, the note ends by itself. That of another kind of store is no number.
        with suppress(LockError, ValueError):
            lock_backends[alias].drop_waiter(*waits)


def _note(delivery: Delivery, rules: Rules, error: Refusal, pause: float) -> tuple[str, str] | None:
    """Let people see that the task waits in its queue; return what it is forgotten by."""
    waits, alias = delivery.waits, rules.lock.backend
    if error.key is None or isinstance(error, BackendUnavailable):
        return waits
    if waits is not None and waits[0] != error.key:
        forget_wait(alias, waits)
        waits = None
    holder = replace(current_holder().as_queued(), task_id=delivery.id)
    earlier = None if waits is None else waits[1]
    # No decision rests on it.
    with suppress(LockError, ValueError):
        note = lock_backends[alias].note_waiter(error.key, holder, pause + NOTE_LIVES, earlier)
        return None if note is None else (error.key, note)
    return waits


def _visible(delivery: Delivery, pause: float) -> float:
    """Return a pause that is over before the broker delivers the message a second time."""
    options = delivery.task.app.conf.broker_transport_options or {}
    timeout = options.get("visibility_timeout")
    return pause if timeout is None else min(pause, float(timeout) / 2)


def _send(delivery: Delivery, pause: float, ours: dict[str, Any]) -> None:
    request = delivery.request
    headers = {**kept_headers(request), **ours, ATTEMPT: request.retries}
    signature = delivery.task.signature_from_request(
        request, countdown=pause, retries=request.retries, headers=headers
    )
    try:
        signature.apply_async()
    except Exception as error:
        pass_on(error)
        if not delivery.task.acks_late:
            raise
        raise Reject(error, requeue=True) from error
