"""However a run ends, its key is free then, and not before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from tests.contract.locking import eventually

from .brokers import Broker
from .conftest import Fleet
from .crews import Crew, Hire
from .tasks import SHORT
from .workers import start_worker, wait_until_ready


# A worker begins with a look at all databases.
@pytest.mark.servers("PostgreSQL", "MariaDB", "Redis")
def test_success(prefork: Crew) -> None:
    """The key is taken from before the body until behind it."""
    result = prefork.send("early", "wait go")
    assert prefork.begun()["lease"] == prefork.key
    assert prefork.is_taken()
    prefork.let_go(result)
    prefork.becomes_free()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_endings_in_threads_and_greenlets(
    fleet: Fleet, crew_of: Callable[..., Crew], pool: str
) -> None:
    """The same where tasks share a process: each ends with its own key, and no other."""
    crew = crew_of(fleet.worker(pool))
    crews = [crew.beside(each) for each in ("fails", "succeeds", "stays")]
    results = [
        each.send("early", "wait go", *steps)
        for each, steps in zip(crews, (["raise oops"], [], []), strict=True)
    ]
    began = [each.begun() for each in crews]
    assert [each["lease"] for each in began] == [each.key for each in crews]
    assert {each["pid"] for each in began} == {crew.worker.pid}
    for number, state in enumerate(("FAILURE", "SUCCESS", "SUCCESS")):
        assert all(each.is_taken() for each in crews[number:])
        crews[number].stage.open("go")
        assert crew.outcome(results[number]) == state
        crews[number].becomes_free()


def test_c3_exceptions_of_any_kind(prefork: Crew) -> None:
    """The key is free behind the body, whether or not Celery takes it for the end of the task."""
    endings = {"raise oops": "ValueError", "retry 300": "Retry", "ignore": "Ignore"}
    endings["reject"] = "Reject"
    crews = {ending: prefork.beside(ending.partition(" ")[0]) for ending in endings}
    results = [crew.send("early", "wait go", ending) for ending, crew in crews.items()]
    for ending, crew in crews.items():
        crew.begun()
        assert crew.is_taken()
        crew.stage.open("go")
        crew.until(partial(crew.stage.told, "failed"), "the body has ended")
        crew.becomes_free()
        assert crew.stage.told("failed")[0]["error"] == endings[ending]
    for each in results:
        each.revoke()


def test_retry(prefork: Crew) -> None:
    """The next attempt has the key by a grant of its own: it was free in between."""
    crews = {name: prefork.beside(name) for name in ("early", "late")}
    results = [crew.send(name, "retry 1") for name, crew in crews.items()]
    assert [prefork.outcome(each) for each in results] == ["SUCCESS"] * 2
    for crew in crews.values():
        first, second = crew.stage.told("began")
        assert (first["retries"], second["retries"]) == (0, 1)
        assert second["fence"] > first["fence"]
        crew.becomes_free()


def test_reject_that_queues_again(prefork: Crew) -> None:
    """A message that the body hands back runs again, although its task has run before."""
    result = prefork.send("late", "reject requeue")
    assert prefork.outcome(result) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 2
    prefork.becomes_free()


def test_soft_time_limit(prefork: Crew) -> None:
    """A body that lets it end its work gives the key back then; one that needs time keeps it."""
    slow = prefork.beside("slow")
    result = prefork.send("early", "wait never", soft_time_limit=1)
    ending = slow.send("early", "clean_up go", soft_time_limit=1)
    prefork.begun()
    assert prefork.is_taken()
    assert prefork.outcome(result) == "FAILURE"
    assert isinstance(result.result, SoftTimeLimitExceeded)
    prefork.becomes_free()
    slow.until(lambda: bool(slow.stage.told("limited")), "the limit")
    assert slow.stays_taken(1)
    slow.let_go(ending)
    slow.becomes_free()


def test_soft_time_limit_by_an_operator(prefork: Crew) -> None:
    """A body that was told to end by `revoke()`, and lives on, keeps its key until it has ended."""
    result = prefork.send("hasty", "clean_up go", "check")
    child = prefork.begun()["pid"]
    result.revoke(terminate=True, signal="SIGUSR1")
    prefork.until(lambda: bool(prefork.stage.told("limited")), "the limit")
    # Longer than the grace, and the second behind each lease.
    assert prefork.stays_taken(1.6)
    prefork.stage.open("go")
    prefork.until(lambda: bool(prefork.stage.told("ended")), "the body has ended")
    assert prefork.stage.told("held")
    prefork.becomes_free()
    # Celery takes every later death of this process for the operator's, and revokes what ran in it.
    os.kill(child, signal.SIGKILL)
    prefork.until(lambda: child not in prefork.worker.children(), "the process has ended")


def test_revoked_before_its_start(prefork: Crew) -> None:
    """A task that never runs never takes its key."""
    result = prefork.send("early", countdown=1)
    result.revoke()
    assert prefork.outcome(result) == "REVOKED"
    assert not prefork.is_taken()
    assert not prefork.stage.told("began")


def test_hold(prefork: Crew) -> None:
    """The key is free when the ttl, or `min_hold`, has passed since the grant, and not before."""
    crews = {name: prefork.beside(name) for name in ("hold", "min_hold")}
    results = {name: crew.send(name, "wait go") for name, crew in crews.items()}
    granted_at = {}
    for name, crew in crews.items():
        crew.begun()
        granted_at[name] = crew.record().acquired_at
        crew.let_go(results[name])
    for name, crew in crews.items():
        crew.becomes_free()
        assert datetime.now(UTC) - granted_at[name] >= timedelta(seconds=SHORT)


def test_c15_warm_shutdown_waits_under_the_lock(hire: Hire) -> None:
    """A worker that ends in peace renews the lease of the task that it waits for."""
    with hire() as crew:
        result = crew.send("short", "wait go", "check")
        crew.begun()
        crew.worker.signal("TERM")
        # Longer than it would live without its heartbeat.
        assert crew.stays_taken(SHORT + 2.5)
        crew.stage.open("go")
        crew.worker.wait()
        assert crew.stage.told("held")
        assert result.state == "SUCCESS"
        crew.becomes_free()


@pytest.mark.parametrize(
    ("store", "patience"), [("default", 0), ("redis", 5)], ids=["default-cold", "redis-soft"]
)
def test_c15_shutdown_that_waits_for_nobody(
    home: Path, broker: Broker, hire: Hire, patience: int
) -> None:
    """A worker that is told to end at once leaves the key to the next one, and the task too.

    With a soft shutdown, it is not ended before its time.
    """
    settings = {"worker_soft_shutdown_timeout": patience}
    with hire(settings=settings) as crew:
        result = crew.send("late", "wait go")
        crew.begun()
        crew.worker.signal("QUIT")
        if patience:
            assert crew.stays_taken(1)
        successor = start_worker(home, broker, queue=crew.worker.queue)
        try:
            assert eventually(lambda: not crew.is_taken() or len(crew.stage.told("began")) > 1, 20)
            # The first run has ended by then.
            crew.worker.wait()
            wait_until_ready(home, successor)
            crew.begun(2)
            assert crew.is_taken()
            crew.let_go(result)
        finally:
            successor.kill()
        assert not crew.stage.told("overlapped")
        crew.becomes_free()
