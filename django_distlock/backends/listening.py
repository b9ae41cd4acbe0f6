"""Listen for wake-ups, on one connection of the process, while it has waiters."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from ..core.logs import log_fields
from ..core.threads import Bell, start_thread
from ..database.connections import keep_inherited
from .queues import Queues

logger = logging.getLogger("django_distlock")

#: Seconds that the connection stays open without waiters.
IDLE_SECONDS = 30.0
#: Seconds between two checks of the waiters and the connection.
LOOK_SECONDS = 15.0
#: Seconds between two attempts to connect: the first pause, and the longest one.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0

_every: weakref.WeakSet[Listener] = weakref.WeakSet()


class Line(Protocol):
    """A connection that has subscribed to the wake-ups of a backend."""

    def hear(self, seconds: float) -> Iterable[str]:
        """Return wake-ups as soon as there are any: see `Queues.call_by`.

        If none comes for so many seconds, check that the server still answers.

        Raises:
            Exception: The connection is broken, or the server does not answer.
        """

    def close(self) -> None:
        """Close the connection, from any thread. Errors are ignored.

        In another thread than that of `hear`, it is enough to make `hear` return at once: its
        thread closes the connection as well.
        """


class NoWakeUps(Exception):
    """Wake-ups are not possible, and further attempts would not help: the message says why."""


class _Watch:
    """The state of one listening thread."""

    def __init__(self) -> None:
        self.closing = Bell()
        # Rung when the first attempt to subscribe has succeeded or failed.
        self.decided = Bell()
        self.live = False
        self.line: Line | None = None
        self.thread: threading.Thread | None = None


class Listener:
    """Listens in a thread of its own, while there are waiters.

    Args:
        subscribe: Opens a line, and returns once the server has the subscription.
    """

    def __init__(self, name: str, subscribe: Callable[[], Line], queues: Queues):
        self._name = name
        self._subscribe = subscribe
        self._queues = queues
        self._told = False
        self._watch: _Watch | None = None
        self.forget()
        _every.add(self)

    def forget(self) -> None:
        """Reset in a forked child, because the thread and the connection are the parent's."""
        self._process = os.getpid()
        self._mutex = threading.Lock()
        if self._watch is not None:
            keep_inherited(self._watch)
        self._watch = None

    @property
    def is_live(self) -> bool:
        """Whether it is subscribed right now."""
        watch = self._watch
        return watch is not None and watch.live and self._process == os.getpid()

    def ensure(self, bound: float) -> bool:
        """Start to listen; return whether it is subscribed within `bound` seconds."""
        if self._process != os.getpid():
            # Some programs fork without telling Python.
            self.forget()
        with self._mutex:
            watch = self._watch
            if watch is None or watch.thread is None or not watch.thread.is_alive():
                watch = self._begin()
        if watch is None:
            return False
        watch.decided.wait(bound)
        return watch.live

    def close_all(self) -> None:
        """Stop, and wait a second for the connection to be closed."""
        if self._process != os.getpid():
            return
        with self._mutex:
            watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.closing.ring()
        # From here on, a thread that opens a line closes it itself.
        if watch.line is not None:
            watch.line.close()
        if watch.thread is not None and watch.thread is not threading.current_thread():
            watch.thread.join(1.0)

    def _begin(self) -> _Watch | None:
        watch = _Watch()
        watch.thread = threading.Thread(
            target=self._run, args=(watch,), name=self._name, daemon=True
        )
        # Stored before it starts, because a signal's handler may raise after that.
        self._watch = watch
        try:
            start_thread(watch.thread)
        except RuntimeError:
            self._watch = None
            return None  # The interpreter is exiting, or there are too many threads.
        return watch

    def _run(self, watch: _Watch) -> None:
        pause = FIRST_PAUSE
        with self._mutex:
            if self._watch is not watch:
                return  # Another thread has replaced this one, or it was closed.
        try:
            while not watch.closing.is_rung:
                began = time.monotonic()
                try:
                    line = self._subscribe()
                except NoWakeUps as error:
                    self._tell(error)
                    watch.decided.ring()
                    # The next attempt comes with the first waiter after a while.
                    watch.closing.wait(IDLE_SECONDS)
                    return
                except Exception as error:  # noqa: BLE001 - a driver may raise anything
                    self._tell(error)
                else:
                    if self._listen(watch, line):
                        return
                    if time.monotonic() - began > LONGEST_PAUSE:
                        pause = FIRST_PAUSE
                watch.decided.ring()
                watch.closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                if self._ends(watch):
                    return
        finally:
            with self._mutex:
                if self._watch is watch:
                    self._watch = None
            watch.decided.ring()

    def _listen(self, watch: _Watch, line: Line) -> bool:
        """Pass wake-ups on; return True if the thread is to end, because nobody waits any more."""
        watch.line = line
        idle_since = time.monotonic()
        try:
            if watch.closing.is_rung:
                return True
            watch.live = True
            watch.decided.ring()
            if self._told:
                logger.info(
                    "%s receives wake-ups again", self._name, extra=log_fields("wakeups_heard")
                )
                self._told = False
            # Wake-ups before the subscription were missed.
            self._queues.ring_all()
            while not watch.closing.is_rung:
                for call in line.hear(LOOK_SECONDS):
                    self._queues.answer(call)
                if self._queues:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > IDLE_SECONDS and self._ends(watch):
                    return True
            return True
        except Exception as error:  # noqa: BLE001 - a driver may raise anything
            if watch.closing.is_rung:
                return True
            self._tell(error)
            return False
        finally:
            watch.live = False
            watch.line = None
            line.close()
            # Waiters that relied on wake-ups have to poll now.
            self._queues.ring_all()

    def _ends(self, watch: _Watch) -> bool:
        """Whether nobody waits; if so, the next waiter starts a new thread."""
        with self._mutex:
            if self._queues:
                return False
            if self._watch is watch:
                self._watch = None
            return True

    def _tell(self, error: Exception) -> None:
        """Warn once, until wake-ups are heard again."""
        if not self._told:
            logger.warning(
                "%s cannot receive wake-ups, and its waiters use polling instead: %s",
                self._name,
                error,
                extra=log_fields("wakeups_lost", error=error),
            )
            self._told = True


def _close_every() -> None:
    for listener in list(_every):
        listener.close_all()


# Servers log connections that end without being closed.
atexit.register(_close_every)
