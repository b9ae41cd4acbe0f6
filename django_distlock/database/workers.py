"""Threads that do what no other thread may wait for, or be interrupted in."""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from ..core.clock import monotonic
from ..core.durations import MAX_BOUND
from ..core.logs import log_fields
from ..core.threads import Bell, start_thread
from .connections import close_here, use_own_connections

logger = logging.getLogger("django_distlock")


class Gone(weakref.ref[Any]):
    """A weak reference that the worker gets when its object is gone, to do what is set down in it.

    No Python code runs where the object dies: a finaliser could be interrupted by a signal's
    exception, and would swallow it.
    """

    __slots__ = ("work",)

    work: Callable[[], object]


@dataclass(order=True, slots=True)
class _Late:
    """What is to be done at a time, by `monotonic`."""

    at: float
    work: Callable[[], object] = field(compare=False)


class Worker:
    """Does what finalisers may only queue, in a thread of its own.

    A simple queue, because it alone may be filled from a finaliser.
    """

    def __init__(self, name: str):
        self._name = name
        self._pid: int | None = None
        self._thread: threading.Thread | None = None
        self.forget()

    def forget(self) -> None:
        """Have nothing to do. In a forked child: the parent's work is its own."""
        self.queue: SimpleQueue[Callable[[], object] | Gone | _Late] = SimpleQueue()
        #: What its time has not come for, the first one first: for the thread alone.
        self.late: list[_Late] = []
        self._starting = threading.Lock()
        self._works = False
        # Where the thread works. A forked child may get the number of an earlier process.
        self._works_in: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it has something to do, or does it."""
        return self._works or not self.queue.empty()

    def start(self) -> None:
        """Start the thread where it is safe to: a finaliser may not."""
        if self._works_in == os.getpid():
            return
        with self._starting:
            if not self._is_running():
                # Kept before it starts: a signal's exception behind that makes no second one.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._pid = os.getpid()
                start_thread(self._thread)

    def put(self, work: Callable[[], object], seconds: float = 0.0) -> None:
        """Let the thread do something: behind all that was put before, or in some seconds."""
        self.queue.put(_Late(monotonic() + seconds, work) if seconds else work)

    def finish(self) -> None:
        """Wait until what is queued has been done, for a second at most."""
        if self._is_running():
            finished = Bell()
            self.put(finished.ring)
            finished.wait(MAX_BOUND)

    def _is_running(self) -> bool:
        thread = self._thread
        return thread is not None and self._pid == os.getpid() and thread.is_alive()

    def _run(self) -> None:
        with self._starting:
            if self._thread is not threading.current_thread():
                return  # It began late, and another one was started in its place.
        use_own_connections(keeps_leases=True)
        try:
            self._works_in = self._pid
            self._work()
        finally:
            self._works_in = None

    def _work(self) -> None:
        while True:
            self._works = False
            work = self._next()
            self._works = True
            try:
                if isinstance(work, Gone):
                    work.work()
                else:
                    work()
            except Exception:
                logger.exception("A deferred operation failed", extra=log_fields("telling_failed"))
            finally:
                # What a signal's receiver opened here, no end of a request would ever close.
                close_here()

    def _next(self) -> Callable[[], object] | Gone:
        """Wait for something to do."""
        while True:
            left = self.late[0].at - monotonic() if self.late else math.inf
            if left <= 0:
                return heapq.heappop(self.late).work
            with suppress(Empty):
                found = self.queue.get(timeout=None if left == math.inf else left)
                if not isinstance(found, _Late):
                    return found
                heapq.heappush(self.late, found)


#: Ends what is gone, and what waited for a transaction.
releases = Worker("distlock-releases")


def when_gone(watched: object, work: Callable[[], object]) -> Gone:
    """Let the worker do something when an object is gone, if what is returned is kept until then.

    Args:
        watched: Nothing that `work` refers to.
    """
    releases.start()
    gone = Gone(watched, releases.queue.put)
    gone.work = work
    return gone


def has_gone() -> bool:
    """Whether something is gone, and what was to be done then may not be done yet."""
    return releases.is_busy
