"""Claims of tasks whose messages the broker has lost: found, and dropped, and no others."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from io import StringIO
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from celery import Celery, _state
from django.core.management import CommandError, call_command

from django_distlock import LockNotAcquired, lock_backends
from django_distlock.core.keys import own_key
from django_distlock.core.records import UNKNOWN, Grant
from django_distlock.models import LockEvent
from django_distlock.signals import lock_forced
from django_distlock.testing import lose_connection
from tests.contract.locking import eventually
from tests.integration.operating import raising

from .brokers import Broker, redis_broker
from .conftest import client_of
from .crews import Crew
from .workers import working


class Queue:
    """A queue of the broker that no worker listens to, and the tasks in it."""

    def __init__(self, app: Celery, store: str, key: str):
        self.app, self.store, self.key = app, store, key

    def send(self, suffix: str = "", name: str = "unique", **options: Any) -> Any:
        """Send a task of a key; return its result."""
        options = {"queue": self.key, **options}
        task = self.app.tasks[f"{self.store}.{name}"]
        return task.apply_async((self.key + suffix,), **options)

    def purge(self) -> None:
        """Empty the queue, as `celery purge` does."""
        with self.app.connection_for_write() as connection:
            connection.default_channel.queue_purge(self.key)

    def orphans(self, **options: Any) -> set[str]:
        """Run the command; return what it has found of the test's keys."""
        found = [each["key"] for each in self.run(**options)["orphans"]]
        return {each for each in found if self.key in each}

    def run(self, *, status: int = 0, **options: Any) -> Any:
        """Run the command, which ends with a status; return its document."""
        told = StringIO()
        options = {
            "backend": [self.store],
            "older_than": 0.0,
            "patience": 1.0,
            "json": True,
            **options,
        }
        with pytest.raises(CommandError) if status else nullcontext() as caught:
            call_command("distlock_orphans", stdout=told, stderr=StringIO(), **options)
        assert caught is None or caught.value.returncode == status
        return json.loads(told.getvalue())


def unique_key(key: str) -> str:
    """Return the key of what is queued or running."""
    return own_key(f"unique:{key}")


def place_key(key: str) -> str:
    """Return the key of the places of those who wait."""
    return own_key(f"queue:{key}")


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Callable[[Celery], None]:
    """Give a way to make an app that of the project."""
    return lambda app: monkeypatch.setattr(_state._tls, "current_app", app)


@pytest.fixture
def queue(app: Celery, store: str, key: str, project: Callable[[Celery], None]) -> Queue:
    """Give a queue on Redis."""
    project(app)
    return Queue(app, store, key)


@pytest.fixture
def on_rabbitmq(rabbitmq: Broker, key: str, project: Callable[[Celery], None]) -> Iterator[Queue]:
    """Give a queue on RabbitMQ; its keys are in the database."""
    with client_of(rabbitmq) as app:
        project(app)
        yield Queue(app, "default", key)


def test_purged_tasks_leave_keys_that_are_found(queue: Queue) -> None:
    """A key whose message is in a queue, of any priority, is none of them."""
    queue.send()
    queue.send(":urgent", priority=9)
    queue.send(":elsewhere", queue=f"{queue.key}:other")
    queue.send(name="bounded")
    queue.send(":elsewhere", name="bounded", queue=f"{queue.key}:other")
    assert queue.orphans() == set()
    queue.purge()
    keys = {unique_key(queue.key), unique_key(f"{queue.key}:urgent"), place_key(queue.key)}
    assert queue.orphans() == keys
    # Whoever has just taken its key may not have sent its message yet.
    assert queue.orphans(older_than=60.0) == set()


@pytest.mark.parametrize("store", ["default"])
def test_keys_are_dropped_and_told(queue: Queue) -> None:
    """Their tasks can be sent again, and the event says who did it, and why."""
    lost = queue.send()
    kept = queue.send(":elsewhere", queue=f"{queue.key}:other")
    queue.purge()
    assert queue.send().id == lost.id
    assert queue.run(drop=True, reason="celery purge")["dropped"] == [unique_key(queue.key)]
    told = LockEvent.objects.filter(key=unique_key(queue.key), kind=LockEvent.Kind.FORCED)
    # Written behind the command, by a thread.
    assert eventually(lambda: [each.reason for each in told.all()] == ["celery purge"])
    assert queue.send().id != lost.id
    assert queue.send(":elsewhere", queue=f"{queue.key}:other").id == kept.id


