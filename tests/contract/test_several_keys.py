"""`distlock_all()`: several keys at once, all or none."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_distlock import (
    InvalidArgument,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock_all,
    lock_backends,
)
from django_distlock.locks.several import LockSet
from tests.backends import Registered

from .helpers import Later, at_once, prompt
from .locking import eventually, grantable, held_elsewhere, lock_of, take_away


def free(registered: Registered, *keys: str) -> list[str]:
    """Return which of these keys can be had."""
    return [each for each in keys if grantable(lock_of(registered, each, wait=0))]


def test_all_keys_are_held_and_given_back(registered: Registered, key: str) -> None:
    """In the order of their texts, each once, with leases by key; behind errors and awaits, too."""
    one, two = f"{key}-1", f"{key}-2"
    locks = distlock_all(two, one, two, backend=registered.alias)

    async def awaited() -> None:
        async with locks as leases:
            assert list(leases) == [one, two]
            assert await asyncio.to_thread(free, registered, one, two) == []
        assert not leases.held

    with locks as leases:
        assert list(leases) == [one, two]
        assert leases
        leases.check()
        assert {each.key for each in leases.values()} == {one, two}
        assert current_lease(one) is leases[one]
        assert free(registered, one, two) == []
    assert free(registered, one, two) == [one, two]
    assert not leases
    with pytest.raises(ZeroDivisionError), locks:
        raise ZeroDivisionError
    assert free(registered, one, two) == [one, two]
    asyncio.run(awaited())
    assert free(registered, one, two) == [one, two]


@pytest.mark.aliases("memory")
def test_leases_are_found_by_any_name_of_their_key(registered: Registered, key: str) -> None:
    """As `current_lease()` finds them: by another spelling, and by an int."""
    with distlock_all(f"{key}e\u0301", 42, backend=registered.alias) as leases:
        assert leases[f"{key}e\u0301"] is leases[f"{key}\u00e9"]
        assert leases[42] is leases["42"]
        assert f"{key}e" not in leases
        with pytest.raises(InvalidArgument, match="empty"):
            leases[""]


def test_all_or_none(registered: Registered, key: str) -> None:
    """Where one cannot be had, those that were taken are given back; `wait` is for all."""
    keys = [f"{key}-{number}" for number in range(4)]
    locks = distlock_all(*keys, wait=0.3, backend=registered.alias)
    with (
        held_elsewhere(lock_of(registered, keys[1], metadata={"reason": "stock"})),
        held_elsewhere(lock_of(registered, keys[3])),
    ):
        for take in (locks.acquire, locks.__enter__, partial(asyncio.run, entered(locks))):
            with prompt(0.3, least=0.2), pytest.raises(LockNotAcquired) as caught:
                take()
            assert caught.value.key == keys[1]
            assert caught.value.holder is not None
            assert caught.value.holder.metadata == {"reason": "stock"}
            assert free(registered, *keys) == [keys[0], keys[2]]
    with locks:
        pass


async def test_twins_without_a_block(registered: Registered, key: str) -> None:
    """They are awaited. One that is cancelled while it waits leaves nothing held."""
    one, two = f"{key}-1", f"{key}-2"
    leases = await distlock_all(one, two, backend=registered.alias, ttl=20).aacquire()
    before = leases[two].deadline
    await leases.aextend(40)
    assert leases[two].deadline > before + 15 or before == math.inf
    assert await asyncio.to_thread(free, registered, one, two) == []
    assert await leases.arelease()
    assert not await leases.arelease()
    async with lock_of(registered, two):
        waiting = asyncio.create_task(
            distlock_all(one, two, backend=registered.alias, wait=20).aacquire()
        )
        queues = lock_backends[registered.alias].queues
        assert await asyncio.to_thread(eventually, lambda: queues.name_of(two) in queues)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(free, registered, one, two) == [one]


async def entered(locks: Any) -> None:
    """Enter with an await."""
    async with locks:
        pass


@pytest.mark.requires("supports_ttl", "supports_sharing")
@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("call", {"hold": True}),
        ("block", {"min_hold": 20, "permits": 2}),
        ("awaited", {"hold": True}),
    ],
    ids=["call", "block", "awaited"],
)
def test_nothing_is_kept_behind_a_refusal(
    registered: Registered, key: str, way: str, more: dict[str, Any]
) -> None:
    """Where all are granted, all of them stay taken behind the work."""
    keys = [f"{key}-1", f"{key}-2"]

    def work(wait: float) -> None:
        locks = distlock_all(*keys, wait=wait, ttl=20, backend=registered.alias, **more)
        if way == "call":
            locks.acquire().release()
        elif way == "awaited":
            asyncio.run(entered(locks))
        else:
            with locks:
                pass

    with held_elsewhere(lock_of(registered, keys[1])):
        for wait in (0, 0.2):
            with pytest.raises(LockNotAcquired):
                work(wait)
            assert free(registered, *keys) == keys[:1]
    work(0)
    assert free(registered, *keys) == []


@pytest.mark.stores("memory", "postgresql", "redis", why="it is the same in each")
def test_refusal_in_a_transaction_keeps_nothing(registered: Registered, key: str) -> None:
    """But for what was locked there before: data may have been written under it."""
    keys = [f"{key}-{number}" for number in range(3)]
    locks = distlock_all(*keys, wait=0.1, backend=registered.alias)
    with held_elsewhere(lock_of(registered, keys[2])), transaction.atomic():
        with lock_of(registered, keys[0]):
            pass
        for take in (locks.acquire, locks.__enter__, partial(async_to_sync(entered), locks)):
            with pytest.raises(LockNotAcquired):
                take()
            assert free(registered, *keys) == [keys[1]]
    assert eventually(lambda: free(registered, *keys) == keys)


@pytest.mark.requires("supports_sharing")
def test_each_key_has_a_limit_of_its_own(registered: Registered, key: str) -> None:
    """Whichever comes first, and however the store is asked."""
    wide = lock_of(registered, f"{key}-1", wait=0, permits=3)
    narrow = lock_of(registered, f"{key}-2", wait=0, permits=2)
    held = [LockSet([wide, narrow]).acquire(), LockSet([narrow, wide]).acquire()]
    with pytest.raises(LockNotAcquired) as caught:
        LockSet([wide, narrow]).acquire()
    assert caught.value.key == narrow.key
    assert grantable(wide)
    assert not grantable(narrow)
    held.pop().release()
    assert grantable(narrow)
    held.pop().release()


def test_leases_without_a_block(registered: Registered, key: str) -> None:
    """They are extended and released together, once."""
    keys = [f"{key}-1", f"{key}-2"]
    leases = distlock_all(*keys, ttl=20, backend=registered.alias).acquire()
    leases.extend(50)
    assert min(each.remaining() for each in leases.values()) > 20
    assert leases.release() is True
    assert leases.release() is False
    assert free(registered, *keys) == keys


@pytest.mark.requires("supports_operators")
def test_lost_lease_gives_all_back(registered: Registered, key: str) -> None:
    """The end of the block says so, and nothing stays held."""
    keys = [f"{key}-1", f"{key}-2"]
    with (  # noqa: PT012 - the end of the block raises
        pytest.raises(LockLost) as caught,
        distlock_all(*keys, ttl=2, heartbeat=False, backend=registered.alias) as leases,
    ):
        take_away(leases[keys[0]])
        with pytest.raises(LockLost):
            leases[keys[0]].extend()
        assert not leases
    assert caught.value.key == keys[0]
    assert free(registered, *keys) == keys
    leases = distlock_all(*keys, heartbeat=False, backend=registered.alias).acquire()
    take_away(leases[keys[0]])
    assert leases.release() is False
    assert free(registered, *keys) == keys


@pytest.mark.requires("supports_ttl")
@pytest.mark.parametrize("by", ["acquire", "block"])
def test_lease_that_ends_while_others_are_waited_for(
    registered: Registered, key: str, by: str
) -> None:
    """Then not all are held, and none is."""
    keys = [f"{key}-1", f"{key}-2"]
    locks = distlock_all(*keys, ttl=0.3, wait=20, heartbeat=False, backend=registered.alias)
    with held_elsewhere(lock_of(registered, keys[1])) as lease:
        waiter = Later(locks.acquire if by == "acquire" else locks.__enter__)
        assert eventually(lambda: not grantable(lock_of(registered, keys[0], wait=0)), 5)
        time.sleep(1.5)
        Later(lease.release).result()
        with pytest.raises(LockNotAcquired, match="ended while") as caught:
            waiter.result()
    assert caught.value.key == keys[0]
    assert free(registered, *keys) == keys


def test_decorator_fills_all_keys(registered: Registered, key: str) -> None:
    """Each is a template; calls at the same time, in any order, do not mix up their leases."""
    locked = distlock_all(f"{key}-{{a}}", f"{key}-{{b}}", wait=20, backend=registered.alias)
    inside: list[int] = []

    @locked
    def work(a: int, b: int) -> list[int]:
        inside.append(a)
        assert len(inside) == 1, "two held a key at once"
        inside.remove(a)
        return sorted([a, b])

    @locked
    async def awaited(a: int, b: int) -> bool:
        return current_lease(f"{key}-{a}") is not None and b > a

    calls = [partial(work, 1, 2), partial(work, 2, 1), partial(work, 1, 3)]
    assert at_once(calls * 3) == [[1, 2], [1, 2], [1, 3]] * 3
    assert asyncio.run(awaited(1, 2))
    assert len(free(registered, f"{key}-1", f"{key}-2", f"{key}-3")) == 3


@pytest.mark.aliases("memory")
def test_wrong_use_is_refused(registered: Registered, key: str) -> None:
    """Before anything is asked."""
    with pytest.raises(InvalidArgument, match="at least one key"):
        distlock_all(backend=registered.alias)
    with pytest.raises(InvalidArgument, match="does not accept on_conflict"):
        distlock_all(key, on_conflict="run")
    with pytest.raises(InvalidArgument, match="ttl"):
        distlock_all(key, ttl=-1)
    locks = distlock_all(key, backend=registered.alias)
    with locks, pytest.raises(LockUsageError, match="in use"):
        locks.__enter__()
    assert key in repr(locks)
    assert Later(locks.acquire).result().release()
