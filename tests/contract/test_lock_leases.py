"""What a lease knows, and how it is extended, lost and released."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    Lease,
    Lock,
    LockLost,
    LockUsageError,
)
from django_distlock.core.clock import monotonic
from django_distlock.core.durations import GRACE
from django_distlock.core.keys import validate_token
from django_distlock.handler import lock_backends
from django_distlock.testing import lose_connection
from tests.backends import Registered

from .conftest import TWINS, Hold
from .helpers import HAS_TTL, Later, held
from .locking import (
    PAST,
    SHORT,
    eventually,
    grantable,
    held_elsewhere,
    in_a_block,
    in_a_call,
    lock_of,
    outlive,
    take_away,
    taken,
)

Extend = Callable[[Lease, Any], None]
Release = Callable[[Lease], bool]


@pytest.fixture(params=TWINS)
def twin(request: pytest.FixtureRequest) -> str:
    """Say whether a test calls, or awaits: all that it does to one lease."""
    return str(request.param)


@pytest.fixture
def extend(twin: str) -> Extend:
    """Give both ways to extend."""
    if twin == "called":
        return Lease.extend
    return lambda lease, ttl: asyncio.run(lease.aextend(ttl))


@pytest.fixture
def release(twin: str) -> Release:
    """Give both ways to release."""
    return Lease.release if twin == "called" else lambda lease: asyncio.run(lease.arelease())


def test_lease_tells_what_is_held(registered: Registered, key: str) -> None:
    """Key, alias, token, fence and times describe one holding; its text names no secret."""
    with lock_of(registered, key, ttl=20) as lease:
        assert (lease.key, lease.backend) == (key, registered.alias)
        assert validate_token(lease.token) == lease.token
        assert registered.is_next(lease.fence)
        assert lease.fence_token == f"{lease.fence:015}"
        assert (lease.held, lease.is_lost, lease.is_released) == (True, False, False)
        assert lease.stop_requested is False
        assert 19 < lease.remaining() <= 20
        assert lease.check() is None  # type: ignore[func-returns-value]
        assert key in repr(lease)
        assert lease.token not in f"{lease!r} {lease!s} {lease:}"
        # It belongs to the process that took it, and there is one of it.
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="lease"):
                copied(lease)


@HAS_TTL
def test_times_are_the_stores_and_aware(registered: Registered, key: str) -> None:
    """They are a ttl apart; by the holder's own clock, a lease ends no later than by that one."""
    with lock_of(registered, key, ttl=20) as lease:
        assert lease.expires_at is not None
        assert lease.acquired_at.utcoffset() == lease.expires_at.utcoffset() == timedelta(0)
        assert lease.expires_at - lease.acquired_at == timedelta(seconds=20)
        assert abs(lease.acquired_at - datetime.now(UTC)) < timedelta(seconds=10)
        record = held(lock_backends[registered.alias], key)
        assert (record.acquired_at, record.expires_at) == (lease.acquired_at, lease.expires_at)
        assert (record.token, record.fence) == (lease.token, lease.fence)
        for _ in range(2):
            now = datetime.now(UTC)
            left = lease.remaining()
            # The clock of SQLite has milliseconds, and that of memory is read once.
            assert left <= (lease.expires_at - now).total_seconds() + 0.002
            lease.extend()


@HAS_TTL
def test_extend_replaces_the_ttl(registered: Registered, key: str, extend: Extend) -> None:
    """The new end is now + ttl, also when that is sooner."""
    lease = lock_of(registered, key, ttl=20).acquire()
    fence, token, acquired_at = lease.fence, lease.token, lease.acquired_at
    extend(lease, 60)
    assert 59 < lease.remaining() <= 60
    extend(lease, timedelta(seconds=5))
    assert 4 < lease.remaining() <= 5
    assert lease.expires_at is not None
    assert timedelta(seconds=4) < lease.expires_at - datetime.now(UTC) < timedelta(seconds=5.1)
    assert (lease.fence, lease.token, lease.acquired_at) == (fence, token, acquired_at)
    record = held(lock_backends[registered.alias], key)
    assert record.expires_at == lease.expires_at
    assert lease.release()


