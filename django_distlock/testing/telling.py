"""Who is told of a loss, is told before a test goes on."""

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

#: Seconds that somebody who is told may take, where a thread is waited for.
PATIENCE = 10.0

# What is replaced below is so for the process: two threads would put back each other's.
_one_at_a_time = threading.RLock()

Work = Callable[[], None]


@contextmanager
def telling_here() -> Iterator[Teller]:
    """Let callbacks and receivers that are told of a loss be called in this thread.

    In a thread of its own they would see nothing of the transaction of a `TestCase`, and leave
    after what they write. In the thread of an event loop they would be asked to await: there they
    are called apart as always, and waited for.

    Raises:
        TimeoutError: One of them, called apart, has not returned in 10 seconds.
    """
    with _one_at_a_time:
        teller, before = Teller(), vars(state)["apart"]
        vars(state)["apart"] = teller
        try:
            yield teller
            # Of renewals a thread of the package tells, and another one writes down events.
            for finish in (deferred_release.teller.finish, *before_drop):
                finish()
        finally:
            vars(state)["apart"] = before
            teller.close()


class Teller:
    """Takes what is to be told from any thread, and tells it in one: the one that makes it."""

    def __init__(self) -> None:
        self._here = threading.get_ident()
        self._waiting: list[Work] = []
        self._mutex = threading.Lock()
        self._is_closed = False

    def __call__(self, work: Work) -> None:
        """Tell now, or let the thread do it that has to; after its end, as always."""
        if threading.get_ident() == self._here:
            _tell(work)
            return
        with self._mutex:
            if not self._is_closed:
                self._waiting.append(work)
                return
        apart(work)

    def tell(self) -> None:
        """Tell what timers have found out."""
        with self._mutex:
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            _tell(work)

    def close(self) -> None:
        """Take no more, and tell what there is."""
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
