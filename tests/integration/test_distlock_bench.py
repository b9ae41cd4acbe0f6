"""`manage.py distlock_bench`: what it measures on each store, what it leaves, and how it ends."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import IO, Any
from unittest.mock import Mock

import pytest
from django.test import override_settings
from redis import Redis

from django_distlock import distlock, lock_backends
from django_distlock.management.bench import HAND_OFF, PAIR, RUN, Plan, Times
from django_distlock.models import FenceCounter, HeldLock
from tests.backends import BACKENDS
from tests.contract.helpers import listed
from tests.contract.locking import eventually, held_elsewhere
from tests.fork_server import Forked
from tests.services import private_redis
from tests.settings import REDIS_BACKEND

from .operating import DEAD, run
from .projects import PATIENCE, Project
from .runs import started

SMALL = ("--seconds=0.1", "--rounds=3")
KEYS = {RUN, PAIR, HAND_OFF}


@pytest.mark.parametrize("alias", ["memory", "sqlite", "postgres", "redis", "advisory"])
def test_backend_is_measured(alias: str) -> None:
    """Pairs and hand-offs; nothing stays but a counter for each key."""
    store = lock_backends[alias]
    ran = run("distlock_bench", f"--backend={alias}", *SMALL, "--json")
    assert (ran.status, ran.err) == (0, "")
    document = ran.json
    assert document["failures"] == []
    assert (document["seconds"], document["rounds"]) == (0.1, 3)
    (told,) = document["backends"]
    assert (told["backend"], told["woken"]) == (alias, store.supports_wakeups)
    pair = told["pair"]
    for figure in (pair, pair["acquire"], pair["release"], told["handoff"]):
        assert 1 <= figure["count"] <= 3
        assert figure["median"] > 0
        assert figure["p95"] is figure["p99"] is None  # Of three there is no such thing.
    assert listed(store, RUN) == []
    assert all(store.counter(key) for key in KEYS)


def test_counters_are_the_same_in_each_run() -> None:
    """One for each key: however often it is run, the table of counters does not grow."""
    counted = FenceCounter.objects.filter(key__startswith=RUN, storage_key__startswith="distlock:")
    found = []
    for _ in range(2):
        run("distlock_bench", "--backend=postgres", *SMALL)
        found.append({each.key: each.fence for each in counted.all()})
    before, after = found
    assert set(before) == set(after) == KEYS
    assert all(after[key] > before[key] for key in KEYS)
    assert not HeldLock.objects.filter(key__startswith=RUN).exists()


def test_table_is_for_people() -> None:
    """A line for each figure and its parts."""
    ran = run("distlock_bench", "--backend=postgres", "--backend=memory", *SMALL)
    assert (ran.status, ran.err) == (0, "")
    names = [re.split(r"  +", line)[1] for line in ran.out.splitlines()]
    assert names == ["TIME", *["pair", "acquire", "release", "hand-off"] * 2]
    assert re.search(r"^postgres +pair +[\d.]+ ms +- +- +3$", ran.out, re.MULTILINE)
    assert re.search(r"^memory +hand-off +[\d.]+ (ms|µs) ", ran.out, re.MULTILINE)


def test_only_what_is_asked_for_is_measured() -> None:
    """The other figure is null."""
    for part in ("pair", "handoff"):
        ran = run("distlock_bench", "--backend=memory", f"--only={part}", *SMALL, "--json")
        (told,) = ran.json["backends"]
        assert {name for name in ("pair", "handoff") if told[name] is not None} == {part}


# Arguments


def test_argument_that_breaks_a_rule_is_refused() -> None:
    """Nothing is measured."""
    wrong = ("--seconds=0", "--seconds=nan", "--seconds=601", "--rounds=0", "--only=all")
    for argument in wrong:
        with override_settings(DISTLOCK={"dead": DEAD}):
            ran = run("distlock_bench", argument)
        assert ran.status not in (0, 69), argument
        assert argument.partition("=")[0] in ran.err


def test_rounds_end_before_the_time_does() -> None:
    """The first round always comes, however short the time is."""
    plan = Plan(parts=(), seconds=60, rounds=3)
    assert list(plan.within(60)) == [0, 1, 2]
    assert list(plan.within(0)) == [0]


def test_percentiles_need_as_many_operations() -> None:
    """Of 19 there is no slowest one in twenty, and of 99 none in a hundred."""
    seen = {
        count: (Times.of([10**9] * count).p95, Times.of([10**9] * count).p99)
        for count in (1, 19, 20, 99, 100)
    }
    assert seen == {1: (None, None), 19: (None, None), 20: (1, None), 99: (1, None), 100: (1, 1)}


def test_copy_that_nobody_installed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is not known; the long drill asks for it behind hours of work."""
    monkeypatch.setattr(metadata, "distribution", Mock(side_effect=metadata.PackageNotFoundError))
    ran = run("distlock_bench", "--backend=memory", *SMALL, "--json")
    assert (ran.status, ran.json["machine"]["django_distlock"]) == (0, None)