@HAS_TTL
def test_extend_that_is_heard_late_ends_no_lease_before_its_deadline(
    registered: Registered, key: str, extend: Extend
) -> None:
    """A shorter one that got no answer may come to the store behind a longer one."""
    lease = lock_of(registered, key, ttl=20).acquire()
    with lose_connection(registered.alias), pytest.raises(BackendUnavailable):
        extend(lease, 5)
    extend(lease, 60)
    # What was on its way for longer than its sender waited.
    store = lock_backends[registered.alias]
    assert Later(store.extend, replace(lease._holding.grant, ttl=5)).result()
    record = store.read(key)
    assert record is not None
    assert record.expires_at is not None
    assert record.expires_at - store.clock() <= timedelta(seconds=5)
    assert lease.remaining() <= 5
    assert lease.held
    assert lease.release()


@HAS_TTL
def test_renewal_that_is_heard_late_ends_no_lease_before_its_deadline(
    registered: Registered, key: str
) -> None:
    """The same goes for a renewal by the heartbeat, and for what goes on with the lease."""
    lease = lock_of(registered, key, ttl=20).acquire()
    assert lease._holding.begin_renewal()
    lease._holding.end_renewal(monotonic(), BackendUnavailable("no answer", key=key))
    lease.extend(60)
    assert lease.remaining() <= 20
    lease._holding.begin_renewal()
    sent_at = monotonic()
    lease._holding.end_renewal(sent_at, replace(lease._holding.grant, ttl=60))
    assert lease.deadline == sent_at + 20
    assert lease.release()


def test_extend_refuses_what_is_no_ttl(registered: Registered, key: str, extend: Extend) -> None:
    """It changes nothing. Without one, the ttl of the lock counts, and not an earlier extend's."""
    lease = lock_of(registered, key, ttl=20).acquire()
    extend(lease, 5)
    extend(lease, None)
    assert 19 < lease.remaining() <= 20
    before = lease.expires_at
    for ttl in (0, 0.05, -1, True, "5", math.nan, math.inf, 604_801, 10**400):
        with pytest.raises(InvalidArgument, match="ttl"):
            extend(lease, ttl)
    assert lease.held
    assert lease.expires_at == before
    assert lease.release()


def is_behind_grace(lease: Lease) -> bool:
    """Whether the machine stood still until the key was nobody's."""
    return lock_backends[lease.backend].monotonic() > lease.deadline + GRACE


def test_check_raises_behind_the_deadline(registered: Registered, key: str) -> None:
    """A lease past its deadline says so, though the store keeps its grace."""
    lock = lock_of(registered, key, ttl=SHORT)
    lease = lock.acquire()
    time.sleep(PAST)
    with pytest.raises(LockLost, match=key) as caught:
        lease.check()
    assert (caught.value.code, caught.value.key) == ("lost", key)
    assert lease.token not in str(caught.value)
    assert (lease.held, lease.is_lost, lease.remaining()) == (False, True, 0.0)
    assert taken(lock) or is_behind_grace(lease)


def test_lease_past_its_deadline_refuses_extend_but_may_release(
    registered: Registered, key: str, extend: Extend, release: Release
) -> None:
    """Giving the key back before the grace ends helps others; the answer is that it was over."""
    lock = lock_of(registered, key, ttl=SHORT)
    lease = lock.acquire()
    # One whose key stays taken behind it is given up no sooner than others.
    window = {"hold": True} if lock_backends[registered.alias].supports_ttl else {}
    settled = lock_of(registered, f"{key}:window", ttl=SHORT, **window).acquire()
    time.sleep(PAST)
    assert (settled.release(), settled.is_lost) == (False, True)
    assert not lease
    with pytest.raises(LockLost):
        extend(lease, 20)
    assert lease.is_lost
    assert taken(lock) or is_behind_grace(lease)
    assert release(lease) is False
    assert not taken(lock)
    assert lease.is_lost
    assert not lease.is_released
    assert release(lease) is False


