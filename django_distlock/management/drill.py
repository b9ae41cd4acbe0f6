"""The drill: suspends a holder past the end of its lease, and shows that its write is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ..backends.base import BaseLockBackend
from ..core.errors import FenceRejected, LockLost, LockNotAcquired, LockUsageError
from ..core.records import Record
from ..handler import lock_backends
from ..locks.lease import Lease
from ..locks.lock import distlock
from .leash import send
from .targets import leave_nothing, target_of

COMMAND = "distlock_drill"
#: Seconds that the holder's lease lives without a renewal.
TTL = 2.0
#: The start of the other process's lines: settings may print lines, too.
_MARK = f"{COMMAND}: "
#: No drill takes longer than this, in seconds; most take five.
LIMIT = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """What a process did, when (in seconds since the beginning), and under which fence."""

    at: float
    process: str
    pid: int
    fence: int | None
    text: str


def refuse_impossible(store: BaseLockBackend) -> None:
    """Refuse a backend on which no drill is possible, before any process is started."""
    if not hasattr(signal, "SIGSTOP"):
        raise LockUsageError("This operating system cannot suspend and resume a process.")
    if not store.supports_ttl:
        raise LockUsageError(
            f"The lock backend {store.alias!r} has no lease expiry. A suspended holder keeps its"
            " key, and nobody can take it over."
        )
    if store.config.max_ttl < TTL:
        raise LockUsageError(
            f"The lock backend {store.alias!r} has a MAX_TTL of {store.config.max_ttl:g} s, and"
            f" the leases of a drill live for {TTL:g} s."
        )
    store.counter("distlock-drill")


class Drill:
    """One drill, on a key of its own, with its steps so far.

    Attributes:
        promises: The promises of locks, and whether each was kept.
    """

    def __init__(self, store: BaseLockBackend, key: str, on_step: Callable[[Step], object]):
        self.steps: list[Step] = []
        self.promises: dict[str, bool] = {}
        self._store = store
        self._key = key
        self._target = target_of(store, key)
        self._on_step = on_step
        self._began = time.monotonic()

    @property
    def refused_by(self) -> str:
        """The name of the target of the writes."""
        return self._target.name

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "backend": self._store.alias,
            "key": self._key,
            "ttl": TTL,
            "passed": all(self.promises.values()),
            "target": self.refused_by,
            "steps": [asdict(each) for each in self.steps],
            "promises": [{"promise": text, "kept": kept} for text, kept in self.promises.items()],
        }

    def run(self) -> None:
        """Run the drill. It leaves only the fence counter of its key, and events."""
        with ExitStack() as stack:
            stack.callback(leave_nothing, self._store, self._key, self._target)
            late = stack.enter_context(Late(self._store.alias, self._key, LIMIT))
            late.wait_for("holding")
            self._of(late, f"acquires the lock with a ttl of {TTL:g} s, and renews it")
            late.stop()
            self._of(late, "is suspended in the middle of its work, together with its heartbeat")
            lease = self._take_over(late, stack)
            if lease is None:
                return
            self._write(lease)
            late.go_on()
            self._of(late, "resumes, and writes without a check of its lease")
            said = late.wait_for("refused", "written")
            self._of(late, said.get("why", "has written, and its write was not refused"))
            late.wait()
            self._judge(lease, said)

    def _take_over(self, late: Late, stack: ExitStack) -> Lease | None:
        """Wait until the lease of `late` has expired, and acquire the lock."""
        before = self._store.read(self._key)
        if before is not None:
            self._ours(
                None,
                "waits for the lock until the lease has expired and the grace of 1 s has passed",
            )
        longest = min(LIMIT, self._store.config.max_ttl)
        lock = distlock(self._key, ttl=longest, wait=LIMIT / 2, backend=self._store.alias)
        granted = "the next holder is granted the lock after the lease has expired"
        self.promises[granted] = False
        try:
            lease = lock.acquire()
        except LockNotAcquired as error:
            self._ours(None, str(error))
            return None
        stack.callback(lease.release)
        self._ours(lease, "takes over")
        self.promises[granted] = True
        self.promises["and not before"] = _is_behind(lease, before)
        self.promises["its fence is higher"] = late.fence is not None and late.fence < lease.fence
        return lease

    def _write(self, lease: Lease) -> None:
        said, is_written = f"writes to {self._target.name}", True
        try:
            self._target.write(lease)
        except FenceRejected as error:
            said, is_written = str(error), False
        self._ours(lease, said)
        self.promises["the new holder writes"] = is_written

    def _judge(self, lease: Lease, said: dict[str, Any]) -> None:
        """Judge the late write, and both leases."""
        stands = self._target.fence() == lease.fence
        record = self._store.read(self._key)
        held = record is not None and record.fence == lease.fence and not lease.is_lost
        self.promises |= {
            "the stale write is refused": said["step"] == "refused" and stands,
            "the lease of the stale holder is lost": said["is_lost"],
            "the stale holder does not release the new holder's lock": held,
        }

    def _of(self, late: Late, text: str) -> None:
        self._note("first", late.pid, late.fence, text)

    def _ours(self, lease: Lease | None, text: str) -> None:
        self._note("second", os.getpid(), None if lease is None else lease.fence, text)

    def _note(self, process: str, pid: int, fence: int | None, text: str) -> None:
        at = round(time.monotonic() - self._began, 3)
        self.steps.append(Step(at, process, pid, fence, text))
        self._on_step(self.steps[-1])


def _is_behind(lease: Lease, before: Record | None) -> bool:
    """Whether a lease began after the previous one, as read, had ended; by the store's clock."""
    return before is None or before.free_at is None or before.free_at <= lease.acquired_at


