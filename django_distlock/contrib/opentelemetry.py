"""Metrics and spans of locks for OpenTelemetry: call `install()` once, when the apps are ready."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from django.dispatch import Signal

from ..core.extras import required

with required():
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context, get_current
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Status, StatusCode, TracerProvider

from ..core.durations import Duration, seconds
from ..signals import lock_acquired, lock_lost, lock_not_acquired, lock_released
from .metrics.gauges import process_numbers, store_numbers
from .metrics.instruments import INSTRUMENTS, PROCESS_GAUGES, STORE_GAUGES, Instrument
from .metrics.prefixes import MOST, Prefixes
from .metrics.recording import Recorder, cause_of, hear, outcome_of

__all__ = ["install", "uninstall"]

Numbers = Callable[[], Mapping[Instrument, Mapping[tuple[str, ...], float]]]
Place = tuple[str, str, int | None]

#: Leases whose parent span is remembered. The oldest are forgotten: some are never released.
MOST_HELD: Final = 10_000

#: By pair of providers: what disconnects the receivers, and the arguments of `install`.
_installed: dict[
    tuple[int, int], tuple[ExitStack, MeterProvider | None, TracerProvider | None]
] = {}
_mutex: Final = threading.Lock()


def install(
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    prefixes: int = MOST,
    prefix_of: Callable[[str], str] | None = None,
    named: Collection[str] = (),
    stores: bool = True,
    keys: bool = False,
    shortest_wait: Duration = 0.01,
) -> None:
    """Measure and trace from now on; a second call for the same providers does nothing.

    Args:
        meter_provider: Where the instruments are made; None: the global one.
        tracer_provider: Where the spans go; None: the global one.
        prefixes: As for `prefix_of` and `named`, see `install` of `contrib.prometheus`.
        stores: Whether the stores are queried, too, whenever metrics are collected.
        keys: Whether spans contain the key itself, which may name a person.
        shortest_wait: Seconds (or a `timedelta`) of the shortest wait for which a granted acquire
            gets a span of its own.

    Raises:
        InvalidArgument: `prefixes`, `named` or `shortest_wait` breaks a rule.
    """
    heard = Prefixes(prefixes, prefix_of, named)
    least = seconds(shortest_wait, "shortest_wait")
    meters, tracers = _providers(meter_provider, tracer_provider)
    name = id(meters), id(tracers)
    with _mutex:
        # Look the global providers up again, because proxies replace them until they are set.
        every = [_providers(*each[1:]) for each in _installed.values()]
        if (meters, tracers) not in every:
            exporter = _Exporter(name, meters, heard, stores=stores)
            spans = _Spans(tracers, heard, keys=keys, least=least)
            uid, hearing = f"{__name__} {id(meters)} {id(tracers)}", ExitStack()
            hearing.callback(hear(Recorder(exporter, heard).receivers(), uid))
            hearing.callback(hear(spans.receivers(), f"{uid} spans"))
            # Keep the providers alive as long, because their ids are the name.
            _installed[name] = hearing, meter_provider, tracer_provider


def _providers(
    meters: MeterProvider | None, tracers: TracerProvider | None
) -> tuple[MeterProvider, TracerProvider]:
    """Return the given providers, and the global ones for those that are None."""
    return (
        metrics.get_meter_provider() if meters is None else meters,
        trace.get_tracer_provider() if tracers is None else tracers,
    )


def uninstall() -> None:
    """Stop measuring and tracing for all providers: for tests."""
    with _mutex:
        for hearing, _meters, _tracers in _installed.values():
            hearing.close()
        _installed.clear()


class _Exporter:
    """Puts measurements into the instruments of one meter."""

    def __init__(
        self, name: tuple[int, int], provider: MeterProvider, prefixes: Prefixes, *, stores: bool
    ):
        meter = provider.get_meter("django_distlock")
        self._counters = {
            each: meter.create_counter(each.name, description=each.help)
            for each in INSTRUMENTS
            if each.kind == "counter"
        }
        self._histograms = {
            each: meter.create_histogram(
                each.name, each.unit, each.help,
                explicit_bucket_boundaries_advisory=each.buckets,
            )
            for each in INSTRUMENTS
            if each.kind == "histogram"
        }  # fmt: skip
        of_stores: Numbers = partial(store_numbers, prefixes.of)
        gauges: list[tuple[Numbers, Sequence[Instrument]]] = [
            (process_numbers, PROCESS_GAUGES), *[(of_stores, STORE_GAUGES)] * stores
        ]  # fmt: skip
        for numbers, instruments in gauges:
            for each in instruments:
                meter.create_observable_gauge(
                    each.name, [_observing(name, each, numbers)], each.unit, each.help
                )

    def add(self, instrument: Instrument, *labels: str, by: int = 1) -> None:
        """Add to a counter."""
        self._counters[instrument].add(by, dict(zip(instrument.labels, labels, strict=True)))

    def observe(self, instrument: Instrument, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        attributes = dict(zip(instrument.labels, labels, strict=True))
        self._histograms[instrument].record(value, attributes)


def _observing(
    name: tuple[int, int], instrument: Instrument, numbers: Numbers
) -> Callable[[CallbackOptions], Iterator[Observation]]:
    def observe(_options: CallbackOptions) -> Iterator[Observation]:
        # After `uninstall`, a meter still keeps and calls its callbacks.
        found = numbers()[instrument] if name in _installed else {}
        for labels, value in found.items():
            yield Observation(value, dict(zip(instrument.labels, labels, strict=True)))

    return observe


class _Spans:
    """Makes spans from the signals of acquires and leases that have ended.

    The span of a lease has the parent that was current when the key was granted. Spans are made at
    their end, so that a lease that is never released leaves no open span.
    """

    def __init__(self, provider: TracerProvider, prefixes: Prefixes, *, keys: bool, least: float):
        self._tracer = provider.get_tracer("django_distlock")
        self._prefixes = prefixes
        self._keys = keys
        self._least = least
        self._held: OrderedDict[Place, Context] = OrderedDict()
        self._mutex = threading.RLock()

    def receivers(self) -> Sequence[tuple[Signal, Any]]:
        """Return the signals, each with its receiver."""
        return (
            (lock_acquired, self._acquired),
            (lock_not_acquired, self._not_acquired),
            (lock_released, self._released),
            (lock_lost, self._lost),
        )

    def _acquired(
        self, *, alias: str, key: str, fence: int | None, waited: float, **_: Any
    ) -> None:
        with self._mutex:
            self._held[alias, key, fence] = get_current()
            if len(self._held) > MOST_HELD:
                self._held.popitem(last=False)
        if waited >= self._least:
            about = {"outcome": "acquired", "waited": waited, "fence": fence}
            self._span("distlock.acquire", waited, get_current(), alias, key, about)

    def _not_acquired(
        self, *, alias: str, key: str, waited: float, cause: object, **more: Any
    ) -> None:
        about = {"outcome": outcome_of(cause, more.get("wait")), "waited": waited}
        self._span("distlock.acquire", waited, get_current(), alias, key, about)

    def _released(
        self, *, alias: str, key: str, fence: int | None, held_for: float, **more: Any
    ) -> None:
        about = {"released": bool(more.get("released"))}
        self._end((alias, key, fence), held_for, about)

    def _lost(
        self, *, alias: str, key: str, fence: int | None, held_for: float, cause: str, **_: Any
    ) -> None:
        self._end((alias, key, fence), held_for, {"lost_by": cause_of(cause)}, lost=cause)

    def _end(self, place: Place, held_for: float, about: dict[str, Any], lost: str = "") -> None:
        alias, key, fence = place
        about |= {"fence": fence, "held_for": held_for}
        with self._mutex:
            parent = self._held.pop(place, None)
        # One span for each lease: a lost lease is also released, and a release may be repeated.
        if parent is not None:
            self._span("distlock.hold", held_for, parent, alias, key, about, lost)

    def _span(
        self,
        name: str,
        lasted: float,
        parent: Context,
        alias: str,
        key: str,
        about: Mapping[str, Any],
        lost: str = "",
    ) -> None:
        ended_at = time.time_ns()
        facts = {**about, "backend": alias, "prefix": self._prefixes.of(key)}
        if self._keys:
            facts["key"] = key
        span = self._tracer.start_span(
            name,
            parent,
            attributes={f"distlock.{name}": it for name, it in facts.items() if it is not None},
            start_time=ended_at - int(lasted * 1e9),
        )
        if lost:
            span.set_status(Status(StatusCode.ERROR, lost))
        span.end(ended_at)
