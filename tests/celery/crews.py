"""A worker and what a test says to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from django_distlock import distlock, lock_backends
from django_distlock.core.keys import own_key
from django_distlock.core.records import Record
from tests.contract.helpers import PATIENCE, Later, there
from tests.contract.locking import eventually, taken

from .acting import Stage
from .workers import Worker


@dataclass(frozen=True, kw_only=True)
class Crew:
    """A worker, the test's own end of its broker, and the stage of the test's key.

    Attributes:
        store: The alias of the lock backend.
    """

    worker: Worker
    app: Celery
    stage: Stage
    store: str

    @property
    def key(self) -> str:
        """The key that only this test uses."""
        return self.stage.key

    @property
    def claim(self) -> str:
        """The key of a unique task that is queued or running."""
        return own_key(f"unique:{self.key}")

    def beside(self, suffix: str) -> Crew:
        """Return the same with another key, and the stage of that."""
        return replace(self, stage=self.stage.of(f"{self.key}-{suffix}"))

    def send(self, name: str, *steps: str, **options: Any) -> AsyncResult[Any]:
        """Send a task of the store; what it shall do, and options of `apply_async`."""
        return self.task(name).apply_async((self.key, steps), **self.to(**options))

    def task(self, name: str) -> Any:
        """Return one of the tasks."""
        full = f"{self.store}.{name}"
        return self.app.tasks[full if full in self.app.tasks else name]

    def signature(self, name: str, *steps: str, **options: Any) -> Any:
        """Describe a call of a task, for chords and chains."""
        return self.task(name).si(self.key, steps).set(**self.to(**options))

    def to(self, **options: Any) -> dict[str, Any]:
        """Give the options that make a message arrive at the worker."""
        return {"queue": self.worker.queue, **options}

    def begun(self, times: int = 1) -> dict[str, Any]:
        """Wait until the body has begun so often; return what it told."""
        self.until(lambda: len(self.stage.told("began")) >= times, f"{times} runs have begun")
        return self.stage.told("began")[times - 1]

    def outcome(self, result: AsyncResult[Any], timeout: float = PATIENCE) -> str:
        """Wait until a task has ended; return its state."""
        self.until(lambda: result.state in ENDS, f"{result.id} has ended", timeout)
        return str(result.state)

    def let_go(self, *results: AsyncResult[Any]) -> None:
        """Let bodies go on that wait for it; wait until these tasks have succeeded."""
        self.stage.open("go")
        assert [self.outcome(each) for each in results] == ["SUCCESS"] * len(results)

    def is_taken(self, key: str = "") -> bool:
        """Ask the store whether anybody holds the key."""
        return taken(distlock(key or self.key, backend=self.store))

    def becomes_free(self, key: str = "") -> None:
        """Wait until nobody holds the key: a lease that nobody ends lives for longer than this."""
        self.until(lambda: not self.is_taken(key), "the key is free")

    def stays_taken(self, seconds: float, key: str = "") -> bool:
        """Say whether somebody holds the key all the time."""
        return not eventually(lambda: not self.is_taken(key), seconds)

    def record(self, key: str = "") -> Record:
        """Return what the store knows of whoever holds the key."""
        return there(Later(lock_backends[self.store].read, key or self.key).result())

    def until(self, condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
        """Wait until something is so, or fail with what the worker said."""
        give_up = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > give_up:
                raise AssertionError(
                    f"not in {timeout:g} s: {what}; told: {self.stage.told()}\n"
                    f"{self.worker.said()[-6000:]}"
                )
            time.sleep(0.03)


#: Runs a worker that a test has for itself while a block lasts: see `conftest.hire`.
Hire = Callable[..., AbstractContextManager[Crew]]
#: States that stay.
ENDS = {"SUCCESS", "FAILURE", "REVOKED", "IGNORED", "REJECTED"}
