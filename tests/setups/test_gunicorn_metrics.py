"""gunicorn whose workers write their metrics to files (`PROMETHEUS_MULTIPROC_DIR`)."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import prometheus_client  # noqa: F401 - before the variable is set, which it reads then
import pytest
from prometheus_client.parser import text_string_to_metric_families

from django_distlock import distlock
from django_distlock.handler import lock_backends
from tests.contract.helpers import Later
from tests.contract.locking import eventually, taken
from tests.shop.models import Row

from .clients import WORKERS
from .counting import PATIENCE, new_counter, together
from .servers import Site, served

#: What a project with workers that are forked needs: gauges of the dead must not stay.
CONFIG = """
from prometheus_client import multiprocess

def child_exit(server, worker):
    multiprocess.mark_process_dead(worker.pid)
"""

Series = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture
def site(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Serve the project with two workers, which write to one folder."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    config = tmp_path / "gunicorn.conf.py"
    config.write_text(CONFIG)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(metrics))
    with served(
        tmp_path, "gunicorn", "tests.setups.web.wsgi:application", "--preload",
        "--no-control-socket", "--bind", "127.0.0.1:{port}", "--workers", str(WORKERS),
        "--worker-class", "gthread", "--threads", "4", "--config", str(config),
        preload=f"{key} close",
    ) as served_site:  # fmt: skip
        yield served_site


def scrape(site: Site) -> dict[Series, float]:
    """Ask any worker for the metrics of all; give each series once."""
    with closing(http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE)) as line:
        headers = {"Authorization": "Bearer only-for-these-tests", "Connection": "close"}
        line.request("GET", "/locks/metrics", headers=headers)
        response = line.getresponse()
        text = response.read().decode()
        assert response.status == 200, site.said()
    found: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = sample.name, frozenset(sample.labels.items())
            assert series not in found
            found[series] = sample.value
    return found


def value(site: Site, name: str, **labels: str) -> float | None:
    """Give the value of one series."""
    return scrape(site).get((f"distlock_{name}", frozenset(labels.items())))


def names(site: Site, name: str) -> set[frozenset[tuple[str, str]]]:
    """Give the labels of all series of a name."""
    return {labels for each, labels in scrape(site) if each == f"distlock_{name}"}


def test_workers_count_together(key: str, site: Site) -> None:
    """Whichever of them answers the scrape, what all have counted is added up."""
    name, locked = f"{key}:count", 0
    pids: set[int] = set()
    new_counter(name)

    def all_have_counted() -> bool:
        nonlocal locked
        answers = together([partial(site.get, "count", key=name)] * 4)
        locked += len(answers)
        pids.update(each["pid"] for each in answers)
        return len(pids) >= WORKERS

    assert eventually(all_have_counted, PATIENCE)
    labels = {"backend": "default", "prefix": key, "outcome": "acquired"}
    # Of its own, the master has locked before the fork: what it did is counted as well.
    before = 3
    for _ in range(2 * WORKERS):
        assert value(site, "acquire_total", **labels) == locked + before
    assert value(site, "hold_seconds_count", backend="default", prefix=key) == locked + before - 1


def test_gauges_are_those_of_living_workers(key: str, site: Site) -> None:
    """They add up what workers hold and wait for, and end with their worker."""
    lock = distlock(f"{key}:gauge")
    mine = partial(value, site, backend="default")
    assert eventually(lambda: mine("active") == 1, PATIENCE)  # The master's own.
    holding = Later(site.get, "hold", key=lock.key)
    assert eventually(lambda: taken(lock), PATIENCE)
    waiting = Later(site.get, "hold", key=lock.key)
    assert eventually(lambda: (mine("active"), mine("waiting")) == (2, 1), PATIENCE)
    Row.objects.create(name=f"{lock.key}:let go")
    assert holding.result(PATIENCE)
    assert waiting.result(PATIENCE)
    assert eventually(lambda: (mine("active"), mine("waiting")) == (1, 0), PATIENCE)


def test_killed_worker_holds_nothing_any_more(key: str, site: Site) -> None:
    """Its gauges go with it, and what it has counted stays."""
    lock = distlock(f"{key}:killed")
    request = site.request("hold", key=lock.key, ttl=30)
    mine = partial(value, site, backend="default")
    assert eventually(lambda: mine("active") == 2, PATIENCE)
    counted = value(site, "acquire_total", backend="default", prefix=key, outcome="acquired")
    record = lock_backends["default"].read(lock.key)
    assert record is not None
    os.kill(record.holder.pid, signal.SIGKILL)
    request.close()
    assert eventually(lambda: mine("active") == 1, PATIENCE)
    after = value(site, "acquire_total", backend="default", prefix=key, outcome="acquired")
    assert after == counted


def test_stores_are_asked_by_the_one_that_answers(site: Site) -> None:
    """Their numbers are there once, and not once for each worker."""
    of_default = frozenset({("backend", "default")})
    assert value(site, "store_up", backend="default") == 1
    for name in ("store_up", "locks_held", "held_past_expiry"):
        assert of_default in names(site, name)
        assert all(dict(labels).keys() == {"backend"} for labels in names(site, name))
