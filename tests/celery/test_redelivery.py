"""Messages that arrive again: while their task still runs, and when it has run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from pytest_django import DjangoDbBlocker

from .brokers import SECONDS_UNTIL_REDELIVERY, Broker, redis_broker
from .conftest import client_of
from .crews import Crew, Hire
from .workers import Worker, working

#: Seconds in which a message that is not acknowledged has come again for certain.
AGAIN = SECONDS_UNTIL_REDELIVERY + 3


@pytest.fixture(scope="module")
def impatient() -> Iterator[Broker]:
    """Give a Redis broker that soon delivers again what nobody has acknowledged."""
    with redis_broker(visibility_timeout=SECONDS_UNTIL_REDELIVERY) as made:
        yield made


@pytest.fixture(scope="module")
def sender(impatient: Broker) -> Iterator[Celery]:
    """Give the tests' end of it."""
    with client_of(impatient) as made:
        yield made


@pytest.fixture(scope="module")
def worker(
    home: Path, impatient: Broker, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[Worker]:
    """Give a worker that runs two tasks at once.

    Celery looks at a result and then writes that its task has started: it may overwrite the result
    of a run that ends at that moment. The manual says so.
    """
    settings = {"task_track_started": False}
    with django_db_blocker.unblock(), working(home, impatient, slots=2, settings=settings) as made:
        yield made


def began(crew: Crew) -> int:
    """Return how many runs have begun."""
    return len(crew.stage.told("began"))


@pytest.mark.parametrize(
    ("store", "name"),
    [
        ("default", "late"),
        ("redis", "late"),
        ("default", "late_wait"),
        ("redis", "late_run"),
        ("default", "late_permit"),
        ("redis", "late_permit"),
    ],
)
def test_c5_task_that_arrives_while_it_runs_waits(
    worker: Worker, sender: Celery, crew_of: Callable[..., Crew], name: str
) -> None:
    """The same task id is no right to the key: it is queued again, and has run once in the end."""
    crew = crew_of(worker, sender)
    result = crew.send(name, "wait go")
    crew.begun()
    seen = f"The task {result.id} was redelivered and waits for its own run"
    crew.until(lambda: bool(worker.said().count(seen) >= 2 or began(crew) > 1), "it has come again")
    assert began(crew) <= 1, "a task ran twice"
    assert crew.is_taken()
    crew.let_go(result)
    time.sleep(AGAIN)
    assert began(crew) <= 1, "a task ran twice"
    assert len(crew.stage.told("ended")) == 1
    assert result.state == "SUCCESS"
    crew.becomes_free()


@pytest.mark.parametrize("store", ["redis"])
def test_run_that_ignores_itself_is_over(
    worker: Worker, sender: Celery, crew_of: Callable[..., Crew]
) -> None:
    """It has no result, and is not run again either when it was delivered again meanwhile."""
    crew = crew_of(worker, sender)
    result = crew.send("late", "wait go", "ignore")
    crew.until(lambda: f"{result.id} was redelivered and" in worker.said(), "it has come again")
    crew.stage.open("go")
    has_run = f"{result.id} was redelivered, but has already run"
    crew.until(lambda: has_run in worker.said() or began(crew) > 1, "it has come once more")
    assert began(crew) == 1


@pytest.mark.parametrize("store", ["redis"])
def test_replacement_behind_a_retry_runs(
    worker: Worker, sender: Celery, crew_of: Callable[..., Crew]
) -> None:
    """It has the id of the task, and counts its retries anew: the first run was another one."""
    crew = crew_of(worker, sender)
    result = crew.send("late", "retry 0", "replace go")
    crew.until(lambda: f"{result.id} was redelivered and" in worker.said(), "it waits for the run")
    crew.let_go(result)
    assert crew.stage.told("replaced")


@pytest.mark.parametrize(("store", "name"), [("default", "late"), ("redis", "unique_late")])
def test_delivery_of_a_run_that_has_ended_runs_nothing(
    rabbitmq: Broker, hire: Hire, name: str
) -> None:
    """A worker that dies before it acknowledges has done its work: its result stays as it is."""
    with hire(rabbitmq) as crew:
        result = crew.send(name, "wait go")
        crew.begun()
        # The child goes on; what acknowledges its work stands still, and then dies.
        crew.worker.signal("STOP")
        crew.let_go(result)
        crew.becomes_free()
        crew.becomes_free(crew.claim)
        before = _stored(crew.app, result.id)
        with hire(rabbitmq, queue=crew.worker.queue) as successor:
            crew.worker.kill()
            crew.until(lambda: result.id in successor.worker.said(), "it has come again")
            crew.until(lambda: "has already run" in successor.worker.said(), "it is refused")
            # What comes behind it is run, so it was done with.
            assert crew.outcome(crew.signature("plain").apply_async()) == "SUCCESS"
            began = [each["task_id"] for each in crew.stage.told("began")]
            assert began.count(result.id) <= 1, "a task ran twice"
            assert _stored(crew.app, result.id) == before
            assert not crew.is_taken()
            assert not crew.is_taken(crew.claim)


def _stored(app: Celery, task_id: str) -> dict[str, object]:
    meta: dict[str, object] = app.backend.get_task_meta(task_id, cache=False)
    return meta
