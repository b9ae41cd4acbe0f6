"""Fences grow with every grant of a key, for the life of the store."""

from __future__ import annotations

import logging

import pytest
from django.db import DatabaseError

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument, LockError
from django_distlock.core.records import FENCE_MAX, FENCE_WARNING
from tests.processes import spawn

from .helpers import PATIENCE, contend, held, take
from .locking import rolled_back
from .stores import DatabaseStore, Store

pytestmark = pytest.mark.requires("supports_fencing")


def test_release_is_true_once(backend: BaseLockBackend, store: Store, key: str) -> None:
    """It leaves nothing but the fence counter, also where it is to be kept for what is over."""
    ways = (None, 0, 5) if backend.supports_ttl else (None,)
    grants = {seconds: take(backend, f"{key}-{seconds}", 30) for seconds in ways}
    store.elapse(5.1)
    for seconds, grant in grants.items():
        assert backend.release(grant, seconds) is True
        assert backend.release(grant) is False
        assert backend.read(grant.key) is None
        assert not store.has_record(grant.key)
        assert store.fence(grant.key) == grant.fence
        second = take(backend, grant.key)
        assert backend.release(grant) is False
        assert held(backend, grant.key).token == second.token


@pytest.mark.requires("distributed")
def test_fences_grow_over_a_new_process(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A program that starts later counts on where the others were."""
    first = take(backend, key)
    backend.release(first)
    with spawn("tests.contract.workers:grant", store.registered.alias, key) as program:
        second = program.result(PATIENCE)
    assert store.registered.is_next(second, first.fence)
    assert store.registered.is_next(take(backend, key).fence, second)


def test_rollback_of_the_caller_takes_nothing_back(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """What is granted, extended and released inside of `atomic()` is so for everybody, now."""
    # One writer per file: inside of a transaction on it, SQLite is not asked.
    beside = store.registered.store == "sqlite"
    using = "default" if beside else store.registered.using or "default"
    with rolled_back(using):
        grant = take(backend, key, 5)
        assert store.fence(key) == grant.fence
        backend.extend(grant, 500)
    record = held(backend, key)
    assert (record.token, record.ttl) == (grant.token, 500)
    with rolled_back(using):
        assert backend.release(grant) is True
    assert backend.read(key) is None
    assert take(backend, key).fence > grant.fence


def test_keys_count_for_themselves(backend: BaseLockBackend, store: Store, key: str) -> None:
    """The grants of one key do not move the fence of another."""
    for _ in range(3):
        backend.release(take(backend, f"{key}-a"))
    before = store.fence(f"{key}-a")
    assert store.fence(f"{key}-b") == 0
    assert store.registered.is_next(take(backend, f"{key}-b").fence)
    assert store.fence(f"{key}-a") == before
    assert store.registered.is_next(take(backend, f"{key}-a").fence, grants=4)


def test_only_grants_use_up_fences(backend: BaseLockBackend, store: Store, key: str) -> None:
    """However many are refused, or extend, the next grant has the next fence."""
    grant = take(backend, key)
    for wanted in (False, True, False, True):
        contend(backend, key, wanted=wanted)
    if backend.supports_token_lookup:
        with pytest.raises(InvalidArgument):
            backend.acquire(f"{key}-b", grant.token, 30)
        assert store.fence(f"{key}-b") == 0
    backend.extend(grant)
    backend.extend_many([grant])
    if backend.supports_ttl:
        backend.request_stop(key, 5)
        backend.release(grant, 0)
    backend.release(grant)
    assert store.fence(key) == grant.fence
    assert store.registered.is_next(take(backend, key).fence, grant.fence)


def test_overflow_fails_and_leaves_nothing(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """Behind the greatest fence, acquire fails, the key is not held, the counter stays."""
    store.set_fence(key, FENCE_MAX - 1)
    grant = take(backend, key)
    assert grant.fence == held(backend, key).fence == FENCE_MAX == 900_000_000_000_000
    backend.release(grant)
    for _ in range(2):
        with pytest.raises(LockError) as caught:
            take(backend, key)
        assert type(caught.value) is LockError
        assert (caught.value.code, caught.value.key) == ("internal", key)
        assert str(FENCE_MAX) in str(caught.value)
    assert backend.read(key) is None
    assert not store.has_record(key)
    assert store.fence(key) == FENCE_MAX


def test_overflow_takes_nobody_over(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Where no fence is left, a takeover and a force-release leave the holder its lease."""
    grant = take(backend, key)
    store.set_fence(key, FENCE_MAX)
    with pytest.raises(LockError):
        take(backend, key, replace=grant.token)
    assert held(backend, key).token == grant.token
    with pytest.raises(LockError):
        backend.force_release(key)
    assert held(backend, key).token == grant.token
    assert backend.release(grant) is True


def test_high_fence_warns(
    backend: BaseLockBackend, store: Store, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Above 8e14, and no sooner, a grant logs a warning that names the key."""
    store.set_fence(key, FENCE_WARNING - 1)
    with caplog.at_level(logging.WARNING, logger="django_distlock"):
        grant = take(backend, key)
        assert grant.fence == FENCE_WARNING == 800_000_000_000_000
        assert key not in caplog.text
        backend.release(grant)
        grant = take(backend, key)
    assert grant.fence == FENCE_WARNING + 1
    assert sum(key in record.getMessage() for record in caplog.records) == 1
    assert grant.token not in caplog.text


@pytest.mark.stores("postgresql", "session", why="no trigger guards the counters against SQL")
def test_server_refuses_to_take_a_fence_back(
    backend: BaseLockBackend, store: DatabaseStore, key: str
) -> None:
    """SQL by hand neither deletes nor lowers a counter, nor gives it another key."""
    fence, table = take(backend, key).fence, store.fences
    for statement in (
        f"DELETE FROM {table} WHERE key = %s",
        f"UPDATE {table} SET fence = fence - 1 WHERE key = %s",
        f"UPDATE {table} SET fence = 0 WHERE key = %s",
        f"UPDATE {table} SET storage_key = storage_key || 'x' WHERE key = %s",
        (
            f"INSERT INTO {table} (storage_key, key, fence) SELECT storage_key, key, 0 FROM {table}"
            " WHERE key = %s ON CONFLICT (storage_key) DO UPDATE SET fence = excluded.fence"
        ),
    ):
        with pytest.raises(DatabaseError, match="fence"):
            store.ask(statement, [key])
        assert store.fence(key) == fence
