"""Locks in the project's own database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, TypeVar

from django.db import connections, router
from django.db.utils import DatabaseError, InterfaceError
from django.utils.connection import ConnectionDoesNotExist

from .. import vendors
from ..conf import BackendConfig
from ..connections import LockConnections, NoConnectionFree, use_own_connections
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, InvalidArgument, LockError
from ..core.holders import Holder
from ..core.records import UNKNOWN, Contended, Grant, Page, Raised, Record, Unknown
from ..exceptions import InvalidLockBackend
from ..functions import ServerFunctions
from ..managers import FenceCounterManager, HeldLockManager
from ..models import MAX_STORAGE_KEY, FenceCounter, HeldLock
from ..vendors import VENDORS
from .base import BaseLockBackend

T = TypeVar("T")


class DatabaseBackend(BaseLockBackend):
    """Keep locks in a table, and fences in another.

    Args:
        using: The alias of the database; None: what the router says for writing `HeldLock`.
        server_functions: On PostgreSQL, call the functions that the migration installs; False
            runs the same transactions as ORM code, where functions may not be created.
        cleanup_on_read: Remove the expired record that a read comes across.
    """

    distributed: ClassVar[bool] = True
    storage_key_limit: ClassVar[int] = MAX_STORAGE_KEY

    def __init__(
        self,
        config: BackendConfig,
        *,
        using: str | None = None,
        server_functions: bool = True,
        cleanup_on_read: bool = False,
        **unknown: Any,
    ):
        super().__init__(config, **unknown)
        where = f"DISTLOCK[{self.alias!r}]"
        if using is not None and (not isinstance(using, str) or not using):
            raise InvalidLockBackend(f"{where}: using must be a database alias, not {using!r}.")
        for name, value in (
            ("server_functions", server_functions),
            ("cleanup_on_read", cleanup_on_read),
        ):
            if not isinstance(value, bool):
                raise InvalidLockBackend(f"{where}: {name} must be True or False, not {value!r}.")
        longest = len(f"{self.key_prefix}:".encode()) + 512
        if longest > self.storage_key_limit:
            # Listing by prefix walks the storage keys, so none of them may be a hash.
            raise InvalidLockBackend(
                f"{where}: KEY_PREFIX: with a key of 512 bytes it makes {longest} bytes, and this"
                f" store takes {self.storage_key_limit}."
            )
        self.using: str = using or router.db_for_write(HeldLock)
        try:
            vendor = connections[self.using].vendor
        except ConnectionDoesNotExist as error:
            raise InvalidLockBackend(f"{where}: using: {error}") from None
        if vendor not in VENDORS:
            raise InvalidLockBackend(
                f"{where}: using: {self.using!r} is a {vendor} database; supported are:"
                f" {', '.join(VENDORS)}."
            )
        self.time_authority = VENDORS[vendor].time_authority
        self.cleanup_on_read = cleanup_on_read
        self._locks: HeldLockManager = HeldLock.objects.db_manager(self.using)
        self._locks.follows_clock = config.fence_floor == "clock"
        self._counters: FenceCounterManager = FenceCounter.objects.db_manager(self.using)
        self._hot: HeldLockManager | ServerFunctions = (
            ServerFunctions(self.using, follows_clock=self._locks.follows_clock)
            if server_functions and vendor == "postgresql"
            else self._locks
        )
        self._connections = LockConnections(self.using, config.lock_connections)

    def _acquire(
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
        attempt = partial(
            self._hot.acquire, name, key, token, ttl, holder,
            wanted=wanted, replace=replace, bound=bound,
        )  # fmt: skip
        return self._ask(attempt, bound=bound, busy=partial(self._busy, name), key=key)

    def _extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        extend = partial(self._hot.extend, name, grant, ttl, bound=bound)
        return self._ask(extend, bound=bound, busy=_unknown, key=grant.key)

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        none_known: list[Grant | Unknown | None] = [UNKNOWN] * len(named)
        return self._ask(partial(self._hot.extend_many, named), busy=lambda: none_known)

    def _release(self, name: str, grant: Grant, *, bound: float) -> bool | Unknown:
        release = partial(self._hot.release, name, grant, bound=bound)
        return self._ask(release, bound=bound, busy=_unknown, key=grant.key)

    def _settle(self, name: str, grant: Grant, seconds: float, *, bound: float) -> bool | Unknown:
        settle = partial(self._hot.release, name, grant, held=seconds, bound=bound)
        return self._ask(settle, bound=bound, busy=_unknown, key=grant.key)

    def _read(self, name: str) -> Record | None:
        return self._find(pk=name)

    def _read_token(self, token: str) -> Record | None:
        record = self._find(token=token)
        return None if record is None or record.is_settled else record

    def _find(self, **lookup: Any) -> Record | None:
        record = self._ask(partial(self._locks.read, **lookup), writes=False)
        if record is None and self.cleanup_on_read:
            # Housekeeping: whatever becomes of it, the answer is known.
            with suppress(LockError):
                self._ask(partial(self._locks.remove_expired, **lookup), busy=lambda: 0)
        return record

    def _list(
        self, prefix: str, cursor: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> Page:
        found = self._ask(
            partial(
                self._locks.live_records, self._namespace(prefix), cursor,
                host=host, task_id=task_id, limit=limit + 1,
            ),
            writes=False,
        )  # fmt: skip
        shown = tuple(found[:limit])
        return Page(shown, self._name(shown[-1].key) if len(found) > limit else None)

    def _shorten(
        self, name: str, seconds: float, token: str | None, *, bound: float
    ) -> Record | Contended | None:
        shorten = partial(self._locks.shorten, name, seconds, token, bound=bound)
        return self._ask(shorten, bound=bound, busy=partial(self._busy, name))

    def _force_release(self, name: str, key: str, *, bound: float) -> Record | Contended | None:
        force = partial(self._locks.force_release, name, key, bound=bound)
        return self._ask(force, bound=bound, busy=partial(self._busy, name), key=key)

    def _request_stop(self, name: str, *, bound: float) -> Record | Contended | None:
        request = partial(self._locks.request_stop, name, bound=bound)
        return self._ask(request, bound=bound, busy=partial(self._busy, name))

    def _pause(
        self, name: str, key: str, until: datetime, by: str | None, *, bound: float
    ) -> Contended | None:
        pause = partial(self._counters.pause, name, key, until, by, bound=bound)
        return self._ask(pause, bound=bound, busy=partial(self._busy, name), key=key)

    def _resume(self, name: str, *, bound: float) -> bool | Contended:
        resume: Callable[[], bool | Contended] = partial(self._counters.resume, name, bound=bound)
        return self._ask(resume, bound=bound, busy=partial(self._busy, name))

    def _cleanup(self, before: datetime, limit: int) -> int:
        return self._ask(partial(self._locks.cleanup, before, limit), busy=lambda: 0)

    def _raise_fences(
        self, to: int | None, name: str | None, key: str | None, *, cursor: str | None, limit: int
    ) -> Raised:
        if name is not None and key is not None:
            raise_one = partial(self._counters.raise_one, to, name, key)
            return self._ask(raise_one, busy=lambda: Raised(0, (key,)), key=key)
        page = partial(self._counters.raise_page, to, self._namespace(), cursor, limit)
        return self._ask(page)

    # How the store is asked

    def _namespace(self, prefix: str = "") -> str:
        return f"{self.key_prefix}:{prefix}" if self.key_prefix else prefix

    def _own_thread(self) -> None:
        use_own_connections()

    def _ask(
        self,
        operation: Callable[[], T],
        *,
        bound: float = MAX_BOUND,
        busy: Callable[[], T] | None = None,
        writes: bool = True,
        key: str | None = None,
    ) -> T:
        """Run an operation where it commits by itself.

        Args:
            busy: Makes the answer where other transactions were in the way; None: raise.
        """
        try:
            with self._connections.use(bound, writes=writes):
                return operation()
        except NoConnectionFree as error:
            if busy is None:
                raise BackendUnavailable(str(error), key=key, code="network_timeout") from error
        except DatabaseError as error:
            if busy is None or not vendors.of(self.using).is_busy(error):
                raise self._translated(error, key) from error
        except InterfaceError as error:
            raise self._translated(error, key) from error
        return busy()

    def _busy(self, name: str) -> Contended:
        """Return a busy answer, with the holder if a plain read can tell."""
        try:
            with self._connections.use(0, writes=False):
                record = self._locks.read(pk=name, bound=0)
                now = vendors.of(self.using).now()
        except (DatabaseError, InterfaceError, NoConnectionFree):
            return Contended(busy=True)
        return Contended(busy=True) if record is None else record.contended(now, busy=True)

    def _translated(self, error: Exception, key: str | None) -> LockError:
        vendor, about = vendors.of(self.using), f"The lock store {self.using!r}"
        if vendor.is_duplicate(error):
            return InvalidArgument("This token already holds another key.", key=key)
        if vendor.is_missing(error):
            return LockError(
                f"{about} does not know what it was asked for. Are the migrations of"
                f" django_distlock applied (manage.py migrate --database {self.using})? {error}",
                key=key,
            )
        code = vendor.unavailable_code(error)
        if code is not None:
            return BackendUnavailable(f"{about} did not answer: {error}", key=key, code=code)
        return LockError(f"{about} failed: {error}", key=key)


def _unknown() -> Unknown:
    return UNKNOWN
