"""Show the numbers of locks and counters, and the space that they take."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from django.template.defaultfilters import filesizeformat

from ...backends.counts import Count, Sizes
from ...core.wording import instant
from ...inspection import Failure, Statistics, statistics
from ..operating import Cell, OperatorCommand, add_backends, ask_each, raise_failed


class Command(OperatorCommand):
    """`distlock_stats [--backend ALIAS …] [--json]`."""

    help = (
        "Shows the number of held locks, records, waiters and fence counters, and the size of the"
        " tables. Numbers that would take long to count are estimated."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_backends(parser)

    def handle(self, *, backend: list[str] | None, json: bool, **options: Any) -> None:
        failures: list[Failure] = []
        found = ask_each(backend, failures, lambda store: statistics(store.alias))
        if json:
            self.print_json({"backends": found, "failures": failures})
        else:
            self._print(found)
            self.print_failures(failures)
        for each in found:
            for warning in each.warnings:
                self.stderr.write(warning, self.style.WARNING)
        raise_failed(failures, backend)

    def _print(self, found: list[Statistics]) -> None:
        rows: list[list[Cell]] = [
            [
                each.backend,
                _shown(each.counts.held),
                _shown(each.counts.expired),
                _shown(each.counts.waiters),
                (_shown(each.counts.counters), self.style.WARNING if each.warnings else str),
                _shown(each.counts.highest),
                _size(each.memory),
            ]
            for each in found
        ]
        headings = ("BACKEND", "HELD", "EXPIRED", "WAITING", "COUNTERS", "HIGHEST FENCE", "MEMORY")
        self.print_table(headings, rows)
        # Backends share the tables of a database.
        shared = {each.sizes.database: each.sizes for each in found if each.sizes is not None}
        for each in shared.values():
            self._print_sizes(each)

    def _print_sizes(self, sizes: Sizes) -> None:
        self.stdout.write("")
        if sizes.bytes is not None:
            self.stdout.write(
                f"The database {sizes.database!r} takes {_size(sizes.bytes)} in total."
            )
        if not sizes.tables:
            return
        rows: list[list[Cell]] = [
            [
                sizes.database,
                each.name,
                _size(each.bytes),
                _about(each.rows),
                _about(each.dead),
                instant(each.vacuumed_at),
                _about(each.made),
            ]
            for each in sizes.tables
        ]
        self.print_table(("DATABASE", "TABLE", "SIZE", "ROWS", "DEAD", "VACUUMED", "MADE"), rows)
        if any(each.made is not None for each in sizes.tables):
            since = instant(sizes.made_since) if sizes.made_since else "the database began to count"
            self.stdout.write(f"Made: since {since}.")


def _shown(count: Count | None) -> str:
    if count is None:
        return "-"
    return f"{'' if count.is_exact else 'about '}{count.number}"


def _about(number: int | None) -> str:
    return "-" if number is None else f"about {number}"


def _size(size: int | None) -> str:
    return "-" if size is None else str(filesizeformat(size)).replace("\xa0", " ")
