"""uWSGI, which forks its workers behind Python's back."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from django_distlock import distlock
from tests.contract.helpers import Later
from tests.contract.locking import eventually, grantable, taken
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

#: One request at a time in each worker, and several. `--enable-threads` is the default by now.
KINDS = {
    # A worker that is forked while a thread of the master's runs Python, such as ours, waits for
    # ever for that thread, or crashes, unless Python is told of the fork.
    "processes": ["--enable-threads", "--py-call-uwsgi-fork-hooks"],
    "threads": ["--threads", "3", "--py-call-uwsgi-fork-hooks"],
    "lazy": ["--threads", "3", "--lazy-apps"],
}


def uwsgi(
    home: Path, *arguments: str, kind: str = "processes", **more: Any
) -> AbstractContextManager[Site]:
    """Serve the project, loaded by the master before it forks."""
    return served(
        home, "pyuwsgi", "--http-socket", "127.0.0.1:{port}", "--module",
        "tests.setups.web.wsgi:application", "--master", "--processes", str(WORKERS),
        "--need-app", "--die-on-term", "--no-orphans", "--disable-logging", *KINDS[kind],
        *arguments, **more,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_workers_exclude_each_other(key: str, tmp_path: Path, kind: str) -> None:
    """Requests in all workers count without a loss, in transactions and without.

    What a rollback gives up is released behind the request, by a thread of ours.
    """
    # Lazy workers have no master that could lock for them.
    with uwsgi(tmp_path, kind=kind, preload="" if kind == "lazy" else f"{key} close") as site:
        count(site, key, 24, by=WORKERS)
        count(site, f"{key}:inside", 24, by=WORKERS, inside=1)
        assert site.get("give_up", key=f"{key}:rolled back")["fence"] == 1
        free = distlock(f"{key}:rolled back", wait=0)
        assert eventually(lambda: grantable(free), timeout=10)
        assert "killed by signal" not in site.said()


def test_lease_is_its_holders_alone(key: str, tmp_path: Path) -> None:
    """A worker knows that the master's is none of its own; ttl and grace end a killed one's."""
    database = {"CONN_MAX_AGE": None, **named(key)}
    with uwsgi(tmp_path, preload=f"{key} close", database=database) as site:
        masters_lease_is_nobody_elses(site, key)
        killed_worker_is_ended_by_the_ttl(site, key)
    assert eventually(lambda: not sessions(key), timeout=10)


def test_graceful_reload_leaves_nothing(key: str, tmp_path: Path) -> None:
    """Workers are replaced: who holds a key may finish; what was left is given back."""
    touched = tmp_path / "reload"
    touched.touch()
    reload_workers = ["--touch-workers-reload", str(touched)]
    with uwsgi(tmp_path, *reload_workers, database=named(key)) as site:
        old = workers(site, key)
        left = distlock(f"{key}:left")
        site.get("leave", key=left.key)
        holding = Later(site.get, "hold", key=key)
        assert eventually(lambda: taken(distlock(key)), PATIENCE)
        # It looks for a later second.
        os.utime(touched, (time.time() + 10, time.time() + 10))
        # The worker that holds nothing is replaced at once.
        assert eventually(lambda: len(sessions(key)) < 2 * WORKERS, PATIENCE)
        assert taken(distlock(key))
        Row.objects.create(name=f"{key}:let go")
        assert holding.result(PATIENCE)["pid"] in old
        workers(site, key, but=old)
        assert not taken(distlock(key))
        assert not taken(left)
    assert eventually(lambda: not sessions(key), timeout=10)
