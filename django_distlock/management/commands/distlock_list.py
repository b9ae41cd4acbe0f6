"""List what is held, or what is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...handler import lock_backends
from ...inspection import Failure, LockPage, list_locks
from ..declared import show_declared
from ..operating import HEADINGS, OperatorCommand, duration, in_memory, raise_unavailable
from ..streaming import every_page, stream_json, stream_table


class Command(OperatorCommand):
    """`distlock_list [--declared] [--backend ALIAS …] [--prefix P] [--host H] [--task T] …`."""

    help = (
        "Lists held locks, page by page: who holds what, since when, and until when. Or, with"
        " --declared, the keys that the code of the project declares, and where."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Take what to list."""
        super().add_arguments(parser)
        parser.add_argument(
            "--declared",
            action="store_true",
            help="import the project's tasks, views and commands, and list the keys that they"
            " declare; takes --backend, --prefix and --json",
        )
        parser.add_argument(
            "--backend",
            action="append",
            metavar="ALIAS",
            help="an alias of DISTLOCK; may be given several times (default: all of them)",
        )
        parser.add_argument(
            "--prefix", default="", metavar="TEXT", help="only keys that start with this"
        )
        parser.add_argument("--host", help="only what is held on this host")
        parser.add_argument("--task", metavar="ID", help="only what this task holds")
        parser.add_argument(
            "--held-longer-than",
            type=duration,
            metavar="SECONDS",
            help="only what was granted longer ago",
        )
        parser.add_argument(
            "--limit",
            type=int,
            default=100,
            metavar="N",
            help="locks of a page, at most 10000 (default: %(default)s)",
        )
        parser.add_argument("--cursor", help="what the page before has printed")
        parser.add_argument(
            "--all",
            action="store_true",
            help="every page, printed while they are read; --limit is not used",
        )

    def handle(
        self, *, backend: list[str] | None, cursor: str | None, json: bool, **options: Any
    ) -> None:
        """Print a page, and what could not be asked; or what is declared."""
        if options["declared"]:
            options["cursor"] = cursor
            show_declared(
                self, backend=backend, prefix=options["prefix"], json=json, options=options
            )
            return
        aliases = tuple(lock_backends) if backend is None else tuple(dict.fromkeys(backend))
        # Of one whose settings are wrong, the listing says so.
        apart = [alias for alias in aliases if _is_in_memory(alias)]
        asked = {
            "backends": [alias for alias in aliases if alias not in apart],
            "prefix": options["prefix"],
            "host": options["host"],
            "task_id": options["task"],
            "held_longer_than": options["held_longer_than"],
            "waits": True,
        }
        before = tuple(map(in_memory, apart)) if cursor is None else ()
        if options["all"]:
            failures = self._stream(every_page(cursor, **asked), before, json=json)
        else:
            page = list_locks(cursor=cursor, limit=options["limit"], **asked)
            page = replace(page, failures=(*before, *page.failures))
            self._show(page, json=json)
            failures = page.failures
        if backend is not None and apart == list(aliases):
            raise CommandError(in_memory(apart[0]).message)
        raise_unavailable(failures)

    def _show(self, page: LockPage, *, json: bool) -> None:
        if json:
            self.print_json(page.as_json())
            return
        if page.locks:
            self.print_locks(page.locks)
        elif not page.failures:
            self._print_none()
        if page.cursor is not None:
            self.stdout.write(f"More: --cursor {page.cursor}")
        self.print_failures(page.failures)

    def _stream(
        self, pages: Iterator[LockPage], before: tuple[Failure, ...], *, json: bool
    ) -> tuple[Failure, ...]:
        """Print every page as it comes; return what could not be asked."""
        if json:
            return stream_json(self.stdout, pages, before)
        number, failed = stream_table(
            self.stdout, HEADINGS, pages, self.row, self.style.MIGRATE_HEADING
        )
        failures = (*before, *failed)
        if not number and not failures:
            self._print_none()
        self.print_failures(failures)
        return failures

    def _print_none(self) -> None:
        configured = any(True for _ in lock_backends)
        self.stdout.write("No locks are held." if configured else "No lock backend is configured.")


def _is_in_memory(alias: str) -> bool:
    try:
        return not lock_backends[alias].distributed
    except ImproperlyConfigured:
        return False
