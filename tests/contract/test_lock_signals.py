"""What happens to locks is told, also when it went wrong, and never with a token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.dispatch import Signal

from django_distlock import Holder, Lease, Lock, LockLost, LockNotAcquired, signals
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .conftest import Hold
from .locking import PAST, SHORT, Heard, grantable, held_elsewhere, lock_of, receiving, take_away

NAMES = ("lock_acquired", "lock_not_acquired", "lock_extended", "lock_released", "lock_lost")
FIRED: dict[str, Signal] = {name: getattr(signals, name) for name in NAMES}


def check_common(facts: dict[str, Any], registered: Registered, lease: Lease) -> None:
    """Check what every signal carries."""
    assert facts["sender"] is type(lock_backends[registered.alias])
    assert (facts["alias"], facts["key"], facts["fence"]) == (
        registered.alias, lease.key, lease.fence,
    )  # fmt: skip
    assert isinstance(facts["holder"], Holder)
    assert facts["holder"].metadata == {"user": "Ada"}
    assert lease.token not in repr(facts)


@pytest.fixture
def everything(key: str) -> Iterator[list[str]]:
    """Collect the names of all signals about the key, in order, and look for tokens in them."""
    told: list[str] = []
    names = {signal: name for name, signal in FIRED.items()}

    def receive(signal: Signal, **facts: Any) -> None:
        if facts["key"] == key:
            told.append(names[signal])

    with ExitStack() as stack:
        for each in FIRED.values():
            stack.enter_context(receiving(each, receive))
        yield told


def test_life_of_a_lease_is_told_in_order(
    registered: Registered, key: str, everything: list[str], hold: Hold
) -> None:
    """Acquired, extended, released: each once, however it is held."""
    hold(lock_of(registered, key), Lease.extend)
    assert everything == ["lock_acquired", "lock_extended", "lock_released"]


def test_handles_go_through_the_same_door(lock: Lock, everything: list[str]) -> None:
    """`acquire` and `try_acquire` are told like blocks, and a second release is not told."""
    for attempt in (lock.acquire, lock.try_acquire):
        lease = attempt()
        assert lease is not None
        lease.release()
        lease.release()
    assert everything == ["lock_acquired", "lock_released"] * 2


def by_await(name: str) -> Callable[..., Any]:
    """Call the awaited twin of a method."""
    return lambda it, *arguments: asyncio.run(getattr(it, f"a{name}")(*arguments))


@pytest.mark.parametrize("awaited", [False, True])
def test_what_is_done_is_told(registered: Registered, key: str, awaited: bool) -> None:
    """How long it took, which ttl was given, and how long it was held until the key was freed."""
    lock = lock_of(registered, key, ttl=20, metadata={"user": "Ada"})
    acquire: Callable[[Lock], Lease] = by_await("acquire") if awaited else Lock.acquire
    extend = by_await("extend") if awaited else Lease.extend
    release = by_await("release") if awaited else Lease.release
    with Heard(signals.lock_acquired, key) as granted:
        lease = acquire(lock)
    time.sleep(0.05)
    with Heard(signals.lock_extended, key) as extended:
        extend(lease, 7)
    with Heard(signals.lock_extended, key) as extended_again:
        extend(lease)
    with Heard(signals.lock_released, key) as freed:
        release(lease)
    for heard in (granted, extended, extended_again, freed):
        check_common(heard.once, registered, lease)
    assert 0 <= granted.once["waited"] < 5
    assert (extended.once["ttl"], extended.once["cause"]) == (7.0, None)
    assert extended_again.once["ttl"] == 20.0
    assert (freed.once["released"], freed.once["cause"]) == (True, None)
    assert 0.05 <= freed.once["held_for"] < 5


def test_contention_is_told(registered: Registered, key: str) -> None:
    """`lock_not_acquired` carries the error, and who has the key."""
    lock = lock_of(registered, key, wait=0.1, metadata={"user": "Ada"})
    ways: list[Callable[[], object]] = [lock.acquire, lambda: asyncio.run(lock.aacquire())]
    with held_elsewhere(lock) as other:
        for attempt in ways:
            with Heard(signals.lock_not_acquired, key) as heard:
                with pytest.raises(LockNotAcquired) as caught:
                    attempt()
                facts = heard.once
                assert facts["sender"] is type(lock_backends[registered.alias])
                assert (facts["alias"], facts["fence"]) == (registered.alias, None)
                assert facts["cause"] is caught.value
                assert facts["holder"] == caught.value.holder
                assert 0.1 <= facts["waited"] < 5
                assert other.token not in repr(facts)
        with Heard(signals.lock_not_acquired, key) as heard:
            assert lock.try_acquire() is None
        assert isinstance(heard.once["cause"], LockNotAcquired)


def test_loss_is_told_once(registered: Registered, key: str) -> None:
    """`lock_lost` is sent when the loss is noticed, and not again."""
    lease = lock_of(registered, key, ttl=SHORT, metadata={"user": "Ada"}).acquire()
    time.sleep(PAST)
    with Heard(signals.lock_lost, key) as heard:
        for _ in range(3):
            with pytest.raises(LockLost):
                lease.check()
            with pytest.raises(LockLost):
                lease.extend()
        lease.release()
    check_common(heard.once, registered, lease)
    assert isinstance(heard.once["cause"], str)
    assert heard.once["held_for"] >= SHORT


def test_key_that_was_taken_away_is_told_as_loss(
    registered: Registered, key: str, everything: list[str]
) -> None:
    """A release that finds nothing tells of loss, and that the store freed nothing."""
    lease = lock_of(registered, key).acquire()
    take_away(lease)
    with Heard(signals.lock_released, key) as released, Heard(signals.lock_lost, key) as lost:
        assert lease.release() is False
    assert released.once["released"] is False
    assert lost.once["fence"] == lease.fence
    assert "lock_lost" in everything


def test_receiver_that_raises_changes_nothing(
    registered: Registered, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of somebody who listens is logged, and costs neither lock nor release."""

    def fail(**facts: Any) -> None:
        if facts["key"] == key:
            raise ZeroDivisionError("from a receiver")

    lock = lock_of(registered, key, wait=0)
    with ExitStack() as stack:
        for signal in FIRED.values():
            stack.enter_context(receiving(signal, fail))
        with caplog.at_level(logging.ERROR), lock as lease:
            lease.extend()
            assert lease.held
            assert not grantable(lock)
        with held_elsewhere(lock), pytest.raises(LockNotAcquired):
            lock.acquire()
        with pytest.raises(LockLost), lock as lease:
            take_away(lease)
    assert grantable(lock)
    assert "from a receiver" in caplog.text


def test_receiver_of_the_release_may_take_the_key(registered: Registered, key: str) -> None:
    """When `lock_released` is sent, the key is free: the next step may follow from it."""
    lock = lock_of(registered, key, wait=0)
    fences: list[int] = []

    def follow(**facts: Any) -> None:
        if facts["key"] == key and len(fences) < 2:
            with lock as lease:
                fences.append(lease.fence)

    with receiving(signals.lock_released, follow), lock as first:
        pass
    assert registered.are_next(fences, first.fence)
    assert len(fences) == 2


class TimeIsUp(BaseException):
    """What a signal's handler raises."""


def test_receiver_that_is_interrupted_leaves_nothing_held(lock: Lock) -> None:
    """A time limit that strikes in a receiver of the grant: nobody would release the key."""

    def receive(**_: Any) -> None:
        raise TimeIsUp

    with receiving(signals.lock_acquired, receive), pytest.raises(TimeIsUp):
        lock.acquire()
    assert grantable(lock)
