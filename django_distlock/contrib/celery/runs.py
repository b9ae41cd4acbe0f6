"""Run the body of a locked task under its locks, or do what its terms say instead."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from celery import Task, states
from celery.exceptions import Ignore

from ...core.clock import monotonic
from ...core.errors import BackendUnavailable, LockError, LockNotAcquired, LockUsageError
from ...core.keys import own_key
from ...core.logs import log_fields
from ...core.records import Record
from ...handler import lock_backends
from ...locks.blocks import Block
from ...locks.lease import Lease
from ...locks.no_lease import tell_bypassed, tell_requeued
from ...locks.policy import Refusal, attempt, skip, where_unavailable
from ...process import deferred_release
from ...process.host import is_gone
from ..jobs import WAIT, JobLock, lock_set
from . import backlog, claims, endings, failed, leftovers, queueing
from .backlog import FULL, PLACE
from .deliveries import (
    KEY,
    LEASE,
    UNIQUE,
    Delivery,
    forget_wait,
    queue_again,
    queue_behind_itself,
    run_of,
)
from .terms import Call, Terms, terms_of

logger = logging.getLogger("django_distlock")

#: Seconds after the release of a run's lock within which its note may be written.
_SETTLING: Final = 2.0
#: States after which no message of the task follows.
_OVER: Final = (states.SUCCESS, states.FAILURE, states.IGNORED)


def run(
    terms: Terms, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the body of a task under its locks, or do what the terms say instead."""
    if args and _overrides(args[0], terms):
        # A call of `super().run()` by a body that holds its locks already.
        return function(*args, **kwargs)
    delivery = Delivery.of(terms, function, args, kwargs)
    made = Run(terms, delivery, partial(function, *args, **kwargs))
    if delivery.is_traced:
        # `ended` finds it, when the result is stored.
        delivery.request.distlock_run = made
        return made()
    try:
        return made()
    finally:
        made.end(states.SUCCESS, None)


