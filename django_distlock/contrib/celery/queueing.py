"""Queue locked tasks: at most once, up to a limit for each key, or under the sender's lease."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from celery import current_app
from celery.utils import uuid

from ...backends.base import BaseLockBackend
from ...core.durations import MIN_TTL, Duration, seconds
from ...core.errors import BackendUnavailable, InvalidArgument, LockError, LockLost, LockNotAcquired
from ...core.logs import log_fields
from ...core.records import Grant
from ...handler import lock_backends
from ...locks import blocks, context
from ...locks.lease import Lease
from ...locks.no_lease import tell_skipped
from ...locks.state import Terms as Kept
from ...process import deferred_release
from ...process.host import is_gone
from ..jobs import JobLock
from . import backlog, claims
from .deliveries import KEY, LEASE, OF, UNIQUE, Delivery, kept_headers, own_headers, run_of, traced
from .terms import Call, Terms, terms_of

logger = logging.getLogger("django_distlock")

#: Options of tasks whose result others wait for. A chord's body is known by its given task id.
_AWAITED = ("chord", "group_id", "chain", "link")
#: Options that belong to one message: a second message of the same call is sent without them.
_OF_ONE = {*_AWAITED, "link_error", "group_index", "parent_id", "root_id", "reply_to"}
#: The leases of tasks that run in this process, by token: another thread may run what one sends.
_here: WeakValueDictionary[str, Lease] = WeakValueDictionary()


def call_of(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call that the body of a task will get."""
    # With pydantic=True Celery dumps models before it sends them, so a worker sees only the dumps.
    dumped = getattr(task, "_dump_pydantic_arguments", None)
    if dumped is not None and task.serializer != "pickle":
        args, kwargs = dumped(args, kwargs)
    is_bound = inspect.ismethod(getattr(task, "_orig_run", task.run))
    return Call(task.name, (task, *args) if is_bound else args, kwargs, is_bound)


def send(
    task: Any,
    publish: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    task_id: str | None,
    options: dict[str, Any],
    unique_ttl: Duration | None = None,
) -> Any:
    """Queue a task unless one like it is queued or running; see `LockedTask.apply_async`."""
    terms = terms_of(task)
    kept_for = _checked(unique_ttl, task, terms)
    goes_on = _goes_on(task, task_id, options)
    is_bounded = terms is not None and bool(terms.unique or terms.max_queued)
    if terms is None or not is_bounded or (goes_on and not _has_no_claim(task, terms)):
        run = run_of(traced(task))
        unique: Any = None if run is None else run.unique
        is_replacement = unique is not None and options.get("replaced_task_nesting")
        if is_replacement and _has_key_of(run, task, args, kwargs):
            options = claims.with_claim(options, UNIQUE, unique.fence, unique, task_id)
        result = publish(args, kwargs, task_id=task_id, **options)
        if unique is not None and _carries(unique.fence_token, options):
            run.comes_again = options.get("eta") or options.get("countdown") or 0.0
        return result
    delay = claims.seconds_until(options.get("countdown") or options.get("eta"))
    if not goes_on and terms.debounce > delay:
        delay = terms.debounce
        options = {**options, "countdown": delay, "eta": None}
    # Workers send callbacks and the next tasks of chains: no caller would see an error.
    follows = goes_on or bool(options.get("parent_id") or options.get("root_id"))
    is_awaited = follows or task_id is not None or any(options.get(name) for name in _AWAITED)
    sending = backlog.Sending(
        task=task,
        terms=terms,
        call=call_of(task, args, kwargs),
        delay=delay,
        unique_ttl=kept_for,
        follows=follows,
        is_awaited=is_awaited,
    )
    again = partial(send, task, publish, args, kwargs)
    publish = plainly = partial(publish, args, kwargs)
    if terms.max_queued and not goes_on:
        publish = partial(backlog.publish, sending, publish)
    if terms.unique is not None:
        publish = partial(_send_unique, sending, publish, again)
    task_id = task_id or uuid()
    try:
        return publish(task_id=task_id, **options)
    except LockNotAcquired as error:
        if error.code != backlog.FULL or terms.on_full != "drop":
            raise
        place = terms.place_of(sending.call, task_id)
        if is_awaited:
            # Others wait for this task id: it is sent without a claim, and a worker skips it.
            options = claims.with_claim(options, backlog.PLACE, 0, place, task_id)
            return plainly(task_id=task_id, **options)
        return sending.skipped(error, place)


