"""What Redis keeps, and for how long: what the suite's other promises rest on there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redis.lines import ThreadLines
from django_distlock.conf import backend_config
from django_distlock.core.errors import LockUsageError
from django_distlock.core.keys import key_hash
from django_distlock.core.records import Grant
from tests.services import private_redis

from .helpers import contend, held, listed, take
from .stores_redis import RedisStore

pytestmark = pytest.mark.stores("redis", "redis_cluster", why="its store is another one")
SINGLE = pytest.mark.stores("redis", why="its store is another one")


@pytest.fixture
def alone() -> Iterator[tuple[RedisBackend, Redis]]:
    """Give a backend on a server that nobody else uses, and a client of that."""
    with private_redis() as server, Redis.from_url(server.url, decode_responses=True) as client:
        backend = RedisBackend(backend_config("redis"), url=server.url)
        yield backend, client
        backend.store.client.close()


def test_keys_of_a_lock_share_the_hash_as_their_tag(store: RedisStore, key: str) -> None:
    """Record, fence and pause stand side by side, whatever braces the user's key has."""
    for start, end in (
        ("", ""),
        ("{", "}"),
        ("}", "{"),
        ("a}b{c", "{"),
        ("{tag}", "{}"),
        ("", "é{ß}"),
    ):
        given = f"{start}{key}{end}"
        take(store.backend, given)
        store.backend.pause(given, store.now() + timedelta(minutes=1))
        tag = f"{{{key_hash(f'distlock:{given}')}}}"
        names = [f"distlock:{role}:{tag}:{given}" for role in ("lock", "fence", "pause")]
        assert [store.client.type(name) for name in names] == ["hash", "string", "hash"]
        assert store.is_single or len({store.client.keyslot(name) for name in names}) == 1


def test_record_without_an_end_stays(store: RedisStore, key: str) -> None:
    """Without a ttl nothing expires; an extend gives an end, and another one takes it away."""

    def expiries() -> set[bool]:
        names = (store.at("lock", key), *store.tokens(key))
        return {store.client.ttl(name) >= 0 for name in names}

    grant = take(store.backend, key, None)
    assert expiries() == {False}
    assert isinstance(store.backend.extend(grant, 50), Grant)
    assert expiries() == {True}
    assert isinstance(store.backend.extend(grant), Grant)
    assert expiries() == {False}


LATE: dict[str, Callable[[BaseLockBackend, Grant], object]] = {
    "read": lambda backend, grant: backend.read(grant.key),
    "read_token": lambda backend, grant: (
        backend.read_token(grant.token) if backend.supports_token_lookup else None
    ),
    "list": lambda backend, grant: backend.list(grant.key).records or None,
    "extend": lambda backend, grant: backend.extend(grant),
    "extend_many": lambda backend, grant: backend.extend_many([grant])[0],
    "release": lambda backend, grant: backend.release(grant) or None,
    "settle": lambda backend, grant: backend.release(grant, 500) or None,
    "shorten": lambda backend, grant: backend.request_stop(grant.key, 1),
    "request_stop": lambda backend, grant: backend.request_stop(grant.key),
    "force_release": lambda backend, grant: backend.force_release(grant.key),
    "raise_fences": lambda backend, grant: (
        backend.raise_fences(grant.fence + 10**9, key=grant.key).left or None
    ),
}


def test_record_that_redis_is_late_to_remove_is_over(store: RedisStore, key: str) -> None:
    """What is left behind `free_at` is nobody's lock: Redis may be slow, the answer is right."""
    grants = {each: take(store.backend, f"{key}-{each}", 30) for each in LATE}
    store.outlast(25)
    assert all(store.backend.read(grant.key) for grant in grants.values())
    store.outlast(6.1)
    for each, operation in LATE.items():
        grant = grants[each]
        assert store.has_record(grant.key)
        assert operation(store.backend, grant) is None
        after = take(store.backend, grant.key)
        assert after.fence > grant.fence
        assert held(store.backend, grant.key).token == after.token


def test_pause_that_redis_is_late_to_remove_is_over(store: RedisStore, key: str) -> None:
    """The same for pauses."""
    store.backend.pause(key, store.now() + timedelta(seconds=60))
    store.outlast(50)
    assert contend(store.backend, key).paused
    store.outlast(10)
    take(store.backend, key)
    assert store.backend.pause(key, None) is False


def test_cleanup_is_left_to_redis(store: RedisStore, key: str) -> None:
    """Cleanup says that nothing went, and touches neither records nor counters."""
    grant = take(store.backend, key, 30)
    take(store.backend, f"{key}-live", 300)
    store.outlast(31.1)
    assert store.backend.cleanup(store.now()) == 0
    assert store.has_record(key)
    assert store.has_record(f"{key}-live")
    assert store.fence(key) == grant.fence


