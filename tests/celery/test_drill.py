"""Workers and their children are killed while many tasks want few keys, and nothing goes wrong.

`DISTLOCK_TEST_TASKS=300` is the drill at its full size, with four workers and twenty keys.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from django_distlock import distlock
from tests.contract.locking import eventually, taken

from .acting import Stage
from .brokers import Broker, redis_broker
from .conftest import client_of
from .workers import Worker, start_worker, wait_until_ready

TASKS = int(os.environ.get("DISTLOCK_TEST_TASKS", "40"))
KEYS = max(5, TASKS // 15)
WHOLE = TASKS > 100
WORKERS = 4 if WHOLE else 2
#: Brokers and stores; each of them once, every day.
PAIRS = [
    ("impatient", "default"),
    ("rabbitmq", "redis"),
    ("impatient", "redis"),
    ("rabbitmq", "default"),
]
#: How many children are killed, and how many workers with all of theirs.
CHILDREN, DOOMED = TASKS // 4, max(1, TASKS // 60)
#: How many tasks a worker runs at once.
SLOTS = 2
#: Seconds until Redis delivers again what a dead worker had. RabbitMQ sees its death.
VISIBILITY = 8
#: Seconds until a worker that was told to take no more has taken its last message from Redis.
LAST_POLL = 1.5
#: Seconds that a body takes, in which a kill shall hit it.
BODY = 0.15
#: Seconds in which all tasks must have run: most of it is for redelivery.
LONGEST = 60 + TASKS
#: Looks at them, a quarter of a second apart, in which none has ended: what is left then is lost.
QUIET = 160


@dataclass
class Drill:
    """Workers of one queue, tasks of several keys, and somebody who kills."""

    home: Path
    broker: Broker
    app: Celery
    key: str
    store: str
    task: str
    kills: Counter[str] = field(default_factory=Counter)
    workers: list[Worker] = field(default_factory=list)
    dice: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.stages = [Stage(self.home, f"{self.key}-{number}") for number in range(KEYS)]
        self.sent: set[str] = set()

    @contextmanager
    def staffed(self) -> Iterator[None]:
        """Run the workers until the block ends."""
        try:
            self.workers = [self._start() for _ in range(WORKERS)]
            wait_until_ready(self.home, *self.workers)
            yield
        finally:
            for worker in self.workers:
                worker.kill()

    def send(self, number_of_tasks: int = TASKS) -> None:
        """Queue tasks, those of a key side by side."""
        for number in range(number_of_tasks):
            stage = self.stages[number // 3 % KEYS]
            result = self.app.tasks[self.task].apply_async(
                (stage.key, [f"sleep {BODY}"]), queue=self.key
            )
            self.sent.add(result.id)

    def change(self, stage: Stage) -> None:
        """Change what the tasks of a key look at, and call one."""
        stage.change()
        steps = [f"look {stage.changes()}", f"sleep {BODY}"]
        self.app.tasks[self.task].apply_async((stage.key, steps), queue=self.key)

    def ended(self) -> Counter[str]:
        """Count how often each task has run to the end of its body."""
        return Counter(each["task_id"] for stage in self.stages for each in stage.told("ended"))

    def told(self, event: str) -> int:
        """Count what has happened."""
        return sum(len(stage.told(event)) for stage in self.stages)

    def kill_until_done(self) -> None:
        """Kill at random; then wait until all tasks have run, of which there are enough."""
        done = looks = 0
        give_up = time.monotonic() + LONGEST
        while (count := len(self.ended())) < len(self.sent):
            if self.kills["workers"] < DOOMED and count > len(self.sent) - 2 * KEYS:
                self.send(3 * KEYS)
            looks = looks + 1 if count == done else 0
            done = count
            # Who is slow goes on. In looks, because a machine that stands still does not look.
            if looks > QUIET and time.monotonic() > give_up:
                assert not self.sent - set(self.ended()), "tasks were lost"
            if self.kills["children"] < CHILDREN:
                self.kill_child()
            # Among the others, and not before some have run.
            if self.kills["workers"] < self.kills["children"] * DOOMED // CHILDREN:
                self.kill_worker()
            time.sleep(self.dice.uniform(0.1, 0.4))

    def taken_keys(self) -> list[str]:
        """Return the keys that somebody holds."""
        return [
            stage.key for stage in self.stages if taken(distlock(stage.key, backend=self.store))
        ]

    def kill_child(self) -> None:
        """Kill a child, more often than not while it runs a body."""
        children = {pid for worker in self.workers for pid in worker.children()}
        inside = {each["pid"] for stage in self.stages for each in stage.inside()} & children
        if not inside and self.dice.random() < 0.8:
            return
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.dice.choice(sorted(inside or children)), signal.SIGKILL)
            self.kills["children"] += 1

    def kill_worker(self) -> None:
        """Kill a worker with all of its children, and start another one."""
        doomed = self.workers.pop(self.dice.randrange(len(self.workers)))
        if self.broker.url.startswith("redis:"):
            # What Redis has given away and Celery not yet noted would be lost without any lock too.
            self.app.control.cancel_consumer(
                self.key, destination=[f"{doomed.name}@tests"], reply=True, timeout=5
            )
            time.sleep(LAST_POLL)
        doomed.kill()
        self.kills["workers"] += 1
        self.workers.append(self._start())

    def _start(self) -> Worker:
        return start_worker(self.home, self.broker, slots=SLOTS, queue=self.key)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Broker]:
    """Give a Redis broker that delivers again what dead workers had."""
    with redis_broker(visibility_timeout=VISIBILITY) as made:
        yield made


@pytest.fixture
def any_broker(request: pytest.FixtureRequest) -> Broker:
    """Give the broker that a test names."""
    made: Broker = request.getfixturevalue(request.param)
    return made


def drill(home: Path, broker: Broker, app: Celery, key: str, **more: Any) -> Drill:
    """Make a drill whose dice can be thrown again."""
    seed = int(os.environ.get("DISTLOCK_TEST_SEED", random.randrange(10**6)))
    print(f"DISTLOCK_TEST_SEED={seed}")
    return Drill(home, broker, app, key, dice=random.Random(seed), **more)


@pytest.mark.parametrize(
    ("any_broker", "store"), PAIRS if WHOLE else PAIRS[:2], indirect=["any_broker"]
)
def test_killed_processes_lose_no_task_and_overlap_in_none(
    home: Path, any_broker: Broker, key: str, store: str
) -> None:
    """Each task runs to its end, none beside another one of its key, and no lock is left."""
    with client_of(any_broker) as app:
        made = drill(home, any_broker, app, key, store=store, task=f"{store}.late_short")
        started = time.monotonic()
        with made.staffed():
            made.send()
            made.kill_until_done()
            took = time.monotonic() - started
            free = eventually(lambda: not made.taken_keys())
            again = sum(times - 1 for times in made.ended().values())
            print(
                f"{len(made.sent)} tasks on {KEYS} keys in {took:.1f} s;"
                f" killed: {dict(made.kills)}; begun {made.told('began')},"
                f" refused {made.told('refused')},"
                f" overlaps {made.told('overlapped')}, ended twice {again}"
            )
            assert made.kills["children"] > 0
            assert made.kills["workers"] > 0
            assert not made.told("overlapped"), "two held a key at once"
            # A kill between the end of a body and the note of it.
            assert not (again > made.kills.total() and again), "tasks ran twice"
            assert free, made.taken_keys()


@pytest.mark.parametrize(("store", "name"), [("default", "started_short"), ("redis", "last_short")])
def test_killed_processes_hide_no_change(
    home: Path, impatient: Broker, key: str, store: str, name: str
) -> None:
    """What changed before a call is seen by a run that comes to its end, and by the last one."""
    with client_of(impatient) as app:
        made = drill(home, impatient, app, key, store=store, task=f"{store}.{name}")
        stages = made.stages[:3]
        has_seen = partial(has_seen_all, is_debounced=name == "last_short")
        with made.staffed():
            for number in range(TASKS):
                made.change(made.dice.choice(stages))
                time.sleep(made.dice.uniform(0, 2 * BODY))
                # A try may find no child in a body; then the next call has one more.
                if made.kills["children"] * 4 <= number:
                    made.kill_child()
                if number % (TASKS // 2) == TASKS // 4:
                    made.kill_worker()
            for stage in stages:
                # Those who drop what is called amid a run have no other chance.
                made.change(stage)
                assert eventually(stage.busy)
                made.change(stage)
            seen = eventually(lambda: all(map(has_seen, stages)), LONGEST)
            free = eventually(lambda: not any(each.busy() for each in stages))
            called = sum(stage.changes() for stage in stages)
            print(f"{called} calls, {made.told('began')} runs; killed: {dict(made.kills)}")
            assert seen, [each.told("saw")[-2:] for each in stages]
            assert free
            assert made.kills["children"] > 0
            assert not made.told("overlapped")
            assert made.told("began") <= called + SLOTS * made.kills.total()


def has_seen_all(stage: Stage, *, is_debounced: bool) -> bool:
    """Whether the run that ended last began behind all changes, called with the last of them."""
    changes, last = stage.changes(), stage.told("saw", "ended")[-2:]
    if not changes or [each["event"] for each in last] != ["saw", "ended"]:
        return not changes
    return last[0]["changes"] == changes and (last[0]["sent_at"] == changes or not is_debounced)


@pytest.mark.nightly
def test_without_locks_the_same_tasks_overlap(home: Path, impatient: Broker, key: str) -> None:
    """The drill can fail: tasks that take no lock are side by side, and the witness sees it."""
    with client_of(impatient) as app:
        made = drill(home, impatient, app, key, store="default", task="plain")
        with made.staffed():
            made.send()
            made.kill_until_done()
            print(f"overlaps {made.told('overlapped')} of {made.told('began')} runs")
            assert made.told("overlapped") > TASKS / 10
