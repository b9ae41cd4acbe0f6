"""Statements and round trips per operation, read off the wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

from django_distlock import lock_backends

from .candidates import HOT, Waist
from .databases import hold
from .options import Options
from .proxy import Counts, Proxy
from .report import Result, Sheet
from .timing import Step

#: Before it counts, so that connections are open and statements prepared.
WARM_UP = 10
TIMES = 20


def run(options: Options) -> Result:
    """Count for the functions and for the ORM path."""
    counted: dict[str, dict[str, Any]] = {}
    with proxied() as proxy:
        for name in ("functions", "orm"):
            alias = f"proxied_{name}"
            hot = hold(alias, HOT)
            for operation, counts in _operations(alias, proxy):
                counted[f"{name}/backend/{operation}"] = _same(operation, counts)
            lock_backends[alias].release(hot)
    rows = [[name, *(str(each) for each in counts.values())] for name, counts in counted.items()]
    header = ["per operation", *next(iter(counted.values()))]
    return Result({"figures": counted}, [Sheet("Round trips: counted on the wire", header, rows)])


@contextmanager
def proxied() -> Iterator[Proxy]:
    """Lead the alias `proxied` through a proxy."""
    where = connections["proxied"].settings_dict
    with Proxy(where["HOST"], int(where["PORT"])).running() as proxy:
        where["PORT"] = str(proxy.port)
        try:
            yield proxy
        finally:
            connections["proxied"].close()


def _operations(alias: str, proxy: Proxy) -> Iterator[tuple[str, list[Counts]]]:
    waist = Waist(alias, ["invoice:1"])
    steps: dict[str, Step] = {
        "acquire": waist.acquire,
        "extend": waist.extend,
        "lose": waist.lose,
        "release": waist.release,
    }
    counts: dict[str, list[Counts]] = {name: [] for name in steps}
    for number in range(WARM_UP + TIMES):
        for name, step in steps.items():
            proxy.take()
            step()
            if number >= WARM_UP:
                counts[name].append(proxy.take())
    yield from counts.items()


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
