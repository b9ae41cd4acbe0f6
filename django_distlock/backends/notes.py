"""Notes that a database keeps in a table beside its locks."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from .. import vendors
from ..core.durations import MAX_BOUND
from ..core.keys import HASH_MARKER, new_token, storage_key
from ..models import MAX_STORAGE_KEY, HeldLock, RunNote
from ..rows import remove

#: One in so many notes removes what is over, and how much of it.
_SWEEP: Final = 200
_SWEPT: Final = 1000

#: The row that migration 0008 leaves for a day. While it is there, workers of the release before
#: may run: they look for notes in the table of locks, under this host, and write them there.
MOVING: Final = f"{HASH_MARKER}moving"
OLD_HOST: Final = f"{HASH_MARKER}note"


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
        # No key in NFC has the marker. In the table of locks, that kept notes from being locks.
        return storage_key(f"{self.key_prefix}{OLD_HOST}", name, MAX_STORAGE_KEY)


def _write(using: str, pk: str, name: str, fence: int, seconds: float) -> None:
    vendor = vendors.of(using)
    rows = RunNote.objects.db_manager(using)
    with vendor.short_transaction(MAX_BOUND):
        now = vendor.now()
        until = now + timedelta(seconds=seconds)
        found = dict(rows.filter(pk__in=(pk, MOVING)).values_list("pk", "until"))
        values = {"fence": fence, "until": until}
        if not (pk in found and rows.filter(pk=pk).update(**values)):
            rows.create(pk=pk, **values)
        if found.get(MOVING, now) > now:
            HeldLock.objects.db_manager(using).update_or_create(
                pk=pk,
                defaults={
                    "key": name,
                    "token": new_token(),
                    "fence": fence,
                    "ttl": seconds,
                    "acquired_at": now,
                    "renewed_at": now,
                    "expires_at": until,
                    "free_at": until,
                    "holder_host": OLD_HOST,
                },
            )


def _read(using: str, pk: str) -> int | None:
    vendor = vendors.of(using)
    with vendor.short_transaction(MAX_BOUND, writes=False):
        live = RunNote.objects.db_manager(using).filter(pk=pk, until__gt=vendor.now())
        fence = live.values_list("fence", flat=True).first()
    if fence is None:
        # A worker of the release before may have written it.
        old = HeldLock.objects.db_manager(using).read(pk=pk)
        fence = None if old is None else old.fence
    return fence


def _remove(using: str, before: datetime, limit: int) -> int:
    vendor = vendors.of(using)
    with vendor.short_transaction(MAX_BOUND):
        over = RunNote.objects.db_manager(using).filter(until__lte=min(before, vendor.now()))
        return remove(over.order_by("until"), limit)