class Run:
    """One run of a task.

    Attributes:
        unique: The lease on its unique key, which it holds until its result is stored.
        unique_key: That key, as its message's arguments make it before the body may change them.
        comes_again: When the retry or replacement comes to which the run leaves its unique key:
            seconds, or a time; None: none was sent. Celery may not know of that task.
        opened: An object that is alive while the unique key is renewed.
    """

    def __init__(self, terms: Terms, delivery: Delivery, body: Callable[[], Any]):
        self.unique: Lease | None = None
        self.unique_key: str | None = None
        # Releases the unique key even if a signal interrupts `ended`: Celery swallows that error.
        self._block = Block(None)
        self.opened: list[object] = [None]
        self.has_begun = False
        self.comes_again: Any = None
        self._terms = terms
        self._delivery = delivery
        self._body = body
        self._store = lock_backends[terms.backend]
        # What the message still holds, by header: the unique key until the run takes it over, and
        # the place in the backlog until the body begins.
        self._kept: dict[str, JobLock] = {}
        self._fence = 0
        # Whether a later call runs instead.
        self._is_replaced = False
        # Whether it met other holders. One of them may have been another delivery of this task.
        self._has_met = False
        # The keys that others may hold at the same time.
        self._shared: set[str] = set()
        # The note that shows operators that the task waited in its queue.
        self._waits = delivery.waits
        # The key for messages.
        self._key: str | None = None
        self._started_at = monotonic()

    def __call__(self) -> Any:
        """Run the body, or do what the terms say instead."""
        locks, unique = self._locks()
        self._key = next((each.key for each in (*locks, unique) if each is not None), None)
        with attempt(self._held(locks, unique)) as refusal:
            if refusal is None:
                self._wait_no_more()
                return self._left(locks, unique) if self._is_replaced else self._run()
        return self._refused(refusal, unique)

    def end(self, state: str, retval: Any) -> None:
        """End what lasts until the result is stored, and note that the task has finished."""
        # A pool kills greenlets with other classes than `Exception`; workers end by `SystemExit`.
        no_kill = Exception, SystemExit, KeyboardInterrupt, type(None)
        is_over = (
            state in (states.SUCCESS, states.FAILURE)
            or (self.has_begun and state != states.RETRY)
            or (not state and not isinstance(sys.exception(), no_kill))
        )
        try:
            is_left = state == states.FAILURE and not self.has_begun and self._delivery.is_queued
            if is_left and isinstance(retval, BackendUnavailable):
                failed.keep(self._delivery, self._terms.backend, retval.key or self._key or "")
            if self.has_begun and state in (*_OVER, states.RETRY):
                self._note()
            if state != states.RETRY:
                self._wait_no_more()
        finally:
            # A soft time limit may interrupt one call. Without the other, renewals never end.
            try:
                self._end_claims(state, retval, is_over=is_over)
            finally:
                self._end_claims(state, retval, is_over=is_over)

    def _end_claims(self, state: str, retval: Any, *, is_over: bool) -> None:
        if is_over:
            self._give_back(PLACE)
        unique, queued = self.unique, self._delivery.header(UNIQUE)
        if unique is None:
            # The task has ended without having taken over its key from the queue.
            if is_over or (state == states.RETRY and not queueing.goes_with(queued, retval)):
                self._give_back(UNIQUE)
        elif self.comes_again is not None:
            queueing.keep(unique, self._terms, self.comes_again)
        elif state == states.RETRY and queueing.goes_with(unique.fence_token, retval):
            queueing.keep(unique, self._terms, getattr(retval, "when", None))
        else:
            leftovers.free(unique.release, self._terms.backend, unique.key)
        self.unique = None
        self._kept.pop(UNIQUE, None)
        self._block.close()

    def _give_back(self, header: str) -> None:
        if (lock := self._kept.get(header)) is not None:
            free = partial(claims.free, lock, self._number(header))
            leftovers.free(free, self._terms.backend, lock.key)
            # Last, because `end` repeats this after an interruption.
            self._kept.pop(header, None)

    def _keep(self, pause: float) -> float:
        """Extend what the message holds for a pause, unless most of its time is left."""
        at, until = time.time(), self._delivery.kept_until
        if not self._kept or at + pause < until:
            return until
        kept = [(lock, self._number(header)) for header, lock in self._kept.items()]
        ttl = claims.queue_ttl(self._terms, self._store.config.max_ttl, pause)
        # If this fails, the message is queued again all the same, and the next run repeats it.
        with suppress(LockError):
            if claims.extend(self._store, kept, ttl):
                return at + ttl / 2
        return until

    def _number(self, header: str) -> int:
        return int(self._delivery.header(header))

    # The locks

    def _locks(self) -> tuple[list[JobLock], JobLock | None]:
        terms, delivery, sent = self._terms, self._delivery, self._sent
        if (terms.unique is not None or terms.max_queued) and delivery.task is not None:
            require_base(delivery.task)
        if terms.max_queued and delivery.header(PLACE) is not None:
            self._kept[PLACE] = self._claimed(PLACE, terms.place_of(sent, delivery.id))
        unique = terms.unique_of(sent, delivery.id)
        self.unique_key = None if unique is None else unique.key
        if unique is not None and delivery.header(UNIQUE) is not None:
            unique = self._kept[UNIQUE] = self._claimed(UNIQUE, unique)
        locks = terms.locks_of(delivery.call, sent, delivery.id)
        self._shared = {each.key for each in locks if each.shared or each.permits != 1}
        if delivery.is_queued:
            # The holder decides: next to another delivery of this task, it does not run.
            locks = [replace(each, on_conflict="raise") for each in locks]
        elif self._policy() == "retry":
            # The call has no queue to go back to, so it waits here.
            longest = WAIT if terms.rules.max_wait is None else min(WAIT, terms.rules.max_wait)
            locks = [replace(each, wait=longest) for each in locks]
        return locks, unique

    def _claimed(self, header: str, lock: JobLock) -> JobLock:
        """Return a lock with the key that the sender has claimed."""
        name = self._delivery.header(header + KEY)
        return lock if name is None else replace(lock, key=own_key(name))

    @contextmanager
    def _held(self, locks: list[JobLock], unique: JobLock | None) -> Iterator[None]:
        """Hold the locks of a run."""
        delivery, until_start = self._delivery, self._terms.until_start
        with ExitStack() as stack:
            if delivery.is_redelivered:
                self._refuse_if_finished(0.0)
            if self._gives_way():
                if delivery.times:
                    # Its first message may have been delivered again and have run.
                    self._refuse_if_finished(0.0)
                yield
                return
            if locks:
                self._hold(stack, locks)
            if unique is not None and not until_start:
                self._take(stack, unique, binds=not locks)
            if delivery.is_redelivered or delivery.times or self._has_met:
                self._refuse_if_finished(_SETTLING)
            if until_start:
                self._start()
            if self._has_no_place():
                self._is_replaced = True
            self._give_back(PLACE)
            yield

    def _hold(self, stack: ExitStack, locks: list[JobLock]) -> None:
        """Hold the locks until the stack is closed."""
        several = lock_set(locks)
        if several is not None:
            for each in locks:
                self._look(each)
            leases = list(stack.enter_context(several).values())
            for lease in leases:
                self._refuse_beside_itself(lease)
                queueing.remember(lease)
            self._fence = leases[0].fence
        else:
            self._hold_one(stack, locks[0])

    def _hold_one(self, stack: ExitStack, lock: JobLock) -> None:
        if self._terms.inherit:
            fence = self._delivery.header(LEASE)
            lease = None
            if fence is not None:
                lease = stack.enter_context(queueing.under(self._store, lock.key, fence))
            if lease is not None:
                self._fence = lease.fence
                return
            # The sender may run the task eagerly, inside its own block.
            lock = replace(lock, reentrant=True)
        try:
            self._look(lock)
            lease = stack.enter_context(lock)
            self._refuse_beside_itself(lease)
        except LockNotAcquired as error:
            # A dead holder of one of several permits leaves the others free. A key that is kept
            # after its release has no holder that could be dead.
            may_be_stolen = not (lock.shared or lock.permits != 1 or lock.hold or lock.min_hold)
            holder = error.holder if may_be_stolen and self._is_by_itself(error) else None
            if holder is None or not is_gone(holder):
                raise
            lease = stack.enter_context(replace(lock, steal_if_dead=True))
        self._fence = lease.fence
        queueing.remember(lease)

    def _refuse_beside_itself(self, lease: Lease) -> None:
        """Refuse to run next to another delivery of the same task, which shares the key."""
        if not (lease.shared and self._delivery.is_queued):
            return
        for each in self._store.records.sharing(lease.key):
            is_ours = each.holder.task_id == self._delivery.id
            if is_ours and each.fence < lease.fence and not is_gone(each.holder):
                raise LockNotAcquired(
                    f"{lease.key!r} is shared by another delivery of this task.",
                    key=lease.key,
                    holder=each.holder,
                )

    def _look(self, lock: JobLock) -> None:
        """Refuse to wait in a worker for another delivery of the same task."""
        if not (lock.wait and self._delivery.is_queued):
            return
        record = self._record_of_itself(lock.key)
        if record is not None:
            raise LockNotAcquired(
                f"{lock.key!r} is held by another delivery of this task.",
                key=lock.key,
                holder=record.holder,
            )

    def _take(self, stack: ExitStack, lock: JobLock, *, binds: bool) -> None:
        """Hold the unique key until the result is stored."""
        lease = self.unique = queueing.take(lock, self._delivery)
        block = self._block
        block.name, block.home = lease._holding.name, deferred_release.home()
        block.lease, block.release = lease, lease._release
        self.opened[0] = block.watched()
        lease._holding.begin_block(heartbeat=lock.heartbeat, block=block)
        if binds:
            self._fence = lease.fence
            raises = lock.on_lost == "raise"
            stack.push(lambda _, error, __: lease._release.end_inner_block(error, raises=raises))
            stack.enter_context(queueing.bound(lease))

    def _gives_way(self) -> bool:
        """Whether a later call runs instead; called before the run waits for a lock."""
        self._is_replaced = self._has_no_place()
        queued = self._kept.get(UNIQUE)
        if self._terms.debounce and queued is not None and not self._delivery.is_redelivered:
            self._is_replaced = claims.is_replaced(queued, self._number(UNIQUE))
        return self._is_replaced

    @property
    def _sent(self) -> Call:
        """The call as its sender made it: wrappers of the body may change the arguments."""
        task, request, call = self._delivery.task, self._delivery.request, self._delivery.call
        if terms_of(task) is not self._terms:
            return call
        if not self._delivery.is_traced:
            return queueing.call_of(task, call.own_args, dict(call.kwargs))
        return queueing.call_of(task, tuple(request.args or ()), dict(request.kwargs or {}))

    def _has_no_place(self) -> bool:
        place = self._kept.get(PLACE)
        return place is not None and backlog.is_replaced(place, self._number(PLACE))

    def _start(self) -> None:
        """Let others be queued: the body sees what earlier calls were sent for, later calls run."""
        if (queued := self._kept.get(UNIQUE)) is None:
            return
        if self._terms.debounce:
            self._is_replaced = not claims.begin(queued, self._number(UNIQUE))
        else:
            claims.free(queued, self._number(UNIQUE))
        self._kept.pop(UNIQUE, None)

    # The body

    def _run(self) -> Any:
        self.has_begun = True
        return self._body()

    def _refuse_if_finished(self, patience: float) -> None:
        """End a delivery that has run before; wait `patience` s for the note of a run just seen."""
        delivery = self._delivery
        if not (self._terms.redelivery_window and delivery.is_acked_late):
            return
        # Whom a first delivery has met was another task.
        is_seen = delivery.was_seen_running or (self._has_met and delivery.is_redelivered)
        until = monotonic() + (patience if is_seen else 0.0)
        while (fence := self._store.notes.get(delivery.note)) is None:
            if monotonic() >= until:
                return
            time.sleep(0.1)
        logger.info(
            "The task %s was redelivered, but has already run with fence %d",
            delivery.id,
            fence,
            extra=self._fields("has_run"),
        )
        raise Ignore(f"It has run already, with fence {fence}.")

    def _wait_no_more(self) -> None:
        waits, self._waits = self._waits, None
        forget_wait(self._terms.backend, waits)

    def _note(self) -> None:
        self.has_begun = False
        delivery = self._delivery
        if not (self._terms.redelivery_window and delivery.is_acked_late and self._fence):
            return
        try:
            self._store.notes.put(delivery.note, self._fence, self._terms.redelivery_window)
        except LockError as error:
            extra = self._fields("note_failed", error)
            logger.warning(
                "Delivered again, the task %s will run again: %s", delivery.id, error, extra=extra
            )

    # Refusals

    def _policy(self, *, is_duplicate: bool = False) -> str:
        # The other task does the work of a duplicate.
        is_retried = (self._is_late or self._terms.until_start) and not is_duplicate
        return self._terms.on_conflict or ("retry" if is_retried else "skip")

    @property
    def _is_late(self) -> bool:
        task = self._delivery.task
        return task is not None and bool(task.acks_late)

    def _is_by_itself(self, error: LockNotAcquired) -> bool:
        """Whether the holder is another delivery of this task."""
        delivery = self._delivery
        if not delivery.is_queued:
            return False
        if error.holder is None:
            return delivery.was_seen_running
        if error.holder.task_id == delivery.id:
            return True
        # The error names only one of the holders that share the key.
        return error.key in self._shared and self._record_of_itself(error.key) is not None

    def _record_of_itself(self, key: str) -> Record | None:
        """Return the record of another delivery of this task that holds a key; None: none does."""
        records = claims.records_of(self._store, key)
        self._has_met = self._has_met or bool(records)
        ours = (each for each in records if each.holder.task_id == self._delivery.id)
        return next(ours, None)

    def _refused(self, error: Refusal, unique: JobLock | None) -> Any:
        """Do what the terms say instead of the body."""
        delivery, terms = self._delivery, self._terms
        if isinstance(error, BackendUnavailable):
            default = "retry" if self._is_late else "raise"
            chosen = where_unavailable(error, terms.on_unavailable or default)
        elif self._is_by_itself(error):
            raise queue_behind_itself(delivery, terms.rules, error)
        else:
            chosen = self._policy(is_duplicate=unique is not None and error.key == unique.key)
        key = error.key or self._key or ""
        if chosen == "skip":
            return skip(f"The task {delivery.label}", error, terms.backend, key, task=delivery.id)
        if chosen == "run":
            tell_bypassed(terms.backend, self._key, monotonic() - self._started_at, error)
            self._give_back(PLACE)
            if terms.until_start:
                self._give_back(UNIQUE)
            return self._run()
        if chosen == "retry" and delivery.is_queued:
            retry = queue_again(delivery, terms.rules, error, self._keep)
            tell_requeued(terms.backend, key, error)
            raise retry
        raise error

    def _left(self, locks: list[JobLock], unique: JobLock | None) -> Any:
        """Skip the body, because a later call runs instead or the backlog was full."""
        if self._terms.debounce:
            self._kept.pop(UNIQUE, None)
        key = locks[0].key if unique is None else unique.key
        error = LockNotAcquired(
            f"A later call for {key!r} runs instead.", key=key, code="superseded"
        )
        if PLACE in self._kept and self._number(PLACE) == 0:
            error = LockNotAcquired(f"The backlog of {key!r} was full.", key=key, code=FULL)
        delivery = self._delivery
        return skip(f"The task {delivery.label}", error, self._terms.backend, key, task=delivery.id)

    def _fields(self, event: str, error: LockError | None = None) -> dict[str, Any]:
        """Return the `extra` of a log record about this run."""
        return log_fields(
            event, backend=self._terms.backend, key=self._key, task=self._delivery.id, error=error
        )


