"""Callbacks and receivers of a loss, which are called before a test goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import connections

from ..database.connections import before_drop
from ..locks import state
from ..locks.callbacks import apart
from ..process import deferred_release

#: Seconds that a callback in another thread may take.
PATIENCE = 10.0

# The replacement below is for the whole process: two threads would restore each other's.
_one_at_a_time = threading.RLock()

Work = Callable[[], None]


@contextmanager
def telling_here() -> Iterator[Teller]:
    """Call the callbacks and receivers of a loss in this thread.

    In another thread they would not see the transaction of a `TestCase`, and what they write would
    stay after the test. The thread of an event loop does not allow synchronous queries: from there
    they are called in another thread, as usual, and waited for.

    Raises:
        TimeoutError: One of them, in another thread, has not returned in 10 seconds.
    """
    with _one_at_a_time:
        teller, before = Teller(), vars(state)["apart"]
        vars(state)["apart"] = teller
        try:
            yield teller
            # One thread of the package reports renewals, and another one writes events.
            for finish in (deferred_release.teller.finish, *before_drop):
                finish()
        finally:
            vars(state)["apart"] = before
            teller.close()


class Teller:
    """Takes calls from any thread, and makes them in the thread that created this object."""

    def __init__(self) -> None:
        self._here = threading.get_ident()
        self._waiting: list[Work] = []
        self._mutex = threading.Lock()
        self._is_closed = False

    def __call__(self, work: Work) -> None:
        """Make the call now, or leave it to the thread of this object; after `close`, as usual."""
        if threading.get_ident() == self._here:
            _tell(work)
            return
        with self._mutex:
            if not self._is_closed:
                self._waiting.append(work)
                return
        apart(work)

    def tell(self) -> None:
        """Make the calls that other threads have left, such as timers."""
        with self._mutex:
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            _tell(work)

    def close(self) -> None:
        """Take no more calls, and make those that are left."""
        with self._mutex:
            self._is_closed = True
        self.tell()


def _tell(work: Work) -> None:
    if not _in_event_loop():
        work()
        return
    told = threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            connections.close_all()
            told.set()

    apart(run)
    if not told.wait(PATIENCE):
        raise TimeoutError(f"A callback of a lost lease has not returned in {PATIENCE:g} s.")


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
