"""Raise fence counters, after a store was changed or restored."""

from __future__ import annotations

import argparse
from copy import copy
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...core.errors import InvalidArgument
from ...core.fences import validate_fence
from ...handler import lock_backends
from ..operating import OperatorCommand

#: Of the keys that were left alone, so many are named.
_NAMED = 20


class Command(OperatorCommand):
    """`distlock_fence raise (KEY | --all) (--to N | --clock)`."""

    help = (
        "Raises fence counters, so that the grants of a new or restored store stay above those of"
        " the old one. A counter is never lowered, and one whose key somebody holds is left alone."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Take what to raise, and how far."""
        super().add_arguments(parser)
        # Django's own, as `--settings`, and `--json`: they are taken before `raise` as well.
        everywhere = [each for each in parser._actions if each.dest != "help"]
        actions = parser.add_subparsers(dest="action", required=True, metavar="raise")
        up = actions.add_parser(
            "raise", help="raise the counter of one key, or of all", description=self.help
        )
        for action in everywhere:
            twin = copy(action)
            # Left out here, it is what was said before.
            twin.default = argparse.SUPPRESS
            up._add_action(twin)
        what = up.add_mutually_exclusive_group(required=True)
        what.add_argument(
            "key", nargs="?", metavar="KEY", help="the key; it may be new to the store"
        )
        what.add_argument(
            "--all",
            action="store_true",
            help="every key that the store has a counter for (FENCE_FLOOR also serves the others)",
        )
        far = up.add_mutually_exclusive_group(required=True)
        far.add_argument(
            "--to", type=_fence, metavar="N", help="the next grant has a fence above N"
        )
        far.add_argument(
            "--clock",
            action="store_true",
            help='the store\'s clock in units of 10 µs, as FENCE_FLOOR = "clock" does',
        )
        up.add_argument(
            "--backend", default="default", help="an alias of DISTLOCK (default: %(default)s)"
        )

    def handle(
        self, *, key: str | None, to: int | None, backend: str, json: bool, **options: Any
    ) -> None:
        """Raise, page by page, and say what was left."""
        store = lock_backends[backend]
        if not store.distributed:
            raise CommandError(
                f"The lock backend {backend!r} keeps its fences in the memory of each process:"
                " no other process can raise them."
            )
        page = store.raise_fences(to, key=key)
        raised, left = page.raised, [*page.left]
        while page.cursor is not None:
            page = store.raise_fences(to, cursor=page.cursor)
            raised, left = raised + page.raised, [*left, *page.left]
        if json:
            self.print_json({"backend": backend, "raised": raised, "left": left})
        else:
            plural = "" if raised == 1 else "s"
            self.stdout.write(self.style.SUCCESS(f"Raised {raised} fence counter{plural}."))
        if left:
            names = ", ".join(map(repr, left[:_NAMED])) + (" and more" if left[_NAMED:] else "")
            raise CommandError(
                f"Left alone, because somebody holds or is acquiring the key: {names}."
                " Run the command again when they are done."
            )


def _fence(text: str) -> int:
    try:
        return validate_fence(int(text) if text.isdecimal() else text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
