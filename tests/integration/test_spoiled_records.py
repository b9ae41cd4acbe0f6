"""Records that somebody else has written to: told as such, and nothing else suffers from them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test import Client, override_settings

from django_distlock import LockError, distlock_all, lock_backends
from django_distlock.backends.redis import RedisBackend
from django_distlock.conf import table
from django_distlock.contrib.metrics import gauges
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant, Holder, InTheWay, clock_fence
from django_distlock.inspection import force_release, list_locks, request_stop, summary
from django_distlock.inspection.diagnosis import diagnose
from django_distlock.locks.opening import Opening
from django_distlock.models import LockEvent, SeenFence
from tests.contract.helpers import take
from tests.contract.locking import eventually
from tests.settings import DISTLOCK

from .admin_settings import LOCKS
from .operating import WHO, run

ALIAS = "redis"


def fields(*pairs: str) -> Callable[[RedisBackend, str], None]:
    """Give what overwrites fields of a record."""
    return lambda store, name: store.store.command("HSET", name, *pairs)


def another_type(store: RedisBackend, name: str) -> None:
    """Put a text in the place of a record."""
    store.store.command("SET", name, "spoiled")


def without_fence(store: RedisBackend, name: str) -> None:
    """Take a field from a record."""
    store.store.command("HDEL", name, "fence")


def no_text(store: RedisBackend, name: str) -> None:
    """Put bytes into a field that are no UTF-8."""
    store.store.client.hset(name, "holder", b"\xff")


#: Ways to spoil who holds it.
HOLDERS: dict[str, Callable[[RedisBackend, str], object]] = {
    "no text": no_text,
    "holder": fields("holder", "{"),
    "list for a holder": fields("holder", "[]"),
    "metadata": fields("holder", json.dumps({"host": "h", "metadata": 7})),
    "process": fields("holder", json.dumps({"pid": "x"})),
    "start": fields("holder", json.dumps({"started_at": "x"})),
    "host": fields("holder", json.dumps({"host": 7})),
    "task": fields("holder", json.dumps({"host": "h", "task_id": [1]})),
    "depth": fields("holder", "[" * 100_000),
}
WAYS: dict[str, Callable[[RedisBackend, str], object]] = {
    "another type": another_type,
    "no fence": without_fence,
    "fence": fields("fence", "many"),
    "end": fields("free_at", "soon"),
    "far end": fields("expires_at", "9" * 30),
    "ttl": fields("ttl", "long"),
    **HOLDERS,
}


@pytest.fixture
def spoiled(key: str) -> Iterator[dict[str, str]]:
    """Give keys whose records are spoiled, one in each way, beside one that is sound."""
    store = lock_backends[ALIAS]
    assert isinstance(store, RedisBackend)
    keys = {way: f"{key}:{way}" for way in WAYS}
    for each in (f"{key}:sound", *keys.values()):
        assert isinstance(store.acquire(each, new_token(), 60), Grant)
    names = {way: store._at("lock", store.queues.name_of(each)) for way, each in keys.items()}
    for way, spoil in WAYS.items():
        spoil(store, names[way])
    yield keys
    for name in names.values():
        store.store.command("DEL", name)


def test_listing_names_them(spoiled: dict[str, str], key: str) -> None:
    """And shows the others. By holder, those are left out whose holder can be read."""
    keys = sorted(spoiled.values())
    page = list_locks(backends=[ALIAS], prefix=key)
    assert [each.key for each in page.locks] == [f"{key}:sound"]
    assert sorted(str(each.key) for each in page.failures) == keys
    for failure in page.failures:
        assert failure.code == "unreadable"
        assert repr(failure.key) in failure.message
    of_host = list_locks(backends=[ALIAS], prefix=key, host="elsewhere")
    assert of_host.locks == ()
    assert {*of_host.failures} <= {*page.failures}
    assert summary(ALIAS).held.number > len(keys)
    # With status 0: the listing is whole but for its records.
    for more in ([], ["--all"]):
        ran = run("distlock_list", "--backend", ALIAS, "--prefix", key, *more)
        assert ran.status == 0
        assert f"{key}:sound" in ran.out
        for each in keys:
            assert f"{ALIAS}: The record of {each!r} cannot be read" in ran.err
        told = run("distlock_list", "--backend", ALIAS, "--prefix", key, "--json", *more)
        assert told.status == 0
        assert sorted(each["key"] for each in told.json["failures"]) == keys
    ran = run("distlock_doctor", "--backend", ALIAS, "--json")
    [found] = [each for each in ran.json["findings"] if each["id"] == "distlock.D021"]
    # It names some of them, and counts all.
    assert found["keys"]
    (number,) = re.findall(r"(\d+) keys with unreadable records", found["message"])
    assert int(number) >= len(keys)


def test_listing_names_it_on_one_page(key: str) -> None:
    """Also where the pages are small. The order of pages is that of Redis's table of hashes."""
    store: Any = lock_backends[ALIAS]
    keys = sorted((f"{key}:{number}" for number in range(3)), key=store.queues.name_of)
    grants = [store.acquire(each, new_token(), 60) for each in keys]
    without_fence(store, store._at("lock", store.queues.name_of(keys[1])))
    pages = [list_locks(backends=[ALIAS], prefix=key, limit=1)]
    while (cursor := pages[-1].cursor) is not None:
        pages.append(list_locks(backends=[ALIAS], prefix=key, limit=1, cursor=cursor))
    assert all(isinstance(each, Grant) for each in grants)
    assert sorted(each.key for page in pages for each in page.locks) == sorted(keys[::2])
    assert [each.key for page in pages for each in page.failures] == [keys[1]]
    store.store.command("DEL", store._at("lock", store.queues.name_of(keys[1])))


