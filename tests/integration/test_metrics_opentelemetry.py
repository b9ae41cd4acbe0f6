"""What OpenTelemetry gets to know of locks, through its own SDK."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from django.conf import settings
from django.test import override_settings
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from django_distlock import (
    LockLost,
    LockNotAcquired,
    distlock,
    leader,
    leading,
    lock_backends,
)
from django_distlock.contrib import opentelemetry
from django_distlock.contrib.metrics.instruments import (
    INSTRUMENTS,
    PROCESS_GAUGES,
    STORE_GAUGES,
    STORE_UP,
)
from django_distlock.core.declarations import declared
from django_distlock.core.keys import own_key
from django_distlock.inspection.asking import PATIENCE
from django_distlock.scheduling import scheduled
from tests.contract.helpers import Later, there
from tests.contract.locking import eventually, held_elsewhere
from tests.processes import spawn

#: One backend of each kind.
ALIASES = ("memory", "sqlite", "postgres", "redis")


class Told:
    """Providers of this test, and what they were told."""

    def __init__(self, **options: Any):
        self._reader, self._exporter = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters = MeterProvider([self._reader])
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.tracers.get_tracer("tests")
        self.install(**options)

    def install(self, **options: Any) -> None:
        """Install, as a project does."""
        opentelemetry.install(meter_provider=self.meters, tracer_provider=self.tracers, **options)

    def close(self) -> None:
        """Let nothing be told any more."""
        opentelemetry.uninstall()
        self.meters.shutdown()
        self.tracers.shutdown()

    def points(self) -> dict[str, list[Any]]:
        """Return what is measured, by the name of the instrument."""
        data = there(self._reader.get_metrics_data())
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def point(self, name: str, **attributes: str) -> Any:
        """Return the one that has these attributes."""
        (found,) = [
            each for each in self.points()[f"distlock.{name}"] if each.attributes == attributes
        ]
        return found

    def spans(self, name: str) -> list[ReadableSpan]:
        """Return the spans of a name."""
        return [each for each in self._exporter.get_finished_spans() if each.name == name]

    def span(self, name: str) -> ReadableSpan:
        """Return the only one."""
        (found,) = self.spans(name)
        return found


@pytest.fixture
def told(key: str) -> Iterator[Told]:
    """Give providers that are told of locks, and tell those of the test apart."""
    made = Told(named=[key])
    yield made
    made.close()


def test_acquire_and_release_are_measured(key: str, told: Told) -> None:
    """By the same labels as elsewhere."""
    by_name = {each.name: each for each in INSTRUMENTS}
    for alias in ALIASES:
        with distlock(f"{key}:1", backend=alias):
            pass
        labels = {"backend": alias, "prefix": key}
        assert told.point("acquire", outcome="acquired", **labels).value == 1
        assert told.point("lost", cause="deadline", **labels).value == 0
        wait, hold = told.point("wait", **labels), told.point("hold", **labels)
        assert (wait.count, hold.count) == (1, 1), alias
        assert tuple(hold.explicit_bounds) == by_name["distlock.hold"].buckets


def test_gauges_are_asked_for(key: str, told: Told) -> None:
    """Of the process, and of the stores."""
    name = own_key(f"schedule:{key}")
    with override_settings(DISTLOCK=settings.DISTLOCK), distlock(f"{key}:1", backend="memory"):
        work = scheduled(key, expected=1, every=60, backend="sqlite")(lambda: None)
        long_ago = lock_backends["sqlite"].clock() - timedelta(seconds=100)
        lock_backends["sqlite"].notes.put(name, int(long_ago.timestamp() * 1000), 60)
        assert work in declared
        assert told.point("active", backend="memory").value >= 1
        assert told.point("store_up", backend="memory").value == 1
        assert told.point("oldest_holding", backend="memory", prefix=key).value > 0
        assert told.point("schedule_overdue", backend="sqlite", prefix=name).value > 38
        names = {each.name for each in INSTRUMENTS if each.kind == "gauge"}
        assert names <= set(told.points())


def test_leader_is_not_what_is_held_the_longest(key: str, told: Told) -> None:
    """It leads for days, as it should; what others work under meanwhile is shown."""
    aliases = ("sqlite", "redis")
    with override_settings(DISTLOCK=settings.DISTLOCK), ExitStack() as held:
        for alias in aliases:
            held.enter_context(leader(key, backend=alias))
            held.enter_context(distlock(f"{key}:1", backend=alias))
        shown = [each.attributes for each in told.points()["distlock.oldest_holding"]]
    assert all({"backend": alias, "prefix": key} in shown for alias in aliases)
    assert own_key("leader") not in {each["prefix"] for each in shown}


def test_candidate_that_stands_by_is_no_timeout(
    key: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it campaigns in vain, neither its spans nor the counter say so."""
    monkeypatch.setattr(leading, "PATIENCE", 0.05)

    def outcomes() -> set[Any]:
        spans = told.spans("distlock.acquire")
        return {dict(each.attributes or {})["distlock.outcome"] for each in spans} - {"acquired"}

    with leader(key, backend="memory"):
        candidate = leader(key, backend="memory")
        standing_by = Later(candidate.run, lambda _: None)
        assert eventually(lambda: bool(outcomes()))
        candidate.stop()
        standing_by.result()
    assert outcomes() == {"standby"}
    labels = {"backend": "memory", "prefix": own_key("leader")}
    assert told.point("acquire", outcome="timeout", **labels).value == 0


