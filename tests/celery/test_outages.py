"""Stores that are away while tasks are queued: work goes on behind it, and no key is left taken."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery, _state, chain
from django.core.management import CommandError, call_command
from pytest_django import DjangoDbBlocker

from django_distlock import BackendUnavailable
from django_distlock.contrib.celery import failed
from django_distlock.management.statuses import UNAVAILABLE
from django_distlock.models import FailedTask
from tests.contract.helpers import there
from tests.integration.wires import Wire
from tests.keeper import free_port

from .brokers import Broker
from .crews import Crew
from .project import create
from .tasks import STORES
from .workers import Worker, working

ADDRESSES = {"default": "DISTLOCK_TEST_POSTGRES_URL", "redis": "DISTLOCK_TEST_REDIS_URL"}


class StoreWire(Wire):
    """A wire between a worker and a store of its locks. Away, it hangs up on whoever calls."""

    def __init__(self, variable: str):
        url = urlsplit(os.environ[variable])
        self._away = False
        self._server = (url.hostname or "127.0.0.1", url.port or 0)
        self._begin()
        user = url.netloc.rpartition("@")[0]
        place = f"{user}@" if user else ""
        self.url = url._replace(netloc=f"{place}127.0.0.1:{self.port}").geturl()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def go_away(self) -> None:
        """Cut all connections, and new ones at once."""
        self._away = True
        for each in list(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        """Let everything through again."""
        self._away = False

    def _welcome(self, client: socket.socket) -> None:
        if self._away:
            client.close()
        else:
            super()._welcome(client)


@pytest.fixture(scope="module")
def wires() -> Iterator[dict[str, StoreWire]]:
    """Give the wires to the stores of the worker."""
    made = {store: StoreWire(ADDRESSES[store]) for store in STORES}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def worker(
    home: Path,
    broker: Broker,
    wires: dict[str, StoreWire],
    django_db_setup: None,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[Worker]:
    """Give a worker whose locks are behind the wires, and whose messages are not."""
    environment = {ADDRESSES[store]: wire.url for store, wire in wires.items()}
    with (
        django_db_blocker.unblock(),
        working(home, broker, slots=2, environment=environment) as made,
    ):
        yield made


@pytest.fixture
def crew(worker: Worker, crew_of: Callable[..., Crew]) -> Crew:
    """Give the worker, and the stage of the test."""
    return crew_of(worker)


@pytest.fixture
def away(wires: dict[str, StoreWire], store: str) -> Iterator[StoreWire]:
    """Give the wire of the store, which is away for the worker, and not for the test."""
    wires[store].go_away()
    yield wires[store]
    wires[store].come_back()


def queued_again(crew: Crew, task_id: str) -> int:
    """Count how often the worker says so, for the store."""
    return crew.worker.said().count(f"The task {task_id} is queued again")


@pytest.mark.parametrize("name", ["late", "unique_late", "started_late", "last_late"])
def test_queued_tasks_outlast_an_outage(crew: Crew, away: StoreWire, name: str) -> None:
    """With `acks_late` they go back to the broker until the store answers, and run once each."""
    results = [crew.send(name) for _ in range(3 if name == "late" else 1)]
    crew.until(
        lambda: all(queued_again(crew, each.id) >= 2 for each in results), "two attempts of each"
    )
    assert {each.state for each in results} <= {"RETRY", "STARTED", "PENDING"}
    assert not crew.stage.told("began")
    away.come_back()
    assert [crew.outcome(each) for each in results] == ["SUCCESS"] * len(results)
    assert len(crew.stage.told("ended")) == len(results)
    assert not crew.stage.told("overlapped")
    assert {each["retries"] for each in crew.stage.told("began")} == {0}
    if name != "late":
        crew.becomes_free(crew.claim)


def test_retry_is_sent_though_the_store_is_away(crew: Crew, wires: dict[str, StoreWire]) -> None:
    """Nobody knows then whether others are queued; it runs, and nothing is left."""
    result = crew.send("started_short", "wait go", "retry 1")
    crew.begun()
    wires[crew.store].go_away()
    crew.stage.open("go")
    crew.until(lambda: result.state == "RETRY", "it is queued again")
    wires[crew.store].come_back()
    assert crew.outcome(result) == "SUCCESS"
    assert [each["retries"] for each in crew.stage.told("began")] == [0, 1]
    crew.becomes_free(crew.claim)


@pytest.mark.parametrize("name", ["unique", "unique_late_second"])
def test_failed_unique_task_frees_its_key(crew: Crew, away: StoreWire, name: str) -> None:
    """Failed at once, or when `max_wait` is over, it swallows nothing that is sent later."""
    result = crew.send(name)
    assert crew.outcome(result) == "FAILURE"
    assert isinstance(result.result, BackendUnavailable)
    assert crew.is_taken(crew.claim)
    away.come_back()
    crew.becomes_free(crew.claim)
    again = crew.send(name)
    assert again.id != result.id
    assert crew.outcome(again) == "SUCCESS"
    assert len(crew.stage.told("began")) == 1


def replay(*arguments: str, told: StringIO | None = None) -> Any:
    """Run the command; return its document."""
    told = told or StringIO()
    call_command("distlock_replay", *arguments, "--json", stdout=told)
    return json.loads(told.getvalue())


@pytest.fixture
def project(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> Celery:
    """Give the test's end of the broker, as the app that commands find."""
    monkeypatch.setattr(_state._tls, "current_app", crew.app)
    return crew.app


