"""Release the leases of dead worker processes, in their parent.

A killed child runs no `finally`. Celery then calls methods of the request in its parent: see
docs/decisions/a-dead-child-is-ended-by-its-parent.md.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name

from ...backends.base import BaseLockBackend
from ...backends.counts import every_record
from ...core.errors import InvalidArgument, LockError
from ...core.keys import UNIQUE_PREFIX
from ...core.logs import log_fields
from ...core.records import Record
from ...core.threads import Bell, start_thread
from ...handler import lock_backends
from ...process.heartbeat import held_here
from ...process.host import current_holder, is_gone
from ...signals import lock_released, tell
from ..jobs import JobLock
from . import claims, queueing
from .backlog import PLACE
from .deliveries import UNIQUE, own_headers
from .terms import Terms, terms_of

logger = logging.getLogger("django_distlock")

#: Seconds that the worker waits for a store before it goes on.
_PATIENCE: Final = 2.0
#: Seconds in which the kernel removes a dead child after its parent was notified.
_REAPED: Final = 0.5


class EndsTheDead:
    """A mixin for the requests of locked tasks, in the parent of the processes that run them."""

    __slots__ = ()

    def on_timeout(self, soft: bool, timeout: Any) -> Any:
        """Release the lease when the child is dead: it is killed after this call."""
        if not soft:
            end(self, at_once=False)
        return super().on_timeout(soft, timeout)  # type: ignore[misc]

    def terminate(self, pool: Any, signal: Any = None) -> Any:
        """Release the lease if the child dies by the signal."""
        try:
            return super().terminate(pool, signal)  # type: ignore[misc]
        finally:
            _end_started(self)

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> Any:
        """See `terminate`."""
        try:
            return super().cancel(pool, *args, **kwargs)  # type: ignore[misc]
        finally:
            _end_started(self)

    def _announce_revoked(self, reason: Any, terminated: bool, *args: Any) -> None:
        """Release the claims first: a client that sees REVOKED may send again immediately."""
        if not terminated:
            _free_claims_soon(self)
        super()._announce_revoked(reason, terminated, *args)  # type: ignore[misc]

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Release the lease of a dead child before its task is delivered again."""
        error = getattr(exc_info, "exception", None)
        error = getattr(error, "exc", error)
        if isinstance(error, (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)):
            end(self, at_once=True)
        elif isinstance(error, TimeLimitExceeded):
            # A task whose body had not begun still has its claims. A redelivery would need them.
            task = self.task  # type: ignore[attr-defined]
            if not task.acks_late or getattr(task, "acks_on_timeout", True):
                _free_claims_soon(self)
        return super().on_failure(exc_info, *args, **kwargs)  # type: ignore[misc]


def end(request: Any, *, at_once: bool) -> None:
    """Release the leases of a task's process when the process is seen to be dead.

    This never raises. At worst the lease expires, or is renewed if the process lives on.

    Args:
        at_once: Whether the process is reported as dead. Then the worker waits until its leases are
            released. Otherwise the process is watched for the grace of the terms.
    """
    terms = terms_of(request.task)
    if terms is None:
        return
    store = lock_backends[terms.backend]
    if not (store.distributed and store.supports_ttl):
        return  # Session locks end with the process, and locks in memory are the child's own.
    _do(store, partial(_end_all, store, terms, request, at_once=at_once))


def watch(sender: Any = None, **_: Any) -> None:
    """Add `EndsTheDead` to the requests of locked tasks."""
    for task in sender.app.tasks.values():
        if terms_of(task) is None:
            continue
        base = symbol_by_name(task.Request)
        if not issubclass(base, EndsTheDead):
            task.Request = type(base.__name__, (EndsTheDead, base), {})


def leaving(**_: Any) -> None:
    """Release the leases of a pool's process, and write its events: billiard runs no `atexit`."""
    # Imported here, because Celery's app imports this module before models can be imported.
    from ...locks import blocks
    from ...process import event_log

    blocks.finish()
    held_here.release_all()
    event_log.finish()


def _free_claims_soon(request: Any) -> None:
    terms = terms_of(request.task)
    if terms is not None and _claims_of(request):
        _do(lock_backends[terms.backend], partial(free_claims, request.task, request))


def free_claims(task: Any, request: Any) -> None:
    """Release the claims of a task that has ended without taking them over."""
    terms, fences = terms_of(task), _claims_of(request)
    if terms is None or not fences:
        return
    store = lock_backends[terms.backend]
    for record in _held(store, terms, task, request):
        if record.holder.is_queued and record.fence_token in fences:
            claims.release(store, record)


def _end_started(request: Any) -> None:
    if request.time_start:
        end(request, at_once=False)


