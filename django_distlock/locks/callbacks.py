"""Who gets to know that a lease is lost, or about to be."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..core.durations import Duration, seconds
from ..core.errors import InvalidArgument, shown
from ..core.interruptions import pass_on
from ..core.logs import log_fields
from ..core.renewing import DANGER_PART
from ..core.threads import start_thread
from ..database.connections import close_here

logger = logging.getLogger("django_distlock")

#: Is given the lease.
Callback = Callable[[Any], object]
Call = tuple[Callback, Any]


class Callbacks:
    """Who is called back about one lease."""

    def __init__(self) -> None:
        self.lost: list[Call] = []
        self.danger: list[tuple[float, Call]] = []


class Losses:
    """What one lease tells of its end: each thing once, and nothing behind a clean release."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        #: Whether it was told, or is being told, that the lease is lost.
        self.told = False
        kept = Callbacks()
        self._callbacks: Callable[[], Callbacks | None] = lambda: kept
        self._warns = False
        #: The deadline before which a warning has been given, by its number of seconds.
        self._warned: dict[int, float] = {}
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancels = True
        self._cancelled = False
        self._cancelling = 0

    def claim(self) -> bool:
        """Return True once: to the one who has to tell that the lease is lost."""
        with self._mutex:
            first, self.told = not self.told, True
            return first

    def on_lost(self, callback: Callback, lease: Any) -> None:
        """Call back when the lease is lost; at once, if it is."""
        _validate(callback)
        with self._mutex:
            callbacks = self._callbacks()
            if not self.told and callbacks is not None:
                callbacks.lost.append((callback, lease))
                return
        _call(callback, lease)

    def on_danger(self, callback: Callback, before: float, lease: Any) -> None:
        """Call back so many seconds before the lease would be lost."""
        _validate(callback)
        callbacks = self._callbacks()
        if callbacks is not None:
            callbacks.danger.append((before, (callback, lease)))
            self._warns = True

    def entrust(self) -> Callbacks:
        """Return the callbacks for somebody else to keep: without that one they are not called."""
        callbacks = self._callbacks() or Callbacks()
        self._callbacks = weakref.ref(callbacks)
        return callbacks

    def call(self) -> None:
        """Call those back who wait for the loss."""
        callbacks = self._callbacks()
        warn([] if callbacks is None else callbacks.lost)

    def next_due(self, deadline: float) -> float:
        """Return when a callback has to be warned; the deadline: all have been."""
        due = deadline
        for index, (before, _call) in enumerate(self._danger if self._warns else []):
            if self._warned.get(index) != deadline:
                due = min(due, deadline - before)
        return due

    def warnings(self, deadline: float, now: float) -> list[Call]:
        """Return who has to be warned now. A renewal makes a new deadline, and so a new warning."""
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

    # The awaiting task

    def works_under(self, task: asyncio.Task[Any], *, cancels: bool) -> None:
        """Say which task is in the block, and whether it is cancelled when the lease is lost."""
        self._task, self._loop, self._cancels = task, task.get_loop(), cancels
        self._cancelling = task.cancelling()

    def is_task(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this is the task in the block; None: whether there is none."""
        return self._task is task

    @property
    def is_orphaned(self) -> bool:
        """Whether the loop was closed whose task is in the block: nobody will leave it."""
        return self._task is not None and self._loop is not None and self._loop.is_closed()

    def cancel(self) -> None:
        """Cancel the task, from any thread."""
        loop = self._loop
        if loop is not None and self._cancels:
            try:
                loop.call_soon_threadsafe(self._cancel)
            except RuntimeError:
                self._loop = None  # The loop was closed, and the task with it.

    def _cancel(self) -> None:
        # In the loop's thread, as `left_block`: a block that was left is not cancelled any more.
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel("The lease is lost.")

    def left_block(self, error: BaseException | None) -> bool:
        """Say that the task has left its block; return whether `error` is our cancellation."""
        task, self._task = self._task, None
        if task is None or not self._cancelled:
            return False
        # As asyncio.timeout does: somebody else's cancellation goes on.
        return task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)


def before_end(before: Duration | None, ttl: float | None, key: str) -> float:
    """Return how many seconds before its end a lease is in danger; None: a part of its ttl."""
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
    """Call callbacks, each whatever becomes of the others."""
    for callback, lease in calls:
        _call(callback, lease)


def apart(work: Callable[[], None]) -> None:
    """Do what may take long in a thread of its own: a timer's thread must not wait for it."""

    def run() -> None:
        try:
            work()
        finally:
            # What a receiver opened in this thread, no end of a request would ever close.
            close_here()

    try:
        start_thread(threading.Thread(target=run, name="distlock-lost", daemon=True))
    except RuntimeError:
        work()  # The interpreter ends, or there are too many threads.


def _call(callback: Callback, lease: Any) -> None:
    try:
        callback(lease)
    except (Exception, SystemExit) as error:
        pass_on(error)
        # In another thread than the main one it ends nothing but the calls behind it.
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
