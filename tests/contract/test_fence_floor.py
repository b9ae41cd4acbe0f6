"""`FENCE_FLOOR = "clock"`: fences that survive the loss of their counters."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import FENCE_MAX, Grant, clock_fence

from .helpers import COUNTS, at_once, take
from .stores import DatabaseStore, MemoryStore, Store
from .stores_redis import RedisStore
from .stores_session import SessionStore


@pytest.fixture
def floored(store: Store) -> BaseLockBackend:
    """Give the backend on the same store, with fences that follow the clock."""
    if isinstance(store, MemoryStore):
        config = replace(store.memory.config, fence_floor="clock")
        return MemoryBackend(config, clock=store.clock)
    if isinstance(store, SessionStore):
        return store.backend  # They always do.
    assert isinstance(store, DatabaseStore | RedisStore)
    return store.variant(fence_floor="clock")


def is_the_clock(grant: Grant) -> bool:
    """Say whether a fence is the time at which it was granted, or the moment before."""
    granted_at = grant.acquired_at
    return clock_fence(granted_at - timedelta(seconds=1)) < grant.fence <= clock_fence(granted_at)


def lose(store: Store, backend: BaseLockBackend, key: str, fence: int | None = None) -> None:
    """Lose the counter of a key, or find an older one in its place, as after a restore."""
    if isinstance(backend, MemoryBackend):
        name = store.name(key)
        backend._fences.pop(name)
        if fence is not None:
            backend._fences[name] = fence
        return
    if isinstance(store, RedisStore):
        store.lose_fence(key)
        if fence is not None:
            store.set_fence(key, fence)
        return
    assert isinstance(store, DatabaseStore)
    if store.registered.store in ("postgresql", "session"):
        store.ask("SET session_replication_role = replica")  # puts the trigger to sleep
    store.ask(f"DELETE FROM {store.fences} WHERE storage_key = %s", [store.name(key)])
    if store.registered.store in ("postgresql", "session"):
        store.ask("SET session_replication_role = DEFAULT")
    if fence is not None:
        store.set_fence(key, fence)


def test_first_fence_is_the_clock(floored: BaseLockBackend, store: Store, key: str) -> None:
    """The first grant of a key has the store's time, in units of 10 µs, as its fence."""
    slack = timedelta(seconds=60)  # memory and SQLite have no clock that the test can read exactly
    grant = take(floored, key)
    assert clock_fence(store.now() - slack) < grant.fence <= clock_fence(store.now() + slack)
    assert is_the_clock(grant)


@pytest.mark.parametrize("found", [None, 3], ids=["missing", "stale"])
def test_fences_rise_over_a_lost_counter(
    floored: BaseLockBackend, store: Store, key: str, found: int | None
) -> None:
    """Whether its counter is gone or old, a key's next grant has a higher fence."""
    before = take(floored, key)
    floored.release(before)
    lose(store, floored, key, found)
    after = take(floored, key)
    assert after.fence > before.fence
    assert is_the_clock(after)


def test_counter_ahead_of_the_clock_counts_on(
    floored: BaseLockBackend, store: Store, key: str
) -> None:
    """A counter that a clock in the past left behind still grows by one."""
    floored.release(take(floored, key))
    ahead = clock_fence(store.now()) + 10**9
    assert ahead < FENCE_MAX
    floored.raise_fences(ahead, key=key)
    assert take(floored, key).fence == ahead + 1


def test_grants_of_one_instant_differ(floored: BaseLockBackend, key: str) -> None:
    """Grants that follow each other at once, from many threads, have different, growing fences."""

    def turn() -> list[int]:
        fences = []
        for _ in range(5):
            answer = floored.acquire(key, new_token(), 30, bound=1)
            if isinstance(answer, Grant):
                fences.append(answer.fence)
                floored.release(answer)
        return fences

    found = [fence for fences in at_once([turn] * 3) for fence in fences]
    assert len(set(found)) == len(found) > 0


def test_force_release_moves_the_fence_to_the_clock(
    floored: BaseLockBackend, store: Store, key: str
) -> None:
    """Also the fence that a force-release leaves is not below the clock."""
    grant = take(floored, key)
    lose(store, floored, key, 3)
    floored.force_release(key)
    assert take(floored, key).fence > grant.fence


@COUNTS
def test_without_the_setting_a_lost_counter_repeats_fences(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """What the setting is for: by default a counter that is lost starts again."""
    first = take(backend, key)
    backend.release(first)
    lose(store, backend, key)
    assert take(backend, key).fence == first.fence == 1
