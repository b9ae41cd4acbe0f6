"""Management commands that run under a lock."""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, ClassVar, Literal

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from ..core.bodies import whole
from ..core.declarations import Declaration, Kind, declared
from ..core.durations import Duration, wait_seconds
from ..core.errors import (
    BackendUnavailable,
    InvalidArgument,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from ..core.keys import KeyTemplate, roots
from ..core.sharing import validate_permits
from ..locks.lease import Lease
from ..locks.lock import Lock, distlock
from ..locks.taking import UNSET
from .reading import number_of
from .statuses import BUSY, UNAVAILABLE, who_holds


class LockedCommand(BaseCommand):
    """A mixin: `handle()` runs under a lock, on one machine at a time.

    ::

        class Command(LockedCommand, BaseCommand):
            lock_key = "report:{day}"
            lock_ttl = 600

    System checks come before the lock, and what `handle()` returns is printed after it. While
    it runs, `self.lease` is the lease of the block around it.

    Attributes:
        lock_key: The key: a template over the command's options. "": the command's name.
        lock_ttl: Seconds (or a `timedelta`), as `ttl` of `distlock()`.
        lock_wait: Seconds (or a `timedelta`) to wait for another run; 0: not at all; None: for
            ever. `--lock-wait` overrides it.
        lock_hold: Whether the key stays held for the full ttl: one run per window.
        lock_permits: How many runs may hold the key at the same time.
        lock_backend: An alias in `DISTLOCK`.
        on_conflict: What a run does that was not granted the key. "skip": it names the holder and
            ends with status 75; "raise": it raises a `CommandError`; "run": it runs without the
            lock, and `self.lease` is not `held`.
        skipped: Whether the last run was skipped.
    """

    lock_key: ClassVar[str] = ""
    lock_ttl: ClassVar[Duration | None] = None
    lock_wait: ClassVar[Duration | None] = 0
    lock_hold: ClassVar[bool] = False
    lock_permits: ClassVar[int] = 1
    lock_backend: ClassVar[str] = "default"
    on_conflict: ClassVar[Literal["skip", "raise", "run"]] = "skip"

    lease: Lease
    skipped = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # In the instance: several classes of a command may define `handle`, and call the next.
        self._unlocked = self.handle
        self.handle = self._handle  # type: ignore[method-assign]

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Add `--lock-wait`."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.add_argument(
            "--lock-wait",
            type=wait_option,
            default=UNSET,
            metavar="SECONDS",
            help="seconds to wait for another run of this command; 0: one attempt; none: without"
            f" limit (default: {'none' if self.lock_wait is None else self.lock_wait})",
        )
        return parser

    def run_from_argv(self, argv: list[str]) -> None:
        """Run, and end with status 75 if the run was skipped."""
        super().run_from_argv(argv)
        if self.skipped:
            sys.exit(BUSY)

    def declare_lock(self) -> None:
        """Declare the key of the command, for `distlock_list --declared`.

        Raises:
            InvalidArgument: An attribute breaks a rule.
        """
        key = self.lock_key or self._default_key
        KeyTemplate.for_keywords(key)
        lock = self._lock_with(key, self.lock_wait)
        declared[type(self)] = (Declaration(Kind.COMMAND, key, lock, self.on_conflict),)

    def _handle(self, *args: Any, lock_wait: Any = UNSET, **options: Any) -> Any:
        unlocked = whole(self._unlocked, awaits=False)
        self.skipped = False
        try:
            with ExitStack() as stack:
                if self._enter(stack, lock_wait, options):
                    return unlocked(*args, **options)
        except LockLost as error:
            raise CommandError(str(error)) from error
        return None

    def _enter(self, stack: ExitStack, wait: Any, options: Mapping[str, Any]) -> bool:
        """Enter the block of the lock; return False if the run is skipped."""
        try:
            self.lease = stack.enter_context(self._lock(wait, options))
        except LockNotAcquired as error:
            if self.on_conflict == "raise":
                raise CommandError(who_holds(error)) from error
            self.stderr.write(f"Skipped: {who_holds(error)}", self.style.WARNING)
            self.skipped = True
        except (ImproperlyConfigured, LockError) as error:
            status = UNAVAILABLE if isinstance(error, BackendUnavailable) else 1
            raise CommandError(_said(error), returncode=status) from error
        return not self.skipped

    def _lock(self, wait: Any, options: Mapping[str, Any]) -> Lock:
        if isinstance(wait, str):
            try:
                wait = wait_option(wait)  # From `call_command()`, which does not parse it.
            except argparse.ArgumentTypeError as error:
                raise InvalidArgument(f"lock_wait: {error}") from None
        name = self._default_key
        key = key_of(self.lock_key, options) if self.lock_key else name
        return self._lock_with(key, self.lock_wait if wait is UNSET else wait)

    @property
    def _default_key(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def _lock_with(self, key: str, wait: Duration | None) -> Lock:
        if self.on_conflict not in ("skip", "raise", "run"):
            raise InvalidArgument(
                f'on_conflict is "skip", "raise" or "run", not {self.on_conflict!r}.'
            )
        return distlock(
            key,
            ttl=self.lock_ttl,
            wait=wait,
            backend=self.lock_backend,
            hold=self.lock_hold,
            permits=validate_permits(self.lock_permits),
            on_conflict="run" if self.on_conflict == "run" else "raise",
        )


def _said(error: ImproperlyConfigured | LockError) -> str:
    if isinstance(error, LockUsageError) and error.code == "reentrant":
        return (
            f"A block around this call of the command holds {error.key!r}, and the command cannot"
            " enter it. Call the command outside of that block."
        )
    return str(error)


def key_of(template: str, options: Mapping[str, Any]) -> str:
    """Return the key that a template makes of a command's options.

    Raises:
        InvalidArgument: The template is malformed, or a name in it is not an option; or an option
            has no canonical text.
    """
    asked = roots(template)
    if unknown := [root for root in asked if root not in options or keyword.iskeyword(root)]:
        raise InvalidArgument(
            f"The key template {template!r} names {unknown[0]!r}, which is not an option of this"
            " command: declare it in add_arguments()."
        )
    return KeyTemplate.for_keywords(template).render((), options)


def wait_option(text: str | timedelta) -> float | None:
    """Return the wait that `none`, or a number of seconds, means on a command line."""
    try:
        return wait_seconds(None if str(text).lower() == "none" else number_of(text))
    except ValueError as error:
        message = str(error) if isinstance(error, InvalidArgument) else f"{text!r} is not a number."
        raise argparse.ArgumentTypeError(message) from None
