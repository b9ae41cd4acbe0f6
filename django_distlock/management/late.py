"""Another process of the drill: it holds a lock, is stopped under it, and writes too late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ..core.errors import FenceRejected, LockLost
from ..handler import lock_backends
from ..locks.lock import distlock
from .leash import send
from .targets import target_of

COMMAND = "distlock_drill"
#: Seconds that its lease lives without a sign of life.
TTL = 2.0
#: What its lines start with: settings may print, too.
_MARK = f"{COMMAND}: "


class Stuck(Exception):
    """The other process did not do what it was to do; `status`: its end, None: it was ended."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Other:
    """Another process that runs this command. Leaving its block ends it, as do `limit` seconds."""

    def __init__(self, arguments: Sequence[str], limit: float):
        # A group apart from the terminal's: Ctrl-C is for us, who then end it. And if we end first,
        # even by SIGKILL, its input ends, or the kernel hangs up on it where it is stopped.
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [*_program(), COMMAND, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each or "." for each in sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.pid = self._process.pid
        self._alarm = threading.Timer(limit, self.send, [signal.SIGKILL])
        self._alarm.daemon = True
        self._alarm.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._alarm.cancel()
        self.send(signal.SIGKILL)
        with suppress(BrokenPipeError), self._process:
            pass  # which closes its pipes, and waits

    def send(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        # Not by `Popen`: what raises amid its `send_signal`, as Ctrl-C does, may leave its lock
        # taken, and then nobody can wait for the process any more.
        if self._process.returncode is None:
            send(self.pid, signum)

    def said(self) -> Iterator[dict[str, Any]]:
        """Yield what it says, until it ends. What a killed one has half said is left out."""
        assert self._process.stdout  # noqa: S101 - asked for
        for line in self._process.stdout:
            if line.startswith(_MARK) and line.endswith("\n"):
                yield json.loads(line.removeprefix(_MARK))

    def let_go(self) -> None:
        """End its input."""
        assert self._process.stdin  # noqa: S101 - asked for
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self) -> int:
        """Return what it has ended with; below 0: the signal."""
        return self._process.wait()


class Late(Other):
    """A process that takes a lock, and writes under its fence when it is told to."""

    def __init__(self, alias: str, key: str, limit: float):
        self.fence: int | None = None
        super().__init__(["--backend", alias, "--late", key], limit)

    def wait_for(self, *steps: str) -> dict[str, Any]:
        """Return what it says when it has come to one of these steps; `Stuck`: it ended before."""
        for said in self.said():
            if said["step"] in steps:
                self.fence = said["fence"]
                return said
        status = self.wait()
        raise Stuck(
            f"The first process ended before this step: {' or '.join(steps)} (exit status"
            f" {status}).",
            status if status >= 0 else None,
        )

    def stop(self) -> None:
        """Let it stand still, with all of its threads."""
        self.send(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Let it write, the moment that it goes on."""
        assert self._process.stdin  # noqa: S101 - asked for
        with suppress(BrokenPipeError):
            self._process.stdin.write("write\n")
            self._process.stdin.flush()
        self.send(signal.SIGCONT)


def _program() -> list[str]:
    """Return what starts the project's commands: `manage.py`, where this process is one."""
    by_path = getattr(sys.modules["__main__"], "__spec__", None) is None
    if by_path and sys.argv[1:2] == [COMMAND] and Path(sys.argv[0]).is_file():
        return [sys.executable, sys.argv[0]]
    return [sys.executable, "-m", "django"]


def line_of(**said: Any) -> str:
    """Return the line by which the other process says something: see `Other.said`."""
    return _MARK + json.dumps(said)


def be_late(alias: str, key: str, write: Callable[[str], object]) -> None:
    """Be that process: take the lock, and write when told to, without a look at the lease."""

    def say(step: str, fence: int, **more: Any) -> None:
        write(line_of(step=step, fence=fence, **more))

    target = target_of(lock_backends[alias], key)
    # It is lost in the middle: that is what this is about.
    with suppress(LockLost), distlock(key, ttl=TTL, wait=0, backend=alias) as lease:
        say("holding", lease.fence)
        if not sys.stdin.readline():
            return  # Whoever started us is gone.
        try:
            target.write(lease)
        except FenceRejected as error:
            say("refused", lease.fence, why=str(error), is_lost=lease.is_lost)
        else:
            say("written", lease.fence, is_lost=lease.is_lost)
