"""Run any program under a lock: migrations of many deployments, jobs of many machines."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from ...core.clock import monotonic
from ...core.durations import seconds, ttl_seconds, wait_seconds
from ...core.errors import InvalidArgument, LockError, LockLost, LockNotAcquired, LockUsageError
from ...core.sharing import validate_permits
from ...handler import lock_backends
from ...locks.callbacks import apart
from ...locks.lease import Lease
from ...locks.lock import Lock, distlock
from ...locks.taking import UNSET
from ..bootstrap import ensure_tables
from ..leash import Leash, end
from ..locked import wait_option
from ..programs import Program, Signals, find
from ..reading import ReadingCommand, add_backend, number_of, reader
from ..statuses import BUSY, LOST, UNAVAILABLE, USAGE, who_holds

#: Seconds between TERM and KILL.
GRACE = 10.0


class Command(ReadingCommand):
    """`distlock_run KEY [--ttl S] [--wait S] [--hold] … -- PROGRAM [ARGUMENT …]`."""

    help = (
        "Runs a program while holding a lock, and renews the lock until the program ends. First"
        " applies missing migrations of django_distlock. Exits with the program's exit code; with"
        " 75 if the lock is held, 69 if the store is unavailable, 76 if the lock was lost, and 126"
        " or 127 if the program cannot be run or found."
    )
    # A lock for `migrate` has to work before the project does.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.usage = "%(prog)s KEY [options] -- PROGRAM [ARGUMENT ...]"
        parser.add_argument("key", metavar="KEY", help="the key to lock")
        parser.add_argument(
            "--ttl",
            type=reader(lambda text: ttl_seconds(number_of(text))),
            metavar="SECONDS",
            help="seconds until a lock that is not renewed expires (default: TTL of the backend)",
        )
        parser.add_argument(
            "--wait",
            type=wait_option,
            default=UNSET,
            metavar="SECONDS",
            help="seconds to wait for the lock; 0: one attempt; none: without limit (default:"
            " WAIT)",
        )
        parser.add_argument(
            "--hold",
            action="store_true",
            help="keep the lock for the full ttl, even if the program ends sooner",
        )
        parser.add_argument(
            "--permits",
            type=reader(lambda text: validate_permits(int(text))),
            default=1,
            metavar="NUMBER",
            help="how many may hold the lock at the same time (default: %(default)s)",
        )
        add_backend(parser)
        parser.add_argument(
            "--on-lost",
            choices=("term", "ignore"),
            default="term",
            help="what to do with the program when the lock is lost (default: %(default)s)",
        )
        parser.add_argument(
            "--grace",
            type=reader(lambda text: seconds(number_of(text), "grace")),
            default=GRACE,
            metavar="SECONDS",
            help="seconds between TERM and KILL for a program that lost the lock (default:"
            " %(default)g)",
        )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Read our options only, not those of the program."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.__class__ = _Parser
        return parser

    def handle(self, *, key: str, command: list[str], **options: Any) -> None:
        path = find(command[0])
        with ExitStack() as stack:
            # Only the main thread may set handlers of signals.
            first = threading.current_thread() is threading.main_thread()
            signals = stack.enter_context(Signals()) if first else Signals()
            status = self._run(key, command, path, signals, options)
        if status:
            sys.exit(status)

    def _run(
        self, key: str, command: list[str], path: str, signals: Signals, options: dict[str, Any]
    ) -> int:
        ends_it = options["on_lost"] == "term"
        run = _Run(self, signals, ends_it=ends_it, grace=options["grace"])
        try:
            with self._lock(key, command, options) as lease:
                run.carry_out(lease, command, path)
        except LockNotAcquired as error:
            raise CommandError(who_holds(error), returncode=BUSY) from error
        except LockLost:
            return LOST if ends_it else run.status
        except (InvalidArgument, LockUsageError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=USAGE) from error
        except LockError as error:
            raise CommandError(f"{error} ({error.code})", returncode=UNAVAILABLE) from error
        return run.status

    def _lock(self, key: str, command: list[str], options: dict[str, Any]) -> Lock:
        """Return the lock after its store is ready, with what is left of the wait."""
        store = lock_backends[options["backend"]]
        if not store.distributed:
            raise LockUsageError(
                f"The lock backend {store.alias!r} keeps its locks in process memory. They do not"
                " exclude other processes."
            )
        given = options["wait"]
        wait = store.config.wait if given is UNSET else wait_seconds(given)
        lock = distlock(
            key,
            ttl=options["ttl"],
            wait=wait,
            backend=store.alias,
            hold=options["hold"],
            permits=options["permits"],
            metadata={"program": command[0].encode(errors="replace").decode()[:200]},
        )
        if not store.using:
            return lock
        started_at = monotonic()
        ensure_tables(store.using, wait)
        left = None if wait is None else max(0.0, wait - (monotonic() - started_at))
        return replace(lock, wait=left)


class _Parser(CommandParser):
    """A parser that reads up to the first `--`. argparse would read part of what follows.

    Without a `--`, it would take the program's options for ours, or for Django's.
    """

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Read our options, and keep the program's words as `command`."""
        words = [str(word) for word in args or ()]
        split = words.index("--") if "--" in words else len(words)
        if not words[split + 1 :] and not {"-h", "--help", "--version"} & {*words}:
            self.error('write "--" and the program after the options')
        read = super().parse_args(words[:split], namespace)
        read.command = words[split + 1 :]
        return read


