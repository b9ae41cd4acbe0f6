"""Exceptions that say nothing about the code they come from: a signal's handler has raised them."""

from __future__ import annotations

import functools
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING


def pass_on(error: BaseException) -> None:
    """Raise what the handler of a signal raised, such as that of a time limit.

    That is `error`, or what it was raised in place of: by a driver that was broken off, say. What
    the caller was handling before is left alone.

    For where the code of others is called, whose own errors are logged, or translated.
    """
    frames = set(_frames(error))
    met: BaseException | None = error
    handlers: set[object] = set()
    # Handlers run in the main thread alone.
    if threading.current_thread() is threading.main_thread():
        handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    while met is not None:
        trail = _frames(met)
        # The first one has caught it, and has raised what took its place.
        if trail and trail[0] in frames:
            frames.update(trail)
            # Python's own handler of Ctrl-C has no frame.
            is_pressed = isinstance(met, KeyboardInterrupt)
            if is_pressed or any(each.f_code in handlers for each in trail):
                raise met
        met = met.__context__


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _line in traceback.walk_tb(error.__traceback__)]


def _code_of(handler: object) -> object:
    handler = getattr(handler, "__func__", handler)
    # One that is called as an object has it in its class; what is no function has none.
    function = handler if hasattr(handler, "__code__") else type(handler).__call__
    return getattr(function, "__code__", handler)


class Underway:
    """Is true for as long as a block of it is open, also where that was left in its midst."""

    _open: Callable[[], object] | None = None

    def __bool__(self) -> bool:
        return self._open is not None and self._open() is not None

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
