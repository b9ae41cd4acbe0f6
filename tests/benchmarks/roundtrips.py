"""Statements and round trips per operation, read off the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django_distlock import lock_backends

from .candidates import HOT, Operations, waist
from .databases import hold
from .options import Options
from .proxy import Counts, PostgresReader, Proxy
from .report import Result, Sheet
from .timing import Step
from .wire import led

#: Before it counts, so that connections are open and statements prepared.
WARM_UP = 10
TIMES = 20


def run(options: Options) -> Result:
    """Count for the functions and for the ORM path."""
    counted: dict[str, dict[str, Any]] = {}
    with led("proxied", PostgresReader) as proxy:
        for name in ("functions", "orm"):
            alias = f"proxied_{name}"
            hot = hold(alias, HOT)
            operations = waist(lock_backends[alias], ["invoice:1"])
            counted |= count(proxy, f"{name}/backend", operations)
            lock_backends[alias].release(hot)
    return Result({"figures": counted}, [sheet(counted)])


def count(proxy: Proxy, name: str, of: Operations) -> dict[str, dict[str, Any]]:
    """Count what each operation sends through the proxy."""
    steps: dict[str, Step] = {
        "acquire": of.acquire, "extend": of.extend, "lose": of.lose, "release": of.release,
    }  # fmt: skip
    counts: dict[str, list[Counts]] = {operation: [] for operation in steps}
    for number in range(WARM_UP + TIMES):
        for operation, step in steps.items():
            proxy.take()
            step()
            if number >= WARM_UP:
                counts[operation].append(proxy.take())
    return {f"{name}/{each}": _same(f"{name}/{each}", taken) for each, taken in counts.items()}


def sheet(counted: Mapping[str, Mapping[str, Any]], title: str = "Round trips") -> Sheet:
    """Lay out what was counted."""
    rows = [[name, *(str(each) for each in counts.values())] for name, counts in counted.items()]
    header = ["per operation", *next(iter(counted.values()))]
    return Sheet(f"{title}: counted on the wire", header, rows)


def _same(operation: str, counts: list[Counts]) -> dict[str, Any]:
    """Return the counts of an operation, which does the same each time."""
    round_trips = {(each.round_trips, each.statements) for each in counts}
    if len(round_trips) != 1:
        raise RuntimeError(f"{operation}: not the same each time: {sorted(round_trips)}")
    # Fences and fractions differ in length.
    sent, received = (
        sum(getattr(each, name) for each in counts) / len(counts)
        for name in ("bytes_sent", "bytes_received")
    )
    return {**counts[0].as_json(), "bytes_sent": round(sent), "bytes_received": round(received)}
