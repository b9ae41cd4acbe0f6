"""A question whose sender gave it up may come to the store behind later ones, and harms nobody.

A driver cannot take back what is on its way: its connection is cut, and the server still carries
out what it has read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import transaction

from django_distlock import BackendUnavailable, Lease, Lock, LockLost, LockUsageError
from django_distlock.core.records import UNKNOWN, Grant
from django_distlock.handler import lock_backends
from django_distlock.locks import attempts
from tests.backends import Registered

from .helpers import HAS_TTL, Later
from .locking import eventually, grantable, lock_of, taken
from .scripted import Script, ScriptedMemory, scripted_lock

Acquire = Callable[[Lock], Lease]
DOWN = BackendUnavailable("The store is away.")


# Leases that end sooner in the store than their holders count on


@pytest.mark.parametrize("answer", [DOWN, UNKNOWN], ids=["no answer", "a part that is away"])
def test_renewal_that_was_cut_short_counts_when_it_is_heard_late(
    scripted: Script, key: str, answer: object
) -> None:
    """At the end of `max_lifetime` a renewal asks for less than the ttl."""
    lease = scripted_lock(key, ttl=20, heartbeat=True, max_lifetime=22).acquire()
    holding = lease._holding
    holding.renewing.ends_at = holding.monotonic() + 5
    holding.deadline = holding.monotonic() + 1
    asked = holding.begin_renewal()
    assert asked is not None
    assert asked.ttl is not None
    assert asked.ttl <= 5
    holding.end_renewal(holding.monotonic(), answer)  # type: ignore[arg-type]
    lease.extend(60)
    assert lock_backends["scripted"].extend(asked)
    assert lease.remaining() <= 5
    assert lease.release()


@HAS_TTL
def test_acquire_that_is_heard_late_ends_no_lease_before_its_deadline(
    registered: Registered, key: str, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt asks in the place of the first, whose answer was lost, and may be lost."""
    # What may be granted late is released soon, and not behind the end of all tests.
    monkeypatch.setattr(attempts, "MAX_BOUND", 0.01)
    store = lock_backends[registered.alias]
    lease = _granted_behind_lost_answers(registered, key, acquire)
    lease.extend(60)
    late = Later(store.acquire, key, lease.token, 20, lease.holder, replace=lease.token).result()
    record = store.read(key)
    assert record is not None
    assert record.expires_at is not None
    # Asked first: what passes in between is taken from what remains.
    kept = (record.expires_at - store.clock()).total_seconds()
    assert lease.remaining() <= kept + 0.01
    assert late is not None
    assert lease.held
    assert lease.release()


def _granted_behind_lost_answers(registered: Registered, key: str, acquire: Acquire) -> Lease:
    store = lock_backends[registered.alias]
    lost: list[object] = []
    ask = store.acquire

    def lose_two(*args: object, **kwargs: object) -> object:
        if len(lost) < 2:
            lost.append(args)
            raise BackendUnavailable("no answer", key=key)
        return ask(*args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "acquire", lose_two)
        lease = acquire(lock_of(registered, key, ttl=20, wait=10, heartbeat=False))
    assert len(lost) == 2
    return lease


def test_loaded_lease_counts_what_may_be_heard_late(scripted: Script, key: str) -> None:
    """Who takes a lease over asks in its own place, too, where an answer was lost."""
    text = scripted_lock(key, ttl=20).acquire().dump()
    scripted["acquire"] = [None, DOWN]
    lease = Lease.load(text)
    lease.extend(60)
    assert lease.remaining() <= 20
    assert lease.release()


def test_lease_of_a_transaction_ends_where_its_next_block_asked_for(
    scripted: Script, key: str
) -> None:
    """A block in the same transaction asks for a shorter lease, and may be heard without answer."""
    with transaction.atomic():
        with scripted_lock(key, ttl=60) as lease:
            pass
        scripted["extend"] = [DOWN, DOWN]
        with pytest.raises(BackendUnavailable):
            scripted_lock(key, ttl=5, wait=0).acquire()
        assert lease._holding.deadline - lease._holding.monotonic() <= 5
        # Renewed at once, or just so.
        assert lease._holding.renewing.due_at <= lease._holding.monotonic() + 0.5


# Leases that are gone


