"""Show on the project's own store that holders that die or are suspended do no harm."""

from __future__ import annotations

import argparse
import secrets
import signal
from collections.abc import Mapping
from typing import Any, NoReturn

from django.core.management.base import CommandError, CommandParser

from ...core.errors import InvalidArgument, LockUsageError
from ...core.wording import printable
from ...handler import lock_backends
from .. import endurance
from ..drill import Drill, Step, Stuck, be_late, refuse_impossible
from ..endurance import PROCESSES, Endurance
from ..interrupting import handled, usual_handlers
from ..operating import OperatorCommand, refuse_memory
from ..reading import add_backend, between
from ..statuses import UNAVAILABLE, USAGE

#: Minutes of a long drill. All reports are kept in memory until its end.
SHORTEST, LONGEST = 0.1, 480


class Command(OperatorCommand):
    """`distlock_drill [--backend ALIAS] [--minutes N [--seed N]] [--json]`."""

    help = (
        "Suspends a second process until its lease has expired, takes its lock over, and shows"
        " that its stale write is refused. With --minutes: kills and suspends processes that lock"
        " and write, and prints a certificate. Uses keys of its own. Exits with 0 if every"
        " guarantee held."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_backend(parser)
        parser.add_argument(
            "--minutes",
            type=between(SHORTEST, LONGEST, "minutes"),
            metavar="N",
            help=f"how long {PROCESSES} processes lock, write, and are killed and suspended",
        )
        parser.add_argument(
            "--seed", type=int, metavar="N", help="repeat the choices of a run with --minutes"
        )
        # The other processes run this command as well.
        parser.add_argument("--late", metavar="KEY", help=argparse.SUPPRESS)
        parser.add_argument("--toil", metavar="PREFIX", help=argparse.SUPPRESS)

    def handle(
        self,
        *,
        backend: str,
        minutes: float | None,
        seed: int | None,
        late: str | None,
        toil: str | None,
        json: bool,
        **options: Any,
    ) -> None:
        if seed is None:
            seed = secrets.randbits(32)
        elif minutes is None and toil is None:
            raise CommandError("--seed requires --minutes.", returncode=USAGE)
        refuse_memory(backend)
        try:
            if late is not None:
                be_late(backend, late, self._say)
            elif toil is not None:
                endurance.toil(backend, toil, seed, self._say)
            elif minutes is None:
                self._hold(backend, json=json)
            else:
                self._endure(backend, minutes, seed, json=json)
        except (InvalidArgument, LockUsageError) as error:
            raise CommandError(str(error), returncode=USAGE) from error

    def _hold(self, alias: str, *, json: bool) -> None:
        store = lock_backends[alias]
        refuse_impossible(store)
        key = f"distlock-drill:{secrets.token_hex(8)}"
        drill = Drill(store, key, lambda step: None if json else self._show(step))
        self._run(drill)
        if json:
            self.print_json(drill.as_json())
        else:
            self._conclude(drill, key)
        broken = [text for text, is_kept in drill.promises.items() if not is_kept]
        if broken:
            raise CommandError(f"A guarantee was broken: {'; '.join(broken)}.")

    def _endure(self, alias: str, minutes: float, seed: int, *, json: bool) -> None:
        store = lock_backends[alias]
        refuse_impossible(store)
        prefix = f"distlock-drill:{secrets.token_hex(8)}"
        show = (lambda _: None) if json else self._say
        drill = Endurance(store, prefix, minutes * 60, seed, show)
        self._run(drill)
        certificate = drill.certificate()
        if json:
            self.print_json(certificate)
        else:
            self._certify(certificate)
        if certificate["violations"]:
            raise CommandError(f"A guarantee was broken: {' '.join(certificate['violations'])}")
        if not certificate["valid"]:
            raise CommandError(
                "The run proves nothing: no process was killed, none was suspended, or no stale"
                " write was refused. Let it run for more --minutes."
            )

    def _run(self, drill: Drill | Endurance) -> None:
        try:
            with handled(usual_handlers(), _interrupt):
                drill.run()
        except Stuck as error:
            status = error.status if error.status in (USAGE, UNAVAILABLE) else 1
            raise CommandError(str(error), returncode=status) from error
        except KeyboardInterrupt as error:
            raise CommandError(
                "Interrupted. The other processes were stopped and the locks released.",
                returncode=128 + (error.args[0] if error.args else signal.SIGINT),
            ) from None

    def _certify(self, certificate: Mapping[str, Any]) -> None:
        done, faults = certificate["operations"], certificate["faults"]
        rows = {
            "seed": certificate["seed"],
            "versions": ", ".join(f"{of} {is_}" for of, is_ in certificate["versions"].items()),
            "leases": f"{done['granted']} granted, {done['lost']} lost",
            "writes": f"{done['written']} accepted, {done['refused']} stale ones refused",
            "faults": f"{faults['killed']} killed, {faults['suspended']} suspended",
            "violations": len(certificate["violations"]),
        }
        self.stdout.write("")
        for what, value in rows.items():
            self.stdout.write(f"{what:<12}{value}")
        if certificate["bound"] is not None:
            self.stdout.write(
                f"With 95 % confidence, fewer than {certificate['bound']:.2g} violations per lease."
            )

    def _show(self, step: Step) -> None:
        fence = "-" if step.fence is None else str(step.fence)
        head = f"{step.at:6.2f} s  {step.process:<6}  pid {step.pid:<7}  fence {fence:<15}"
        self._say(f"{self.style.MIGRATE_HEADING(head)}  {printable(step.text)}")

    def _conclude(self, drill: Drill, key: str) -> None:
        self.stdout.write("")
        for text, is_kept in drill.promises.items():
            word = self.style.SUCCESS("kept  ") if is_kept else self.style.ERROR("BROKEN")
            self.stdout.write(f"{word}  {text}")
        self.stdout.write(f"\nStale writes are refused by: {drill.refused_by}.")
        self.stdout.write(
            f"Left in the store: the fence counter of {key!r} (counters are never deleted) and its"
            " events."
        )

    def _say(self, line: str) -> None:
        # Immediately, because people watch, or the other process waits.
        self.stdout.write(line)
        self.stdout.flush()


def _interrupt(signum: int, frame: Any) -> NoReturn:
    # As Ctrl-C does, so that the drill cleans up after itself.
    raise KeyboardInterrupt(signum)
