"""The transactions on lock rows as ORM code, for every database.

On PostgreSQL the four frequent ones exist a second time as functions (`database/sql/postgresql/`,
`database/server_functions.py`), which do the same in one round trip. Here and there, locks are
taken in this order: the turn (PostgreSQL: an advisory lock on the key), the fence row, the lock
row. The clock is read after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from django.apps import apps
from django.db import connections, models
from django.db.models import F, Q

from ..core.durations import MAX_BOUND
from ..core.keys import PLACE_MARKER, is_place, prefix_end, whole_name
from ..core.records import (
    SPOILED,
    UNKNOWN,
    Attempt,
    Contended,
    Freed,
    Grant,
    Holder,
    Record,
    Unknown,
    Unreadable,
    instant,
    known_holder,
    lease_ends,
    to_microseconds,
)
from ..core.secrets import Token
from ..core.sharing import DOOR_SECONDS, in_the_way, last_to_end
from ..database.connections import rows_of
from ..database.fields import number_in
from .fence import FenceCounterManager
from .fence import refuse_lower_fence as refuse_lower_fence
from .rows import MOST, StoreManager, between, only, remove

if TYPE_CHECKING:
    from ..models import FenceCounter, HeldLock

L = TypeVar("L")

#: The end of a door that is not closed: see `FenceCounter.closed_until`.
_NEVER: Final = datetime.fromtimestamp(0, UTC)

#: Fields of `Record` that are columns of instants.
_INSTANTS = (
    "acquired_at", "renewed_at", "expires_at", "free_at", "stop_requested_at", "renewed_until",
)  # fmt: skip
#: What `_recorded` takes.
_COLUMNS: tuple[str | models.ExpressionWrapper[F], ...] = (
    "storage_key", "holder", "key", "token", "fence", "ttl", "wanted", *map(number_in, _INSTANTS),
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


class HeldLockManager(StoreManager["HeldLock"]):
    """Operations on held locks. Each runs in a transaction of its own.

    Database errors of a busy store are passed on: `Vendor.is_busy` recognises them.
    """

    #: Whether fences follow the store's clock.
    follows_clock = False

    def replaced_by(self, kind: Callable[[], L]) -> L:
        """Return a manager of another class for the same rows on the same alias."""
        made: Any = kind()
        made.model, made._db, made.follows_clock = self.model, self._db, self.follows_clock
        return cast("L", made)

    def acquire(self, attempt: Attempt) -> Grant | Contended | None:
        """Grant the key if it is free; None: it is shared, or was: see `share`."""
        store, counters = self._store, self._counters
        name, key, bound = attempt.name, attempt.key, attempt.bound
        while True:
            # Read first, so that a refused attempt neither locks nor writes anything.
            with store.short_transaction(bound, writes=False):
                contended, row, is_shared = self._look(attempt)
            if contended is None:
                if is_shared:
                    return None
                with counters.turn(name, key, bound) as waited:
                    if waited:
                        contended, row, _ = self._look(attempt)
                    if contended is None and (free := self._lock_free(attempt)):
                        counter, over, now = free
                        fence = counters.advance(name, key, counter, self._floor(now))
                        return self._grant(
                            attempt, fence, over, now, [] if over is None else [over]
                        )
            if contended is not None:
                if not attempt.wanted or row is None or row.wanted:
                    return contended
                marked = self._mark_wanted(row, bound)
                if marked is not None:
                    # If it was shortened before it was marked, no waiter was told.
                    ends = {"expires_at": marked.expires_at, "free_at": marked.free_at}
                    return changed(contended, **ends)
            # Somebody has released or marked it meanwhile: look again.

    def share(self, attempt: Attempt) -> Grant | Contended:
        """Grant a key shared, or a shared one exclusively: see `in_the_way`."""
        name, bound, counters = attempt.name, attempt.bound, self._counters
        while True:
            # Read first, so that a refused attempt locks nothing, and writes only new marks.
            with self._store.short_transaction(bound, writes=False):
                seen = self._seen_by(attempt, counters.filter(pk=name).first())
            if seen.contended is not None and not (attempt.wanted and self._is_news(attempt, seen)):
                return seen.contended
            with counters.turn(name, attempt.key, bound, shared=attempt.shared):
                # Others that share the key lock the counter only for moments.
                counter = counters.lock(name, wait=True)
                settled = self._settle_over(attempt)
                seen = self._seen_by(attempt, counter)
                over = [row for row in seen.rows if not self._stays(attempt, row, seen.now)]
                if seen.contended is None and settled.issuperset(row.pk for row in over):
                    return self._grant_among(attempt, seen, over)
                if seen.contended is not None and self._mark_all(attempt, seen):
                    return seen.contended
            # One of the leases has ended meanwhile: look again.

    def open_door(self, name: str) -> None:
        """Let others share a key that a waiter to hold it alone has given up."""
        with self._store.short_transaction(MAX_BOUND):
            closed = self._counters.filter(pk=name, closed_until__gt=_NEVER)
            if closed.update(closed_until=_NEVER):
                self._store.call_out(name)

    def extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        """Let a lease end a ttl from now; None: it is gone."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, grant.token)
            if row is None:
                return None
            extended = self._extend(row, grant, ttl, now)
            if extended is not None:
                self._call_out_if_sooner(row, lease_ends(now, ttl)[1])
            return extended

    def extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        """Extend each lease by its own ttl; a locked row is skipped as `UNKNOWN`.

        No wake-up is sent, because a renewal by the same ttl never makes a key free sooner.
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
        """Release the key, or keep it taken for `held` seconds from the grant."""
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

    def read_key(self, name: str, *, bound: float = MAX_BOUND) -> Record | None:
        """Return the live record of a key; if several share it, the one that ends last."""
        with self._store.short_transaction(bound, writes=False):
            rows, now = self._rows_of(name), self._store.now()
            live = [record for row in rows if (record := _live(row, now)) is not None]
            return last_to_end(live) if live else None

    def sharing(self, name: str) -> list[Record]:
        """Return the live records of all that share a key."""
        with self._store.short_transaction(MAX_BOUND, writes=False):
            return [row.as_record() for row in self._store.live(self._places(name))]

    def read_many(self, names: Sequence[str]) -> dict[str, Record]:
        """Return the live records of these storage keys, with one statement for each thousand."""
        found: dict[str, list[Record]] = {}
        with self._store.short_transaction(MAX_BOUND, writes=False):
            for start in range(0, len(names), 1000):
                part = names[start : start + 1000]
                alone, places = self.filter(pk__in=part), self.places_of(part)
                for row in self._store.live(alone).union(self._store.live(places), all=True):
                    found.setdefault(whole_name(row.pk), []).append(row.as_record())
        return {name: last_to_end(each) for name, each in found.items()}

    def places_of(self, names: Sequence[str]) -> models.QuerySet[HeldLock]:
        """Return the rows of all that share one of these keys, expired ones included."""
        if not names:
            return self.none()
        locks, fences = self._tables
        start, end = (
            f"CONCAT({fences}.storage_key, '{mark}')"
            if connections[self.db].vendor == "mysql"
            else f"{fences}.storage_key || '{mark}'"
            for mark in (PLACE_MARKER, prefix_end(PLACE_MARKER))
        )
        among = ", ".join(["%s"] * len(names))
        # A join that the ORM cannot express: from the few shared counters to their places.
        return self.extra(  # noqa: S610 - names of our own
            tables=[fences],
            where=[
                f"{fences}.storage_key IN ({among}) AND {fences}.closed_until IS NOT NULL",
                f"{locks}.storage_key >= {start} AND {locks}.storage_key < {end}",
            ],
            params=[*names],
        )

    def live_records(
        self, prefix: str, after: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> list[tuple[str, Record | Unreadable]]:
        """Return up to `limit` live records whose storage keys start with `prefix`, in order.

        Each with its storage key.
        """
        rows = between(self.all(), prefix, after)
        if host is not None:
            rows = rows.filter(holder_host=host)
        if task_id is not None:
            rows = rows.filter(task_id=task_id)
        with self._store.short_transaction(MAX_BOUND, writes=False):
            rows = self._store.live(rows).order_by("pk")[:limit]
            return _records(rows, Holder.from_json)

    def expired(self, prefix: str, name: str | None, limit: int) -> list[Record]:
        """Return expired leases whose storage keys start with `prefix`, if they can be read."""
        with self._store.short_transaction(MAX_BOUND, writes=False):
            rows = between(self.all(), prefix, None)
            rows = rows.filter(expires_at__lte=self._store.now(), free_at__gt=F("expires_at"))
            if name is not None:
                rows = rows.filter(Q(pk=name) | _is_place(name))
            found = _records(rows.order_by("-expires_at")[:limit], known_holder)
            return [each for _name, each in found if isinstance(each, Record)]

    def request_stop(
        self, name: str, within: float | None, token: str | None, fence: int | None, *, bound: float
    ) -> Record | None:
        """Mark the record for its holder, and end its renewals after `within` seconds."""
        with self._store.short_transaction(bound):
            row, now = self._owned(name, token, fence)
            if row is None:
                return None
            record = row.as_record().asked_to_stop(now, within)
            self.filter(pk=name).update(
                expires_at=record.expires_at,
                free_at=record.free_at,
                stop_requested_at=record.stop_requested_at,
                renewed_until=record.renewed_until,
            )
            self._call_out_if_sooner(row, record.free_at)
            return record

    def force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | None:
        """Raise the fence, then remove the record."""
        with self._store.short_transaction(bound, writes=False):
            if not self.filter(pk=name).exists():
                return None  # And no counter is created for a key that nobody ever held.
        counted = whole_name(name)
        with self._counters.turn(counted, key, bound):
            counter = self._counters.lock(counted)
            row, now = self._owned(name, None, fence)
            if row is None:
                return None
            self._store.make_durable()
            self._counters.advance(counted, key, counter, self._floor(now))
            self.filter(pk=name).delete()
            self._call_out(row)
            return row.as_record()

    def cleanup(self, before: datetime, limit: int, after: str | None) -> tuple[int, str | None]:
        """Remove up to `limit` records that ended before `before`, skipping locked ones.

        Each call continues where the one before has stopped, so that live records are read only
        once by many calls. After the last record, the next call starts again.

        Args:
            after: The storage key that the call before has returned.

        Returns:
            How many records were removed, and the storage key where this call has stopped.
        """
        is_postgresql = connections[self.db].vendor == "postgresql"
        clean = self._clean_at_once if is_postgresql else self._clean
        with self._store.short_transaction(MAX_BOUND):
            before = min(before, self._store.now())
            gone, came_to = clean(after or "", before, limit)
            if after and came_to is None:
                gone += clean("", before, limit - gone)[0]
            return gone, came_to

    def _clean_at_once(self, after: str, before: datetime, limit: int) -> tuple[int, str | None]:
        rows = self.model._meta.db_table
        found = rows_of(self.db, _CLEAN % (rows, rows), to_microseconds(before), after, limit)
        gone, last = found[0]
        return gone, last if gone == limit else None

    def _clean(self, after: str, before: datetime, limit: int) -> tuple[int, str | None]:
        """Remove the next records; return how many, and the last of them if there may be more."""
        over = self.filter(free_at__lte=before).order_by("pk")
        limit = min(limit, MOST)
        names = list(over.filter(pk__gt=after).values_list("pk", flat=True)[:limit])
        # In a statement of its own: not every database can lock what LIMIT leaves.
        unlocked = over.select_for_update(skip_locked=True).filter(pk__in=names)
        gone = self._store.delete(self.all(), list(unlocked.values_list("pk", flat=True)))
        return gone, names[-1] if len(names) == limit else None

    def remove_expired(self, **lookup: Any) -> int:
        """Remove the record that `lookup` finds if it has ended and is not locked."""
        with self._store.short_transaction(MAX_BOUND):
            return remove(self.filter(free_at__lte=self._store.now(), **lookup), 1)

    @property
    def _tables(self) -> tuple[str, str]:
        """The quoted names of the tables of locks and of fence counters."""
        quote, counters = connections[self.db].ops.quote_name, self._counters.model
        return quote(self.model._meta.db_table), quote(counters._meta.db_table)

    @property
    def _counters(self) -> FenceCounterManager:
        counters: FenceCounterManager = apps.get_model(
            "django_distlock", "FenceCounter"
        ).objects.db_manager(self.db)
        return counters

    def _floor(self, now: datetime) -> datetime | None:
        return now if self.follows_clock else None

    def _look(self, attempt: Attempt) -> tuple[Contended | None, HeldLock | None, bool]:
        """Return why the key cannot be had, the live row in the way, and whether it was shared."""
        row = self.filter(pk=attempt.name).first()
        counter = self._counters.filter(pk=attempt.name).first()
        paused_until, closed_until = _gates(counter)
        now = self._store.now()
        live = None if row is None else _live(row, now)
        holders = [] if live is None else [live]
        kept = in_the_way(attempt, holders, None, paused_until, now)
        return kept, row if holders else None, closed_until is not None

    def _lock_free(
        self, attempt: Attempt
    ) -> tuple[FenceCounter | None, HeldLock | None, datetime] | None:
        """Lock the rows that a grant changes; None: the key is not available any more.

        Returns:
            The counter and the expired record, if they exist, and the time of the grant.
        """
        counter = self._counters.lock(attempt.name)
        row = only(self.select_for_update().filter(pk=attempt.name))
        now = self._store.now()
        paused_until, closed_until = _gates(counter)
        if closed_until is not None or (paused_until is not None and now < paused_until):
            return None
        record = None if row is None else _live(row, now)
        if record is not None and not attempt.may_replace(record):
            return None
        return counter, row, now

    def _grant(
        self,
        attempt: Attempt,
        fence: int,
        over: HeldLock | None,
        now: datetime,
        before: Sequence[HeldLock],
    ) -> Grant:
        """Write the record of a grant, replacing the rows that it ends."""
        self._store.make_durable()
        replaced = [row.as_record() for row in before if row.is_live(now)]
        record, holder = attempt.record(fence, now, replaced), attempt.holder
        values: dict[str, Any] = {
            "storage_key": attempt.place, "key": attempt.key, "token": attempt.token,
            "fence": fence, "ttl": attempt.ttl, "acquired_at": now, "renewed_at": now,
            "expires_at": record.expires_at, "free_at": record.free_at, "wanted": False,
            "holder": holder.as_json(), "holder_host": holder.host, "task_id": holder.task_id,
            "stop_requested_at": record.stop_requested_at, "renewed_until": record.renewed_until,
        }  # fmt: skip
        if over is None:
            self.create(**values)
        else:
            self.filter(pk=over.pk).update(**values)
            # The mark is gone with the grant before, so the waiters have to mark this one.
            self._call_out(over)
        return attempt.grant(fence, now, lease_ends(now, attempt.ttl)[0])

    def _mark_wanted(self, row: HeldLock, bound: float) -> HeldLock | None:
        """Mark a grant for a wake-up, and return its row; None: it has ended, or was marked."""
        with self._store.short_transaction(bound):
            # Locked first: some databases limit the wait of an UPDATE only in whole seconds.
            rows = self.select_for_update().filter(pk=row.pk, token=row.token, wanted=False)
            marked = only(rows)
            if marked is not None:
                self.filter(pk=row.pk).update(wanted=True)
            return marked

    def _call_out(self, row: HeldLock) -> bool:
        """Send a wake-up if somebody waits for the key; return whether somebody does."""
        if row.wanted:
            self._store.call_out(whole_name(row.pk))
        return row.wanted

    def _call_out_if_sooner(self, row: HeldLock, free_at: datetime | None) -> None:
        """Send a wake-up if somebody waits for the key, and it becomes free sooner than before."""
        if free_at is not None and (row.free_at is None or free_at < row.free_at):
            self._call_out(row)

    def _owned(
        self, name: str, token: str | None, fence: int | None = None
    ) -> tuple[HeldLock | None, datetime]:
        """Lock a row, then compare it with the clock: in this order, a wait does no harm."""
        row = only(self.select_for_update().filter(pk=name))
        now = self._store.now()
        record = None if row is None else row.as_record()
        if record is None or not (record.is_owned(token, now) and record.is_seen(fence)):
            return None, now
        return row, now

    def _extend(
        self, row: HeldLock, grant: Grant, ttl: float | None, now: datetime
    ) -> Grant | None:
        before = row.as_record()
        record = before.extended(now, ttl)
        if record is None:
            return None
        self._store.make_durable()
        self.filter(pk=row.pk).update(
            ttl=ttl, renewed_at=now, expires_at=record.expires_at, free_at=record.free_at
        )
        return before.renewal(grant, ttl, now)

    # Shared keys. A row for another holder is only created with the key's counter locked.

    def _rows_of(self, name: str) -> list[HeldLock]:
        return [*self.filter(pk=name), *self._places(name)]

    def _places(self, name: str) -> models.QuerySet[HeldLock]:
        return self.filter(_is_place(name)).order_by("pk")

    def _seen_by(self, attempt: Attempt, counter: FenceCounter | None) -> _Seen:
        rows, now = self._rows_of(attempt.name), self._store.now()
        live = [row for row in rows if row.is_live(now)]
        records = [row.as_record() for row in live]
        paused_until, closed_until = _gates(counter)
        contended = in_the_way(attempt, records, closed_until, paused_until, now)
        return _Seen(counter, rows, live, now, contended)

    def _stays(self, attempt: Attempt, row: HeldLock, now: datetime) -> bool:
        """Whether a grant leaves the row of another holder in place."""
        return row.is_live(now) and not attempt.may_replace(row.as_record())

    def _settle_over(self, attempt: Attempt) -> set[str]:
        """Lock rows that look expired or are replaced, because an extend may be in flight.

        Returns:
            The rows. One that has expired since may still be extended until it is locked, too.
        """
        now = self._store.now()
        rows = [row for row in self._rows_of(attempt.name) if not self._stays(attempt, row, now)]
        for row in rows:
            only(self.select_for_update().filter(pk=row.pk))
        return {row.pk for row in rows}

    def _is_news(self, attempt: Attempt, seen: _Seen) -> bool:
        """Whether a holder is not marked yet, or the door is not closed yet."""
        if any(not row.wanted for row in seen.live):
            return True
        _paused_until, until = _gates(seen.counter)
        half = timedelta(seconds=DOOR_SECONDS / 2)
        return not attempt.shared and until is not None and until < seen.now + half

    def _mark_all(self, attempt: Attempt, seen: _Seen) -> bool:
        """Mark each grant for a wake-up; False: one has ended meanwhile."""
        if not attempt.wanted:
            return True
        tokens = [row.token for row in seen.live]
        marked = self.filter(pk__in=[row.pk for row in seen.live], token__in=tokens)
        if marked.update(wanted=True) < len(seen.live):
            return False
        if not attempt.shared and any(is_place(row.pk) for row in seen.live):
            until = seen.now + timedelta(seconds=DOOR_SECONDS)
            self._counters.filter(pk=attempt.name).update(closed_until=until)
        return True

    def _grant_among(self, attempt: Attempt, seen: _Seen, over: Sequence[HeldLock]) -> Grant:
        """Write the record of a grant, and remove those that have ended or are replaced."""
        counter, now, name = seen.counter, seen.now, attempt.name
        fence = self._counters.advance(name, attempt.key, counter, self._floor(now))
        was_shared = _gates(counter)[1] is not None
        if attempt.shared != was_shared:
            closed_until = _NEVER if attempt.shared else None
            self._counters.filter(pk=name).update(closed_until=closed_until)
        in_place = next((row for row in over if row.pk == attempt.place), None)
        gone = [row for row in over if row is not in_place]
        if gone:
            self._store.delete(self.all(), [row.pk for row in gone])
            # The mark goes with the record, so its waiters have to mark the next one.
            any(map(self._call_out, gone))
        return self._grant(attempt, fence, in_place, now, over)


class _Seen(NamedTuple):
    """What an attempt at a shared key finds.

    Attributes:
        rows: The rows of all holders, expired ones included.
        live: The rows of live leases.
        contended: Why the key is not available.
    """

    counter: FenceCounter | None
    rows: list[HeldLock]
    live: list[HeldLock]
    now: datetime
    contended: Contended | None


def _gates(counter: FenceCounter | None) -> tuple[datetime | None, datetime | None]:
    """Return until when a key is paused, and until when nobody joins those who share it."""
    return (None, None) if counter is None else (counter.paused_until, counter.closed_until)


def _is_place(name: str) -> Q:
    start = name + PLACE_MARKER
    return Q(pk__gte=start, pk__lt=prefix_end(start))


def _records(
    rows: models.QuerySet[HeldLock], read_holder: Callable[[Any], Holder]
) -> list[tuple[str, Record | Unreadable]]:
    # Without model instances, whose creation would take longer than the query.
    return [_recorded(read_holder, *row) for row in rows.values_list(*_COLUMNS)]


def _recorded(
    read_holder: Callable[[Any], Holder], pk: str, holder: Any, key: str, *values: Any
) -> tuple[str, Record | Unreadable]:
    token, fence, ttl, wanted, *numbers = values
    try:
        instants: dict[str, Any] = dict(zip(_INSTANTS, map(instant, numbers), strict=True))
        return pk, Record(
            key=key,
            token=token,
            fence=fence,
            ttl=ttl,
            holder=read_holder(holder),
            wanted=wanted,
            shared=is_place(pk),
            **instants,
        )
    except SPOILED as error:
        return pk, Unreadable.of(key, error)


def _live(row: HeldLock, now: datetime) -> Record | None:
    record = row.as_record()
    return record if record.is_live(now) else None
