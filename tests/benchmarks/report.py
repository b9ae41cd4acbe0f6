"""Tables for people and JSON for programs."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import django
import psycopg
from redis import Redis
from rich.console import Console
from rich.table import Table

from .databases import ask

SERVER_SETTINGS = (
    "server_version", "fsync", "synchronous_commit", "wal_sync_method", "full_page_writes",
    "wal_level", "shared_buffers", "max_wal_size", "checkpoint_timeout", "autovacuum_naptime",
)  # fmt: skip

REDIS_SETTINGS = ("save", "appendonly", "appendfsync", "maxmemory-policy", "io-threads")


@dataclass(frozen=True)
class Sheet:
    """A table. The first column is text, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Result:
    """What a benchmark found: the data for JSON, and how people see it."""

    data: dict[str, Any]
    sheets: list[Sheet] = field(default_factory=list)


def show(console: Console, result: Result) -> None:
    """Print the tables of a result."""
    for sheet in result.sheets:
        # Not the table's own title, which is no wider than the table.
        console.print(f"\n{sheet.title}", style="bold", markup=False)
        table = Table()
        for number, name in enumerate(sheet.header):
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)


def without(missing: Mapping[str, str]) -> str:
    """Say, behind a title, what could not be measured, and why."""
    return "".join(f"; without {name} ({why})" for name, why in missing.items())


def target(
    what: str, measured: float, *, at_most: float | None = None, at_least: float | None = None
) -> dict[str, Any]:
    """Return a figure beside what is aimed at: one bound."""
    if at_most is not None:
        return {"what": what, "measured": measured, "at_most": at_most, "met": measured <= at_most}
    assert at_least is not None
    return {"what": what, "measured": measured, "at_least": at_least, "met": measured >= at_least}


def times(title: str, figures: Mapping[str, Mapping[str, Any]]) -> Sheet:
    """Lay out figures of `timing`."""
    rows = [
        [name, *(f"{figure[each]:,.1f}" for each in ("median_us", "p95_us", "p99_us")),
         f"{figure['operations']:,}"]
        for name, figure in sorted(figures.items())
    ]  # fmt: skip
    return Sheet(title, ["in microseconds", "median", "p95", "p99", "operations"], rows)


def ratios(title: str, found: Iterable[Mapping[str, Any]]) -> Sheet:
    """Lay out ratios of `timing`."""
    rows = [
        [
            each["what"],
            f"{each['ratio']:.2f}",
            f"{each['first_quartile']:.2f} to {each['third_quartile']:.2f}",
            _target(each),
            {True: "yes", False: "no", None: ""}[each["met"]],
        ]
        for each in found
    ]
    return Sheet(title, ["ratio", "median", "quartiles", "target", "met"], rows)


def _target(ratio: Mapping[str, Any]) -> str:
    if ratio["at_most"] is not None:
        return f"<= {ratio['at_most']:g}"
    return "" if ratio["at_least"] is None else f">= {ratio['at_least']:g}"


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON whole: whoever looks meanwhile sees the last one."""
    made = path.with_name(f"{path.name}.part")
    made.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    made.replace(path)


def facts() -> dict[str, Any]:
    """Say what was measured on, for whoever compares two runs."""
    names = ", ".join(f"current_setting('{name}')" for name in SERVER_SETTINGS)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "dev_mode": sys.flags.dev_mode,
        "gc": gc.isenabled(),
        "django": django.get_version(),
        "django_distlock": _version("django-distlock"),
        "psycopg": psycopg.__version__,
        "psycopg_implementation": psycopg.pq.__impl__,
        "libpq": psycopg.pq.version(),
        "django_pglock": _version("django-pglock"),
        "redis_py": _version("redis"),
        "hiredis": _version("hiredis"),
        "django_redis": _version("django-redis"),
        "python_redis_lock": _version("python-redis-lock"),
        "redis": _redis(),
        "postgresql": dict(zip(SERVER_SETTINGS, ask("default", f"SELECT {names}")[0], strict=True)),
    }


def warnings(machine: Mapping[str, Any]) -> list[str]:
    """Say what makes the figures worth less."""
    said = []
    if machine["dev_mode"]:
        said.append("Python's development mode is on: everything in Python is slower.")
    if machine["postgresql"]["fsync"] != "on":
        said.append("fsync is off: a commit costs nothing, so every ratio to the floor is worse.")
    if machine["load"][0] > machine["cpus"] / 2:
        said.append(f"The machine was busy: a load of {machine['load'][0]:.1f} before the start.")
    return said


def _redis() -> dict[str, Any]:
    with Redis.from_url(os.environ["DISTLOCK_BENCH_REDIS_URL"], decode_responses=True) as client:
        told: Mapping[str, Any] = client.info("server")
        settings: Mapping[str, Any] = client.config_get(*REDIS_SETTINGS)
    names = ("redis_version", "valkey_version", "mem_allocator")
    return {**{name: told[name] for name in names if name in told}, **settings}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()  # Not Linux.
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
