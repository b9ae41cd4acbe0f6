"""Measure the time that locks take on the project's own store."""

from __future__ import annotations

import os
import platform
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...core.errors import LockError, LockNotAcquired, LockUsageError
from ...handler import lock_backends
from ...inspection import Failure
from ..bench import PARTS, Bench, Measured, Plan, Times
from ..operating import Cell, OperatorCommand, add_backends
from ..reading import between, up_to
from ..statuses import BUSY, INTERRUPTED, UNAVAILABLE, own_version, who_holds

#: The longest measurement, in seconds.
_LONGEST = 600.0


class Command(OperatorCommand):
    """`distlock_bench [--backend ALIAS …] [--only PART …] …`."""

    help = (
        "Measures acquire/release pairs and hand-offs of locks on the project's own store, in two"
        " threads of this process. By default, it measures each backend for ten seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_backends(parser)
        parser.add_argument(
            "--only",
            action="append",
            choices=PARTS,
            help="what to measure; repeatable (default: all)",
        )
        parser.add_argument(
            "--seconds",
            type=between(0.05, _LONGEST, "seconds"),
            default=2.5,
            metavar="S",
            help="seconds to measure pairs; hand-offs take twice as long (default: %(default)g)",
        )
        parser.add_argument(
            "--rounds",
            type=up_to(1_000_000),
            metavar="N",
            help="maximum number of pairs and hand-offs",
        )

    def handle(self, *, json: bool, **options: Any) -> None:
        plan = Plan(
            parts=tuple(part for part in PARTS if part in (options["only"] or PARTS)),
            seconds=options["seconds"],
            rounds=options["rounds"],
        )
        given = options["backend"]
        found: list[Measured] = []
        failures: dict[int, list[Failure]] = {}
        interrupted = False
        try:
            for alias in list(lock_backends) if given is None else dict.fromkeys(given):
                try:
                    found.append(Bench(lock_backends[alias], plan).run())
                except (LockError, ImproperlyConfigured) as error:
                    status, failure = _failed(alias, error)
                    failures.setdefault(status, []).append(failure)
        except KeyboardInterrupt:
            interrupted = True
        if interrupted:
            # Not above: the traceback there would keep an interrupted block from being ended.
            raise CommandError("Interrupted. The keys were released.", returncode=INTERRUPTED)
        failed = [each for those in failures.values() for each in those]
        if json:
            self.print_json({**_about(plan), "backends": found,
                             "failures": failed})  # fmt: skip
        else:
            self._print(found)
            self.print_failures(failed)
        if failed:
            names = ", ".join(each.backend for each in failed)
            status = next(each for each in (UNAVAILABLE, BUSY, 1) if each in failures)
            raise CommandError(f"Not all backends were measured: {names}.", returncode=status)

    def _print(self, found: list[Measured]) -> None:
        rows = [row for each in found for row in _rows(each)]
        if rows:
            self.print_table(("BACKEND", "TIME", "MEDIAN", "P95", "P99", "COUNT"), rows)


def _failed(alias: str, error: LockError | ImproperlyConfigured) -> tuple[int, Failure]:
    """Return why a backend was not measured, and the status to end with."""
    if isinstance(error, LockNotAcquired):
        return BUSY, Failure(backend=alias, code=error.code, message=who_holds(error))
    ours = isinstance(error, LockUsageError | ImproperlyConfigured)
    return 1 if ours else UNAVAILABLE, Failure.of(alias, error)


def _about(plan: Plan) -> dict[str, Any]:
    """Return the facts that a comparison of two runs needs."""
    return {
        "seconds": plan.seconds,
        "rounds": plan.rounds,
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "django": django.get_version(),
            "django_distlock": own_version(),
        },
    }


def _rows(each: Measured) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    if each.pair is not None:
        rows.append([each.backend, "pair", *_line(each.pair)])
        rows.append(["", "  acquire", *_line(each.pair.acquire)])
        rows.append(["", "  release", *_line(each.pair.release)])
    if each.handoff is not None:
        rows.append([each.backend, "hand-off", *_line(each.handoff)])
    return rows


def _line(times: Times) -> list[Cell]:
    return [*(_time(each) for each in (times.median, times.p95, times.p99)), f"{times.count:,}"]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:,.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.1f} µs"