def test_extend_of_a_key_that_was_taken_away_is_lost(
    lock: Lock, registered: Registered, key: str, extend: Extend, release: Release
) -> None:
    """The store's answer that the lease is gone is a loss, for good."""
    lease = lock.acquire()
    take_away(lease)
    # A session that was ended says so by itself.
    assert lease.held is (registered.store != "session")
    with pytest.raises(LockLost, match=key):
        extend(lease, None)
    assert (lease.held, lease.is_lost) == (False, True)
    with held_elsewhere(lock) as other:
        assert release(lease) is False
        with pytest.raises(LockLost):
            extend(lease, None)
        assert taken(lock)
        assert other.fence > lease.fence


def brief(registered: Registered, key: str, lose: Callable[[Lease], None]) -> Lock:
    """Describe a lock of which a body loses the lease soon."""
    return lock_of(registered, key, ttl=0.5 if lose is outlive else 30, heartbeat=False)


@pytest.mark.parametrize("lose", [outlive, take_away])
def test_block_that_outlived_its_lease_raises(
    registered: Registered, key: str, hold: Hold, lose: Callable[[Lease], None]
) -> None:
    """A body that succeeded without the lock for its last part did not succeed."""
    ran: list[Lease] = []

    def work(lease: Lease) -> None:
        lose(lease)
        ran.append(lease)

    with pytest.raises(LockLost, match=key):
        hold(brief(registered, key, lose), work)
    # The thread of a task that was cancelled for it may still be at work.
    assert eventually(lambda: [lease.is_lost for lease in ran] == [True])
    # The key is given back all the same: nobody has to wait for the grace.
    assert grantable(lock_of(registered, key))


@pytest.mark.parametrize(("way", "lose"), [(in_a_block, take_away), (in_a_call, outlive)])
def test_loss_never_hides_the_bodys_own_error(
    registered: Registered, key: str, way: Hold, lose: Callable[[Lease], None]
) -> None:
    """What went wrong in the body says more than that its lease ended too."""

    def work(lease: Lease) -> None:
        lose(lease)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        way(brief(registered, key, lose), work)
    assert grantable(lock_of(registered, key))


def test_release_answers_true_once(lock: Lock, release: Release, extend: Extend) -> None:
    """The call that gives the key back is told so, and no other; the lease is of no use then."""
    lease = lock.acquire()
    assert lease
    assert release(lease) is True
    assert not lease
    assert (lease.held, lease.is_released, lease.is_lost) == (False, True, False)
    assert not taken(lock)
    assert release(lease) is False
    assert lease.remaining() == 0.0
    for use in (Lease.check, lambda lease: extend(lease, None)):
        with pytest.raises(LockUsageError, match="released"):
            use(lease)
    assert not taken(lock)


def test_release_of_what_was_over_in_a_transaction_answers_false(
    registered: Registered, key: str, release: Release
) -> None:
    """It is said at once, and the lease stays lost; the key waits for the commit as ever."""
    lock = lock_of(registered, key, ttl=SHORT)
    with transaction.atomic():
        late = lock.acquire()
        time.sleep(PAST)
        assert release(late) is False
        assert (late.is_lost, late.is_released) == (True, False)
        assert release(late) is False
    assert grantable(lock)


def test_release_of_what_was_declared_lost_answers_false(
    lock: Lock, key: str, release: Release
) -> None:
    """Before its deadline, too: what was lost once stays so, whatever the store still knows."""
    lease = lock.acquire()
    for _ in range(3):
        assert lease._holding.mutex.acquire(blocking=False)
        lease._holding.end_renewal(monotonic(), BackendUnavailable("away", key=key))
    assert lease.is_lost
    assert release(lease) is False
    assert grantable(lock)


def test_of_many_releases_one_is_true(registered: Registered, key: str) -> None:
    """Threads that release one lease at the same time are told once that they did."""
    lease = lock_of(registered, key).acquire()
    answers = [each.result() for each in [Later(lease.release) for _ in range(6)]]
    assert sorted(answers) == [False] * 5 + [True]
