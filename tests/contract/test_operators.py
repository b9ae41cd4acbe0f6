"""What an operator does to a lock: shorten, force-release, request a stop, pause, resume."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import new_token, place_name
from django_distlock.core.records import FENCE_MAX, Contended, Counter, Grant, Holder, Record

from .helpers import HAS_TTL, contend, extend, finds, held, take
from .stores import Elapse, Store


@HAS_TTL
def test_shorten_brings_the_end_nearer(backend: BaseLockBackend, store: Store, key: str) -> None:
    """The record says when the lease ends, asks its holder to finish, and keeps its promise.

    With a token, only that one's lease is shortened; where nobody holds the key, nothing.
    """
    assert backend.request_stop(key, 5) is None
    grant = take(backend, key, 100)
    promised = held(backend, key)
    assert backend.request_stop(key, 1, token=new_token()) is None
    assert held(backend, key) == promised
    before = store.now()
    record = backend.request_stop(key, 50, token=grant.token)
    after = store.now()
    assert isinstance(record, Record)
    assert record == held(backend, key)
    assert record.expires_at is not None
    assert before <= record.expires_at - timedelta(seconds=50) <= after
    assert record.free_at == promised.free_at
    assert record.stop_requested_at is not None
    assert before <= record.stop_requested_at <= after
    assert (record.token, record.fence) == (grant.token, grant.fence)


@HAS_TTL
def test_shortened_key_stays_with_a_holder_who_may_not_know(
    backend: BaseLockBackend, elapse: Elapse, key: str
) -> None:
    """Nobody else is granted it before the end that its holder was promised."""
    take(backend, key, 100)
    backend.request_stop(key, 0)
    elapse(50)
    contend(backend, key)
    elapse(50)
    contend(backend, key)
    elapse(1.01)
    take(backend, key)


@HAS_TTL
def test_shortened_lease_is_renewed_until_its_end(
    backend: BaseLockBackend, elapse: Elapse, key: str
) -> None:
    """Before the end its holder learns that it is to finish; behind it, that the lease is gone."""
    grant = take(backend, key, 100)
    other = take(backend, f"{key}-other", 100)
    backend.request_stop(key, 50)
    elapse(20)
    renewed = extend(backend, grant)
    assert renewed.stop_requested
    assert renewed.expires_at is not None
    elapse(20)
    assert [isinstance(each, Grant) for each in backend.extend_many([grant, other])] == [True] * 2
    elapse(11)
    gone, other_still = backend.extend_many([grant, other])
    assert gone is None
    assert isinstance(other_still, Grant)
    assert backend.extend(grant) is None
    # Until the end of the last renewal.
    elapse(88)
    contend(backend, key)
    elapse(2.01)
    take(backend, key)


@HAS_TTL
def test_holder_frees_a_shortened_key_by_its_release(
    backend: BaseLockBackend, elapse: Elapse, key: str
) -> None:
    """It is not renewed behind its end; who knows that gives it back, and it is free at once."""
    grant = take(backend, key, 100)
    backend.request_stop(key, 0)
    assert backend.extend(grant) is None
    elapse(6)
    contend(backend, key)
    assert backend.release(grant) is True
    take(backend, key)


@HAS_TTL
@pytest.mark.parametrize("ttl", [5, None])
def test_shorten_never_lengthens(backend: BaseLockBackend, key: str, ttl: float | None) -> None:
    """An end that is nearer stays; and so does no end, whose holder looks at no clock."""
    grant = take(backend, key, ttl)
    before = held(backend, key)
    record = backend.request_stop(key, 100)
    assert isinstance(record, Record)
    assert (record.expires_at, record.free_at) == (before.expires_at, before.free_at)
    assert (record == before) is (ttl is None)
    assert held(backend, key) == record
    extend(backend, grant)


@HAS_TTL
def test_shorten_holds_beyond_the_ttl(backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
    """A lease that is renewed is so until that end, however short its ttl; the nearest one counts.

    So it is where the holder has asked for less, and for more again.
    """
    grant = take(backend, key, 5)
    other = take(backend, f"{key}-other", 100)
    for seconds in (20, 100):
        backend.request_stop(key, seconds)
        backend.request_stop(f"{key}-other", seconds)
    assert extend(backend, grant).stop_requested
    elapse(4)
    for ttl in (2, 100):
        extend(backend, other, ttl)
    [renewed] = backend.extend_many([extend(backend, grant, 50)])
    assert isinstance(renewed, Grant)
    elapse(17)
    assert backend.extend(grant) is None
    assert backend.extend_many([other]) == [None]


@HAS_TTL
def test_key_that_is_kept_behind_its_run(
    backend: BaseLockBackend, elapse: Elapse, key: str
) -> None:
    """It has no holder any more; it is listed, free at a new end, and removed, as others are."""
    assert backend.release(take(backend, key, 100), 90) is True
    assert [each.key for each in backend.list(key).records] == [key]
    record = backend.request_stop(key, 5)
    assert isinstance(record, Record)
    assert record.is_settled
    assert record.stop_requested_at is None
    elapse(5.01)
    assert backend.release(take(backend, key), 10) is True
    assert isinstance(backend.force_release(key), Record)
    take(backend, key)


def test_force_release_takes_the_key_away(backend: BaseLockBackend, store: Store, key: str) -> None:
    """The record comes back, the key is free, the old lease is gone, and its fence is too low."""
    fence = 0
    for ttl in (30, None):
        grant = take(backend, key, ttl, holder=Holder(host="stuck"))
        assert store.registered.is_next(grant.fence, fence)
        before = held(backend, key)
        assert backend.force_release(key) == before
        assert not store.has_record(key)
        assert backend.read(key) is None
        assert backend.extend(grant) is None
        assert backend.release(grant) is False
        assert finds(backend, grant.token, None)
        fence = store.fence(key)
        assert store.registered.is_next(fence, grant.fence)
    assert store.registered.is_next(take(backend, key).fence, fence)


@pytest.mark.requires("supports_sharing")
@pytest.mark.parametrize("times", [1, 2])
def test_force_release_beside_a_transaction(
    backend: BaseLockBackend, key: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Of several who share a key, it names the one who was left, or is tried once more."""
    tokens = [new_token() for _ in range(3)]
    grants = [backend.acquire(key, token, 60, permits=None) for token in tokens]
    locked = iter([place_name(backend._name(key), tokens[1])] * times)
    operate, place = backend._force_release, next(locked)

    def busy(name: str, *asked: Any, **more: Any) -> Any:
        nonlocal place
        if name == place:
            place = next(locked, "")
            return Contended(busy=True)
        return operate(name, *asked, **more)

    def sharing() -> list[int]:
        return sorted(each.fence for each in backend.records.sharing(key))

    monkeypatch.setattr(backend, "_force_release", busy)
    assert isinstance(backend.force_release(key, fence=grants[0].fence), Record)
    assert sharing() == [each.fence for each in grants[1:]]
    left = backend.force_release(key)
    assert (sharing(), isinstance(left, Record)) == (
        ([grants[1].fence], False) if times > 1 else ([], True)
    )


