"""Celery's programs, forked from a process that has imported Celery and Django."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fork_server import Forked, fork

#: No program outlives its test by more, should the test itself be killed.
LIFETIME_SECONDS = 600


def start(arguments: Sequence[str], environment: dict[str, str], log: Path) -> Forked:
    """Start `celery` with arguments, in a session of its own; it writes to a file."""
    with log.open("wb") as output, Path(os.devnull).open() as nothing:
        return fork(f"{__name__}:celery", arguments, environment, nothing.fileno(), output.fileno())


def celery(*arguments: str) -> None:
    """Be `python -m celery`."""
    # So that the processes which it starts end with it.
    os.setsid()
    signal.alarm(LIFETIME_SECONDS)
    from celery.__main__ import __file__ as program
    from celery.__main__ import main

    sys.argv = [program, *arguments]
    sys.exit(main())


def end(process: Forked | subprocess.Popen[bytes]) -> None:
    """Kill a program and what it has started, as a machine that fails does."""
    # It is in no session of its own before it has begun.
    for kill in (os.killpg, os.kill):
        if process.poll() is None:
            try:
                kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()
