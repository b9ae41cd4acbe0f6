"""Finds programs to run under a lock, starts them, sends them signals, and waits for their end."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

from django.core.management.base import CommandError

from .leash import script, send
from .statuses import NOT_EXECUTABLE, NOT_FOUND

#: The signals that are passed on to the program, as far as they exist here.
PASSED_ON = [
    getattr(signal, name)
    for name in (
        "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT",
    )
    if hasattr(signal, name)
]  # fmt: skip
#: Whether the system can report the end of a process without reaping it: macOS from Python 3.13.
_TELLS_ENDS = hasattr(os, "waitid")
#: Seconds between two looks at the program and its lease.
_LOOK_SECONDS = 1.0
_STOP = getattr(signal, "SIGTSTP", None)
_CONTINUE = getattr(signal, "SIGCONT", None)
#: What a terminal sends to all processes in its foreground.
_TYPED = {signal.SIGINT, getattr(signal, "SIGQUIT", None), _STOP}


def find(name: str) -> str:
    """Return the path of a program, as a shell would find it; or end with status 126 or 127."""
    found = shutil.which(name)
    if found is not None:
        return found
    folders = [""] if os.path.dirname(name) else os.get_exec_path()  # noqa: PTH120 - "./x" has one
    if name and any(Path(folder, name).exists() for folder in folders):
        raise CommandError(f"{name!r} is not executable.", returncode=NOT_EXECUTABLE)
    raise CommandError(f"Program not found: {name!r}.", returncode=NOT_FOUND)


def _cannot_run(path: str, error: OSError) -> CommandError:
    status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return CommandError(f"{path!r} cannot be run: {error}", returncode=status)


class Program:
    """A program with the standard streams of this process. It starts at `let_go`: see `gate`.

    On Windows, it starts immediately.

    If this process has a terminal, the program is in its group: signals typed there reach both.
    Otherwise the program has a group of its own, and signals are sent to the whole group.

    Args:
        command: Name and arguments.
        path: From `find`.

    Attributes:
        address: Where signals are sent: a process, or by its negative number a group.
    """

    def __init__(self, command: Sequence[str], path: str, environment: Mapping[str, str]):
        # Windows always counts as having a terminal, and has no groups to make.
        self._has_group = os.name == "posix" and _ask_terminal() is None
        self._path = path
        self._gate: tuple[int, int] | None = None
        try:
            if os.name == "posix":
                self._process = self._start_waiting(command, environment)
            else:
                self._process = subprocess.Popen(  # noqa: S603 - what the user asked for, no shell
                    command, executable=path, env=environment, close_fds=False
                )
        except OSError as error:
            raise _cannot_run(path, error) from error
        pid = self._process.pid
        self.address = -pid if self._has_group else pid

    def _start_waiting(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        told, tell = os.pipe()
        failure, failed = os.pipe()
        self._gate = tell, failure
        keeps_locale = str(int("LC_CTYPE" in environment))
        try:
            for each in (told, failed):
                os.set_inheritable(each, True)
            return subprocess.Popen(  # noqa: S603 - the same, behind its gate
                [
                    sys.executable, "-I", "-S", *script("gate.py"),
                    str(told), str(failed), keeps_locale, self._path, *command,
                ],
                env=environment,
                # Descriptors opened for us on purpose are for the program: `3>file`, sd_listen_fds.
                close_fds=False,
                process_group=0 if self._has_group else None,
            )  # fmt: skip
        except OSError:
            os.close(tell)
            os.close(failure)
            raise
        finally:
            os.close(told)
            os.close(failed)

    def let_go(self) -> None:
        """Let the program run; or end with 126 or 127 if the system cannot run it."""
        if self._gate is None:
            return
        tell, failure = self._gate
        with suppress(BrokenPipeError):  # It may have been killed.
            os.write(tell, b"!")
        os.close(tell)
        with os.fdopen(failure, "rb") as told:
            number = told.read()
        if number:
            self._process.wait()
            error = OSError(int(number), os.strerror(int(number)), self._path)
            raise _cannot_run(self._path, error) from error

    def send(self, signum: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.is_running:
            send(self.address, signum)

    def wait(self) -> int:
        """Wait for the program's end; return its exit status, or 128 plus a signal's number."""
        status = self._process.wait()
        return 128 - status if status < 0 else status

    @property
    def is_running(self) -> bool:
        """Whether the program has not ended."""
        if self._process.returncode is not None or not _TELLS_ENDS:
            return self._process.poll() is None
        # Not `poll()`: if two threads call it at the same time, one is told that the program runs.
        try:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False  # Another thread waits for the program, and has reaped it.
        return ended is None

    def shares_foreground(self) -> bool:
        """Whether signals typed at the terminal reach the program without us."""
        if self._has_group:
            return False
        return os.name != "posix" or _ask_terminal() == os.getpgrp()


class Signals:
    """The handling of signals by this process, in a block around the life of a program.

    Before the program runs, a signal ends this process with 128 plus its number, and unwinds its
    work. While the program runs, signals are passed on; afterwards they are ignored. A signal that
    was ignored before stays ignored, here and in the program.
    """

    def __init__(self) -> None:
        self._wake: tuple[int, int] | None = None
        self._wake_before = -1
        self._state: Literal["ending", "starting", "running", "over"] = "ending"
        self._early: list[int] = []
        self._before: dict[int, Any] = {}
        self._program: Program | None = None
        self._before_continuing: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        for signum in PASSED_ON:
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                self._before[signum] = signal.signal(signum, self._handle)
        if os.name == "posix":
            # Even if it was ignored: the exit status of the program would then be lost.
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
            self._wake = os.pipe()
            for end in self._wake:
                os.set_blocking(end, False)
            self._wake_before = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._wake is not None:
            signal.set_wakeup_fd(self._wake_before)
            for end in self._wake:
                os.close(end)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def wait_for(self, program: Program, look: Callable[[], None]) -> int:
        """Wait for the end of a program, calling `look` regularly; return its exit status."""
        # Python runs handlers between two steps of a program. If a signal came just before a wait
        # for a process, its handler would wait as well. The pipe wakes us for each signal.
        while self._wake is not None and program.is_running:
            select.select([self._wake[0]], [], [], _LOOK_SECONDS)
            with suppress(BlockingIOError):
                os.read(self._wake[0], 4096)
            look()
        return program.wait()

    def keep(self) -> None:
        """Keep signals for the program, which is about to start."""
        self._state = "starting"

    def pass_on(self, program: Program, before_continuing: Callable[[], None]) -> None:
        """Pass on signals, kept ones first; call back before a stopped program continues."""
        self._program, self._before_continuing = program, before_continuing
        self._state = "running"
        while self._early:
            self._handle(self._early.pop(0), None)

    def ignore(self) -> None:
        """Ignore signals: the program has ended, and the lock is being released."""
        self._state = "over"

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self._state == "starting":
            self._early.append(signum)
        elif self._state == "running" and self._program is not None:
            self._pass_on(self._program, signum)
        elif self._state == "ending" and signum == _STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._state == "ending" and signum != _CONTINUE:
            raise SystemExit(128 + signum)

    def _pass_on(self, program: Program, signum: int) -> None:
        if signum == _CONTINUE:
            self._before_continuing()
        if signum not in _TYPED or not program.shares_foreground():
            program.send(signum)
        elif signum == _STOP and os.getpid() != 1:
            # Not as a container's first process: it cannot be stopped, so its program would never
            # be continued. A shell considers a job stopped when we are. The program must not go on
            # without us, however it handles TSTP, because its lock is not renewed.
            program.send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)


def _ask_terminal() -> int | None:
    """Return the foreground group of our terminal; None: we have no terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return os.tcgetpgrp(terminal)
    except OSError:
        return None
    finally:
        os.close(terminal)
