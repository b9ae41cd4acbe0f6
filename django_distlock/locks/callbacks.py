"""Report the loss of a lease, or the danger of it: callbacks, and the cancellation of a task."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.durations import Duration, seconds
from ..core.errors import InvalidArgument, shown
from ..core.interruptions import pass_on
from ..core.logs import log_fields
from ..core.threads import start_thread
from ..database.connections import close_here
from ..process.heartbeat import DANGER_PART

logger = logging.getLogger("django_distlock")

#: A function that is called with the lease.
Callback = Callable[[Any], object]
Call = tuple[Callback, Any]


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Callbacks:
    """The callbacks of one lease."""

    lost: list[Call] = field(default_factory=list)
    danger: list[tuple[float, Call]] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Losses:
    """Reports the loss of one lease: each fact once, and nothing after a clean release.

    Attributes:
        mutex: Held while it is decided who reports it.
        told: Whether the loss has been reported, or is being reported.
        warns: Whether somebody is warned ahead of the deadline.
    """

    mutex: threading.Lock
    told: bool = False
    warns: bool = False
    #: The callbacks, until somebody else keeps them: see `entrust`.
    _kept: Callbacks | None = field(default_factory=Callbacks)
    _entrusted: Callable[[], Callbacks | None] = lambda: None
    #: For each callback by its index, the deadline that it has been warned of.
    _warned: dict[int, float] = field(default_factory=dict)
    _task: asyncio.Task[Any] | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _cancels: bool = True
    _cancelled: bool = False
    _cancelling: int = 0

    def claim(self) -> bool:
        """Return True once: to the caller that has to report the loss."""
        with self.mutex:
            first, self.told = not self.told, True
            return first

    def on_lost(self, callback: Callback, lease: Any) -> None:
        """Call back when the lease is lost; at once if it is already."""
        _validate(callback)
        with self.mutex:
            callbacks = self._callbacks()
            if not self.told and callbacks is not None:
                callbacks.lost.append((callback, lease))
                return
        _call(callback, lease)

    def on_danger(self, callback: Callback, before: float, lease: Any) -> None:
        """Call back `before` seconds ahead of the deadline."""
        _validate(callback)
        callbacks = self._callbacks()
        if callbacks is not None:
            callbacks.danger.append((before, (callback, lease)))
            self.warns = True

    def entrust(self) -> Callbacks:
        """Return the callbacks. They are called only while somebody keeps a reference to them."""
        callbacks = self._callbacks() or Callbacks()
        self._entrusted, self._kept = weakref.ref(callbacks), None
        return callbacks

    def _callbacks(self) -> Callbacks | None:
        return self._kept or self._entrusted()

    def call(self) -> None:
        """Call the callbacks for the loss."""
        callbacks = self._callbacks()
        warn([] if callbacks is None else callbacks.lost)

    def next_due(self, deadline: float) -> float:
        """Return when the next warning is due; the deadline if there is none."""
        due = deadline
        for index, (before, _call) in enumerate(self._danger):
            if self._warned.get(index) != deadline:
                due = min(due, deadline - before)
        return due

    def warnings(self, deadline: float, now: float) -> list[Call]:
        """Return the warnings due now. A renewal moves the deadline, and allows a new warning."""
        found: list[Call] = []
        for index, (before, call) in enumerate(self._danger):
            if deadline - before <= now and self._warned.get(index) != deadline:
                self._warned[index] = deadline
                found.append(call)
        return found

    @property
    def _danger(self) -> list[tuple[float, Call]]:
        callbacks = self._callbacks()
        return [] if callbacks is None else callbacks.danger

    # The task in the block

    def works_under(self, task: asyncio.Task[Any], *, cancels: bool) -> None:
        """Set which task works in the block, and whether a loss cancels it."""
        self._task, self._loop, self._cancels = task, task.get_loop(), cancels
        self._cancelling = task.cancelling()

    def is_task(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether `task` works in the block; None: whether no task does."""
        return self._task is task

    @property
    def is_orphaned(self) -> bool:
        """Whether the event loop of the task was closed, so that the block will never be left."""
        return self._task is not None and self._loop is not None and self._loop.is_closed()

    def cancel(self) -> None:
        """Cancel the task. May be called in any thread."""
        loop = self._loop
        if loop is not None and self._cancels:
            try:
                loop.call_soon_threadsafe(self._cancel)
            except RuntimeError:
                self._loop = None  # The loop was closed, and the task with it.

    def _cancel(self) -> None:
        # This runs in the loop's thread, as `left_block` does. So a block that was left is not
        # cancelled any more.
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel("The lease is lost.")

    def left_block(self, error: BaseException | None) -> bool:
        """Note that the task has left its block; return whether `error` is our cancellation."""
        task, self._task = self._task, None
        if task is None or not self._cancelled:
            return False
        # As in asyncio.timeout(): a cancellation by somebody else is passed on.
        return task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)


def before_end(before: Duration | None, ttl: float | None, key: str) -> float:
    """Validate `before`, and return it in seconds; None: a part of the ttl."""
    if before is None:
        before = 0.0 if ttl is None else ttl * DANGER_PART
    before = seconds(before, "before")
    if ttl is not None and before >= ttl:
        raise InvalidArgument(
            f"before ({before:g} s) must be below the ttl ({ttl:g} s). Otherwise it would be"
            " called at every renewal.",
            key=key,
        )
    return before


def warn(calls: list[Call]) -> None:
    """Call all callbacks; an error in one does not stop the others."""
    for callback, lease in calls:
        _call(callback, lease)


def apart(work: Callable[[], None]) -> None:
    """Run work that may take long in a new thread, so that the caller's thread does not wait."""

    def run() -> None:
        try:
            work()
        finally:
            # No end of a request closes the connections that a receiver opens in this thread.
            close_here()

    try:
        start_thread(threading.Thread(target=run, name="distlock-lost", daemon=True))
    except RuntimeError:
        work()  # No thread can be started: the interpreter is exiting, or there are too many.


def _call(callback: Callback, lease: Any) -> None:
    try:
        callback(lease)
    except (Exception, SystemExit) as error:
        pass_on(error)
        # In other threads than the main one, SystemExit would only skip the remaining callbacks.
        if isinstance(error, SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        extra = log_fields(
            "callback_failed", backend=lease.backend, key=lease.key, fence=lease.fence
        )
        logger.exception("A callback of %r failed", lease, extra=extra)


def _validate(callback: object) -> None:
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise InvalidArgument(
            "A callback must be a synchronous function that takes the lease, not"
            f" {shown(callback)}."
        )
