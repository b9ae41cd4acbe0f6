"""The lock's transactions as ORM code, for every database.

On PostgreSQL the four that are called all the time exist a second time as functions
(`sql/postgresql/`, `functions.py`), with the same behaviour in one round trip. Locks are taken in
the order turn (PostgreSQL: advisory lock on the key), fence row, lock row, here and everywhere, and
the clock is read after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from django.apps import apps
from django.db import IntegrityError, connections, models
from django.db.models import Q

from . import vendors
from .core.durations import MAX_BOUND
from .core.errors import LockUsageError
from .core.fences import clock_fence, next_fence
from .core.holders import Holder
from .core.keys import prefix_end
from .core.records import (
    UNKNOWN,
    Contended,
    Grant,
    Raised,
    Record,
    Unknown,
    lease_ends,
)

if TYPE_CHECKING:
    from .models import FenceCounter, HeldLock

M = TypeVar("M", bound=models.Model)


class HeldLockManager(models.Manager["HeldLock"]):
    """Operations on held locks. Each runs in a transaction of its own.

    The database errors of a busy store pass through: `Vendor.is_busy` tells them.
    """

    #: Whether no fence is below what the store's clock says.
    follows_clock = False

    def acquire(
        self,
        name: str,
        key: str,
        token: str,
        ttl: float | None,
        holder: Holder,
        *,
        wanted: bool,
        replace: str | None,
        bound: float,
    ) -> Grant | Contended:
        """Grant the key if it is free."""
        while True:
            # Read first: whoever loses takes no lock and writes nothing.
            with self._store.short_transaction(bound, writes=False):
                contended, row = self._look(name, replace)
            if contended is None:
                with self._counters.turn(name, key, bound) as waited:
                    if waited:
                        contended, row = self._look(name, replace)
                    if contended is None and (free := self._lock_free(name, replace)):
                        counter, over, now = free
                        fence = self._counters.advance(name, key, counter, self._floor(now))
                        return self._grant(
                            over,
                            now,
                            ttl,
                            holder,
                            storage_key=name,
                            key=key,
                            token=token,
                            fence=fence,
                        )
            # Released or marked by somebody else meanwhile: look again.
            if contended is not None and (
                not wanted or row is None or row.wanted or self._mark_wanted(row, bound)
            ):
                return contended

    def extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        """Replace the ttl of a lease; None: it is gone."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, grant.token)
            return None if row is None else self._extend(row, grant, ttl, now)

    def extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        """Extend each lease by its own ttl; a row that somebody holds is skipped as unknown."""
        names = [name for name, _grant in named]
        with self._store.short_transaction(MAX_BOUND):
            unlocked = self.select_for_update(skip_locked=True).filter(pk__in=names)
            rows = {row.pk: row for row in unlocked.order_by("pk")}
            held = dict(self.filter(pk__in=names).values_list("pk", "token"))
            now = self._store.now()
            answers: list[Grant | Unknown | None] = []
            for name, grant in named:
                row = rows.get(name)
                if row is not None and row.as_record().is_owned(grant.token, now):
                    answers.append(self._extend(row, grant, grant.ttl, now))
                else:
                    skipped = row is None and held.get(name) == grant.token
                    answers.append(UNKNOWN if skipped else None)
            return answers

    def release(self, name: str, grant: Grant, *, held: float | None = None, bound: float) -> bool:
        """Give the key back, or keep it taken for `held` seconds since the grant."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, grant.token)
            if row is None:
                return False
            until = None if held is None else row.acquired_at + timedelta(seconds=held)
            if until is None or until <= now:
                self.filter(pk=name).delete()
            else:
                self.filter(pk=name).update(expires_at=until, free_at=until)
            return True

    def read(self, *, bound: float = MAX_BOUND, **lookup: Any) -> Record | None:
        """Return the live record that `lookup` finds."""
        with self._store.short_transaction(bound, writes=False):
            row = self.filter(**lookup).first()
            return None if row is None else _live(row, self._store.now())

    def live_records(
        self, prefix: str, after: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> list[Record]:
        """Return up to `limit` live records whose storage keys start with `prefix`, in order."""
        rows = _between(self.all(), prefix, after)
        if host is not None:
            rows = rows.filter(holder_host=host)
        if task_id is not None:
            rows = rows.filter(task_id=task_id)
        with self._store.short_transaction(MAX_BOUND, writes=False):
            now = self._store.now()
            rows = rows.filter(Q(free_at__isnull=True) | Q(free_at__gt=now))
            return [row.as_record() for row in rows.order_by("pk")[:limit]]

    def shorten(
        self, name: str, seconds: float, token: str | None, *, bound: float
    ) -> Record | None:
        """Let a lease end in `seconds` at the latest."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, token)
            if row is None:
                return None
            record = row.as_record().shortened(now, seconds)
            self.filter(pk=name).update(expires_at=record.expires_at, free_at=record.free_at)
            return record

    def force_release(self, name: str, key: str, *, bound: float) -> Record | None:
        """Move the fence on, then remove the record."""
        with self._store.short_transaction(bound, writes=False):
            if not self.filter(pk=name).exists():
                return None  # And no counter is made for a key that nobody ever held.
        with self._counters.turn(name, key, bound):
            counter = self._counters.lock(name)
            row, now = self._owned(name, None)
            if row is None:
                return None
            self._store.make_durable()
            self._counters.advance(name, key, counter, self._floor(now))
            self.filter(pk=name).delete()
            return row.as_record()

    def request_stop(self, name: str, *, bound: float) -> Record | None:
        """Mark the record for its holder to see."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, None)
            if row is None:
                return None
            row.stop_requested_at = row.stop_requested_at or now
            self.filter(pk=name).update(stop_requested_at=row.stop_requested_at)
            return row.as_record()

    def cleanup(self, before: datetime, limit: int) -> int:
        """Remove up to `limit` records that were over before `before`, skipping locked ones."""
        with self._store.short_transaction(MAX_BOUND):
            before = min(before, self._store.now())
            over = self.filter(free_at__lte=before)
            names = list(over.order_by("pk").values_list("pk", flat=True)[:limit])
            # In a statement of its own: not every database can lock what LIMIT leaves.
            unlocked = over.select_for_update(skip_locked=True).filter(pk__in=names)
            names = [row.pk for row in unlocked.order_by("pk")]
            return sum(rows.delete()[0] for rows in _by_key(self, names))

    def remove_expired(self, **lookup: Any) -> int:
        """Remove the record that `lookup` finds if it is over and nobody has it locked."""
        with self._store.short_transaction(MAX_BOUND):
            found = self.select_for_update(skip_locked=True).filter(**lookup)
            row = _only(found.filter(free_at__lte=self._store.now()))
            return 0 if row is None else self.filter(pk=row.pk).delete()[0]

    @property
    def _counters(self) -> FenceCounterManager:
        counters: FenceCounterManager = apps.get_model(
            "django_distlock", "FenceCounter"
        ).objects.db_manager(self.db)
        return counters

    @property
    def _store(self) -> vendors.Vendor:
        return vendors.of(self.db)

    def _floor(self, now: datetime) -> datetime | None:
        return now if self.follows_clock else None

    def _look(self, name: str, replace: str | None) -> tuple[Contended | None, HeldLock | None]:
        """Return why the key cannot be had, if so, and the live row that is in the way."""
        row = self.filter(pk=name).first()
        paused_until = self._counters.paused_until(name)
        now = self._store.now()
        paused = paused_until is not None and now < paused_until
        record = None if row is None else _live(row, now)
        if record is None:
            return Contended(observed_at=now, paused=True) if paused else None, None
        if record.token == replace and not paused:
            return None, None
        return record.contended(now, paused=paused), row

    def _lock_free(
        self, name: str, replace: str | None
    ) -> tuple[FenceCounter | None, HeldLock | None, datetime] | None:
        """Lock what a grant changes; None: the key is not to be had any more.

        Returns:
            The counter and the record that is over, where they exist, and the time of the grant.
        """
        counter = self._counters.lock(name)
        row = _only(self.select_for_update().filter(pk=name))
        now = self._store.now()
        if counter is not None and counter.paused_until is not None and now < counter.paused_until:
            return None
        if row is not None and row.token != replace and row.as_record().is_live(now):
            return None
        return counter, row, now

    def _grant(
        self, over: HeldLock | None, now: datetime, ttl: float | None, holder: Holder, **values: Any
    ) -> Grant:
        """Write the record of a grant in the place of the one that is over, if there is one."""
        self._store.make_durable()
        expires_at, free_at = lease_ends(now, ttl)
        values |= {
            "ttl": ttl, "acquired_at": now, "renewed_at": now, "expires_at": expires_at,
            "free_at": free_at, "wanted": False, "holder": holder.as_json(),
            "holder_host": holder.host, "task_id": holder.task_id, "stop_requested_at": None,
        }  # fmt: skip
        if over is None:
            self.create(**values)
        else:
            self.filter(pk=over.pk).update(**values)
        return Grant(values["key"], values["token"], values["fence"], ttl, now, expires_at)

    def _mark_wanted(self, row: HeldLock, bound: float) -> bool:
        """Ask for a wake-up at the end of this grant; False: it ended or was marked meanwhile."""
        with self._store.short_transaction(bound):
            marked = self.filter(pk=row.pk, token=row.token, wanted=False).update(wanted=True)
            return bool(marked)

    def _owned(self, name: str, token: str | None) -> tuple[HeldLock | None, datetime]:
        """Lock a row, then judge it by the clock: in this order, a wait cannot blur the answer.

        Args:
            token: The token it must have; None: any.
        """
        row = _only(self.select_for_update().filter(pk=name))
        now = self._store.now()
        if row is None or not row.as_record().is_owned(token, now):
            return None, now
        return row, now

    def _extend(self, row: HeldLock, grant: Grant, ttl: float | None, now: datetime) -> Grant:
        self._store.make_durable()
        expires_at, free_at = lease_ends(now, ttl)
        self.filter(pk=row.pk).update(
            ttl=ttl, renewed_at=now, expires_at=expires_at, free_at=free_at
        )
        stop_requested = row.stop_requested_at is not None
        return Grant(
            grant.key, row.token, row.fence, ttl, row.acquired_at, expires_at, stop_requested
        )


class FenceCounterQuerySet(models.QuerySet["FenceCounter"]):
    """Rows that only ever count up: what could take a fence back is refused."""

    def delete(self) -> NoReturn:
        refuse_change("deleted")

    def update(self, **values: Any) -> int:
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
        if update_conflicts:
            refuse_change("changed")
        return super().bulk_create(objs, batch_size, ignore_conflicts, *args, **kwargs)


class FenceCounterManager(models.Manager.from_queryset(FenceCounterQuerySet)):  # type: ignore[misc]
    """Operations on fence counters, inside the transaction of a lock's operation."""

    #: Tells which of these storage keys are held; None: those with a live record.
    who_is_held: Callable[[Sequence[str]], Collection[str]] | None = None

    @property
    def _store(self) -> vendors.Vendor:
        return vendors.of(self.db)

    @contextmanager
    def turn(self, name: str, key: str, bound: float) -> Iterator[bool]:
        """Open a transaction in which nobody else acquires the key once its counter is locked.

        Yields:
            Whether somebody may have been waited for.
        """
        store = self._store
        if store.turns_by_counter:
            with store.short_transaction(bound, writes=False):
                is_there = self.filter(pk=name).exists()
            if not is_there:
                with suppress(IntegrityError), store.short_transaction(bound):
                    self.create(pk=name, key=key, fence=0)
        with store.short_transaction(bound):
            yield store.take_turn(name)

    def lock(self, name: str) -> FenceCounter | None:
        """Lock the counter of a key at once, or raise: a guard may hold it for long."""
        # Its key never changes, so the weaker lock does: foreign keys to it could go on.
        rows = self.select_for_update(nowait=True, no_key=self._has_no_key_locks)
        return _only(rows.filter(pk=name))

    def advance(
        self, name: str, key: str, counter: FenceCounter | None, floor: datetime | None
    ) -> int:
        """Return the next fence of a key, of which `counter` is the locked row.

        Args:
            floor: The time that it is not to be below; None: it just counts.
        """
        fence = next_fence(key, 0 if counter is None else counter.fence, floor)
        if counter is None:
            self.create(pk=name, key=key, fence=fence)
        else:
            models.QuerySet.update(self.filter(pk=name), fence=fence)
        return fence

    def raise_one(self, fence: int | None, name: str, key: str) -> Raised:
        """Raise the counter of a key, which is made where there is none."""
        with self.turn(name, key, MAX_BOUND):
            self._lock_or_make(name, key)
            return self._raise([name], fence)

    def raise_page(self, fence: int | None, prefix: str, after: str | None, limit: int) -> Raised:
        """Raise a page of the counters whose storage keys start with `prefix`, in their order."""
        rows = _between(self.all(), prefix, after).order_by("pk")
        with self._store.short_transaction(MAX_BOUND):
            names = list(rows.values_list("pk", flat=True)[: limit + 1])
            raised = self._raise(names[:limit], fence)
        return replace(raised, cursor=names[limit - 1] if len(names) > limit else None)

    def _raise(self, names: Sequence[str], fence: int | None) -> Raised:
        store, rows = self._store, self.filter(pk__in=names)
        unlocked = rows.select_for_update(skip_locked=True, no_key=self._has_no_key_locks)
        locked = {row.pk for row in unlocked.order_by("pk")}
        fence = clock_fence(store.now()) if fence is None else fence
        # Nobody acquires what is locked here, so who holds nothing now will not before the end.
        free = locked.difference((self.who_is_held or self._with_live_record)(names))
        low = dict(rows.filter(fence__lt=fence).values_list("pk", "key"))
        store.make_durable()
        raised = free & low.keys()
        for rows in _by_key(self, sorted(raised)):
            models.QuerySet.update(rows, fence=fence)
        return Raised(len(raised), tuple(low[each] for each in sorted(low.keys() - free)))

    def _lock_or_make(self, name: str, key: str) -> None:
        if self.lock(name) is None:
            # Locks that last for a session make their counters out of turn.
            self.bulk_create([self.model(pk=name, key=key, fence=0)], ignore_conflicts=True)
            self.lock(name)

    def _with_live_record(self, names: Sequence[str]) -> Collection[str]:
        locks = apps.get_model("django_distlock", "HeldLock").objects.db_manager(self.db)
        now = self._store.now()
        live = locks.filter(Q(free_at__isnull=True) | Q(free_at__gt=now), pk__in=names)
        return list(live.values_list("pk", flat=True))

    def paused_until(self, name: str) -> datetime | None:
        """Return until when a key is paused, if it ever was."""
        rows = self.filter(pk=name).values_list("paused_until", flat=True)
        until: datetime | None = rows.first()
        return until

    def pause(self, name: str, key: str, until: datetime, by: str | None, *, bound: float) -> None:
        """Let nobody be granted the key until then."""
        with self.turn(name, key, bound):
            self._lock_or_make(name, key)
            self.filter(pk=name).update(paused_until=until, paused_by=by)

    def resume(self, name: str, *, bound: float) -> bool:
        """End a pause; return whether there was one."""
        with self._store.short_transaction(bound):
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
    """Refuse a fixture (`loaddata`) that is older than the counter it would overwrite."""
    if raw:
        stored = type(instance).objects.using(using).filter(pk=instance.pk)
        if stored.filter(fence__gt=instance.fence).exists():
            refuse_change("lowered")


