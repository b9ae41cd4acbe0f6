"""What operators ask for among many live locks: wall time and memory, beside the least for it.

Each store is filled with ever more locks, one store after the other. Whatever grows with the
number of locks shows between two columns.
"""

from __future__ import annotations

import os
import statistics as middle
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import connections

from django_distlock import inspection

from .databases import create, drop
from .operators_data import OLD_SECONDS, Keys, Tables, key_of
from .options import Options
from .pages import dashboard
from .report import Result, Sheet

#: Of the numbers of keys that were asked for, the largest that is filled row by row.
MOST = 100_000
#: How often each is asked; the middle one counts. What takes long is asked once.
TIMES, LONG = 3, 1.0
#: Records of leases that are over, as a cleanup every few minutes finds them.
FEW_OVER = 1000
DATABASE = "operators"
STORES = {DATABASE: "PostgreSQL", "mariadb": "MariaDB", "sqlite": "SQLite", "redis": "Redis"}

COMMANDS = {
    "distlock_list": ("distlock_list",),
    "distlock_list --json": ("distlock_list", "--json"),
    "distlock_list --all": ("distlock_list", "--all"),
    "distlock_list --all --json": ("distlock_list", "--all", "--json"),
    "distlock_stats": ("distlock_stats",),
}
CLEANUP = ("distlock_cleanup",)
#: The last one looks at all locks, and finds none.
PAGES = {"": "", ", a refresh": "live=1", ", late heartbeats": "state=overdue"}
#: A command, and behind it the most kilobytes that were resident. Not `ru_maxrss`, which begins
#: with what the process had that started this one.
RUN = """
import sys, django
from django.core.management import execute_from_command_line
django.setup()
if sys.argv[2:]:
    execute_from_command_line(sys.argv[1:])
with open("/proc/self/status") as told:
    print(next(line.split()[1] for line in told if line.startswith("VmHWM")), file=sys.stderr)
"""


@dataclass(frozen=True)
class Figure:
    """What one question took.

    Attributes:
        seconds: On the wall.
        peak: Bytes: the most that Python had allocated at once, or that a process had resident.
    """

    seconds: float
    peak: int


def databases(options: Options) -> list[str]:
    """Return the databases that this takes for itself."""
    return [DATABASE]


def run(options: Options) -> Result:
    """Ask each store for everything, one after another."""
    sizes = [each for each in options.keys if each <= MOST]
    create(DATABASE)
    figures: dict[str, dict[str, float]] = {}
    sheets = []
    for alias, name in STORES.items():
        if alias != "redis" and alias not in connections.settings:
            continue
        store = Keys(alias, max(sizes)) if alias == "redis" else Tables(alias)
        found: dict[int, dict[str, Figure]] = {}
        try:
            store.empty()
            for locks in sizes:
                found[locks] = _measured(store, locks)
        finally:
            store.empty()
        figures |= {
            f"{alias}/{locks}/{what}": {"seconds": figure.seconds, "peak_bytes": figure.peak}
            for locks, asked in found.items()
            for what, figure in asked.items()
        }
        sheets.append(_sheet(f"Operators: {name}", found))
        # A line for who waits: a hundred thousand locks take a while.
        print(f"{name}: done", flush=True)
    drop(DATABASE)
    return Result({"figures": figures, "sizes": sizes}, sheets)


def _measured(store: Tables | Keys, locks: int) -> dict[str, Figure]:
    store.fill(locks)
    found = {what: _figure(ask) for what, ask in _questions(store)}
    with dashboard(store.alias) as opened:
        found |= {
            f"dashboard{what}": _figure(partial(opened, query)) for what, query in PAGES.items()
        }
    for what, words in COMMANDS.items():
        found[f"process: {what}"] = _process(store.alias, *words)
    if isinstance(store, Tables):
        found |= _cleaned(store, locks)
    found["floor: a process that sets Django up"] = _process("")
    return found


