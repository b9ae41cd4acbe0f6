"""Targets that the drill writes to: in the locks' store, if possible, and refusing older fences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections, router, transaction

from ..backends.base import BaseLockBackend
from ..checks.configured import is_redis
from ..core.errors import LockError
from ..database import vendors
from ..fencing.rejecting import Fenced, reject
from ..fencing.seen import mark_of, see
from ..models import SeenFence

#: Seconds that a value in Redis is kept, so that a killed drill leaves nothing for long.
_KEPT = 600


class TableTarget:
    """A row of seen fences."""

    def __init__(self, key: str, using: str):
        self._key = key
        self._using = using
        self.name = f"the table {SeenFence._meta.db_table} in the database {using!r}"

    def write(self, by: Fenced) -> None:
        """Write by a statement that compares the fence; `FenceRejected`: a higher one has."""
        with vendors.translated(self._using):
            mark = see(by, self._using)
        if mark > by.fence:
            reject(by, f"The row of {self._key!r} in {SeenFence._meta.db_table}", mark)

    def fence(self) -> int | None:
        """Return the fence of the last accepted write; None: there was no write."""
        with vendors.translated(self._using):
            return mark_of(self._key, self._using)

    def server(self) -> str:
        """Return the server of the target, with its version."""
        with vendors.translated(self._using):
            connection = connections[self._using]
            return f"{connection.vendor} {'.'.join(map(str, connection.get_database_version()))}"

    def remove(self) -> None:
        """Remove all that was written."""
        with vendors.translated(self._using), transaction.atomic(using=self._using):
            SeenFence.objects.using(self._using).filter(pk=self._key).delete()


class RedisTarget:
    """A fenced value in the Redis of the locks. See `TableTarget`."""

    def __init__(self, key: str, store: Any):
        from ..fencing.redis import FencedValue

        self._alias = store.alias
        # A role of its own: no key of a lock has such a name.
        name = f"{store.key_prefix}:drill:{key}" if store.key_prefix else f"drill:{key}"
        with self._translated():
            self._value = FencedValue(store.store.client, name)
        self.name = f"the fenced value {name!r} in Redis"

    def write(self, by: Fenced) -> None:
        """Write by a script that compares the fence."""
        with self._translated():
            self._value.set(str(by.fence), by, ttl=_KEPT)

    def fence(self) -> int | None:
        """See `TableTarget`."""
        with self._translated():
            value = self._value.read()
        return None if value is None else int(value)

    def server(self) -> str:
        """See `TableTarget`."""
        with self._translated():
            told = self._value.client.info("server")
        # A cluster reports it for each node.
        first = told if "redis_version" in told else next(iter(told.values()))
        return f"redis {first['redis_version']}"

    def remove(self) -> None:
        """See `TableTarget`."""
        with self._translated():
            self._value.client.delete(self._value.name)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from ..backends.redis.clients import ERRORS, translated

        try:
            yield
        except ERRORS as error:
            raise translated(error, self._alias, None) from error


def leave_nothing(store: BaseLockBackend, key: str, target: TableTarget | RedisTarget) -> None:
    """Remove the lock, whatever its holder, and all that was written."""
    # An unavailable store was already reported, or is about to be.
    with suppress(LockError):
        store.force_release(key)
    with suppress(LockError):
        target.remove()


def target_of(store: BaseLockBackend, key: str) -> TableTarget | RedisTarget:
    """Return what a drill on a backend writes to: in the store of the locks, if possible."""
    if is_redis(store):
        return RedisTarget(key, store)
    if store.using and router.allow_migrate_model(store.using, SeenFence):
        return TableTarget(key, store.using)
    using = router.db_for_write(SeenFence)
    _ = connections[using]  # It raises if there is no such database.
    return TableTarget(key, using)