def test_release_names_them(spoiled: dict[str, str], key: str) -> None:
    """They may be among the keys that were meant, and are held."""
    match = ["--backend", ALIAS, "--prefix", key]
    out = run("distlock_release", *match, "--dry-run").out
    assert [each for each in spoiled.values() if f"Not released: {each}." not in out] == []
    ran = run("distlock_release", *match, "--force", "--reason", "it hangs", "--json")
    assert ran.status == 1
    assert [each["key"] for each in ran.json["outcomes"]] == [f"{key}:sound"]
    assert sorted(each["key"] for each in ran.json["failures"]) == sorted(spoiled.values())


@pytest.fixture
def client(browser: Client) -> Iterator[Client]:
    """Give the browser of an operator, whose pages ask the backends of these tests."""
    with override_settings(DISTLOCK={alias: DISTLOCK[alias] for alias in (*TABLES, ALIAS)}):
        yield browser


def test_dashboard_shows_them(client: Client, spoiled: dict[str, str], key: str) -> None:
    """In the list, each with its page; and the locks of other backends beside them."""
    for more in ("", "&live=1"):
        answer = client.get(f"{LOCKS}?begins={key}{more}")
        assert answer.status_code == 200
        text = answer.content.decode()
        for each in spoiled.values():
            assert f"The record of &#x27;{each}&#x27; cannot be read" in text
        assert f"{key}:sound" in text
    for way, each in spoiled.items():
        told = client.get(f"{LOCKS}key/", {"backend": ALIAS, "key": each})
        assert told.status_code == (200 if way in HOLDERS else 503), way
        assert ("errornote" in told.content.decode()) == (way not in HOLDERS), way


def test_spoiled_holder_in_redis_is_in_nobodys_way(spoiled: dict[str, str]) -> None:
    """Who holds a key decides nothing: it is read, operated and taken from whoever has it."""
    store = lock_backends[ALIAS]
    for key in (spoiled[way] for way in HOLDERS):
        record = store.read(key)
        assert record is not None
        assert record.holder == Holder()
        assert isinstance(store.acquire(key, new_token(), 60), Contended)
        several = store.records.acquire({f"{key}:a": new_token(), key: new_token()}, 60)
        assert isinstance(several, InTheWay)
        assert several.key == key
        done = [request_stop(key, backend=ALIAS, **WHO), force_release(key, backend=ALIAS, **WHO)]
        assert [each.is_done for each in done] == [True, True]
        assert isinstance(store.acquire(key, new_token(), 60), Grant)


