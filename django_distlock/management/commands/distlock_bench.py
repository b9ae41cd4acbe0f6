"""Measure what locks cost on the project's own store."""

from __future__ import annotations

import argparse
import os
import platform
from argparse import ArgumentTypeError
from importlib.metadata import version
from pathlib import Path
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...core.errors import InvalidArgument, LockError, LockNotAcquired, LockUsageError
from ...handler import lock_backends
from ...inspection import Failure
from ..bench import PARTS, Bench, Plan
from ..bench_clients import be_client
from ..bench_figures import Measured, Rate, Timed, Times
from ..bench_plot import draw, refuse_unplottable
from ..bench_processes import interruptible
from ..operating import OperatorCommand
from ..statuses import BUSY, UNAVAILABLE, USAGE, who_holds
from ..tables import Cell

#: The longest measurement, in seconds, and the most clients.
_LONGEST, _MOST = 600.0, 64


class Command(OperatorCommand):
    """`distlock_bench [--backend ALIAS …] [--only PART …] [--plot FILE] …`."""

    help = (
        "Measures pairs, hand-offs and throughput of locks on the project's own store, beside the"
        " least that the store can be asked. Keeps the store busy meanwhile: half a minute for a"
        " backend, unless it is told otherwise."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Take what to measure."""
        super().add_arguments(parser)
        parser.add_argument(
            "--backend",
            action="append",
            metavar="ALIAS",
            help="an alias of DISTLOCK; may be given several times (default: all of them)",
        )
        parser.add_argument(
            "--only",
            action="append",
            choices=PARTS,
            help="measure this; may be given several times (default: all)",
        )
        parser.add_argument(
            "--seconds",
            type=_seconds,
            default=2.5,
            metavar="S",
            help="how long a measurement takes; a hand-off takes twice as long, and throughput is"
            " four of them (default: %(default)g)",
        )
        parser.add_argument(
            "--rounds", type=_count, metavar="N", help="pairs and hand-offs at most"
        )
        parser.add_argument(
            "--clients",
            type=_clients,
            default=4,
            metavar="N",
            help=f"who competes for throughput, at most {_MOST} (default: %(default)s)",
        )
        parser.add_argument(
            "--threads",
            action="store_true",
            help="let clients be threads of this process, as they are for locks in memory",
        )
        parser.add_argument(
            "--plot", type=Path, metavar="FILE", help="draw the figures, as .svg or .png"
        )
        # The other processes are this command as well.
        parser.add_argument("--client", metavar="ALIAS", help=argparse.SUPPRESS)

    def handle(self, *, client: str | None, plot: Path | None, json: bool, **options: Any) -> None:
        """Measure, and say what was found."""
        if client is not None:
            be_client(client, self._say)
            return
        if plot is not None:
            try:
                refuse_unplottable(plot)
            except (InvalidArgument, LockUsageError) as error:
                raise CommandError(str(error), returncode=USAGE) from error
        plan = Plan(
            parts=tuple(part for part in PARTS if part in (options["only"] or PARTS)),
            seconds=options["seconds"],
            rounds=options["rounds"],
            clients=options["clients"],
            in_threads=options["threads"],
        )
        run = _Run(self, plan, quiet=json)
        given = options["backend"]
        run.measure(list(lock_backends) if given is None else list(dict.fromkeys(given)))
        if json and run.interrupted is None:
            self.print_json({**_about(plan), **run.as_json()})
        elif not json:
            self._print(run.found)
            self.print_failures(run.failures)
        if plot is not None and run.found:
            draw(run.found, plot)
            if not json:
                self.stdout.write(f"\nDrawn: {plot}")
        run.end()

    def _print(self, found: list[Measured]) -> None:
        times = [row for each in found for row in _times(each)]
        rates = [row for each in found for row in _rates(each)]
        if times:
            self.print_table(
                ("BACKEND", "TIME", "MEDIAN", "P95", "P99", "COUNT", "FLOOR", "RATIO"), times
            )
        if times and rates:
            self.stdout.write("")
        if rates:
            self.print_table(
                ("BACKEND", "THROUGHPUT", "CLIENTS", "PER SECOND", "FLOOR", "RATIO"), rates
            )
        floors = {each.store: each.floor for each in found if each.floor}
        if floors:
            self.stdout.write("")
        for store, floor in floors.items():
            self.stdout.write(f"Floor, {store}: {floor}.")

    def _say(self, line: str) -> None:
        # Who has started this process waits.
        self.stdout.write(line)
        self.stdout.flush()


class _Run:
    """The benches of some backends, one after another.

    Attributes:
        found: What was measured.
        failures: The backends that could not be.
        interrupted: By which signal it was ended; None: it was not.
    """

    def __init__(self, command: Command, plan: Plan, *, quiet: bool):
        self.found: list[Measured] = []
        self.failures: list[Failure] = []
        self.interrupted: int | None = None
        self._statuses: list[int] = []
        self._command = command
        self._plan = plan
        self._shown = not quiet and command.stdout.isatty()

    def measure(self, aliases: list[str]) -> None:
        """Measure one backend after another, until a signal ends it."""
        came: list[int] = []
        try:
            with interruptible() as came:
                for alias in aliases:
                    failure = self._measure(alias)
                    if came:
                        break
                    self._keep(failure)
        except BaseException:
            if not came:
                raise
        finally:
            self._show("")
        self.interrupted = came[0] if came else None

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "backends": [each.as_json() for each in self.found],
            "failures": [each.as_json() for each in self.failures],
        }

    def end(self) -> None:
        """End with the status that fits.

        Raises:
            CommandError: Not all was measured.
        """
        if self.interrupted is not None:
            raise CommandError(
                "Interrupted: other processes were ended, and the keys released.",
                returncode=128 + self.interrupted,
            )
        if self.failures:
            names = ", ".join(each.backend for each in self.failures)
            status = next(each for each in (UNAVAILABLE, BUSY, 1) if each in self._statuses)
            raise CommandError(f"Not all backends were measured: {names}.", returncode=status)

    def _measure(self, alias: str) -> tuple[Failure, int] | None:
        """Measure a backend; return why it cannot be, and with which status to end."""
        try:
            bench = Bench(
                lock_backends[alias], self._plan, lambda part: self._show(f"{alias}: {part} …")
            )
            self.found.append(bench.run())
        except LockNotAcquired as error:
            return Failure(backend=alias, code=error.code, message=who_holds(error)), BUSY
        except (LockUsageError, ImproperlyConfigured) as error:
            return Failure.of(alias, error), 1
        except LockError as error:
            return Failure.of(alias, error), UNAVAILABLE
        return None

    def _keep(self, failure: tuple[Failure, int] | None) -> None:
        if failure is not None:
            self.failures.append(failure[0])
            self._statuses.append(failure[1])

    def _show(self, text: str) -> None:
        """Show people what is done now, in a line that the next one takes the place of."""
        if self._shown:
            self._command.stdout.write(f"\r\033[K{text}", ending="")
            self._command.stdout.flush()


def _about(plan: Plan) -> dict[str, Any]:
    """Return what whoever compares two runs has to know."""
    return {
        "seconds": plan.seconds,
        "rounds": plan.rounds,
        "clients": plan.clients,
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "django": django.get_version(),
            "django_distlock": version("django-distlock"),
        },
    }


def _times(each: Measured) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for name, timed in (("pair", each.pair), ("hand-off", each.hand_off)):
        if timed is not None:
            floor = _time(Times.of(timed.floor).median) if timed.floor else "-"
            rows.append([each.backend, name, *_line(Times.of(timed.taken)), floor, _ratio(timed)])
            for part, taken in timed.parts.items():
                rows.append(["", f"  {part}", *_line(Times.of(taken)), "", ""])
    return rows


def _rates(each: Measured) -> list[list[Cell]]:
    named = (("a key for each", each.own_keys), ("one key for all", each.hot_key))
    return [
        [
            each.backend,
            name,
            f"{each.clients} {each.apart}",
            f"{rate.per_second:,.0f}",
            "-" if rate.floor is None else f"{rate.floor:,.0f}",
            _ratio(rate),
        ]
        for name, rate in named
        if rate is not None
    ]


def _line(times: Times) -> list[Cell]:
    return [*(_time(each) for each in (times.median, times.p95, times.p99)), f"{times.count:,}"]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:,.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.1f} µs"


def _ratio(figure: Timed | Rate) -> str:
    if figure.ratio is None:
        return "-"
    return f"{figure.ratio:.2f}" if figure.ratio >= 0.01 else f"{figure.ratio:.1g}"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= _LONGEST:
        raise ArgumentTypeError(f"{text!r} is no number of seconds from 0.05 to {_LONGEST:g}.")
    return seconds


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 1_000_000):
        raise ArgumentTypeError(f"{text!r} is no number from 1 to 1000000.")
    return int(text)


def _clients(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= _MOST):
        raise ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST}.")
    return int(text)
