"""The fence counters, which only ever count up, and the pauses of keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from django.apps import apps
from django.db import DatabaseError, IntegrityError, connections, models

from ..core.durations import MAX_BOUND
from ..core.errors import LockUsageError
from ..core.keys import whole_name
from ..core.records import Counter, Raised, clock_fence, next_fence
from ..database.vendors.base import LOOK_SECONDS
from .rows import StoreManager, between, only

if TYPE_CHECKING:
    from ..models import FenceCounter


class FenceCounterQuerySet(models.QuerySet["FenceCounter"]):
    """Rows that only ever count up: operations that could lower a fence are refused."""

    def delete(self) -> NoReturn:
        """Refuse."""
        refuse_change("deleted")

    def update(self, **values: Any) -> int:
        """Change columns other than the fence and the key."""
        if {"fence", "storage_key", "pk"} & set(values):
            refuse_change("changed")
        return super().update(**values)

    def bulk_create(
        self,
        objs: Any,
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> list[FenceCounter]:
        """Create missing rows."""
        if update_conflicts:
            refuse_change("changed")
        return super().bulk_create(objs, batch_size, ignore_conflicts, *args, **kwargs)


class FenceCounterManager(StoreManager.from_queryset(FenceCounterQuerySet)):  # type: ignore[misc]
    """Operations on fence counters, inside the transaction of a lock's operation."""

    #: Returns which of some storage keys are held; None: those with a live record.
    who_is_held: Callable[[str, Sequence[str]], Collection[str]] | None = None

    @contextmanager
    def turn(self, name: str, key: str, bound: float, *, shared: bool = False) -> Iterator[bool]:
        """Open a transaction in which nobody else acquires the key once its counter is locked.

        Args:
            shared: Others that share the key may have their turn at the same time; the counter
                exists.

        Yields:
            Whether this may have waited for somebody.
        """
        store = self._store
        if store.turns_by_counter or shared:
            with store.short_transaction(bound, writes=False):
                is_there = self.filter(pk=name).exists()
            if not is_there:
                with suppress(IntegrityError), store.short_transaction(bound):
                    self.create(pk=name, key=key, fence=0)
        with store.short_transaction(bound):
            yield store.take_turn(name, shared=shared)

    def lock(self, name: str, *, wait: bool = False) -> FenceCounter | None:
        """Lock the counter of a key at once, or raise, because a guard may keep it for long.

        Args:
            wait: Wait for others, as long as a statement may.
        """
        rows = self.select_for_update(nowait=not wait, no_key=self._has_no_key_locks)
        return only(rows.filter(pk=name))

    def is_guarded(self, name: str, fences: str) -> bool:
        """Whether other transactions have locked the counter of a key shared, as guards do.

        This waits only for others that look as well. Other locks on the row are exclusive.
        """
        store, is_shared = self._store, False
        try:
            with store.short_transaction(LOOK_SECONDS), store.looking(name) as is_alone:
                fence = self.filter(pk=name).values_list("fence", flat=True).first()
                if fence is None or not is_alone:
                    return False
                is_shared = store.guard(fences, name, fence, 0)
                if is_shared:
                    self.lock(name)
        except DatabaseError as error:
            if is_shared and store.is_busy(error):
                return True
            raise
        return False

    def advance(
        self, name: str, key: str, counter: FenceCounter | None, floor: datetime | None
    ) -> int:
        """Return the next fence of a key, at least `floor`; `counter`: its locked row."""
        counter = counter or self._lock_or_make(name, key)
        fence = next_fence(key, counter.fence, floor)
        models.QuerySet.update(self.filter(pk=name), fence=fence)
        return fence

    def raise_one(self, fence: int | None, name: str, key: str) -> Raised:
        """Raise the counter of a key, which is created if missing."""
        with self.turn(name, key, MAX_BOUND):
            self._lock_or_make(name, key)
            return self._raise([name], fence)

    def raise_page(self, fence: int | None, prefix: str, after: str | None, limit: int) -> Raised:
        """Raise a page of the counters whose storage keys start with `prefix`, in their order."""
        rows = between(self.all(), prefix, after).order_by("pk")
        with self._store.short_transaction(MAX_BOUND):
            names = list(rows.values_list("pk", flat=True)[: limit + 1])
            raised = self._raise(names[:limit], fence)
        return replace(raised, cursor=names[limit - 1] if len(names) > limit else None)

    def _raise(self, names: Sequence[str], fence: int | None) -> Raised:
        store, rows = self._store, self.filter(pk__in=names)
        unlocked = rows.select_for_update(skip_locked=True, no_key=self._has_no_key_locks)
        locked = {row.pk for row in unlocked.order_by("pk")}
        fence = clock_fence(store.now()) if fence is None else fence
        # Nobody acquires a key whose counter is locked, so free keys stay free until the end.
        if self.who_is_held is None:
            held = self._with_live_record(names)
        else:
            held = self.who_is_held(self.db, names)
        free = locked.difference(held)
        low = dict(rows.filter(fence__lt=fence).values_list("pk", "key"))
        store.make_durable()
        raised = free & low.keys()
        one_by_one = (self.filter(pk=name) for name in sorted(raised))
        for rows in one_by_one if store.locks_what_it_scans else [self.filter(pk__in=raised)]:
            models.QuerySet.update(rows, fence=fence)
        return Raised(len(raised), tuple(low[each] for each in sorted(low.keys() - free)))

    def _lock_or_make(self, name: str, key: str) -> FenceCounter:
        counter = self.lock(name)
        if counter is None:
            # Shared keys and session locks create counters without a turn.
            self.bulk_create([self.model(pk=name, key=key, fence=0)], ignore_conflicts=True)
            counter = self.filter(pk=name).select_for_update(no_key=self._has_no_key_locks).get()
        return counter

    def _with_live_record(self, names: Sequence[str]) -> Collection[str]:
        locks = apps.get_model("django_distlock", "HeldLock").objects.db_manager(self.db)
        live = map(self._store.live, (locks.filter(pk__in=names), locks.places_of(names)))
        return [whole_name(pk) for rows in live for pk in rows.values_list("pk", flat=True)]

    def look(self, name: str) -> Counter | None:
        """Return the fence and the pause of a key; None: there is neither."""
        with self._store.short_transaction(MAX_BOUND, writes=False):
            rows = self.filter(pk=name).values_list("fence", "paused_until", "paused_by")
            row = rows.first()
            if row is None:
                return None
            fence, until, by = row
            if until is not None and self._store.now() < until:
                return Counter(fence, until, by)
            return Counter(fence) if fence else None

    def pause(self, name: str, key: str, until: datetime, by: str | None, *, bound: float) -> None:
        """Grant the key to nobody until then."""
        with self.turn(name, key, bound):
            self._lock_or_make(name, key)
            self.filter(pk=name).update(paused_until=until, paused_by=by)

    def resume(self, name: str, *, bound: float) -> bool:
        """End a pause; return whether there was one."""
        with self._store.short_transaction(bound):
            # Always sent, because a waiter that was refused for a pause has left no mark.
            self._store.call_out(name)
            counter = self.lock(name)
            if counter is None or counter.paused_until is None:
                return False
            self.filter(pk=name).update(paused_until=None, paused_by=None)
            was_paused: bool = self._store.now() < counter.paused_until
            return was_paused

    @property
    def _has_no_key_locks(self) -> bool:
        return bool(connections[self.db].features.has_select_for_no_key_update)


def refuse_lower_fence(instance: FenceCounter, using: str, raw: bool, **_: Any) -> None:
    """Refuse a fixture (`loaddata`) with a lower fence than the row that it would overwrite."""
    if raw:
        stored = type(instance).objects.using(using).filter(pk=instance.pk)
        if stored.filter(fence__gt=instance.fence).exists():
            refuse_change("lowered")


def refuse_change(what: str) -> NoReturn:
    """Refuse an operation that could make a counter repeat a fence."""
    raise LockUsageError(
        f"Fence counters are never {what}. Otherwise the same fences would be granted again and"
        " stale writes would pass. Only grants raise them."
    )