def _end_all(store: BaseLockBackend, terms: Terms, request: Any, *, at_once: bool) -> None:
    ours, task = current_holder(), request.task
    # Whether the broker does not deliver the task again.
    is_over = not (task.acks_late and task.reject_on_worker_lost)
    living = []
    for record in _held(store, terms, task, request):
        holder = record.holder
        if holder.is_queued:
            is_ours = at_once and is_over and record.fence_token in _claims_of(request)
            if is_ours and store.release(record.grant) is True:
                text = "%r is released: its task %s had not started before its process died"
                _warn("given_back", text, store, record, request)
            continue
        if (holder.host, holder.boot_id) != (ours.host, ours.boot_id) or record.is_settled:
            continue
        if holder.pid == os.getpid() or request.worker_pid not in (None, holder.pid):
            continue  # The holder is another delivery of the task, or no child of this process.
        if _is_dead(record, _REAPED if at_once else 0.0):
            _release(store, terms, record, request)
        else:
            living.append(record)
    if living:
        # In a new thread, because other calls need the threads of the store.
        watch = partial(_watch_over, store, terms, request, living)
        start_thread(threading.Thread(target=watch, name="distlock-endings", daemon=True))


def _watch_over(
    store: BaseLockBackend, terms: Terms, request: Any, records: Sequence[Record]
) -> None:
    """Release the leases of a process if it dies within the grace."""
    until = time.monotonic() + terms.grace
    for record in records:
        if _is_dead(record, until - time.monotonic()):
            # Only the lease with this token is released, also if the key has another holder now.
            _do(store, partial(_release, store, terms, record, request))
            continue
        text = "%r stays held: the process of its task %s was terminated but still runs"
        _warn("lives_on", text, store, record, request)


def _held(store: BaseLockBackend, terms: Terms, task: Any, request: Any) -> Iterator[Record]:
    """Yield the records of a task's leases and claims."""
    locks = _locks_of(terms, task, request)
    for lock in locks or ():
        for record in claims.records_of(store, lock.key):
            if record.holder.task_id == request.id:
                yield record
    if locks is None:
        yield from every_record(store, task_id=request.id)


def _locks_of(terms: Terms, task: Any, request: Any) -> list[JobLock] | None:
    """Return the locks that a task may hold; None: its keys are unknown here."""
    keys = [*(each for each, _ in terms.locks), *([terms.unique] if terms.unique else [])]
    body = getattr(task, "_orig_run", task.run)
    # Project code that makes a key or its permits runs only in the task's process. So do wrappers
    # of the body: with pydantic=True, the arguments differ from those in the message.
    is_wrapped = hasattr(getattr(body, "__wrapped__", None), "distlock_terms")
    counts = [terms.rules.lock.permits, *(permits for _, permits in terms.locks)]
    if is_wrapped or any(map(callable, counts)) or not all(each.is_plain for each in keys):
        return None
    call = queueing.call_of(task, tuple(request.args or ()), dict(request.kwargs or {}))
    try:
        locks = [*terms.locks_of(call, call, request.id), terms.unique_of(call, request.id)]
        if terms.max_queued:
            locks.append(terms.place_of(call, request.id))
    except (InvalidArgument, TypeError, AttributeError, LookupError):
        return None  # No key can be made from the arguments in the message.
    return [each for each in locks if each is not None]


def _claims_of(request: Any) -> set[str]:
    """Return the fences of a message's claims."""
    headers = own_headers(getattr(request, "request_dict", None) or request.headers, request.id)
    return {headers[name] for name in (UNIQUE, PLACE) if name in headers}


def _is_dead(record: Record, patience: float) -> bool:
    until = time.monotonic() + patience
    while not is_gone(record.holder):
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def _release(store: BaseLockBackend, terms: Terms, record: Record, request: Any) -> None:
    lock, grant = terms.rules.lock, record.grant
    kept = (lock.ttl or store.config.ttl) if lock.hold else lock.min_hold
    if terms.lock is not None and record.key.startswith(UNIQUE_PREFIX):
        kept = 0.0
    released = store.release(grant, kept or None)
    if released is False:
        return  # The process has released it itself, or the key has another holder.
    text = f"%r is released: process {record.holder.pid}, which ran its task %s, has died"
    _warn("given_back", text, store, record, request)
    began = request.time_start
    tell(
        lock_released,
        type(store),
        alias=store.alias,
        key=record.key,
        fence=record.fence,
        holder=record.holder,
        held_for=time.time() - began if began else 0.0,
        waited=0.0,
        released=bool(released),
        cause=LockError(f"Process {record.holder.pid} is dead.", key=record.key),
    )


def _warn(event: str, text: str, store: BaseLockBackend, record: Record, request: Any) -> None:
    """Log what was done with a key; the text has placeholders for the key and the task's id."""
    extra = log_fields(
        event,
        backend=store.alias,
        key=record.key,
        fence=record.fence,
        holder=record.holder,
        task=request.id,
    )
    logger.warning(text, record.key, request.id, extra=extra)


def _do(store: BaseLockBackend, operation: Callable[[], None]) -> None:
    """Use a store in a new thread, so that the worker does not hang with the store."""
    done = Bell()

    def attempt() -> None:
        try:
            operation()
        except LockError as error:
            extra = log_fields("release_failed", backend=store.alias, error=error)
            logger.warning(
                "The keys of a dead task stay held for their ttl: %s", error, extra=extra
            )
        finally:
            done.ring()

    store.threads.submit(attempt)
    done.wait(_PATIENCE)
