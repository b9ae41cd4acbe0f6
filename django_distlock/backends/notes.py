"""Notes that a database keeps beside its locks: records that are over by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from .. import vendors
from ..core.durations import MAX_BOUND
from ..core.keys import HASH_MARKER, namespace, new_token, storage_key
from ..models import MAX_STORAGE_KEY, HeldLock
from ..rows import NOTE, between

#: One in so many notes removes what is over, and how much of it.
_SWEEP: Final = 200
_SWEPT: Final = 1000


class NoteTable:
    """The operations on notes. A mixin of `BaseLockBackend`, in front of it."""

    using: str
    key_prefix: str
    _ask: Callable[..., Any]

    def _note(self, name: str, fence: int, seconds: float) -> None:
        pk = self._noted_as(name)
        self._ask(lambda on: _write(on, pk, name, fence, seconds))
        if random.randrange(_SWEEP) == 0:  # noqa: S311 - to spread load
            self._ask(lambda on: _sweep(on, self._swept), busy=lambda: None, long=True)

    def _noted(self, name: str) -> int | None:
        pk = self._noted_as(name)
        record = self._ask(lambda on: HeldLock.objects.db_manager(on).read(pk=pk), writes=False)
        return None if record is None else record.fence

    def _noted_as(self, name: str) -> str:
        return storage_key(self._note_prefix, name, MAX_STORAGE_KEY)

    @property
    def _note_prefix(self) -> str:
        # No key in NFC has the marker, so none begins like that.
        return f"{self.key_prefix}{HASH_MARKER}note"

    @property
    def _swept(self) -> str:
        # Without the colon, which those that are hashed do not have.
        return namespace(self._note_prefix).rstrip(":")


def _write(using: str, pk: str, name: str, fence: int, seconds: float) -> None:
    vendor = vendors.of(using)
    rows = HeldLock.objects.db_manager(using)
    with vendor.short_transaction(MAX_BOUND):
        now = vendor.now()
        ends = now + timedelta(seconds=seconds)
        values = {"fence": fence, "ttl": seconds, "expires_at": ends, "free_at": ends}
        if not rows.filter(pk=pk).update(**values):
            rows.create(
                storage_key=pk,
                key=name,
                token=new_token(),
                acquired_at=now,
                renewed_at=now,
                holder_host=NOTE,
                **values,
            )


def _sweep(using: str, prefix: str) -> None:
    """Remove notes that are over, of those whose storage keys begin like that."""
    vendor = vendors.of(using)
    rows = HeldLock.objects.db_manager(using)
    with vendor.short_transaction(MAX_BOUND):
        over = between(rows.filter(free_at__lte=vendor.now()), prefix, None)
        rows.filter(pk__in=list(over.values_list("pk", flat=True)[:_SWEPT])).delete()
