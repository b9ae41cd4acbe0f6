"""What JSON carries of values: field by field, and never a secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any

from .secrets import Secret


class Document:
    """A dataclass of which JSON carries each field, unless it says otherwise."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry: times as ISO 8601 in UTC, durations in seconds."""
        return by_name(self, *(each.name for each in fields(self)))  # type: ignore[arg-type]


def by_name(value: object, *names: str) -> dict[str, Any]:
    """Return what JSON can carry of some attributes."""
    return {name: plain(getattr(value, name)) for name in names}


def plain(value: Any) -> Any:
    """Return what JSON can carry of a value, and of all that is in it; `TypeError`: a secret is."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Secret):
        raise TypeError(f"A {type(value).__name__.lower()} cannot be part of a document.")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "as_json"):
        return value.as_json()
    return Document.as_json(value) if is_dataclass(value) else value  # type: ignore[arg-type]
