"""Remove the records of ended leases, expired responses, and old events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...core.durations import seconds
from ...core.errors import InvalidArgument, LockError, LockUsageError
from ...core.wording import counted
from ...handler import lock_backends
from ...inspection import Failure, Outcome, Pruned, cleanup, prune_events, prune_responses
from ...inspection.operations import MAX_SPAN
from ...inspection.pruning import AUDIT_KEPT, EVENTS_KEPT, MAX_BATCH
from ..interrupting import held_back
from ..operating import OperatorCommand, raise_failed, refuse_memory
from ..reading import duration, number_of, reader, up_to

#: Seconds.
DAY = 86_400.0
_NEVER = "never"


class Command(OperatorCommand):
    """`distlock_cleanup [--older-than SECONDS] [--events-older-than DAYS] …`."""

    help = (
        "Removes the records of expired leases, expired stored responses, and old lock events."
        " Nothing depends on them. Live locks and fence counters are never touched."
    )
    #: The signal that came.
    told: list[int]

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--older-than",
            type=duration,
            default=0.0,
            metavar="SECONDS",
            help="remove only records that expired at least this many seconds ago (default:"
            " %(default)g)",
        )
        parser.add_argument(
            "--events-older-than",
            type=reader(_days, f'a number of days from 0 to {MAX_SPAN / DAY:g}, or "never"'),
            metavar="DAYS",
            help=(
                "remove events older than this many days, and operators' events older than"
                f" {AUDIT_KEPT / DAY:g} days; never: keep all (default: {EVENTS_KEPT / DAY:g}, and"
                " never with --backend)"
            ),
        )
        parser.add_argument(
            "--batch",
            type=up_to(100_000),
            default=1000,
            metavar="N",
            help="records or events per transaction (default: %(default)s)",
        )
        parser.add_argument(
            "--backend", metavar="ALIAS", help="an alias of DISTLOCK to clean up (default: all)"
        )

    def handle(
        self, *, older_than: float, batch: int, backend: str | None, json: bool, **options: Any
    ) -> None:
        if backend is not None:
            refuse_memory(backend)
        outcomes: list[Outcome] = []
        failures: list[Failure] = []
        removed: dict[str, Any] = {"responses": None, "events": None}
        # Amid a batch, a signal would lose the event about those before it.
        self.told = self._to_the_end.enter_context(held_back())
        with suppress(Interrupted):
            for alias in lock_backends if backend is None else [backend]:
                with self._noted(alias, failures):
                    if lock_backends[alias].distributed:
                        outcomes.append(self._clean(alias, older_than, batch, quiet=json))
            days, everything = options["events_older_than"], backend is None
            for name, remove in self._others(days, batch, everything=everything, quiet=json):
                try:
                    removed[name] = remove()
                except (ImproperlyConfigured, LockUsageError):
                    continue  # A project with locks elsewhere needs no database.
                except LockError as error:
                    failures.append(Failure.of(name, error))
        if json:
            self.print_json(
                {
                    "removed": {each.backend: each.removed for each in outcomes},
                    **removed,
                    "failures": failures,
                }
            )
        self.print_failures(failures)
        if self.told:
            raise CommandError("Interrupted.", returncode=128 + self.told.pop())
        raise_failed(failures, None)

    @contextmanager
    def _noted(self, alias: str, failures: list[Failure]) -> Iterator[None]:
        """Note an error of a backend, so that the others are cleaned up all the same."""
        try:
            yield
        except InvalidArgument:
            raise
        except (LockError, ImproperlyConfigured) as error:
            failures.append(Failure.of(alias, error))

    def _clean(self, alias: str, older_than: float, batch: int, *, quiet: bool) -> Outcome:
        line = _Line(self, alias, quiet=quiet)
        outcome = cleanup(
            backend=alias,
            older_than=older_than,
            batch=batch,
            actor=self.actor(),
            reason="distlock_cleanup",
            progress=line.progress,
        )
        line.end(f"{counted(outcome.removed, 'record')} removed.")
        return outcome

    def _others(
        self, days: float | str | None, batch: int, *, everything: bool, quiet: bool
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield functions that remove responses and events, which are those of all backends."""
        if everything:
            yield "responses", partial(self._forget, batch, quiet=quiet)
        if days is None and everything:
            days = EVENTS_KEPT / DAY
        if isinstance(days, float):
            yield "events", partial(self._prune, days, batch, quiet=quiet)

    def _forget(self, batch: int, *, quiet: bool) -> int:
        line = _Line(self, "responses", quiet=quiet)
        gone = prune_responses(batch=min(batch, MAX_BATCH), progress=line.progress)
        if gone:
            line.end(f"{counted(gone, 'response')} removed.")
        return gone

    def _prune(self, days: float, batch: int, *, quiet: bool) -> Pruned:
        line = _Line(self, "events", quiet=quiet)
        pruned = prune_events(
            older_than=days * DAY,
            batch=min(batch, MAX_BATCH),
            actor=self.actor(),
            reason="distlock_cleanup",
            progress=line.progress,
        )
        of_operators = f", {pruned.audit} of them operators' events" if pruned.audit else ""
        line.end(f"{counted(pruned.removed, 'event')} removed{of_operators}.")
        return pruned


class Interrupted(Exception):
    """A signal came: no further batch is removed."""


class _Line:
    """A line that counts removed records while they are removed: on a terminal, unless quiet."""

    def __init__(self, command: Command, name: str, *, quiet: bool):
        self._out = command.stdout
        self._told = command.told
        self._name = name
        self._quiet = quiet
        self._counts = not quiet and self._out.isatty()
        self._begun = False

    def progress(self, removed: int) -> None:
        """Print how many are removed so far; `Interrupted`: stop here."""
        if self._counts:
            self._begun = True
            self._out.write(f"\r{self._name}: {removed} removed …", ending="")
            self._out.flush()
        if self._told:
            raise Interrupted

    def end(self, text: str) -> None:
        """Print the result."""
        if not self._quiet:
            start = "\r\033[K" if self._begun else ""
            self._out.write(f"{start}{self._name}: {text}")


def _days(text: str | timedelta) -> float | str:
    if text == _NEVER:
        return _NEVER
    return seconds(number_of(text, timedelta(days=1)) * DAY, "days", maximum=MAX_SPAN) / DAY
