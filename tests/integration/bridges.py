"""Old locks of each kind, and what processes do with them: see `tests.processes`."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.cache import caches
from django.db import connection
from django.test import override_settings
from redis import Redis

from django_distlock import distlock
from django_distlock.compat.old import OldAdvisoryLock, OldCacheAdd, OldLock, OldRedisLock
from tests.contract.redis_clients import single_url
from tests.contract.workers import add_one

#: Kinds of old locks, and where the leases are that hold them: neither knows of the other.
STORES = {"redis": "redis", "cache": "database", "advisory": "database"}
WAIT = 60


def numbered(key: str) -> int:
    """Return what old code hashes the key to."""
    return zlib.crc32(key.encode())


def old(kind: str) -> OldLock[Any]:
    """Make an old lock."""
    if kind == "redis":
        return OldRedisLock(single_url(), "old:{key}")
    return OldCacheAdd("old-{key}", "redis") if kind == "cache" else OldAdvisoryLock(numbered)


@contextmanager
def bridged(store: str, bridge: object) -> Iterator[str]:
    """Configure a bridged backend; give its alias."""
    name, options = {
        "database": ("DatabaseBackend", {"using": "default"}),
        "redis": ("RedisBackend", {"url": single_url()}),
    }[store]
    configured = {
        "BACKEND": f"django_distlock.compat.bridge.{name}",
        "OPTIONS": {**options, "bridge": bridge},
    }
    try:
        with override_settings(DISTLOCK={"bridged": configured}):
            yield "bridged"
    finally:
        if isinstance(bridge, OldRedisLock) and bridge._client is not None:
            bridge._client.close()


@contextmanager
def as_before(kind: str, key: str, seconds: float = 30) -> Iterator[None]:
    """Hold a key as old code does; wait for it."""
    if kind == "redis":
        with Redis.from_url(single_url()) as client:
            lock = client.lock(f"old:{key}", timeout=seconds, sleep=0.01, blocking_timeout=WAIT)
            with lock:
                yield
    elif kind == "cache":
        give_up = time.monotonic() + WAIT
        while not caches["redis"].add(f"old-{key}", "1", seconds):
            assert time.monotonic() < give_up, "never free"
            time.sleep(0.01)
        try:
            yield
        finally:
            caches["redis"].delete(f"old-{key}")
    else:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [numbered(key)])
            try:
                yield
            finally:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [numbered(key)])


def count(kind: str, form: str, key: str, path: str, turns: int) -> None:
    """Add to a counter in a file, in each turn as old code does, or under a bridged lease."""
    print("ready")
    input()
    with bridged(STORES[kind], old(kind)) as backend:
        for _ in range(turns):
            if form == "old":
                with as_before(kind, key):
                    add_one(path)
            else:
                with distlock(key, backend=backend, wait=WAIT, ttl=30):
                    add_one(path)
