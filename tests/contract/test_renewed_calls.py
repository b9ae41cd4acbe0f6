"""`acquire(heartbeat=True)`: a lease that no block holds, and that is renewed while it is kept."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction

from django_distlock import (
    InvalidArgument,
    Lease,
    Lock,
    LockLost,
    LockNotAcquired,
    distlock,
    distlock_all,
    signals,
)
from django_distlock.core.clock import monotonic
from django_distlock.core.durations import GRACE
from django_distlock.handler import lock_backends
from django_distlock.process.heartbeat import heartbeat_of, held_here
from tests.backends import Registered
from tests.processes import spawn

from .conftest import TWINS
from .helpers import HAS_TTL, PATIENCE, SHARED, Later
from .locking import (
    PAST,
    SHORT,
    Heard,
    eventually,
    grantable,
    in_a_block,
    lock_of,
    outlive,
    take_away,
    taken,
)

WORKERS = "tests.contract.heart_workers"
#: A ttl that is not over before a busy machine has renewed, or dropped.
TTL = 6.0

Take = Callable[[Lock], Lease | None]
Release = Callable[..., bool]


async def aacquire(lock: Lock) -> Lease:
    """Acquire with an await."""
    return await lock.aacquire(heartbeat=True)


async def atry_acquire(lock: Lock) -> Lease | None:
    """Try once, with an await."""
    return await lock.atry_acquire(heartbeat=True)


WAYS: dict[str, Take] = {
    "acquire": lambda lock: lock.acquire(heartbeat=True),
    "try_acquire": lambda lock: lock.try_acquire(heartbeat=True),
    "aacquire": lambda lock: asyncio.run(aacquire(lock)),
    "atry_acquire": lambda lock: asyncio.run(atry_acquire(lock)),
}


@pytest.fixture(params=[*WAYS.values()], ids=[*WAYS])
def take(request: pytest.FixtureRequest) -> Take:
    """Give each way to acquire a lease that is renewed."""
    way: Take = request.param
    return way


def release_awaited(lease: Lease, **how: Any) -> bool:
    """Release with an await."""
    return asyncio.run(lease.arelease(**how))


RELEASES: list[Release] = [Lease.release, release_awaited]


@pytest.fixture(params=RELEASES, ids=TWINS)
def release(request: pytest.FixtureRequest) -> Release:
    """Give both ways to release."""
    way: Release = request.param
    return way


def renewed_here(lock: Lock) -> bool:
    """Say whether the heartbeat of this process has a lease of the key."""
    leases: list[Any] = list(heartbeat_of(lock_backends[lock.backend]).all())
    return any(each.key == lock.key for each in leases)


def is_renewed(lease: Lease) -> bool:
    """Wait until a heartbeat has moved the deadline of a lease."""
    before = lease.deadline
    return eventually(lambda: lease.deadline > before, timeout=4 * TTL)


@HAS_TTL
def test_lease_of_a_call_is_renewed(registered: Registered, key: str, take: Take) -> None:
    """Until it is released, by whatever thread; nothing of it is left behind that."""
    lock = lock_of(registered, key, ttl=TTL)
    lease = take(lock)
    assert lease is not None
    assert is_renewed(lease)
    assert lock.try_acquire(heartbeat=True) is None
    assert Later(lease.release).result() is True
    assert lease.is_released
    assert not renewed_here(lock)
    assert grantable(lock)


@HAS_TTL
def test_other_leases_of_calls_are_not(lock: Lock) -> None:
    """As it was: whoever asks for no heartbeat extends by hand."""
    lease = lock.acquire()
    assert not renewed_here(lock)
    assert lease.release()


@pytest.mark.aliases("memory")
@pytest.mark.parametrize(
    ("more", "heartbeat", "says"),
    [
        ({"basic": True}, True, "basic=True"),
        ({}, 1, "heartbeat must be True or False, not 1"),
        ({}, None, "heartbeat must be True or False, not None"),
    ],
)
def test_heartbeat_that_cannot_be(
    registered: Registered, key: str, more: dict[str, Any], heartbeat: Any, says: str
) -> None:
    """It is refused before anything is asked."""
    lock = lock_of(registered, key, **more)
    for take in (lock.acquire, lock.try_acquire):
        with pytest.raises(InvalidArgument, match=says):
            take(heartbeat=heartbeat)
    for await_ in (lock.aacquire, lock.atry_acquire):
        with pytest.raises(InvalidArgument, match=says):
            asyncio.run(await_(heartbeat=heartbeat))
    assert not lock.locked()


@HAS_TTL
def test_max_lifetime_is_an_end_to_renewals_of_a_call(registered: Registered, key: str) -> None:
    """What a forgotten `release()` keeps taken is free then."""
    lease = lock_of(registered, key, ttl=1, max_lifetime=1).acquire(heartbeat=True)
    assert eventually(lambda: lease.is_lost)
    assert lease.release() is False


@HAS_TTL
def test_keys_of_one_call_are_renewed(registered: Registered, key: str) -> None:
    """The same for `distlock_all()`."""
    keys = [f"{key}-{number}" for number in range(2)]
    leases = distlock_all(*keys, ttl=TTL, backend=registered.alias).acquire(heartbeat=True)
    assert all(is_renewed(each) for each in leases.values())
    take_away(leases[keys[0]])
    with pytest.raises(LockLost, match=keys[0]):
        leases.release(strict=True)
    assert leases[keys[1]].is_released
    assert all(grantable(lock_of(registered, each)) for each in keys)


# Leases that their owner drops


@contextmanager
def warned_of(key: str) -> Iterator[Callable[[], list[warnings.WarningMessage]]]:
    """Give the resource warnings about a key, of all threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [
            each for each in caught if each.category is ResourceWarning and key in str(each.message)
        ]


