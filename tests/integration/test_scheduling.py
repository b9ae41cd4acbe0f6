"""`scheduled`: of many that a schedule starts, one does the work."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from celery import Celery
from django.core import checks
from django.db import connections
from django.test import override_settings

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    InvalidLockBackend,
    LockNotAcquired,
    LockUsageError,
    RunScope,
    current_lease,
    distlock,
    lock_backends,
)
from django_distlock.conf import table
from django_distlock.core.declarations import declared
from django_distlock.core.keys import own_key
from django_distlock.scheduling import Skipped, scheduled
from django_distlock.testing import advance, lose_connection, memory_locks
from tests.contract.helpers import Later, at_once, prompt, there
from tests.contract.locking import eventually
from tests.processes import spawn

from .databases import server

RUNS: list[str] = []

MEMORY = {"BACKEND": "django_distlock.backends.memory.MemoryBackend"}
DATABASE = {"BACKEND": "django_distlock.backends.database.DatabaseBackend"}


@pytest.fixture(autouse=True)
def _no_runs() -> Iterator[None]:
    RUNS.clear()
    yield
    # The checks of other tests are not about what is decorated here.
    declared.clear()


def tick(name: str, **options: Any) -> Any:
    """Return the work of a schedule."""

    @scheduled(name, **{"expected": 20, **options})
    def work() -> str:
        """Note that it runs."""
        RUNS.append(name)
        lease = current_lease()
        return f"held={bool(lease and lease.held)}"

    return work


def run_tick(name: str) -> bool:
    """Be another node."""
    return bool(tick(name)())


def run_tick_twice_in_memory(name: str) -> list[bool]:
    """Be another node, whose backend no other process sees."""
    with override_settings(DISTLOCK={"default": MEMORY}):
        work = tick(name, scope=RunScope.PREFER_GLOBAL)
        return [bool(work()), bool(work())]


def test_one_of_many_runs(key: str) -> None:
    """The first one that is granted the key; the others are told, and do not wait."""
    began = time.monotonic()
    made = at_once([tick(key)] * 6)
    assert time.monotonic() - began < 10
    assert [key] == RUNS
    assert "held=True" in made
    skipped = [each for each in made if isinstance(each, Skipped)]
    assert len(skipped) == 5
    assert not any(skipped)
    assert {each.key for each in skipped} == {own_key(f"schedule:{key}")}
    assert all(isinstance(each.why, LockNotAcquired) for each in skipped)


def test_as_many_run_as_there_are_permits(key: str) -> None:
    """Of six nodes two, each of which keeps its permit for the window."""
    made = at_once([tick(key, permits=2)] * 6)
    assert [key, key] == RUNS
    assert sum(isinstance(each, Skipped) for each in made) == 4
    assert isinstance(tick(key, permits=lambda: 2)(), Skipped)
    assert tick(key, permits=lambda: 3)() == "held=True"


def test_run_that_cannot_be_noted_is_run(
    key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What people are told by is no reason to skip a tick."""

    def lost(*_: object) -> None:
        raise BackendUnavailable("The store is away.")

    monkeypatch.setattr(lock_backends["default"].notes, "put", lost)
    assert tick(key, every=60)()
    said = [vars(each).get("distlock_event") for each in caplog.records]
    assert said.count("note_failed") == 1
    assert lock_backends["default"].notes.get(own_key(f"schedule:{key}")) is None


def test_one_of_several_processes_runs(key: str) -> None:
    """Also where they are other processes, and one comes behind the end of the work."""
    target = "tests.integration.test_scheduling:run_tick"
    with spawn(target, key) as first, spawn(target, key) as second, spawn(target, key) as third:
        assert sorted([first.result(), second.result(), third.result()]) == [False, False, True]


@memory_locks()
def test_key_stays_taken_for_the_window() -> None:
    """A node whose clock is late finds it taken, and the next tick finds it free."""
    work = tick("window", expected=20, margin=10)
    assert work()
    advance(29)
    assert not work()
    advance(1.5)
    assert work()
    # Where ticks are numbered by themselves, or come as often as they like.
    unheld = tick("free", hold=False)
    assert unheld()
    assert unheld()


@memory_locks()
def test_ttl_is_the_expected_time_and_the_margin() -> None:
    """The margin is half of the expected time unless it is given."""
    seen = []

    def work() -> None:
        seen.append(there(current_lease()).remaining())

    scheduled("by itself", expected=20)(work)()
    scheduled("given", expected=timedelta(minutes=1), margin=5)(work)()
    scheduled("none", expected=20, margin=0)(work)()
    assert seen == pytest.approx([30, 65, 20], abs=0.5)


def test_every_node_runs_what_is_local(key: str) -> None:
    """No lock is taken, and no store is asked."""
    work = tick(key, scope=RunScope.NODE_LOCAL)
    with lose_connection():
        assert [work(), work()] == ["held=False"] * 2


