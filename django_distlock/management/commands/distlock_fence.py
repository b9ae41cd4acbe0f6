"""Raise fence counters, after a store was changed or restored; set marks that are too high."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from copy import copy
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import connections, router

from ...core.keys import stored_key
from ...core.logs import log_fields
from ...core.records import FENCE_MAX, FENCE_WARNING, validate_fence
from ...core.wording import counted, printable
from ...database import vendors
from ...fencing.seen import mark_of, set_mark
from ...handler import lock_backends
from ...models import SeenFence
from ..operating import OperatorCommand, refuse_memory
from ..reading import add_backend, reader

logger = logging.getLogger("django_distlock")

#: The most skipped keys that a message names.
_NAMED = 20


class Command(OperatorCommand):
    """`raise (KEY | --all) (--to N | --clock)`, and `seen KEY [--to N]`."""

    help = (
        "Raises fence counters, so that grants of a new or restored store have higher fences than"
        " those of the old one. A counter is never lowered. Counters of held keys are skipped."
    )
    help_seen = (
        "Shows or sets the highest fence received from other services. Set it lower if a wrong"
        " fence blocks all other requests. Requests with a higher fence than the new one pass"
        " again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        # `--json` and Django's own options, such as `--settings`, may also come before `raise`.
        everywhere = [each for each in parser._actions if each.dest != "help"]
        actions = parser.add_subparsers(dest="action", required=True, metavar="raise | seen")
        up = actions.add_parser(
            "raise", help="raise the counter of one key, or of all", description=self.help
        )
        seen = actions.add_parser(
            "seen", help="show or set the highest fence received", description=self.help_seen
        )
        for action in everywhere:
            twin = copy(action)
            # If it is left out after `raise`, the value from before `raise` counts.
            twin.default = argparse.SUPPRESS
            up._add_action(twin)
            seen._add_action(twin)
        seen.add_argument("key", metavar="KEY", help="the key")
        seen.add_argument(
            "--to",
            type=_up_to(FENCE_MAX),
            metavar="N",
            help="the new value; lower fences are refused",
        )
        seen.add_argument(
            "--database", help="an alias of DATABASES (default: where the router writes SeenFence)"
        )
        what = up.add_mutually_exclusive_group(required=True)
        what.add_argument(
            "key", nargs="?", metavar="KEY", help="the key; it need not exist in the store"
        )
        what.add_argument(
            "--all",
            action="store_true",
            help="every key that has a counter (FENCE_FLOOR also covers new keys)",
        )
        far = up.add_mutually_exclusive_group(required=True)
        far.add_argument(
            "--to",
            # No command lowers a counter, and later grants need higher fences.
            type=_up_to(FENCE_WARNING),
            metavar="N",
            help="the next grant has a fence above N",
        )
        far.add_argument(
            "--clock",
            action="store_true",
            help='the store\'s clock in units of 10 µs, as FENCE_FLOOR = "clock" does',
        )
        add_backend(up)

    def handle(self, *, action: str, **options: Any) -> None:
        if action == "raise":
            self._raise(**options)
        else:
            self._seen(**options)

    def _seen(
        self, *, key: str, to: int | None, database: str | None, json: bool, **options: Any
    ) -> None:
        key = stored_key(key)
        if database is not None and database not in connections:
            raise ImproperlyConfigured(f"{database!r} is not in DATABASES.")
        with vendors.translated(database or router.db_for_write(SeenFence)):
            before = mark_of(key, database) if to is None else set_mark(key, to, database)
        if to is not None and to != before:
            logger.warning(
                "The highest fence seen of %r was set from %s to %d by %s.",
                key,
                before,
                to,
                self.actor(),
                extra=log_fields("seen_fence_set", key=key, fence=to),
            )
        if json:
            self.print_json({"key": key, "before": before, "seen": before if to is None else to})
        elif to is not None:
            was = "nothing" if before is None else before
            self.stdout.write(
                self.style.SUCCESS(
                    f"The highest fence seen of '{printable(key)}' was {was}, and is {to}."
                )
            )
        elif before is None:
            self.stdout.write(f"No request has carried a fence of '{printable(key)}'.")
        else:
            self.stdout.write(f"The highest fence seen of '{printable(key)}' is {before}.")

    def _raise(
        self, *, key: str | None, to: int | None, backend: str, json: bool, **options: Any
    ) -> None:
        """Raise counters page by page, and report those that were skipped."""
        refuse_memory(backend)
        store = lock_backends[backend]
        page = store.raise_fences(to, key=key)
        raised, left = page.raised, [*page.left]
        while page.cursor is not None:
            page = store.raise_fences(to, cursor=page.cursor)
            raised, left = raised + page.raised, [*left, *page.left]
        if json:
            self.print_json({"backend": backend, "raised": raised, "left": left})
        else:
            self.stdout.write(self.style.SUCCESS(f"Raised {counted(raised, 'fence counter')}."))
        if left:
            names = ", ".join(map(repr, left[:_NAMED])) + (" and more" if left[_NAMED:] else "")
            raise CommandError(
                "Skipped, because the key is held or being acquired, or its counter cannot be"
                f" read: {names}. Run the command again when they are free."
            )


def _up_to(most: int) -> Callable[[str], int]:
    return reader(lambda text: validate_fence(int(text) if text.isdecimal() else text, most=most))
