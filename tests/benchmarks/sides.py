"""What two sides of a hand-over lock with: one holds a key, the other one waits for it.

Each candidate is opened once on each side, and takes keys one after the other.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

from redis import Redis

from django_distlock import Lease, distlock, lock_backends

from .candidates import TTL
from .clients import PATIENCE_SECONDS
from .floor import Execute, Floor, as_django_opens, make_table
from .redis_peers import EXPIRE, KINDS, Kind

#: Seconds between two attempts of redis-py's lock, which waits in no other way.
POLLING_SECONDS = 0.1


class Side(Protocol):
    """Who takes a key and gives it back."""

    def take(self, key: str) -> None:
        """Take a key that is free."""
        ...

    def wait(self, key: str) -> None:
        """Wait for a key, and take it."""
        ...

    def release(self) -> None:
        """Give the key back."""
        ...

    def has_waiter(self) -> bool:
        """Whether somebody waits for the key. True where that cannot be seen."""
        ...


class Ours:
    """A lock of this package."""

    def __init__(self, alias: str):
        self._alias = alias
        self._lease: Lease | None = None

    def take(self, key: str) -> None:
        """See `Side`."""
        self._lease = distlock(key, wait=0, ttl=TTL, backend=self._alias).acquire()

    def wait(self, key: str) -> None:
        """See `Side`."""
        lock = distlock(key, wait=PATIENCE_SECONDS, ttl=TTL, backend=self._alias)
        self._lease = lock.acquire()

    def release(self) -> None:
        """See `Side`."""
        assert self._lease
        if not self._lease.release():
            raise RuntimeError(f"{self._lease.key!r} was not released")

    def has_waiter(self) -> bool:
        """See `Side`."""
        assert self._lease
        record = lock_backends[self._alias].read(self._lease.key)
        return record is not None and record.wanted


class Advisory:
    """An advisory lock of a session: PostgreSQL itself wakes who waits, inside of the server."""

    def __init__(self, execute: Execute):
        self._execute = execute
        self._number = 0

    def take(self, key: str) -> None:
        """See `Side`."""
        self._number = zlib.crc32(key.encode())
        if not self._ask("SELECT pg_try_advisory_lock(%s)"):
            raise RuntimeError(f"{key!r} is not free")

    def wait(self, key: str) -> None:
        """See `Side`."""
        self._number = zlib.crc32(key.encode())
        self._ask("SELECT pg_advisory_lock(%s)")

    def release(self) -> None:
        """See `Side`."""
        if not self._ask("SELECT pg_advisory_unlock(%s)"):
            raise RuntimeError("nothing was released")

    def has_waiter(self) -> bool:
        """See `Side`."""
        return bool(
            self._ask("SELECT count(*) FROM pg_locks WHERE NOT granted AND objid::bigint = %s")
        )

    def _ask(self, statement: str) -> Any:
        rows: Any = self._execute(statement, (self._number,))
        return rows[0][0]


class Polled(Advisory):
    """The same, asked for again and again."""

    def wait(self, key: str) -> None:
        """See `Side`."""
        self._number = zlib.crc32(key.encode())
        while not self._ask("SELECT pg_try_advisory_lock(%s)"):
            time.sleep(POLLING_SECONDS)

    def has_waiter(self) -> bool:
        """See `Side`."""
        return True


class Durable(Advisory):
    """The same, and who was granted it writes a row that a crash does not undo, as grants are."""

    def __init__(self, execute: Execute):
        super().__init__(execute)
        make_table("default")
        # Each process copies a row of its own.
        self._floor = Floor("default", "functions", f"floor:side-{os.getpid()}")

    def wait(self, key: str) -> None:
        """See `Side`."""
        super().wait(key)
        self._execute(self._floor.upsert, self._floor.row(key))


class RedisPeer:
    """A peer's lock in Redis, waited for as its users do."""

    def __init__(self, kind: Kind, client: Redis):
        self._kind = kind
        self._client = client
        self._lock: Any = None

    def take(self, key: str) -> None:
        """See `Side`."""
        self._lock = self._kind.make(key, EXPIRE)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"{key!r} is not free")

    def wait(self, key: str) -> None:
        """See `Side`."""
        self._lock = self._kind.make(key, EXPIRE)
        if not self._lock.acquire():
            raise RuntimeError(f"{key!r} was not granted")

    def release(self) -> None:
        """See `Side`."""
        self._lock.release()

    def has_waiter(self) -> bool:
        """See `Side`."""
        blocked: int = self._client.info("clients")["blocked_clients"]
        return blocked > 0 or self._kind.name == "redis-py"


@contextmanager
def _ours(alias: str) -> Iterator[Side]:
    yield Ours(alias)


@contextmanager
def _advisory(kind: type[Advisory]) -> Iterator[Side]:
    with as_django_opens("default") as execute:
        yield kind(execute)


@contextmanager
def _redis_peer(name: str) -> Iterator[Side]:
    with Redis.from_url(os.environ["DISTLOCK_BENCH_REDIS_URL"]) as client:
        yield RedisPeer(KINDS[name](client), client)


#: By name; ours are called as their backends.
SIDES: Mapping[str, Callable[[], AbstractContextManager[Side]]] = {
    "functions": partial(_ours, "functions"),
    "orm": partial(_ours, "orm"),
    "redis": partial(_ours, "redis"),
    "pg_advisory_lock": partial(_advisory, Advisory),
    "pg_advisory_lock, durable": partial(_advisory, Durable),
    "pg-polling": partial(_advisory, Polled),
    "python-redis-lock": partial(_redis_peer, "python-redis-lock"),
    "redis-py": partial(_redis_peer, "redis-py"),
}
