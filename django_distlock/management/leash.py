"""Ends a program after `distlock_run` was killed: run as a script, without any package.

A program that continues while its lease is not renewed would soon not be the only one. A killed
`distlock_run` cannot end the program itself, so another process does: it reads from a pipe, which
ends when `distlock_run` does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from pkgutil import get_data
from typing import Self

_OVER = "over"


class Leash:
    """Ends a program if this process ends first: by TERM and, `grace` seconds later, by KILL."""

    def __init__(self, grace: float):
        # A new session: signals to this process's group, or typed at its terminal, do not reach it.
        self._process = subprocess.Popen(  # noqa: S603 - this file
            [sys.executable, "-I", "-S", *script("leash.py"), str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def take(self, address: int) -> None:
        """Begin to watch a program: see `end`."""
        self._write(f"{address}\n")

    def let_off(self) -> None:
        """Watch nothing any more: the program has ended, or never ran."""
        self._write(f"{_OVER}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, let it end the program, because nothing waits for the program any more.
        if kind is None:
            self.let_off()
        with suppress(OSError):
            self._process.communicate()

    def _write(self, line: str) -> None:
        # The leash may have been killed, and the program needs it only if we are killed as well.
        with suppress(OSError):
            assert self._process.stdin  # noqa: S101 - it is a pipe
            self._process.stdin.write(line)
            self._process.stdin.flush()


def script(name: str) -> list[str]:
    """Return the arguments with which an interpreter runs a file of this folder."""
    path = Path(__file__).with_name(name)
    if path.is_file():
        return [str(path)]
    # Inside a zip, it is not a file.
    source = get_data(__package__, name)
    if source is None:
        raise FileNotFoundError(f"{name} cannot be read from where the package is imported.")
    return ["-c", source.decode()]


def send(address: int, signum: int) -> bool:
    """Send a signal to a process or, by its negative number, to a group; return whether it exists.

    A process of another user exists, but cannot be reached.
    """
    try:
        os.kill(address, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end(address: int, grace: float) -> None:
    """Send TERM to a process or a group; after `grace` seconds KILL, if it still exists."""
    if not send(address, signal.SIGTERM):
        return
    # A stopped process gets TERM only when it continues.
    send(address, getattr(signal, "SIGCONT", 0))
    until = time.monotonic() + grace
    while time.monotonic() < until:
        if not send(address, 0):
            return
        time.sleep(0.05)
    send(address, getattr(signal, "SIGKILL", signal.SIGTERM))


def main(grace: str) -> None:
    """Run as the other process."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    said = sys.stdin.read().split()
    if said and _OVER not in said:
        end(int(said[0]), float(grace))
        # After the end: the reader of standard error may have been killed with distlock_run.
        print("distlock_run was killed: its program was stopped.", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
