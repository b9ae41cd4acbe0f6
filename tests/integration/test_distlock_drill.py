"""`manage.py distlock_drill`: real processes, stopped and continued, on each store."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings
from redis import Redis

from django_distlock.management.drill import Late
from django_distlock.models import FenceCounter, HeldLock, LockEvent, SeenFence
from tests.contract.aliases import locks_on
from tests.contract.locking import eventually
from tests.contract.redis_clients import close, single_url
from tests.settings import REDIS_BACKEND

from .databases import here
from .operating import DEAD, run
from .projects import PATIENCE, Project, run_python
from .runs import started, state_of

PROMISES = 7
#: What is asked for: one late write, or those of some minutes.
SHORT, LONG = (), ("--minutes", "0.1")


@pytest.fixture(params=["default", "sqlite", "mariadb"], ids=["postgresql", "sqlite", "mariadb"])
def using(request: pytest.FixtureRequest) -> str:
    """Give a database of each kind in turn."""
    return here(request.param)


def ran(document: Any) -> set[int]:
    """Give the numbers of the processes that took part, and check that they are gone."""
    pids = {step["pid"] for step in document["steps"]}
    assert not [pid for pid in pids if state_of(pid)]
    return pids


def test_late_write_is_refused_on_each_database(using: str) -> None:
    """Two processes, the higher fence writes, the lower one does not; nothing but fences stays."""
    document = Project(using).document("distlock_drill")
    key = document["key"]
    assert document["passed"] is True
    assert [each["kept"] for each in document["promises"]] == [True] * PROMISES
    assert len(ran(document)) == 2
    first, second = (
        [step for step in document["steps"] if step["process"] == name]
        for name in ("first", "second")
    )
    fences = first[-1]["fence"], second[-1]["fence"]
    assert fences[0] < fences[1]
    assert f"has fence {fences[1]}, and refuses fence {fences[0]}" in first[-1]["text"]
    assert "django_distlock_seenfence" in document["target"]
    stopped, taken = (
        next(step["at"] for step in document["steps"] if word in step["text"])
        for word in ("is suspended", "takes over")
    )
    # Renewed every third of the ttl, it had at least two thirds of it when the process stopped,
    # and a second of grace has to pass.
    assert 2 < taken - stopped < PATIENCE
    # No lock and no mark is left; the counter is, and what operators are told.
    assert not HeldLock.objects.using(using).filter(key=key).exists()
    assert not SeenFence.objects.using(using).filter(key=key).exists()
    assert FenceCounter.objects.using(using).get(key=key).fence >= fences[1]
    events = LockEvent.objects.using(using).filter(key=key)
    kinds = {"lost", "rejected"}
    assert set(events.values_list("kind", flat=True)) == kinds


def test_late_write_is_refused_on_redis() -> None:
    """By a value in the Redis of the locks, of which nothing stays."""
    redis = {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": single_url()}}
    document = Project("default", DISTLOCK={"default": redis}).document("distlock_drill")
    assert document["passed"] is True
    assert len(document["promises"]) == PROMISES
    assert len(ran(document)) == 2
    assert "fenced value" in document["target"]
    key = document["key"]
    assert "refuses fence" in document["steps"][-1]["text"]
    client = Redis.from_url(single_url())
    left = [name.decode() for name in client.scan_iter(match=f"*{key}")]
    assert [name.split(":")[1] for name in left] == ["fence"]
    client.delete(*left)
    close(client)


def test_transcript_is_for_people() -> None:
    """A line for each step, the promises, what refuses, and what stays."""
    text = Project("default").manage("distlock_drill", "--backend", "default")
    steps, promises, ends = text.split("\n\n")
    lines = [line for line in steps.splitlines() if " pid " in line]
    assert [line.split()[2] for line in lines] == [
        *("first", "first", "second", "second", "second", "first", "first")
    ]
    assert [line.split()[0] for line in promises.splitlines()] == ["kept"] * PROMISES
    assert ends.startswith("Stale writes are refused by: the table")
    assert "Left in the store: the fence counter of 'distlock-drill:" in ends


def test_broken_promise_is_named() -> None:
    """A store whose fences do not grow lets the late write pass, and the exit code says so."""
    brittle = {
        "BACKEND": "tests.integration.brittle_backend.ForgetfulBackend",
        "OPTIONS": {"using": "default"},
    }
    project = Project("default", DISTLOCK={"default": brittle})
    text = project.manage("distlock_drill", status=1)
    assert "BROKEN  its fence is higher" in text
    assert "BROKEN  the stale write is refused" in text
    assert "kept    the new holder writes" in text
    assert "A guarantee was broken: its fence is higher; the stale write is refused" in text


def test_program_of_the_project_is_started_again(tmp_path: Path) -> None:
    """What `manage.py` does before Django starts is done in the other process as well."""
    manage, starts = tmp_path / "manage.py", tmp_path / "starts"
    manage.write_text(
        "import os, sys\n"
        f"print('started', file=open({str(starts)!r}, 'a'))\n"
        "print('a line of the project itself', flush=True)\n"
        f"os.environ.update({Project('default')._environment()!r})\n"
        "from django.core.management import execute_from_command_line\n"
        "execute_from_command_line(sys.argv)\n"
    )
    said = run_python(tmp_path, str(manage), "distlock_drill")
    assert said.count("kept ") == PROMISES
    assert starts.read_text().splitlines() == ["started"] * 2


def test_path_of_the_project_is_passed_on(tmp_path: Path) -> None:
    """Settings that only `--pythonpath` leads to are found by the other process as well."""
    apart = tmp_path / "apart"
    apart.mkdir()
    values = json.dumps(Project("default")._environment())
    (apart / "settings_apart.py").write_text(
        f"import json, os\nos.environ.update(json.loads({values!r}))\n"
        "from tests.integration.project import *\n"
    )
    options = ("--pythonpath", str(apart), "--settings", "settings_apart")
    said = run_python(tmp_path, "-m", "django", "distlock_drill", *options)
    assert said.count("kept ") == PROMISES


@pytest.mark.parametrize(
    ("signum", "step"),
    [(signal.SIGINT, "acquires the lock"), (signal.SIGTERM, "waits for the lock")],
)
def test_interrupted_drill_leaves_nothing(signum: int, step: str) -> None:
    """The other process is ended, stopped or not, and the key is free at once."""
    with started(Project("default"), "distlock_drill") as (drill, said):
        lines = []
        for line in said:
            lines.append(line)
            if step in line:
                break
        drill.send_signal(signum)
        rest = said.read()
        assert drill.wait(PATIENCE) == 128 + signum, rest
    assert "Interrupted" in rest
    pid = int(lines[0].split("pid ")[1].split()[0])
    assert eventually(lambda: not state_of(pid), PATIENCE)
    live = HeldLock.objects.filter(key__startswith="distlock-drill:", holder__pid=pid)
    assert not live.exists()


def test_signals_to_the_other_process_leave_no_lock_of_popen_taken(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of its own methods does that Ctrl-C interrupts, and its `wait` never ends then."""
    asked = []
    with Late("default", key, PATIENCE) as late:
        monkeypatch.setattr(late._process, "poll", lambda: asked.append("poll"))
        late.stop()
        late.go_on()
    assert not state_of(late.pid)
    assert asked == []


