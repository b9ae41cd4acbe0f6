"""`docs/runbooks/stuck-lock.md`."""

from __future__ import annotations

import socket

import pytest

from django_distlock.core.keys import own_key
from tests.processes import Process
from tests.services import private_redis

from .incidents import (
    PATIENCE,
    age,
    as_json,
    counter,
    grantable,
    holder,
    pause,
    record_fence,
    redis_of,
    shown,
    waiter,
)
from .pages import statements
from .walks import Walk, incident

KEY = "invoice:42"
HOUR = 3600


def named(walk: Walk, process: Process) -> None:
    """Let the page mean this holder."""
    walk.stands_for("web-3", socket.gethostname())
    walk.stands_for("4711", process.popen.pid)


@incident("stuck-lock", "Its process is gone", "postgresql", "redis")
def test_a_dead_holder_is_released(walk: Walk) -> None:
    """The page shows a lock whose process is gone, and ends it with a higher fence."""
    with holder(walk.site, KEY, ttl=2 * HOUR) as process:
        named(walk, process)
        age(walk.site, KEY, 2 * HOUR)
        process.kill()
    before = counter(walk.site, KEY)
    walk.step()
    walk.step()
    assert walk.step(status=1).text.count("\n") == 1, "the heading alone"
    walk.act()
    assert counter(walk.site, KEY) > before
    assert grantable(walk.site, KEY)


@incident("stuck-lock", "Its process lives", "mysql", "redis")
def test_a_living_holder_finishes_when_it_is_asked(walk: Walk) -> None:
    """The page shows a process that lives, which finishes its work."""
    with walk.site.start("tests.runbooks.workers:hold_until_asked", KEY, 9) as process:
        process.wait_for("held", PATIENCE)
        named(walk, process)
        walk.confirm()
        assert walk.step().text.strip() == "done"
        assert process.result(PATIENCE) == "finished"
    walk.act()
    assert grantable(walk.site, KEY)


@incident("stuck-lock", "A transaction guards it", "postgresql", "mysql")
def test_a_guard_is_ended_and_the_key_released(walk: Walk) -> None:
    """The page finds the session that sits in a guarded transaction, and ends it."""
    with walk.site.start("tests.runbooks.workers:hold_with_a_guard", KEY, HOUR) as process:
        process.wait_for("held", PATIENCE)
        taking = walk.site.command("python manage.py distlock_release --force --reason x", KEY)
        assert taking.status == 75
        if walk.site.store == "postgresql":
            (guard,) = shown(walk.site, KEY).guards or ()
            walk.stands_for("5120", guard.pid)
            walk.confirm()
        else:
            walk.left.pop(0)
            ((session, *_),) = walk.confirm()[-1].rows
            walk.stands_for("5120", session)
        walk.act()
    assert grantable(walk.site, KEY)


@incident("stuck-lock", "It is paused", "sqlite", "redis")
def test_a_pause_is_ended(walk: Walk) -> None:
    """The page shows until when a key is paused, and resumes it."""
    pause(walk.site, KEY)
    assert not grantable(walk.site, KEY)
    walk.confirm()
    walk.act()
    assert grantable(walk.site, KEY)


@incident("stuck-lock", "Its task is lost", "postgresql", "redis")
def test_the_key_of_a_lost_task_is_given_back(walk: Walk) -> None:
    """The page finds the key whose message was purged; then its task can be sent again."""
    broker = walk.servers.enter_context(private_redis())
    apps = [*walk.site.settings["INSTALLED_APPS"], "tests.runbooks.queueing"]
    walk.site.settings |= {"CELERY_BROKER_URL": broker.url, "INSTALLED_APPS": apps}
    sent = walk.site.run("tests.runbooks.queueing:send")
    assert walk.site.run("tests.runbooks.queueing:purge") == 1
    age(walk.site, own_key(f"unique:{KEY}"), HOUR)
    assert walk.site.run("tests.runbooks.queueing:send") == sent, "nothing new is queued"
    walk.confirm()
    walk.act()
    assert walk.site.run("tests.runbooks.queueing:send") != sent