def _overrides(task: Any, terms: Terms) -> bool:
    """Whether a task has its own terms, and these are those of one of its base classes."""
    own = terms_of(task) if isinstance(task, Task) else None
    return own not in (None, terms) and any(
        getattr(each, "distlock_terms", None) is terms and hasattr(each, "distlock_by_class")
        for each in (vars(above).get("run") for above in type(task).__mro__)
    )


def require_base(task: Any) -> None:
    """Refuse `unique` and `max_queued` on a task whose class does not check what is queued."""
    if not getattr(type(task), "distlock_base", False):
        terms = terms_of(task)
        what = "is unique" if terms is None or terms.unique else "has max_queued"
        raise LockUsageError(
            f"The task {task.name} {what}, but only LockedTask checks whether it is already"
            " queued. Use @shared_task(base=LockedTask)."
        )


def ended(task: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    """End what a run holds until its result is stored: a receiver of `task_postrun`."""
    request: Any = getattr(task, "request", None)
    made = run_of(request)
    if isinstance(made, Run):
        request.distlock_run = None
        # Only the stack refers to what keeps the unique key, because a traceback keeps the run
        # alive. If this is interrupted, that object dies, and the key is released.
        end: Callable[..., object] = made.end
        (made.opened.pop(), end(state or "", retval))
        if made._key is not None:
            return  # Its keys were known, so it has released what it held.
    is_rejected = state == states.REJECTED and not getattr(retval, "requeue", False)
    # Without a state, the task failed because the result store did not accept STARTED.
    is_failed = state is None and isinstance(sys.exception(), Exception)
    terms = terms_of(task)
    if terms is not None and (is_rejected or is_failed or state in _OVER):
        free = partial(endings.free_claims, task, request)
        leftovers.free(free, terms.backend, f"unique key of {request.id}")