def listed(crew: Crew, *arguments: str) -> dict[str, Any]:
    """Return the failed tasks of the test's key, by their ids."""
    return {each["id"]: each for each in replay(*arguments)["failed"] if crew.key in each["key"]}


def test_failed_tasks_are_listed_and_sent_again_once(
    crew: Crew, project: Celery, away: StoreWire
) -> None:
    """At once where the database is up, else when it is back, with their arguments."""
    results = [crew.send("early", "wait go") for _ in range(2)]
    assert [crew.outcome(each) for each in results] == ["FAILURE"] * 2
    if crew.store == "redis":
        # The list is in the database, which answers.
        crew.until(lambda: len(listed(crew)) == 2, "they are listed")
    away.come_back()
    crew.until(lambda: len(listed(crew)) == 2, "they are listed")
    first, second = (each.id for each in results)
    row = listed(crew)[first]
    assert (row["task"], row["backend"]) == (f"{crew.store}.early", crew.store)
    assert (row["key"], row["sent_at"]) == (crew.key, None)
    assert "wait go" not in json.dumps(row)
    with pytest.raises(CommandError, match="already sent"):
        replay("--send", "another", "--send", first)
    (done,) = replay("--send", first)["done"]
    assert crew.begun()["task_id"] == done["sent_as"] != first
    crew.stage.open("go")
    assert crew.outcome(crew.app.AsyncResult(done["sent_as"])) == "SUCCESS"
    with pytest.raises(CommandError, match="already sent"):
        replay("--send", first)
    assert set(listed(crew)) == {second}
    assert listed(crew, "--sent")[first]["sent_as"] == done["sent_as"]
    replay("--drop", second)
    assert listed(crew) == {}
    FailedTask.objects.filter(pk=first).delete()


def test_two_operators_send_a_task_once(
    crew: Crew, project: Celery, away: StoreWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who marks it first does; what a broker did not take is not marked."""
    result = crew.send("early")
    assert crew.outcome(result) == "FAILURE"
    away.come_back()
    crew.until(lambda: result.id in listed(crew), "it is listed")
    (row,) = (each for each in failed.failed(sent=False) if each.pk == result.id)

    address = f"redis://127.0.0.1:{free_port()}/0"
    nobody = create(Broker(url=address, results=crew.app.conf.result_backend).settings)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(_state._tls, "current_app", nobody)
        printed = StringIO()
        with pytest.raises(CommandError, match="could not be processed") as told:
            replay("--send", result.id, told=printed)
    nobody.close()
    assert told.value.returncode == UNAVAILABLE
    # As of every command.
    (failure,) = json.loads(printed.getvalue())["failures"]
    assert (failure["backend"], failure["key"]) == (crew.store, crew.key)
    assert failure["message"].startswith(f"{result.id}: ")
    assert failure["code"] == "service_unavailable"
    assert listed(crew)[result.id]["sent_at"] is None
    sent = there(failed.send(crew.app, row))
    assert failed.send(crew.app, row) is None
    assert crew.outcome(crew.app.AsyncResult(sent)) == "SUCCESS"
    assert len(crew.stage.told("began")) == 1
    failed.drop(row)


def test_body_that_met_an_outage_is_not_listed(crew: Crew, project: Celery) -> None:
    """It has run in part: to send it again is not for us to offer."""
    result = crew.send("early", "unavailable")
    assert crew.outcome(result) == "FAILURE"
    assert isinstance(result.result, BackendUnavailable)
    again = crew.send("early")
    assert crew.outcome(again) == "SUCCESS"
    assert listed(crew) == {}


def test_what_follows_is_sent_though_the_store_is_away(crew: Crew, away: StoreWire) -> None:
    """The worker that ends a link tells nobody of an error: the chain would wait for ever."""
    first = crew.task("collect").si([], crew.key).set(**crew.to())
    result = chain(first, crew.signature("unique_late"), app=crew.app).apply_async()
    crew.until(lambda: queued_again(crew, result.id) >= 1, "an attempt")
    away.come_back()
    assert crew.outcome(result) == "SUCCESS"
    assert len(crew.stage.told("ended")) == 1
    crew.becomes_free(crew.claim)
