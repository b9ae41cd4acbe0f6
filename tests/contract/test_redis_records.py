"""What of the suite's promises is another one on Redis; what it keeps: see `tests/redis/`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis

from django_distlock.backends.redis import RedisBackend
from django_distlock.conf import backend_config
from django_distlock.core.records import Raised
from tests.services import private_redis

from .helpers import contend, listed, take
from .stores_redis import RedisStore

pytestmark = pytest.mark.stores("redis", "redis_cluster", why="its store is another one")


@pytest.fixture
def alone() -> Iterator[tuple[RedisBackend, Redis]]:
    """Give a backend on a server that nobody else uses, and a client of that."""
    with private_redis() as server, Redis.from_url(server.url, decode_responses=True) as client:
        backend = RedisBackend(backend_config("redis"), url=server.url)
        yield backend, client
        backend.store.client.close()


def test_late_record_stops_no_raise(store: RedisStore, key: str) -> None:
    """A counter is raised though the record of an expired lease is still there."""
    grant = take(store.backend, key, 30)
    store.outlast(31.1)
    assert store.backend.raise_fences(grant.fence + 10**9, key=key) == Raised(1)


def test_pause_that_redis_is_late_to_remove_is_over(store: RedisStore, key: str) -> None:
    """The same for pauses."""
    store.backend.pause(key, store.now() + timedelta(seconds=60))
    store.outlast(50)
    assert contend(store.backend, key).paused
    store.outlast(10)
    take(store.backend, key)
    assert store.backend.resume(key) is False


def test_cleanup_is_left_to_redis(store: RedisStore, key: str) -> None:
    """Cleanup says that nothing went, and touches neither records nor counters."""
    grant = take(store.backend, key, 30)
    take(store.backend, f"{key}-live", 300)
    store.outlast(31.1)
    assert store.backend.cleanup(store.now()) == 0
    assert store.has_record(key)
    assert store.has_record(f"{key}-live")
    assert store.fence(key) == grant.fence


def test_losing_writes_nothing(alone: tuple[RedisBackend, Redis], key: str) -> None:
    """Contended, nothing is written but the mark of who waits, once for each grant."""
    backend, client = alone

    def written() -> int:
        changes: dict[str, Any] = client.info("persistence")
        return int(changes["rdb_changes_since_last_save"])

    take(backend, key)
    before = written()
    for _ in range(3):
        contend(backend, key)
    assert written() == before
    contend(backend, key, wanted=True)
    assert written() == before + 1
    for _ in range(3):
        contend(backend, key, wanted=True)
    assert written() == before + 1


@pytest.mark.parametrize("limit", [1, 7, 50, 10_000])
def test_pages_of_a_large_server_show_each_lock_once(
    alone: tuple[RedisBackend, Redis], limit: int
) -> None:
    """Among thousands of foreign keys that stay, each lock is listed once, page by page."""
    backend, client = alone
    fill(client, 3000)
    keys = [f"k{number:02}" for number in range(50)]
    for each in keys:
        take(backend, each)
    assert sorted(listed(backend, limit=limit)) == keys


@pytest.mark.parametrize("walk", ["list", "raise_fences"])
def test_pages_miss_nothing_while_other_keys_go(
    alone: tuple[RedisBackend, Redis], walk: str
) -> None:
    """However many foreign keys come and go between pages, each lock is seen, maybe twice."""
    backend, client = alone
    fill(client, 4000)
    keys = [f"k{number:02}" for number in range(60)]
    grants = [take(backend, each) for each in keys]
    to = max(grant.fence for grant in grants) + 10**9

    def page(cursor: str | None) -> tuple[list[str], str | None]:
        if walk == "list":
            found = backend.list("", cursor, limit=5)
            return [record.key for record in found.records], found.cursor
        raised = backend.raise_fences(to, cursor=cursor, limit=5)
        return list(raised.left), raised.cursor

    seen, cursor = page(None)
    client.delete(*(f"foreign:{number}" for number in range(4000) if number % 4))
    while cursor is not None:
        more, cursor = page(cursor)
        seen += more
    assert set(seen) == set(keys)


def fill(client: Redis, size: int) -> None:
    """Let a server keep much that is no lock, as one does that serves a cache too."""
    client.mset({f"foreign:{number}": number for number in range(size)})