def test_release_without_an_answer_ends_the_work(scripted: Script, key: str) -> None:
    """The store may hear it at any time: nobody works under the lease, extends or renews it."""
    lock = scripted_lock(key, ttl=20, heartbeat=True)
    lease = lock.acquire()
    lease._holding.begin_block(heartbeat=True)
    scripted["release"] = [DOWN, DOWN]
    with pytest.raises(BackendUnavailable):
        lease.release()
    assert (lease.held, lease.is_lost, lease.remaining()) == (False, False, 0.0)
    for use in (lease.check, lease.extend, lease.dump):
        with pytest.raises(LockUsageError, match="given up"):
            use()
    assert lease._holding.begin_renewal() is None
    assert taken(lock)
    assert lease.release() is True
    assert not taken(lock)


def test_release_that_was_refused_its_turn_is_none(scripted: Script, key: str) -> None:
    """The store has said that it has not carried it out."""
    lease = scripted_lock(key, ttl=20).acquire()
    scripted["release"] = [UNKNOWN]
    assert lease._release.now(patience=0.0) is UNKNOWN
    assert lease.held
    lease.extend()
    assert lease.release() is True


def test_lease_whose_release_is_on_its_way_is_not_gone_on_with(scripted: Script, key: str) -> None:
    """A transaction keeps it, and its release had no answer before it was refused its turn."""
    with transaction.atomic():
        with scripted_lock(key, ttl=20) as lease:
            pass
        lease._holding.given_up = True
        with pytest.raises(LockUsageError):
            lease.check()
        with pytest.raises(Exception, match=key):
            scripted_lock(key, ttl=20, wait=0).acquire()


def test_extend_does_not_ask_behind_the_loss(scripted: Script, key: str) -> None:
    """A shorter end counts from the first question on, which may have no answer for long."""
    lease = scripted_lock(key, ttl=20).acquire()
    store = lock_backends["scripted"]
    now = store.monotonic()

    asked: list[str] = []

    def suspend(operation: str) -> None:
        asked.append(operation)
        store.monotonic = lease._holding.monotonic = lambda: now + 2
        store._step = asked.append  # type: ignore[attr-defined]
        raise DOWN

    store.monotonic = lease._holding.monotonic = lambda: now
    store._step = suspend  # type: ignore[attr-defined]
    with pytest.raises(LockLost):
        lease.extend(1)
    assert asked == ["extend"]
    assert lease.is_lost


def test_renewal_does_not_cross_an_extend(scripted: Script, key: str) -> None:
    """A shorter end may be heard behind it: whoever extends asks alone."""
    lease = scripted_lock(key, ttl=20).acquire()
    crossed: list[Grant | None] = []

    def renew(_operation: str) -> None:
        crossed.append(Later(lease._holding.begin_renewal).result())

    lock_backends["scripted"]._step = renew  # type: ignore[attr-defined]
    lease.extend(5)
    assert crossed == [None]


# Keys that nobody has


def test_key_that_a_late_acquire_takes_is_given_back(
    scripted: Script, key: str, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the release of what a later question was granted."""
    monkeypatch.setattr(attempts, "MAX_BOUND", 0.2)
    scripted["acquire"] = [DOWN]
    lock = scripted_lock(key, ttl=20, wait=5)
    lease = acquire(lock)
    assert lease.release() is True
    store = lock_backends["scripted"]
    assert isinstance(store.acquire(key, lease.token, 20, lease.holder), Grant)
    assert taken(lock)
    assert eventually(lambda: grantable(lock))
    assert ScriptedMemory.asked.count("release") >= 2


@pytest.mark.parametrize("lost", [1, 2], ids=["look", "grant"])
def test_key_that_nobody_gets_to_load_is_given_back(
    scripted: Script, key: str, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The store has heard a question of who loads, and the load ends without an answer of it."""
    monkeypatch.setattr(attempts, "MAX_BOUND", 0.2)
    text = scripted_lock(key, ttl=0.3 if lost == 2 else 20).acquire().dump()
    scripted["acquire"] = [None] * (lost - 1) + [DOWN] * 100
    with pytest.raises(BackendUnavailable):
        Lease.load(text)
    # At once and once more; and before, the old lease was spent.
    assert eventually(lambda: ScriptedMemory.asked.count("release") == 1 + lost)
    lock_backends["scripted"].force_release(key)


def test_questions_without_an_answer_leave_no_threads(scripted: Script, key: str) -> None:
    """Each is released once more later, and a store may be away for thousands of them."""
    scripted["acquire"] = [DOWN] * 30
    before = threading.active_count()
    for number in range(30):
        with pytest.raises(BackendUnavailable):
            scripted_lock(f"{key}-{number}", ttl=20, wait=0).acquire()
    assert threading.active_count() < before + 10
