"""Metrics of locks for Prometheus: call `install()` once, when the apps are ready."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from ...core.extras import required

with required():
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, values
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.registry import Collector

from ...core.clock import monotonic
from ...core.threads import TimerThread
from ...locks import attempts
from ..metrics.gauges import process_numbers, store_numbers
from ..metrics.instruments import INSTRUMENTS, LAG, PROCESS_GAUGES, STORE_GAUGES, Instrument
from ..metrics.prefixes import MOST, Prefixes
from ..metrics.recording import Recorder, hear

__all__ = ["install", "scrape_registry", "uninstall"]

Numbers = Mapping[Instrument, Mapping[tuple[str, ...], float]]

#: Seconds between two samples of the gauges that a scrape cannot read from the process.
INTERVAL = 1.0
#: Seconds that the sampling thread stays when idle, because leases come and go quickly.
LINGER_SECONDS = 10.0

#: By registry, the function that disconnects its receivers, and its exporter.
_installed: Final[dict[CollectorRegistry, tuple[Callable[[], None], _Exporter]]] = {}
_mutex: Final = threading.Lock()


def install(
    registry: CollectorRegistry | None = None,
    *,
    prefixes: int = MOST,
    prefix_of: Callable[[str], str] | None = None,
    named: Collection[str] = (),
    stores: bool = True,
) -> None:
    """Measure from now on; a second call for the same registry does nothing.

    With `PROMETHEUS_MULTIPROC_DIR`, `scrape_registry()` reads what the processes write there.

    Args:
        registry: Where the metrics are registered; None: `prometheus_client.REGISTRY`.
        prefixes: How many prefixes of keys get a label of their own: the first that are met. All
            further prefixes are "other".
        prefix_of: Returns the prefix of a key, "" if it has none; None: the part before the first
            colon. A key whose prefix is neither declared nor named is "other".
        named: Prefixes that no template of a decorator begins with, such as those of blocks.
        stores: Whether a scrape queries the stores, too. Each process that does returns the same
            numbers, so the sum over processes is too high.

    Raises:
        InvalidArgument: `prefixes` is no int of at least 0, or `named` is no list of texts.
    """
    registry = REGISTRY if registry is None else registry
    heard = Prefixes(prefixes, prefix_of, named)
    with _mutex:
        if registry not in _installed:
            exporter = _Exporter(registry, heard, stores=stores)
            receivers = Recorder(exporter, heard).receivers()
            _installed[registry] = hear(receivers, f"{__name__} {id(registry)}"), exporter


def uninstall(registry: CollectorRegistry | None = None) -> None:
    """Stop measuring, and remove the metrics from the registry: for tests."""
    registry = REGISTRY if registry is None else registry
    with _mutex:
        if registry in _installed:
            end, exporter = _installed.pop(registry)
            end()
            exporter.close()


def scrape_registry() -> CollectorRegistry:
    """Return the registry to answer a scrape from.

    With `PROMETHEUS_MULTIPROC_DIR`, a new registry of what all processes wrote there, and of the
    stores, which are queried once. Without it, `prometheus_client.REGISTRY`.
    """
    if not _is_multiprocess():
        return REGISTRY
    registry = CollectorRegistry()
    _bury_the_dead(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    asking = [each for _end, each in _installed.values() if each.asks_stores]
    if asking:
        registry.register(_Gauges(STORE_GAUGES, asking[0].store_numbers))
    return registry


def _bury_the_dead(folder: Path) -> None:
    """Remove the gauges of dead processes: they run no hook if killed, and may run none otherwise.

    Also remove files that were created but never filled, which cannot be read. A folder belongs to
    the processes of one PID namespace, because the file names contain pids.
    """
    for each in folder.glob("*_*.db"):
        # Another scrape, or `child_exit`, may remove the file first.
        with suppress(FileNotFoundError):
            is_left = each.name.startswith("gauge_live") or not each.stat().st_size
            if is_left and _is_gone(each.stem.rpartition("_")[2]):
                each.unlink()


def _is_gone(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, ValueError):
        pass  # A living process of another user, or a file that is not the library's.
    return False


class _Exporter:
    """Puts measurements into the metrics of one registry."""

    def __init__(self, registry: CollectorRegistry, prefixes: Prefixes, *, stores: bool):
        self.asks_stores = stores
        self.store_numbers = partial(store_numbers, prefixes.of)
        self._registry = registry
        self._counters = {
            each: Counter(each.prometheus_name, each.help, each.labels, registry=registry)
            for each in INSTRUMENTS
            if each.kind == "counter"
        }
        self._histograms = {
            each: Histogram(
                each.prometheus_name, each.help, each.labels, registry=registry,
                buckets=each.buckets,
            )
            for each in INSTRUMENTS
            if each.kind == "histogram"
        }  # fmt: skip
        self._gauges: list[_Gauges] = []
        # With several processes, a scrape reads files, and queries no process.
        self._sampler = _Sampler(registry) if _is_multiprocess() else None
        if self._sampler is None:
            self._gauges.append(_Gauges(PROCESS_GAUGES, process_numbers))
            if stores:
                self._gauges.append(_Gauges(STORE_GAUGES, self.store_numbers))
        for each in self._gauges:
            registry.register(each)

    def close(self) -> None:
        """Remove everything from the registry."""
        metrics = (self._counters, self._histograms)
        for each in [*self._gauges, *(metric for some in metrics for metric in some.values())]:
            self._registry.unregister(each)
        if self._sampler is not None:
            self._sampler.close(self._registry)

    def add(self, instrument: Instrument, *labels: str, by: int = 1) -> None:
        """Add to a counter."""
        self._counters[instrument].labels(*labels).inc(by)
        if self._sampler is not None:
            self._sampler.wake()

    def observe(self, instrument: Instrument, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        self._histograms[instrument].labels(*labels).observe(value)


class _Gauges(Collector):
    """Reads the values of gauges at the time of a scrape."""

    def __init__(self, instruments: Sequence[Instrument], numbers: Callable[[], Numbers]):
        self._instruments = instruments
        self._numbers = numbers

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics without values, so that registering them reads no values."""
        for each in self._instruments:
            yield GaugeMetricFamily(each.prometheus_name, each.help, labels=each.labels)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics with their values."""
        numbers = self._numbers()
        for each, family in zip(self._instruments, self.describe(), strict=True):
            for labels, value in numbers[each].items():
                family.add_metric(labels, value)
            yield family


def _is_multiprocess() -> bool:
    # The library decides this when it is imported.
    return bool(values.ValueClass._multiprocess)


class _Sampler(TimerThread[None]):
    """Writes the gauges of a process to the files of `PROMETHEUS_MULTIPROC_DIR`.

    Its thread starts with the first lock of the process, so a process that only forks others has
    no such thread.
    """

    linger = 0.0
    _woken_at = _looks_next_at = 0.0

    def __init__(self, registry: CollectorRegistry):
        super().__init__("distlock-gauges", lambda _: self._looks_next_at, monotonic)
        self._gauges = {
            each: Gauge(
                each.prometheus_name, each.help, each.labels, registry=registry,
                multiprocess_mode="livemax" if each is LAG else "livesum",
            )
            for each in PROCESS_GAUGES
        }  # fmt: skip
        attempts.when_waiting.append(self.wake)
        _every.add(self)

    def close(self, registry: CollectorRegistry) -> None:
        """Stop writing, and remove the gauges from the registry."""
        attempts.when_waiting.remove(self.wake)
        _every.discard(self)
        for each in self._gauges.values():
            registry.unregister(each)

    def wake(self) -> None:
        """Sample from now on, because values may have changed."""
        self._woken_at = monotonic()
        with suppress(RuntimeError):  # No thread can be started now, or the interpreter is exiting.
            self.add(None)

    def _look(self, now: float, due: float) -> None:
        if monotonic() < due:
            return
        # Not during a fork: in the child, the library's mutex would stay locked for ever.
        with self._mutex:
            is_idle = True
            for instrument, numbers in process_numbers().items():
                for labels, value in numbers.items():
                    self._gauges[instrument].labels(*labels).set(value)
                    is_idle = is_idle and not value
            if is_idle:
                self.discard(None)
                # Checked after `discard`, so that a wake-up in between is not missed.
                if monotonic() - self._woken_at <= LINGER_SECONDS:
                    self.add(None)
            self._looks_next_at = monotonic() + INTERVAL


_every: weakref.WeakSet[_Sampler] = weakref.WeakSet()


def _before_fork() -> None:
    for each in list(_every):
        each._mutex.acquire()


def _in_parent() -> None:
    for each in list(_every):
        each._mutex.release()


def _in_child() -> None:
    for each in list(_every):
        each.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
