"""Exceptions that say nothing about the code they come from: a signal's handler has raised them."""

from __future__ import annotations

import functools
import signal
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING


def pass_on(error: BaseException) -> None:
    """Raise an error again if the handler of a signal raised it, such as that of a time limit.

    For where the code of others is called, whose own errors are logged and change nothing.
    """
    # Python's own handler of Ctrl-C is no function with a frame.
    if isinstance(error, KeyboardInterrupt):
        raise error
    # Handlers run in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        return
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            raise error
        traceback = traceback.tb_next


def pass_on_hidden(error: BaseException) -> None:
    """Raise what the handler of a signal raised, where a driver raised `error` in its place.

    An exception that the driver's caller was already handling is left alone.
    """
    frames, traceback = set(), error.__traceback__
    while traceback is not None:
        frames.add(traceback.tb_frame)
        traceback = traceback.tb_next
    hidden = error.__context__
    while hidden is not None:
        # Its traceback begins in the function that caught it, and that raised `error`.
        if hidden.__traceback__ is not None and hidden.__traceback__.tb_frame in frames:
            pass_on(hidden)
        hidden = hidden.__context__


def _code_of(handler: object) -> object:
    handler = getattr(handler, "__func__", handler)
    # One that is called as an object has it in its class; what is no function has none.
    function = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(function, "__code__", handler)


class Underway:
    """Is true for as long as a block of it is open, also where that was left in its midst."""

    def __init__(self) -> None:
        self._open: Callable[[], object] = _is_not

    def __bool__(self) -> bool:
        return self._open() is not None

    def __enter__(self) -> None:
        return None

    if TYPE_CHECKING:

        def __exit__(self, *_: object) -> None: ...

    else:

        def _watched(self):
            sentinel = functools.partial(_is_not)
            self._open = weakref.ref(sentinel)
            return sentinel

        __exit__ = property(_watched)


def _is_not(*_: object) -> None:
    return None
