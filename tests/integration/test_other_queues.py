"""The recipes for other queues, as their page has them: two workers, and one runs at a time."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from django.conf import settings

from django_distlock.signals import lock_not_acquired
from tests.contract.helpers import PATIENCE
from tests.processes import spawn

PAGE = Path(__file__).parents[2] / "docs/howto/lock-other-queues.md"
#: What a job of RQ calls its function.
MODULE = "recipe_of_rq"
#: Seconds until a refused task is tried again: the least that each of them knows.
RETRY_IN = 1


def recipe_of(library: str) -> dict[str, Any]:
    """Return what is in the module of a recipe."""
    page = PAGE.read_text()
    recipe: dict[str, Any] = {}
    # The decorator, which is the same for all, and what this library adds to its module.
    for part in (page, page.partition(f"\n## {library}\n")[2]):
        exec(re.findall(r"```python\n(.*?)```", part, re.DOTALL)[0], recipe)
    return recipe


class Queue:
    """Tasks of a library that are run under the lock of its recipe.

    Args:
        library: Its heading on the page.
        name: What this test alone uses in Redis.
    """

    def __init__(self, library: str, name: str):
        self.redis: Any = redis.Redis.from_url(settings.DISTLOCK["redis"]["OPTIONS"]["url"])
        self._name = name
        decorate = recipe_of(library)["locked"](lambda number, key: key, retry_in=RETRY_IN)
        self._task = decorate(self.body)
        #: Adds a task: its number, and its key.
        self.send: Callable[[int, str], object]
        #: Runs tasks until the process is killed.
        self.work: Callable[[], object]
        getattr(self, f"_{library.lower()}")()

    def body(self, number: int, key: str) -> None:
        """Be the task. The first one ends when it is told to."""
        self.tell("begin", number)
        if number == 1:
            self.redis.blpop([f"{self._name}:go"], timeout=PATIENCE)
        self.tell("end", number)

    def tell(self, what: str, number: int) -> None:
        """Say what happens, and in which process."""
        self.redis.rpush(f"{self._name}:told", f"{what} {number} {os.getpid()}")

    def heard(self) -> tuple[str, int]:
        """Wait for what is told next; return what it is, and the process."""
        told = self.redis.blpop([f"{self._name}:told"], timeout=PATIENCE)
        assert told is not None
        what, _, process = told[1].decode().rpartition(" ")
        return what, int(process)

    def go_on(self) -> None:
        """Let the first task end."""
        self.redis.rpush(f"{self._name}:go", "go")

    def close(self) -> None:
        """Leave nothing behind."""
        for key in self.redis.scan_iter(f"*{self._name}*"):
            self.redis.delete(key)
        self.redis.close()

    def _dramatiq(self) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker

        broker: Any = RedisBroker(client=self.redis, namespace=self._name)  # type: ignore[no-untyped-call]
        self.send = dramatiq.actor(actor_name="task", broker=broker)(self._task).send

        def work() -> None:
            dramatiq.Worker(broker, worker_threads=1).start()
            threading.Event().wait()

        self.work = work

    def _rq(self) -> None:
        import rq
        from rq.scheduler import RQScheduler

        module = sys.modules[MODULE] = ModuleType(MODULE)
        module.task = self._task  # type: ignore[attr-defined]
        queue = rq.Queue(self._name, connection=self.redis)
        self.send = lambda *args: queue.enqueue(f"{MODULE}.task", *args)
        self.work = lambda: rq.Worker([queue], connection=self.redis).work()
        # In a process of its own, or a killed worker would leave it behind.
        scheduler: Any = RQScheduler([queue], self.redis, interval=RETRY_IN)
        self.schedule = scheduler.work

    def _huey(self) -> None:
        from huey import RedisHuey

        huey = RedisHuey(self._name, connection_pool=self.redis.connection_pool)
        self.send = huey.task(name="task")(self._task)
        self.work = lambda: huey.create_consumer(workers=1, max_delay=0.1).run()


def work(library: str, name: str, attribute: str) -> None:
    """Be a worker."""
    queue = Queue(library, name)
    lock_not_acquired.connect(lambda **_: queue.tell("refused", 0), weak=False)
    print("ready")
    getattr(queue, attribute)()


def test_only_plain_functions_are_locked() -> None:
    """The body of a coroutine function, and of a task of huey, would run behind the lock."""
    from huey import MemoryHuey

    async def task() -> None:
        raise AssertionError

    for bad in (task, MemoryHuey(immediate=False).task()(lambda: None)):
        with pytest.raises(TypeError, match="plain functions"):
            recipe_of("huey")["locked"](lambda: "key")(bad)


@pytest.mark.parametrize("library", ["dramatiq", "RQ", "huey"])
def test_one_of_two_workers_runs_a_key(library: str, key: str) -> None:
    """The other one is free for other tasks, and what was refused runs in the end."""
    queue = Queue(library, key)
    with ExitStack() as stack:
        stack.callback(queue.close)
        for attribute in ["work", "work", *(["schedule"] if library == "RQ" else [])]:
            # Or a worker would keep messages back that the other one could run.
            environment = {"dramatiq_queue_prefetch": "1"}
            process = spawn(f"{__name__}:work", library, key, attribute, **environment)
            stack.enter_context(process).wait_for("ready", PATIENCE)
        queue.send(1, key)
        what, first = queue.heard()
        assert what == "begin 1"
        queue.send(2, key)
        what, second = queue.heard()
        assert what == "refused 0"
        assert second != first
        queue.send(3, f"{key}:other")
        told = [queue.heard()[0]]
        while told[-1] != "end 3":
            told.append(queue.heard()[0])
        queue.go_on()
        while told[-1] != "end 2":
            told.append(queue.heard()[0])
        run = [each for each in told if each != "refused 0"]
        assert run == ["begin 3", "end 3", "end 1", "begin 2", "end 2"]
