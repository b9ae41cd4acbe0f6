"""However a run ends, its key is free then, and not before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
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


@pytest.mark.parametrize(
    ("steps", "state"), [([], "SUCCESS"), (["raise oops"], "FAILURE")], ids=["success", "exception"]
)
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_endings_in_threads_and_greenlets(
    fleet: Fleet, crew_of: Callable[..., Crew], pool: str, steps: list[str], state: str
) -> None:
    """The same where tasks share a process: each ends with its own key, and no other."""
    crew = crew_of(fleet.worker(pool))
    other = crew.stage.of(f"{crew.key}:other")
    result = crew.send("early", "wait go", *steps)
    beside = crew.task("early").apply_async((other.key, ["wait go"]), **crew.to())
    assert crew.begun()["lease"] == crew.key
    crew.until(lambda: bool(other.told("began")), "both run")
    began = (*crew.stage.told("began"), *other.told("began"))
    assert {each["pid"] for each in began} == {crew.worker.pid}
    assert crew.is_taken()
    crew.stage.open("go")
    assert crew.outcome(result) == state
    crew.becomes_free()
    assert crew.is_taken(other.key)
    other.open("go")
    assert crew.outcome(beside) == "SUCCESS"
    crew.becomes_free(other.key)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("raise oops", "ValueError"),
        ("retry 300", "Retry"),
        ("ignore", "Ignore"),
        ("reject", "Reject"),
    ],
)
def test_c3_exceptions_of_any_kind(prefork: Crew, ending: str, told: str) -> None:
    """The key is free behind the body, whether or not Celery takes it for the end of the task."""
    result = prefork.send("early", "wait go", ending)
    prefork.begun()
    assert prefork.is_taken()
    prefork.stage.open("go")
    prefork.until(lambda: bool(prefork.stage.told("failed")), "the body has ended")
    prefork.becomes_free()
    assert prefork.stage.told("failed")[0]["error"] == told
    result.revoke()


@pytest.mark.parametrize("name", ["early", "late"])
def test_retry(prefork: Crew, name: str) -> None:
    """The next attempt has the key by a grant of its own: it was free in between."""
    result = prefork.send(name, "retry 1")
    assert prefork.outcome(result) == "SUCCESS"
    first, second = prefork.stage.told("began")
    assert (first["retries"], second["retries"]) == (0, 1)
    assert second["fence"] > first["fence"]
    prefork.becomes_free()


def test_reject_that_queues_again(prefork: Crew) -> None:
    """A message that the body hands back runs again, although its task has run before."""
    result = prefork.send("late", "reject requeue")
    assert prefork.outcome(result) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 2
    prefork.becomes_free()


def test_soft_time_limit(prefork: Crew) -> None:
    """A body that lets it end its work gives the key back then."""
    result = prefork.send("early", "wait never", soft_time_limit=1)
    prefork.begun()
    assert prefork.is_taken()
    assert prefork.outcome(result) == "FAILURE"
    assert isinstance(result.result, SoftTimeLimitExceeded)
    prefork.becomes_free()


def test_soft_time_limit_with_work_left(prefork: Crew) -> None:
    """A body that needs time to end keeps its key meanwhile."""
    result = prefork.send("early", "clean_up go", soft_time_limit=1)
    prefork.until(lambda: bool(prefork.stage.told("limited")), "the limit")
    assert prefork.stays_taken(1)
    prefork.let_go(result)
    prefork.becomes_free()


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


@pytest.mark.parametrize("name", ["hold", "min_hold"])
def test_hold(prefork: Crew, name: str) -> None:
    """The key is free when the ttl, or `min_hold`, has passed since the grant, and not before."""
    result = prefork.send(name, "wait go")
    prefork.begun()
    granted_at = prefork.record().acquired_at
    prefork.let_go(result)
    prefork.becomes_free()
    assert datetime.now(UTC) - granted_at >= timedelta(seconds=SHORT)


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


@pytest.mark.parametrize("patience", [0, 5], ids=["cold", "soft"])
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
