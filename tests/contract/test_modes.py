"""Ways to hold a lock: for a window, at least so long, without end, and what is refused."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_distlock import (
    InvalidArgument,
    Lease,
    Lock,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    Retry,
    distlock,
    distlock_all,
    signals,
)
from django_distlock.handler import lock_backends
from django_distlock.inspection import get_by_key
from tests.backends import Registered
from tests.processes import spawn

from .helpers import ELSEWHERE, Later, contend, held, prompt, take
from .locking import (
    HOLDING,
    PAST,
    SHORT,
    Heard,
    by_hand,
    eventually,
    grantable,
    lock_of,
    rolled_back,
    take_away,
    taken,
)

HOLDS = pytest.mark.requires("supports_ttl")


def in_a_block_that_raises(lock: Lock) -> Lease:
    """Leave a block by an exception."""
    with pytest.raises(ZeroDivisionError), lock as lease:
        raise ZeroDivisionError
    return lease


def by_hand_in_async(lock: Lock) -> Lease:
    """Acquire and release with awaits."""

    async def work() -> Lease:
        lease = await lock.aacquire()
        assert await lease.arelease() is True
        return lease

    return asyncio.run(work())


def in_a_transaction(lock: Lock) -> Lease:
    """Leave a block inside `atomic()`."""
    with transaction.atomic(), lock as lease:
        return lease


def held_by(way: Callable[[Lock, Callable[[Lease], Lease]], Lease]) -> Callable[[Lock], Lease]:
    """Hold a lock for a moment."""
    return lambda lock: way(lock, lambda lease: lease)


WAYS = {
    **{way.__name__: held_by(way) for way in HOLDING},
    **{way.__name__: way for way in (in_a_block_that_raises, by_hand, by_hand_in_async)},
    "in_a_transaction": in_a_transaction,
}
#: Each way to ask for a lock that can be refused.
ASKS: list[Callable[[Lock], object]] = [
    *(held_by(way) for way in HOLDING),
    *(by_hand, by_hand_in_async, Lock.try_acquire),
]


@pytest.fixture(params=[*WAYS.values()], ids=[*WAYS])
def use(request: pytest.FixtureRequest) -> Callable[[Lock], Lease]:
    """Give every way to hold a lock and give it up."""
    made: Callable[[Lock], Lease] = request.param
    return made


def settled(registered: Registered, key: str) -> timedelta:
    """Return how long since its grant a key stays taken that nobody works under any more."""
    record = Later(held, lock_backends[registered.alias], key).result()
    assert record.is_settled
    assert record.expires_at is not None
    return record.expires_at - record.acquired_at


@HOLDS
def test_held_key_stays_taken_for_the_ttl(
    registered: Registered, key: str, use: Callable[[Lock], Lease]
) -> None:
    """However the work ends, nobody else has the key until `acquired_at + ttl`, exactly.

    With `min_hold` the same for a part of the ttl, or for more than it.
    """
    lock = lock_of(registered, key, ttl=20, hold=True)
    lease = use(lock)
    assert (lease.held, lease.is_released, lease.is_lost) == (False, True, False)
    assert taken(lock)
    assert not grantable(lock)
    assert settled(registered, key) == timedelta(seconds=20)
    for seconds in (5, 50):
        use(lock_of(registered, f"{key}:{seconds}", ttl=20, min_hold=timedelta(seconds=seconds)))
        assert settled(registered, f"{key}:{seconds}") == timedelta(seconds=seconds)


@HOLDS
def test_job_that_runs_every_ttl_is_not_refused(registered: Registered, key: str) -> None:
    """The window ends without grace: the next run is granted at its beginning.

    Until then a refusal says that the holder is done, and how long the key is kept.
    """
    lock = lock_of(registered, key, ttl=2, hold=True, wait=0)
    with lock as lease:
        pass
    told = r"\(pid \d+\) on \S+ has finished, and the key stays held for another [012]\.\d s\.$"
    with pytest.raises(LockNotAcquired, match=told) as caught:
        lock.acquire()
    assert caught.value.settled
    left = Later(contend, lock_backends[registered.alias], key).result().free_in
    assert left is not None
    assert left <= 2
    time.sleep(left + 0.01)
    following = lock.acquire()
    assert following.fence > lease.fence
    assert following.acquired_at - lease.acquired_at >= timedelta(seconds=2)


@HOLDS
def test_work_that_took_longer_than_its_window_frees_the_key_at_once(
    registered: Registered, key: str
) -> None:
    """A lease that was extended past the window leaves nothing taken, nor a grace."""
    lock = lock_of(registered, key, ttl=1, hold=True)
    lease = lock.acquire()
    lease.extend(30)
    time.sleep(1.05)
    assert lease.release() is True
    assert not taken(lock)
    assert grantable(lock)


@HOLDS
def test_what_moves_the_end_does_not_move_the_window(registered: Registered, key: str) -> None:
    """What renewals and extends add counts for the work, not for the window behind it."""
    with lock_of(registered, key, ttl=3, hold=True) as lease:
        first = lease.expires_at
        assert first is not None
        assert eventually(lambda: lease.expires_at != first, timeout=5)
        lease.extend(60)
        lease.extend(5)
    assert settled(registered, key) == timedelta(seconds=3)


@HOLDS
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_window_is_settled_behind_the_transaction(
    registered: Registered, key: str, commits: bool
) -> None:
    """Until then the lease itself stands, and no other block goes on with it: refused at once."""
    lock = lock_of(registered, key, ttl=20, hold=True, wait=20)
    with transaction.atomic() if commits else rolled_back():
        with lock:
            pass
        assert not Later(held, lock_backends[registered.alias], key).result().is_settled
        for again in (lock, lock_of(registered, key, wait=None)):
            for ask in (again.acquire, async_to_sync(again.aacquire)):
                with (
                    prompt(),
                    Heard(signals.lock_not_acquired, key) as refused,
                    pytest.raises(LockNotAcquired, match="this transaction keeps") as caught,
                ):
                    ask()
                assert caught.value.settled
                assert refused.once["cause"] is caught.value
    assert eventually(lambda: Later(held, lock_backends[registered.alias], key).result().is_settled)
    assert settled(registered, key) == timedelta(seconds=20)


@HOLDS
@pytest.mark.parametrize(
    ("describe", "how"),
    [
        (distlock, {"hold": True, "ttl": 20}),
        (distlock_all, {"min_hold": 20}),
        (distlock, {"min_hold": 20, "basic": True}),
    ],
    ids=["hold", "min_hold", "without_end"],
)
def test_window_counts_from_the_block_that_asks_for_it(
    registered: Registered, key: str, describe: Callable[..., Any], how: dict[str, Any]
) -> None:
    """One that goes on with a lease of its transaction keeps the key as long as any other."""
    with transaction.atomic():
        with lock_of(registered, key):
            time.sleep(PAST)
        with describe(key, backend=registered.alias, **how):
            pass
    assert settled(registered, key) >= timedelta(seconds=20 + PAST)


@HOLDS
def test_lost_lease_settles_nothing(registered: Registered, key: str) -> None:
    """A window is the holder's: what an operator took away stays free."""
    lock = lock_of(registered, key, ttl=20, hold=True)
    with pytest.raises(LockLost), lock as lease:
        take_away(lease)
    assert not taken(lock)
    assert grantable(lock_of(registered, key))


