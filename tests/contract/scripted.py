"""A store in memory whose answers a test writes. The fixture `scripted` of the conftest has it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django_distlock import Lock, Retry, distlock
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.records import UNKNOWN, Unknown

Script = dict[str, list[Any]]
QUICK = Retry(delay=0.02, factor=1, cap=0.02)


def scripted_lock(key: str, **more: Any) -> Lock:
    """Describe a lock on the scripted store, which nobody renews."""
    return distlock(key, **{"backend": "scripted", "heartbeat": False, "retry": QUICK, **more})


class ScriptedMemory(MemoryBackend):
    """A store in memory that fails, hangs, or is slow where a test says so."""

    #: By operation: what its next calls do first. An error is raised, a number slept, UNKNOWN said.
    script: dict[str, list[Any]] = {}
    #: For what is made of an answer about several keys.
    acquires_together = True
    #: What was asked.
    asked: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # What the test before left to a thread of ours is told to that test alone, and is no step
        # of this one's script.
        self._told, self._script = self.asked, self.script

    def _step(self, operation: str) -> Unknown | None:
        self._told.append(operation)
        steps = self._script.get(operation, [])
        step = steps.pop(0) if steps else None
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            time.sleep(step)
        return UNKNOWN if step is UNKNOWN else None

    def _acquire(self, *args: Any, **kwargs: Any) -> Any:
        answer = super()._acquire(*args, **kwargs)
        self._step("acquire")
        return answer

    def _extend(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step("extend")
        return step if step is not None else super()._extend(*args, **kwargs)

    def _extend_many(self, named: Sequence[Any]) -> Any:
        step = self._step("extend_many")
        return [step] * len(named) if step is not None else super()._extend_many(named)

    def _release(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step("release")
        return step if step is not None else super()._release(*args, **kwargs)


BACKEND = {"BACKEND": f"{__name__}.ScriptedMemory"}
#: With a beat each tenth of a ttl, with one each third, and with one thread.
CONFIGURED = {
    "scripted": {**BACKEND, "HEARTBEAT": 0.1},
    "thirds": BACKEND,
    "alone": {**BACKEND, "LOCK_CONNECTIONS": 1},
}
