"""The lock's transactions as ORM code, for every database.

On PostgreSQL the four that are called all the time exist a second time as functions
(`sql/postgresql/`, `functions.py`), with the same behaviour in one round trip. Locks are taken in
the order advisory(key), fence row, lock row, here and everywhere, and the clock is read after the
last of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from django.apps import apps
from django.db import models
from django.db.models import Q

from . import vendors
from .core.durations import MAX_BOUND
from .core.errors import LockError, LockUsageError
from .core.holders import Holder
from .core.keys import prefix_end
from .core.records import (
    FENCE_MAX,
    FENCE_WARNING,
    UNKNOWN,
    Contended,
    Grant,
    Record,
    Unknown,
    lease_ends,
)

if TYPE_CHECKING:
    from .models import FenceCounter, HeldLock

logger = logging.getLogger("django_distlock")


class HeldLockManager(models.Manager["HeldLock"]):
    """Operations on held locks. Each runs in a transaction of its own.

    The database errors of a busy store pass through: `vendors.is_busy` tells them.
    """

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
        # Read first: whoever loses takes no lock and writes nothing.
        answer = self._contention(name, replace=replace, wanted=wanted, bound=bound)
        if answer is not None:
            return answer
        with vendors.short_transaction(self.db, bound):
            vendors.take_turn(self.db, name)
            while True:
                answer = self._contention(name, replace=replace, wanted=wanted, bound=bound)
                if answer is not None:
                    return answer
                counter = self._counters.lock(name)
                row = self.select_for_update().filter(pk=name).first()
                now = vendors.now(self.db)
                if _grantable(row, counter, now, replace):
                    break
            vendors.make_durable(self.db)
            fence = self._counters.advance(name, key, counter)
            expires_at, free_at = lease_ends(now, ttl)
            values = {
                "key": key, "token": token, "fence": fence, "ttl": ttl, "acquired_at": now,
                "renewed_at": now, "expires_at": expires_at, "free_at": free_at, "wanted": False,
                "holder": holder.as_json(), "holder_host": holder.host, "task_id": holder.task_id,
                "stop_requested_at": None,
            }  # fmt: skip
            if row is None:
                self.create(pk=name, **values)
            else:
                self.filter(pk=name).update(**values)
            return Grant(key, token, fence, ttl, now, expires_at)

    def extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        """Replace the ttl of a lease; None: it is gone."""
        with vendors.short_transaction(self.db, bound):
            row, now = self._owned(name, grant.token)
            return None if row is None else self._extend(row, grant, ttl, now)

    def extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        """Extend each lease by its own ttl; a row that somebody holds is skipped as unknown."""
        names = [name for name, _grant in named]
        with vendors.short_transaction(self.db, MAX_BOUND):
            unlocked = self.select_for_update(skip_locked=True).filter(pk__in=names)
            rows = {row.pk: row for row in unlocked.order_by("pk")}
            held = dict(self.filter(pk__in=names).values_list("pk", "token"))
            now = vendors.now(self.db)
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
        with vendors.short_transaction(self.db, bound):
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
        with vendors.short_transaction(self.db, bound, writes=False):
            row = self.filter(**lookup).first()
            return None if row is None else _live(row, vendors.now(self.db))

    def live_records(
        self, prefix: str, after: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> list[Record]:
        """Return up to `limit` live records whose storage keys start with `prefix`, in order."""
        rows = self.filter(pk__gte=prefix)
        if (end := prefix_end(prefix)) is not None:
            rows = rows.filter(pk__lt=end)
        if after is not None:
            rows = rows.filter(pk__gt=after)
        if host is not None:
            rows = rows.filter(holder_host=host)
        if task_id is not None:
            rows = rows.filter(task_id=task_id)
        with vendors.short_transaction(self.db, MAX_BOUND, writes=False):
            now = vendors.now(self.db)
            rows = rows.filter(Q(free_at__isnull=True) | Q(free_at__gt=now))
            return [row.as_record() for row in rows.order_by("pk")[:limit]]

    def shorten(
        self, name: str, seconds: float, token: str | None, *, bound: float
    ) -> Record | None:
        """Let a lease end in `seconds` at the latest."""
        with vendors.short_transaction(self.db, bound):
            row, now = self._owned(name, token)
            if row is None:
                return None
            record = row.as_record().shortened(now, seconds)
            self.filter(pk=name).update(expires_at=record.expires_at, free_at=record.free_at)
            return record

    def force_release(self, name: str, key: str, *, bound: float) -> Record | None:
        """Move the fence on, then remove the record."""
        with vendors.short_transaction(self.db, bound):
            vendors.take_turn(self.db, name)
            counter = self._counters.lock(name)
            row, _now = self._owned(name, None)
            if row is None:
                return None
            vendors.make_durable(self.db)
            self._counters.advance(name, key, counter)
            self.filter(pk=name).delete()
            return row.as_record()

    def request_stop(self, name: str, *, bound: float) -> Record | None:
        """Mark the record for its holder to see."""
        with vendors.short_transaction(self.db, bound):
            row, now = self._owned(name, None)
            if row is None:
                return None
            row.stop_requested_at = row.stop_requested_at or now
            self.filter(pk=name).update(stop_requested_at=row.stop_requested_at)
            return row.as_record()

    def cleanup(self, before: datetime, limit: int) -> int:
        """Remove up to `limit` records that were over before `before`, skipping locked ones."""
        with vendors.short_transaction(self.db, MAX_BOUND):
            before = min(before, vendors.now(self.db))
            over = self.select_for_update(skip_locked=True).filter(free_at__lte=before)
            names = list(over.order_by("pk").values_list("pk", flat=True)[:limit])
            return self.filter(pk__in=names).delete()[0]

    def remove_expired(self, **lookup: Any) -> int:
        """Remove the record that `lookup` finds if it is over and nobody has it locked."""
        with vendors.short_transaction(self.db, MAX_BOUND):
            found = self.select_for_update(skip_locked=True).filter(**lookup)
            row = found.filter(free_at__lte=vendors.now(self.db)).first()
            return 0 if row is None else self.filter(pk=row.pk).delete()[0]

    @property
    def _counters(self) -> FenceCounterManager:
        counters: FenceCounterManager = apps.get_model(
            "django_distlock", "FenceCounter"
        ).objects.db_manager(self.db)
        return counters

    def _contention(
        self, name: str, *, replace: str | None, wanted: bool, bound: float
    ) -> Contended | None:
        while True:
            with vendors.short_transaction(self.db, bound, writes=False):
                row = self.filter(pk=name).first()
                paused_until = self._counters.paused_until(name)
                now = vendors.now(self.db)
            paused = paused_until is not None and now < paused_until
            record = None if row is None else _live(row, now)
            if record is None:
                return Contended(observed_at=now, paused=True) if paused else None
            if record.token == replace and not paused:
                return None
            if not wanted or record.wanted or self._mark_wanted(name, record.token, bound):
                return record.contended(now, paused=paused)

    def _mark_wanted(self, name: str, token: str, bound: float) -> bool:
        """Ask for a wake-up at the end of this grant; False: it ended or was marked meanwhile."""
        with vendors.short_transaction(self.db, bound):
            return bool(self.filter(pk=name, token=token, wanted=False).update(wanted=True))

    def _owned(self, name: str, token: str | None) -> tuple[HeldLock | None, datetime]:
        """Lock a row, then judge it by the clock: in this order, a wait cannot blur the answer.

        Args:
            token: The token it must have; None: any.
        """
        row = self.select_for_update().filter(pk=name).first()
        now = vendors.now(self.db)
        if row is None or not row.as_record().is_owned(token, now):
            return None, now
        return row, now

    def _extend(self, row: HeldLock, grant: Grant, ttl: float | None, now: datetime) -> Grant:
        vendors.make_durable(self.db)
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

    def lock(self, name: str) -> FenceCounter | None:
        """Lock the counter of a key at once, or raise: a guard may hold it for long."""
        # Its key never changes, so the weaker lock does: foreign keys to it could go on.
        no_key = vendors.has_no_key_locks(self.db)
        rows = self.select_for_update(nowait=True, no_key=no_key)
        row: FenceCounter | None = rows.filter(pk=name).first()
        return row

    def advance(self, name: str, key: str, counter: FenceCounter | None) -> int:
        """Return the next fence of a key, of which `counter` is the locked row."""
        fence = 1 if counter is None else counter.fence + 1
        check_fence(key, fence)
        if counter is None:
            self.create(pk=name, key=key, fence=fence)
        else:
            models.QuerySet.update(self.filter(pk=name), fence=fence)
        return fence

    def paused_until(self, name: str) -> datetime | None:
        """Return until when a key is paused, if it ever was."""
        rows = self.filter(pk=name).values_list("paused_until", flat=True)
        until: datetime | None = rows.first()
        return until

    def pause(self, name: str, key: str, until: datetime, by: str | None, *, bound: float) -> None:
        """Let nobody be granted the key until then."""
        with vendors.short_transaction(self.db, bound):
            vendors.take_turn(self.db, name)
            if self.lock(name) is None:
                self.create(pk=name, key=key, fence=0, paused_until=until, paused_by=by)
            else:
                self.filter(pk=name).update(paused_until=until, paused_by=by)

    def resume(self, name: str, *, bound: float) -> bool:
        """End a pause; return whether there was one."""
        with vendors.short_transaction(self.db, bound):
            counter = self.lock(name)
            if counter is None or counter.paused_until is None:
                return False
            self.filter(pk=name).update(paused_until=None, paused_by=None)
            was_paused: bool = vendors.now(self.db) < counter.paused_until
            return was_paused


def check_fence(key: str, fence: int) -> None:
    """Warn before a key runs out of fences, and refuse the one behind the last.

    Raises:
        LockError: `fence` is above the maximum.
    """
    if fence > FENCE_MAX:
        raise LockError(f"The key {key!r} has used up its fences ({FENCE_MAX}).", key=key)
    if fence > FENCE_WARNING:
        logger.warning("The fence of %r is %d; %d is the last.", key, fence, FENCE_MAX)


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


def _grantable(
    row: HeldLock | None, counter: FenceCounter | None, now: datetime, replace: str | None
) -> bool:
    if counter is not None and counter.paused_until is not None and now < counter.paused_until:
        return False
    return row is None or row.token == replace or not row.as_record().is_live(now)
