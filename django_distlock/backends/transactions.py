"""Lock keys in the database until the caller's transaction ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.utils import DatabaseError, InterfaceError

from ..core.clock import monotonic
from ..core.durations import MAX_BOUND
from ..core.errors import LockUsageError
from ..core.keys import OWN_MARKER, whole_name
from ..core.records import Contended, InTheWay, KeptKey, KeysAsked
from ..database import vendors
from ..database.connections import has_the_file, older_snapshot, require_transaction
from ..database.server_functions import ServerFunctions, contended
from ..managers.lock import HeldLockManager
from .guards import postgresql_kept_keys
from .tables import FenceTable

if TYPE_CHECKING:
    from ..models import HeldLock

#: How many values a statement takes on every database.
_VALUES = 500


class TransactionLocks(FenceTable):
    """Transaction locks for a backend whose locks are rows.

    PostgreSQL has advisory locks for a transaction, and one function does everything. On MariaDB
    and MySQL, rows of the fence table are locked. On SQLite, the transaction becomes the writer of
    the file.
    """

    _hot: Any  # A manager, or the functions of PostgreSQL.
    _name: Callable[[str], str]
    _locks_on: Callable[[str], HeldLockManager]

    def _lock_for_transaction(self, asked: KeysAsked) -> InTheWay | None:
        connection = connections[asked.using]
        require_transaction(connection, "transaction_lock()", "decorate with @transaction_locked")
        names = {self._name(key): key for key in asked.keys}
        lock = {
            "postgresql": self._call_function,
            "mysql": self._lock_rows,
            "sqlite": self._take_the_file,
        }[connection.vendor]
        try:
            return lock(names, asked)
        except (DatabaseError, InterfaceError) as error:
            if vendors.of(asked.using).is_read_only(error):
                raise LockUsageError(
                    f"A read-only transaction cannot lock keys: {error}", code="unsupported"
                ) from error
            raise self._connections.translated(error, None) from error

    def _kept_by_transactions(self, limit: int) -> Sequence[KeptKey] | None:
        if connections[self.using].vendor != "postgresql":
            # MySQL and MariaDB show the owner of a lock only while somebody waits for it.
            return None

        def look(on: str) -> tuple[KeptKey, ...]:
            tables = {"fences": self._connections.name("fences"), "salt": self._salt}
            return postgresql_kept_keys(on, tables, self._namespace(), limit)

        found: tuple[KeptKey, ...] = self._connections.ask_within(look, long=True)
        return found

    def _call_function(self, names: Mapping[str, str], asked: KeysAsked) -> InTheWay | None:
        functions = self._hot.db_manager(asked.using)
        assert isinstance(functions, ServerFunctions)  # noqa: S101 - or it is not supported
        outcome, key, facts = functions.transaction_lock([*names], asked)
        if outcome == "snapshot":
            raise older_snapshot(asked.using)
        if outcome == "locked" or key is None:
            return None
        return InTheWay(key, contended(outcome, *facts), deadlock=outcome == "deadlock")

    def _lock_rows(self, names: Mapping[str, str], asked: KeysAsked) -> InTheWay | None:
        """Lock the fence row of each key shared, which stops leases, and then its door row.

        An acquire treats a fence row that others have locked shared as guarded. So another row, the
        door, is locked shared or exclusively, as the caller asks for.
        """
        until = monotonic() + asked.bound
        # Leases are looked for first, because locked rows stay locked until the transaction ends.
        if (found := self._look_beside(names, asked, locked=False)) is not None:
            return found
        vendor, fences = vendors.of(asked.using), self._connections.name("fences")
        self._make_rows(names, min(asked.bound, MAX_BOUND))
        for name, key in names.items():
            for row, is_shared in ((_door(name), asked.keys[key]), (name, True)):
                left = max(0.0, until - monotonic())
                try:
                    if not vendor.lock_row(fences, row, left, shared=is_shared):
                        # A missing row cannot be locked.
                        return InTheWay(key, Contended(busy=True))
                except DatabaseError as error:
                    if not vendor.is_busy(error):
                        raise
                    if vendor.has_rolled_back(error):
                        transaction.set_rollback(True, asked.using)
                    # Only transaction locks use doors, so a locked door means that one holds it.
                    answer = Contended(busy=True, guarded=row != name)
                    return InTheWay(key, answer, deadlock=vendor.is_deadlock(error))
            asked.stays.add(key)
        found = self._look_beside(names, asked, locked=True)
        if found is None or found.answer.fence is None or found.key == [*names.values()][-1]:
            return found
        # A lease was granted meanwhile. Its holder may wait for a key that is locked here by now.
        return InTheWay(found.key, found.answer, deadlock=True)

    def _look_beside(
        self, names: Mapping[str, str], asked: KeysAsked, *, locked: bool
    ) -> InTheWay | None:
        """Look for leases on another connection: the caller's may read from a snapshot, or lock.

        Args:
            locked: Whether the caller has locked the keys, which keeps guards out as well.
        """
        bound = min(asked.bound, MAX_BOUND)

        def look(on: str) -> InTheWay | None:
            with vendors.of(on).short_transaction(bound):
                # Wait for an extend in flight, which may revive a lease that looks expired.
                now, locks = vendors.of(on).now(), self._connections.name("locks")
                for name in self._over(on, names, asked, now):
                    vendors.of(on).lock_row(locks, name, bound, shared=True)
                # A lease that has ended since then counts as held.
                found = self._look(names, asked, on, now)
                return found if locked or found else self._guarded(names, asked, on)

        busy = InTheWay(next(iter(names.values())), Contended(busy=True))
        found: InTheWay | None = self._connections.ask(look, bound=bound, busy=lambda: busy)
        return found

    def _guarded(self, names: Mapping[str, str], asked: KeysAsked, on: str) -> InTheWay | None:
        """Look for the guard of an expired lease: it has locked the fence row shared, but no door.

        A transaction lock has locked both, and cannot have done so beside a guard.
        """
        own = self._locks_on(on).filter(token__in=asked.tokens).values_list("pk", flat=True)
        for some in _parts(names.keys() - set(own)):
            leased = self._counters_on(on).filter(pk__in=some, fence__gt=0)
            for name in leased.values_list("pk", flat=True):
                if self._is_locked(on, name) and not self._is_locked(on, _door(name)):
                    return InTheWay(names[name], Contended(busy=True))
        return None

    def _is_locked(self, on: str, row: str) -> bool:
        try:
            self._counters_on(on).lock(row)
        except DatabaseError as error:
            if not vendors.of(on).is_busy(error):
                raise
            return True
        return False

    def _over(
        self, on: str, names: Mapping[str, str], asked: KeysAsked, now: datetime
    ) -> list[str]:
        leases = (row for some in _parts(names) for row in self._leases(on, some, names, asked))
        return [row.pk for row in leases if not row.is_live(now)]

    def _leases(
        self, on: str, some: Sequence[str], names: Mapping[str, str], asked: KeysAsked
    ) -> Iterator[HeldLock]:
        """Yield the rows of storage keys: of who shares one, where it is to be locked alone."""
        locks = self._locks_on(on)
        yield from locks.filter(pk__in=some)
        yield from locks.places_of([each for each in some if not asked.keys[names[each]]])

    def _make_rows(self, names: Mapping[str, str], bound: float) -> None:
        """Create the rows to lock, because locking a missing row would lock a gap."""
        rows = {each: key for name, key in names.items() for each in (name, _door(name))}

        def make(on: str) -> None:
            counters = self._counters.db_manager(on)
            for some in _parts(rows):
                there = set(counters.filter(pk__in=some).values_list("pk", flat=True))
                missing = [each for each in some if each not in there]
                with vendors.of(on).short_transaction(bound):
                    counters.bulk_create(
                        [counters.model(pk=each, key=rows[each], fence=0) for each in missing],
                        ignore_conflicts=True,
                    )

        # Busy: another transaction has just created and locked one, or a backup blocks commits.
        self._connections.ask(make, bound=bound, busy=lambda: None)

    def _take_the_file(self, names: Mapping[str, str], asked: KeysAsked) -> InTheWay | None:
        # Leases are looked for first: they cannot be released while this transaction has the file.
        if not has_the_file(connections[asked.using]):
            found: InTheWay | None = self._connections.ask(
                lambda on: self._look(names, asked, on, vendors.of(on).now()),
                writes=False,
                busy=lambda: None,
            )
            if found is not None:
                return found
        vendor, fences = vendors.of(asked.using), self._connections.name("fences")
        try:
            vendor.lock_row(fences, "", asked.bound, shared=False)
        except DatabaseError as error:
            if vendor.is_overtaken(error):
                raise LockUsageError(
                    f"The transaction on {asked.using!r} has read before another connection wrote,"
                    " and can no longer write. Lock the keys before it reads, or set OPTIONS"
                    ' ["transaction_mode"] to "IMMEDIATE".',
                    code="unsupported",
                ) from error
            if not vendor.is_busy(error):
                raise
            return InTheWay(next(iter(names.values())), Contended(busy=True, guarded=True))
        found = self._look(names, asked, asked.using, vendor.now())
        # The lease cannot be released before this transaction ends.
        return None if found is None else InTheWay(found.key, found.answer, deadlock=True)

    def _look(
        self, names: Mapping[str, str], asked: KeysAsked, on: str, now: datetime
    ) -> InTheWay | None:
        """Return somebody else's lease on one of these keys, or a pause."""
        for some in _parts(names):
            for row in self._leases(on, some, names, asked):
                if row.is_live(now) and row.token not in asked.tokens:
                    return InTheWay(names[whole_name(row.pk)], row.as_record().contended(now))
            paused = self._counters_on(on).filter(pk__in=some, paused_until__gt=now)
            for name in paused.values_list("pk", flat=True):
                return InTheWay(names[name], Contended(observed_at=now, paused=True))
        return None


def _parts(names: Collection[str]) -> Iterator[list[str]]:
    every = list(names)
    return (every[start : start + _VALUES] for start in range(0, len(every), _VALUES))


def _door(name: str) -> str:
    """Return the storage key of the door row of a key, which only transaction locks use."""
    return f"{OWN_MARKER}door:{hashlib.sha256(name.encode()).hexdigest()}"
