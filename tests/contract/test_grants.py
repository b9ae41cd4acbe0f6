"""A free key is granted; a held one is not, and says who holds it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.holders import Holder
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.backends import Registered

from .helpers import HAS_TTL, contend, extend, finds, held, take
from .stores import Elapse, Store


def test_free_key_is_granted(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A grant names key, token, fence and ttl, and lasts from the store's now to now + ttl."""
    token = new_token()
    before = store.now()
    grant = take(backend, key, 20, token=token)
    after = store.now()
    assert (grant.key, grant.token, grant.ttl) == (key, token, 20)
    assert grant.fence >= 1
    assert grant.stop_requested is False
    assert before <= grant.acquired_at <= after
    end = grant.acquired_at + timedelta(seconds=20) if backend.supports_ttl else None
    assert grant.expires_at == end


def test_answer_is_what_is_stored(backend: BaseLockBackend, key: str) -> None:
    """The times and the fence of a grant are those of the record, to the microsecond."""
    grant = take(backend, key, 0.123457)
    record = held(backend, key)
    assert (record.key, record.token, record.fence) == (key, grant.token, grant.fence)
    assert record.ttl == grant.ttl == 0.123457
    assert record.acquired_at == record.renewed_at == grant.acquired_at
    assert record.expires_at == grant.expires_at
    assert record.wanted is False
    assert record.stop_requested_at is None


@pytest.mark.requires("supports_ttl")
def test_times_are_aware(backend: BaseLockBackend, key: str) -> None:
    """No time comes back naive."""
    grant = take(backend, key)
    record = held(backend, key)
    contended = contend(backend, key)
    for when in (
        grant.acquired_at, grant.expires_at,
        record.acquired_at, record.renewed_at, record.expires_at, record.free_at,
        contended.acquired_at, contended.expires_at, contended.free_at, contended.observed_at,
    ):  # fmt: skip
        assert when is not None
        assert when.utcoffset() is not None


@pytest.mark.requires("supports_ttl")
def test_held_key_is_contended(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A second acquire gets to know the holder, its fence, since when and until when."""
    holder = Holder(host="app-1", pid=4711, task_id="job-7")
    grant = take(backend, key, 20, holder=holder)
    before = store.now()
    contended = contend(backend, key)
    after = store.now()
    assert contended.holder == holder
    assert contended.fence == grant.fence
    assert contended.acquired_at == grant.acquired_at
    assert contended.expires_at == grant.expires_at
    assert grant.expires_at is not None
    assert contended.free_at == grant.expires_at + timedelta(seconds=1)
    assert contended.observed_at is not None
    assert before <= contended.observed_at <= after
    assert (contended.busy, contended.paused) == (False, False)


def test_contention_leaves_the_holder_alone(backend: BaseLockBackend, key: str) -> None:
    """The holder's record is the same after others were refused, and its lease works."""
    grant = take(backend, key)
    before = held(backend, key)
    for _ in range(3):
        contend(backend, key)
    assert held(backend, key) == before
    assert isinstance(backend.extend(grant), Grant)
    assert backend.release(grant) is True


def test_own_token_contends_too(backend: BaseLockBackend, key: str) -> None:
    """A token is no way around its own lock."""
    grant = take(backend, key)
    assert isinstance(backend.acquire(key, grant.token, 30), Contended)


def test_holder_comes_back_whole(backend: BaseLockBackend, key: str) -> None:
    """Everything that a holder says about itself is read as it was written."""
    holder = Holder(
        host="prefix/höst",
        boot_id="b" * 36,
        process="gunicorn:3",
        pid=2**22,
        started_at=12345.678,
        thread="worker-1",
        task_id="id:ümläut 🔒",
        metadata={"user": "Zoë", "deep": {"list": [1, 2.5, None, True, "\\ \" ' % {}"]}, "": {}},
    )
    take(backend, key, holder=holder)
    assert held(backend, key).holder == holder
    assert contend(backend, key).holder == holder


@pytest.mark.requires("supports_token_lookup")
def test_token_holds_one_key(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A token that holds a key is refused for another one, which stays free."""
    grant = take(backend, key)
    with pytest.raises(InvalidArgument) as caught:
        backend.acquire(f"{key}-other", grant.token, 30)
    assert grant.token not in str(caught.value)
    assert backend.read(f"{key}-other") is None
    assert held(backend, key).token == grant.token
    assert store.registered.is_next(take(backend, f"{key}-other").fence)


def test_replace_takes_over_from_the_named_token(backend: BaseLockBackend, key: str) -> None:
    """With `replace`, the holder of this token loses the key to a higher fence."""
    old = take(backend, key)
    new = take(backend, key, replace=old.token)
    assert new.fence > old.fence
    assert held(backend, key).token == new.token
    assert backend.release(old) is False
    assert backend.extend(old) is None
    assert finds(backend, old.token, None)
    assert backend.release(new) is True


def test_replace_spares_every_other_token(
    backend: BaseLockBackend, registered: Registered, key: str
) -> None:
    """A holder with another token than the named one keeps the key; a free one is granted."""
    first = take(backend, key, replace=new_token())
    assert registered.is_next(first.fence)
    second = take(backend, key, replace=first.token)
    contended = contend(backend, key, replace=first.token)
    assert contended.fence == second.fence
    assert held(backend, key).token == second.token


def test_replace_by_the_same_token_renews_a_lost_answer(backend: BaseLockBackend, key: str) -> None:
    """A caller whose answer got lost asks again with its own token, and gets a grant."""
    lost = take(backend, key, 10)
    found = take(backend, key, 20, token=lost.token, replace=lost.token)
    assert found.fence > lost.fence
    assert held(backend, key).token == lost.token
    assert backend.release(found) is True


def test_lost_answer_is_released_by_its_token(backend: BaseLockBackend, key: str) -> None:
    """The caller made the token, so it can release a grant that it never heard of."""
    token = new_token()
    unheard = take(backend, key, token=token)
    guess = Grant(key, token, 0, 30, unheard.acquired_at, None)
    assert backend.release(guess) is True
    assert backend.read(key) is None


def test_lock_without_expiry(backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
    """With ttl None a lock has no end, is shown so, and lives until it is released."""
    grant = take(backend, key, None)
    assert (grant.ttl, grant.expires_at) == (None, None)
    elapse(10 * 365 * 86_400)
    record = held(backend, key)
    assert (record.ttl, record.expires_at, record.free_at) == (None, None, None)
    contended = contend(backend, key)
    assert (contended.expires_at, contended.free_at) == (None, None)
    extended = extend(backend, grant)
    assert extended.expires_at is None
    assert backend.release(grant) is True
    take(backend, key)


@HAS_TTL
def test_many_extends_keep_no_expiry(backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
    """Extended with others, a lock without expiry stays one; extended by a ttl, it gets an end."""
    grants = [take(backend, f"{key}-a", None), take(backend, f"{key}-b", 5)]
    for answer, grant in zip(backend.extend_many(grants), grants, strict=True):
        assert isinstance(answer, Grant)
        assert answer.ttl == grant.ttl
    elapse(100)
    assert backend.read(f"{key}-b") is None
    assert extend(backend, grants[0], 5).expires_at is not None
    elapse(6.1)
    assert backend.read(f"{key}-a") is None
