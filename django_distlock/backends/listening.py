"""How a process hears that keys became free: on one connection, while somebody waits."""

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

#: Seconds that the connection stays open when nobody waits any more.
IDLE_SECONDS = 30.0
#: Seconds between two looks whether somebody still waits, and at the connection.
LOOK_SECONDS = 15.0
#: Seconds between two attempts to connect: the first pause, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0

_every: weakref.WeakSet[Listener] = weakref.WeakSet()


class Line(Protocol):
    """A connection that has subscribed to the wake-ups of a backend."""

    def hear(self, seconds: float) -> Iterable[str]:
        """Return what was called out, as soon as there is something: see `Queues.call_by`.

        Where nothing comes for so many seconds, ask the server whether it is still there.

        Raises:
            Exception: The connection is broken, or the server does not answer.
        """

    def close(self) -> None:
        """Close the connection, from any thread. What goes wrong by that is nobody's business.

        From another thread than the one that hears, it is enough that `hear` ends at once: the
        thread that hears closes it as well, last.
        """


class NoWakeUps(Exception):
    """Wake-ups cannot be heard, and trying again would not help: the message says why."""


class _Watch:
    """What one thread does that listens."""

    def __init__(self) -> None:
        self.closing = Bell()
        # Set when it is known whether wake-ups come: subscribed, or failed to.
        self.decided = Bell()
        self.live = False
        self.line: Line | None = None
        self.thread: threading.Thread | None = None


class Listener:
    """Listens in a thread of its own, while somebody waits.

    Args:
        subscribe: Opens a line; returns when the server has the subscription.
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
        """Start anew. In a forked child: the thread and the connection are its parent's."""
        self._process = os.getpid()
        self._mutex = threading.Lock()
        if self._watch is not None:
            keep_inherited(self._watch)
        self._watch = None

    @property
    def is_live(self) -> bool:
        """Whether wake-ups come right now."""
        watch = self._watch
        return watch is not None and watch.live and self._process == os.getpid()

    def ensure(self, bound: float) -> bool:
        """Start to listen, and return whether wake-ups come, for which it waits `bound` seconds."""
        if self._process != os.getpid():
            # Not every server tells Python that it forks.
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
        # Behind the line above, whoever opens one closes it.
        if watch.line is not None:
            watch.line.close()
        if watch.thread is not None and watch.thread is not threading.current_thread():
            watch.thread.join(1.0)

    def _begin(self) -> _Watch | None:
        watch = _Watch()
        watch.thread = threading.Thread(
            target=self._run, args=(watch,), name=self._name, daemon=True
        )
        # Kept before it starts: a signal's handler may raise behind that.
        self._watch = watch
        try:
            start_thread(watch.thread)
        except RuntimeError:
            self._watch = None
            return None  # The interpreter ends, or there are too many threads.
        return watch

    def _run(self, watch: _Watch) -> None:
        pause = FIRST_PAUSE
        with self._mutex:
            if self._watch is not watch:
                return  # Another one was started in its place, or it was closed.
        try:
            while not watch.closing.is_rung:
                began = time.monotonic()
                try:
                    line = self._subscribe()
                except NoWakeUps as error:
                    self._tell(error)
                    watch.decided.ring()
                    # Not asked again before somebody waits after a while.
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
        """Pass on what is heard; return whether that was all: nobody waits any more."""
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
            # Whatever was called out before the subscription went unheard.
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
            # Who relied on wake-ups has to go back to asking.
            self._queues.ring_all()

    def _ends(self, watch: _Watch) -> bool:
        """Whether nobody waits: whoever comes next begins anew, and does not rely on this one."""
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


# Servers note connections that end without a word.
atexit.register(_close_every)