def test_scope_where_backends_are_of_one_process_or_missing(key: str) -> None:
    """Who prefers global excludes the threads of this process; who requires it does not run."""
    assert not lock_backends["memory"].distributed
    work = tick(key, scope=RunScope.PREFER_GLOBAL, backend="memory")
    made = at_once([work] * 4)
    assert [key] == RUNS
    assert sum(isinstance(each, Skipped) for each in made) == 3
    assert distlock(own_key(f"schedule:{key}"), backend="memory").locked()
    work = tick(f"{key}:prefers", scope=RunScope.PREFER_GLOBAL)
    assert work() == "held=True"
    assert distlock(own_key(f"schedule:{key}:prefers")).locked()
    RUNS.clear()
    with override_settings(DISTLOCK={}):
        assert work() == "held=True"
        assert isinstance(work(), Skipped)
        with pytest.raises(InvalidLockBackend):
            tick("requires")()
    assert [f"{key}:prefers"] == RUNS


def test_prefers_global_and_each_process_runs(key: str) -> None:
    """Without a distributed backend, each process runs the tick, once."""
    target = "tests.integration.test_scheduling:run_tick_twice_in_memory"
    with spawn(target, key) as first, spawn(target, key) as second:
        assert [first.result(), second.result()] == [[True, False]] * 2


@pytest.mark.parametrize("backend", [MEMORY, DATABASE], ids=["one process", "distributed"])
def test_alias_that_is_misspelt_runs_nowhere(backend: dict[str, str]) -> None:
    """It is a mistake of the project, and raised: neither the work runs nor is the tick skipped."""
    for scope in (RunScope.REQUIRE_GLOBAL, RunScope.PREFER_GLOBAL):
        for made in BOTH:
            work = made("misspelt", scope=scope, backend="jbos")
            with (
                override_settings(DISTLOCK={"jobs": backend}),
                pytest.raises(InvalidLockBackend, match=r"'jbos' is not configured.*'jobs'"),
            ):
                work()
    assert RUNS == []


def tick_in_async(name: str, **options: Any) -> Any:
    """Return the work of a schedule, which is a coroutine function, to be called."""

    @scheduled(name, **{"expected": 20, **options})
    async def work() -> str:
        """Note that it runs."""
        RUNS.append(name)
        return "done"

    return lambda: asyncio.run(work())


#: Work that is called, and work that is awaited.
BOTH = (tick, tick_in_async)


@contextmanager
def locked_table() -> Iterator[psycopg.Connection[Any]]:
    """Lock the table of locks as `VACUUM FULL` and migrations do."""
    with server(connections["default"].settings_dict["NAME"]) as raw:
        raw.execute("BEGIN")
        raw.execute(f'LOCK TABLE "{table("locks")}" IN ACCESS EXCLUSIVE MODE')
        yield raw