def test_names_that_clients_choose_are_in_no_attribute(key: str, told: Told) -> None:
    """Neither of a span nor of a measurement: a key is under its prefix if the code names that."""
    for each in (key, "ada@example.org", f"{key}-1"):
        with distlock(f"{each}:1", backend="memory"):
            pass
    spans = [dict(each.attributes or {}) for each in told.spans("distlock.hold")]
    assert [each["distlock.prefix"] for each in spans] == [key, "other", "other"]
    acquired = {"backend": "memory", "outcome": "acquired"}
    assert told.point("acquire", prefix="other", **acquired).value == 2
    assert "ada" not in repr(told.points())


def test_nothing_is_measured_where_it_was_uninstalled(key: str, told: Told) -> None:
    """What was counted stays; no gauge asks a store, until it is installed again."""
    with distlock(f"{key}:1", backend="memory"):
        pass
    gauges = {each.name for each in (*PROCESS_GAUGES, STORE_UP)}
    assert gauges <= set(told.points())
    opentelemetry.uninstall()
    assert not gauges & set(told.points())
    told.install()
    assert gauges <= set(told.points())


def installed_twice() -> list[int]:
    """Install before and behind the setting of the global providers; return what was told."""
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    # However busy the machine is, the acquire has no span of its own.
    install = partial(opentelemetry.install, stores=False, shortest_wait=60)
    install()
    metrics.set_meter_provider(meters)
    trace.set_tracer_provider(tracers)
    install()
    install(meter_provider=meters, tracer_provider=tracers)
    with distlock("twice:1", backend="memory"):
        pass
    data = json.loads(there(reader.get_metrics_data()).to_json())
    (scope,) = data["resource_metrics"][0]["scope_metrics"]
    (acquired,) = (each for each in scope["metrics"] if each["name"] == "distlock.acquire")
    counted = sum(each["value"] for each in acquired["data"]["data_points"])
    return [counted, len(exporter.get_finished_spans())]


def test_global_providers_are_the_same_before_they_are_set() -> None:
    """What stood in for them hands on: all would be counted twice."""
    with spawn(f"{__name__}:installed_twice") as process:
        assert process.result() == [1, 1]


