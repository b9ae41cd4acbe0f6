"""Notes that a database keeps in a table beside its locks."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ..core.durations import MAX_BOUND
from ..core.keys import HASH_MARKER, storage_key
from ..database import vendors
from ..managers.rows import remove
from ..models import MAX_STORAGE_KEY, RunNote

#: One in so many notes removes what is over, and how much of it.
_SWEEP: Final = 200
_SWEPT: Final = 1000


class NoteTable:
    """The operations on notes. A mixin of `BaseLockBackend`, in front of it."""

    key_prefix: str
    _ask: Callable[..., Any]

    def _note(self, name: str, fence: int, seconds: float) -> None:
        pk = self._noted_as(name)
        self._ask(lambda on: _write(on, pk, name, fence, seconds))
        if random.randrange(_SWEEP) == 0:  # noqa: S311 - to spread load
            self._remove_notes(datetime.max.replace(tzinfo=UTC), _SWEPT)

    def _noted(self, name: str) -> int | None:
        pk = self._noted_as(name)
        fence: int | None = self._ask(lambda on: _read(on, pk), writes=False)
        return fence

    def _remove_notes(self, before: datetime, limit: int) -> int:
        """Remove notes, of every backend in the table, that were over before `before`."""
        gone: int = self._ask(lambda on: _remove(on, before, limit), busy=lambda: 0, long=True)
        return gone

    def _noted_as(self, name: str) -> str:
        # No key in NFC has the marker.
        return storage_key(f"{self.key_prefix}{HASH_MARKER}note", name, MAX_STORAGE_KEY)


def _write(using: str, pk: str, name: str, fence: int, seconds: float) -> None:
    vendor = vendors.of(using)
    rows = RunNote.objects.db_manager(using)
    with vendor.short_transaction(MAX_BOUND):
        values = {"fence": fence, "until": vendor.now() + timedelta(seconds=seconds)}
        if not rows.filter(pk=pk).update(**values):
            rows.create(pk=pk, **values)


def _read(using: str, pk: str) -> int | None:
    vendor = vendors.of(using)
    with vendor.short_transaction(MAX_BOUND, writes=False):
        live = RunNote.objects.db_manager(using).filter(pk=pk, until__gt=vendor.now())
        return live.values_list("fence", flat=True).first()


def _remove(using: str, before: datetime, limit: int) -> int:
    vendor = vendors.of(using)
    with vendor.short_transaction(MAX_BOUND):
        over = RunNote.objects.db_manager(using).filter(until__lte=min(before, vendor.now()))
        return remove(over.order_by("until"), limit)