def _questions(store: Tables | Keys) -> Iterator[tuple[str, Callable[[], object]]]:
    page = partial(inspection.list_locks, backends=[store.alias])
    yield "first page of 50", partial(page, limit=50)
    yield "first page of 100", page
    yield "prefix, a page", partial(page, prefix="order:9")
    yield "host, a page", partial(page, host="web-7")
    yield "host that has none, a page", partial(page, host="nobody")
    yield "task, a page", partial(page, task_id="job-10")
    yield "held longer than, a page", partial(page, held_longer_than=OLD_SECONDS)
    yield "every page", partial(_walk, store.alias)
    yield "show", partial(inspection.show, key_of(7), store.alias)
    yield "statistics", partial(inspection.statistics, store.alias)
    yield "summary", partial(inspection.summary, store.alias)
    for what, words in COMMANDS.items():
        # The memory that all of them take is that of the process.
        if "--all" not in words:
            yield what, partial(_command, store.alias, *words)
    if isinstance(store, Tables):
        yield "floor: COUNT(*)", store.count
        yield "floor: SELECT of 100", partial(store.select, 100)
        yield "floor: SELECT of all", partial(store.select, MOST)
    else:
        yield "floor: SCAN", store.scan


def _walk(alias: str) -> None:
    """Go through all pages."""
    cursor, number = None, 0
    while True:
        page = inspection.list_locks(backends=[alias], cursor=cursor, limit=1000)
        if page.failures:
            raise RuntimeError(page.failures[0].message)
        number += len(page.locks)
        if (cursor := page.cursor) is None:
            return


def _command(alias: str, *words: str) -> None:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        call_command(*words, "--backend", alias, stdout=nowhere, stderr=nowhere, no_color=True)


def _cleaned(store: Tables, locks: int) -> dict[str, Figure]:
    """Remove a few records among the live locks, and as many as those, each way anew."""
    store.leave(FEW_OVER)
    found = {
        f"distlock_cleanup of {FEW_OVER:,}": Figure(
            _seconds(partial(_command, store.alias, *CLEANUP)), 0
        )
    }
    clean = partial(_command, store.alias, *CLEANUP)
    # The memory that it takes is that of the process.
    ways: dict[str, Callable[[], Figure]] = {
        "floor: one DELETE": lambda: Figure(_seconds(store.delete), 0),
        "distlock_cleanup": lambda: Figure(_seconds(clean), 0),
        "process: distlock_cleanup": lambda: _process(store.alias, *CLEANUP),
    }
    for what, ask in ways.items():
        store.leave(locks)
        store.happen(locks // 10)
        found[what] = ask()
    return found


# How it is measured


def _figure(ask: Callable[[], object]) -> Figure:
    """Ask a few times, and once more with an eye on memory, which takes time of its own."""
    seconds = _seconds(ask)
    if seconds < LONG:
        seconds = middle.median(_seconds(ask) for _ in range(TIMES))
    return Figure(seconds, _timed(ask).peak)


def _timed(ask: Callable[[], object]) -> Figure:
    """Ask once. With an eye on memory, the time is more than it would be."""
    tracemalloc.start()
    try:
        seconds = _seconds(ask)
        return Figure(seconds, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _seconds(ask: Callable[[], object]) -> float:
    began = time.perf_counter()
    ask()
    return time.perf_counter() - began


def _process(alias: str, *words: str) -> Figure:
    """Run a command as a user does: in a process of its own, which begins with nothing."""
    arguments = ["manage.py", *words, "--backend", alias] if words else ["manage.py"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return Figure(time.perf_counter() - began, int(done.stderr.split()[-1]) * 1024)


def _sheet(title: str, found: dict[int, dict[str, Figure]]) -> Sheet:
    sizes = list(found)
    rows: list[list[str]] = []
    for what in found[sizes[0]]:
        asked: list[Any] = [found[locks][what] for locks in sizes]
        rows.append(
            [
                what,
                *(f"{each.seconds * 1000:,.1f}" for each in asked),
                *(f"{each.peak / 2**20:,.2f}" for each in asked),
            ]
        )
    header = [f"{locks:,}: {unit}" for unit in ("ms", "MiB") for locks in sizes]
    return Sheet(title, ["live locks", *header], rows)
