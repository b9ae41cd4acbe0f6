"""`manage.py distlock_bench`: what it measures on each store, what it leaves, and how it ends."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from xml.etree import ElementTree

import pytest
from django.db import connections
from django.test import override_settings
from redis import Redis

from django_distlock import distlock, lock_backends
from django_distlock.backends.memory import MemoryBackend
from django_distlock.management import bench_clients
from django_distlock.management.bench import Plan
from django_distlock.management.bench_figures import Times
from django_distlock.models import FenceCounter, HeldLock, LockEvent
from tests.backends import BACKENDS
from tests.conftest import DECLARED
from tests.contract.helpers import listed
from tests.contract.locking import eventually, held_elsewhere
from tests.services import NO_MARIADB, private_redis
from tests.settings import REDIS_BACKEND

from .operating import run
from .projects import PATIENCE, ROOT, Project
from .runs import children_of, end, hear_signals, state_of

SMALL = ("--seconds=0.1", "--rounds=3", "--clients=2")
PREFIX = "distlock-bench"
#: The key of the run, and those of what is measured by two clients.
KEYS = {
    PREFIX,
    *(f"{PREFIX}:{name}" for name in ("pair", "hand-off", "hot", "client-0", "client-1")),
}
DEAD = {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": "redis://127.0.0.1:1/0"}}


class Elsewhere(MemoryBackend):
    """A backend of somebody else's, of whose store nothing is known."""

    distributed: ClassVar[bool] = True


