"""Shared code of the commands for operators: JSON, tables and exit statuses."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import chain
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ..backends.base import BaseLockBackend
from ..core.documents import plain
from ..core.errors import BackendUnavailable, InvalidArgument, LockError, LockUsageError
from ..core.records import Session
from ..core.wording import instant, printable, span
from ..handler import lock_backends
from ..inspection import Failure, HeldKey, LockPage, State, list_locks
from ..process import event_log
from ..process.host import current_holder
from .reading import Printer, ReadingCommand
from .statuses import UNAVAILABLE, USAGE

T = TypeVar("T")
#: The text of a cell, and the function that colours it after it is padded to its column.
Cell = str | tuple[str, Callable[[str], str]]

#: Seconds that a command waits at its end for its events to be written: they are the audit of
#: what an operator did.
AUDIT_SECONDS = 15
#: Locks of a page that is queried.
PAGE = 1000

#: The headings of a table of held keys.
HEADINGS = (
    "BACKEND", "KEY", "STATE", "HOLDER", "TASK", "HELD FOR", "EXPIRES IN", "WAITING", "RETRYING",
    "FENCE",
)  # fmt: skip


class OperatorCommand(ReadingCommand):
    """A command that looks at locks, or changes them, through `inspection`."""

    #: No check about something else may stop an operator who deals with a stuck lock.
    requires_system_checks: Any = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add `--json`."""
        parser.add_argument(
            "--json", action="store_true", help="print one JSON document instead of text"
        )

    def execute(self, *args: Any, **options: Any) -> Any:
        """Run, and end with the status that fits the error.

        What is entered into `_to_the_end` lasts until the events are written.
        """
        with ExitStack() as self._to_the_end:
            return self._until_written(*args, **options)

    def _until_written(self, *args: Any, **options: Any) -> Any:
        dropped = event_log.dropped()
        try:
            said = super().execute(*args, **options)
        except (ImproperlyConfigured, LockError) as error:
            status = status_of(error)
            if options.get("json") and status != USAGE:
                # With valid arguments, `--json` always prints a document.
                named = options.get("backend")
                alias = named if isinstance(named, str) else ""
                self.print_json({"failures": [Failure.of(alias, error)]})
            raise CommandError(str(error), returncode=status) from error
        finally:
            self.stdout.flush()
            if not event_log.finish(AUDIT_SECONDS):
                self.stderr.write(
                    f"The lock events of this command were not written within {AUDIT_SECONDS} s:"
                    " their database is slow. They are lost when this process ends."
                )
            if lost := event_log.dropped() - dropped:
                self.stderr.write(
                    f"{lost} lock events of this command were dropped: their database is slow, or"
                    " refuses them."
                )
        if isinstance(self.stdout, Printer) and self.stdout.failure is not None:
            raise CommandError(f"Done, but not all could be printed: {self.stdout.failure}")
        return said

    def pace(self, done: int) -> None:
        """Wait for events to be written, before so many wait that further ones are dropped."""
        if done % (event_log.MAX_WAITING // 2) == 0:
            event_log.finish(AUDIT_SECONDS)

    def print_json(self, document: Any) -> None:
        """Print one JSON document."""
        self.stdout.write(json.dumps(plain(document), indent=2))

    def print_locks(self, locks: Iterable[HeldKey]) -> None:
        """Print held keys as a table."""
        self.print_table(HEADINGS, [self.row(each) for each in locks])

    def row(self, held: HeldKey) -> list[Cell]:
        """Return a held key as a row below `HEADINGS`."""
        state = held.state
        colours: dict[State, Callable[[str], str]] = {
            State.HELD: self.style.SUCCESS,
            State.SETTLED: self.style.SUCCESS,
            State.PAST_EXPIRY: self.style.ERROR,
        }
        return [
            held.backend,
            held.key,
            (str(state.label), colours.get(state, self.style.WARNING)),
            held.holder.where or "-",
            held.holder.task_id or "-",
            span(held.held_for),
            span(held.expires_in),
            "-" if held.waits is None else str(held.waits.waiting),
            "-" if held.waits is None else str(held.waits.retrying),
            str(held.fence),
        ]

    def print_table(self, headings: tuple[str, ...], rows: list[list[Cell]]) -> None:
        """Print a table."""
        for line in aligned(headings, rows, self.style.MIGRATE_HEADING):
            self.stdout.write(line)

    def print_failures(self, failures: Iterable[Failure]) -> None:
        """Print on standard error which backends could not be queried."""
        for each in failures:
            self.stderr.write(f"{each.backend}: {each.message}", self.style.WARNING)

    def actor(self) -> str:
        """Return the name of the user who runs this command, for events."""
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # The user has a number without a name.
            user = f"uid {os.getuid()}"
        name = f"{user}@{current_holder().host}"[:200]
        # The user's name in the environment may have bytes that are no text.
        return name.encode("utf-8", "replace").decode()


def aligned(
    headings: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    style: Callable[[str], str],
    least: list[int] | None = None,
) -> Iterator[str]:
    """Yield the lines of a table, in columns as wide as their cells.

    Args:
        least: The least width of each column; is set to the actual widths.
    """
    table = [[_parts(cell) for cell in row] for row in rows]
    head = [(heading, style) for heading in headings]
    widths = [max(len(text) for text, _ in column) for column in zip(head, *table, strict=True)]
    if least is not None:
        widths = least[:] = [max(pair) for pair in zip(widths, least, strict=True)]
    for row in (head, *table):
        cells = [
            colour(text.ljust(width)) for (text, colour), width in zip(row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _parts(cell: Cell) -> tuple[str, Callable[[str], str]]:
    text, colour = (cell, str) if isinstance(cell, str) else cell
    return printable(text), colour


def every_page(cursor: str | None, **asked: Any) -> Iterator[LockPage]:
    """Yield one page of `list_locks` after another, from a cursor to the end."""
    while True:
        page = list_locks(cursor=cursor, limit=PAGE, **asked)
        yield page
        if (cursor := page.cursor) is None:
            return


def stream_json(
    out: Any, pages: Iterable[LockPage], failures: Iterable[Failure]
) -> tuple[Failure, ...]:
    """Print one or many pages as the JSON of a single page; return the failures."""
    failed, before = [*failures], "\n"
    # Before any output: invalid arguments raise an error here, without the start of a document.
    coming = iter(pages)
    first = next(coming)
    out.write('{\n  "locks": [', ending="")
    for page in chain((first,), coming):
        failed += page.failures
        cursor = page.cursor
        if page.locks:
            text = ",\n".join(f"    {json.dumps(each.as_json())}" for each in page.locks)
            out.write(before + text, ending="")
            before = ",\n"
    rest = {"cursor": cursor, "failures": plain(failed)}
    out.write("\n  ],\n" + json.dumps(rest, indent=2).removeprefix("{\n"))
    return tuple(failed)


def status_of(error: Exception) -> int:
    """Return the exit status for an error."""
    if isinstance(error, InvalidArgument):
        return USAGE
    # "internal": the store has refused, for example because it lacks a table.
    refused = isinstance(error, LockError) and error.code == "internal"
    return UNAVAILABLE if refused or isinstance(error, BackendUnavailable) else 1


def ask_each(
    backends: Collection[str] | None, failures: list[Failure], ask: Callable[[BaseLockBackend], T]
) -> list[T]:
    """Query these backends, or all; `failures` gets those that fail or lock in memory only."""
    found: list[T] = []
    for alias in lock_backends if backends is None else dict.fromkeys(backends):
        try:
            refuse_memory(alias)
            found.append(ask(lock_backends[alias]))
        except (LockError, ImproperlyConfigured) as error:
            failures.append(Failure.of(alias, error))
    return found


def refuse_memory(alias: str) -> None:
    """Refuse a backend whose locks are in the memory of other processes, unseen by this one."""
    if not lock_backends[alias].distributed:
        raise LockUsageError(
            f"The lock backend {alias!r} keeps its locks in process memory. Other processes cannot"
            " see them."
        )


def raise_failed(failures: Iterable[Failure], asked: Collection[str] | None) -> None:
    """End with the status that fits the failures.

    Args:
        asked: The aliases that were named; None: all of them. An unsupported operation is an error
            only if all named backends have failed.

    Raises:
        CommandError: A store did not answer, its settings are wrong, or none of the named backends
            could be queried.
    """
    failed = [each for each in failures if not each.is_of_key]
    silent = [each.backend for each in failed if each.code not in ("unsupported", "misconfigured")]
    if silent:
        names = ", ".join(dict.fromkeys(silent))
        raise CommandError(f"Some backends are unavailable: {names}.", returncode=UNAVAILABLE)
    is_nothing_else = asked is not None and {each.backend for each in failed}.issuperset(asked)
    wrong = [each.message for each in failed if is_nothing_else or each.code == "misconfigured"]
    if wrong:
        raise CommandError("; ".join(wrong))


def add_backends(parser: CommandParser) -> None:
    """Add the option for the aliases of several backends; None: all."""
    parser.add_argument(
        "--backend",
        action="append",
        metavar="ALIAS",
        help="an alias of DISTLOCK; repeatable (default: all)",
    )


def add_reason(parser: CommandParser) -> None:
    """Add the option for the reason of an operation."""
    parser.add_argument(
        "--reason",
        default="",
        metavar="WHY",
        help="at most 200 characters, recorded with the event",
    )


def app_and(name: str) -> tuple[Any, Any]:
    """Return a module of `contrib.celery`, and the project's app; `LockUsageError`: it has none."""
    try:
        module = import_module(f"django_distlock.contrib.celery.{name}")
        declaring = import_module("django_distlock.contrib.celery.declaring")
    except ImportError as error:
        raise LockUsageError(f"Celery cannot be imported: {error}") from error
    app = declaring.app_of_project()
    if app is None:
        raise LockUsageError(
            "No Celery app was found. Import it in the package of the settings, as the Celery"
            " documentation for Django describes."
        )
    return module, app


def named(session: Session) -> str:
    """Return a text by which an operator finds a session."""
    facts = [
        f"session {session.pid}",
        session.application and f"application {session.application!r}",
        session.user and f"user {session.user!r}",
        session.client and f"from {session.client}",
        f"since {instant(session.since)}" if session.since else "",
    ]
    return ", ".join(each for each in facts if each)
