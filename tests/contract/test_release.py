"""Release, extend and settle: only by the token that holds the key, and once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant, Record

from .helpers import HAS_TTL, at_once, contend, extend, finds, held, take
from .stores import Elapse, Store


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


def test_release_is_true_for_one_of_many(backend: BaseLockBackend, key: str) -> None:
    """Of releases at the same time, one frees the key."""
    grant = take(backend, key)
    answers = at_once([lambda: backend.release(grant)] * 4)
    assert sorted(answers, key=str) == [False, False, False, True]


@pytest.mark.parametrize("token", [new_token, "swapped case"], ids=["another", "other case"])
def test_other_token_changes_nothing(backend: BaseLockBackend, key: str, token: object) -> None:
    """With a token that does not hold the key, nothing is released, extended or settled."""
    grant = take(backend, key, token="abcdefghijklmnopqrst" + new_token()[:2])
    wrong = replace(grant, token=new_token() if token is new_token else grant.token.swapcase())
    record = held(backend, key)
    assert backend.release(wrong) is False
    assert backend.extend(wrong) is None
    assert backend.extend_many([wrong]) == [None]
    if backend.supports_ttl:
        assert backend.release(wrong, 0) is False
        assert backend.release(wrong, 100) is False
        assert backend.request_stop(key, 1, token=wrong.token) is None
    assert finds(backend, wrong.token, None)
    contend(backend, key, replace=wrong.token)
    assert held(backend, key) == record
    assert backend.release(grant) is True


def test_token_of_one_key_is_no_use_on_another(backend: BaseLockBackend, key: str) -> None:
    """A token opens the key that it holds and no other."""
    mine, other = take(backend, f"{key}-a"), take(backend, f"{key}-b")
    crossed = replace(mine, key=other.key)
    assert backend.release(crossed) is False
    assert backend.extend(crossed) is None
    assert held(backend, other.key).token == other.token
    assert held(backend, mine.key).token == mine.token


def test_missing_record_is_gone(backend: BaseLockBackend, key: str) -> None:
    """Of a key that was never held, nothing can be released, extended or settled."""
    never = replace(take(backend, f"{key}-a"), key=f"{key}-b", token=new_token())
    assert backend.release(never) is False
    assert backend.extend(never) is None
    assert backend.extend_many([never]) == [None]
    assert not backend.supports_ttl or backend.release(never, 10) is False
    assert backend.read(f"{key}-b") is None


def test_fence_in_the_grant_proves_nothing(backend: BaseLockBackend, key: str) -> None:
    """The token decides; the answer carries the fence of the record."""
    grant = take(backend, key)
    extended = backend.extend(replace(grant, fence=grant.fence + 100))
    assert isinstance(extended, Grant)
    assert extended.fence == grant.fence


@HAS_TTL
@pytest.mark.parametrize("ttl", [5, 30, None])
def test_settle_keeps_the_key_until_the_time_is_over(
    backend: BaseLockBackend, elapse: Elapse, key: str, ttl: float | None
) -> None:
    """Settled, a key stays taken until acquired_at + seconds, exactly and without grace."""
    grant = take(backend, key, ttl)
    assert backend.release(grant, 100) is True
    record = held(backend, key)
    assert record.expires_at == record.free_at == grant.acquired_at + timedelta(seconds=100)
    assert record.fence == grant.fence
    contended = contend(backend, key)
    assert contended.free_at == record.free_at
    elapse(95)
    contend(backend, key)
    elapse(5.01)
    take(backend, key)


@HAS_TTL
def test_settle_counts_from_the_grant(backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
    """However often it was extended, a lease is settled from its grant on."""
    grant = take(backend, key, 30)
    elapse(20)
    extended = extend(backend, grant, 60)
    assert backend.release(extended, 40) is True
    assert held(backend, key).free_at == extended.acquired_at + timedelta(seconds=40)


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
def test_settle_ends_the_lease(backend: BaseLockBackend, key: str) -> None:
    """Settle answers as release does: True once. A late heartbeat does not undo it."""
    grant = take(backend, key, 30)
    assert backend.release(grant, 10) is True
    settled = held(backend, key)
    assert backend.extend(grant) is None
    assert backend.extend_many([grant]) == [None]
    assert backend.release(grant) is False
    assert backend.release(grant, 20) is False
    assert held(backend, key) == settled


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