@pytest.fixture(autouse=True)
def _clients_have_these_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that the command starts work on the databases of the test."""
    names = {alias: str(connections[alias].settings_dict["NAME"]) for alias in connections}
    monkeypatch.setenv("DISTLOCK_TEST_DATABASES", json.dumps(names))
    # What commands leave open at their end is Django's.
    monkeypatch.setenv("PYTHONDEVMODE", "")


@pytest.fixture(params=[*BACKENDS])
def alias(request: pytest.FixtureRequest) -> str:
    """Give each backend in turn."""
    using = BACKENDS[request.param].using
    if using and using not in connections.settings:
        pytest.skip(f"{DECLARED}{NO_MARIADB}")
    given: str = request.param
    return given


def redis_at(url: str) -> dict[str, Any]:
    """Describe a backend whose keys nobody else has."""
    prefix = f"t{secrets.token_hex(6)}"
    return {"BACKEND": REDIS_BACKEND, "KEY_PREFIX": prefix, "OPTIONS": {"url": url}}


def events() -> int:
    """Count the events about keys of the bench."""
    return LockEvent.objects.filter(key__startswith=PREFIX).count()


def check_times(figure: Any, *, floor: bool = True) -> None:
    """Check that figures are there, and that they fit each other."""
    assert figure["count"] >= 1
    assert figure["median"] > 0
    assert figure["p95"] is figure["p99"] is None  # Of three there is no such thing.
    if floor:
        assert figure["floor"]["count"] == figure["count"]
        assert figure["ratio"] == pytest.approx(figure["median"] / figure["floor"]["median"])


def test_each_backend_is_measured_beside_its_floor(alias: str) -> None:
    """Pairs, hand-offs and throughput; nothing stays but a counter for each key."""
    store = lock_backends[alias]
    # Those of clients that other tests killed.
    before = events()
    ran = run("distlock_bench", f"--backend={alias}", *SMALL, "--json")
    assert (ran.status, ran.err) == (0, "")
    document = ran.json
    assert document["failures"] == []
    assert (document["seconds"], document["rounds"], document["clients"]) == (0.1, 3, 2)
    (told,) = document["backends"]
    assert told["backend"] == alias
    assert told["apart"] == ("processes" if store.distributed else "threads")
    assert told["woken"] == store.supports_wakeups
    assert told["store"]
    assert told["floor"]
    check_times(told["pair"])
    for part in ("acquire", "release"):
        check_times(told["pair"][part], floor=False)
    check_times(told["handoff"])
    for rate in told["throughput"].values():
        assert rate["per_second"] > 0
        assert rate["ratio"] == pytest.approx(rate["per_second"] / rate["floor_per_second"])
    assert listed(store, PREFIX) == []
    assert all(store.counter(key) for key in KEYS)
    assert events() == before


def test_counters_are_the_same_in_each_run() -> None:
    """One for each key: however often it is run, the table of counters does not grow."""
    counted = FenceCounter.objects.filter(key__startswith=PREFIX)
    run("distlock_bench", "--backend=postgres", "--threads", *SMALL)
    before = {each.key: each.fence for each in counted.filter(storage_key__startswith="distlock:")}
    run("distlock_bench", "--backend=postgres", "--threads", *SMALL)
    after = {each.key: each.fence for each in counted.filter(storage_key__startswith="distlock:")}
    assert set(before) == set(after) == KEYS
    assert all(after[key] > before[key] for key in KEYS)
    assert not HeldLock.objects.filter(key__startswith=PREFIX).exists()


def test_table_is_for_people() -> None:
    """A line for each figure and its parts, what the floor is, and which clients there were."""
    ran = run("distlock_bench", "--backend=postgres", "--backend=memory", "--threads", *SMALL)
    assert (ran.status, ran.err) == (0, "")
    times, rates, floors = ran.out.split("\n\n")
    names = [re.split(r"  +", line)[1] for line in times.splitlines()]
    once = ["pair", "acquire", "release"]
    assert [name for name in names if name in once] == once * 2
    assert re.search(
        r"^postgres +pair +[\d.]+ ms +- +- +3 +[\d.]+ ms +[\d.]+$", times, re.MULTILINE
    )
    assert re.search(r"^memory +hand-off ", times, re.MULTILINE)
    assert re.search(
        r"^postgres +one key for all +2 threads +[\d,]+ +[\d,]+ +[\d.e-]+$", rates, re.MULTILINE
    )
    assert [line.split()[1] for line in floors.splitlines()] == ["PostgreSQL", "in"]


@pytest.mark.parametrize("part", ["pair", "handoff", "throughput"])
def test_only_what_is_asked_for_is_measured(part: str) -> None:
    """The other figures are null."""
    ran = run("distlock_bench", "--backend=sqlite", "--threads", f"--only={part}", *SMALL, "--json")
    (told,) = ran.json["backends"]
    every = {"pair", "handoff", "throughput"}
    assert {name for name in every if told[name] is not None} == {part}


def test_memory_is_measured_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process sees its locks, so none is started."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a process was started")

    monkeypatch.setattr(bench_clients, "ProcessClient", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    ran = run("distlock_bench", "--backend=memory", *SMALL, "--json")
    assert (ran.status, ran.json["backends"][0]["apart"]) == (0, "threads")
    assert not [each for each in threading.enumerate() if "_serve" in each.name]


def test_store_of_which_nothing_is_known_has_no_floor() -> None:
    """What can be measured is; ratios are null."""
    path = f"{Elsewhere.__module__}.{Elsewhere.__qualname__}"
    with override_settings(DISTLOCK={"elsewhere": {"BACKEND": path}}):
        ran = run("distlock_bench", "--threads", *SMALL, "--json")
        shown = run("distlock_bench", "--threads", *SMALL)
    (told,) = ran.json["backends"]
    assert (ran.status, shown.status) == (0, 0)
    assert (told["store"], told["floor"]) == ("Elsewhere", "")
    for figure in (told["pair"], told["handoff"], *told["throughput"].values()):
        assert figure["ratio"] is None
    assert told["throughput"]["hot_key"]["per_second"] > 0
    assert "Floor" not in shown.out


# Pictures


def test_picture_is_an_svg_that_names_what_it_shows(tmp_path: Path) -> None:
    """A row for each backend, and a column for each thing that was measured."""
    path = tmp_path / "bench.svg"
    both = ("--backend=postgres", "--backend=memory", "--threads")
    ran = run("distlock_bench", *both, *SMALL, f"--plot={path}")
    assert (ran.status, ran.err) == (0, "")
    assert f"Drawn: {path}" in ran.out
    assert ElementTree.parse(path).getroot().tag.endswith("}svg")
    words = "\n".join(re.findall(r"<!-- (.+?) -->", path.read_text(), re.DOTALL))
    for word in ("postgres", "memory", "Pair", "Hand-off", "Throughput: 2 clients", "floor"):
        assert word in words


def test_picture_is_a_png_by_its_suffix(tmp_path: Path) -> None:
    """Also of one thing alone, and beside JSON, which stays one document."""
    path = tmp_path / "bench.PNG"
    options = ("--backend=memory", "--only=handoff", "--json", f"--plot={path}")
    assert run("distlock_bench", *options, *SMALL).json["failures"] == []
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("name", "why"), [("bench.pdf", ".svg or .png"), ("nowhere/bench.svg", "no folder")]
)
def test_picture_that_cannot_be_written_is_refused_first(
    name: str, why: str, tmp_path: Path
) -> None:
    """Before anything is measured: the store, which is away, is not asked."""
    with override_settings(DISTLOCK={"dead": DEAD}):
        ran = run("distlock_bench", f"--plot={tmp_path / name}")
    assert (ran.status, ran.out) == (2, "")
    assert why in ran.err


def test_missing_extra_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured: the store, which is away, is not asked."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with override_settings(DISTLOCK={"dead": DEAD}):
        ran = run("distlock_bench", f"--plot={tmp_path / 'bench.svg'}")
        assert run("distlock_bench").status == 69
    assert (ran.status, ran.out) == (2, "")
    assert "pip install 'django-distlock[bench]'" in ran.err


# Arguments


@pytest.mark.parametrize(
    "argument",
    ["--clients=0", "--clients=65", "--seconds=0", "--seconds=nan", "--rounds=0", "--only=all"],
)
def test_argument_that_breaks_a_rule_is_refused(argument: str) -> None:
    """Nothing is measured."""
    with override_settings(DISTLOCK={"dead": DEAD}):
        ran = run("distlock_bench", argument)
    assert ran.status not in (0, 69)
    assert argument.partition("=")[0] in ran.err


def test_rounds_end_before_the_time_does() -> None:
    """The first round always comes, however short the time is."""
    plan = Plan(parts=(), seconds=60, rounds=3, clients=1, in_threads=False)
    assert list(plan.within(60)) == [0, 1, 2]
    assert list(plan.within(0)) == [0]


def test_percentiles_need_as_many_operations() -> None:
    """Of 19 there is no slowest one in twenty, and of 99 none in a hundred."""
    seen = {
        count: (Times.of([10**9] * count).p95, Times.of([10**9] * count).p99)
        for count in (1, 19, 20, 99, 100)
    }
    assert seen == {1: (None, None), 19: (None, None), 20: (1, None), 99: (1, None), 100: (1, 1)}


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


def test_silent_store_ends_with_69() -> None:
    """Somebody is there, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0?socket_timeout=0.2"
        with override_settings(DISTLOCK={"silent": redis_at(url)}):
            ran = run("distlock_bench", *SMALL)
    assert ran.status == 69
    assert "silent: " in ran.err
    assert "Not all backends were measured: silent." in ran.err


