"""Raising fence counters, after a store was changed or restored."""

from __future__ import annotations

from typing import Any

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.records import FENCE_MAX, Raised, clock_fence

from .helpers import held, prompt, take
from .stores import Store, Stranger


def used(backend: BaseLockBackend, key: str) -> None:
    """Leave a counter behind."""
    backend.release(take(backend, key))


def above(store: Store) -> int:
    """Give a number that no counter has reached."""
    return clock_fence(store.now()) + 10**9 if store.registered.follows_clock else 500


def every_page(backend: BaseLockBackend, to: int | None, limit: int) -> list[Raised]:
    """Raise all counters of a backend."""
    pages = [backend.raise_fences(to, limit=limit)]
    while (cursor := pages[-1].cursor) is not None:
        pages.append(backend.raise_fences(to, cursor=cursor, limit=limit))
    return pages


def test_counter_is_raised_and_never_lowered(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """A key without a counter gets one, and one that is as high stays; it counts on from there."""
    assert backend.raise_fences(500, key=key) == Raised(1)
    assert backend.read(key) is None
    for to in (1, 499, 500):
        assert backend.raise_fences(to, key=key) == Raised(0)
    assert store.fence(key) == 500
    used(backend, key)
    to = above(store) + 500
    assert backend.raise_fences(to, key=key) == Raised(1)
    assert take(backend, key).fence == to + 1


def test_clock_is_the_stores(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Without a number, a counter is raised to what the store's clock says."""
    grant = take(backend, key)
    backend.release(grant)
    backend.raise_fences(key=key)
    fence = take(backend, key).fence
    assert clock_fence(grant.acquired_at) < fence < clock_fence(grant.acquired_at) + 60 * 100_000


def test_held_key_is_left_alone(backend: BaseLockBackend, store: Store, key: str) -> None:
    """The counter of a held key stays, for its holder's guarded writes compare with it."""
    grant = take(backend, key)
    to = above(store)
    assert backend.raise_fences(to, key=key) == Raised(0, (key,))
    assert store.fence(key) == grant.fence == held(backend, key).fence
    assert backend.release(grant) is True
    assert backend.raise_fences(to, key=key) == Raised(1)


@pytest.mark.requires("supports_ttl")
def test_expired_record_holds_nothing(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A record that is over is in nobody's way."""
    take(backend, key, 5)
    store.elapse(6.1)
    assert backend.raise_fences(above(store), key=key) == Raised(1)


def test_pages_reach_every_counter_of_the_prefix(store: Store, key: str) -> None:
    """Page by page all counters under the key prefix are raised, and no other backend's."""
    ours, others = store.with_prefix(f"{key}a"), store.with_prefix(f"{key}b")
    for number in range(5):
        used(ours, f"k{number}")
    grant = take(ours, "k2")
    used(others, "k")
    to = above(store)
    pages = every_page(ours, to, 2)
    assert [len(page.left) + page.raised for page in pages] == [2, 2, 1]
    assert [name for page in pages for name in page.left] == ["k2"]
    assert sum(page.raised for page in pages) == 4
    assert [take(ours, f"k{number}").fence for number in (0, 1, 3, 4)] == [to + 1] * 4
    assert store.registered.is_next(grant.fence, grants=2)
    fence = take(others, "k").fence
    assert store.registered.is_next(fence, grants=2)
    assert fence < to


def test_illegal_arguments_are_refused(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A fence is an int from 1 to the maximum; nothing is touched for another."""
    to: Any
    for to in (0, -1, FENCE_MAX + 1, True, 5.0, "5"):
        with pytest.raises(InvalidArgument, match=f"from 1 to {FENCE_MAX}"):
            backend.raise_fences(to, key=key)
    assert store.fence(key) == 0
    other: list[dict[str, Any]] = [
        {"limit": 0}, {"limit": True}, {"cursor": 5}, {"key": ""}, {"key": "a\0"},
    ]  # fmt: skip
    for arguments in other:
        with pytest.raises(InvalidArgument):
            backend.raise_fences(5, **arguments)


@pytest.mark.stores("postgresql", "mysql", why="no transaction can hold a single record")
def test_guarded_counter_is_left_alone(
    backend: BaseLockBackend, store: Store, stranger: Stranger, key: str
) -> None:
    """A page does not wait for a counter that somebody's transaction has locked."""
    used(backend, key)
    used(backend, f"{key}-other")
    stranger.guard(key)
    with prompt():
        pages = every_page(backend, 10**6, 10_000)
    assert key in [name for page in pages for name in page.left]
    assert store.fence(f"{key}-other") == 10**6
    stranger.rollback()
    assert backend.raise_fences(10**6, key=key) == Raised(1)
