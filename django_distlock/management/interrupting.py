"""Signals that would end this process, for commands that first finish what they have begun."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def usual_handlers() -> dict[int, Any]:
    """Return the handlers of signals that would end this process; none outside the main thread.

    Signals that are ignored, or have a handler of the project's, are left to it.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    handlers = {each: signal.getsignal(each) for each in numbers}
    ending = (signal.SIG_DFL, signal.default_int_handler)
    return {each: handler for each, handler in handlers.items() if handler in ending}


@contextmanager
def handled(
    usual: Mapping[int, Any], handle: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Let `handle` take these signals in the block."""
    try:
        for each in usual:
            signal.signal(each, handle)
        yield
    finally:
        _restore(usual)


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Hold back the first signal in the block; the second one has its usual effect.

    Yields:
        A list that gets the signal. If it is still there at the end of the block, the signal has
        its usual effect then.
    """
    usual, told, is_over = usual_handlers(), list[int](), False

    def note(signum: int, frame: FrameType | None) -> None:
        _restore(usual)
        if is_over:  # An exception came before the handlers were restored.
            signal.raise_signal(signum)
        else:
            told.append(signum)

    try:
        with handled(usual, note):
            yield told
    finally:
        is_over = True
        for each in told:
            signal.raise_signal(each)


def _restore(handlers: Mapping[int, Any]) -> None:
    for each, handler in handlers.items():
        signal.signal(each, handler)
