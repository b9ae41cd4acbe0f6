"""Show all that is known about a key."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable, Iterator
from typing import Any

from django.core.management.base import CommandParser

from ...core.records import Waiting
from ...core.wording import instant, printable, span
from ...inspection import HeldKey, KeyView, show
from ...models import LockEvent
from ..operating import Cell, OperatorCommand, named, refuse_memory
from ..reading import add_backend


class Command(OperatorCommand):
    """`distlock_show KEY [--backend ALIAS] [--json]`."""

    help = "Shows a key: its holder, fence, pause, waiters and history."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("key", metavar="KEY", help="the key, as in the code")
        add_backend(parser)

    def handle(self, *, key: str, backend: str, json: bool, **options: Any) -> None:
        refuse_memory(backend)
        view = show(key, backend)
        if json:
            self.print_json(view)
            return
        for name, text in self._lines(view):
            self.stdout.write(f"{self.style.MIGRATE_HEADING(name.ljust(12))}{printable(text)}")
        self._print_part(
            ("HELD BY", "TASK", "SINCE", "EXPIRES", "FENCE"), map(_sharing, view.sharing)
        )
        self._print_part(("WAITING", "TASK", "SINCE", "WAKES BY"), map(_waiting, view.waiters))
        if view.events is None:
            self.stderr.write("The event table cannot be read.", self.style.WARNING)
        self._print_part(("AT", "EVENT", "FENCE", "BY", "WHY"), map(_event, view.events or ()))
        self._print_part(
            ("ITS HOLDER WAITS FOR", "HELD BY"),
            ([each.key, each.holder.where if each.holder else "-"] for each in view.chain()),
        )

    def _print_part(self, headings: tuple[str, ...], rows: Iterable[list[Cell]]) -> None:
        """Print a table after an empty line, if it has rows."""
        if found := list(rows):
            self.stdout.write("")
            self.print_table(headings, found)

    def _lines(self, view: KeyView) -> Iterator[tuple[str, str]]:
        yield "key", view.key
        yield "backend", view.backend
        if view.held is None:
            yield "state", "not held"
        else:
            yield from _held(view.held)
        none = "never granted" if view.knows_fence else "not known"
        yield "fence", str(view.fence) if view.fence else none
        if view.counter is not None and view.paused_until is not None:
            by = f", by {view.counter.paused_by}" if view.counter.paused_by else ""
            yield "paused", f"until {instant(view.paused_until)}{by}"
        for session in view.guards or ():
            yield "guarded by", named(session)


def _sharing(held: HeldKey) -> list[Cell]:
    return [
        held.holder.where or "-",
        held.holder.task_id or "-",
        instant(held.acquired_at),
        instant(held.expires_at),
        str(held.fence),
    ]


def _waiting(waiting: Waiting) -> list[Cell]:
    woken = "notification" if waiting.is_woken else "polling"
    return [
        waiting.holder.where or "-",
        waiting.holder.task_id or "-",
        instant(waiting.since),
        "queue retry" if waiting.is_retrying else woken,
    ]


def _event(event: LockEvent) -> list[Cell]:
    return [
        instant(event.at),
        str(event.get_kind_display()),
        "-" if event.fence is None else str(event.fence),
        event.actor or "-",
        event.reason or "-",
    ]


def _held(held: HeldKey) -> Iterator[tuple[str, str]]:
    yield "state", str(held.state.label)
    yield "holder", held.holder.where or "-"
    if held.holder.thread:
        yield "thread", held.holder.thread
    if held.holder.task_id:
        yield "task", held.holder.task_id
    if held.holder.metadata:
        yield "metadata", json_module.dumps(dict(held.holder.metadata), ensure_ascii=False)
    yield "since", f"{instant(held.acquired_at)} ({span(held.held_for)})"
    yield "renewed", instant(held.renewed_at)
    if held.expires_at is not None:
        yield "expires", f"{instant(held.expires_at)} (in {span(held.expires_in)})"
    if held.token_hash:
        yield "token hash", held.token_hash
