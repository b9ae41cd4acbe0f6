"""The Celery app that a worker runs: what it is told by the environment, and the tasks."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_ready
from celery.worker.control import inspect_command

from django_distlock import distlock
from django_distlock.core.keys import RUNS_PREFIX
from django_distlock.signals import lock_acquired, lock_not_acquired

from .acting import stage_of


def create(settings: dict[str, Any]) -> Celery:
    """Make an app that knows the tasks.

    Args:
        settings: Those of Celery that say where the messages and results are.
    """
    app = Celery("tests", set_as_current=False)
    app.conf.update(
        {
            "imports": ["tests.celery.tasks"],
            "task_track_started": True,
            "worker_prefetch_multiplier": 1,
            "worker_cancel_long_running_tasks_on_connection_loss": True,
            "broker_connection_retry_on_startup": True,
            "worker_hijack_root_logger": True,
            "task_publish_retry": False,
            **settings,
        }
    )
    return app


def _tell_of_refusals(key: str | None = None, **facts: Any) -> None:
    """Let a test count how often its key was refused."""
    key = (key or "").removeprefix(RUNS_PREFIX)
    if key.startswith("t"):
        stage_of(key.partition(":")[0]).tell("refused")


def _die_with_a_lock(key: str, **facts: Any) -> None:
    """Let this process be killed when it has a lock, once, where a test has said so."""
    stage = stage_of(key.rpartition(":")[2])
    if stage.takes("doomed"):
        os.kill(os.getpid(), signal.SIGKILL)


def _be_ready(**facts: Any) -> None:
    Path(os.environ["DISTLOCK_TEST_READY"]).touch()


def _lock_before_the_fork(**facts: Any) -> None:
    """Open, in the parent of all children, whatever a lock opens, and leave it open."""
    for backend in ("default", "redis"):
        with distlock(f"parent:{os.getpid()}", backend=backend, ttl=3) as lease:
            lease.extend()


@inspect_command()
def peers(state: Any) -> list[int]:
    """Return the ports that the main process of a worker is connected to."""
    found: list[int] = []
    for descriptor in range(256):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if isinstance(peer := copy.getpeername(), tuple):
                    found.append(peer[1])
    return found


if "DISTLOCK_TEST_CELERY" in os.environ:
    app = create(json.loads(os.environ["DISTLOCK_TEST_CELERY"]))
    app.set_current()
    lock_not_acquired.connect(_tell_of_refusals, weak=False)
    lock_acquired.connect(_die_with_a_lock, weak=False)
    worker_ready.connect(_be_ready, weak=False)
    if os.environ.get("DISTLOCK_TEST_LOCK_BEFORE_FORK"):
        worker_init.connect(_lock_before_the_fork, weak=False)