@HOLDS
@ELSEWHERE
@pytest.mark.parametrize("how", ["acquire", "min_hold", "block"])
def test_end_of_the_interpreter_settles_the_window(
    registered: Registered, key: str, how: str
) -> None:
    """A process that ends without a release leaves the key taken for the window, and no longer."""
    window: dict[str, Any] = {"min_hold": 40} if how == "min_hold" else {"hold": True}
    target = "tests.contract.lock_workers:hold_to_the_end"
    with spawn(target, registered.alias, key, how, window) as worker:
        worker.wait_for("held")
        assert worker.popen.wait(timeout=20) == (3 if how == "block" else 0)
    assert settled(registered, key) == timedelta(seconds=40 if how == "min_hold" else 60)


@pytest.mark.requires(supports_ttl=False)
def test_window_is_refused_where_no_lease_ends_by_itself(registered: Registered, key: str) -> None:
    """Before anything is touched, and with the reason."""
    backend = lock_backends[registered.alias]
    before = take(backend, key)
    assert backend.release(before) is True
    for lock in (lock_of(registered, key, hold=True), lock_of(registered, key, min_hold=1)):
        for use_it in ASKS:
            with pytest.raises(LockUsageError, match=registered.alias) as caught:
                use_it(lock)
            assert (caught.value.code, caught.value.key) == ("unsupported", key)
        assert not taken(lock)
    assert registered.is_next(take(backend, key).fence, before.fence)
    backend.force_release(key)


def test_what_does_not_go_together_is_refused() -> None:
    """One of them says how long; and a window needs a ttl to be that."""
    more: dict[str, Any]
    for rule, more in (
        ("min_hold", {"hold": True, "min_hold": 5}),
        ("ttl", {"basic": True, "hold": True}),
        # Nothing could cut the first ttl short.
        ("max_lifetime", {"ttl": 30, "max_lifetime": 29.9}),
        ("max_lifetime", {"ttl": 30, "max_lifetime": timedelta(0, 5)}),
    ):
        with pytest.raises(InvalidArgument, match=rule):
            distlock("key", **more)


# basic


@HOLDS
def test_basic_lock_with_a_window_ends_with_it(registered: Registered, key: str) -> None:
    """`min_hold` counts from the grant, also where the lock itself has no end."""
    with lock_of(registered, key, basic=True, min_hold=20):
        pass
    assert settled(registered, key) == timedelta(seconds=20)