@pytest.mark.parametrize("store", ["default"])
def test_places_of_purged_tasks_are_given_back(queue: Queue) -> None:
    """All of those in one backlog, except that of a call whose message is there."""
    for purged, kept in ((2, 0), (1, 1)):
        for _ in range(kept):
            queue.send(name="bounded", queue=f"{queue.key}:other")
        for _ in range(purged):
            queue.send(name="bounded")
        with pytest.raises(LockNotAcquired, match="2 calls already wait"):
            queue.send(name="bounded")
        queue.purge()
        dropped = queue.run(drop=True, reason="celery purge")["dropped"]
        assert dropped == [place_key(queue.key)] * purged
    queue.send(name="bounded")


@pytest.mark.parametrize("store", ["default"])
def test_what_was_dropped_before_the_store_went_away_is_said(queue: Queue) -> None:
    """With its event; the key that failed is named."""
    queue.send(":a")
    queue.send(":b")
    queue.purge()
    with ExitStack() as outage:

        def cut(**_: Any) -> None:
            outage.enter_context(lose_connection(queue.store))

        lock_forced.connect(cut)
        try:
            document = queue.run(drop=True, reason="celery purge", status=69)
        finally:
            lock_forced.disconnect(cut)
    assert len(document["dropped"]) == len(document["failures"]) == 1
    assert {*document["dropped"], document["failures"][0]["key"]} == {
        unique_key(f"{queue.key}:a"),
        unique_key(f"{queue.key}:b"),
    }


