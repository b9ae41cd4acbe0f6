"""List the tasks that failed because their lock store was unavailable, and send them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...core.documents import by_name
from ...core.errors import BackendUnavailable, LockError
from ...core.interruptions import pass_on
from ...core.wording import instant
from ...inspection import Failure
from ...models import FailedTask
from ..operating import OperatorCommand, app_and
from ..statuses import UNAVAILABLE, USAGE

#: The word for all listed tasks.
ALL = "all"


class Command(OperatorCommand):
    """`distlock_replay [--send ID … | --drop ID …] [--sent] [--json]`."""

    help = (
        "Lists the Celery tasks that failed because their lock store was unavailable and whose"
        " bodies never started. With --send, each is sent again once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        what = parser.add_mutually_exclusive_group()
        for name, text in (
            ("send", "send these tasks again"),
            ("drop", "remove these tasks from the list"),
        ):
            what.add_argument(
                f"--{name}",
                action="extend",
                nargs="+",
                default=[],
                metavar="ID",
                help=f'{text}, by id; "{ALL}": all that were not sent yet',
            )
        parser.add_argument(
            "--sent", action="store_true", help="also list tasks that were sent again"
        )

    def handle(
        self, *, send: list[str], drop: list[str], sent: bool, json: bool, **options: Any
    ) -> None:
        failed, app = app_and("failed")
        if not (send or drop):
            self._show(failed.failed(sent=sent), [], [], json=json)
            return
        done: list[FailedTask] = []
        failures: list[Failure] = []

        def do(row: FailedTask) -> None:
            if drop:
                failed.drop(row)
            elif (sent_as := failed.send(app, row)) is None:
                failures.append(_failure(row, "already_sent", "already sent by another process."))
                return
            else:
                row.sent_as = sent_as
            done.append(row)

        is_silent = self._each(failed, send or drop, do, failures)
        rows: list[FailedTask] = []
        try:
            rows = failed.failed(sent=sent)
        except LockError as error:
            failures.append(Failure.of("", error))
            is_silent = True
        self._show(rows, done, failures, json=json)
        if failures:
            raise CommandError(
                "Some tasks could not be processed.", returncode=UNAVAILABLE if is_silent else 1
            )

    def _each(
        self,
        failed: Any,
        ids: list[str],
        do: Callable[[FailedTask], None],
        failures: list[Failure],
    ) -> bool:
        """Process each task; return whether a store or the broker was unavailable."""
        known = {row.pk: row for row in failed.failed(sent=False)}
        wanted = list(known) if ids == [ALL] else list(dict.fromkeys(ids))
        if unknown := [each for each in wanted if each not in known]:
            raise CommandError(
                f"Not in the list, or already sent: {', '.join(unknown)}.", returncode=USAGE
            )
        for each in wanted:
            try:
                do(known[each])
            except LockError as error:
                failures.append(_failure(known[each], error.code, str(error)))
                if isinstance(error, BackendUnavailable):
                    return True  # The others would fail, too.
            except Exception as error:  # noqa: BLE001 - the others can be sent all the same
                pass_on(error)
                text = f"{type(error).__name__}: {error}"
                failures.append(_failure(known[each], "internal", text))
        return False

    def _show(
        self,
        rows: list[FailedTask],
        done: list[FailedTask],
        failures: list[Failure],
        *,
        json: bool,
    ) -> None:
        if json:
            document = {
                "failed": [_as_json(each) for each in rows],
                "done": [_as_json(each) for each in done],
                "failures": failures,
            }
            self.print_json(document)
            return
        for each in done:
            text = f"Sent {each.pk} as {each.sent_as}." if each.sent_as else f"Dropped {each.pk}."
            self.stdout.write(self.style.SUCCESS(text))
        for failure in failures:
            self.stderr.write(failure.message, self.style.WARNING)
        if rows:
            self.print_table(
                ("FAILED AT", "TASK", "ID", "BACKEND", "KEY", "SENT AS"),
                [
                    [
                        instant(each.failed_at), each.task, each.pk, each.backend, each.key,
                        each.sent_as or ("-" if each.sent_at is None else "not known"),
                    ]
                    for each in rows
                ],
            )  # fmt: skip
        elif not done:
            self.stdout.write("No task failed because of an unavailable store.")


def _failure(row: FailedTask, code: str, text: str) -> Failure:
    return Failure(backend=row.backend, code=code, message=f"{row.pk}: {text}", key=row.key)


def _as_json(row: FailedTask) -> dict[str, Any]:
    # Without the task's arguments, which may be secret.
    names = ("task", "backend", "key", "failed_at", "sent_at", "sent_as")
    return {"id": row.pk, **by_name(row, *names)}