@HAS_TTL
def test_dropped_lease_warns_and_expires(
    registered: Registered, key: str, take: Take, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the line that acquired it; the key is free when its time has passed."""
    lock = lock_of(registered, key, ttl=TTL, wait=0)
    with Heard(signals.lock_lost, key) as lost, warned_of(key) as caught:
        lease = take(lock)
        assert lease is not None
        fence, deadline = lease.fence, lease.deadline
        del lease
        gc.collect()
        assert eventually(lambda: bool(caught()), timeout=PATIENCE)
        # It is not released: whoever dropped it may be at work.
        assert taken(lock) or monotonic() > deadline + GRACE
        assert eventually(lambda: bool(lost.facts), timeout=PATIENCE)
    (warned,) = caught()
    assert f"{key!r} (fence {fence})" in str(warned.message)
    assert warned.filename == __file__
    (logged,) = [each for each in caplog.records if vars(each).get("distlock_event") == "dropped"]
    assert f"{__file__}:{warned.lineno}" in logged.getMessage()
    assert "dropped" in lost.once["cause"]
    assert not renewed_here(lock)
    assert eventually(lambda: grantable(lock), timeout=PATIENCE)


@HAS_TTL
def test_dropped_lease_goes_on_with_none_of_its_transaction(
    registered: Registered, key: str
) -> None:
    """What keeps a lease until the end of a transaction keeps no other one that continues it."""
    with transaction.atomic(), warned_of(key) as caught:
        for way, take in WAYS.items():
            lock = lock_of(registered, f"{key}-{way}", ttl=TTL, wait=0)
            assert lock.acquire().release()
            lease = take(lock)
            assert lease is not None
            del lease
        gc.collect()
        assert eventually(lambda: len(caught()) == len(WAYS), timeout=PATIENCE)


@pytest.mark.stores("session", why="leases of others expire")
def test_dropped_lease_of_a_session_stays_with_the_process(
    registered: Registered, key: str
) -> None:
    """Nothing ends it before its session: the warning says so."""
    lock = lock_of(registered, key, wait=0)
    with warned_of(key) as caught:
        release = lock.acquire(heartbeat=True)._release
        gc.collect()
        assert eventually(lambda: bool(caught()), timeout=PATIENCE)
    assert "until this process ends" in str(caught()[0].message)
    assert taken(lock)
    assert release.by_call()


@pytest.mark.aliases("memory")
@pytest.mark.parametrize("how", ["on_lost", "on_danger"])
def test_callback_does_not_keep_its_lease(registered: Registered, key: str, how: str) -> None:
    """Also where it belongs to an object that has the lease, as one that works under it has."""

    class Worker:
        def __init__(self) -> None:
            self.lease = lock_of(registered, key, ttl=TTL).acquire(heartbeat=True)
            getattr(self.lease, how)(self.stop)

        def stop(self, lease: Lease) -> None:
            """Be called back."""

    with warned_of(key) as caught:
        Worker()
        gc.collect()
        assert eventually(lambda: bool(caught()), timeout=PATIENCE)


@pytest.mark.aliases("memory")
def test_callbacks_of_a_lease_that_is_kept_are_called(registered: Registered, key: str) -> None:
    """For as long as somebody has the lease, whoever renews it."""
    told: list[tuple[str, Lease]] = []
    lease = lock_of(registered, key, ttl=TTL, max_lifetime=TTL).acquire(heartbeat=True)
    lease.on_danger(lambda lease: told.append(("danger", lease)), before=TTL - 1)
    lease.on_lost(lambda lease: told.append(("lost", lease)))
    gc.collect()
    assert eventually(lambda: len(told) == 2, timeout=PATIENCE)
    assert told == [("danger", lease), ("lost", lease)]


@HAS_TTL
def test_lease_that_was_given_up_warns_of_nothing(registered: Registered, key: str) -> None:
    """Neither released, nor lost, nor kept for a transaction, in which it is renewed to the end."""
    lock = lock_of(registered, key, ttl=TTL, wait=0)
    store = lock_backends[lock.backend]
    released = lock.acquire(heartbeat=True)
    assert released.release()
    lost = lock.acquire(heartbeat=True)
    take_away(lost)
    assert lost.release() is False
    # Any warning is an error in these tests, and would be logged by the thread that gives it.
    with transaction.atomic():
        deferred = lock.acquire(heartbeat=True)
        assert deferred.release()
        holding = deferred._holding
        del released, lost, deferred
        gc.collect()
        before = holding.deadline
        assert eventually(lambda: holding.deadline > before, timeout=4 * TTL)
        assert Later(store.read, key).result() is not None
        assert holding.lost_by is None
    assert eventually(lambda: grantable(lock))
    assert holding not in held_here


# Releases behind a loss


@pytest.mark.parametrize(
    ("release", "lose", "notice"),
    [
        (Lease.release, outlive, False),
        (Lease.release, take_away, True),
        (release_awaited, outlive, True),
        (release_awaited, take_away, False),
    ],
    ids=["called-unnoticed", "called-noticed", "awaited-noticed", "awaited-unnoticed"],
)
def test_release_behind_a_loss_says_so(
    registered: Registered,
    key: str,
    release: Release,
    lose: Callable[[Lease], None],
    notice: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`strict=True` raises; else the answer is False, and the log has a line."""
    lock = lock_of(registered, key, ttl=SHORT if lose is outlive else 30)
    for strict in (False, True):
        lease = lock.acquire()
        lose(lease)
        if notice:
            with pytest.raises(LockLost):
                lease.extend()
        caplog.clear()
        with Heard(signals.lock_lost, key) as told:
            if strict:
                with pytest.raises(LockLost, match=key):
                    release(lease, strict=True)
            else:
                assert release(lease) is False
        assert len(told.facts) == (not notice)
        events = [vars(each).get("distlock_event") for each in caplog.records]
        assert events.count("lost") == (not notice)
        assert events.count("released_late") == (notice and not strict)
        assert (lease.is_lost, lease.is_released) == (True, False)
        # Where nobody else has it by now, it is given back all the same.
        assert grantable(lock)


def test_strict_release_of_what_is_held(lock: Lock, release: Release) -> None:
    """It is True once, and what was released before is no loss."""
    lease = lock.acquire()
    assert release(lease, strict=True) is True
    assert release(lease, strict=True) is False
    assert not lease.is_lost


def test_strict_release_in_a_transaction(registered: Registered, key: str) -> None:
    """The loss is said at once, and what there is to give back is given back behind it."""
    lock = lock_of(registered, key, ttl=SHORT)
    with transaction.atomic():
        lease = lock.acquire()
        time.sleep(PAST)
        with pytest.raises(LockLost, match=key):
            lease.release(strict=True)
    assert grantable(lock)


@pytest.mark.aliases("memory")
def test_release_of_a_block_without_its_lock_is_never_strict(
    registered: Registered, key: str
) -> None:
    """What was not granted was not lost."""
    lock = lock_of(registered, key)
    holder = Later(lock.acquire).result()
    with lock_of(registered, key, wait=0, on_conflict="run") as lease:
        assert lease.release(strict=True) is False
    assert holder.release()


# Processes


@SHARED
def test_process_holds_by_a_call_for_several_ttl(registered: Registered, key: str) -> None:
    """Nobody else is granted the key, until another thread of the process releases it."""
    lock = lock_of(registered, key, ttl=30, wait=0)
    with spawn(f"{WORKERS}:hold_by_a_call", registered.alias, key, TTL) as worker:
        fence = _fence_of(worker)
        until = time.monotonic() + 3 * TTL
        while time.monotonic() < until:
            with pytest.raises(LockNotAcquired):
                Later(lock.acquire).result()
            time.sleep(0.2)
        worker.send("stop")
        assert worker.result() == {"held": True, "released": True}
    successor = Later(lock.acquire).result()
    assert successor.fence > fence
    assert Later(successor.release).result()


@SHARED
@HAS_TTL
def test_lease_that_a_process_drops_expires_while_it_lives(
    registered: Registered, key: str
) -> None:
    """The process is warned, works on, and does not renew it."""
    lock = lock_of(registered, key, ttl=30, wait=0)
    with spawn(f"{WORKERS}:drop", registered.alias, key, TTL) as worker:
        fence = _fence_of(worker)
        assert taken(lock)
        worker.send("drop")
        worker.wait_for("dropped")
        assert eventually(lambda: grantable(lock), timeout=PATIENCE)
        worker.send("stop")
        assert worker.result() == {"warned": ["ResourceWarning"]}
    successor = Later(lock.acquire).result()
    assert successor.fence > fence
    assert Later(successor.release).result()


@SHARED
def test_process_that_stood_still_released_nothing(registered: Registered, key: str) -> None:
    """A release past the deadline is never True, whatever the store still has."""
    with spawn(f"{WORKERS}:stand_still_by_a_call", registered.alias, key, TTL) as worker:
        worker.wait_for("held")
        os.kill(worker.popen.pid, signal.SIGSTOP)
        time.sleep(1.2 * TTL)
        worker.go_on()
        assert worker.result() == {"is_over": True, "released": False, "is_lost": True}


def _fence_of(worker: Any) -> int:
    said = ""
    until = time.monotonic() + PATIENCE
    while not said.startswith("held "):
        said = worker._next(until) or ""
    return int(said.removeprefix("held "))


# Blocks that mean to expire


def past_its_end(registered: Registered, key: str, **more: Any) -> Lock:
    """Describe a lock whose lease ends before its block does."""
    return lock_of(registered, key, ttl=0.5, heartbeat=False, **more)


def test_block_that_ignores_a_loss(registered: Registered, key: str, hold: Any) -> None:
    """It ends as it would, and is not cancelled; the signal and the lease tell of the loss."""
    ran: list[str] = []

    def work(lease: Lease) -> str:
        outlive(lease)
        with pytest.raises(LockLost):
            lease.check()
        ran.append(lease.key)
        return "done"

    with Heard(signals.lock_lost, key) as lost:
        assert hold(past_its_end(registered, key, on_lost="ignore"), work) == "done"
        assert lost.once["fence"]
    assert ran == [key]
    assert grantable(lock_of(registered, key))


@pytest.mark.aliases("memory")
def test_awaiting_block_that_ignores_a_loss_is_not_cancelled(
    registered: Registered, key: str
) -> None:
    """Not where it awaits, either; one that does not ignore it is."""

    async def work(on_lost: Any) -> str:
        async with past_its_end(registered, key, on_lost=on_lost):
            await asyncio.sleep(1)
            return "done"

    assert asyncio.run(work("ignore")) == "done"
    with pytest.raises(LockLost):
        asyncio.run(work("raise"))


@pytest.mark.aliases("memory")
@pytest.mark.parametrize(("outer", "inner"), [("ignore", "raise"), ("raise", "ignore")])
def test_each_block_says_what_a_loss_is_to_it(
    registered: Registered, key: str, outer: Any, inner: Any
) -> None:
    """One that has entered its lock again, too."""
    ends: list[str] = []

    def nest() -> None:
        with past_its_end(registered, key, on_lost=outer):
            try:
                with past_its_end(registered, key, reentrant=True, on_lost=inner) as lease:
                    outlive(lease)
            except LockLost:
                ends.append("inner")

    try:
        nest()
    except LockLost:
        ends.append("outer")
    assert ends == [
        name for name, on_lost in (("inner", inner), ("outer", outer)) if on_lost == "raise"
    ]


@pytest.mark.aliases("memory")
def test_error_of_a_block_that_ignores_a_loss(registered: Registered, key: str) -> None:
    """What its body raises is raised."""

    def fail(lease: Lease) -> None:
        outlive(lease)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_a_block(past_its_end(registered, key, on_lost="ignore"), fail)


@pytest.mark.parametrize("wrong", ["skip", None, True])
def test_on_lost_is_one_of_two(wrong: Any) -> None:
    """Anything else is named, with the rule."""
    with pytest.raises(InvalidArgument, match='on_lost must be "raise" or "ignore", not'):
        distlock("key", on_lost=wrong)
