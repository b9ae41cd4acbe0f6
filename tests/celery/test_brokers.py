"""Locked tasks behind each broker and in each pool: one at a time, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from celery.app.defaults import NAMESPACES

from django_distlock import distlock
from tests.contract.locking import held_elsewhere

from .brokers import Broker, folders_broker
from .conftest import Fleet
from .crews import Crew, Hire


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_pool_runs_one_task_of_a_key_at_a_time(
    fleet: Fleet, crew_of: Callable[..., Crew], pool: str
) -> None:
    """Of tasks that a pool could run side by side, each waits in the queue until it may run."""
    crew = crew_of(fleet.worker(pool))
    sent = [crew.send("late", "sleep 0.1") for _ in range(5)]
    assert [crew.outcome(each) for each in sent] == ["SUCCESS"] * 5
    assert len(crew.stage.told("ended")) == 5
    assert not crew.stage.told("overlapped")
    assert not crew.is_taken()


def test_without_a_lock_tasks_run_side_by_side(prefork: Crew) -> None:
    """The witness sees what the other tests say never happens."""
    sent = [prefork.send("plain", "wait go") for _ in range(2)]
    prefork.begun(2)
    prefork.let_go(*sent)
    assert prefork.stage.told("overlapped")


@pytest.mark.parametrize("store", ["default"])
def test_folders_carry_locked_tasks(tmp_path: Path, broker: Broker, hire: Hire) -> None:
    """A broker of files, and a worker that runs tasks in its main process."""
    folders = folders_broker(tmp_path, broker.results)
    with hire(folders, pool="solo") as crew:
        sent = [crew.send("early", "wait go")]
        crew.begun()
        # Not before: files come in no order.
        sent.append(crew.send("early"))
        assert crew.is_taken()
        crew.let_go(*sent)
        # One after the other: nobody was refused.
        assert len(crew.stage.told("ended")) == 2
        assert not crew.is_taken()


def test_rabbitmq_carries_locked_tasks(rabbitmq: Broker, hire: Hire) -> None:
    """Tasks of one key, of which each is queued again until it may run."""
    with hire(rabbitmq, slots=3) as crew:
        sent = [crew.send("late", "sleep 0.1") for _ in range(5)]
        assert [crew.outcome(each) for each in sent] == ["SUCCESS"] * 5
        assert len(crew.stage.told("ended")) == 5
        assert not crew.stage.told("overlapped")


@pytest.mark.parametrize("store", ["default"])
@pytest.mark.skipif(
    "default_queue_type" not in NAMESPACES["task"],
    reason="declared: Celery below 5.5 lets no broker delay messages",
)
def test_quorum_queue_carries_locked_tasks(rabbitmq: Broker, hire: Hire, key: str) -> None:
    """There Celery lets RabbitMQ delay what is queued again, by a second at least."""
    names = dict.fromkeys(("queue", "exchange", "routing_key"), key)
    default = {"queue_type": "quorum", "exchange_type": "topic", **names}
    queues = {f"task_default_{name}": value for name, value in default.items()}
    queues["broker_native_delayed_delivery_queue_type"] = "classic"
    with hire(replace(rabbitmq, queues=queues), queue=key) as crew:
        with held_elsewhere(distlock(crew.key, backend=crew.store, ttl=60)):
            result = crew.send("retry")
            crew.until(lambda: crew.stage.told("refused"), "it is queued again")
        assert crew.outcome(result) == "SUCCESS"
