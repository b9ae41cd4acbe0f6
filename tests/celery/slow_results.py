"""A store of results that takes its time over the state of a task that is queued again."""

from __future__ import annotations

import time
from typing import Any

from celery import states
from celery.backends.redis import RedisBackend


class SlowResults(RedisBackend):  # type: ignore[misc]
    """Redis, where a process is put aside between what it reads of a result and what it writes."""

    def _store_result(
        self, task_id: str, result: Any, state: str, *args: Any, **options: Any
    ) -> Any:
        if state == states.RETRY:
            self._get_task_meta_for = self._read_slowly
        try:
            return super()._store_result(task_id, result, state, *args, **options)
        finally:
            self.__dict__.pop("_get_task_meta_for", None)

    def _read_slowly(self, task_id: str) -> Any:
        meta = super()._get_task_meta_for(task_id)
        time.sleep(0.05)
        return meta
