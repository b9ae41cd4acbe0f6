"""Exceptions in the middle of an operation, as the handler of a signal raises them."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import django_distlock
from tests import interrupting

#: Lines behind which the interpreter does not look for signals before the function has returned.
_WHOLE = ("del ", "left.watch(ending)")
_PACKAGE = str(Path(django_distlock.__file__).parent)


class TimeIsUp(Exception):
    """What a time limit raises. No error of a store: such as Celery's `SoftTimeLimitExceeded`."""


#: The signal raises `TimeIsUp` here.
alarms = partial(interrupting.alarms, TimeIsUp)


def strike_again_and_again(
    work: Callable[[], object], look: Callable[[], None], *, seconds: float, most: int
) -> int:
    """Interrupt `work` by signals at other moments each time; return how many struck.

    Args:
        look: What has to hold behind each.
        seconds: When to stop.
        most: Of signals.
    """
    began = time.perf_counter()
    for _ in range(3):
        work()
    takes = (time.perf_counter() - began) / 3
    struck, until = 0, time.monotonic() + seconds
    with alarms() as arm:
        number = 0
        while struck < most and time.monotonic() < until:
            number += 1
            # The golden ratio spreads them evenly, whatever their number.
            delay = max(1e-6, takes * 1.1 * (number * 0.618034 % 1))
            try:
                arm(delay)
                work()
                arm(0)
            except TimeIsUp:
                struck += 1
            look()
    # What a driver was opening when it was interrupted warns when it is collected: here, and not in
    # another test.
    gc.collect()
    return struck


def lines_of(work: Callable[[], object]) -> int:
    """Count the places in the package where an exception could interrupt `work`."""
    tracer = _Tracer(sys.maxsize)
    tracer.run(work)
    return tracer.seen


def interrupt_at(line: int, work: Callable[[], object], inside: FunctionType | None = None) -> bool:
    """Raise at the n-th line of the package that `work` comes to; return whether it was reached.

    Args:
        inside: The function whose lines count; None: any.
    """
    tracer = _Tracer(line, inside)
    try:
        tracer.run(work)
    except TimeIsUp:
        return True
    return tracer.has_struck


def stacks() -> str:
    """Say where the threads of the package are."""
    frames = sys._current_frames()
    threads = [each for each in threading.enumerate() if each.name.startswith("distlock")]
    return "\n".join(
        f"{each.name} is at\n{''.join(traceback.format_stack(frames.get(each.ident or 0)))}"
        for each in threads
    )


class _Tracer:
    def __init__(self, line: int, inside: FunctionType | None = None):
        self._inside = inside and inside.__code__
        self.seen = 0
        self.has_struck = False
        self._line = line
        self._entered: dict[int, set[int]] = {}
        self._last: dict[int, int] = {}

    def run(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            work()
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._inside is not None:
            return self._trace if frame.f_code is self._inside else None
        return self._trace if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self._is_whole(frame):
            self.seen += 1
            if self.seen == self._line:
                self.has_struck = True
                raise TimeIsUp
        return self._trace

    def _is_whole(self, frame: FrameType) -> bool:
        """Whether no signal's handler runs between the line before and this one."""
        number, name = frame.f_lineno, frame.f_code.co_filename
        last = self._last.get(id(frame), 0)
        self._last[id(frame)] = number
        text = linecache.getline(name, number).strip()
        if text == "try:":
            return True
        if text.startswith("with "):
            # The second time is its end, where nothing comes before the call of `__exit__`.
            seen = self._entered.setdefault(id(frame), set())
            if number in seen:
                return True
            seen.add(number)
        return bool(last) and linecache.getline(name, last).strip().startswith(_WHOLE)
