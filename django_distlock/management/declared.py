"""What `distlock_list --declared` prints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from django.core.management.base import CommandError

from ..core.errors import InvalidArgument
from ..inspection.declared import DeclaredKey, list_declared
from ..inspection.places import Place
from .operating import OperatorCommand
from .tables import Cell, span

_HEADINGS: Final = ("KEY", "KIND", "MODE", "TTL", "WAIT", "ON CONFLICT", "BACKEND", "PLACE")
#: Arguments that are about keys which somebody holds, and what they are where nobody gave them.
_OF_HELD: Final = {
    "host": None,
    "task": None,
    "held_longer_than": None,
    "limit": 100,
    "cursor": None,
    "all": False,
}


def show_declared(
    command: OperatorCommand,
    *,
    backend: Collection[str] | None,
    prefix: str,
    json: bool,
    options: Mapping[str, Any],
) -> None:
    """Print every key that is declared, and on standard error what could not be imported.

    Args:
        command: Who prints.
        backend: Aliases; None: all of them.
        prefix: What keys are to start with.
        json: Whether to print a document.
        options: All arguments of the command.

    Raises:
        InvalidArgument: One of them is about held keys.
        CommandError: Something could not be imported.
    """
    given = [name for name, default in _OF_HELD.items() if options.get(name, default) != default]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidArgument(f"What is declared is not held yet: leave out {names}.")
    found = list_declared(prefix=prefix, backends=backend)
    if json:
        command.print_json(found.as_json())
    elif found.keys:
        command.print_table(_HEADINGS, [_row(command, each) for each in found.keys])
    elif not found.missing:
        command.stdout.write("No keys are declared.")
    for each in found.missing:
        command.stderr.write(f"{each.what}: {each.message}", command.style.WARNING)
    if found.missing:
        what = ", ".join(each.what for each in found.missing)
        raise CommandError(f"Not all could be imported, and may declare more: {what}.")


def _row(command: OperatorCommand, each: DeclaredKey) -> list[Cell]:
    backend: Cell = each.backend
    if not each.is_configured:
        backend = (f"{each.backend} (not configured)", command.style.ERROR)
    return [
        each.key,
        each.kind.value.replace("_", " "),
        _mode(each),
        _seconds(each.ttl, each, "no expiry"),
        _seconds(each.wait, each, "for ever"),
        each.on_conflict,
        backend,
        _place(each.place),
    ]


def _mode(each: DeclaredKey) -> str:
    numbers = {"min_hold": each.min_hold, "max_lifetime": each.max_lifetime}
    words = (f"{word} {span(numbers[word])}" if word in numbers else word for word in each.mode)
    return ", ".join(words)


def _seconds(number: float | None, each: DeclaredKey, without: str) -> str:
    if number is not None:
        return span(number)
    return without if each.is_configured else "-"


def _place(place: Place) -> str:
    """Return what an editor opens from this folder, and the name."""
    file, here = Path(place.file), Path.cwd()
    if file.is_relative_to(here):
        file = file.relative_to(here)
    where = str(file) if place.file else ""
    if place.line is not None:
        where = f"{where}:{place.line}"
    return f"{where} {place.name}".strip()