def test_basic_lock_has_no_end(registered: Registered, key: str) -> None:
    """No deadline, no expiry, and nothing that renews; an extend with a number sets an end."""
    before = {each.name for each in threading.enumerate()}
    with lock_of(registered, key, basic=True) as lease:
        assert lease.held
        lease.check()
        info = get_by_key(key, backend=registered.alias)
        assert info is not None
        assert info.expires_at is None
        for _ in range(2):
            assert lease.expires_at is None
            assert lease.deadline == lease.remaining() == math.inf
            started = {each.name for each in threading.enumerate()} - before
            assert not [name for name in started if "heartbeat" in name]
            lease.extend(30)
            assert 29 < lease.remaining() <= 30
            lease.extend()
        assert lease.deadline == math.inf
    assert grantable(lock_of(registered, key))


def test_basic_lock_outlives_every_ttl(
    registered: Registered, key: str, request: pytest.FixtureRequest
) -> None:
    """However much time passes, the key stays taken; an operator can take it."""
    lease = lock_of(registered, key, basic=True).acquire()
    lock = lock_of(registered, key)
    if registered.store != "memory":
        request.getfixturevalue("elapse")(10**7)
    assert taken(lock)
    assert not grantable(lock)
    take_away(lease)
    assert grantable(lock)
    assert lease.release() is False


def test_basic_lock_with_a_ttl_ends_and_is_not_renewed(registered: Registered, key: str) -> None:
    """It is a lease without heartbeat."""
    lock = lock_of(registered, key, basic=True, ttl=0.9)
    lease = lock.__enter__()
    assert lease.remaining() > 0
    time.sleep(1.0)
    assert lease.is_lost
    with pytest.raises(LockLost):
        lock.__exit__(None, None, None)
    assert grantable(lock)


# max_lifetime


def test_what_the_settings_refuse_touches_nothing(registered: Registered, key: str) -> None:
    """However the lock is asked for, before the store is."""
    # `MAX_TTL` is the backend's: it is known when the lock is used.
    refused = [("max_lifetime", {"max_lifetime": 1}), ("at most 604800", {"ttl": 604_801})]
    if lock_backends[registered.alias].supports_ttl:
        refused.append(("min_hold", {"min_hold": 604_801}))
    for rule, arguments in refused:
        lock = lock_of(registered, key, **arguments)
        for use_it in ASKS:
            with pytest.raises(InvalidArgument, match=rule):
                use_it(lock)
        assert not taken(lock)


def test_lifetime_of_one_ttl_is_legal(registered: Registered, key: str) -> None:
    """It says: never renew."""
    lock = lock_of(registered, key, ttl=SHORT, max_lifetime=SHORT)
    with pytest.raises(LockLost), lock:
        time.sleep(PAST + 0.05)
    assert grantable(lock_of(registered, key))


# What is refused

BAD: list[tuple[str, str, list[Any]]] = [
    ("ttl", "0.1", [0, 0.05, -1, math.nan, timedelta(0)]),
    ("ttl", "number", [True, "5"]),
    ("wait", "0", [-1, math.nan, timedelta(seconds=-1)]),
    ("wait", "number", [True, False, "5"]),
    ("min_hold", "0", [-1]),
    ("min_hold", "number", [None, True]),
    ("max_lifetime", "0.1", [0]),
    ("max_lifetime", "number", ["5", True]),
    *((name, "finite", [math.inf]) for name in ("ttl", "wait", "max_lifetime")),
    ("backend", "alias", [5, None]),
    *((name, "True or False", [5, None, "yes"]) for name in ("heartbeat", "hold", "reentrant")),
    *((name, "True or False", [0, 1]) for name in ("steal_if_dead", "basic")),
    ("on_conflict", '"raise", "run" or "yield"', ["skip", "RUN", "", None, True, []]),
    ("retry", "Retry", [5, {"delay": 1}]),
    ("metadata", "mapping", ["Ada", [("user", "Ada")], [], 0, "", False]),
    ("metadata", "JSON", [{"user": object()}]),
    ("metadata", "str", [{1: "a"}]),
    ("metadata", "4096", [{"a": "x" * 5000}]),
]


def test_bad_argument_is_refused() -> None:
    """The error names the argument and the rule, and is a `ValueError`."""
    for name, rule, values in BAD:
        for value in values:
            with pytest.raises(InvalidArgument) as caught:
                distlock("key", **{name: value})
            assert isinstance(caught.value, ValueError)
            assert caught.value.code == "invalid_argument"
            assert name in str(caught.value)
            assert rule in str(caught.value), (name, value)


def test_bad_key_is_refused() -> None:
    """Where the lock is described, and not first where it is used."""
    key: Any
    for key in ("", None, True, 0.5, b"key", "a\0b", "\ud800", "x" * 513, "é" * 257):
        with pytest.raises(InvalidArgument):
            distlock(key)


def test_retry_of_ones_own_is_taken(registered: Registered, key: str) -> None:
    """And durations in any form."""
    lock = distlock(
        key,
        backend=registered.alias,
        ttl=timedelta(seconds=5),
        wait=timedelta(seconds=1),
        max_lifetime=timedelta(minutes=1),
        retry=Retry(delay=0.01),
    )
    with lock as lease:
        assert 4 < lease.remaining() <= 5
        assert abs(lease.acquired_at - datetime.now(UTC)) < timedelta(seconds=10)