def test_store_that_hangs_is_waited_for_once(told: Told) -> None:
    """By all the gauges of a collection: each of them asks for itself."""
    answers = threading.Event()
    with (
        override_settings(DISTLOCK={"memory": settings.DISTLOCK["memory"]}),
        patch.object(lock_backends["memory"], "_time", side_effect=lambda: answers.wait(60)),
    ):
        began = time.monotonic()
        assert told.point("store_up", backend="memory").value == 0
        assert time.monotonic() - began < (len(STORE_GAUGES) - 1) * PATIENCE
        answers.set()


def test_held_block_is_a_span_in_its_trace(key: str, told: Told) -> None:
    """It has the parent that the block had, the fence, and not the key."""
    for alias in ALIASES:
        with (
            told.tracer.start_as_current_span("work") as work,
            distlock(f"{key}:secret", backend=alias) as lease,
        ):
            time.sleep(0.05)
        span = told.spans("distlock.hold")[-1]
        assert there(span.parent).span_id == work.get_span_context().span_id, alias
        attributes = dict(span.attributes or {})
        assert attributes.pop("distlock.held_for") == pytest.approx(0.05, abs=5)
        assert attributes == {
            "distlock.backend": alias,
            "distlock.prefix": key,
            "distlock.fence": lease.fence,
            "distlock.released": True,
        }
        assert (span.end_time or 0) - (span.start_time or 0) >= 0.05e9
    assert len(told.spans("distlock.hold")) == len(ALIASES)


def test_span_of_asynchronous_code_has_its_parent(key: str, told: Told) -> None:
    """Receivers run on other threads, and know the context all the same."""

    async def work(alias: str) -> int:
        with told.tracer.start_as_current_span("work") as span:
            async with distlock(f"{key}:1", backend=alias):
                pass
            return span.get_span_context().span_id

    parents = [asyncio.run(work(alias)) for alias in ALIASES]
    assert [there(each.parent).span_id for each in told.spans("distlock.hold")] == parents


def test_waiting_and_refusal_are_spans(key: str, told: Told) -> None:
    """As long as the wait was; an acquire at once has none. A second install counts nothing."""
    told.install()
    lock = distlock(f"{key}:1", backend="memory", wait=30)
    queues = lock_backends["memory"].queues
    with lock:
        waiter = Later(lock.acquire)
        assert eventually(lambda: queues.name_of(f"{key}:1") in queues)
        time.sleep(0.3)
    Later(waiter.result(10).release).result()
    # On a busy machine the first acquire may have one as well.
    span = told.spans("distlock.acquire")[-1]
    assert dict(span.attributes or {})["distlock.outcome"] == "acquired"
    assert (span.end_time or 0) - (span.start_time or 0) >= 0.1e9
    assert eventually(lambda: len(told.spans("distlock.hold")) == 2)
    point = told.point("acquire", backend="memory", prefix=key, outcome="acquired")
    assert point.value == 2
    lock = distlock(f"{key}:2", backend="memory", wait=0)
    with held_elsewhere(lock), pytest.raises(LockNotAcquired):
        lock.acquire()
    # A span of the one who holds it, too, where that took long.
    spans = told.spans("distlock.acquire")
    outcomes = [dict(each.attributes or {})["distlock.outcome"] for each in spans]
    assert outcomes.count("conflict") == 1


def test_lost_lease_is_an_error(key: str, told: Told) -> None:
    """One span, which says by what it was lost."""
    with pytest.raises(LockLost), distlock(f"{key}:1", backend="memory", ttl=0.2, heartbeat=False):
        assert eventually(lambda: bool(told.spans("distlock.hold")))
    span = told.span("distlock.hold")
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["distlock.lost_by"] == "deadline"


def test_key_is_shown_where_it_is_asked_for(key: str) -> None:
    """On spans alone."""
    told = Told(keys=True)
    with distlock(f"{key}:1", backend="memory"):
        pass
    assert dict(told.span("distlock.hold").attributes or {})["distlock.key"] == f"{key}:1"
    assert f"{key}:1" not in repr(told.points())
    told.close()
