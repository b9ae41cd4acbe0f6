"""Keys of Redis: no user key reaches what is another's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.cache import caches

from django_distlock.backends.redis.store import Place
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.contract.helpers import held, listed, take
from tests.keeper import Server

from .servers import backend_on

#: Keys that look like names of ours, like parts of them, or like patterns.
ODD = (
    "id:x", "fence:x", "lock:x", "token:x", "pause:x", "x", "distlock:x", "distlock:lock:x",
    "a}b{c", "{tag}", "{", "}", "{}", "{}:x", "*", "?", "a?c", "abc", "[a-c]bc", "[^a]bc", "a\\*",
    "\\", "a*", "^-]", " ", " x ", "line\nline", "\r\n", "\t", '"', "'", "%s", "$1", "🔒", "ß",
    "SELECT", "\x7f", "\u2028", "-", "x:", ":x", ":",
)  # fmt: skip


def test_odd_keys_stay_apart(backend: Any, client: Any) -> None:
    """Each has a lock, a fence and a pause of its own, and no other is touched."""
    grants = {key: take(backend, key) for key in ODD}
    assert len({each.fence for each in grants.values()}) == len(ODD)
    # A record, a counter and a token's index for each, and what lists them.
    assert client.dbsize() == 3 * len(ODD) + 1
    for number, key in enumerate(ODD):
        assert held(backend, key).key == key
        assert held(backend, key).token == grants[key].token
        assert backend.read_token(grants[key].token).key == key
        assert backend.release(grants[key]) is True
        assert all(backend.read(other) is None for other in ODD[: number + 1])
        assert all(backend.read(other) for other in ODD[number + 1 :])
    assert client.dbsize() == len(ODD)


def test_pause_is_of_one_key(backend: Any) -> None:
    """A pause keeps one key from being granted, and none that looks alike."""
    for paused in ("x", "pause:x", "{tag}", "*", "a}b{c"):
        backend.pause(paused, datetime.now(UTC) + timedelta(hours=1))
        for key in ODD:
            answer = backend.acquire(key, new_token(), 30)
            assert isinstance(answer, Contended if key == paused else Grant)
            assert key == paused or backend.release(answer) is True
        assert backend.pause(paused, None) is True


def test_prefix_of_a_listing_is_literal(backend: Any) -> None:
    """What a pattern would mean is meant by no prefix."""
    for key in ODD:
        take(backend, key)
    for prefix in (*ODD, "a", "b", "[", "lo"):
        expected = sorted(key for key in ODD if key.startswith(prefix))
        for limit in (1, 100):
            assert sorted(listed(backend, prefix, limit=limit)) == expected


@pytest.mark.parametrize("prefix", ["", "[a-c]*", "ünï", "a b", "lock", "x" * 600])
def test_listing_under_a_key_prefix_is_literal(private: Server, prefix: str) -> None:
    """Also with an odd `KEY_PREFIX`, one backend lists its own locks, and in pages."""
    near = [backend_on(private.url, key_prefix=each) for each in ("a", "b*", "distlock", "lock:lo")]
    for backend in near:
        take(backend, "theirs")
    backend = backend_on(private.url, key_prefix=prefix)
    names = [*ODD, "y" * 500, "z" * 512]
    for key in names:
        take(backend, key)
    assert sorted(listed(backend, limit=1)) == sorted(names)
    assert sorted(listed(backend, limit=100)) == sorted(names)
    cursor, raised = None, 0
    while True:
        page = backend.raise_fences(300_000_000_000_000, cursor=cursor, limit=1)
        raised, cursor = raised + page.raised + len(page.left), page.cursor
        if cursor is None:
            break
    assert raised == len(names)


@pytest.mark.parametrize("scan", [2**64, 10**40])
def test_cursor_that_no_scan_has_is_refused(private: Server, scan: int) -> None:
    """As any that is none: no error of the server's, which would look like an outage."""
    backend = backend_on(private.url)
    (server,) = backend.store.of_each_server("PING")
    assert backend.list(cursor=str(Place(server, 2**64 - 1, 0))).records == ()
    with pytest.raises(InvalidArgument, match="is not a cursor of this store"):
        backend.list(cursor=str(Place(server, scan, 0)))


def test_what_others_keep_in_the_same_database_is_theirs(
    private: Server, client: Any, key: str, settings: Any
) -> None:
    """Locks neither see nor touch the entries of a cache in the same database, and vice versa."""
    settings.CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": private.url,
        }
    }
    backend = backend_on(options={"cache": "default"})
    cache = caches["default"]
    cache.set(key, "cached")
    grant = take(backend, key)
    assert cache.get(key) == "cached"
    assert listed(backend) == [key]
    cache.delete(key)
    assert held(backend, key).token == grant.token
    assert backend.release(grant) is True
