"""Exceptions that come from outside, at any point: what a signal's handler may raise."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Seconds that a signal needs at most until its handler runs.
_ON_ITS_WAY = 1.0


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


@contextmanager
def alarms(raised: type[BaseException] = Interrupted) -> Iterator[Callable[[float], None]]:
    """Give a function that lets a signal raise in the main thread in so many seconds; 0: no more.

    At its own end, it raises nothing any more.
    """
    assert threading.current_thread() is threading.main_thread()
    is_due, is_over = False, False

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal is_due
        is_due = False
        if not is_over:
            raise raised

    def arm(seconds: float) -> None:
        nonlocal is_due
        # Not behind the call: it may strike amid that, in a finaliser, which swallows it.
        is_due = is_due or seconds > 0
        left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
        if seconds:
            return
        # The system may have given the signal to another thread, which has not told this one yet.
        # Or less than a microsecond was left, which is 0 here, and none comes.
        until = time.monotonic() + _ON_ITS_WAY
        while is_due and not left and time.monotonic() < until:
            time.sleep(0.001)
        is_due = False

    before = signal.signal(signal.SIGALRM, strike)
    try:
        yield arm
    finally:
        is_over = True
        arm(0)
        signal.signal(signal.SIGALRM, before)


def interrupt_after(seconds: float, work: Callable[[], object]) -> bool:
    """Let a signal raise so many seconds after this has begun to work; say whether that ended it.

    For the main thread. What is raised in a finaliser is lost, and the work goes on.
    """
    with alarms() as arm:
        try:
            arm(seconds)
            work()
            arm(0)
        except Interrupted:
            return True
    return False
