"""Shared code of the backends with fence counters in a table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final

from django.db import DEFAULT_DB_ALIAS, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, QuerySet
from django.db.utils import DatabaseError, Error, InterfaceError
from django.utils.connection import ConnectionDoesNotExist

from ..conf import BackendConfig
from ..core.durations import MAX_BOUND
from ..core.errors import InvalidArgument, LockError, LockUsageError, shown
from ..core.keys import HASH_MARKER, namespace, storage_key, whole_name
from ..core.records import Contended, Counter, Grant, Raised, Record, Session
from ..database import vendors
from ..database.borrowing import NoConnectionFree
from ..database.connections import require_transaction, use_own_connections
from ..database.schemas import TableConnections
from ..database.sql import side_table
from ..database.vendors import VENDORS
from ..exceptions import InvalidLockBackend
from ..managers.fence import FenceCounterManager
from ..managers.rows import between, remove
from ..models import MAX_STORAGE_KEY, FenceCounter, HeldLock, RunNote
from .guards import postgresql_guards, postgresql_keepers

#: One in so many new notes removes expired ones, and at most so many of them.
_SWEEP: Final = 200
_SWEPT: Final = 1000

#: Options that may name a database instead of `HOST`, `PORT` and `NAME`.
_TELLING_OPTIONS = (
    *("service", "servicefile", "host", "hostaddr", "port", "dbname"),
    *("read_default_file", "read_default_group", "unix_socket", "database", "db"),
)


def _address(connection: BaseDatabaseWrapper) -> tuple[object, ...]:
    settings = connection.settings_dict
    told = settings["HOST"], settings["PORT"], settings["NAME"]
    if all(told):
        return connection.vendor, *told
    return connection.vendor, *told, *map(settings["OPTIONS"].get, _TELLING_OPTIONS)


class FenceTable:
    """The operations on fence counters and notes, and the way to run statements.

    A mixin for `BaseLockBackend`, to be named before it.
    """

    config: BackendConfig
    alias: str
    key_prefix: str
    storage_key_limit: ClassVar[int] = MAX_STORAGE_KEY
    supports_guard: bool

    def _use_database(self, using: str | None, *, apart: bool = False) -> str:
        """Choose the database and return its vendor; refuse one that cannot keep locks."""
        where = f"DISTLOCK[{self.alias!r}]"
        self.using: str = self._unnamed_database() if using is None else using
        vendor = self._vendor_of(self.using, "using")
        longest = len(self._namespace().encode()) + 512
        if longest > self.storage_key_limit:
            # Listing by prefix reads the storage keys in order, so none of them may be a hash.
            raise InvalidLockBackend(
                f"{where}: KEY_PREFIX is too long: with a key of 512 bytes it makes {longest}"
                f" bytes, and this store takes {self.storage_key_limit}."
            )
        if vendor not in VENDORS:
            raise InvalidLockBackend(
                f"{where}: using: {self.using!r} is a {vendor} database; supported are:"
                f" {', '.join(VENDORS)}."
            )
        self.supports_guard = VENDORS[vendor].supports_guard
        self._counters: FenceCounterManager = FenceCounter.objects.db_manager(self.using)
        self._connections = TableConnections(self.using, self.config.lock_connections, apart=apart)
        return vendor

    @property
    def _is_elsewhere(self) -> bool:
        return self._connections.is_renamed

    def _unnamed_database(self) -> str:
        """Return the database if the settings name none.

        A router may choose by the context of a request. Then processes that start in different
        contexts would use different databases, and not exclude each other.
        """
        where = f"DISTLOCK[{self.alias!r}]: a router (DATABASE_ROUTERS)"
        remedy = "name the database of the locks in OPTIONS['using']."
        try:
            routed = router.db_for_write(HeldLock)
        except Exception as error:
            # Code of the project, such as one that asks for a tenant.
            raise InvalidLockBackend(
                f"{where} does not know where the lock tables are: {error!r}. So {remedy}"
            ) from error
        if routed != DEFAULT_DB_ALIAS:
            raise InvalidLockBackend(
                f"{where} sends the lock tables to {routed!r}. It may answer otherwise in another"
                f" process, which would then hold the same keys: {remedy}"
            )
        return DEFAULT_DB_ALIAS

    def _vendor_of(self, using: object, option: str) -> str:
        """Return the vendor of the database that an option names, or refuse it."""
        where = f"DISTLOCK[{self.alias!r}]: {option}"
        if not isinstance(using, str) or not using:
            raise InvalidLockBackend(f"{where} must be a database alias, not {using!r}.")
        try:
            vendor: str = connections[using].vendor
        except ConnectionDoesNotExist as error:
            raise InvalidLockBackend(f"{where}: {error}") from None
        return vendor

    def _pause(
        self, name: str, key: str, until: datetime, by: str | None, *, bound: float
    ) -> Contended | None:
        def pause(on: str) -> Contended | None:
            self._counters_on(on).pause(name, key, until, by, bound=bound)
            return None

        return self._connections.ask(pause, bound=bound, busy=partial(self._busy, name), key=key)

    def _resume(self, name: str, *, bound: float) -> bool | Contended:
        def resume(on: str) -> bool | Contended:
            return self._counters_on(on).resume(name, bound=bound)

        return self._connections.ask(resume, bound=bound, busy=partial(self._busy, name))

    def _time(self) -> datetime:
        return self._connections.ask(lambda on: vendors.of(on).now(), writes=False)

    def _counter(self, name: str) -> Counter | None:
        return self._connections.ask(lambda on: self._counters_on(on).look(name), writes=False)

    def _counter_beside(self, name: str, using: str) -> Counter | None:
        ours, theirs = connections[self.using], connections[using]
        if ours.vendor == "sqlite" and _address(ours) == _address(theirs):
            # On SQLite without WAL, a large transaction locks even readers out.
            found: Counter | None = self._counters.db_manager(using).look(name)
            return found
        return self._counter(name)

    def _fences_of(self, names: Sequence[str]) -> Sequence[int | None]:
        def look(on: str) -> dict[str, int]:
            counters = self._counters_on(on).filter(pk__in=names)
            return dict(counters.values_list("pk", "fence"))

        found = self._connections.ask_within(look, long=True)
        return [found.get(name, 0) for name in names]

    def _guards_of(self, name: str) -> tuple[Session, ...] | None:
        if connections[self.using].vendor != "postgresql":
            # MySQL and MariaDB show the owner of a lock only while somebody waits for it.
            return None

        def look(on: str) -> tuple[Session, ...]:
            fences = self._connections.name("fences")
            keepers = postgresql_keepers(on, self._salt, name)
            return keepers + postgresql_guards(on, fences, name)

        return self._connections.ask_within(look)

    def _is_guarded(self, name: str) -> bool:
        # This only adds details to an answer that is known already.
        with suppress(LockError):
            if connections[self.using].vendor == "postgresql" and self._connections.ask_within(
                lambda on: postgresql_keepers(on, self._salt, name)
            ):
                return True
            names = self._connections
            return self._connections.ask(
                lambda on: self._counters_on(on).is_guarded(name, names.name("fences")),
                busy=lambda: False,
            )
        return False

    @property
    def _salt(self) -> str:
        return self._connections.named(side_table("salt"))

    def _raise_fences(
        self, to: int | None, name: str | None, key: str | None, *, cursor: str | None, limit: int
    ) -> Raised:
        if name is not None and key is not None:
            return self._connections.ask(
                lambda on: self._counters_on(on).raise_one(to, name, key),
                busy=lambda: Raised(0, (key,)),
                key=key,
            )
        prefix = self._namespace()
        return self._connections.ask(
            lambda on: self._counters_on(on).raise_page(to, prefix, cursor, limit), long=True
        )

    # Notes

    def _note(self, name: str, fence: int, seconds: float) -> None:
        def write(on: str) -> None:
            vendor, notes = vendors.of(on), RunNote.objects.db_manager(on)
            with vendor.short_transaction(MAX_BOUND):
                until = vendor.now() + timedelta(seconds=seconds)
                names_key = connections[on].features.supports_update_conflicts_with_target
                # In one statement, because others may write the first note of a name as well.
                notes.bulk_create(
                    [RunNote(pk=pk, fence=fence, until=until)],
                    update_conflicts=True,
                    update_fields=["fence", "until"],
                    unique_fields=["pk"] if names_key else None,
                )

        pk = self._noted_as(name)
        self._connections.ask(write)
        if random.randrange(_SWEEP) == 0:  # noqa: S311 - to spread load
            self._remove_notes(datetime.max.replace(tzinfo=UTC), _SWEPT)

    def _noted(self, name: str) -> int | None:
        def read(on: str) -> int | None:
            notes = RunNote.objects.db_manager(on)
            live = notes.filter(pk=self._noted_as(name), until__gt=vendors.of(on).now())
            return live.values_list("fence", flat=True).first()

        return self._connections.ask_within(read)

    def _remove_notes(self, before: datetime, limit: int) -> int:
        """Remove notes of all backends in the table that ended before `before`."""

        def clean(on: str) -> int:
            vendor, notes = vendors.of(on), RunNote.objects.db_manager(on)
            with vendor.short_transaction(MAX_BOUND):
                over = notes.filter(until__lte=min(before, vendor.now()))
                return remove(over.order_by("until"), limit)

        return self._connections.ask(clean, busy=lambda: 0, long=True)

    def _noted_as(self, name: str) -> str:
        # No key in NFC contains the marker.
        return storage_key(f"{self.key_prefix}{HASH_MARKER}note", name, MAX_STORAGE_KEY)

    # Guarding

    def _alias_in_database(self, using: str | None) -> str:
        if using is None or using == self.using:
            return self.using
        if not isinstance(using, str) or using not in connections.settings:
            raise InvalidArgument(f"using must be an alias in DATABASES, not {shown(using)}.")
        ours, theirs = (_address(connections[each]) for each in (self.using, using))
        if ours != theirs:
            raise LockUsageError(
                f"A transaction on {using!r} cannot keep a key of the lock backend"
                f" {self.alias!r}: that is in the database {self.using!r}.",
                code="foreign_context",
            )
        return using

    def _guard(self, name: str, grant: Grant, using: str, *, bound: float) -> bool:
        connection, vendor = connections[using], vendors.of(using)
        require_transaction(connection)
        try:
            return vendor.guard(self._connections.name("fences"), name, grant.fence, bound, grant)
        except (DatabaseError, InterfaceError) as error:
            if vendor.has_rolled_back(error):
                transaction.set_rollback(True, using)
            if vendor.is_overtaken(error):
                return False
            if vendor.is_read_only(error):
                raise LockUsageError(
                    f"A read-only transaction cannot be guarded: {error}", key=grant.key
                ) from error
            raise self._connections.translated(error, grant.key) from error

    # Names and rows

    def _namespace(self, prefix: str = "") -> str:
        return namespace(self.key_prefix) + prefix

    def _own_rows(self, model: type[Model], on: str) -> QuerySet[Any]:
        """Return the rows of this backend in a table."""
        return between(model._default_manager.using(on), self._namespace(), None)

    def _own_thread(self, *, keeps_leases: bool = False) -> None:
        use_own_connections(keeps_leases=keeps_leases)

    def _counters_on(self, on: str) -> FenceCounterManager:
        counters: FenceCounterManager = self._counters.db_manager(on)
        return counters

    def _busy(self, name: str) -> Contended:
        """Return a busy answer, with the holder if a plain read finds one."""
        try:
            with self._connections.use(0, writes=False) as on:
                record, now = self._look_at_once(whole_name(name), on), vendors.of(on).now()
        except (Error, NoConnectionFree):
            return Contended(busy=True)
        return Contended(busy=True) if record is None else record.contended(now, busy=True)

    def _look_at_once(self, name: str, on: str) -> Record | None:
        """Return the record of a key, without waiting for anybody."""
        raise NotImplementedError