@SINGLE
@pytest.mark.parametrize("how", ["release", "settle", "force-release", "takeover", "expiry"])
@pytest.mark.parametrize("ttl", [30, None])
def test_token_is_forgotten_with_its_lease(
    store: RedisStore, key: str, how: str, ttl: float | None
) -> None:
    """Nothing finds a lease by its token that is over, and the token may hold another key."""
    grant = take(store.backend, key, ttl)
    assert len(store.tokens(key)) == 1
    if how == "release":
        store.backend.release(grant)
    elif how == "settle":
        store.backend.release(grant, 20)
    elif how == "force-release":
        store.backend.force_release(key)
    elif how == "takeover":
        take(store.backend, key, replace=grant.token)
    else:
        store.backend.extend(grant, 0.1)
        store.elapse(1.2)
    assert store.at("lock", key) not in store.tokens(key)
    assert store.backend.read_token(grant.token) is None
    take(store.backend, f"{key}-other", token=grant.token)


def test_cluster_finds_nothing_by_token(store: RedisStore, key: str) -> None:
    """A token's index would lie on another node than the record: a cluster refuses the question."""
    backend = store.backend
    assert backend.supports_token_lookup is store.is_single
    grant = take(backend, key)
    if backend.supports_token_lookup:
        assert backend.read_token(grant.token) == held(backend, key)
        return
    with pytest.raises(LockUsageError) as caught:
        backend.read_token(grant.token)
    assert caught.value.code == "unsupported"
    assert store.tokens(key) == set()


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


@SINGLE
def test_listing_names_a_key_once(
    store: RedisStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SCAN` may give one again, in the same answer or in a later one."""
    take(store.backend, key)
    ask = ThreadLines.command

    def command(self: ThreadLines, *words: str) -> Any:
        answer = ask(self, *words)
        # As if there were one more step.
        return ["0" if words[1] == "1" else "1", answer[1] * 2] if words[0] == "SCAN" else answer

    monkeypatch.setattr(ThreadLines, "command", command)
    assert [each.key for each in store.backend.list(key).records] == [key]


Pages = Callable[[str | None], tuple[list[str], str | None]]


@pytest.fixture(params=["list", "raise_fences"])
def pages(alone: tuple[RedisBackend, Redis], request: pytest.FixtureRequest) -> Pages:
    """Give both ways through what a server has: from a cursor to the next, five keys at most."""
    backend, _client = alone

    def page(cursor: str | None) -> tuple[list[str], str | None]:
        if request.param == "list":
            found = backend.list("k", cursor, limit=5)
            return [record.key for record in found.records], found.cursor
        raised = backend.raise_fences(7 * 10**14, cursor=cursor, limit=5)
        return [key for key in raised.left if key.startswith("k")], raised.cursor

    return page


def test_pages_miss_nothing_while_other_keys_go(
    alone: tuple[RedisBackend, Redis], pages: Pages
) -> None:
    """However many foreign keys come and go between pages, each lock is seen, maybe twice."""
    backend, client = alone
    fill(client, 4000)
    keys = [f"k{number:02}" for number in range(60)]
    for each in keys:
        take(backend, each)
    seen, cursor = pages(None)
    client.delete(*(f"foreign:{number}" for number in range(4000) if number % 4))
    while cursor is not None:
        more, cursor = pages(cursor)
        seen += more
    assert set(seen) == set(keys)


def test_pages_end_while_others_come_and_go(
    alone: tuple[RedisBackend, Redis], pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page goes on, though what a step gives has changed each time that it is asked for."""
    backend, client = alone
    monkeypatch.setattr("django_distlock.backends.redis.store.STEP", 40)
    # A server gives what it keeps in one piece as a whole.
    client.config_set("zset-max-ziplist-entries", 16)
    keys = [f"k{number:03}" for number in range(120)]
    for each in keys:
        take(backend, each)
    seen, turns, others = list[str](), 0, list[Grant]()
    cursor = None
    while turns == 0 or (cursor is not None and turns < 100):
        turns += 1
        more, cursor = pages(cursor)
        seen += more
        for grant in others:
            backend.release(grant)
        others = [take(backend, f"other{turns % 3}-{number}") for number in range(20)]
    assert cursor is None
    assert set(seen) == set(keys)


def fill(client: Redis, size: int) -> None:
    """Let a server keep much that is no lock, as one does that serves a cache too."""
    client.mset({f"foreign:{number}": number for number in range(size)})
