"""Brokers and workers that tests share, and what each of them has of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.db import connections
from pytest_django import DjangoDbBlocker

from django_distlock.models import HeldLock

from .acting import OVER, Stage
from .brokers import Broker, rabbitmq_broker, redis_broker
from .crews import Crew, Hire
from .project import create
from .tasks import STORES
from .workers import Worker, start_worker, wait_until_ready, working

#: How many tasks a worker that tests share runs at once.
SLOTS = 4


# As in the contract suite: what locks do is committed, so nothing runs inside of a transaction.
@pytest.fixture(autouse=True)
def _databases(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        for connection in connections.all(initialized_only=True):
            assert not connection.in_atomic_block
            connection.close()


@pytest.fixture
def key(_databases: None) -> Iterator[str]:
    """Give a text that only this test uses: a key, or the start of several."""
    name = f"t{secrets.token_hex(6)}"
    yield name
    HeldLock.objects.filter(key__contains=name).delete()


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder where workers write and tasks meet the tests."""
    return tmp_path_factory.mktemp("celery")


@pytest.fixture(scope="package")
def broker() -> Iterator[Broker]:
    """Give the Redis server that carries the messages of most tests."""
    with redis_broker() as made:
        yield made


@pytest.fixture(scope="package")
def rabbitmq(broker: Broker) -> Iterator[Broker]:
    """Give a RabbitMQ server; the results are on Redis."""
    with rabbitmq_broker(broker.results) as made:
        yield made


@contextmanager
def client_of(broker: Broker) -> Iterator[Celery]:
    """Give an app that sends to a broker."""
    app = create(broker.settings)
    try:
        yield app
    finally:
        consumer = app.backend.result_consumer
        consumer.stop()
        # Results that are collected later would end their subscription at a server that is gone.
        consumer._pubsub = None
        # Its client does not: the pool was made beside it.
        app.backend.client.connection_pool.disconnect()
        app.close()


@pytest.fixture(scope="package")
def app(broker: Broker) -> Iterator[Celery]:
    """Give the tests' end of the broker of most tests."""
    with client_of(broker) as made:
        yield made


class Fleet:
    """The workers that tests share, one of each kind, which run from when they are needed."""

    def __init__(self, home: Path, broker: Broker):
        self._home = home
        self._broker = broker
        self._workers: dict[str, Worker] = {}

    def worker(self, pool: str) -> Worker:
        """Return a worker of a kind that runs, and has time for a test."""
        worker = self._workers.get(pool)
        if worker is not None and worker.is_old:
            worker.kill()
        if worker is None or not worker.is_running:
            worker = start_worker(self._home, self._broker, pool=pool, slots=SLOTS)
            self._workers[pool] = worker
            wait_until_ready(self._home, worker)
        return worker

    def kill(self) -> None:
        """End all of them; nobody waits for what they do."""
        for worker in self._workers.values():
            worker.kill()


@pytest.fixture(scope="package")
def fleet(
    home: Path, broker: Broker, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[Fleet]:
    """Give the workers that tests share."""
    with ExitStack() as stack:
        made = Fleet(home, broker)
        stack.callback(made.kill)
        yield made


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    """Give the alias of each lock backend in turn."""
    alias: str = request.param
    return alias


@pytest.fixture
def stage(home: Path, key: str) -> Iterator[Stage]:
    """Give what the test and its tasks share."""
    made = Stage(home, key)
    yield made
    made.open(OVER)


@pytest.fixture
def prefork(fleet: Fleet, app: Celery, stage: Stage, store: str) -> Crew:
    """Give a worker whose tasks run in processes."""
    return Crew(worker=fleet.worker("prefork"), app=app, stage=stage, store=store)


@pytest.fixture
def on_each_store(fleet: Fleet, app: Celery, home: Path, key: str) -> Iterator[list[Crew]]:
    """Give the same for each store, for tests that wait long: they wait for all stores at once."""
    stages = [Stage(home, f"{key}{store}") for store in STORES]
    worker = fleet.worker("prefork")
    yield [
        Crew(worker=worker, app=app, stage=stage, store=store)
        for stage, store in zip(stages, STORES, strict=True)
    ]
    for stage in stages:
        stage.open(OVER)


@pytest.fixture
def gevent(fleet: Fleet, app: Celery, stage: Stage, store: str) -> Crew:
    """Give a worker whose tasks run in greenlets."""
    return Crew(worker=fleet.worker("gevent"), app=app, stage=stage, store=store)


@pytest.fixture
def hire(home: Path, broker: Broker, app: Celery, stage: Stage, store: str) -> Hire:
    """Give a way to run a worker that the test has for itself, behind any broker."""

    @contextmanager
    def hired(behind: Broker = broker, **options: Any) -> Iterator[Crew]:
        with ExitStack() as stack:
            sends = app if behind is broker else stack.enter_context(client_of(behind))
            worker = stack.enter_context(working(home, behind, **options))
            yield Crew(worker=worker, app=sends, stage=stage, store=store)

    return hired


@pytest.fixture
def crew_of(app: Celery, stage: Stage, store: str) -> Callable[..., Crew]:
    """Give a way to talk to a worker that the test has for itself."""

    def make(worker: Worker, to: Celery | None = None) -> Crew:
        return Crew(worker=worker, app=to or app, stage=stage, store=store)

    return make
