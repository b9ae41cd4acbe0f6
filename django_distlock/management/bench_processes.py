"""How a command starts another process of its project, and how signals interrupt it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

#: What interrupts a command, so that it clears up behind itself.
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


def program(command: str) -> list[str]:
    """Return what starts the project's commands: `manage.py`, where this process is one.

    Args:
        command: The one that this process runs.
    """
    by_path = getattr(sys.modules["__main__"], "__spec__", None) is None
    if by_path and sys.argv[1:2] == [command] and Path(sys.argv[0]).is_file():
        return [sys.executable, sys.argv[0]]
    return [sys.executable, "-m", "django"]


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Let signals interrupt the block, unless they are ignored.

    Yields:
        The numbers of those that came. What breaks off in the middle of a statement may raise an
        error of its own instead.

    Raises:
        KeyboardInterrupt: One came.
    """
    came: list[int] = []

    def interrupt(signum: int, _frame: Any) -> NoReturn:
        came.append(signum)
        raise KeyboardInterrupt(signum)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
        before = {each: signal.getsignal(each) for each in numbers}
    usual = (signal.SIG_DFL, signal.default_int_handler)
    ours = {each for each, handler in before.items() if handler in usual}
    for each in ours:
        signal.signal(each, interrupt)
    try:
        yield came
    finally:
        for each in ours:
            signal.signal(each, before[each])
