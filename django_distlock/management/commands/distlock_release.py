"""Force-release keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...core.errors import BackendUnavailable, InvalidArgument, LockError, LockUsageError
from ...core.keys import stored_key
from ...core.wording import counted, printable
from ...inspection import Failure, HeldKey, Operation, Outcome, force_release
from ...inspection.journal import Order
from ...inspection.showing import show_present
from ..interrupting import held_back
from ..operating import OperatorCommand, add_reason, every_page, named, refuse_memory
from ..reading import add_backend
from ..statuses import BUSY, INTERRUPTED, UNAVAILABLE, USAGE


class Command(OperatorCommand):
    """`distlock_release (KEY | [--prefix P] [--host H] [--task T]) [--force] --reason WHY`."""

    help = (
        "Force-releases locks. The fence of each key moves first, so that fenced writes of the"
        " old holder fail before the key is granted again. Shows the locks and asks for"
        " confirmation."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("key", nargs="?", metavar="KEY", help="the key to release")
        parser.add_argument(
            "--prefix", metavar="TEXT", help="all held keys that start with this text"
        )
        parser.add_argument("--host", help="all locks held on this host")
        parser.add_argument("--task", metavar="ID", help="all locks held by this task")
        add_backend(parser)
        parser.add_argument(
            "--dry-run", action="store_true", help="only show which locks would be released"
        )
        parser.add_argument(
            "--force", action="store_true", help="do not ask for confirmation; requires --reason"
        )
        add_reason(parser)

    def handle(self, *, backend: str, dry_run: bool, json: bool, **options: Any) -> None:
        _check({**options, "dry_run": dry_run, "json": json})
        if reason := options["reason"]:
            # Check the reason first: a confirmation would be useless with a bad one.
            Order(Operation.FORCE_RELEASE, self.actor(), reason)
        refuse_memory(backend)
        failures: list[Failure] = []
        found = _found(backend, options, failures)
        if not json and not found:
            self.stdout.write("No locks match.")
        elif not json:
            self.print_locks(found)
            if not dry_run and not options["force"]:
                reason = self._confirmed(len(found), reason)
        outcomes: list[Outcome] = []
        rest, told, is_silent = iter(found), list[int](), False
        if not dry_run:
            # Amid a release, a signal would lose its event.
            told = self._to_the_end.enter_context(held_back())
            is_silent = self._take(rest, told, reason, outcomes, failures)
        if json:
            self.print_json(
                {
                    "backend": backend,
                    "dry_run": dry_run,
                    "found": found,
                    "outcomes": outcomes,
                    "failures": failures,
                }
            )
        else:
            self._print_outcomes(outcomes, failures)
        if told:
            text = f"Interrupted. Not tried: {counted(len([*rest]), 'lock')}."
            raise CommandError(text, returncode=128 + told.pop())
        if is_silent:
            raise CommandError(failures[-1].message, returncode=UNAVAILABLE)
        if not dry_run:
            _end(outcomes, failures)

    def _confirmed(self, number: int, reason: str) -> str:
        """Ask for confirmation and return the reason; end without a "yes" or a reason."""
        one = number == 1
        what = "this lock" if one else f"these {number} locks"
        if self._answer(f'Force-release {what}? Type "yes": ') != "yes":
            raise CommandError("Nothing was released.")
        reason = reason or self._answer("Reason: ")
        if not reason:
            raise CommandError("Nothing was released: a reason is required.", returncode=USAGE)
        return reason

    def _answer(self, question: str) -> str:
        self.stdout.write(question, ending="")
        self.stdout.flush()
        try:
            # None: standard input was closed before we began.
            return "" if sys.stdin is None else sys.stdin.readline().strip()
        except KeyboardInterrupt:
            raise CommandError("Nothing was released.", returncode=INTERRUPTED) from None

    def _take(
        self,
        rest: Iterator[HeldKey],
        told: list[int],
        reason: str,
        outcomes: list[Outcome],
        failures: list[Failure],
    ) -> bool:
        """Force-release keys until a signal comes, or the store is silent; return the latter."""
        while not told and (each := next(rest, None)) is not None:
            try:
                # By its fence, because a holder that came later was not shown to the operator.
                outcome = force_release(
                    each.key,
                    backend=each.backend,
                    fence=each.fence,
                    actor=self.actor(),
                    reason=reason,
                )
                outcomes.append(outcome)
                self.pace(len(outcomes))
            except InvalidArgument:
                raise  # The reason is invalid: nothing was changed.
            except LockError as error:
                failures.append(Failure.of(each.backend, error, each.key))
                if isinstance(error, BackendUnavailable):
                    return True
        return False

    def _print_outcomes(self, outcomes: list[Outcome], failures: list[Failure]) -> None:
        for each in outcomes:
            key = printable(each.key)
            if each.is_done:
                fences = f"fence {each.fence_before} -> {each.fence_after or 'unknown'}"
                self.stdout.write(self.style.SUCCESS(f"Released {key} ({fences})."))
            elif each.is_busy:
                self.stdout.write(self.style.ERROR(f"Busy: {key} is guarded. {_in_the_way(each)}"))
            else:
                self.stdout.write(
                    self.style.WARNING(
                        f"Not released: the holder that was shown no longer has {key}."
                    )
                )
        for failure in failures:
            text = f"Not released: {printable(failure.key)}. {failure.message}"
            self.stdout.write(self.style.ERROR(text))


def _check(options: dict[str, Any]) -> None:
    filters = [options[each] for each in ("prefix", "host", "task") if options[each] is not None]
    if (options["key"] is None) == (not filters):
        rule = "Give either a KEY, or at least one of --prefix, --host and --task."
    elif "" in filters:
        rule = "--prefix, --host and --task must not be empty."
    elif options["force"] and not options["reason"].strip():
        rule = "--force requires --reason."
    elif options["json"] and not (options["force"] or options["dry_run"]):
        rule = "--json cannot ask for confirmation. It requires --force or --dry-run."
    else:
        return
    raise CommandError(rule, returncode=USAGE)


def _found(backend: str, options: dict[str, Any], failures: list[Failure]) -> list[HeldKey]:
    """Return the locks to be released: of a shared key, the lease of each holder.

    Args:
        failures: Gets keys whose records cannot be read. They may be among those to be released.
    """
    if options["key"] is not None:
        view = show_present(stored_key(options["key"]), backend)
        return [*view.sharing] or ([] if view.held is None else [view.held])
    found: list[HeldKey] = []
    asked = {"host": options["host"], "task_id": options["task"]}
    for page in every_page(None, backends=[backend], prefix=options["prefix"] or "", **asked):
        for failure in page.failures:
            if failure.is_of_key:
                failures.append(failure)
                continue
            is_ours = failure.code in ("unsupported", "misconfigured")
            kind = LockUsageError if is_ours else BackendUnavailable
            raise kind(failure.message, code=failure.code)
        found += page.locks
    # If locks come and go meanwhile, some stores list a lock twice.
    return list({(each.key, each.fence): each for each in found}.values())


def _in_the_way(outcome: Outcome) -> str:
    if outcome.sessions is None:
        return "The store cannot tell by whom. Nothing was changed."
    if not outcome.sessions:
        # Sessions that have locked a row without a guard are not searched for.
        return (
            "Nothing was changed. Try again. If it stays busy, another session has locked the key's"
            " rows by a transaction of its own."
        )
    return f"Blocked by: {'; '.join(map(named, outcome.sessions))}. Nothing was changed."


def _end(outcomes: list[Outcome], failures: list[Failure]) -> None:
    """End with the status that fits the outcomes, if not all keys were released."""
    is_busy = any(each.is_busy for each in outcomes)
    if is_busy or failures:
        raise CommandError("Some keys were not released.", returncode=BUSY if is_busy else 1)
    if not any(each.is_done for each in outcomes):
        raise CommandError("Nothing was released.")