@incident("stuck-lock", "Its record cannot be read", "redis")
def test_a_spoiled_record_is_removed(walk: Walk) -> None:
    """The page names the key, and removes the record behind its fence."""
    with holder(walk.site, KEY, ttl=HOUR) as process:
        process.kill()
    before = counter(walk.site, KEY)
    with redis_of(walk.site) as client:
        (name,) = client.scan_iter(f"distlock:lock:*:{KEY}")
        client.hset(name, "ttl", "long")
    walk.step(status=1)
    walk.confirm()
    walk.act()
    assert counter(walk.site, KEY) > before
    assert grantable(walk.site, KEY)


@incident("stuck-lock", "The application is down", "postgresql", "mysql", "sqlite", "redis")
def test_a_lock_is_ended_without_the_application(walk: Walk) -> None:
    """What is pasted moves the fence, lets who waits have the key, and leaves a trace.

    A key that has changed hands since somebody looked stays with its new holder.
    """
    with holder(walk.site, KEY, ttl=HOUR) as process:
        process.kill()
        fence = record_fence(walk.site, KEY)
        spares_the_next_holder(walk, fence)
        walk.stands_for("4711", process.popen.pid)
        walk.stands_for("48213", fence)
        with waiter(walk.site, KEY) as waiting:
            answers = walk.confirm()
            if walk.site.store != "redis":
                ((name, found, host, described, *_),) = answers[-1].rows
                assert (name, found) == (f"distlock:{KEY}", fence)
                assert host == socket.gethostname()
                assert as_json(described)["pid"] == process.popen.pid
            walk.act()
            assert waiting.result(PATIENCE)[0] > fence + 1
    if walk.site.store != "redis":
        events = walk.site.ask("SELECT kind, fence FROM django_distlock_lockevent")
        assert events == [("forced", fence)]


def spares_the_next_holder(walk: Walk, fence: int) -> None:
    """Act on the holder before the one with this fence; then all of the page is left again."""
    whole = walk.left
    walk.skip_to("Act")
    walk.stands_for("48213", fence - 1)
    if walk.site.store == "redis":
        with pytest.raises(AssertionError, match="it has changed hands"):
            walk.act()
    else:
        walk.act()
    walk.left = whole
    assert record_fence(walk.site, KEY) == fence
    assert counter(walk.site, KEY) == fence


@incident("stuck-lock", "The application is down", "postgresql", "mysql")
def test_what_is_pasted_is_refused_by_a_guard(walk: Walk) -> None:
    """A key that a transaction guards stays held, also where all is pasted in spite of an error."""
    walk.skip_to("Act")
    pasted, walk.left = [each for block in walk.left for each in statements(block)], []
    with walk.site.start("tests.runbooks.workers:hold_with_a_guard", KEY, HOUR) as process:
        process.wait_for("held", PATIENCE)
        fence = record_fence(walk.site, KEY)
        walk.stands_for("48213", fence)
        refused: list[str] = []
        with walk.site.session() as ask:
            for each in pasted:
                try:
                    ask(walk.read(each))
                except Exception as error:  # noqa: BLE001 - of several drivers
                    refused.append(str(error))
        assert "timeout" in refused[0]
        assert record_fence(walk.site, KEY) == fence
        assert counter(walk.site, KEY) == fence


@incident("stuck-lock", "A session lock", "session")
def test_a_session_lock_ends_with_its_session(walk: Walk) -> None:
    """The page finds the session by the key, and ends it."""
    with holder(walk.site, KEY, ttl=HOUR):
        (answer,) = walk.confirm()
        ((session, *_),) = answer.rows
        walk.stands_for("5120", session)
        assert not grantable(walk.site, KEY)
        walk.act()
        assert grantable(walk.site, KEY)