def test_one_key_is_an_error_of_locks(spoiled: dict[str, str]) -> None:
    """Asked for alone, in both kinds of code; and it is granted to nobody."""
    store = lock_backends[ALIAS]
    for key in (spoiled[way] for way in WAYS.keys() - HOLDERS.keys()):
        with pytest.raises(LockError):
            store.read(key)
        with pytest.raises(LockError):
            asyncio.run(store.threads.run(store.read, key))
        try:
            answer = store.acquire(key, new_token(), 60)
        except LockError as error:
            assert error.code == "internal"  # noqa: PT017 - or it is contended
        else:
            assert isinstance(answer, Contended)


def test_names_of_others_are_no_trouble(key: str) -> None:
    """Keys of other programs in the same database of Redis may be no text."""
    store = lock_backends[ALIAS]
    assert isinstance(store, RedisBackend)
    store.store.client.set(b"\xff" + key.encode(), "x", px=5000)
    assert summary(ALIAS).held.is_exact
    assert isinstance(store.acquire(key, new_token(), 60), Grant)


#: Where the tables of a backend are.
TABLES = {
    alias: using
    for alias, using in {
        "postgres": "default", "postgres_orm": "default", "sqlite": "sqlite", "mariadb": "mariadb",
    }.items()
    if using in connections.settings
}  # fmt: skip
#: A time that is none, in microseconds.
NEVER = 9 * 10**18


@contextmanager
def changed_by_hand(alias: str, key: str, sets: str, ttl: float = 60) -> Iterator[Grant]:
    """Hold a key whose row somebody has written to."""
    connection = connections[TABLES[alias]]
    locks, column = table("locks"), connection.ops.quote_name("key")
    grant = lock_backends[alias].acquire(key, new_token(), ttl)
    assert isinstance(grant, Grant)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {locks} SET {sets} WHERE {column} = %s", [key])
        try:
            yield grant
        finally:
            cursor.execute(f"DELETE FROM {locks} WHERE {column} = %s", [key])


#: The columns of times, of which each can be none.
TIMES = (
    "acquired_at", "renewed_at", "expires_at", "free_at", "stop_requested_at", "renewed_until",
)  # fmt: skip


@pytest.mark.parametrize("alias", [each for each in TABLES if each != "postgres_orm"])
def test_row_of_a_table_that_was_changed_by_hand(key: str, alias: str) -> None:
    """It is listed as unreadable, too, and the metrics count the others."""
    sound = lock_backends[alias].acquire(f"{key}:sound", new_token(), 60)
    for sets in ("holder = '[1]'", *(f"{each} = {NEVER}" for each in TIMES)):
        with changed_by_hand(alias, key, sets):
            page = list_locks(backends=[alias], prefix=key)
            assert gauges._count(alias) is not None
        assert [each.key for each in page.locks] == [f"{key}:sound"], sets
        assert [(each.code, each.key) for each in page.failures] == [("unreadable", key)], sets
    assert isinstance(sound, Grant)
    lock_backends[alias].release(sound)


@pytest.mark.parametrize("alias", ["postgres", "sqlite"])
def test_spoiled_time_of_an_expired_lease_hides_no_other(key: str, alias: str) -> None:
    """The dashboard names those that can be read, and the doctor counts all."""
    over = "expires_at = 1, free_at = 2"
    with (
        changed_by_hand(alias, key, f"{over}, renewed_until = {NEVER}"),
        changed_by_hand(alias, f"{key}:sound", over),
    ):
        found = {each.key for each in lock_backends[alias].expired(limit=10_000)}
        told = {each.id for each in diagnose([alias], writes=False).findings}
    assert "distlock.D004" in told
    assert f"{key}:sound" in found
    assert key not in found


