"""What operators look at: many live locks, as many that are over, their counters, and waiters."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.db import connections, router
from redis import Redis

from django_distlock import lock_backends
from django_distlock.core.records import Holder

from .databases import LIVE, LONG_TTL, ask, parts, take
from .redis_data import copy

HOSTS = 50
#: One in so many has a task.
TASKS = 10
#: One in so many was granted long ago.
OLD = 100
OLD_SECONDS = 86_400.0
#: One in so many is waited for.
WANTED = 30
BATCH = 1000
#: Keys of others on the server of Redis, for each lock of the largest number.
FOREIGN = 20


def _model(name: str) -> Any:
    return apps.get_model("django_distlock", name)


def _table(name: str) -> str:
    made: str = _model(name)._meta.db_table
    return made


def key_of(number: int) -> str:
    """Return the key of the lock with this number."""
    return f"{LIVE}:{number}"


def holder_of(number: int) -> Holder:
    """Return who holds it."""
    task = f"job-{number}" if number % TASKS == 0 else None
    return Holder(host=f"web-{number % HOSTS}", process="worker", pid=4711, task_id=task)


def _holder(number: int) -> str:
    return json.dumps(holder_of(number).as_json())


def _token(text: str) -> str:
    digest = hashlib.md5(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class Tables:
    """The tables of a backend in a database."""

    def __init__(self, alias: str):
        self.alias = alias
        self._store: Any = lock_backends[alias]
        self._filled = 0

    def fill(self, locks: int) -> None:
        """Hold so many keys, with their counters and a waiter for some."""
        now = self._store.clock()
        new = range(self._filled + 1, locks + 1)
        self._insert("HeldLock", (self._lock(each, now) for each in new))
        self._insert(
            "FenceCounter",
            ({"storage_key": self._name(key), "key": key, "fence": 1}
             for key in map(key_of, new)),
        )  # fmt: skip
        waited = [each for each in new if each % WANTED == 0]
        noted = {"holder": {}, "since": now, "until": now + timedelta(seconds=LONG_TTL)}
        self._insert(
            "Waiter",
            ({"storage_key": self._name(key_of(each)), **noted}
             for each in waited),
        )  # fmt: skip
        self._filled = locks
        self._analyze()

    def leave(self, locks: int) -> None:
        """Leave the records of so many leases that are over."""
        over = self._store.clock() - timedelta(seconds=60)
        self._insert(
            "HeldLock",
            (self._lock(each, over, "-over", over) for each in range(1, locks + 1)),
        )
        self._analyze()

    def happen(self, number: int) -> None:
        """Have so many events that are old enough to go."""
        at = self._store.clock() - timedelta(days=1000)
        self._insert(
            "LockEvent",
            ({"at": at, "backend": self.alias, "key": key_of(each), "kind": "lost"}
             for each in range(1, number + 1)),
            router.db_for_write(_model("LockEvent")),
        )  # fmt: skip

    def empty(self) -> None:
        """Leave no lock and no waiter behind."""
        for name in ("HeldLock", "Waiter", "LockEvent"):
            ask(self._using, f"DELETE FROM {_table(name)}")

    @property
    def _using(self) -> str:
        using: str = self._store.using
        return using

    def _name(self, key: str) -> str:
        name: str = self._store.queues.name_of(key)
        return name

    def _lock(
        self, number: int, now: datetime, kind: str = "", free_at: datetime | None = None
    ) -> dict[str, Any]:
        key, holder = f"{key_of(number)}{kind}", holder_of(number)
        ends = free_at or now + timedelta(seconds=LONG_TTL)
        since = now - timedelta(seconds=2 * OLD_SECONDS if number % OLD == 0 else 1)
        return {
            "storage_key": self._name(key), "key": key, "token": _token(key), "fence": 1,
            "ttl": LONG_TTL, "acquired_at": since, "renewed_at": since, "expires_at": ends,
            "free_at": ends, "holder": holder.as_json(), "holder_host": holder.host,
            "task_id": holder.task_id,
        }  # fmt: skip

    def _insert(self, name: str, rows: Iterator[dict[str, Any]], using: str = "") -> None:
        model = _model(name)
        into = model._default_manager.using(using or self._using)
        for part in parts(rows, BATCH):
            into.bulk_create([model(**each) for each in part], ignore_conflicts=True)

    def _analyze(self) -> None:
        what = {
            "postgresql": "VACUUM (ANALYZE) {}", "mysql": "ANALYZE TABLE {}", "sqlite": "ANALYZE {}"
        }[connections[self._using].vendor]  # fmt: skip
        for name in ("HeldLock", "FenceCounter", "Waiter"):
            ask(self._using, what.format(_table(name)))

    # The least that the same can be asked for

    def count(self) -> None:
        """Count the live rows."""
        live = "SELECT COUNT(*) FROM {} WHERE free_at > %s"
        ask(self._using, live.format(_table("HeldLock")), self._now())

    def select(self, limit: int) -> None:
        """Read so many of them over the driver alone."""
        rows = "SELECT * FROM {} WHERE free_at > %s ORDER BY storage_key LIMIT %s"
        ask(self._using, rows.format(_table("HeldLock")), self._now(), limit)

    def delete(self) -> None:
        """Remove what is over, in one statement."""
        over = "DELETE FROM {} WHERE free_at <= %s"
        ask(self._using, over.format(_table("HeldLock")), self._now())

    def _now(self) -> int:
        return int(self._store.clock().timestamp() * 1_000_000)


class Keys:
    """The keys of a backend in Redis, among keys of others.

    Args:
        most: The largest number of locks that `fill` will be called with.
    """

    def __init__(self, alias: str, most: int):
        self.alias = alias
        self._foreign = range(FOREIGN * most)
        self._store: Any = lock_backends[alias]
        self._filled = 0

    @property
    def _client(self) -> Redis:
        client: Redis = self._store.store.client
        return client

    def fill(self, locks: int) -> None:
        """See `Tables`."""
        grant = take(self._store, f"template:{self._filled}")
        new = range(self._filled + 1, locks + 1)
        copy(self._store, self._client, grant, new, _holder)
        for number in (each for each in new if each % WANTED == 0):
            self._store.waiters.note(key_of(number), holder_of(number), 3600)
        self._store.release(grant)
        for batch in parts((f"cache:page:{each}" for each in self._foreign), BATCH):
            self._client.mset(dict.fromkeys(batch, "a page"))
        self._foreign, self._filled = range(0), locks

    def leave(self, locks: int) -> None:
        """Leave nothing: the server removes what is over by itself."""

    def empty(self) -> None:
        """See `Tables`."""
        self._client.flushall()

    def scan(self) -> None:
        """Walk through all keys of the server, which is the least that counting needs."""
        for _name in self._client.scan_iter(count=1000):
            pass

    def count(self) -> None:
        """See `scan`."""
        self.scan()
