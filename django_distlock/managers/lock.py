"""The lock's transactions as ORM code, for every database.

On PostgreSQL the four that are called all the time exist a second time as functions
(`database/sql/postgresql/`, `database/server_functions.py`), with the same behaviour in one round
trip. Locks are taken in the order turn (PostgreSQL: advisory lock on the key), fence row, lock row,
here and everywhere, and the clock is read after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.apps import apps
from django.db import connections, models
from django.db.models import F

from ..core.durations import MAX_BOUND
from ..core.holders import Holder
from ..core.records import (
    SPOILED,
    UNKNOWN,
    Attempt,
    Contended,
    Freed,
    Grant,
    Record,
    Unknown,
    Unreadable,
    lease_ends,
)
from ..core.secrets import Token
from ..database import vendors
from ..database.fields import to_microseconds
from .fence import FenceCounterManager
from .fence import refuse_lower_fence as refuse_lower_fence
from .rows import between, only

if TYPE_CHECKING:
    from ..models import FenceCounter, HeldLock

L = TypeVar("L")

#: What a record is made of: what the model calls by the same names.
_COLUMNS = (
    "holder", "key", "token", "fence", "ttl", "acquired_at", "renewed_at", "expires_at", "free_at",
    "wanted", "stop_requested_at",
)  # fmt: skip
_CLEAN = """
WITH gone AS (
    DELETE FROM "%s" WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM "%s" WHERE free_at <= %%s AND storage_key > %%s
        ORDER BY storage_key LIMIT %%s FOR UPDATE SKIP LOCKED
    )) RETURNING storage_key
)
SELECT count(*), max(storage_key) FROM gone
"""


class HeldLockManager(models.Manager["HeldLock"]):
    """Operations on held locks. Each runs in a transaction of its own.

    The database errors of a busy store pass through: `Vendor.is_busy` tells them.
    """

    #: Whether no fence is below what the store's clock says.
    follows_clock = False

    def replaced_by(self, kind: Callable[[], L]) -> L:
        """Return a manager of another kind, of the same rows on the same alias."""
        made: Any = kind()
        made.model, made._db, made.follows_clock = self.model, self._db, self.follows_clock
        return cast("L", made)

    def acquire(self, attempt: Attempt) -> Grant | Contended:
        """Grant the key if it is free."""
        store, counters = self._store, self._counters
        name, key, bound = attempt.name, attempt.key, attempt.bound
        while True:
            # Read first: whoever loses takes no lock and writes nothing.
            with store.short_transaction(bound, writes=False):
                contended, row = self._look(attempt)
            if contended is None:
                with counters.turn(name, key, bound) as waited:
                    if waited:
                        contended, row = self._look(attempt)
                    if contended is None and (free := self._lock_free(attempt)):
                        counter, over, now = free
                        fence = counters.advance(name, key, counter, self._floor(now))
                        return self._grant(attempt, fence, over, now)
            if contended is not None:
                if not attempt.wanted or row is None or row.wanted:
                    return contended
                marked = self._mark_wanted(row, bound)
                if marked is not None:
                    # What shortened it before the mark told nobody.
                    ends = {"expires_at": marked.expires_at, "free_at": marked.free_at}
                    return changed(contended, **ends)
            # Released or marked by somebody else meanwhile: look again.

    def extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        """Replace the ttl of a lease; None: it is gone."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, grant.token)
            if row is None:
                return None
            extended = self._extend(row, grant, ttl, now)
            if extended is not None:
                self._call_out_if_sooner(row, lease_ends(now, ttl)[1])
            return extended

    def extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        """Extend each lease by its own ttl; a row that somebody holds is skipped as unknown.

        Nobody is called: a lease that is renewed by the ttl that it has ends later than before.
        """
        names = [name for name, _grant in named]
        with self._store.short_transaction(MAX_BOUND):
            unlocked = self.select_for_update(skip_locked=True).filter(pk__in=names)
            rows = {row.pk: row for row in unlocked.order_by("pk")}
            held = {
                pk: Token(token)
                for pk, token in self.filter(pk__in=names).values_list("pk", "token")
            }
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

    def release(self, name: str, grant: Grant, *, held: float | None = None, bound: float) -> Freed:
        """Give the key back, or keep it taken for `held` seconds since the grant."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, grant.token)
            if row is None:
                return "gone"
            until = None if held is None else row.acquired_at + timedelta(seconds=held)
            if until is None or until <= now:
                self.filter(pk=name).delete()
            else:
                self.filter(pk=name).update(expires_at=until, free_at=until)
            return "wanted" if self._call_out(row) else "released"

    def read(self, *, bound: float = MAX_BOUND, **lookup: Any) -> Record | None:
        """Return the live record that `lookup` finds."""
        with self._store.short_transaction(bound, writes=False):
            row = self.filter(**lookup).first()
            return None if row is None else _live(row, self._store.now())

    def read_many(self, names: Sequence[str]) -> dict[str, Record]:
        """Return the live records among these storage keys, by a statement for each thousand."""
        # One statement sees what is committed, whatever the isolation level.
        found: dict[str, Record] = {}
        for start in range(0, len(names), 1000):
            rows = self.filter(pk__in=names[start : start + 1000])
            found |= {row.pk: row.as_record() for row in self._store.live(rows)}
        return found

    def live_records(
        self, prefix: str, after: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> list[Record | Unreadable]:
        """Return up to `limit` live records whose storage keys start with `prefix`, in order."""
        rows = between(self.all(), prefix, after)
        if host is not None:
            rows = rows.filter(holder_host=host)
        if task_id is not None:
            rows = rows.filter(task_id=task_id)
        with self._store.short_transaction(MAX_BOUND, writes=False):
            rows = self._store.live(rows).order_by("pk")[:limit]
            # Without instances, which take longer to make than all the rest.
            return [_recorded(*row) for row in rows.values_list(*_COLUMNS)]

    def expired(self, prefix: str, name: str | None, limit: int) -> list[Record]:
        """Return leases that nobody gave back, whose storage keys start with `prefix`."""
        with self._store.short_transaction(MAX_BOUND, writes=False):
            rows = between(self.all(), prefix, None)
            rows = rows.filter(expires_at__lte=self._store.now(), free_at__gt=F("expires_at"))
            if name is not None:
                rows = rows.filter(pk=name)
            return [row.as_record() for row in rows.order_by("-expires_at")[:limit]]

    def request_stop(
        self,
        name: str,
        within: float | None,
        token: str | None,
        fence: int | None,
        *,
        bound: float,
    ) -> Record | None:
        """Mark the record for its holder to see, and let it be renewed for `within` at the most."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, token, fence)
            if row is None:
                return None
            record = row.as_record().asked_to_stop(now, within)
            self.filter(pk=name).update(
                expires_at=record.expires_at,
                free_at=record.free_at,
                stop_requested_at=record.stop_requested_at,
            )
            self._call_out_if_sooner(row, record.free_at)
            return record

    def force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | None:
        """Move the fence on, then remove the record."""
        with self._store.short_transaction(bound, writes=False):
            if not self.filter(pk=name).exists():
                return None  # And no counter is made for a key that nobody ever held.
        with self._counters.turn(name, key, bound):
            counter = self._counters.lock(name)
            row, now = self._owned(name, None, fence)
            if row is None:
                return None
            self._store.make_durable()
            self._counters.advance(name, key, counter, self._floor(now))
            self.filter(pk=name).delete()
            self._call_out(row)
            return row.as_record()

    def cleanup(self, before: datetime, limit: int, after: str | None) -> tuple[int, str | None]:
        """Remove up to `limit` records that were over before `before`, skipping locked ones.

        Each call goes on where the one before came to, so that many of them pass live records
        once, and the one that finds nothing any more begins anew.

        Args:
            after: The storage key that the call before came to, as it said.

        Returns:
            How many records have gone, and the storage key that this call came to.
        """
        with self._store.short_transaction(MAX_BOUND):
            before = min(before, self._store.now())
            if connections[self.db].vendor == "postgresql":
                return self._clean(before, limit, after or "")
            over = self.filter(free_at__lte=before)
            names, came_to = self._next(over, limit, after)
            # In a statement of its own: not every database can lock what LIMIT leaves.
            unlocked = over.select_for_update(skip_locked=True).filter(pk__in=names)
            names = list(unlocked.order_by("pk").values_list("pk", flat=True))
            return self._store.delete(self.all(), names), came_to

    def _clean(self, before: datetime, limit: int, after: str) -> tuple[int, str | None]:
        """Remove the next records on PostgreSQL, where one statement does it."""
        gone, last = self._clean_behind(after, before, limit)
        if gone == limit:
            return gone, last
        if after:
            gone += self._clean_behind("", before, limit - gone)[0]
        return gone, None

    def _clean_behind(self, after: str, before: datetime, limit: int) -> tuple[int, str | None]:
        rows = self.model._meta.db_table
        with connections[self.db].cursor() as cursor:
            cursor.execute(_CLEAN % (rows, rows), [to_microseconds(before), after, limit])
            gone, last = cursor.fetchone()
        return gone, last

    def _next(
        self, over: models.QuerySet[HeldLock], limit: int, after: str | None
    ) -> tuple[list[str], str | None]:
        """Return the next of these rows, and which is the last, if there may be more."""
        ordered = over.order_by("pk").values_list("pk", flat=True)
        names = list((ordered if after is None else ordered.filter(pk__gt=after))[:limit])
        if len(names) == limit:
            return names, names[-1]
        if after is not None:
            names += ordered.filter(pk__lte=after)[: limit - len(names)]
        return names, None

    def remove_expired(self, **lookup: Any) -> int:
        """Remove the record that `lookup` finds if it is over and nobody has it locked."""
        with self._store.short_transaction(MAX_BOUND):
            found = self.select_for_update(skip_locked=True).filter(**lookup)
            row = only(found.filter(free_at__lte=self._store.now()))
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

    def _look(self, attempt: Attempt) -> tuple[Contended | None, HeldLock | None]:
        """Return why the key cannot be had, if so, and the live row that is in the way."""
        row = self.filter(pk=attempt.name).first()
        paused_until = self._counters.paused_until(attempt.name)
        now = self._store.now()
        paused = paused_until is not None and now < paused_until
        record = None if row is None else _live(row, now)
        if record is None:
            return Contended(observed_at=now, paused=True) if paused else None, None
        if record.token == attempt.replace and not paused:
            return None, None
        return record.contended(now, paused=paused), row

    def _lock_free(
        self, attempt: Attempt
    ) -> tuple[FenceCounter | None, HeldLock | None, datetime] | None:
        """Lock what a grant changes; None: the key is not to be had any more.

        Returns:
            The counter and the record that is over, where they exist, and the time of the grant.
        """
        counter = self._counters.lock(attempt.name)
        row = only(self.select_for_update().filter(pk=attempt.name))
        now = self._store.now()
        if counter is not None and counter.paused_until is not None and now < counter.paused_until:
            return None
        if row is not None and row.token != attempt.replace and row.as_record().is_live(now):
            return None
        return counter, row, now

    def _grant(self, attempt: Attempt, fence: int, over: HeldLock | None, now: datetime) -> Grant:
        """Write the record of a grant in the place of the one that is over, if there is one."""
        self._store.make_durable()
        expires_at, free_at = lease_ends(now, attempt.ttl)
        holder = attempt.holder
        values: dict[str, Any] = {
            "storage_key": attempt.name, "key": attempt.key, "token": attempt.token,
            "fence": fence, "ttl": attempt.ttl, "acquired_at": now, "renewed_at": now,
            "expires_at": expires_at, "free_at": free_at, "wanted": False,
            "holder": holder.as_json(), "holder_host": holder.host, "task_id": holder.task_id,
            "stop_requested_at": None,
        }  # fmt: skip
        if over is None:
            self.create(**values)
        else:
            self.filter(pk=over.pk).update(**values)
            # Their mark went with the grant before, and they have to mark this one.
            self._call_out(over)
        return attempt.grant(fence, now, expires_at)

    def _mark_wanted(self, row: HeldLock, bound: float) -> HeldLock | None:
        """Ask for a wake-up at the end of this grant.

        Returns:
            The row as of the mark; None: it ended or was marked meanwhile.
        """
        with self._store.short_transaction(bound):
            marked = self.filter(pk=row.pk, token=row.token, wanted=False).update(wanted=True)
            return only(self.filter(pk=row.pk)) if marked else None

    def _call_out(self, row: HeldLock) -> bool:
        """Call a key out if somebody waits for it; return whether so."""
        if row.wanted:
            self._store.call_out(row.pk)
        return row.wanted

    def _call_out_if_sooner(self, row: HeldLock, free_at: datetime | None) -> None:
        """Call a key out if somebody waits for it and it becomes free before `row` says."""
        if free_at is not None and (row.free_at is None or free_at < row.free_at):
            self._call_out(row)

    def _owned(
        self, name: str, token: str | None, fence: int | None = None
    ) -> tuple[HeldLock | None, datetime]:
        """Lock a row, then judge it by the clock: in this order, a wait cannot blur the answer.

        Args:
            token: The token it must have; None: any.
            fence: The fence it must have; None: any.
        """
        row = only(self.select_for_update().filter(pk=name))
        now = self._store.now()
        record = None if row is None else row.as_record()
        if record is None or not (record.is_owned(token, now) and record.is_seen(fence)):
            return None, now
        return row, now

    def _extend(
        self, row: HeldLock, grant: Grant, ttl: float | None, now: datetime
    ) -> Grant | None:
        record = row.as_record().extended(now, ttl)
        if record is None:
            return None
        self._store.make_durable()
        self.filter(pk=row.pk).update(
            ttl=ttl, renewed_at=now, expires_at=record.expires_at, free_at=record.free_at
        )
        stop_requested = row.stop_requested_at is not None
        expires_at = lease_ends(now, ttl)[0]
        return Grant(
            grant.key, row.token, row.fence, ttl, row.acquired_at, expires_at, stop_requested
        )


def _recorded(holder: Any, *values: Any) -> Record | Unreadable:
    fields = dict(zip(_COLUMNS[1:], values, strict=True))
    try:
        return Record(holder=Holder.from_json(holder), **fields)
    except SPOILED as error:
        return Unreadable.of(fields["key"], error)


def _live(row: HeldLock, now: datetime) -> Record | None:
    record = row.as_record()
    return record if record.is_live(now) else None
