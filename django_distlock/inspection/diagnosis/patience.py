"""Work that may hang, and is left behind then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from django.db import connections

from ...core.threads import start_thread

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], name: str) -> T:
    """Run some work in a thread of its own, with connections of its own; return what it returns.

    Args:
        seconds: How long to wait for it.
        name: What the thread is called.

    Raises:
        TimeoutError: It has not ended. It goes on, and ends with the process at the latest.
        Exception: What the work raised.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            try:
                result = work()
            finally:
                connections.close_all()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(result)

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    return done.result(seconds)
