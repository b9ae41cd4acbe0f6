"""Locks in the project's own database."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from django.db.utils import DatabaseError, InterfaceError

from .. import vendors
from ..conf import BackendConfig
from ..connections import NoConnectionFree
from ..core.errors import LockError
from ..core.holders import Holder
from ..core.records import UNKNOWN, Contended, Grant, Page, Record, Unknown
from ..exceptions import InvalidLockBackend
from ..functions import ServerFunctions
from ..managers import HeldLockManager
from ..models import HeldLock
from ..vendors import VENDORS
from .base import BaseLockBackend
from .tables import FenceTable


class DatabaseBackend(FenceTable, BaseLockBackend):
    """Keep locks in a table, and fences in another.

    Args:
        using: The alias of the database; None: what the router says for writing `HeldLock`.
        server_functions: On PostgreSQL, call the functions that the migration installs; False
            runs the same transactions as ORM code, where functions may not be created.
        cleanup_on_read: Remove the expired record that a read comes across.
    """

    distributed: ClassVar[bool] = True

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
        for name, value in (
            ("server_functions", server_functions),
            ("cleanup_on_read", cleanup_on_read),
        ):
            if not isinstance(value, bool):
                raise InvalidLockBackend(
                    f"DISTLOCK[{self.alias!r}]: {name} must be True or False, not {value!r}."
                )
        vendor = self._use_database(using)
        self.time_authority = VENDORS[vendor].time_authority
        self.cleanup_on_read = cleanup_on_read
        self._locks: HeldLockManager = HeldLock.objects.db_manager(self.using)
        self._locks.follows_clock = config.fence_floor == "clock"
        self._hot: HeldLockManager | ServerFunctions = (
            ServerFunctions(self.using, follows_clock=self._locks.follows_clock)
            if server_functions and vendor == "postgresql"
            else self._locks
        )

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

    def _cleanup(self, before: datetime, limit: int) -> int:
        return self._ask(partial(self._locks.cleanup, before, limit), busy=lambda: 0)

    def _busy(self, name: str) -> Contended:
        """Return a busy answer, with the holder if a plain read can tell."""
        try:
            with self._connections.use(0, writes=False):
                record = self._locks.read(pk=name, bound=0)
                now = vendors.of(self.using).now()
        except (DatabaseError, InterfaceError, NoConnectionFree):
            return Contended(busy=True)
        return Contended(busy=True) if record is None else record.contended(now, busy=True)


def _unknown() -> Unknown:
    return UNKNOWN