def test_backend_without_anything_to_see_is_refused() -> None:
    """Its locks are in memory, never end by themselves, or are nowhere."""
    for backend, why, status in (
        ("memory", "in process memory", 1),
        ("advisory", "has no lease expiry", 2),
        ("nowhere", "'nowhere' is not configured", 1),
    ):
        answer = run("distlock_drill", f"--backend={backend}")
        assert (answer.status, answer.out) == (status, "")
        assert why in answer.err


def test_leases_longer_than_the_settings_allow_are_refused() -> None:
    """No process is started that could not hold one."""
    for how in SHORT, LONG:
        with locks_on("default", TTL=1, MAX_TTL=1) as alias:
            ran = run("distlock_drill", f"--backend={alias}", *how)
        assert (ran.status, ran.out) == (2, "")
        assert "has a MAX_TTL of 1 s, and the leases of a drill live for 2 s" in ran.err


def test_store_that_is_away_ends_with_69() -> None:
    """No process is started, and the document says why."""
    for how in SHORT, LONG:
        with override_settings(DISTLOCK={"default": DEAD}):
            ran = run("distlock_drill", "--json", *how)
        assert ran.status == 69
        (failure,) = ran.json["failures"]
        assert failure["code"] == "service_unavailable"
        assert failure["message"] in ran.err