def _send_unique(
    sending: backlog.Sending,
    publish: Callable[..., Any],
    again: Callable[..., Any],
    /,
    *,
    task_id: str,
    **options: Any,
) -> Any:
    """Queue a call unless its key is queued or running; `again` sends it as a later call."""
    task, terms = sending.task, sending.terms
    lock = terms.unique_of(sending.call, task_id)
    assert lock is not None  # noqa: S101 - there is a unique key
    try:
        claim = _reserve(sending, lock, options)
    except LockNotAcquired as error:
        if sending.is_awaited:
            # Others wait for this task id: it is sent, and a worker skips it.
            return publish(task_id=task_id, **options)
        if terms.debounce or error.holder is None or error.holder.task_id is None:
            raise
        result = _queued_already(task, task_id, lock, error, error.holder.task_id)
        # Otherwise `get()` would wait for ever for a result that is not stored.
        result.ignored = options.get("ignore_result", task.ignore_result)
        return result
    except BackendUnavailable as error:
        return sending.without_store(
            error,
            lock,
            "It is unknown whether %r is already queued: %s",
            partial(publish, task_id=task_id, **options),
        )
    result = claims.publish(partial(publish, task_id=task_id), UNIQUE, claim, options)
    if not terms.debounce:
        return result
    options = {name: value for name, value in options.items() if name not in _OF_ONE}
    later = _send_if_overtaken(
        lock,
        claim.grant,
        partial(again, None, options, sending.unique_ttl),
        partial(publish, task_id=uuid(), **options),
    )
    return result if later is None or sending.is_awaited else later


def _reserve(sending: backlog.Sending, lock: JobLock, options: Mapping[str, Any]) -> claims.Claim:
    """Acquire a unique key, or take it over from the run that this call replaces.

    It may also be taken over from a call that will not run, because a later one has its place.
    """
    reserve = partial(claims.reserve, lock, sending.terms, sending.delay, sending.unique_ttl)
    run = run_of(traced(sending.task))
    if options.get("replaced_task_nesting") and run is not None:
        # The first task of a chain has another id than the task that the chain replaces.
        lease = run.unique
        if lease is not None and lease.held and lease.key == lock.key:
            lease._let_go()
            run.unique = None
            return reserve(instead_of=lease._holding.grant)
    try:
        return reserve()
    except LockNotAcquired:
        store = lock_backends[lock.backend]
        record = store.read(lock.key) if sending.terms.on_full == "replace" else None
        if record is None or not backlog.was_replaced(store, record):
            raise
        return reserve(instead_of=record)


def _checked(unique_ttl: Duration | None, task: Any, terms: Terms | None) -> float | None:
    if unique_ttl is None:
        return None
    if terms is None or (terms.unique is None and not terms.max_queued):
        raise InvalidArgument(f"unique_ttl requires a unique task, and {task.name} is not unique.")
    return seconds(unique_ttl, "unique_ttl", minimum=MIN_TTL)


def _queued_already(
    task: Any, task_id: str, lock: JobLock, error: LockNotAcquired, queued: str
) -> Any:
    """Log that the task is already queued or running, and return its result."""
    extra = log_fields("queued_already", backend=lock.backend, task=task_id, error=error)
    logger.info(
        "Not queued, because it is already queued as %s: %r", queued, error.key, extra=extra
    )
    tell_skipped(lock.backend, lock.key, error)
    return task.AsyncResult(queued)


def _send_if_overtaken(
    lock: JobLock, grant: Grant, again: Callable[[], Any], publish: Callable[[], Any]
) -> Any:
    """Note that a call is in the broker; send it again if a later call has already begun."""
    try:
        return again() if claims.is_overtaken(lock, grant) else None
    except LockError as error:
        extra = log_fields("bypassed", backend=lock.backend, task=lock.task_id, error=error)
        logger.warning(
            "It is unknown which call of %r is the last one: %s", lock.key, error, extra=extra
        )
        # A message without a number gives way to no other.
        return publish()


def headers_of_retry(
    task: Any, request: Any, given: dict[str, Any] | None, args: Any, kwargs: Any
) -> dict[str, Any]:
    """Return the headers of a retry, with which it keeps the unique key of the run that sends it.

    If its arguments have changed and make another key, it acquires that like any other call. If it
    is debounced, it then gives way to no other: its number is one of the calls for the old key.
    """
    headers = {**kept_headers(request), **(given or {})}
    run = run_of(traced(task))
    if run is None:
        return headers
    if run.has_begun:
        # The run has given its place back, so its retry gives way to no later call.
        headers.pop(backlog.PLACE, None)
    if run.unique is not None:
        name = claims.name_of(run.unique.key)
        headers |= {UNIQUE: run.unique.fence_token, UNIQUE + KEY: name, OF: request.id}
    # A body may change the arguments in place.
    is_same = not run.has_begun and args is request.args and kwargs is request.kwargs
    if UNIQUE in headers and not (is_same or _has_key_of(run, task, args, kwargs)):
        del headers[UNIQUE]
    return headers


