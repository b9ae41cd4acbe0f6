"""gunicorn, with the project loaded once and the workers forked from it (`--preload`)."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from django_distlock import distlock
from django_distlock.handler import lock_backends
from tests.contract.helpers import Later
from tests.contract.locking import eventually, taken
from tests.integration.databases import ask
from tests.shop.models import Row

from .clients import (
    WORKERS,
    count,
    killed_worker_is_ended_by_the_ttl,
    masters_lease_is_nobody_elses,
    workers,
)
from .counting import PATIENCE
from .servers import Site, served
from .sessions import named, sessions

kinds = pytest.mark.parametrize("kind", ["sync", "gthread"])


def gunicorn(home: Path, kind: str = "sync", **more: Any) -> AbstractContextManager[Site]:
    """Serve the project."""
    threads = ["--threads", "4"] if kind == "gthread" else []
    return served(
        home, "gunicorn", "tests.setups.web.wsgi:application", "--preload", "--no-control-socket",
        "--bind", "127.0.0.1:{port}", "--workers", str(WORKERS), "--worker-class", kind, *threads,
        **more,
    )  # fmt: skip


@kinds
def test_workers_exclude_each_other(key: str, tmp_path: Path, kind: str) -> None:
    """Requests in all workers count without a loss, in transactions and without.

    A worker that is killed while it holds a key blocks it for ttl and grace, not longer.
    """
    with gunicorn(tmp_path, kind, preload=f"{key} close") as site:
        count(site, key, 24, by=WORKERS)
        count(site, f"{key}:inside", 24, by=WORKERS, inside=1)
        killed_worker_is_ended_by_the_ttl(site, f"{key}:killed")


def test_lease_of_the_master_is_nobody_elses(key: str, tmp_path: Path) -> None:
    """A worker can neither extend nor release what its master holds; the master's end does.

    What the master leaves open between its locks and the fork, no worker speaks on.
    """
    master = distlock(f"{key}:master")
    # Persistent, or each request would end its session and hide that it was shared.
    database = {"CONN_MAX_AGE": None, **named(key)}
    with gunicorn(tmp_path, preload=f"{key} close", database=database) as site:
        record = lock_backends["default"].read(master.key)
        assert record is not None
        assert record.holder.pid == site.process.pid
        masters_lease_is_nobody_elses(site, key)
        site.stop()
        assert not taken(master)
    assert eventually(lambda: not sessions(key), timeout=10)


def test_session_that_the_master_left_open_is_not_locked_on(key: str, tmp_path: Path) -> None:
    """Where the project closes nothing before the fork, no worker speaks on its master's socket."""
    # Persistent, or each request would end the session before it locks.
    database = {"CONN_MAX_AGE": None, **named(key)}
    with gunicorn(tmp_path, preload=key, database=database) as site:
        before = _last_used(key)
        assert before
        site.get("leave", key=f"{key}:left")
        after = _last_used(key)
        assert before.items() <= after.items()


def _last_used(application: str) -> dict[int, Any]:
    """Give when each session got its last statement."""
    question = "SELECT pid, query_start FROM pg_stat_activity WHERE application_name = %s"
    return dict(ask("default", question, application))


@kinds
def test_graceful_reload_leaves_nothing(key: str, tmp_path: Path, kind: str) -> None:
    """SIGHUP: who holds a key may finish; what was left without a release is given back."""
    with gunicorn(tmp_path, kind, preload=f"{key} close", database=named(key)) as site:
        old = workers(site, key)
        left = distlock(f"{key}:left")
        site.get("leave", key=left.key)
        holding = Later(site.get, "hold", key=key)
        assert eventually(lambda: taken(distlock(key)), PATIENCE)
        site.process.send_signal(signal.SIGHUP)
        workers(site, key, but=old)
        assert taken(distlock(key))
        Row.objects.create(name=f"{key}:let go")
        assert holding.result(PATIENCE)["pid"] in old
        assert eventually(lambda: not taken(distlock(key)), PATIENCE)
        assert eventually(lambda: not taken(left), PATIENCE)
    assert eventually(lambda: not sessions(key), timeout=10)
