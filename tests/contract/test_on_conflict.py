"""`on_conflict="run"` and `"yield"`: a block that was not granted the key runs without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
from django.db import transaction

from django_distlock import (
    BackendUnavailable,
    Lease,
    Lock,
    LockNotAcquired,
    LockUsageError,
    Retry,
    current_lease,
    distlock,
    signals,
)
from tests.backends import Registered
from tests.shop.models import Row

from .helpers import prompt
from .locking import Heard, grantable, held_elsewhere, lock_of, taken
from .test_lock_trouble import AWAY, store_away
from .turn_workers import LAZY


def runs(registered: Registered, key: str, **more: Any) -> Lock:
    """Describe a lock that is not insisted on."""
    return lock_of(registered, key, **{"wait": 0, "on_conflict": "run", **more})


def test_block_runs_without_the_lock(registered: Registered, key: str) -> None:
    """And the holder keeps what it has: the lease of the block says that it is none."""
    called: list[Lease] = []
    with held_elsewhere(lock_of(registered, key)) as holder:
        with prompt(), runs(registered, key) as lease:
            assert isinstance(lease, Lease)
            assert (lease.key, lease.backend) == (key, registered.alias)
            assert (lease.held, lease.is_lost, lease.is_released) == (False, False, False)
            assert (lease.token, lease.fence) == ("", 0)
            assert (lease.remaining(), lease.stop_requested) == (0.0, False)
            assert key in repr(lease)
            assert "not held" in repr(lease)
            lease.on_lost(called.append)
            lease.on_danger(called.append)
        assert (lease.held, lease.is_lost, lease.is_released) == (False, False, False)
        assert holder.held
        assert taken(lock_of(registered, key))
    assert called == []
    assert grantable(lock_of(registered, key))


@pytest.mark.parametrize("on_conflict", ["run", "yield"])
def test_block_asks_as_it_does_elsewhere(
    registered: Registered, key: str, on_conflict: str
) -> None:
    """`if not acquired: return`, as other packages have it, protects what stands behind it.

    With "yield" that is no bypass: what was not granted is told, and nothing else.
    """
    lock = runs(registered, key, on_conflict=on_conflict)
    protected = []

    def work() -> None:
        with lock as acquired:
            assert current_lease() is (acquired or None)
            if not acquired:
                return
            protected.append(acquired.held)

    async def awork() -> None:
        async with lock as acquired:
            if not acquired:
                return
            protected.append(acquired.held)

    with (
        held_elsewhere(lock_of(registered, key)) as holder,
        Heard(signals.lock_bypassed, key) as bypassed,
        Heard(signals.lock_not_acquired, key) as refusals,
    ):
        work()
        asyncio.run(awork())
        assert holder.held
    told = (len(bypassed.facts), len(refusals.facts))
    assert (protected, told) == ([], (2 if on_conflict == "run" else 0, 2))
    with Heard(signals.lock_bypassed, key) as bypassed:
        work()
        asyncio.run(awork())
    assert (protected, bypassed.facts) == ([True, True], [])
    assert grantable(lock_of(registered, key))


def test_yield_decorates_no_function() -> None:
    """A function does not look at its lease: it is refused where it is defined."""
    lock = distlock("job:{pk}", on_conflict="yield")

    def work(pk: int) -> None: ...

    async def awork(pk: int) -> None: ...

    for function in (work, awork):
        with pytest.raises(LockUsageError, match="a function cannot") as caught:
            lock(function)
        assert (caught.value.code, caught.value.key) == ("unsupported", "job:{pk}")


async def refused(lease: Lease, on_conflict: str) -> dict[str, str]:
    """Try what needs a lease; say how it was refused."""
    codes = {}
    for name in ("check", "extend", "aextend", "dump"):
        try:
            answer = getattr(lease, name)()
            if asyncio.iscoroutine(answer):
                await answer
        except LockUsageError as error:
            told = f'on_conflict="{on_conflict}"' in str(error) and "lease.held" in str(error)
            codes[name] = f"{error.code} {error.key} {told}"
    return codes


@pytest.mark.parametrize("on_conflict", ["run", "yield"])
def test_lease_refuses_what_needs_a_lock(
    registered: Registered, key: str, on_conflict: str
) -> None:
    """With the word that let the block run, and what to ask; there is nothing to give back."""
    expected = dict.fromkeys(("check", "extend", "aextend", "dump"), f"unsupported {key} True")
    lock = runs(registered, key, on_conflict=on_conflict)

    async def awaited() -> None:
        async with lock as lease:
            assert await refused(lease, on_conflict) == expected
            assert await lease.arelease() is False

    with held_elsewhere(lock_of(registered, key)):
        with lock as lease:
            assert asyncio.run(refused(lease, on_conflict)) == expected
            assert lease.release() is False
            for name in ("acquired_at", "expires_at"):
                with pytest.raises(LockUsageError):
                    getattr(lease, name)
        asyncio.run(awaited())
        assert taken(lock_of(registered, key))


def test_bypass_is_told_once(registered: Registered, key: str) -> None:
    """With how long it was waited for, and for whom."""
    lock = runs(registered, key, wait=0.3, retry=LAZY)
    with (
        held_elsewhere(lock_of(registered, key)) as holder,
        Heard(signals.lock_bypassed, key) as heard,
    ):
        with lock:
            assert len(heard.facts) == 1
        said = heard.once
        assert said["alias"] == registered.alias
        assert said["holder"] == holder.holder
        assert said["fence"] is None
        assert 0.29 < said["waited"] < 2
        assert said["sender"].__name__ in type(holder._holding.store).__name__


def test_block_is_no_lease_of_the_context(registered: Registered, key: str) -> None:
    """`current_lease()` is what is held; its end changes nothing, also in a transaction."""
    lock = runs(registered, key)
    with held_elsewhere(lock_of(registered, key)) as holder:
        with lock:
            assert current_lease() is None
            assert current_lease(key) is None
            # Nor is it a re-entry.
            with lock as again:
                assert again.held is False
        with lock_of(registered, f"{key}:outer") as outer, lock:
            assert current_lease() is outer
            assert current_lease(key) is None
        assert current_lease() is None
        with pytest.raises(ZeroDivisionError), lock:
            raise ZeroDivisionError
        with transaction.atomic(), lock:
            pass
        assert holder.held
        assert taken(lock_of(registered, key))


def test_decorated_function_runs_without_the_lock(registered: Registered, key: str) -> None:
    """The same for calls and awaits."""
    lock = runs(registered, key)

    @lock
    def work() -> Lease | None:
        return current_lease()

    @lock
    async def awork() -> Lease | None:
        return current_lease()

    with held_elsewhere(lock_of(registered, key)):
        assert work() is None
        assert asyncio.run(awork()) is None
    held = work()
    assert held is not None
    assert grantable(lock_of(registered, key))


@pytest.mark.parametrize("on_conflict", ["run", "yield"])
def test_acquire_still_raises(registered: Registered, key: str, on_conflict: str) -> None:
    """Without a block there is nothing to run: `acquire()` raises, `try_acquire()` says None."""
    lock = runs(registered, key, on_conflict=on_conflict)
    with held_elsewhere(lock_of(registered, key)):
        with pytest.raises(LockNotAcquired):
            lock.acquire()
        with pytest.raises(LockNotAcquired):
            asyncio.run(lock.aacquire())
        assert lock.try_acquire() is None
        assert asyncio.run(lock.atry_acquire()) is None


async def test_receiver_of_an_awaited_bypass_may_use_the_orm(
    registered: Registered, key: str
) -> None:
    """It does not run in the thread of the event loop, which must not wait for a database."""
    made: list[str] = []

    def receive(**facts: Any) -> None:
        if facts["key"] == key:
            Row.objects.create(name=key)
            made.append(key)

    signals.lock_bypassed.connect(receive)
    try:
        with held_elsewhere(lock_of(registered, key)), Heard(signals.lock_bypassed, key) as heard:
            async with runs(registered, key) as lease:
                assert lease.held is False
            assert heard.once["waited"] < 2
    finally:
        signals.lock_bypassed.disconnect(receive)
    assert made == [key]


@AWAY
@pytest.mark.parametrize("on_conflict", ["run", "yield"])
def test_store_that_is_away_is_no_conflict(
    registered: Registered, key: str, tmp_path: Path, on_conflict: Literal["run", "yield"]
) -> None:
    """Nobody knows whether somebody else works: the block does not run."""
    with store_away(registered, tmp_path) as (alias, _), Heard(signals.lock_bypassed, key) as heard:
        lock = distlock(
            key, backend=alias, wait=0.2, on_conflict=on_conflict, retry=Retry(delay=0.02, cap=0.02)
        )
        with pytest.raises(BackendUnavailable), lock:
            pytest.fail("ran")

        async def work() -> None:
            async with lock:
                pytest.fail("ran")

        with pytest.raises(BackendUnavailable):
            asyncio.run(work())
    assert heard.facts == []


@pytest.mark.parametrize("on_conflict", ["run", "yield"])
def test_misuse_is_no_conflict(registered: Registered, key: str, on_conflict: str) -> None:
    """Re-entry is refused, and does not run."""
    with (
        lock_of(registered, key),
        pytest.raises(LockUsageError, match=key),
        runs(registered, key, on_conflict=on_conflict),
    ):
        pytest.fail("entered twice")
