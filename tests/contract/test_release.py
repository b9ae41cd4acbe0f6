"""Release, extend and settle: only by the token that holds the key, and once."""

from __future__ import annotations

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.records import Contended, Record

from .helpers import HAS_TTL, held, take
from .stores import Store


def test_release_is_true_once(backend: BaseLockBackend, store: Store, key: str) -> None:
    """It leaves nothing but the fence counter; a second one spares whoever came next."""
    grant = take(backend, key)
    assert backend.release(grant) is True
    assert backend.release(grant) is False
    assert backend.read(key) is None
    assert not store.has_record(key)
    assert store.fence(key) == grant.fence
    second = take(backend, key)
    assert backend.release(grant) is False
    assert held(backend, key).token == second.token


@pytest.mark.parametrize("seconds", [0, 5])
@HAS_TTL
def test_settle_in_the_past_frees_the_key(
    backend: BaseLockBackend, store: Store, key: str, seconds: float
) -> None:
    """If the time is over already, the key goes at once."""
    grant = take(backend, key, 30)
    store.elapse(5.1)
    assert backend.release(grant, seconds) is True
    assert not store.has_record(key)
    take(backend, key)


@HAS_TTL
def test_settled_key_can_be_taken_over_by_force(backend: BaseLockBackend, key: str) -> None:
    """A settled record is a record: it is read, listed and removed as others are."""
    grant = take(backend, key, 30)
    backend.release(grant, 10)
    assert [each.key for each in backend.list(key).records] == [key]
    forced = backend.force_release(key)
    assert isinstance(forced, Record)
    assert not isinstance(forced, Contended)
    take(backend, key)
