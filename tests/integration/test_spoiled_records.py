"""Records that somebody else has written to: told as such, and nothing else suffers from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest
from django.db import connections

from django_distlock import LockError, lock_backends
from django_distlock.backends.redis import RedisBackend
from django_distlock.conf import table
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.inspection import Operation, list_locks, summary

from .admin_settings import LOCKS
from .admin_site import admin_project, browser_of, user_who_may
from .operating import run

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


WAYS: dict[str, Callable[[RedisBackend, str], object]] = {
    "another type": another_type,
    "no fence": without_fence,
    "fence": fields("fence", "many"),
    "end": fields("free_at", "soon"),
    "far end": fields("expires_at", "9" * 30),
    "ttl": fields("ttl", "long"),
    "holder": fields("holder", "{"),
    "list for a holder": fields("holder", "[]"),
    "metadata": fields("holder", json.dumps({"host": "h", "metadata": 7})),
    "process": fields("holder", json.dumps({"pid": "x"})),
    "no text": no_text,
}


@pytest.fixture(params=WAYS)
def spoiled(request: pytest.FixtureRequest, key: str) -> Iterator[str]:
    """Give a key whose record is spoiled, beside one that is sound, and its name in the store."""
    store = lock_backends[ALIAS]
    assert isinstance(store, RedisBackend)
    for each in (key, f"{key}:sound"):
        assert isinstance(store.acquire(each, new_token(), 60), Grant)
    name = store._at("lock", store.storage_name(key))
    WAYS[request.param](store, name)
    yield key
    store.store.command("DEL", name)


def test_listing_names_it(spoiled: str) -> None:
    """And shows the others. By holder, it is left out if its holder can be read and is another."""
    page = list_locks(backends=[ALIAS], prefix=spoiled)
    assert [each.key for each in page.locks] == [f"{spoiled}:sound"]
    [failure] = page.failures
    assert (failure.code, failure.key) == ("unreadable", spoiled)
    assert repr(spoiled) in failure.message
    page = list_locks(backends=[ALIAS], prefix=spoiled, host="elsewhere")
    assert page.locks == ()
    assert page.failures in ((), (failure,))
    assert summary(ALIAS).held.number >= 2
    # With status 0: the listing is whole but for its record.
    for more in ([], ["--all"]):
        ran = run("distlock_list", "--backend", ALIAS, "--prefix", spoiled, *more)
        assert ran.status == 0
        assert f"{spoiled}:sound" in ran.out
        assert f"{ALIAS}: The record of {spoiled!r} cannot be read" in ran.err
        told = run("distlock_list", "--backend", ALIAS, "--prefix", spoiled, "--json", *more)
        assert (told.status, [each["key"] for each in told.json["failures"]]) == (0, [spoiled])
    ran = run("distlock_doctor", "--backend", ALIAS, "--json")
    [found] = [each for each in ran.json["findings"] if each["id"] == "distlock.D021"]
    assert spoiled in found["keys"]


def test_dashboard_shows_it(spoiled: str) -> None:
    """In the list, with its page; and the locks of every backend beside it."""
    with admin_project(), user_who_may(Operation.VIEW) as user:
        client = browser_of(user)
        for more in ("", "&live=1"):
            answer = client.get(f"{LOCKS}?begins={spoiled}{more}")
            assert answer.status_code == 200
            text = answer.content.decode()
            assert "unreadable" in text
            assert f"{spoiled}:sound" in text
        told = client.get(f"{LOCKS}key/?backend={ALIAS}&key={spoiled}")
        assert told.status_code == 503
        assert "errornote" in told.content.decode()


def test_one_key_is_an_error_of_locks(spoiled: str) -> None:
    """Asked for alone, in both kinds of code; and it is granted to nobody."""
    store = lock_backends[ALIAS]
    with pytest.raises(LockError):
        store.read(spoiled)
    with pytest.raises(LockError):
        asyncio.run(store.aread(spoiled))
    try:
        answer = store.acquire(spoiled, new_token(), 60)
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


@pytest.mark.parametrize("alias", ["postgres", "sqlite"])
def test_row_of_a_table_that_was_changed_by_hand(key: str, alias: str) -> None:
    """It is listed as unreadable, too."""
    store = lock_backends[alias]
    for each in (key, f"{key}:sound"):
        assert isinstance(store.acquire(each, new_token(), 60), Grant)
    using = "default" if alias == "postgres" else alias
    with connections[using].cursor() as cursor:
        statement = f"UPDATE {table('locks')} SET holder = '[1]' WHERE \"key\" = %s"
        cursor.execute(statement, [key])
    page = list_locks(backends=[alias], prefix=key)
    assert [each.key for each in page.locks] == [f"{key}:sound"]
    assert [(each.code, each.key) for each in page.failures] == [("unreadable", key)]