@pytest.mark.parametrize("alias", TABLES)
def test_spoiled_holder_of_a_row_is_in_nobodys_way(key: str, alias: str) -> None:
    """Who holds a key decides nothing: it is extended, released, operated and taken over."""
    store = lock_backends[alias]
    with changed_by_hand(alias, key, "holder = '[1]'") as grant:
        answer = store.acquire(key, new_token(), 60)
        assert isinstance(answer, Contended)
        assert answer.fence == grant.fence
        assert isinstance(store.extend(grant, 60), Grant)
        assert store.request_stop(key) is not None
        assert store.force_release(key) is not None
        assert isinstance(store.acquire(key, new_token(), 60), Grant)


@contextmanager
def all_changed_by_hand(key: str, sets: str, ttl: float = 60) -> Iterator[None]:
    """Hold a key on each database, whose rows somebody has written to."""
    with ExitStack() as stack:
        for alias in TABLES:
            stack.enter_context(changed_by_hand(alias, f"{key}:{alias}", sets, ttl))
        yield


def test_spoiled_holders_and_waiters_are_no_error_of_the_pages(client: Client, key: str) -> None:
    """Somebody holds the key and somebody waits, whoever that is."""
    with all_changed_by_hand(key, "holder = '[1]'"):
        assert client.get(LOCKS, {"begins": key}).status_code == 200
        for alias, using in TABLES.items():
            store: Any = lock_backends[alias]
            each, waiters = f"{key}:{alias}", table("waiters")
            note = store.waiters.note(each, Holder(host="h"), 60)
            with connections[using].cursor() as cursor:
                where = [store.queues.name_of(each)]
                cursor.execute(f"UPDATE {waiters} SET holder = '[1]' WHERE storage_key = %s", where)
            answer = client.get(f"{LOCKS}key/", {"backend": alias, "key": each})
            store.waiters.drop(each, note)
            assert answer.status_code == 200, alias


def test_spoiled_holder_whose_lease_has_expired(client: Client, key: str) -> None:
    """The dashboard names it, and the next one gets the key."""

    def has_expired(alias: str) -> bool:
        return len(lock_backends[alias].expired(f"{key}:{alias}")) == 1

    def is_granted(alias: str) -> bool:
        answer = lock_backends[alias].acquire(f"{key}:{alias}", new_token(), 60)
        return isinstance(answer, Grant)

    with all_changed_by_hand(key, "holder = '7'", ttl=0.2):
        for alias in TABLES:
            assert eventually(partial(has_expired, alias)), alias
        assert client.get(LOCKS).status_code == 200
        assert "D013" not in str(diagnose([*TABLES], writes=False).findings)
        for alias in TABLES:
            assert eventually(partial(is_granted, alias)), alias


def test_spoiled_numbers_of_a_row_are_no_error_of_the_page(client: Client, key: str) -> None:
    """At most the backend is one that could not be asked."""
    for sets in (
        f"expires_at = {NEVER}, free_at = {NEVER}",
        f"acquired_at = -{NEVER}",
        "acquired_at = -62135596800000000",
        "ttl = 0, renewed_at = acquired_at + 1",
        "ttl = 1e-300, renewed_at = acquired_at + 1",
    ):
        with all_changed_by_hand(key, sets):
            assert client.get(LOCKS).status_code == 200, sets


def test_spoiled_numbers_in_redis_are_no_error_of_the_page(client: Client, key: str) -> None:
    """Nor where they can be read as numbers."""
    store: Any = lock_backends[ALIAS]
    assert isinstance(store.acquire(key, new_token(), 60), Grant)
    name = store._at("lock", store.queues.name_of(key))
    given = store.store.client.hgetall(name)
    try:
        for pair in (("ttl", "nan"), ("ttl", "1e-320"), ("acquired_at", "-62135596800000000")):
            store.store.client.hset(name, mapping=given)
            store.store.command("HSET", name, "renewed_at", "1", *pair)
            assert client.get(LOCKS).status_code == 200, pair
            answer = client.get(f"{LOCKS}key/", {"backend": ALIAS, "key": key})
            assert answer.status_code in (200, 503), pair
    finally:
        store.store.command("DEL", name)


