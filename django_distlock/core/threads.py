"""Threads that a signal's exception neither leaves half started nor is lost in."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from .durations import MAX_BOUND

T = TypeVar("T")


class Bell:
    """An event that a signal's exception cannot leave locked.

    `threading.Event` is Python around a lock: interrupted in `wait`, it may keep the lock, and
    whoever sets it would hang. A simple queue is C alone.
    """

    __slots__ = ("_rung", "put")

    def __init__(self) -> None:
        self._rung: SimpleQueue[object] = SimpleQueue()
        #: Rings it, without any Python: as the callback of a weak reference, which it takes.
        self.put = self._rung.put

    @property
    def is_rung(self) -> bool:
        """Whether somebody has rung it since it was cleared."""
        return not self._rung.empty()

    def ring(self) -> None:
        """Wake everybody who waits, one after the other, and let nobody wait from now on."""
        self._rung.put(None)

    def clear(self) -> None:
        """Let the next ones wait."""
        with suppress(Empty):
            while True:
                self._rung.get_nowait()

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, for so many seconds at most."""
        with suppress(Empty):
            self._rung.get(timeout=max(0.0, seconds))
            self._rung.put(None)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, or not, whatever the handler of a signal raises meanwhile.

    `Thread.start()` is Python around a dictionary and an event: an exception in its midst becomes
    a `KeyError` or a `RuntimeError` of theirs. Handlers run in the main thread alone, so another
    one starts it, and is itself started by one call of C.

    Raises:
        RuntimeError: There are too many threads, or the interpreter ends.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    errors: list[RuntimeError] = []
    started = Bell()

    def begin() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            errors.append(error)
        finally:
            started.ring()

    start_new_thread(begin, ())
    started.wait(MAX_BOUND)
    if errors:
        raise errors[0]


def begun(work: Callable[[], T], name: str) -> Future[T]:
    """Begin some work that may hang, in a thread that ends with the process at the latest.

    Args:
        name: What the thread is called.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(result)

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    return done
