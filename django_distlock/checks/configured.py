"""What the checks look at: the backends that the settings configure, and their databases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from .. import conf
from ..backends.base import BaseLockBackend
from ..handler import lock_backends

B = TypeVar("B")

DOCS = "See docs/reference/checks.md."


def configured(kind: type[B]) -> Iterator[B]:
    """Give the backends of a kind that can be made; `distlock.E001` tells of the others."""
    for backend in _every():
        if isinstance(backend, kind):
            yield backend


def configured_by_path(path: str) -> Iterator[BaseLockBackend]:
    """Give the backends of a class, by its import path: its driver may not be installed."""
    for backend in _every():
        if any(f"{each.__module__}.{each.__qualname__}" == path for each in type(backend).__mro__):
            yield backend


def where(backend: Any) -> str:
    """Return the setting that makes a backend, for messages."""
    return f"DISTLOCK[{backend.alias!r}]"


def ask(using: str, question: str, *arguments: Any) -> list[tuple[Any, ...]]:
    """Run a query on the connection of an alias; return its rows."""
    with connections[using].cursor() as cursor:
        cursor.execute(question, arguments or None)
        return list(cursor.fetchall())


def _every() -> Iterator[BaseLockBackend]:
    try:
        aliases = conf.aliases()
    except ImproperlyConfigured:
        return
    for alias in aliases:
        try:
            yield lock_backends[alias]
        except ImproperlyConfigured:
            continue
