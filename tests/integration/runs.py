"""`manage.py distlock_run` in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.fork_server import Forked, fork
from tests.processes import django_admin

from .projects import PATIENCE, Project


class Run:
    """`distlock_run` with these arguments. Leaving the block ends it.

    Args:
        terminal: Let it have a terminal, and be in its foreground; else it has none.
        ignored: A signal that is ignored where it begins, as HUP is under `nohup`.
    """

    def __init__(
        self,
        project: Project,
        *arguments: str,
        terminal: bool = False,
        ignored: signal.Signals | None = None,
    ):
        if terminal:
            self._ours, theirs = pty.openpty()
            self._open, says = [self._ours], theirs
        else:
            theirs, writes = os.pipe()
            self._ours, says = os.pipe()
            self._open = [writes, self._ours]
        self.popen = fork(
            f"{__name__}:main",
            [terminal, ignored, "distlock_run", *arguments],
            {**os.environ, **project._environment()},
            theirs,
            says,
            module="django_distlock.management.commands.distlock_run",
        )
        for each in {theirs, says}:
            os.close(each)
        os.set_blocking(self._ours, False)
        self._give_up = time.monotonic() + PATIENCE
        self.said = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.popen.kill()
        self.popen.wait()
        for each in self._open:
            os.close(each)

    def says(self, text: str, times: int = 1) -> str:
        """Wait until it has said this; return what it has said behind it in the line."""
        while self.said.count(text) < times or "\n" not in self.said.rpartition(text)[2]:
            assert self._read(), f"ended before it said {text!r}:\n{self.said}"
        return self.said.rpartition(text)[2].partition("\n")[0].strip()

    def types(self, text: str) -> None:
        """Write to its standard input."""
        os.write(self._open[0], text.encode())

    def close(self) -> None:
        """Read nothing more."""
        self._open.remove(self._ours)
        os.close(self._ours)

    def signal(self, signum: int) -> None:
        """Send a signal to it, and to nobody else."""
        os.kill(self.popen.pid, signum)

    def status(self) -> int:
        """Wait for its end; return its status."""
        while self._read():
            pass
        return self.popen.wait(max(0.1, self._give_up - time.monotonic()))

    def _read(self) -> bool:
        """Take in what it says; return whether there may be more."""
        left = self._give_up - time.monotonic()
        assert select.select([self._ours], [], [], max(0, left))[0], f"in time only:\n{self.said}"
        try:
            data = os.read(self._ours, 65536)
        except OSError:
            return False  # The other end of a terminal was closed.
        self.said += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


@contextmanager
def started(project: Project, *arguments: str) -> Iterator[tuple[Forked, IO[str]]]:
    """Run a command of a project, which hears signals; kill it if it has not ended by itself."""
    said, says = os.pipe()
    environment = {**os.environ, **project._environment()}
    with Path(os.devnull).open() as nothing, os.fdopen(said) as output:
        try:
            process = fork(
                f"{__name__}:main", [False, None, *arguments], environment, nothing.fileno(), says
            )
        finally:
            os.close(says)
        try:
            yield process, output
        finally:
            process.kill()
            process.wait()


def main(terminal: bool, ignored: int | None, *arguments: str) -> None:
    """Be `python -m django`, in a session of its own."""
    # Or it would have the terminal of whoever runs the tests, if there is one.
    os.setsid()
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Whoever runs the tests in the background has them ignored, which processes inherit.
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN if each == ignored else signal.SIG_DFL)
    if ignored != signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    django_admin(*arguments)


def eventually(is_so: Callable[[], bool], what: str = "it is so") -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.02)


def state_of(pid: int) -> str:
    """Return a letter for what a process does: "T" if it is stopped, "" if it is gone."""
    told = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, text=True, check=False
    )
    state = told.stdout.strip()[:1]
    return "" if state == "Z" else state


def children_of(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    told = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True, check=True
    )
    pairs = [line.split() for line in told.stdout.splitlines()]
    return {int(child) for child, parent in pairs if int(parent) == pid}


def end(pid: int) -> None:
    """Kill what a test has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
