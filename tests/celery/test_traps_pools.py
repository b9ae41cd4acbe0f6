"""What pools do to locks: forks, greenlets, signals. The numbers are those of the survey."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from django_distlock import LockLost
from django_distlock.handler import lock_backends
from tests.contract.helpers import Later

from .brokers import Broker
from .crews import Crew, Hire
from .tasks import SHORT, STORES


def test_c11_children_lock_behind_a_parent_that_has_locked(hire: Hire) -> None:
    """What the parent opened before the fork is left to it: children renew leases of their own."""
    forked = {"DISTLOCK_TEST_LOCK_BEFORE_FORK": "1"}
    with hire(slots=2, environment=forked) as crew:
        others = crew.stage.of(f"{crew.key}:other")
        sent = [
            crew.send("short", "check", "wait go", "check"),
            crew.task("short").apply_async(
                (others.key, ["check", "wait go", "check"]), **crew.to()
            ),
        ]
        crew.begun()
        crew.until(lambda: bool(others.told("held")), "both run")
        assert {each["pid"] for each in (*crew.stage.told("began"), *others.told("began"))} == set(
            crew.worker.children()
        )
        # Longer than a lease lives that nobody renews.
        time.sleep(SHORT + 1.5)
        crew.stage.open("go")
        others.open("go")
        assert [crew.outcome(each) for each in sent] == ["SUCCESS"] * 2
        for stage in (crew.stage, others):
            assert len(stage.told("held")) == 2
        crew.becomes_free()


@pytest.mark.parametrize("store", ["default"])
def test_c11_parent_opens_nothing(broker: Broker, hire: Hire) -> None:
    """A parent whose children have locked is connected to no lock store."""
    with hire() as crew:
        for store in STORES:
            result = replace(crew, store=store).send("early")
            assert crew.outcome(result) == "SUCCESS"
        stores = {
            urlsplit(os.environ[f"DISTLOCK_TEST_{name}_URL"]).port for name in ("POSTGRES", "REDIS")
        }
        name = f"{crew.worker.name}@tests"
        (said,) = crew.app.control.broadcast("peers", reply=True, destination=[name], timeout=20)
        # It is to its broker.
        assert urlsplit(broker.url).port in said[name]
        assert not stores & set(said[name])


def test_c12_heartbeat_beats_while_greenlets_wait(gevent: Crew) -> None:
    """A lease outlives its ttl in a pool of greenlets, while other tasks run."""
    result = gevent.send("short", "wait go", "check")
    gevent.begun()
    assert gevent.stays_taken(SHORT + 1.5)
    assert gevent.outcome(gevent.signature("plain").apply_async()) == "SUCCESS"
    gevent.let_go(result)
    assert gevent.stage.told("held")
    gevent.becomes_free()


def test_c12_greenlet_that_starves_the_heartbeat_learns_of_its_loss(gevent: Crew) -> None:
    """No greenlet ran that could renew: the deadline alone says so, and the task fails."""
    result = gevent.send("short", "check", f"spin {SHORT + 0.2}", "check")
    assert gevent.outcome(result) == "FAILURE"
    assert isinstance(result.result, LockLost)
    assert [each["event"] for each in gevent.stage.told("held", "lost")] == ["held", "lost"]
    gevent.becomes_free()


def test_c13_locks_use_no_signals(prefork: Crew) -> None:
    """Signals belong to Celery: under a lock the same ones are handled as without."""
    assert prefork.outcome(prefork.signature("plain", "handlers").apply_async()) == "SUCCESS"
    assert prefork.outcome(prefork.send("short", "sleep 1.2", "handlers")) == "SUCCESS"
    without, under = (
        {name: said.split(" at 0x")[0] for name, said in each["handlers"].items()}
        for each in prefork.stage.told("handlers")
    )
    assert under == without


def test_c13_loss_interrupts_no_body(prefork: Crew) -> None:
    """A body whose lease is taken away may ask, and is not torn; then the task fails."""
    result = prefork.send("short", "lose", "check")
    prefork.begun()
    assert Later(lock_backends[prefork.store].force_release, prefork.key).result() is not None
    assert prefork.outcome(result) == "FAILURE"
    assert isinstance(result.result, LockLost)
    assert prefork.stage.told("lost")
    assert prefork.stage.told("ended")
    assert not prefork.stage.told("failed")
