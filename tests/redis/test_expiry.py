"""Redis removes a record when its key is free, and a record that it is late to remove is free."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from django_distlock.backends.lua import script
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from tests.contract.helpers import held, take
from tests.contract.stores_redis import RedisStore


def expires_with_the_lock(store: RedisStore, key: str) -> bool:
    """Say whether Redis removes the record when the key is free, and at most 2 ms later."""
    free_at = int(store.fields(key)["free_at"])
    late = store.client.pexpiretime(store.at("lock", key)) * 1000 - free_at
    return bool(0 <= late <= 2000)


def index_expires_with_the_lock(store: RedisStore, key: str) -> bool:
    """Say whether what finds the record by its token goes with the record."""
    (index,) = store.tokens(key)
    lock = store.at("lock", key)
    return bool(store.client.pexpiretime(index) == store.client.pexpiretime(lock))


@pytest.mark.parametrize("ttl", [10.1, 10.1234567, 604_800])
def test_record_expires_when_its_key_is_free(store: RedisStore, key: str, ttl: float) -> None:
    """After a grant, an extend, a shorten, a takeover and a settlement."""
    grant, taken = take(store.backend, key, 100), list[Grant]()
    assert expires_with_the_lock(store, key)

    def take_over() -> bool:
        taken.append(take(store.backend, key, ttl, replace=grant.token))
        return True

    changes: list[Callable[[], object]] = [
        lambda: store.backend.extend(grant, ttl),
        lambda: store.backend.request_stop(key, ttl / 2, grant.token),
        take_over,
    ]
    for change in changes:
        assert change()
        assert expires_with_the_lock(store, key)
        assert index_expires_with_the_lock(store, key)
    assert store.backend.release(taken[0], 50) is True
    assert expires_with_the_lock(store, key)


def test_names_of_dead_sharers_go_with_the_last_one(store: RedisStore, key: str) -> None:
    """Also where one of them, who had no expiry, has kept the names."""
    endless = take(store.backend, key, None, permits=None)
    take(store.backend, key, 0.1, permits=None)
    store.elapse(1.3)
    assert store.client.exists(store.at("shared", key))
    assert store.backend.release(endless) is True
    assert not store.client.exists(store.at("shared", key))


def test_pause_expires_at_its_end(store: RedisStore, key: str) -> None:
    """Redis removes a pause when it is over; one that is over is not kept at all."""
    until = datetime.now(UTC) + timedelta(seconds=30)
    store.backend.pause(key, until)
    late = store.client.pexpiretime(store.at("pause", key)) - until.timestamp() * 1000
    assert 0 <= late <= 2
    store.backend.pause(key, datetime.now(UTC) - timedelta(seconds=1))
    assert not store.client.exists(store.at("pause", key))


def test_counter_never_expires(store: RedisStore, key: str) -> None:
    """A fence counter has no expiry, and outlives release, takeover, settle, force and expiry."""
    backend = store.backend
    counter = store.at("fence", key)

    def stays(fence: int) -> bool:
        kept = int(store.client.get(counter) or 0)
        return kept >= fence and store.client.pttl(counter) == -1

    grant = take(backend, key)
    assert stays(grant.fence)
    assert backend.release(grant) is True
    assert stays(grant.fence)
    grant = take(backend, key, replace=take(backend, key).token)
    assert backend.release(grant, 0) is True
    assert stays(grant.fence)
    grant = take(backend, key)
    assert backend.force_release(key) is not None
    assert stays(grant.fence + 1)
    grant = take(backend, key)
    store.elapse(40)
    assert backend.read(key) is None
    assert backend.cleanup(datetime.now(UTC)) == 0
    assert stays(grant.fence)
    assert take(backend, key).fence > grant.fence


@pytest.fixture
def overdue(store: RedisStore, key: str) -> Grant:
    """Give the grant of a record that is over, and that Redis keeps nevertheless."""
    grant = take(store.backend, key)
    store.outlast(31.5)
    store.client.persist(store.at("lock", key))
    for index in store.tokens(key):
        store.client.persist(index)
    return grant


def test_overdue_record_gives_way(store: RedisStore, overdue: Grant, key: str) -> None:
    """The next grant is no trouble, and keeps nothing of it."""
    store.client.hset(store.at("lock", key), "wanted", "1")
    store.client.hset(store.at("lock", key), "stop_requested_at", "1")
    grant = take(store.backend, key)
    assert grant.fence > overdue.fence
    record = held(store.backend, key)
    assert (record.token, record.wanted, record.stop_requested_at) == (grant.token, False, None)
    assert expires_with_the_lock(store, key)
    assert store.backend.release(overdue) is False


def test_overdue_record_goes_when_it_is_read_if_so_configured(
    store: RedisStore, overdue: Grant, key: str
) -> None:
    """With `cleanup_on_read` a read removes it; the counter stays, and so does a live record."""
    tidy = store.variant({"cleanup_on_read": True})
    live = take(store.backend, f"{key}-live")
    assert tidy.read(key) is None
    assert not store.has_record(key)
    assert held(tidy, f"{key}-live").token == live.token
    assert store.fence(key) == overdue.fence


def test_script_says_why_not(store: RedisStore, key: str) -> None:
    """A record that is missing, another's, over, or settled: an answer for each of them."""
    lock = store.at("lock", key)

    def answers(token: str) -> set[str]:
        return {
            store.client.eval(script(name).text, 1, lock, token, *more)
            for name, more in (("extend", ("30", "1.0")), ("release", ()), ("release", ("60",)))
        }

    grant = take(store.backend, key)
    assert answers(new_token()) == {"other"}
    store.outlast(31.5)
    store.client.persist(lock)
    assert answers(grant.token) == {"expired"}
    assert answers(new_token()) == {"other"}
    grant = take(store.backend, key)
    assert store.backend.release(grant, 60) is True
    assert answers(grant.token) == {"settled"}
    store.client.delete(lock)
    assert answers(grant.token) == {"missing"}
