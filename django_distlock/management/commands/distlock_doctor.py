"""Find out what is wrong with locks, before it causes an alarm."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from django.core import checks
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, InterfaceError

from ...core.errors import LockError
from ...core.wording import counted, printable
from ...inspection.diagnosis import (
    MOST_SCANNED,
    SCANNED,
    Diagnosis,
    Look,
    Mark,
    accept_loss,
    diagnose,
    told,
)
from ..operating import OperatorCommand, add_backends
from ..reading import up_to
from ..statuses import UNAVAILABLE, USAGE

_MARKS = {Mark.ERROR: "ERROR", Mark.SKIPPED: "-"}


class Command(OperatorCommand):
    """`distlock_doctor [--backend ALIAS …] [--fail-level LEVEL] [--no-write] [--json] …`."""

    help = (
        "Checks the settings, stores, migrations, clocks and stored records. Prints each finding"
        " with a remedy and a link to its documentation. Acquires and releases a lock of its own,"
        " whose fence counter stays, and marks each Redis. Changes nothing else."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_backends(parser)
        parser.add_argument(
            "--fail-level",
            choices=("ERROR", "WARNING"),
            default="ERROR",
            help="exit with 1 if there is a finding at or above this level (default: %(default)s)",
        )
        parser.add_argument("--no-write", action="store_true", help="only read: acquire no lock")
        parser.add_argument(
            "--accept-loss",
            metavar="ALIAS",
            help="accept the data that this Redis has now, after D022 has been dealt with",
        )
        parser.add_argument(
            "--scan",
            type=up_to(MOST_SCANNED),
            default=SCANNED,
            metavar="N",
            help="maximum number of locks and waiters to check per backend (default: %(default)s)",
        )

    def handle(
        self,
        *,
        backend: list[str] | None,
        fail_level: str,
        no_write: bool,
        accept_loss: str | None,
        scan: int,
        json: bool,
        **options: Any,
    ) -> None:
        if accept_loss is not None:
            if no_write:
                raise CommandError(
                    "--accept-loss writes to the store. Remove --no-write.", returncode=USAGE
                )
            self._accept_loss(accept_loss)
        diagnosis = diagnose(backend, writes=not no_write, limit=scan)
        if json:
            self.print_json(diagnosis.as_json())
        else:
            self._print(diagnosis)
        if diagnosis.silent:
            silent = ", ".join(diagnosis.silent)
            raise CommandError(f"No answer from: {silent}.", returncode=UNAVAILABLE)
        if diagnosis.has(getattr(checks, fail_level)):
            raise CommandError(f"Findings at or above {fail_level}.")

    def _accept_loss(self, alias: str) -> None:
        try:
            accept_loss(alias, self.actor())
        except (DatabaseError, InterfaceError) as error:
            raise LockError(f"The database that records data losses failed: {error}") from error

    def _print(self, diagnosis: Diagnosis) -> None:
        for alias, looks in groupby(diagnosis.looked_at, key=lambda each: each.backend):
            title = "the project" if alias is None else f"DISTLOCK[{alias!r}]"
            self.stdout.write(self.style.MIGRATE_HEADING(printable(title)))
            for each in looks:
                self.stdout.write(self._line(each))
            self.stdout.write("")
        for finding in diagnosis.findings:
            self._print_finding(told(finding))
        if diagnosis.silenced:
            ids = ", ".join(sorted({str(each.id) for each in diagnosis.silenced}))
            self.stdout.write(f"Silenced by SILENCED_SYSTEM_CHECKS: {ids}.")
        if diagnosis.findings:
            self.stdout.write(f"{counted(len(diagnosis.findings), 'finding')}.")
        else:
            self.stdout.write(self.style.SUCCESS("No findings."))

    def _line(self, look: Look) -> str:
        colours = {
            Mark.OK: self.style.SUCCESS,
            Mark.WARNING: self.style.WARNING,
            Mark.ERROR: self.style.ERROR,
        }
        word = colours.get(look.mark, str)(f"{_MARKS.get(look.mark, look.mark):<7}")
        return f"  {word}  {printable(look.what):<22}  {printable(look.text)}".rstrip()

    def _print_finding(self, finding: dict[str, Any]) -> None:
        colours = {"error": self.style.ERROR, "warning": self.style.WARNING}
        level, alias = finding["level"], finding["backend"]
        head = colours.get(level, str)(f"{level.upper()} {finding['id']}")
        where = "" if alias is None else f" [{printable(alias)}]"
        self.stdout.write(f"{head}{where} {printable(finding['message'])}")
        if finding["hint"]:
            self.stdout.write(f"    do:   {printable(finding['hint'])}")
        self.stdout.write(f"    read: {finding['address']}\n")
