"""Access to rows that works on every database."""

from __future__ import annotations

from typing import TypeVar

from django.db import models

from ..core.keys import prefix_end
from ..database import vendors

M = TypeVar("M", bound=models.Model)


class StoreManager(models.Manager[M]):
    """A manager with the vendor of its database."""

    @property
    def _store(self) -> vendors.Vendor:
        return vendors.of(self.db)


#: Names in one statement. SQLite takes 32,766 parameters, and PostgreSQL 65,535.
MOST = 10_000


def only(rows: models.QuerySet[M]) -> M | None:
    """Return the one row, or None.

    Unlike `first()`, this has no LIMIT, with which some databases cannot lock rows.
    """
    return next(iter(rows), None)


def between(rows: models.QuerySet[M], prefix: str, after: str | None) -> models.QuerySet[M]:
    """Return the rows whose storage keys start with `prefix` and come after another."""
    rows = rows.filter(storage_key__gte=prefix)
    if (end := prefix_end(prefix)) is not None:
        rows = rows.filter(storage_key__lt=end)
    return rows if after is None else rows.filter(storage_key__gt=after)


def remove(over: models.QuerySet[M], limit: int) -> int:
    """Delete the first of these rows, up to `limit` or `MOST`, but no locked ones; return how many.

    Call this in a transaction.
    """
    found = list(over.values_list("pk", flat=True)[: min(limit, MOST)])
    unlocked = over.select_for_update(skip_locked=True).filter(pk__in=found).order_by("pk")
    names = list(unlocked.values_list("pk", flat=True))
    return vendors.of(over.db).delete(over.model._default_manager.using(over.db), names)