def refuse_change(what: str) -> NoReturn:
    """Refuse what could make a counter hand out a fence again."""
    raise LockUsageError(
        f"Fence counters are never {what}: the same fences would be handed out again, and stale"
        f" writers would pass. They are counted up by grants alone."
    )


def _live(row: HeldLock, now: datetime) -> Record | None:
    record = row.as_record()
    return record if record.is_live(now) else None


def _between(rows: models.QuerySet[M], prefix: str, after: str | None) -> models.QuerySet[M]:
    """Return the rows whose storage keys start with `prefix` and come after another."""
    rows = rows.filter(pk__gte=prefix)
    if (end := prefix_end(prefix)) is not None:
        rows = rows.filter(pk__lt=end)
    return rows if after is None else rows.filter(pk__gt=after)


def _by_key(manager: models.Manager[M], names: Sequence[str]) -> Iterator[models.QuerySet[M]]:
    """Return the rows with these keys, which are locked already, in as few querysets as may be."""
    if vendors.of(manager.db).locks_what_it_scans:
        yield from (manager.filter(pk=name) for name in names)
    else:
        yield manager.filter(pk__in=names)


def _only(rows: models.QuerySet[M]) -> M | None:
    """Return the one row, if it is there.

    Not by `first()`: its LIMIT cannot be locked on every database.
    """
    return next(iter(rows), None)