def _has_key_of(run: Any, task: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call has the unique key of a run of its task."""
    terms = terms_of(task)
    if terms is None:
        return False
    lock = terms.unique_of(call_of(task, tuple(args or ()), dict(kwargs or {})), None)
    return lock is not None and lock.key == run.unique_key


def goes_with(fence: object, retry: object) -> bool:
    """Whether the message of a retry carries the unique key that has this fence."""
    signature = getattr(retry, "sig", None)
    if signature is None:
        return True  # The task is queued again as it is.
    return _carries(fence, signature.options)


def _carries(fence: object, options: Mapping[str, Any]) -> bool:
    return (options.get("headers") or {}).get(UNIQUE) == fence


def take(lock: JobLock, delivery: Delivery) -> Lease:
    """Take over the unique key that a queued task holds, or acquire it like any other run."""
    store = lock_backends[lock.backend]
    record = store.read(lock.key) if delivery.is_traced else None
    if record is not None and record.holder.task_id == delivery.id and not record.is_settled:
        is_queued = record.fence_token == delivery.header(UNIQUE)
        if is_queued or is_gone(record.holder):
            return claims.replace_one(lock, record)
    return lock.acquire()


def keep(lease: Lease, terms: Terms, when: object) -> None:
    """Leave a unique key to its task's retry or replacement; `when`: seconds, or a time."""
    store = lock_backends[lease.backend]
    try:
        grant = lease._holding.grant
        lease._let_go()
        store.extend(
            grant, claims.queue_ttl(terms, store.config.max_ttl, claims.seconds_until(when))
        )
    except LockLost:
        return  # The retry has begun, or acquires the key like any other run.
    except LockError as error:
        extra = log_fields("extend_failed", backend=store.alias, key=lease.key, error=error)
        logger.warning(
            "%r may be acquired by another task before its retry: %s", lease.key, error, extra=extra
        )


def remember(lease: Lease) -> None:
    """Let tasks that this process runs work under a lease that it holds."""
    if lease.held:
        _here[lease.token] = lease


def hand_down(
    sender: Any = None, body: Any = None, headers: dict[str, Any] | None = None, **_: Any
) -> None:
    """Add the sender's lease to a task's headers: a receiver of `before_task_publish`.

    Inside a transaction it is not added: the task could begin before the sender's writes commit.
    """
    if headers is None or context.current_lease() is None:
        return
    own = own_headers(headers, headers.get("id"))
    if LEASE in own:
        return
    task = current_app.tasks.get(sender)
    terms = terms_of(task)
    if terms is None or terms.lock is None or not terms.inherit:
        return
    args, kwargs = body[0], body[1]
    try:
        key = terms.lock.make(call_of(task, tuple(args), dict(kwargs)))
    except (InvalidArgument, TypeError):
        return  # The task itself raises the error.
    lease = blocks.holds(terms.backend, key)
    # The sender of a retry or a replacement does not wait for that task.
    if lease is None or lease.holder.task_id == headers.get("id"):
        return
    if deferred_release.open_transactions():
        extra = log_fields("not_handed_down", backend=lease.backend, key=key)
        logger.warning(
            "%s is sent inside a transaction and acquires %r like any other task, not under the"
            " lease of its sender. Use delay_on_commit()",
            sender,
            key,
            extra=extra,
        )
        return
    for name in headers.keys() - own.keys():
        del headers[name]
    headers |= {LEASE: lease.fence_token, OF: headers.get("id")}


@contextmanager
def under(store: BaseLockBackend, key: str, fence: str) -> Iterator[Lease | None]:
    """Run a block under the lease with this fence; yield None if the lease has ended.

    The sender of the task releases the lease. While both run, both renew it.

    Raises:
        LockLost: The lease ended before the block did.
    """
    records = claims.records_of(store, key)
    record = next((each for each in records if each.fence_token == fence), None)
    if record is None or record.is_settled:
        yield None
        return
    theirs = _here.get(record.token)
    if theirs is not None and theirs.held:
        with bound(theirs):
            yield theirs
        _require_kept(theirs)
        return
    sent_at = store.monotonic()
    answer = store.extend(record.grant, record.ttl)
    if not isinstance(answer, Grant):
        yield None
        return
    kept = Kept(ttl=answer.ttl, holder=record.holder, retry=store.config.retry)
    lease = claims.lease_of(store, answer, sent_at, kept)
    try:
        lease._holding.begin_block(heartbeat=True)
        with bound(lease):
            yield lease
    finally:
        with suppress(LockError):  # It is lost already.
            lease._let_go()
    _require_kept(lease)


def _require_kept(lease: Lease) -> None:
    if lease.is_lost:
        raise LockLost(
            f"The lease on {lease.key!r} ended before the task that worked under it.", key=lease.key
        )


@contextmanager
def bound(lease: Lease) -> Iterator[None]:
    """Make a lease current for the code of a block, which does not release it."""
    block = context.bind(lease)
    try:
        yield
    finally:
        blocks.drop(block)


def _goes_on(task: Any, task_id: str | None, options: dict[str, Any]) -> bool:
    """Whether this call is another attempt of a task that was queued before."""
    if UNIQUE in (options.get("headers") or {}) or options.get("retries"):
        return True
    request = task.request
    return task_id is not None and not request.called_directly and task_id == request.id


def _has_no_claim(task: Any, terms: Terms) -> bool:
    """Whether this is a retry of a run whose claim was released when the run began or died."""
    if terms.debounce:
        return False
    run = run_of(traced(task))
    # The retry of a process that died (`retry_on_worker_lost`) is sent by its parent.
    return run is None or (terms.until_start and run.has_begun)
