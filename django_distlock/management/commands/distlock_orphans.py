"""Find the unique keys and places of Celery tasks that the broker has lost, and drop them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...backends.base import BaseLockBackend
from ...core.errors import BackendUnavailable, LockError
from ...core.records import UNKNOWN, Record
from ...core.wording import counted, printable
from ...inspection import Failure, HeldKey, Operation
from ...inspection.journal import Order
from ..interrupting import held_back
from ..operating import OperatorCommand, add_backends, add_reason, app_and, ask_each, raise_failed
from ..reading import duration
from ..statuses import USAGE

Found = tuple[BaseLockBackend, Record]


class Command(OperatorCommand):
    """`distlock_orphans [--backend ALIAS …] [--queue NAME …] [--drop --reason WHY] …`."""

    help = (
        "Finds the unique keys, and the places among max_queued, of Celery tasks that are neither"
        " in the broker nor in a worker, for example after `celery purge` or after a broker lost"
        " its messages. With --drop, they are released, so that such tasks can be sent again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_backends(parser)
        parser.add_argument(
            "--queue",
            action="append",
            default=[],
            metavar="NAME",
            help="another queue of the broker; repeatable",
        )
        parser.add_argument(
            "--older-than",
            type=duration,
            default=60.0,
            metavar="SECONDS",
            help="only keys acquired at least this many seconds ago (default: %(default)g)",
        )
        parser.add_argument(
            "--patience",
            type=duration,
            default=2.0,
            metavar="SECONDS",
            help="seconds to wait for answers of workers (default: %(default)g)",
        )
        parser.add_argument("--drop", action="store_true", help="release them; requires --reason")
        add_reason(parser)

    def handle(
        self, *, backend: list[str] | None, drop: bool, reason: str, json: bool, **options: Any
    ) -> None:
        if drop != bool(reason.strip()):
            raise CommandError("--drop and --reason must be used together.", returncode=USAGE)
        failures: list[Failure] = []
        found = self._found(failures, backend, **options)
        shown = [HeldKey.of(store, record, store.clock()) for store, record in found]
        rest, told, dropped = iter(found), list[int](), list[str]()
        if drop:
            # Amid a release, a signal would lose its event.
            told = self._to_the_end.enter_context(held_back())
            dropped = self._dropped(rest, told, reason, failures)
        if json:
            self.print_json({"orphans": shown, "dropped": dropped, "failures": failures})
        else:
            self._print(shown, dropped)
            self.print_failures(failures)
        if told:
            text = f"Interrupted. Not tried: {counted(len([*rest]), 'key')}."
            raise CommandError(text, returncode=128 + told.pop())
        raise_failed(failures, backend)

    def _found(
        self,
        failures: list[Failure],
        backend: list[str] | None,
        *,
        queue: list[str],
        older_than: float,
        patience: float,
        **_: Any,
    ) -> list[Found]:
        orphans, app = app_and("orphans")

        def candidates(store: BaseLockBackend) -> list[Found]:
            return [(store, each) for each in orphans.candidates(store, older_than)]

        kept = [each for those in ask_each(backend, failures, candidates) for each in those]
        ids = {record.holder.task_id for _, record in kept}
        lost = orphans.missing(app, ids, queue, patience)
        return [(store, record) for store, record in kept if record.holder.task_id in lost]

    def _dropped(
        self, rest: Iterator[Found], told: list[int], reason: str, failures: list[Failure]
    ) -> list[str]:
        """Release keys until a signal comes; return those that were released."""
        order = Order(Operation.FORCE_RELEASE, self.actor(), reason)
        keys: list[str] = []
        silent: set[str] = set()
        while not told and (each := next(rest, None)) is not None:
            store, record = each
            if store.alias in silent:
                continue
            try:
                # By its token: a holder that acquired the key meanwhile keeps it.
                answer = store.release(record.grant)
            except LockError as error:
                failures.append(Failure.of(store.alias, error, record.key))
                if isinstance(error, BackendUnavailable):
                    silent.add(store.alias)
                continue
            if answer is UNKNOWN:
                text = f"{record.key!r} was not released: a transaction has locked its row."
                alias, code = store.alias, "network_timeout"
                failures.append(Failure(backend=alias, code=code, message=text, key=record.key))
            elif answer:
                order.record(store, record.key, fence=record.fence, holder=record.holder)
                keys.append(record.key)
                self.pace(len(keys))
        return keys

    def _print(self, shown: list[HeldKey], dropped: list[str]) -> None:
        if shown:
            self.print_locks(shown)
        else:
            self.stdout.write("No orphaned keys were found.")
        for key in dropped:
            self.stdout.write(self.style.SUCCESS(f"Dropped {printable(key)}."))
