"""Workers of Celery as they run in production: processes of their own, with pools of each kind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connections

from tests.contract.helpers import PATIENCE
from tests.fork_server import Forked
from tests.integration.runs import children_of
from tests.setups.servers import LIMITED

from . import programs
from .brokers import Broker

ROOT = Path(__file__).parents[2]


class Worker:
    """A worker that runs.

    Attributes:
        queue: The queue that it listens to.
        name: What it is called among the workers of a broker.
    """

    def __init__(self, process: Forked | subprocess.Popen[bytes], queue: str, name: str, log: Path):
        self.process = process
        self.queue = queue
        self.name = name
        self._log = log
        self._started = time.monotonic()

    @property
    def pid(self) -> int:
        """The number of its main process."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether its main process has not ended."""
        return self.process.poll() is None

    @property
    def is_old(self) -> bool:
        """Whether its alarm may end it amid a further test."""
        return time.monotonic() - self._started > programs.LIFETIME_SECONDS / 2

    def children(self) -> list[int]:
        """Return the numbers of the processes that run its tasks."""
        return sorted(children_of(self.pid))

    def said(self) -> str:
        """Give what it has written."""
        return self._log.read_text(errors="replace")

    def signal(self, name: str) -> None:
        """Send a signal to its main process."""
        self.process.send_signal(signal.Signals[f"SIG{name}"])

    def wait(self, timeout: float = PATIENCE) -> None:
        """Wait for its end."""
        self.process.wait(timeout)

    def kill(self) -> None:
        """Kill it with all of its children, as a machine that fails does."""
        programs.end(self.process)


@contextmanager
def working(home: Path, broker: Broker, **options: Any) -> Iterator[Worker]:
    """Run a worker until the block ends, from when it takes tasks: see `start_worker`."""
    worker = start_worker(home, broker, **options)
    try:
        wait_until_ready(home, worker)
        yield worker
    finally:
        # In peace, it would take seconds.
        worker.kill()


def start_worker(
    home: Path,
    broker: Broker,
    *,
    pool: str = "prefork",
    slots: int = 1,
    queue: str = "",
    settings: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> Worker:
    """Start a worker, and leave it alone.

    Args:
        home: A folder for what it writes, and for the stages of its tasks.
        broker: Where its messages come from.
        pool: What runs its tasks: `prefork`, `threads`, `gevent`, `solo`.
        slots: How many tasks it runs at once.
        queue: The queue that it listens to; "": one of its own.
        settings: More of Celery's settings.
        environment: More of its environment.
    """
    name = f"w{secrets.token_hex(4)}"
    queue = queue or name
    log = home / f"{name}.log"
    configured = {**broker.settings, **(settings or {})}
    arguments = [
        "-A", "tests.celery.project", "worker",
        "--pool", pool, "--concurrency", str(slots), "--queues", queue,
        "--hostname", f"{name}@tests", "--loglevel", "INFO",
        "--without-gossip", "--without-mingle", "--without-heartbeat",
    ]  # fmt: skip
    variables = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DISTLOCK_TEST_DATABASES": json.dumps(
            {"default": str(connections["default"].settings_dict["NAME"])}
        ),
        "DISTLOCK_TEST_CELERY": json.dumps(configured),
        "DISTLOCK_TEST_STAGE": str(home),
        "DISTLOCK_TEST_READY": str(home / f"{name}.ready"),
        "PYTHONPATH": str(ROOT),
        # What a killed child leaves open is not ours to close.
        "PYTHONDEVMODE": "",
        "PYTHONUNBUFFERED": "1",
        **(environment or {}),
    }
    # Greenlets come before all else that is imported.
    start = _start_anew if pool == "gevent" else programs.start
    return Worker(start(arguments, variables, log), queue, name, log)


def _start_anew(
    arguments: Sequence[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start `celery` in an interpreter of its own."""
    limited = [sys.executable, "-c", LIMITED, str(programs.LIFETIME_SECONDS)]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*limited, sys.executable, "-m", "celery", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait_until_ready(home: Path, *workers: Worker) -> None:
    """Wait until workers take tasks."""
    give_up = time.monotonic() + PATIENCE
    for worker in workers:
        while not (home / f"{worker.name}.ready").exists():
            if not worker.is_running or time.monotonic() > give_up:
                raise AssertionError(f"the worker did not start:\n{worker.said()}")
            time.sleep(0.02)
