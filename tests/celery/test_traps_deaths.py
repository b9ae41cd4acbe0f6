"""Runs whose process dies: nobody is left in it to give the key back."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime

import pytest

from django_distlock import distlock
from tests.contract.helpers import there

from .brokers import Broker
from .crews import Crew, Hire


def test_c4_killed_child(on_each_store: list[Crew]) -> None:
    """The parent sees the death of a child and ends its lease, minutes before its time."""
    sent = [crew.send("early", "wait go") for crew in on_each_store]
    for crew in on_each_store:
        os.kill(crew.begun()["pid"], signal.SIGKILL)
    for crew, result in zip(on_each_store, sent, strict=True):
        crew.becomes_free()
        assert crew.outcome(result) == "FAILURE"


@pytest.mark.parametrize("store", ["default"])
def test_dead_child_is_found_by_its_task(prefork: Crew) -> None:
    """Where a function makes the key, the parent finds by the task's id what its child held."""
    result = prefork.send("called", "wait go")
    child = prefork.begun()["pid"]
    assert prefork.is_taken(f"{prefork.key}:called")
    os.kill(child, signal.SIGKILL)
    assert prefork.outcome(result) == "FAILURE"
    prefork.becomes_free(f"{prefork.key}:called")


def test_c4_killed_child_of_a_task_that_runs_again(on_each_store: list[Crew]) -> None:
    """The lease of the next run, which has the same task id, is not taken for the dead one."""
    sent = [crew.send("late", "die", "wait go", "check") for crew in on_each_store]
    for crew in on_each_store:
        crew.begun(2)
    assert on_each_store[0].stays_taken(4)
    for crew, result in zip(on_each_store, sent, strict=True):
        assert crew.is_taken()
        crew.let_go(result)
        assert crew.stage.told("held")
        crew.becomes_free()
        assert not crew.stage.told("overlapped")


def frees_the_key_behind_the_body(crews: list[Crew]) -> None:
    """Check that keys become free, long before their time, and none while its body is alive."""
    for crew in crews:
        crew.becomes_free()
        # Asked behind the key, for both may end in between.
        assert not crew.stage.busy()


def test_c4_hard_time_limit(on_each_store: list[Crew]) -> None:
    """The lease of a run that is killed for its time ends when its process is dead."""
    sent = [crew.send("early", "wait never", time_limit=1) for crew in on_each_store]
    for crew in on_each_store:
        crew.begun()
    assert all(crew.is_taken() for crew in on_each_store)
    frees_the_key_behind_the_body(on_each_store)
    # Celery tells of it twice. Who has the key by now is not meant.
    leases = [distlock(crew.key, backend=crew.store, ttl=60).acquire() for crew in on_each_store]
    assert [crew.outcome(result) for crew, result in zip(on_each_store, sent, strict=True)] == [
        "FAILURE"
    ] * len(sent)
    for lease in leases:
        lease.extend()
        assert lease.release()


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_c4_terminated_by_an_operator(on_each_store: list[Crew], name: str) -> None:
    """The same for `revoke(terminate=True)`."""
    sent = [crew.send("early", "wait never") for crew in on_each_store]
    for crew in on_each_store:
        crew.begun()
    for result in sent:
        result.revoke(terminate=True, signal=f"SIG{name}")
    frees_the_key_behind_the_body(on_each_store)
    assert [crew.outcome(result) for crew, result in zip(on_each_store, sent, strict=True)] == [
        "REVOKED"
    ] * len(sent)


def test_c6_killed_child_loses_no_task(prefork: Crew) -> None:
    """Delivered again while the dead lease lives, a task waits for its end instead of skipping."""
    result = prefork.send("late", "die")
    assert prefork.outcome(result) == "SUCCESS"
    assert result.result["lease"] == prefork.key
    assert len(prefork.stage.told("ended")) == 1
    prefork.becomes_free()


def test_c6_killed_worker_loses_no_task(rabbitmq: Broker, hire: Hire) -> None:
    """Where nobody is left to end a lease, the next worker waits for its end, or sees it.

    A lease whose task comes no more ends by itself, and no sooner.
    """
    with hire(rabbitmq, slots=2) as crew:
        other = crew.beside("other")
        result = crew.send("late_short", "wait go")
        other.send("short", "wait go")
        crew.begun()
        other.begun()
        with hire(rabbitmq, queue=crew.worker.queue):
            assert crew.is_taken()
            # It may be renewed once more.
            expires_at = other.record().expires_at
            crew.worker.kill()
            other.becomes_free()
            assert datetime.now(UTC) >= there(expires_at)
            crew.begun(2)
            assert crew.is_taken()
            crew.let_go(result)
            assert result.result["lease"] == crew.key
            assert len(crew.stage.told("began")) == 2
            assert not crew.stage.told("overlapped")
            crew.becomes_free()