@HAS_TTL
def test_nothing_is_done_to_nobody(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Nobody holds the key, or any more: no record, no request, and no fence is used up."""
    for operation in (backend.force_release, backend.request_stop):
        assert operation(key) is None
        assert store.fence(key) == 0
    grant = take(backend, key, 5)
    store.elapse(6.1)
    for operation in (backend.force_release, backend.request_stop):
        assert operation(key) is None
        assert store.fence(key) == grant.fence


@pytest.mark.parametrize(
    "operation",
    [
        "force_release",
        "request_stop",
        pytest.param("shorten", marks=pytest.mark.requires("supports_ttl")),
    ],
)
def test_operation_is_for_the_fence_that_was_seen(
    backend: BaseLockBackend, store: Store, key: str, operation: str
) -> None:
    """Of a holder before, or of nobody, nothing is changed, and no fence is used up."""
    before = take(backend, key)
    backend.release(before)
    grant = take(backend, key)
    now, fence = held(backend, key), store.fence(key)

    def act(seen: int) -> Any:
        if operation == "force_release":
            return backend.force_release(key, fence=seen)
        return backend.request_stop(key, 5 if operation == "shorten" else None, fence=seen)

    for seen in (before.fence, grant.fence + 1, 0):
        assert act(seen) is None
        assert held(backend, key) == now
        assert store.fence(key) == fence
    contend(backend, key)
    assert isinstance(act(grant.fence), Record)
    assert backend.read(key) != now
    for wrong in (True, -1, "1", FENCE_MAX + 1):
        with pytest.raises(InvalidArgument, match=r"A fence must be an int from 0 to"):
            act(wrong)  # type: ignore[arg-type]


def test_request_to_stop_is_seen_at_extend(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """The holder learns of it at its next extend, and keeps its lease; the first one counts."""
    grant = take(backend, key)
    assert extend(backend, grant).stop_requested is False
    before = store.now()
    record = backend.request_stop(key)
    after = store.now()
    assert isinstance(record, Record)
    assert record == held(backend, key)
    assert record.stop_requested_at is not None
    assert before <= record.stop_requested_at <= after
    assert backend.request_stop(key) == record
    for _ in range(2):
        assert extend(backend, grant).stop_requested is True
    contend(backend, key)
    assert backend.release(grant) is True


def test_request_to_stop_is_for_one_holder(
    backend: BaseLockBackend, elapse: Elapse, key: str
) -> None:
    """The next holder was not asked to stop."""
    grant = take(backend, key, 5)
    for how in ("release", "expiry", "takeover"):
        backend.request_stop(key)
        if how == "release":
            backend.release(grant)
        elif how == "expiry":
            elapse(6.1)
        grant = take(backend, key, 5, holder=Holder(host=how), replace=grant.token)
        assert grant.stop_requested is False, how
        assert held(backend, key).stop_requested_at is None
        assert extend(backend, grant).stop_requested is False


def test_paused_key_is_granted_to_nobody(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A free key that is paused is contended, says why, and uses up no fence.

    Behind its time, which the last word decides, a pause is over; and it is for one key alone.
    """
    grant = take(backend, key)
    backend.release(grant)
    for seconds in (600, 60):
        assert backend.pause(key, store.now() + timedelta(seconds=seconds), by="ops") is True
    contended = contend(backend, key)
    assert (contended.paused, contended.busy) == (True, False)
    assert contended.holder is None
    assert contended.fence is None
    assert contend(backend, key, wanted=True).paused
    assert contend(backend, key, replace=new_token()).paused
    assert store.fence(key) == grant.fence
    assert backend.read(key) is None
    for other in (f"{key}-b", key[:-1]):
        take(backend, other)
    store.elapse(50)
    assert contend(backend, key).paused
    store.elapse(10)
    grant = take(backend, key)
    assert backend.pause(key, None) is False
    assert backend.release(grant) is True
    backend.pause(key, store.now() - timedelta(seconds=60))
    take(backend, key)


def test_key_that_never_was_can_be_paused(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Its counter shows that, while it lasts, and by whom; the first fence is the one behind it."""
    until = (store.now() + timedelta(minutes=1)).replace(microsecond=0)
    assert backend.pause(key, None) is False
    assert backend.pause(key, until, by="Ada of the night shift") is True
    assert contend(backend, key).paused
    assert backend.counter(key) == Counter(0, until, "Ada of the night shift")
    assert backend.pause(key, None) is True
    assert backend.pause(key, None) is False
    assert backend.counter(key) is None
    assert store.fence(key) == 0
    grant = take(backend, key)
    assert store.registered.is_next(grant.fence)
    backend.pause(key, until)
    assert backend.counter(key) == Counter(grant.fence, until, None)
    store.elapse(61)
    assert backend.counter(key) == Counter(grant.fence)


def test_holder_keeps_a_paused_key(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A pause ends no lease: the holder extends and releases, and nobody takes it over."""
    grant = take(backend, key, 20)
    before = held(backend, key)
    backend.pause(key, store.now() + timedelta(minutes=1))
    assert contend(backend, key, replace=grant.token).paused
    assert held(backend, key) == before
    contended = contend(backend, key)
    assert (contended.paused, contended.fence) == (True, grant.fence)
    assert contended.holder == before.holder
    # Its record still takes the mark of who waits, where it has one.
    contend(backend, key, wanted=True)
    assert held(backend, key).wanted is (store.registered.store != "session")
    extend(backend, grant)
    assert backend.release(grant) is True
    assert contend(backend, key).paused


# What an operator looks at


def test_clock_is_the_one_that_leases_end_by(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """It lies between two looks at the store's own clock, and does not go back."""
    before = store.now()
    first = backend.clock()
    grant = take(backend, key)
    second = backend.clock()
    assert before <= first <= grant.acquired_at <= second <= store.now()
    assert second.utcoffset() == timedelta(0)


def test_counter_is_the_fence_of_the_last_grant(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """It outlives release and grows with each grant. Looking makes no counter, and no record."""
    for look in (backend.counter, backend.guards.sessions):
        assert look(key) in (None, ())
    assert not store.has_record(key)
    assert store.fence(key) == 0
    first = take(backend, key)
    assert backend.counter(key) == Counter(first.fence)
    if backend.supports_guard:
        # Nobody guards a key that is only held.
        for name in (key, f"{key}-other"):
            assert backend.guards.sessions(name) in ((), None)
    backend.release(first)
    assert backend.counter(key) == Counter(first.fence)
    second = take(backend, key)
    assert backend.counter(key) == Counter(second.fence)
    backend.force_release(key)
    assert backend.counter(key) == Counter(store.fence(key))
    assert backend.counter(f"{key}-other") is None
