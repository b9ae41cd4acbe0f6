"""`python -m tests.benchmarks`: measure, print tables, write JSON."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.services import Server

from . import churn
from .databases import serve
from .options import QUICK, Options
from .report import Result, facts, show, warnings, write

BENCHMARKS = (
    "latency", "roundtrips", "sizes", "scale", "throughput", "redis", "advisory", "handoff",
    "fairness", "contention", "load", "beats", "fencing", "operators",
)  # fmt: skip


def number(low: float, high: float, kind: type = int) -> Callable[[str], Any]:
    """Return a type for an argument: a number from `low` to `high`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a number from {low:,} to {high:,}, not {text!r}"
            )
        return value

    return parse


def numbers(low: int, high: int) -> Callable[[str], tuple[int, ...]]:
    """Return a type for an argument: different numbers, separated by commas."""
    one = number(low, high)
    return lambda text: tuple(sorted({one(part) for part in text.split(",")}))


def output(text: str) -> Path:
    """Return where to write, or refuse before minutes are spent."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r}")
    return path


def parser() -> argparse.ArgumentParser:
    """Describe the command line of the benchmarks."""
    made = _parser("python -m tests.benchmarks", "Measure what locks cost, print tables.")
    made.epilog = "`python -m tests.benchmarks churn --help`: the tables while locks come and go"
    made.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"of {', '.join(BENCHMARKS)}"
    )
    made.add_argument("--rounds", type=number(2, 1000), help="turns of each candidate: 30")
    made.add_argument(
        "--seconds", type=number(0.1, 60, float), help="that clients run in one turn: 2"
    )
    made.add_argument("--clients", type=numbers(1, 64), help="numbers of clients: 1,8,32")
    made.add_argument(
        "--keys", type=numbers(10, 10_000_000), help="counters and locks: 1000,100000,1000000"
    )
    return made


def churn_parser() -> argparse.ArgumentParser:
    """Describe the command line of the churn."""
    made = _parser("python -m tests.benchmarks churn", "Watch the tables while locks come and go.")
    made.add_argument("--minutes", type=number(0.01, 600, float), help="of each variant: 10")
    made.add_argument("--keys", type=number(10, 10_000_000), help="that come and go: 10000")
    made.add_argument("--clients", type=number(1, 64), help="processes: 4")
    made.add_argument("--extends", type=number(0, 1000, float), help="of a lease, on average: 2")
    made.add_argument(
        "--sample", dest="sample_seconds", type=number(0.1, 600, float), help="seconds: 10"
    )
    made.add_argument(
        "--compare", action="store_true", help="run variants one after another instead"
    )
    return made


def _parser(program: str, about: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=program, description=about, allow_abbrev=False)
    made.add_argument("--json", type=output, metavar="FILE", help="also write the figures there")
    made.add_argument("--quick", action="store_true", help="smallest sizes: is it in order?")
    made.add_argument(
        "--fsync", choices=("on", "off"), default="on", help="whether commits wait for the disk: on"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; return the exit status."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        if arguments[:1] == ["churn"]:
            churn_tables(arguments[1:], console)
        else:
            measure(arguments, console)
    except pytest.UsageError as error:
        console.print(f"error: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    return 0


def measure(arguments: Sequence[str], console: Console) -> None:
    """Run the benchmarks one after another, on servers of their own."""
    asked = parser().parse_args(arguments)
    names = chosen(asked)
    options: Options = with_given(asked, QUICK if asked.quick else Options())
    extra = [each for name in names for each in databases_of(name, options)]
    mysql = bool({"latency", "contention", "fencing", "operators"} & {*names})
    with serve(extra, fsync=asked.fsync == "on", mysql=mysql) as server:
        found: dict[str, Any] = {**begin(asked, server, console), "options": asdict(options)}
        found["benchmarks"], found["seconds"] = {}, {}
        for name in names:
            began = time.monotonic()
            result: Result = benchmark(name).run(options)
            found["benchmarks"][name] = result.data
            found["seconds"][name] = round(time.monotonic() - began, 1)
            finish(asked, result, found, console)


def chosen(asked: argparse.Namespace) -> list[str]:
    """Return the benchmarks that were asked for, in their order; all, where none was named."""
    return [name for name in BENCHMARKS if name in (asked.only or BENCHMARKS)]


def churn_tables(arguments: Sequence[str], console: Console) -> None:
    """Run the churn, on a server of its own."""
    made = churn_parser()
    asked = made.parse_args(arguments)
    load: churn.Load = with_given(asked, churn.QUICK if asked.quick else churn.Load())
    if load.clients > load.keys:
        made.error(f"--clients {load.clients}: more than there are keys ({load.keys})")
    variants = churn.COMPARED if asked.compare else churn.COMPARED[:1]
    extra = [churn.database(number) for number in range(len(variants))]
    with serve(extra, fsync=asked.fsync == "on") as server:
        found = begin(asked, server, console)
        result = churn.run(load, variants)
        finish(asked, result, {**found, "benchmarks": {"churn": result.data}}, console)


def with_given(asked: argparse.Namespace, options: Any) -> Any:
    """Return the options with what the command line says instead."""
    names = {each.name for each in fields(options)}
    given = {name: value for name, value in vars(asked).items() if value is not None}
    return replace(options, **{name: given[name] for name in names & set(given)})


def begin(asked: argparse.Namespace, server: Server, console: Console) -> dict[str, Any]:
    """Say what is measured on, and return it."""
    machine = facts()
    console.print(
        f"PostgreSQL {server.version}, fsync {asked.fsync}; {machine['cpus']} x {machine['cpu']}"
    )
    for warning in warnings(machine):
        console.print(f"warning: {warning}")
    return {"facts": machine}


def finish(
    asked: argparse.Namespace, result: Result, found: dict[str, Any], console: Console
) -> None:
    """Show what was found, and keep it."""
    show(console, result)
    if asked.json:
        write(asked.json, found)


def benchmark(name: str) -> Any:
    """Return the module of a benchmark."""
    return import_module(f".{name}", __package__)


def databases_of(name: str, options: Options) -> list[str]:
    """Return the databases that a benchmark wants for itself."""
    wanted = getattr(benchmark(name), "databases", None)
    return wanted(options) if wanted else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
