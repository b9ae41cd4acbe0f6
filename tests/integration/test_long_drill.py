"""`manage.py distlock_drill --minutes`: real processes, killed and suspended, on each store."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from redis import Redis

from django_distlock.handler import lock_backends
from django_distlock.management.endurance import KEYS, Toiler
from django_distlock.management.targets import target_of
from django_distlock.models import HeldLock, SeenFence
from tests.contract.locking import eventually
from tests.contract.redis_clients import close, single_url
from tests.settings import REDIS_BACKEND

from .databases import here
from .operating import run
from .projects import PATIENCE, Project
from .runs import started, state_of


@pytest.mark.parametrize(
    "store",
    [
        "default",
        pytest.param("redis", marks=pytest.mark.nightly),
        pytest.param("mariadb", marks=pytest.mark.nightly),
        pytest.param("sqlite", marks=pytest.mark.nightly),
    ],
)
def test_certificate_of_each_store(store: str) -> None:
    """Faults, what they met, versions and the seed; nothing stays but counters and events."""
    settings = {}
    if store == "redis":
        redis = {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": single_url()}}
        settings = {"DISTLOCK": {"default": redis}}
    using = here("default" if store == "redis" else store)
    # At least: it goes on until each fault has met something.
    minutes = "0.1" if store == "default" else "0.4"
    told = Project(using, **settings).document("distlock_drill", f"--minutes={minutes}", "--seed=7")
    assert (told["passed"], told["violations"], told["seed"]) == (True, [], 7)
    assert all(told["faults"].values())
    done = told["operations"]
    assert done["refused"]
    assert done["granted"] >= done["written"] > 0
    assert told["bound"] == 3 / done["granted"]
    assert set(told["versions"]) == {"django-distlock", "django", "python", "server"}
    if store == "redis":
        client = Redis.from_url(single_url())
        left = [name.decode() for name in client.scan_iter(match=f"*{told['prefix']}*")]
        assert {name.split(":")[1] for name in left} == {"fence"}
        client.delete(*left)
        close(client)
    else:
        assert not HeldLock.objects.using(using).filter(key__startswith=told["prefix"]).exists()
        assert not SeenFence.objects.using(using).filter(pk__startswith=told["prefix"]).exists()


@pytest.mark.nightly
def test_violation_is_told(key: str) -> None:
    """Of a store whose fences do not grow: by the certificate, and by the exit status."""
    brittle = {
        "BACKEND": "tests.integration.brittle_backend.ForgetfulBackend",
        "OPTIONS": {"using": "default"},
    }
    project = Project("default", DISTLOCK={"default": brittle})
    told = project.document("distlock_drill", "--minutes=0.1", status=1)
    assert told["passed"] is False
    assert told["bound"] is None
    assert any("was granted twice" in each for each in told["violations"])


def test_killed_process_leaves_nothing_open(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But what it has reported."""
    for name, value in Project("default")._environment().items():
        monkeypatch.setenv(name, value)
    before = set(Path("/proc/self/fd").iterdir())
    with Toiler("default", key, 7, PATIENCE) as toiler:
        assert eventually(lambda: len(toiler.turns) > 1, PATIENCE)
        toiler.kill()
        assert set(Path("/proc/self/fd").iterdir()) <= before
        assert toiler.turns
    assert not state_of(toiler.pid)
    for number in range(KEYS):
        lock_backends["default"].force_release(f"{key}:{number}")
        target_of(lock_backends["default"], f"{key}:{number}").remove()


def test_interrupted_long_drill_leaves_nothing() -> None:
    """The other processes are ended, and the keys are free at once."""
    with started(Project("default"), "distlock_drill", "--minutes=5") as (drill, said):
        first = said.readline()
        assert first.startswith(("Kills process", "Suspends process"))
        drill.send_signal(signal.SIGTERM)
        rest = said.read()
        assert drill.wait(PATIENCE) == 128 + signal.SIGTERM, rest
    assert "Interrupted" in rest
    assert (
        not HeldLock.objects.filter(key__startswith="distlock-drill:")
        .exclude(holder__pid=os.getpid())
        .exists()
    )


def test_arguments_that_cannot_be() -> None:
    """They are refused before a process starts."""
    for arguments, why in (
        (["--minutes=0"], "from 0.1 to 480"),
        (["--minutes=soon"], "'soon' is not a number of minutes"),
        (["--seed=1"], "--seed requires --minutes"),
        (["--minutes=1", "--backend=memory"], "in process memory"),
    ):
        answer = run("distlock_drill", *arguments)
        assert answer.status
        assert answer.out == ""
        assert why in answer.err
