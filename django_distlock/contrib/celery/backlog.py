"""Limit how many calls of a task wait for a key (`max_queued`), and handle one too many.

Each call holds a place, one of the permits of a separate key, until its body begins. If its message
is lost, the place expires with its ttl. Functions that use a store raise `BackendUnavailable`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from celery import states
from celery.result import EagerResult

from ...backends.base import BaseLockBackend
from ...core.clock import monotonic
from ...core.errors import BackendUnavailable, LockError, LockNotAcquired
from ...core.logs import log_fields
from ...core.records import Record
from ...handler import lock_backends
from ...locks.policy import skip, where_unavailable
from ..jobs import WAIT, JobLock
from . import claims
from .terms import Call, Terms

logger = logging.getLogger("django_distlock")

#: The header with the fence of a call's place; 0: the backlog was full.
PLACE: Final = "distlock_place"
#: The code of the error if the backlog was full.
FULL: Final = "backlog_full"


@dataclass(frozen=True, slots=True)
class Sending:
    """A call that is about to be queued.

    Attributes:
        unique_ttl: Seconds that the call keeps its place; None: those of the terms.
        follows: Whether a worker sends the call, so that no caller would see an error.
        is_awaited: Whether others wait for the result of this task id.
    """

    task: Any
    terms: Terms
    call: Call
    delay: float
    unique_ttl: float | None
    follows: bool
    is_awaited: bool

    def without_store(
        self, error: BackendUnavailable, lock: JobLock, what: str, publish: Callable[[], Any]
    ) -> Any:
        """Handle a call by its terms while the store is unavailable; the log says `what`."""
        policy = where_unavailable(error, self.terms.on_unavailable or "raise")
        if policy == "run" or self.follows or (policy == "skip" and self.is_awaited):
            extra = log_fields("bypassed", backend=lock.backend, task=lock.task_id, error=error)
            logger.warning(what, lock.key, error, extra=extra)
            return publish()
        if policy == "skip":
            return self.skipped(error, lock)
        raise error

    def skipped(self, error: LockNotAcquired | BackendUnavailable, lock: JobLock) -> Any:
        """Return the result of a call that is not queued."""
        marker = skip(f"The task {lock.task_id}", error, lock.backend, lock.key, task=lock.task_id)
        return EagerResult(lock.task_id, marker, states.SUCCESS, name=self.task.name)


def publish(sending: Sending, send: Callable[..., Any], /, *, task_id: str, **options: Any) -> Any:
    """Queue a call in a place of the backlog; if that is full, do what the terms say."""
    terms = sending.terms
    place = terms.place_of(sending.call, task_id)
    send = partial(send, task_id=task_id)
    try:
        claim, replaced = _take(place, sending)
    except LockNotAcquired as error:
        if not sending.is_awaited or terms.on_full == "drop":
            raise
        extra = log_fields("bypassed", backend=place.backend, task=task_id, error=error)
        logger.warning(
            "The backlog of %r is full, and one more call is queued: %s",
            place.key,
            error,
            extra=extra,
        )
        return send(**options)
    except BackendUnavailable as error:
        return sending.without_store(
            error,
            place,
            "It is unknown whether the backlog of %r is full: %s",
            partial(send, **options),
        )
    result = claims.publish(send, PLACE, claim, options)
    if replaced is not None:
        _note_replaced(lock_backends[place.backend], replaced, terms)
    return result


def is_replaced(place: JobLock, number: int) -> bool:
    """Whether a call must not run: it has no place, or a later call has taken it over."""
    store = lock_backends[place.backend]
    return number == 0 or store.notes.get(_note(place.task_id)) == number


def was_replaced(store: BaseLockBackend, claim: Record) -> bool:
    """Whether a claim belongs to a queued call whose place a later call has taken."""
    holder = claim.holder
    return holder.is_queued and store.notes.get(_note(holder.task_id)) is not None


def _take(place: JobLock, sending: Sending) -> tuple[claims.Claim, Record | None]:
    """Take a place; return it and the record of the call it was taken from, if any."""
    store, terms = lock_backends[place.backend], sending.terms
    reserve = partial(claims.reserve, place, terms, sending.delay, sending.unique_ttl)
    until = monotonic() + WAIT
    while True:
        try:
            return reserve(), None
        except LockNotAcquired as error:
            full = LockNotAcquired(
                f"{place.permits} calls already wait for {place.key!r}, the maximum.",
                key=place.key,
                holder=error.holder,
                held_for=error.held_for,
                expires_in=error.expires_in,
                code="backlog_full",
            )
            full.__cause__ = error
        waiting = claims.records_of(store, place.key)
        is_full = len(waiting) >= terms.max_queued
        if is_full and terms.on_full != "replace":
            raise full
        if is_full:
            oldest = min(waiting, key=lambda each: each.fence)
            with suppress(LockNotAcquired):
                return reserve(instead_of=oldest), oldest
        # Other callers took or released a place at the same moment, so try again.
        if monotonic() >= until:
            raise full


def _note_replaced(store: BaseLockBackend, replaced: Record, terms: Terms) -> None:
    """Note that a call was replaced; without the note, that call would run as well."""
    task_id = replaced.holder.task_id
    kept = claims.queue_ttl(terms, store.config.max_ttl, 0.0)
    try:
        store.notes.put(_note(task_id), replaced.fence, max(kept, replaced.ttl or 0.0))
    except LockError as error:
        extra = log_fields("note_failed", backend=store.alias, task=task_id, error=error)
        logger.warning(
            "Replaced by a later call, the task %s runs: %s", task_id, error, extra=extra
        )


def _note(task_id: str | None) -> str:
    return f"celery:replaced:{task_id}"
