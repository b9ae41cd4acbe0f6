"""What the bodies of tasks do, step by step, and what they tell the tests about it.

A test and its tasks share a folder: a body appends to a file what happens to it, and waits for
files that the test makes. Whether two runs of a key overlap is a lock of the kernel's to say,
which ends with the process that has it, and of which the locks under test know nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from django_distlock import BackendUnavailable, Lease, LockLost, current_lease
from django_distlock.core.clock import monotonic

#: Seconds that a body waits for a test that has forgotten it.
PATIENCE = 40
#: What is open when the test is over.
OVER = "over"


class Stage:
    """The folder that a test shares with the tasks of its key.

    Args:
        folder: Where it is.
        key: What only this test uses.
    """

    def __init__(self, folder: Path, key: str):
        self.folder = folder
        self.key = key

    def of(self, key: str) -> Stage:
        """Return that of another key."""
        return Stage(self.folder, key)

    def tell(self, event: str, **facts: Any) -> None:
        """Append what has happened."""
        line = json.dumps({"event": event, "at": monotonic(), "pid": os.getpid(), **facts})
        descriptor = os.open(self._path("told"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # One write to the end of a file is one line, whoever else writes.
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def told(self, *events: str, **facts: Any) -> list[dict[str, Any]]:
        """Return what has happened so far: all of it, or what is of a kind."""
        try:
            lines = self._path("told").read_text().splitlines()
        except FileNotFoundError:
            return []
        all_of_it: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [
            each
            for each in all_of_it
            if (not events or each["event"] in events)
            and all(each.get(name) == value for name, value in facts.items())
        ]

    def inside(self) -> list[dict[str, Any]]:
        """Return the runs that have begun and told of no end, killed ones among them."""
        runs: dict[tuple[int, str], dict[str, Any]] = {}
        for each in self.told("began", "ended", "failed"):
            run = (each["pid"], each["task_id"])
            if each["event"] == "began":
                runs[run] = each
            else:
                runs.pop(run, None)
        return list(runs.values())

    def change(self) -> None:
        """Change what runs look at."""
        with self._path("changes").open("a") as changes:
            changes.write("x")

    def changes(self) -> int:
        """Return how often that was done."""
        path = self._path("changes")
        return path.stat().st_size if path.exists() else 0

    def open(self, gate: str) -> None:
        """Let go on whoever waits for this."""
        self._path(gate).touch()

    def takes(self, gate: str) -> bool:
        """Be the first who finds this open, and close it."""
        try:
            self._path(gate).unlink()
        except FileNotFoundError:
            return False
        return True

    def wait(self, gate: str) -> None:
        """Wait until the test lets go on."""
        give_up = time.monotonic() + PATIENCE
        while not self._path(gate).exists():
            # Or what a failed test has left behind would stand in the way of the next one.
            if self._path(OVER).exists() or time.monotonic() > give_up:
                raise TimeoutError(f"nobody opened {gate!r}")
            time.sleep(0.02)

    @contextmanager
    def witnessed(self, **facts: Any) -> Iterator[None]:
        """Tell if another run of the key is inside of this block at the same time."""
        descriptor = os.open(self._path("witness"), os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.tell("overlapped", **facts)
            yield
        finally:
            # Which ends the kernel's lock, if this is the one that has it.
            os.close(descriptor)

    def busy(self) -> bool:
        """Say whether a run of the key is inside of its body right now."""
        descriptor = os.open(self._path("witness"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.key}.{name}"


@dataclass(frozen=True)
class Run:
    """What a step knows.

    Attributes:
        task: What `bind=True` gives.
        lease: The one that its body began with; None: there was none.
    """

    stage: Stage
    task: Any
    lease: Lease | None


def stage_of(key: str) -> Stage:
    """Give the stage of a key to what runs in a worker."""
    return Stage(Path(os.environ["DISTLOCK_TEST_STAGE"]), key)


def play(task: Any, key: str, steps: Sequence[str]) -> dict[str, Any]:
    """Be the body of a task: make the steps, and tell of them.

    Args:
        task: What `bind=True` gives.
        key: What its stage is called.
        steps: What to do, as a word and perhaps what it means: `"wait go"`, `"sleep 0.5"`.

    Returns:
        What the run knew of itself.
    """
    stage = stage_of(key)
    lease = current_lease()
    facts = {
        "task_id": task.request.id,
        "retries": task.request.retries,
        "redelivered": (task.request.delivery_info or {}).get("redelivered"),
        "lease": None if lease is None else lease.key,
        "fence": None if lease is None else lease.fence,
    }
    with stage.witnessed(**facts):
        stage.tell("began", **facts)
        try:
            run = Run(stage, task, lease)
            for step in steps:
                word, _, rest = step.partition(" ")
                STEPS[word](run, rest)
        except BaseException as error:
            stage.tell("failed", **facts, error=type(error).__name__)
            raise
        stage.tell("ended", **facts)
    return facts


def _sleep(run: Run, seconds: str) -> None:
    time.sleep(float(seconds))


def _spin(run: Run, seconds: str) -> None:
    """Compute, and hand over to nobody."""
    until = monotonic() + float(seconds)
    while monotonic() < until:
        pass


def _wait(run: Run, gate: str) -> None:
    run.stage.wait(gate)


def _clean_up(run: Run, gate: str) -> None:
    """Be told of the soft time limit, and need time to end."""
    try:
        run.stage.wait("never")
    except SoftTimeLimitExceeded:
        run.stage.tell("limited")
        run.stage.wait(gate)


def _raise(run: Run, text: str) -> None:
    raise ValueError(text)


def _unavailable(run: Run, rest: str) -> None:
    """Meet a store that is away, amid the work."""
    raise BackendUnavailable("away")


def _retry(run: Run, countdown: str) -> None:
    """Let Celery run the task again, unless this is already such a run."""
    if run.task.request.retries == 0:
        raise run.task.retry(countdown=float(countdown))


def _fail_until(run: Run, retries: str) -> None:
    if run.task.request.retries < int(retries):
        raise ConnectionError("again")


def _ignore(run: Run, rest: str) -> None:
    raise Ignore


def _reject(run: Run, rest: str) -> None:
    """Hand the message back: for good, or the first time."""
    if rest != "requeue":
        raise Reject("on purpose", requeue=False)
    if len(run.stage.told("began")) == 1:
        raise Reject("on purpose", requeue=True)


def _die(run: Run, rest: str) -> None:
    """Let this process be killed, the first time that the key runs."""
    if len(run.stage.told("began")) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _replace(run: Run, rest: str) -> None:
    """Let another message of the task take its place, and end when the test lets it."""
    gate, _, countdown = rest.partition(" ")
    again = run.task.si(run.stage.key, ["tell replaced"])
    with suppress(Ignore):
        run.task.replace(again.set(queue=_queue(run.task), countdown=float(countdown or 0)))
    run.stage.wait(gate)
    raise Ignore


def _check(run: Run, rest: str) -> None:
    """Tell whether the lease is still ours."""
    assert run.lease is not None
    try:
        run.lease.check()
    except LockLost:
        run.stage.tell("lost")
    else:
        run.stage.tell("held")


def _lose(run: Run, rest: str) -> None:
    """Wait until a beat has found out that the lease is lost."""
    assert run.lease is not None
    give_up = time.monotonic() + PATIENCE
    while not run.lease.is_lost and time.monotonic() < give_up:
        time.sleep(0.02)


def _handlers(run: Run, rest: str) -> None:
    """Tell who handles the signals that could interrupt a body."""
    numbers = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGVTALRM)
    run.stage.tell(
        "handlers", handlers={each.name: str(signal.getsignal(each)) for each in numbers}
    )


def _send(run: Run, name: str) -> None:
    """Send a task of the same key, which says that it is a child."""
    run.task.app.tasks[name].apply_async((run.stage.key, ["tell child"]), queue=_queue(run.task))


def _call(run: Run, name: str) -> None:
    """Call another task, with another key, as the function that it is."""
    run.task.app.tasks[name](f"{run.stage.key}:called", ["tell called"])


def _queue(task: Any) -> str:
    return str(task.request.delivery_info["routing_key"])


def _look(run: Run, sent_at: str) -> None:
    """Tell which changes this run has seen, and at which of them it was called."""
    run.stage.tell("saw", changes=run.stage.changes(), sent_at=int(sent_at))


def _tell(run: Run, event: str) -> None:
    run.stage.tell(event)


STEPS = {
    "call": _call,
    "check": _check,
    "clean_up": _clean_up,
    "die": _die,
    "fail_until": _fail_until,
    "handlers": _handlers,
    "ignore": _ignore,
    "look": _look,
    "lose": _lose,
    "raise": _raise,
    "unavailable": _unavailable,
    "reject": _reject,
    "replace": _replace,
    "retry": _retry,
    "send": _send,
    "sleep": _sleep,
    "spin": _spin,
    "tell": _tell,
    "wait": _wait,
}