# Stores that fail


def test_dead_store_ends_with_69_behind_the_others() -> None:
    """What can be measured is printed."""
    both = {"dead": DEAD, "memory": {"BACKEND": BACKENDS["memory"].path}}
    with override_settings(DISTLOCK=both):
        ran = run("distlock_bench", *SMALL, "--json")
    assert ran.status == 69
    assert [each["backend"] for each in ran.json["backends"]] == ["memory"]
    (failure,) = ran.json["failures"]
    assert (failure["backend"], failure["code"]) == ("dead", "service_unavailable")


def test_unknown_backend_is_refused_behind_the_others() -> None:
    """As other commands do."""
    ran = run("distlock_bench", "--backend=nowhere", "--backend=memory", *SMALL)
    assert ran.status == 1
    assert "'nowhere' is not configured" in ran.err
    assert "memory" in ran.out


def test_second_bench_of_a_backend_is_refused() -> None:
    """It would measure the first one, and both use the same keys. Its holder is named."""
    with held_elsewhere(distlock(RUN, backend="sqlite")):
        ran = run("distlock_bench", "--backend=sqlite", *SMALL)
    assert ran.status == 75
    assert f"(pid {os.getpid()})" in ran.err


# Processes


@contextmanager
def benching(
    project: Project, *arguments: str, at_work: Callable[[], bool]
) -> Iterator[tuple[Forked, IO[str]]]:
    """Run the command in a process of its own, for longer than any test; give it at work."""
    with started(project, "distlock_bench", "--seconds=300", *arguments) as (bench, said):

        def is_at_work() -> bool:
            assert bench.poll() is None, said.read()
            return at_work()

        assert eventually(is_at_work, PATIENCE)
        yield bench, said


def interrupt(bench: Forked, output: IO[str]) -> str:
    """Press Ctrl-C; return what the bench said. Again where Python told that this was ignored."""
    bench.send_signal(signal.SIGINT)
    said: list[str] = []
    for line in output:
        said.append(line)
        if line.startswith("KeyboardInterrupt"):
            # A finaliser can raise nothing, and Django has one for each row that was read.
            assert "ModelState.__del__" in said[0]
            said.clear()
            bench.send_signal(signal.SIGINT)
    return "".join(said)


@pytest.mark.parametrize(("part", "key"), [("pair", PAIR), ("handoff", HAND_OFF)])
def test_interrupted_bench_holds_nothing(part: str, key: str) -> None:
    """Its keys are free at once, and the status names the signal."""
    store = lock_backends["postgres"]
    with benching(
        Project("default"), f"--only={part}", at_work=lambda: store.read(key) is not None
    ) as (bench, output):
        said = interrupt(bench, output)
        assert bench.wait(PATIENCE) == 128 + signal.SIGINT, said
    assert "Interrupted" in said
    assert "Traceback" not in said
    assert listed(store, RUN) == []


@pytest.mark.faults
@pytest.mark.parametrize("part", ["pair", "handoff"])
def test_store_that_goes_away_meanwhile_ends_with_69(part: str) -> None:
    """Whichever thread meets it first."""
    with private_redis() as server, Redis.from_url(server.url) as client:
        prefix = f"t{secrets.token_hex(6)}"
        redis: dict[str, Any] = {
            "BACKEND": REDIS_BACKEND, "KEY_PREFIX": prefix, "OPTIONS": {"url": server.url},
        }  # fmt: skip
        key = f"{prefix}:lock:*{PAIR if part == 'pair' else HAND_OFF}"
        with benching(
            Project("default", DISTLOCK={"default": redis}),
            f"--only={part}",
            at_work=lambda: any(client.scan_iter(match=key)),
        ) as (bench, output):
            client.shutdown(nosave=True)
            said = output.read()
            assert bench.wait(PATIENCE) == 69, said
    assert "default: The lock store 'default' did not answer" in said
    assert "Traceback" not in said
