"""Show that a holder that was stopped for too long cannot write."""

from __future__ import annotations

import argparse
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from ...core.errors import InvalidArgument, LockError, LockUsageError
from ...handler import lock_backends
from ..drill import Drill, Step, refuse_impossible
from ..late import Stuck, be_late
from ..operating import OperatorCommand
from ..statuses import UNAVAILABLE, USAGE
from ..tables import printable

#: What ends a drill as Ctrl-C does, so that it clears up behind itself.
_ENDING = ("SIGTERM", "SIGHUP")


class Command(OperatorCommand):
    """`distlock_drill [--backend ALIAS] [--json]`."""

    help = (
        "Suspends a second process until its lease has expired, takes its lock over, and shows"
        " that its stale write is refused. Uses a key of its own. Exits with 0 if every guarantee"
        " held."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the backend."""
        super().add_arguments(parser)
        parser.add_argument(
            "--backend",
            default="default",
            metavar="ALIAS",
            help="an alias of DISTLOCK (default: %(default)s)",
        )
        # Who is stopped is this command as well.
        parser.add_argument("--late", metavar="KEY", help=argparse.SUPPRESS)

    def handle(self, *, backend: str, late: str | None, json: bool, **options: Any) -> None:
        """Hold the drill, and say what came of it."""
        try:
            if late is not None:
                be_late(backend, late, self._say)
            else:
                self._hold(backend, json=json)
        except (InvalidArgument, LockUsageError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=USAGE) from error
        except LockError as error:
            raise CommandError(f"{error} ({error.code})", returncode=UNAVAILABLE) from error

    def _hold(self, alias: str, *, json: bool) -> None:
        store = lock_backends[alias]
        refuse_impossible(store)
        key = f"distlock-drill:{secrets.token_hex(8)}"
        drill = Drill(store, key, lambda step: None if json else self._show(step))
        try:
            with _interruptible():
                drill.run()
        except Stuck as error:
            status = error.status if error.status in (USAGE, UNAVAILABLE) else 1
            raise CommandError(str(error), returncode=status) from error
        except KeyboardInterrupt as error:
            raise CommandError(
                "Interrupted. The other process was stopped and the lock released.",
                returncode=128 + (error.args[0] if error.args else signal.SIGINT),
            ) from None
        if json:
            self.print_json(drill.as_json())
        else:
            self._conclude(drill, key)
        broken = [each.text for each in drill.promises if not each.is_kept]
        if broken:
            raise CommandError(f"A guarantee was broken: {'; '.join(broken)}.")

    def _show(self, step: Step) -> None:
        fence = "-" if step.fence is None else str(step.fence)
        head = f"{step.at:6.2f} s  {step.process:<6}  pid {step.pid:<7}  fence {fence:<15}"
        self._say(f"{self.style.MIGRATE_HEADING(head)}  {printable(step.text)}")

    def _conclude(self, drill: Drill, key: str) -> None:
        self.stdout.write("")
        for each in drill.promises:
            word = self.style.SUCCESS("kept  ") if each.is_kept else self.style.ERROR("BROKEN")
            self.stdout.write(f"{word}  {each.text}")
        self.stdout.write(f"\nStale writes are refused by: {drill.refused_by}.")
        self.stdout.write(
            f"Left in the store: the fence counter of {key!r} (counters are never deleted) and its"
            " events."
        )

    def _say(self, line: str) -> None:
        # As it happens: people watch, or the other process waits.
        self.stdout.write(line)
        self.stdout.flush()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let other signals than Ctrl-C interrupt the block as well, unless they are ignored."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
        before = {each: signal.getsignal(each) for each in numbers}
    ours = {each for each, handler in before.items() if handler == signal.SIG_DFL}
    for each in ours:
        signal.signal(each, _interrupt)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, before[each])


def _interrupt(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt(signum)
