"""The story of a worker that is paused, of its successor, and of a write that comes too late."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django_distlock import lock_backends
from shop.competition import MANAGE, Stuck

#: What the first worker's lease lives without a sign of life. A second later it is given away.
TTL_SECONDS = 2

#: No story takes longer; most take five seconds.
LIMIT_SECONDS = 60


def is_possible() -> bool:
    """Whether processes can be paused here, and leases end by themselves: a session's do not."""
    return hasattr(signal, "SIGSTOP") and lock_backends["default"].supports_ttl


@dataclass(frozen=True)
class Step:
    """What a worker did, when (seconds since the beginning), and under which fence."""

    at: float
    worker: str
    pid: int
    fence: int | None
    text: str
    is_refusal: bool = False


class Worker:
    """A process that captures a payment, step by step.

    Args:
        name: What it is called in the story.
        group: The process group that it joins; 0: one of its own.
    """

    def __init__(self, name: str, pk: int, *options: str, group: int = 0):
        self.name = name
        self.fence: int | None = None
        # A group apart from the terminal's: Ctrl-C is for us, who then end the workers. And if we
        # end first, even by SIGKILL, the kernel continues what is paused and hangs up on its group.
        self.process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, str(MANAGE), "capture", str(pk), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=group,
        )

    def wait_for(self, step: str) -> None:
        """Return when it says that it has come so far.

        Raises:
            Stuck: It said something else, or ended.
        """
        assert self.process.stdout  # noqa: S101 - asked for
        line = self.process.stdout.readline()
        said: dict[str, Any] = json.loads(line) if line else {"step": "gone"}
        if said["step"] != step:
            raise Stuck(f"The {self.name} worker should be {step}, but is {said['step']}.")
        self.fence = said["fence"]

    def answer(self) -> None:
        """Answer it for the provider."""
        assert self.process.stdin  # noqa: S101 - asked for
        # One that has failed reads nothing any more; what it said last tells.
        with suppress(BrokenPipeError):
            self.process.stdin.write("yes\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """End it, whether it runs, is paused or has ended, and wait for that."""
        self.process.kill()
        self.process.wait()


class Story:
    """What becomes of a payment whose first worker stands still for too long.

    It happens in a thread of its own, which no Ctrl-C breaks into: between the start of a worker
    and its entry in the list of those to end, for instance.

    Args:
        on_step: Called in that thread, at every step.

    Attributes:
        pk: The payment.
        steps: What has happened so far.
        failure: Why it did not come to its end.
    """

    def __init__(self, pk: int, on_step: Callable[[Step], object] = lambda step: None):
        self.pk = pk
        self.steps: list[Step] = []
        self.failure = ""
        self._on_step = on_step
        self._began = time.monotonic()
        self._workers: list[Worker] = []
        self._is_stopped = False
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether there is more to come."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Let it happen."""
        self._thread.start()

    def wait(self) -> None:
        """Return when it is over, and no process is left."""
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """End it before its end."""
        with self._mutex:
            self._is_stopped = True
            for worker in self._workers:
                worker.end()

    def _run(self) -> None:
        alarm = threading.Timer(LIMIT_SECONDS, self.stop)
        alarm.daemon = True
        alarm.start()
        try:
            self._happen()
        except (OSError, ValueError) as error:
            self.failure = f"A worker failed: {error}"
        except Stuck as error:
            self.failure = str(error)
        finally:
            alarm.cancel()
            self.stop()
            for worker in self._workers:
                with suppress(BrokenPipeError), worker.process:
                    pass  # which closes its pipes

    def _happen(self) -> None:
        first = self._start("first", "--ttl", str(TTL_SECONDS))
        first.wait_for("asking")
        self._note(first, "acquires the lock, reads, asks the provider")
        first.process.send_signal(signal.SIGSTOP)
        self._note(first, "is paused, together with its heartbeat")

        second = self._start("second", group=first.process.pid)
        second.wait_for("asking")
        self._note(second, "takes the lock over after the lease expired")
        second.answer()
        second.wait_for("captured")
        self._note(second, "captures the payment")

        first.answer()
        first.process.send_signal(signal.SIGCONT)
        first.wait_for("refused")
        self._note(first, "resumes, and its stale write is refused", is_refusal=True)
        # It has more to do: what was refused is noted for the operator as it ends.
        first.process.wait()

    def _start(self, name: str, *options: str, group: int = 0) -> Worker:
        with self._mutex:
            if self._is_stopped:
                raise Stuck(f"The story was stopped before the {name} worker.")
            worker = Worker(name, self.pk, *options, group=group)
            self._workers.append(worker)
        return worker

    def _note(self, worker: Worker, text: str, *, is_refusal: bool = False) -> None:
        at, pid = time.monotonic() - self._began, worker.process.pid
        step = Step(at, worker.name, pid, worker.fence, text, is_refusal)
        self.steps.append(step)
        self._on_step(step)


#: The last one that this process has begun for a page.
_stories: deque[Story] = deque(maxlen=1)
_mutex = threading.Lock()


def latest() -> Story | None:
    """Return the story that runs, or the last one that did."""
    return _stories[0] if _stories else None


def begin(pk: int) -> bool:
    """Let a story happen in the background; return False if there is one that runs."""
    with _mutex:
        last = latest()
        if last is not None and last.is_running:
            return False
        story = Story(pk)
        story.start()
        _stories.append(story)
    return True