@pytest.mark.parametrize("store", ["default"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_was_dropped_before_a_signal_is_said(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """With its event; the other key is not tried."""
    queue.send(":a")
    queue.send(":b")
    queue.purge()
    release, told = lock_backends[queue.store].release, list[str]()

    def interrupted(grant: Grant, *more: Any) -> Any:
        answer = release(grant, *more)
        signal.raise_signal(signum)
        return answer

    def note(key: str, **_: Any) -> None:
        told.append(key)

    monkeypatch.setattr(lock_backends[queue.store], "release", interrupted)
    lock_forced.connect(note)
    try:
        with raising(signum):
            document = queue.run(drop=True, reason="celery purge", status=128 + signum)
    finally:
        lock_forced.disconnect(note)
    monkeypatch.undo()
    assert len(document["dropped"]) == 1
    assert document["dropped"] == told
    left = [each for each in lock_backends[queue.store].list().records if queue.key in each.key]
    assert len(left) == 1


@pytest.mark.parametrize("store", ["default"])
def test_key_that_could_not_be_dropped_is_named(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session has locked its row, and the others are dropped."""
    queue.send(":a")
    queue.send(":b")
    queue.purge()
    store = lock_backends[queue.store]
    once = Mock(side_effect=chain([UNKNOWN], repeat(DEFAULT)), wraps=store.release)
    with monkeypatch.context() as locked:
        locked.setattr(store, "release", once)
        document = queue.run(drop=True, reason="celery purge", status=69)
    (failure,) = document["failures"]
    assert "a transaction has locked its row" in failure["message"]
    assert {failure["key"], *document["dropped"]} == {
        unique_key(f"{queue.key}:a"),
        unique_key(f"{queue.key}:b"),
    }


@pytest.mark.parametrize("store", ["default"])
def test_broker_that_was_flushed(project: Callable[[Celery], None], store: str, key: str) -> None:
    """A server that has lost all of its messages, and all that it knew of queues."""
    with redis_broker() as broker, client_of(broker) as app:
        project(app)
        queue = Queue(app, store, key)
        queue.send()
        assert queue.orphans() == set()
        app.backend.client.flushall()
        assert queue.orphans() == {unique_key(key)}


def test_tasks_of_workers_are_no_orphans(prefork: Crew, project: Callable[[Celery], None]) -> None:
    """Neither what runs, nor what a worker keeps for later."""
    project(prefork.app)
    queue = Queue(prefork.app, prefork.store, prefork.key)
    prefork.send("unique", "wait go")
    later = queue.send(":later", queue=prefork.worker.queue, countdown=60)
    prefork.begun()
    assert queue.orphans(patience=5.0) == set()
    prefork.stage.open("go")
    later.revoke()


def test_rabbitmq_tells_by_empty_queues(on_rabbitmq: Queue) -> None:
    """Which messages a queue has cannot be seen: with one in it, nothing is said to be lost.

    Nor with one in those that nobody names: Celery has them for a countdown, beside quorum queues.
    """
    on_rabbitmq.send()
    with pytest.raises(CommandError, match=f"{on_rabbitmq.key}.* has 1 message") as caught:
        on_rabbitmq.run(queue=[on_rabbitmq.key])
    assert caught.value.returncode == 1
    on_rabbitmq.purge()
    assert on_rabbitmq.orphans(queue=[on_rabbitmq.key]) == {unique_key(on_rabbitmq.key)}
    name = "celery_delayed_3"
    with on_rabbitmq.app.connection_for_write() as connection:
        channel = connection.default_channel
        # A worker beside quorum queues declares it in another way, in another test.
        channel.queue_delete(name)
        channel.queue_declare(name, auto_delete=False)
        connection.Producer(channel).publish("a task", routing_key=name)
        with pytest.raises(CommandError, match=f"{name}.* has 1 message"):
            on_rabbitmq.run()
        channel.queue_delete(name)
    assert on_rabbitmq.orphans() == {unique_key(on_rabbitmq.key)}


@pytest.mark.parametrize("store", ["default"])
def test_rabbitmq_asks_workers_for_what_they_keep(
    home: Path, rabbitmq: Broker, on_rabbitmq: Queue, crew_of: Callable[..., Crew]
) -> None:
    """What they have fetched is in no queue; a worker that does not answer may have anything."""
    with working(home, rabbitmq) as worker:
        later = on_rabbitmq.send(queue=worker.queue, countdown=60)
        crew = crew_of(worker, on_rabbitmq.app)
        scheduled = on_rabbitmq.app.control.inspect(timeout=2).scheduled
        crew.until(lambda: later.id in str(scheduled()), "the worker keeps it")
        assert on_rabbitmq.orphans(patience=5.0) == set()
        worker.signal("STOP")
        with pytest.raises(CommandError, match="0 of .* listed their tasks within 0.5 s"):
            on_rabbitmq.run(queue=[worker.queue], patience=0.5)


@pytest.mark.parametrize("store", ["default"])
@pytest.mark.parametrize(
    ("address", "message", "status"),
    [
        # It is no broker without the task.
        ("redis://127.0.0.1:1/0", "The broker is unavailable", 69),
        ("memory://", "kind 'memory' cannot list its tasks", 1),
    ],
    ids=["away", "shows nothing"],
)
def test_broker_that_says_nothing(
    queue: Queue, project: Callable[[Celery], None], address: str, message: str, status: int
) -> None:
    """It is named, and nothing is said to be lost."""
    queue.send()
    with Celery("elsewhere", set_as_current=False, broker=address) as app:
        project(app)
        with pytest.raises(CommandError, match=message) as caught:
            queue.run()
    assert caught.value.returncode == status


@pytest.mark.parametrize("store", ["default"])
def test_backend_that_cannot_be_asked_is_an_error(queue: Queue) -> None:
    """It is in memory, or not configured: no store that is silent."""
    for queue.store in ("memory", "nowhere"):
        assert [each["backend"] for each in queue.run(status=1)["failures"]] == [queue.store]


def test_project_without_an_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what to import."""
    monkeypatch.setattr(_state._tls, "current_app", None)
    monkeypatch.setattr(_state, "default_app", None)
    with pytest.raises(CommandError, match="No Celery app was found") as caught:
        call_command("distlock_orphans")
    assert caught.value.returncode == 1


def test_dropping_needs_a_reason() -> None:
    """And a reason alone drops nothing."""
    for options in ({"drop": True}, {"reason": "why"}):
        with pytest.raises(CommandError, match="must be used together") as caught:
            call_command("distlock_orphans", **options)
        assert caught.value.returncode == 2
