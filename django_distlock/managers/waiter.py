"""Notes about waiters, to be shown to people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from django.db import models

from ..core.durations import MAX_BOUND
from ..core.records import MOST_SHOWN, Holder, Waiting, Waits
from .rows import StoreManager, remove

if TYPE_CHECKING:
    from ..models import Waiter


#: A task that was queued again: see `Holder.is_queued`.
_QUEUED = models.Q(holder__pid=0) & ~models.Q(holder__task_id=None)


class WaiterManager(StoreManager["Waiter"]):
    """Notes about waiters. Each operation is a transaction of its own."""

    def note(
        self, name: str, holder: Holder, seconds: float, pk: int | None, *, channel: str
    ) -> int:
        """Write or renew a note for so many seconds, and return its primary key."""
        with self._store.short_transaction(MAX_BOUND):
            now = self._store.now()
            values = {"until": now + timedelta(seconds=seconds), "channel": channel}
            if pk is not None and self.filter(pk=pk, storage_key=name).update(**values):
                return pk
            made: Waiter = self.create(
                storage_key=name, holder=holder.as_json(), since=now, **values
            )
            return made.pk

    def drop(self, name: str, pk: int) -> None:
        """Remove a note."""
        with self._store.short_transaction(MAX_BOUND):
            self.filter(pk=pk, storage_key=name).delete()

    def waiting(self, name: str) -> list[Waiting]:
        """Return the first waiters of a key in the order in which they came."""
        with self._store.short_transaction(MAX_BOUND, writes=False):
            rows = self.filter(storage_key=name, until__gt=self._store.now())
            return [row.as_waiting() for row in rows.order_by("since", "pk")[:MOST_SHOWN]]

    def numbers(self, names: Sequence[str]) -> dict[str, Waits]:
        """Return how many wait for each of these keys, if any do."""
        with self._store.short_transaction(MAX_BOUND, writes=False):
            rows = self.filter(storage_key__in=names, until__gt=self._store.now())
            queued = models.Count("pk", filter=_QUEUED)
            counted = rows.values_list("storage_key").annotate(models.Count("pk"), queued=queued)
            return {
                name: Waits(number - retrying, retrying)
                for name, number, retrying in counted.order_by()
            }

    def cleanup(self, limit: int) -> None:
        """Remove up to `limit` expired notes, whose waiters have died, skipping locked ones."""
        with self._store.short_transaction(MAX_BOUND):
            remove(self.filter(until__lte=self._store.now()).order_by("pk"), limit)
