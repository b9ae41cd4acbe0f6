"""`manage.py distlock_run` in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self

from .projects import PATIENCE, ROOT, Project

#: What a shell does as the session's leader, before it becomes the command.
_AT_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Run:
    """`distlock_run` with these arguments. Leaving the block ends it.

    Args:
        terminal: Let it have a terminal, and be in its foreground; else it has none.
        files: Open files that it inherits.
        ignored: A signal that is ignored where it begins, as HUP is under `nohup`.
    """

    def __init__(
        self,
        project: Project,
        *arguments: str,
        terminal: bool = False,
        files: tuple[int, ...] = (),
        ignored: signal.Signals | None = None,
    ):
        command = ["-u", "-m", "django", "distlock_run", *arguments]
        self._at_terminal = terminal
        theirs = subprocess.PIPE
        if terminal:
            self._ours, theirs = pty.openpty()
            command = ["-c", _AT_TERMINAL, *command]
        self.popen = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **project._environment()},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if terminal else subprocess.STDOUT,
            # Or it would have the terminal of whoever runs the tests, if there is one.
            start_new_session=True,
            pass_fds=files,
            preexec_fn=partial(hear_signals, ignored),  # noqa: PLW1509 - it touches no lock
        )
        if terminal:
            os.close(theirs)
        else:
            assert self.popen.stdout
            self._ours = self.popen.stdout.fileno()
        fcntl.fcntl(self._ours, fcntl.F_SETFL, os.O_NONBLOCK)
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
        if self._at_terminal:
            os.close(self._ours)
            return
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def says(self, text: str, times: int = 1) -> str:
        """Wait until it has said this; return what it has said behind it in the line."""
        while self.said.count(text) < times or "\n" not in self.said.rpartition(text)[2]:
            assert self._read(), f"ended before it said {text!r}:\n{self.said}"
        return self.said.rpartition(text)[2].partition("\n")[0].strip()

    def types(self, text: str) -> None:
        """Write to its standard input."""
        if self._at_terminal:
            os.write(self._ours, text.encode())
            return
        assert self.popen.stdin
        self.popen.stdin.write(text.encode())
        self.popen.stdin.flush()

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
def started(project: Project, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command of a project, which hears signals; kill it if it has not ended by itself."""
    with subprocess.Popen(
        [sys.executable, "-m", "django", *arguments],
        cwd=ROOT,
        env={**os.environ, **project._environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_signals,  # noqa: PLW1509 - it touches no lock
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def eventually(is_so: Callable[[], bool], what: str = "it is so") -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.02)


def hear_signals(ignored: signal.Signals | None = None) -> None:
    """Let a process that begins hear all signals but one."""
    # Whoever runs the tests in the background has them ignored, which processes inherit.
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN if each is ignored else signal.SIG_DFL)


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
