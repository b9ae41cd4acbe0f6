"""Exceptions that come from outside, at any point: what a signal's handler may raise."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """What the handler of a signal raises."""


def _interrupt() -> None:
    raise Interrupted


def interrupt_at(
    number: int,
    work: Callable[[], object],
    *modules: str,
    strike: Callable[[], object] = _interrupt,
    ends: type[BaseException] = Interrupted,
) -> bool:
    """Raise at the line that is run as so many-th in some modules; say whether it came to that.

    Not on the line of a `with` that is left: Python looks at no signal there.

    Args:
        modules: The names of those modules, or of the packages that they are in.
        strike: What raises there.
        ends: What it raises.
    """
    left = number
    entered: set[tuple[int, int]] = set()

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        return look if frame.f_globals.get("__name__", "").startswith(modules) else None

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event != "line":
            return look
        place = (id(frame), frame.f_lineno)
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if source.startswith("with "):
            if place in entered:
                return look
            entered.add(place)
        left -= 1
        if left == 0:
            strike()
        return look

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        work()
    except ends:
        return True
    finally:
        sys.settrace(before)
    # Something may have swallowed it.
    assert left > 0
    return False


def interrupt_after(seconds: float, work: Callable[[], object]) -> bool:
    """Let a signal raise so many seconds after this has begun to work; say whether that ended it.

    For the main thread. What is raised in a finaliser is lost, and the work goes on.
    """

    def strike(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False
