"""Exceptions of signals' handlers and of other threads, which concern the caller alone."""

from __future__ import annotations

import signal
import threading
import traceback
from asyncio import CancelledError
from types import FrameType

#: What code raises by itself: errors, and the ends of a program, a generator and a coroutine.
_ENDS = (Exception, SystemExit, GeneratorExit, CancelledError)


def pass_on(error: BaseException) -> None:
    """Raise an exception of a signal's handler or another thread, such as a time limit's.

    Other exceptions are ignored. One that another thread has raised here has no frame of its own,
    and is known by its class: a `BaseException` that does not end code by itself.

    Call it before an error of foreign code is logged or translated. The exception may be `error`
    itself, or one in its chain of contexts that the foreign code has replaced, as drivers do. What
    the caller was handling before is ignored.
    """
    frames = set(_frames(error))
    met: BaseException | None = error
    handlers: set[object] = set()
    # Signals' handlers run only in the main thread.
    if threading.current_thread() is threading.main_thread():
        handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    while met is not None:
        trail = _frames(met)
        # The first frame has caught this exception, and raised the one before in its place.
        if trail and trail[0] in frames:
            frames.update(trail)
            # Python's own handler for Ctrl-C has no frame either.
            if not isinstance(met, _ENDS) or any(each.f_code in handlers for each in trail):
                raise met
        met = met.__context__


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _line in traceback.walk_tb(error.__traceback__)]


def _code_of(handler: object) -> object:
    handler = getattr(handler, "__func__", handler)
    # A callable object has the code in its class; a handler such as SIG_IGN has none.
    function = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(function, "__code__", handler)