def test_unknown_backend_is_refused_behind_the_others() -> None:
    """As other commands do."""
    ran = run("distlock_bench", "--backend=nowhere", "--backend=memory", *SMALL)
    assert ran.status == 1
    assert "'nowhere' is not configured" in ran.err
    assert "memory" in ran.out


def test_second_bench_of_a_backend_is_refused() -> None:
    """It would measure the first one, and both use the same keys. Its holder is named."""
    with held_elsewhere(distlock(PREFIX, backend="sqlite")):
        ran = run("distlock_bench", "--backend=sqlite", *SMALL)
    assert ran.status == 75
    assert f"(pid {os.getpid()})" in ran.err


# Processes


@contextmanager
def benching(project: Project, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process of its own, for longer than any test."""
    with subprocess.Popen(
        [sys.executable, "-m", "django", "distlock_bench", "--seconds=300", *arguments],
        cwd=ROOT,
        env={**os.environ, **project._environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_signals,  # noqa: PLW1509 - it touches no lock
    ) as bench:
        try:
            yield bench
        finally:
            bench.kill()


def at_work(
    bench: subprocess.Popen[str], clients: int, is_so: Callable[[set[int]], bool]
) -> set[int]:
    """Wait until the clients are there, and what they do is seen; return their pids."""
    seen: set[int] = set()

    def are_here() -> bool:
        assert bench.poll() is None, bench.communicate()[0]
        time.sleep(0.2)  # To ask for all processes is much, again and again.
        seen.update(children_of(bench.pid))
        return len(seen) == clients

    def is_at_work() -> bool:
        assert bench.poll() is None, bench.communicate()[0]
        return is_so(seen)

    assert eventually(are_here, PATIENCE)
    assert eventually(is_at_work, PATIENCE)
    return seen


def is_held_by(key: str, pids: set[int]) -> bool:
    """Say whether one of these processes holds a key in the default database."""
    record = lock_backends["postgres"].read(f"{PREFIX}:{key}")
    return record is not None and record.holder.pid in pids


def are_gone(pids: set[int]) -> bool:
    """Wait until these processes have ended."""
    return eventually(lambda: not any(map(state_of, pids)), PATIENCE)


@pytest.mark.parametrize(
    ("signum", "part", "key", "by_client"),
    [
        (signal.SIGINT, "pair", "pair", False),
        (signal.SIGINT, "handoff", "hand-off", False),
        (signal.SIGINT, "throughput", "client-1", True),
        (signal.SIGTERM, "throughput", "client-0", True),
    ],
)
def test_interrupted_bench_holds_nothing(signum: int, part: str, key: str, by_client: bool) -> None:
    """Its processes end, the keys are free at once, and the status names the signal."""
    clients = {"pair": 0, "handoff": 1, "throughput": 2}[part]
    with benching(Project("default"), f"--only={part}", "--clients=2") as bench:
        pids = at_work(
            bench, clients, lambda seen: is_held_by(key, seen if by_client else {bench.pid})
        )
        bench.send_signal(signum)
        said = bench.communicate(timeout=PATIENCE)[0]
    assert bench.returncode == 128 + signum, said
    assert "Interrupted" in said
    assert "Traceback" not in said
    assert are_gone(pids)
    assert listed(lock_backends["postgres"], PREFIX) == []


@pytest.mark.parametrize(("part", "clients"), [("handoff", 1), ("throughput", 2)])
def test_clients_of_a_killed_bench_end(part: str, clients: int) -> None:
    """Their input ends with it; what it held itself ends by its ttl."""
    store = lock_backends["postgres"]
    with benching(Project("default"), f"--only={part}", "--clients=2") as bench:

        def is_at_it(seen: set[int]) -> bool:
            return is_held_by("hand-off", {bench.pid}) or is_held_by("client-1", seen)

        pids = at_work(bench, clients, is_at_it)
        bench.send_signal(signal.SIGKILL)
        bench.communicate(timeout=PATIENCE)
    left = {f"{PREFIX}:hand-off"} & set(listed(store, PREFIX))
    for key in (PREFIX, *left):
        store.force_release(key)
    assert are_gone(pids)
    assert listed(store, PREFIX) == []


def test_killed_client_is_told() -> None:
    """The bench does not wait for ever for what nobody does, and holds nothing."""
    with benching(Project("default"), "--only=throughput", "--clients=2") as bench:
        pids = at_work(bench, 2, lambda seen: is_held_by("client-1", seen))
        end(min(pids))
        said = bench.communicate(timeout=PATIENCE)[0]
    assert bench.returncode == 69, said
    assert "has ended before it was done" in said
    assert are_gone(pids)
    assert listed(lock_backends["postgres"], PREFIX) == []


@pytest.mark.faults
@pytest.mark.parametrize("part", ["pair", "throughput"])
def test_store_that_goes_away_meanwhile_ends_with_69(part: str) -> None:
    """Whoever meets it first, this process or another one."""
    with private_redis() as server, Redis.from_url(server.url) as client:
        backend = redis_at(server.url)
        hot = f"{backend['KEY_PREFIX']}:lock:*{PREFIX}:{'pair' if part == 'pair' else 'client-0'}"
        project = Project("default", DISTLOCK={"default": backend})
        clients = {"pair": 0, "throughput": 2}[part]
        with benching(project, f"--only={part}", "--clients=2") as bench:
            pids = at_work(bench, clients, lambda _: bool([*client.scan_iter(match=hot)]))
            client.shutdown(nosave=True)
            said = bench.communicate(timeout=PATIENCE)[0]
    assert bench.returncode == 69, said
    assert "default: The lock store 'default' did not answer" in said
    assert "Traceback" not in said
    assert are_gone(pids)
