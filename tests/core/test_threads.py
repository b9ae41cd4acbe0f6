"""Starting a thread where the handler of a signal may raise anywhere."""

from __future__ import annotations

import sys
import threading
from functools import partial
from types import FrameType
from typing import Any

import pytest

from django_distlock.core.threads import Bell, start_thread
from tests.contract.helpers import Later, prompt
from tests.contract.locking import eventually
from tests.interrupting import Interrupted, interrupt_at

#: More lines than are run in this thread to start another one.
MOST = 60


def started(line: int) -> tuple[BaseException | None, bool, bool]:
    """Start a thread, and raise at a line on the way.

    Returns:
        What came of it, whether that line was reached, and whether the thread has run.
    """
    ran = threading.Event()
    thread = threading.Thread(target=ran.set, daemon=True)
    left = [line]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.endswith(("threading.py", "threads.py", "bells.py")):
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    raise Interrupted
            return trace
        return None

    error: BaseException | None = None
    sys.settrace(trace)
    try:
        start_thread(thread)
    except BaseException as caught:  # noqa: BLE001 - which one, that is the question
        error = caught
    sys.settrace(None)
    return error, left[0] <= 0, eventually(ran.is_set, 0.2 if error else 10)


def test_what_a_signal_raises_reaches_the_caller() -> None:
    """Not as an error of the thread's own that it is not; the last line lies behind the start."""
    for line in range(1, MOST + 1):
        error, was_reached, has_run = started(line)
        if was_reached:
            assert type(error) is Interrupted, line
        else:
            assert (error, has_run) == (None, True), line
    assert not was_reached


def test_too_many_threads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller knows what to do without one."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(threading.Thread(target=print))


def test_bell_that_was_rung_stays_rung_whatever_interrupts_a_wait() -> None:
    """Else whoever waits behind that would do so in vain."""
    for line in range(1, 12):
        bell = Bell()
        bell.ring()
        interrupt_at(line, partial(bell.wait, 1), "django_distlock.core.threads")
        assert bell.is_rung, line


def test_bell_that_is_rung_again_and_again_keeps_nothing() -> None:
    """It is rung by a thread that lives as long as its process."""
    bell = Bell()
    for _ in range(3):
        bell.ring()
    assert bell._rung.qsize() == 1
    bell.clear()
    assert not bell.is_rung


def test_bell_wakes_all_who_wait() -> None:
    """One after the other."""
    bell = Bell()
    # The longest waits are longer than Python can wait for.
    woken = [Later(bell.wait, 30 if number else 1e15) for number in range(5)]
    bell.ring()
    with prompt():
        for each in woken:
            each.result()
