"""Worker threads, for work that no other thread may wait for or be interrupted in."""

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
    """A weak reference with work for the worker, which gets it when the object has died.

    No Python code runs where the object dies: a signal's exception could interrupt a finaliser,
    which would swallow it.
    """

    __slots__ = ("work",)

    work: Callable[[], object]


@dataclass(order=True, slots=True)
class _Late:
    """Work to be done at a time, by `monotonic`."""

    at: float
    work: Callable[[], object] = field(compare=False)


class Worker:
    """Does work in a thread of its own, which finalisers may queue.

    It has a `SimpleQueue`, the only kind that a finaliser may put something into.
    """

    def __init__(self, name: str):
        self._name = name
        self._pid: int | None = None
        self._thread: threading.Thread | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all work: in a forked child, it is the parent's."""
        self.queue: SimpleQueue[Callable[[], object] | Gone | _Late] = SimpleQueue()
        #: Work for later, as a heap. Only the thread itself uses it.
        self.late: list[_Late] = []
        self._starting = threading.Lock()
        self._works = False
        # The process in which the thread runs.
        self._works_in: int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work is waiting or in progress."""
        return self._works or not self.queue.empty()

    def start(self) -> None:
        """Start the thread if necessary. A finaliser must not call this."""
        if self._works_in == os.getpid():
            return
        with self._starting:
            if not self._is_running():
                # Stored before it starts, so that a signal's exception leads to no second one.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._pid = os.getpid()
                start_thread(self._thread)

    def put(self, work: Callable[[], object], seconds: float = 0.0) -> None:
        """Add work: it is done after all earlier work, or after some seconds."""
        self.queue.put(_Late(monotonic() + seconds, work) if seconds else work)

    def finish(self) -> None:
        """Wait until all queued work is done, for a second at most."""
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
                return  # Another thread has replaced this one.
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
                # No end of a request closes the connections that a receiver opens in this thread.
                close_here()

    def _next(self) -> Callable[[], object] | Gone:
        """Wait for work."""
        while True:
            left = self.late[0].at - monotonic() if self.late else math.inf
            if left <= 0:
                return heapq.heappop(self.late).work
            with suppress(Empty):
                found = self.queue.get(timeout=None if left == math.inf else left)
                if not isinstance(found, _Late):
                    return found
                heapq.heappush(self.late, found)


#: Releases leases of interrupted blocks, and those that have waited for a transaction.
releases = Worker("distlock-releases")


def when_gone(watched: object, work: Callable[[], object]) -> Gone:
    """Let the worker do something when an object has died; keep the returned reference until then.

    Args:
        watched: The object; `work` must not refer to it.
    """
    releases.start()
    gone = Gone(watched, releases.queue.put)
    gone.work = work
    return gone


def has_gone() -> bool:
    """Whether an object has died whose work may not be done yet."""
    return releases.is_busy