def test_record_spoiled_amid_an_acquire_keeps_no_other_key(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several that are given back, those behind it are free, and the error is the caller's."""
    store: Any = lock_backends[ALIAS]
    keys = [f"{key}:{number}" for number in range(3)]
    ask = Opening.ask

    def interrupted(opening: Opening) -> None:
        ask(opening)
        another_type(store, store._at("lock", store._name(keys[0])))
        raise ZeroDivisionError

    monkeypatch.setattr(Opening, "ask", interrupted)
    with pytest.raises(ZeroDivisionError), distlock_all(*keys, backend=ALIAS):
        pass
    store.store.command("DEL", store._at("lock", store._name(keys[0])))
    assert [store.read(each) for each in keys[1:]] == [None, None]


@pytest.mark.parametrize("how", ["SET", "RPUSH"])
def test_spoiled_counter_is_in_no_others_way(key: str, how: str) -> None:
    """All others are raised, and it is named; asked for by itself, the error says more."""
    store: Any = lock_backends[ALIAS]
    for number in range(3):
        store.release(take(store, f"{key}:{number}"))
    counter = store._at("fence", store._name(f"{key}:1"))
    store.store.command("DEL", counter)
    store.store.command(how, counter, "many")
    to = clock_fence(store.clock()) + 10**9
    pages = [store.raise_fences(to, limit=1)]
    while pages[-1].cursor is not None:
        pages.append(store.raise_fences(to, cursor=pages[-1].cursor, limit=1000))
    ran = run("distlock_fence", "raise", f"{key}:1", f"--to={to}", f"--backend={ALIAS}")
    store.store.command("DEL", counter)
    assert f"{key}:1" in [name for page in pages for name in page.left]
    assert [take(store, f"{key}:{number}").fence for number in (0, 2)] == [to + 1] * 2
    assert (ran.status, "failed" in ran.err) == (69, True)


def test_cache_without_an_address_is_no_error_of_the_page(client: Client) -> None:
    """A cache of the project's, which no lock needs, may be set up wrongly."""
    redis = "django.core.cache.backends.redis.RedisCache"
    addresses: list[object] = ["", [], "http://x"]
    caches: dict[str, dict[str, Any]] = {
        f"cache-{number}": {"BACKEND": redis, "LOCATION": each}
        for number, each in enumerate(addresses)
    }
    caches["no-pool"] = {"BACKEND": redis, "OPTIONS": {"pool_class": "redis.none.Pool"}}
    with override_settings(CACHES={**caches, "default": caches["cache-0"]}):
        assert client.get(LOCKS).status_code == 200


def test_client_factory_that_fails_is_an_outage_of_its_backend(client: Client) -> None:
    """One whose server is away, and one that is wrong."""

    def factory_of(error: Exception) -> Callable[[], None]:
        def factory() -> None:
            raise error

        return factory

    failing = {"away": ConnectionRefusedError("x"), "wrong": KeyError("REDIS_URL")}
    configured = {
        alias: {**settings.DISTLOCK[ALIAS], "OPTIONS": {"client_factory": factory_of(error)}}
        for alias, error in failing.items()
    }
    with override_settings(DISTLOCK=configured):
        answer = client.get(LOCKS)
    assert answer.status_code == 200
    for alias in failing:
        assert f'<li class="error"><strong>{alias}:</strong>' in answer.content.decode()


class Nowhere:
    """Sends what the dashboard reads to a database that there is not."""

    def db_for_read(self, model: type, **_: object) -> str | None:
        """Read events there."""
        return "nowhere" if model is LockEvent else None

    def db_for_write(self, model: type, **_: object) -> str | None:
        """Write marks there."""
        return "nowhere" if model is SeenFence else None


def test_router_to_nowhere_costs_what_it_routes(client: Client) -> None:
    """The locks are shown."""
    with override_settings(DATABASE_ROUTERS=[Nowhere()]):
        assert client.get(LOCKS).status_code == 200
