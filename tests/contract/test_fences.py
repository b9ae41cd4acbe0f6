"""Fences grow with every grant of a key, for the life of the store."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from django.db import DatabaseError, models, transaction
from django.db.models import F

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument, LockError, LockUsageError
from django_distlock.core.fences import FENCE_MAX, FENCE_WARNING
from django_distlock.models import FenceCounter
from tests.processes import spawn

from .helpers import HAS_TTL, PATIENCE, contend, held, take
from .stores import DatabaseStore, Store

pytestmark = pytest.mark.requires("supports_fencing")

DATABASE_ONLY = pytest.mark.stores(
    "sqlite",
    "postgresql",
    "mysql",
    "session",
    why="its counters are in no table that a model reaches",
)


def test_grant_stores_its_fence(backend: BaseLockBackend, store: Store, key: str) -> None:
    """The counter says what was granted last, from the first grant on; where it counts, from 1."""
    last = 0
    for _ in range(2):
        grant = take(backend, key)
        assert store.registered.is_next(grant.fence, last)
        last = store.fence(key)
        assert last == grant.fence
        backend.release(grant)


@pytest.mark.parametrize(
    "end",
    ["force_release", *(pytest.param(e, marks=HAS_TTL) for e in ("expiry", "cleanup", "settle"))],
)
def test_fences_grow_over_an_end(
    backend: BaseLockBackend, store: Store, key: str, end: str
) -> None:
    """A grant behind one that is over has a higher fence; cleanup leaves the counters."""
    old = take(backend, key, 5)
    if end == "force_release":
        assert backend.force_release(key)
        # Before anybody is next.
        assert store.fence(key) > old.fence
    elif end == "settle":
        assert backend.release(old, 5)
    store.elapse(6.1)
    while end == "cleanup" and backend.cleanup(store.now()):
        pass
    assert end != "cleanup" or not store.has_record(key)
    between = store.fence(key)
    assert between >= old.fence
    assert take(backend, key).fence > between


@pytest.mark.requires("distributed")
def test_fences_grow_over_a_new_process(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A program that starts later counts on where the others were."""
    first = take(backend, key)
    backend.release(first)
    with spawn("tests.contract.workers:grant", store.registered.alias, key) as program:
        second = program.result(PATIENCE)
    assert store.registered.is_next(second, first.fence)
    assert store.registered.is_next(take(backend, key).fence, second)


def test_fences_grow_over_a_rollback_of_the_caller(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """A fence that was handed out inside a transaction is not handed out again when it fails."""
    using = store.registered.using or "default"
    fences = [take(backend, key).fence]
    backend.force_release(key)
    with transaction.atomic(using=using):
        if store.registered.store == "sqlite":
            # One writer per file: instead of waiting for itself, the caller is told at once.
            with pytest.raises(LockUsageError) as caught:
                take(backend, key)
            assert caught.value.code == "self_blocked"
        else:
            fences.append(take(backend, key).fence)
        transaction.set_rollback(True, using=using)
    backend.force_release(key)
    fences.append(take(backend, key).fence)
    assert fences == sorted(set(fences))


def test_grant_inside_a_transaction_is_seen_at_once(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """What is granted, extended and released inside of `atomic()` is so for everybody, now."""
    using = store.registered.using or "default"
    if store.registered.store == "sqlite":
        using = "default"
    with transaction.atomic(using=using):
        grant = take(backend, key, 5)
        assert store.fence(key) == grant.fence
        backend.extend(grant, 500)
        transaction.set_rollback(True, using=using)
    record = held(backend, key)
    assert (record.token, record.ttl) == (grant.token, 500)
    with transaction.atomic(using=using):
        assert backend.release(grant) is True
        transaction.set_rollback(True, using=using)
    assert backend.read(key) is None


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


@pytest.mark.parametrize(
    ("last", "warns"), [(FENCE_WARNING - 1, False), (FENCE_WARNING, True)], ids=["at", "above"]
)
def test_high_fence_warns(
    backend: BaseLockBackend,
    store: Store,
    key: str,
    caplog: pytest.LogCaptureFixture,
    last: int,
    warns: bool,
) -> None:
    """Above 8e14, and no sooner, a grant logs a warning that names the key."""
    assert FENCE_WARNING == 800_000_000_000_000
    store.set_fence(key, last)
    with caplog.at_level(logging.WARNING, logger="django_distlock"):
        grant = take(backend, key)
    assert grant.fence == last + 1
    assert [key in record.getMessage() for record in caplog.records] == [True] * warns
    assert grant.token not in caplog.text


Counters = models.QuerySet[FenceCounter]
MISUSES: dict[str, Callable[[Counters, FenceCounter], object]] = {
    "save anew": lambda counters, row: FenceCounter(
        storage_key=row.storage_key, key=row.key, fence=0
    ).save(using=counters.db),
    "delete": lambda counters, row: row.delete(),
    "delete using": lambda counters, row: row.delete(using=counters.db),
    "delete some": lambda counters, row: counters.filter(key=row.key).delete(),
    "delete all": lambda counters, row: counters.all().delete(),
    "save": lambda counters, row: row.save(),
    "save a field": lambda counters, row: row.save(update_fields=["fence"]),
    "update": lambda counters, row: counters.filter(key=row.key).update(fence=F("fence") - 1),
    "move": lambda counters, row: counters.filter(key=row.key).update(storage_key="elsewhere"),
    "bulk_update": lambda counters, row: counters.bulk_update([row], ["fence"]),
    "bulk_create": lambda counters, row: counters.bulk_create(
        [row], update_conflicts=True, update_fields=["fence"], unique_fields=["storage_key"]
    ),
    "update_or_create": lambda counters, row: counters.update_or_create(
        defaults={"fence": 0}, storage_key=row.storage_key
    ),
}


@DATABASE_ONLY
@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_models_refuse_to_take_a_fence_back(
    backend: BaseLockBackend,
    store: Store,
    key: str,
    misuse: Callable[[Counters, FenceCounter], object],
) -> None:
    """Neither a model nor a queryset deletes or lowers a counter, or gives it another key."""
    fence = take(backend, key).fence
    counters = FenceCounter.objects.using(store.registered.using)
    row = counters.get(key=key)
    row.fence = 0
    with pytest.raises((LockUsageError, DatabaseError)), transaction.atomic(using=counters.db):
        misuse(counters, row)
    assert store.fence(key) == fence


@pytest.mark.stores("postgresql", "session", why="no trigger guards the counters against SQL")
@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM {table} WHERE key = %s",
        "UPDATE {table} SET fence = fence - 1 WHERE key = %s",
        "UPDATE {table} SET fence = 0 WHERE key = %s",
        "UPDATE {table} SET storage_key = storage_key || 'x' WHERE key = %s",
        (
            "INSERT INTO {table} (storage_key, key, fence) SELECT storage_key, key, 0 FROM {table}"
            " WHERE key = %s ON CONFLICT (storage_key) DO UPDATE SET fence = excluded.fence"
        ),
    ],
)
def test_server_refuses_to_take_a_fence_back(
    backend: BaseLockBackend, store: DatabaseStore, key: str, statement: str
) -> None:
    """SQL by hand neither deletes nor lowers a counter, nor gives it another key."""
    fence = take(backend, key).fence
    with pytest.raises(DatabaseError, match="fence"):
        store.ask(statement.format(table=store.fences), [key])
    assert store.fence(key) == fence
