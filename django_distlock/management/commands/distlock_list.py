"""List held keys, declared keys, or the keys that transactions have locked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from ...core.errors import InvalidArgument
from ...core.wording import span
from ...handler import lock_backends
from ...inspection import Failure, LockPage, list_locks, list_transactions
from ...inspection.declared import DeclaredKey, list_declared
from ..operating import (
    HEADINGS,
    Cell,
    OperatorCommand,
    add_backends,
    aligned,
    ask_each,
    every_page,
    named,
    raise_failed,
    stream_json,
)
from ..reading import duration

_DECLARED: Final = ("KEY", "KIND", "MODE", "TTL", "WAIT", "ON CONFLICT", "BACKEND", "PLACE")
_TRANSACTIONS: Final = ("BACKEND", "KEY", "MODE", "STATE", "FOR", "SESSION")
_NO_LEASE: Final = "Transaction locks have no lease"
#: Arguments about held keys, with their defaults.
_OF_HELD: Final = {
    "host": None, "task": None, "held_longer_than": None, "limit": 100, "cursor": None,
    "all": False, "contains": "",
}  # fmt: skip
_FILTERS: Final = ("prefix", "contains", "host", "task", "held_longer_than")


class Command(OperatorCommand):
    """`distlock_list [--declared | --transactions] [--backend ALIAS …] [--prefix P] …`."""

    help = (
        "Lists held locks, page by page, with their holders, ages and expiry times. With"
        " --declared, lists the keys that the project's code declares and where. With"
        " --transactions, lists the keys that transactions have locked or wait for."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--declared",
            action="store_true",
            help="import the project's tasks, views and commands and list the keys that they"
            " declare; works with --backend, --prefix and --json",
        )
        parser.add_argument(
            "--transactions",
            action="store_true",
            help="list the keys that transactions have locked by transaction_lock(), if the"
            " database can tell; works with --backend and --json",
        )
        add_backends(parser)
        parser.add_argument(
            "--prefix", default="", metavar="TEXT", help="only keys that start with this text"
        )
        parser.add_argument(
            "--contains", default="", metavar="TEXT", help="only keys that contain this text"
        )
        parser.add_argument("--host", help="only locks held on this host")
        parser.add_argument("--task", metavar="ID", help="only locks held by this task")
        parser.add_argument(
            "--held-longer-than",
            type=duration,
            metavar="SECONDS",
            help="only locks held for longer than this",
        )
        parser.add_argument(
            "--limit",
            type=int,
            default=_OF_HELD["limit"],
            metavar="N",
            help="locks per page, at most 10000 (default: %(default)s)",
        )
        parser.add_argument("--cursor", help="the cursor that the previous page printed")
        parser.add_argument(
            "--all",
            action="store_true",
            help="all pages, printed while they are read; ignores --limit",
        )

    def handle(
        self, *, backend: list[str] | None, cursor: str | None, json: bool, **options: Any
    ) -> None:
        if options["declared"] or options["transactions"]:
            what = "Declared keys are not held" if options["declared"] else _NO_LEASE
            self._require_plain(what, {**options, "cursor": cursor})
        if options["declared"]:
            self._show_declared(backend, options["prefix"], json=json)
            return
        if options["transactions"]:
            self._show_transactions(backend, json=json)
            return
        aliases = tuple(lock_backends) if backend is None else tuple(dict.fromkeys(backend))
        failures: list[Failure] = []
        ask_each(aliases, failures, lambda store: store)
        # The listing itself reports backends whose settings are wrong.
        apart = {each.backend: each for each in failures if each.code == "unsupported"}
        asked = {
            "backends": [alias for alias in aliases if alias not in apart],
            "prefix": options["prefix"],
            "contains": options["contains"],
            "host": options["host"],
            "task_id": options["task"],
            "held_longer_than": options["held_longer_than"],
            "waits": True,
        }
        is_filtered = any(options[name] not in ("", None) for name in _FILTERS)
        none = "No lock matches." if is_filtered else "No locks are held."
        before = [*apart.values()] if cursor is None else []
        pages: Iterable[LockPage] = every_page(cursor, **asked)
        if not options["all"]:
            pages = [list_locks(cursor=cursor, limit=options["limit"], **asked)]
        if json:
            raise_failed(stream_json(self.stdout, pages, before), backend)
        else:
            raise_failed(self._stream_table(pages, before, none), backend)

    def _require_plain(self, what: str, given: dict[str, Any]) -> None:
        """Refuse arguments about held keys, and name them."""
        others = {"declared": False, "prefix": ""} if given["transactions"] else {}
        allowed = {**_OF_HELD, **others}
        wrong = [name for name, default in allowed.items() if given[name] != default]
        if wrong:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise InvalidArgument(f"{what}: remove {names}.")

    def _show_transactions(self, backends: list[str] | None, *, json: bool) -> None:
        """Print transaction locks; on standard error, the backends that could not be queried."""
        found = list_transactions(backends=backends)
        if json:
            self.print_json(found)
        elif found.transactions:
            self.print_table(
                _TRANSACTIONS,
                [
                    [
                        each.backend,
                        each.name,
                        "shared" if each.shared else "alone",
                        "waits" if each.waits else "keeps",
                        span(each.seconds),
                        named(each.session),
                    ]
                    for each in found.transactions
                ],
            )
        elif not found.failures:
            self.stdout.write("No visible transaction has locked a key.")
        if not json:
            self.print_failures(found.failures)
        raise_failed(found.failures, backends)

    def _stream_table(
        self, pages: Iterable[LockPage], before: list[Failure], none: str
    ) -> list[Failure]:
        """Print pages as one table, as they come; columns grow if a page has a wider cell."""
        widths, number, cursor, failures = [0] * len(HEADINGS), 0, None, [*before]
        for page in pages:
            failures += page.failures
            cursor = page.cursor
            if page.locks:
                rows = map(self.row, page.locks)
                lines = aligned(HEADINGS, rows, self.style.MIGRATE_HEADING, widths)
                # Only the first page has headings.
                self.stdout.write("\n".join(lines if not number else list(lines)[1:]))
                number += len(page.locks)
        if not number and not failures:
            configured = any(True for _ in lock_backends)
            self.stdout.write(none if configured else "No lock backend is configured.")
        if cursor is not None:
            self.stdout.write(f"More: --cursor {cursor}")
        self.print_failures(failures)
        return failures

    def _show_declared(self, backends: list[str] | None, prefix: str, *, json: bool) -> None:
        """Print every declared key; on standard error, what could not be imported."""
        found, missing = list_declared(prefix=prefix, backends=backends)
        if json:
            failures = [{"what": what, "message": message} for message, what in missing.items()]
            self.print_json({"declared": found, "failures": failures})
        elif found:
            self.print_table(_DECLARED, [self._declared(each) for each in found])
        elif not missing:
            none = "No declared key matches." if prefix or backends else "No keys are declared."
            self.stdout.write(none)
        for message, what in missing.items():
            self.stderr.write(f"{what}: {message}", self.style.WARNING)
        if missing:
            names = ", ".join(missing.values())
            raise CommandError(
                f"These modules could not be imported and may declare more keys: {names}."
            )

    def _declared(self, each: DeclaredKey) -> list[Cell]:
        """Return a declared key as a row. Its place is such that an editor opens it from here."""
        numbers = {"min_hold": each.min_hold, "max_lifetime": each.max_lifetime}
        mode = (f"{word} {span(numbers[word])}" if word in numbers else word for word in each.mode)
        backend: Cell = each.backend
        if not each.is_configured:
            backend = (f"{each.backend} (not configured)", self.style.ERROR)
        file = Path(each.file)
        where = str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
        line = "" if each.line is None else f":{each.line}"
        return [
            each.key,
            each.kind.replace("_", " "),
            ", ".join(mode),
            _seconds(each.ttl, "no expiry" if each.is_configured else "-"),
            _seconds(each.wait, "for ever" if each.is_configured else "-"),
            each.on_conflict,
            backend,
            f"{where if each.file else ''}{line} {each.name}".strip(),
        ]


def _seconds(number: float | None, without: str) -> str:
    return without if number is None else span(number)
