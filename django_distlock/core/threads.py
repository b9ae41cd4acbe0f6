"""Threads that a signal's exception neither leaves half started nor is lost in."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from .bells import Bell
from .durations import MAX_BOUND

T = TypeVar("T")


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