class Stuck(Exception):
    """The other process failed in its part; `status`: its exit status, None: it was killed."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Other:
    """Another process that runs this command. Leaving its block ends it, as do `limit` seconds."""

    def __init__(self, arguments: Sequence[str], limit: float):
        # A group apart from the terminal's: Ctrl-C reaches only us, and we end the process. If we
        # end first, even by SIGKILL, its input ends; if it is stopped, the kernel sends it SIGHUP.
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
        # Not by `Popen`: an exception during its `send_signal`, such as Ctrl-C, may leave its lock
        # acquired, and then no thread can wait for the process any more.
        if self._process.returncode is None:
            send(self.pid, signum)

    def said(self) -> Iterator[dict[str, Any]]:
        """Yield the reports of the process, until it ends. Skip a half line that a kill left."""
        assert self._process.stdout  # noqa: S101 - asked for
        for line in self._process.stdout:
            if line.startswith(_MARK) and line.endswith("\n"):
                yield json.loads(line.removeprefix(_MARK))

    def let_go(self) -> None:
        """End the input of the process."""
        assert self._process.stdin  # noqa: S101 - asked for
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self) -> int:
        """Wait for the process's end; return its exit status; below 0: the signal."""
        return self._process.wait()


class Late(Other):
    """A process that acquires a lock, and writes under its fence when it is told to."""

    def __init__(self, alias: str, key: str, limit: float):
        self.fence: int | None = None
        super().__init__(["--backend", alias, "--late", key], limit)

    def wait_for(self, *steps: str) -> dict[str, Any]:
        """Return the report of the first of these steps; `Stuck`: the process ended before."""
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
        """Suspend the process with all of its threads, and wait until it is suspended."""
        self.send(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Let the process continue, and write as soon as it does."""
        assert self._process.stdin  # noqa: S101 - asked for
        with suppress(BrokenPipeError):
            self._process.stdin.write("write\n")
            self._process.stdin.flush()
        self.send(signal.SIGCONT)


def _program() -> list[str]:
    """Return how to start the project's commands: by `manage.py`, if this process was."""
    by_path = getattr(sys.modules["__main__"], "__spec__", None) is None
    if by_path and sys.argv[1:2] == [COMMAND] and Path(sys.argv[0]).is_file():
        return [sys.executable, sys.argv[0]]
    return [sys.executable, "-m", "django"]


def line_of(**said: Any) -> str:
    """Return a line with a report of the other process: see `Other.said`."""
    return _MARK + json.dumps(said)


def be_late(alias: str, key: str, write: Callable[[str], object]) -> None:
    """Run as the late process: acquire the lock, and write when told to, without a check."""

    def say(step: str, fence: int, **more: Any) -> None:
        write(line_of(step=step, fence=fence, **more))

    target = target_of(lock_backends[alias], key)
    # The drill makes the block lose its lease.
    with suppress(LockLost), distlock(key, ttl=TTL, wait=0, backend=alias) as lease:
        say("holding", lease.fence)
        if not sys.stdin.readline():
            return  # The process that started us has ended.
        try:
            target.write(lease)
        except FenceRejected as error:
            say("refused", lease.fence, why=str(error), is_lost=lease.is_lost)
        else:
            say("written", lease.fence, is_lost=lease.is_lost)
