"""How the managers get at rows, on any database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from django.db import models

from . import vendors
from .core.keys import prefix_end

M = TypeVar("M", bound=models.Model)

#: The host of records that are notes, and no locks. It is not in NFC, as names of hosts are.
NOTE: Final = "\u2126note"


def only(rows: models.QuerySet[M]) -> M | None:
    """Return the one row, if it is there.

    Not by `first()`: its LIMIT cannot be locked on every database.
    """
    return next(iter(rows), None)


def between(rows: models.QuerySet[M], prefix: str, after: str | None) -> models.QuerySet[M]:
    """Return the rows whose storage keys start with `prefix` and come after another."""
    rows = rows.filter(pk__gte=prefix)
    if (end := prefix_end(prefix)) is not None:
        rows = rows.filter(pk__lt=end)
    return rows if after is None else rows.filter(pk__gt=after)


def by_key(manager: models.Manager[M], names: Sequence[object]) -> Iterator[models.QuerySet[M]]:
    """Return the rows with these keys, which are locked already, in as few querysets as may be."""
    if vendors.of(manager.db).locks_what_it_scans:
        yield from (manager.filter(pk=name) for name in names)
    else:
        yield manager.filter(pk__in=names)