class _Run:
    """One run of a program under a lease, and its exit status."""

    def __init__(self, command: BaseCommand, signals: Signals, *, ends_it: bool, grace: float):
        self.status = 0
        self._command = command
        self._signals = signals
        self._ends_it = ends_it
        self._grace = grace
        # Acquired only once: by the thread that handles the loss.
        self._is_lost = threading.Lock()
        self._is_ended = threading.Event()

    def carry_out(self, lease: Lease, command: list[str], path: str) -> None:
        """Start the program, and wait for its end."""
        self._signals.keep()
        # The session that acquired the lock need not stay open while the program runs.
        connections.close_all()
        ours = {"DISTLOCK_KEY": lease.key, "DISTLOCK_FENCE": str(lease.fence)}
        with Leash(self._grace) as leash:
            program = Program(command, path, {**os.environ, **ours})
            if self._ends_it:
                leash.take(program.address)
            # Ctrl-Z stops a program that still waits to be let go, too: both continue together.
            self._signals.pass_on(program, partial(self._before_continuing, program, lease))
            try:
                program.let_go()
            except CommandError:
                leash.let_off()
                raise
            lease.on_lost(partial(self._on_lost, program))
            self.status = self._signals.wait_for(program, partial(self._look, program, lease))
            self._signals.ignore()
            if self._is_lost.locked() and self._ends_it:
                # Processes that the program has left running are ended, too.
                self._is_ended.wait()

    def _look(self, program: Program, lease: Lease) -> None:
        # The log of a loss comes before callbacks, and waits for the reader of standard error.
        if self._ends_it and lease.is_lost:
            self._on_lost(program, lease)

    def _on_lost(self, program: Program, lease: Lease) -> None:
        # Called in its own thread, by a look, or after the program's end: only the first call acts.
        if not self._is_lost.acquire(blocking=False):
            return
        handle = partial(self._handle_loss, program, lease)
        if program.is_running:
            # The thread that waits for the program must go on: what nobody has waited for exists.
            apart(handle)
        else:
            handle()

    def _handle_loss(self, program: Program, lease: Lease) -> None:
        try:
            if not program.is_running:
                self._say(lease, "was lost; its program has ended")
            elif self._ends_it:
                end(program.address, self._grace)
                # After the end, because a write may block if standard error is no longer read.
                self._say(lease, "was lost: its program was stopped")
            else:
                self._say(lease, "is lost: its program continues without it")
        finally:
            self._is_ended.set()

    def _before_continuing(self, program: Program, lease: Lease) -> None:
        # After a stop for longer than the ttl, the program must not do anything more.
        if self._ends_it and lease.is_lost:
            program.send(signal.SIGTERM)

    def _say(self, lease: Lease, what: str) -> None:
        self._command.stderr.write(f"The lock on {lease.key!r} {what}.")