@pytest.mark.parametrize("trouble", [locked_table, lose_connection])
def test_trouble_of_the_store_is_no_other_node(
    key: str, trouble: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows whether another one does the work, so it is not left to it: an error."""
    scopes = (RunScope.REQUIRE_GLOBAL, RunScope.PREFER_GLOBAL)
    with trouble():
        for work in [made(key, scope=each, margin=0) for made in BOTH for each in scopes]:
            skipped = Later(work).result()
            assert isinstance(skipped, Skipped)
            assert isinstance(skipped.why, BackendUnavailable)
            errors = [each.message for each in caplog.records if each.levelno == logging.ERROR]
            assert any(key in each for each in errors)
            caplog.clear()
    assert RUNS == []


@pytest.mark.parametrize("made", BOTH, ids=["called", "awaited"])
def test_tick_is_tried_again_in_its_margin(
    key: str, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A table that is locked for a while, or a short outage, costs no tick; a rival's is left."""
    with locked_table() as raw:
        work = Later(made(key, margin=120))
        assert eventually(lambda: any("is retried" in each.message for each in caplog.records), 60)
        raw.rollback()
        assert work.result()
    with prompt():
        assert isinstance(Later(made(key, margin=60)).result(), Skipped)
    assert RUNS.count(key) == len(RUNS) == 1
    errors = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert not [each for each in errors if key in each]


@memory_locks()
def test_overrun_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A run beyond its time goes on alone, and says what was declared; others say nothing."""

    @scheduled("slow", expected=10, margin=2)
    def work() -> bool:
        """Take its time."""
        advance(30)
        return isinstance(Later(work).result(), Skipped)

    assert tick("quick")()
    assert work()
    (said,) = [each.message for each in caplog.records if "overrun" in each.message]
    assert repr(own_key("schedule:slow")) in said
    assert "12.0 s were declared (10.0 s expected)" in said


def test_error_of_the_work_is_its_own(key: str) -> None:
    """Also one that looks like a conflict about the tick."""
    taken = Later(distlock(f"{key}:inner").acquire).result()

    @scheduled(key, expected=5)
    def work() -> None:
        """Run into a conflict."""
        distlock(f"{key}:inner", wait=0).acquire()

    with pytest.raises(LockNotAcquired, match="inner"):
        work()
    Later(taken.release).result()


def test_name_is_a_template(key: str) -> None:
    """A schedule for each tenant, or for each day."""

    @scheduled("{tenant}:report", expected=5)
    def work(tenant: str, count: int = 1) -> int:
        """Return something."""
        return count

    assert work(key, count=3) == 3
    assert isinstance(work(tenant=key), Skipped)
    assert work(f"{key}-2") == 1


def test_asynchronous_work(key: str) -> None:
    """The same for coroutine functions."""

    @scheduled(key, expected=5)
    async def work() -> bool:
        """Look at the lease."""
        lease = current_lease()
        return lease is not None and lease.held

    @scheduled(key, expected=5, scope=RunScope.NODE_LOCAL)
    async def local() -> bool:
        """Look for a lease."""
        return current_lease() is None

    async def main() -> list[Any]:
        return list(await asyncio.gather(work(), work(), local()))

    first, second, third = asyncio.run(main())
    assert {isinstance(first, Skipped), isinstance(second, Skipped)} == {True, False}
    assert third is True


def test_check_warns_of_a_lock_that_no_other_node_sees() -> None:
    """W003 names the schedule and the setting, and nothing else is warned of."""
    works = [tick(scope.name, scope=scope) for scope in RunScope]
    found: list[list[str]] = []
    for backend in (MEMORY, DATABASE):
        with override_settings(DISTLOCK={"default": backend}):
            warned = [each for each in checks.run_checks() if each.id == "distlock.W003"]
        found.append([each.msg for each in warned])
    (message,), none = found
    assert "'REQUIRE_GLOBAL'" in message
    assert "DISTLOCK['default']" in message
    assert none == []
    del works


def test_jitter_spreads_the_load(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits for another part of it, before anything else."""
    slept: list[float] = []
    monkeypatch.setattr("django_distlock.scheduling.time.sleep", slept.append)
    work = tick(key, jitter=5, scope=RunScope.NODE_LOCAL)
    for _ in range(50):
        work()
    assert len(set(slept)) > 40
    assert 0 <= min(slept) < 2 < 3 < max(slept) <= 5


def test_jitter_is_shorter_than_the_window(key: str) -> None:
    """Or a node whose wait is long would run again what another one has done."""
    for jitter, margin in ((10, 0), (12, 4), (timedelta(seconds=15), None)):
        with pytest.raises(InvalidArgument, match="jitter must be below"):
            tick(key, expected=10, margin=margin, jitter=jitter)
    tick(key, expected=10, margin=4, jitter=11.9)
    tick(key, expected=10, margin=4, jitter=60, hold=False)


def test_arguments_that_cannot_be() -> None:
    """They are refused where the decorator stands."""
    bad: list[dict[str, Any]] = [
        {"scope": "global"},
        {"expected": 0},
        {"expected": -1},
        {"margin": -1},
        {"jitter": "x"},
        {"hold": 1},
        {"backend": 5},
        {"ttl": 5},
        {"wait": 5},
        {"on_conflict": "run"},
        {"expected": 0.01, "margin": 0},
        {"every": 0},
        {"every": 400 * 86_400},
        {"every": "60"},
        {"every": True},
        # Each node runs it itself: there is no interval to watch.
        {"every": 60, "scope": RunScope.NODE_LOCAL},
    ]
    for options in bad:
        with pytest.raises(InvalidArgument):
            tick("bad", **options)


def test_what_was_skipped_is_json(key: str) -> None:
    """Queues of tasks keep results as JSON: who has left a tick to others has not failed."""
    tick(key)()
    skipped = Later(tick(key)).result()
    told = json.loads(json.dumps(skipped))
    assert told.pop("holder")["pid"] == os.getpid()
    assert told == {
        "distlock": "skipped",
        "key": own_key(f"schedule:{key}"),
        "why": "acquisition_timeout",
    }
    copy = pickle.loads(pickle.dumps(skipped))
    assert (copy.key, copy.why.code, bool(copy)) == (
        own_key(f"schedule:{key}"),
        skipped.why.code,
        False,
    )


def test_tick_of_a_task_that_is_left_to_others_succeeds(key: str) -> None:
    """As a task of Celery, and as one of Django: the result says that it was skipped."""
    app = Celery("ticks", set_as_current=False)
    app.conf.update(
        task_always_eager=True, task_store_eager_result=True, result_backend="cache+memory://"
    )
    work = app.task(shared=False, name="tick")(tick(key))
    assert work.delay().get() == "held=True"
    left = Later(work.delay).result()
    assert (left.state, left.get()["distlock"]) == ("SUCCESS", "skipped")


def test_scheduled_stands_above_a_plain_function(key: str) -> None:
    """Above a task, it would wrap something that no worker calls; others run later."""

    def generator() -> Iterator[int]:
        yield 1

    def plain() -> None: ...

    async def awaited() -> None:
        RUNS.append("awaited")

    @functools.wraps(awaited)
    def wrapped() -> Any:
        return awaited()

    @scheduled(key, expected=5)
    def work() -> object:
        return awaited()

    task = Celery("ticks", set_as_current=False).task(shared=False)(plain)
    for target in (task, generator, wrapped):
        with pytest.raises((InvalidArgument, LockUsageError), match="function|generator"):
            scheduled(key, expected=5)(target)
    with pytest.raises(LockUsageError, match="work returns a coroutine"):
        work()
    assert RUNS == []
