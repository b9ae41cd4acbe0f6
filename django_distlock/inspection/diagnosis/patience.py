"""Work that may hang, and is left behind then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from django.db import connections

from ...core import threads

T = TypeVar("T")


def begun(work: Callable[[], T], name: str) -> Future[T]:
    """Begin some work in a thread of its own, with connections of its own: see `core.threads`."""

    def work_and_close() -> T:
        try:
            return work()
        finally:
            connections.close_all()

    return threads.begun(work_and_close, name)
