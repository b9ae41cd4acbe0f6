"""Promises of a lease that begin where the other tests end: slow answers, and transactions."""

from __future__ import annotations

import asyncio
import queue
import shutil
import subprocess
import time
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_distlock import BackendUnavailable, Lease, LockLost, LockNotAcquired, distlock, signals
from django_distlock.core.clock import monotonic
from django_distlock.core.records import UNKNOWN
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.conftest import DECLARED
from tests.processes import spawn_by

from .helpers import HAS_TTL, NOISE, PATIENCE, Later, held
from .locking import Heard, eventually, grantable, lock_of, rolled_back, take_away, taken

HERE = f"{__name__}:"
#: How long a slow store takes to answer here.
SLOW = 1.5


def answer_slowly(monkeypatch: pytest.MonkeyPatch, registered: Registered, operation: str) -> None:
    """Let the store carry an operation out at once, and its answer be on its way for long."""
    backend = lock_backends[registered.alias]
    real = getattr(backend, operation)

    def slow(*args: Any, **kwargs: Any) -> Any:
        answer = real(*args, **kwargs)
        time.sleep(SLOW)
        return answer

    monkeypatch.setattr(backend, operation, slow)


# The deadline counts from before the request, also of later requests


@HAS_TTL
def test_deadline_of_a_renewal_counts_from_before_it(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the heartbeat: the holder stops before the store gives the key away."""
    with lock_of(registered, key, ttl=6) as lease:
        began = lease.deadline - 6
        sent: list[float] = []
        backend = lock_backends[registered.alias]
        real = backend.extend_many

        def slow(grants: Any) -> Any:
            sent.append(monotonic())
            answers = real(grants)
            time.sleep(SLOW)
            return answers

        monkeypatch.setattr(backend, "extend_many", slow)
        assert eventually(lambda: lease.deadline > began + 6, timeout=10)
        monkeypatch.undo()
        assert lease.deadline <= sent[-1] + 6


@HAS_TTL
def test_deadline_of_a_loaded_lease_counts_from_before_it(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease that was taken up ends no later for its new holder than in the store."""
    text = lock_of(registered, key, ttl=20).acquire().dump()
    answer_slowly(monkeypatch, registered, "acquire")
    loaded = Lease.load(text)
    assert loaded.deadline <= monotonic() - SLOW + 20
    monkeypatch.undo()
    assert loaded.release()


@HAS_TTL
def test_deadline_of_an_adopted_lease_counts_from_before_it(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a later block in the same transaction, which goes on with the lease."""
    lock = lock_of(registered, key, ttl=20, heartbeat=False)
    with transaction.atomic(using=beside(registered)):
        with lock as first:
            pass
        answer_slowly(monkeypatch, registered, "extend")
        before = monotonic()
        with lock as second:
            assert second.token == first.token
            assert before + 20 <= second.deadline <= monotonic() - SLOW + 20
            monkeypatch.undo()
    assert eventually(lambda: grantable(lock))


def look_at_clocks() -> float:
    """Give how far the holder's clock is ahead of the one that stands while a machine sleeps."""
    return monotonic() - time.monotonic()


def test_clock_of_the_holder_counts_while_the_machine_sleeps() -> None:
    """Where the system has such a clock, a laptop that was shut wakes up with its leases lost."""
    # As on a machine that has slept: only the clock that counts that time is ahead.
    sleeper = ["unshare", "--kill-child", "--fork", "--time", "--boottime", "1000"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*sleeper, "true"], check=False).returncode
    ):
        pytest.skip(f"{DECLARED}no namespaces for this user here")
    with spawn_by(sleeper, f"{HERE}look_at_clocks") as process:
        ahead = process.result(PATIENCE)
    assert ahead - look_at_clocks() == pytest.approx(1000, abs=NOISE)


# Transactions


def beside(registered: Registered) -> str:
    """Give the alias of a transaction in which a lock may be taken."""
    return "default" if registered.store == "sqlite" else registered.using or "default"


@HAS_TTL
def test_lease_that_a_rolled_back_transaction_took_up_stands(
    registered: Registered, key: str
) -> None:
    """`load` does not run in the caller's transaction: what that undoes is not the lease."""
    lock = lock_of(registered, key, ttl=20)
    text = lock.acquire().dump()
    with rolled_back(beside(registered)):
        lease = Lease.load(text)
        assert Later(held, lock_backends[registered.alias], key).result().fence == lease.fence
    assert Later(held, lock_backends[registered.alias], key).result().fence == lease.fence
    lease.extend()
    assert lease.release() is True
    assert grantable(lock)


@pytest.mark.parametrize("answer", [BackendUnavailable("away"), UNKNOWN], ids=["away", "busy"])
def test_lease_that_nobody_could_go_on_with_is_freed_at_the_end(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """A later block that fails to adopt it leaves it to the commit, as if it had not tried."""
    lock = lock_of(registered, key, ttl=60, wait=0)

    def extend(*_: object, **__: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with transaction.atomic(using=beside(registered)):
        with lock:
            pass
        monkeypatch.setattr(lock_backends[registered.alias], "extend", extend)
        with pytest.raises((BackendUnavailable, LockNotAcquired)):
            lock.acquire()
        monkeypatch.undo()
        assert taken(lock)
    assert eventually(lambda: grantable(lock), timeout=5)


def test_cancelled_acquire_that_goes_on_with_a_lease_holds_nothing(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while it adopts the lease of its transaction, it lets the commit free the key."""
    lock = lock_of(registered, key, ttl=60, wait=5)

    async def block() -> None:
        async with lock:
            pass

    async def cancelled() -> None:
        acquiring = asyncio.create_task(lock.aacquire())
        await asyncio.sleep(SLOW / 3)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring

    with transaction.atomic(using=beside(registered)):
        async_to_sync(block)()
        answer_slowly(monkeypatch, registered, "extend")
        async_to_sync(cancelled)()
        monkeypatch.undo()
        assert taken(lock)
    assert eventually(lambda: grantable(lock), timeout=5)


@HAS_TTL
def test_loss_between_the_release_and_the_commit_is_told(registered: Registered, key: str) -> None:
    """The data is not committed yet: that somebody else may have the key by then is said."""
    with Heard(signals.lock_lost, key) as lost:
        with transaction.atomic(using=beside(registered)):
            # Nothing renews it, and nobody has asked to be told.
            lease = lock_of(registered, key, ttl=1, basic=True).acquire()
            assert lease.release() is True
            assert lost.facts == []
            assert eventually(lambda: bool(lost.facts), timeout=4)
            other = Later(lock_of(registered, key, ttl=60, wait=5).acquire).result()
        assert taken(lock_of(registered, key))
        assert Later(other.release).result() is True
        assert lost.once["fence"] == lease.fence


@HAS_TTL
def test_callbacks_may_work_with_the_lease(registered: Registered, key: str) -> None:
    """Who is warned extends it, and so keeps it; who is told of its loss takes the lock anew."""
    lock = lock_of(registered, key, ttl=3, wait=10)
    lease, again = lock.acquire(), queue.SimpleQueue[Lease]()

    def retake(lost: Lease) -> None:
        lost.release()
        again.put(lock.acquire())

    lease.on_danger(lambda endangered: endangered.extend(), before=1.5)
    lease.on_lost(retake)
    time.sleep(5)
    lease.check()
    take_away(lease)
    with pytest.raises(LockLost):
        lease.extend()
    successor = again.get(timeout=10)
    assert successor.fence > lease.fence
    assert Later(successor.release).result() is True


async def test_block_of_a_closed_loop_ends_by_its_ttl(key: str) -> None:
    """Nobody will leave it any more: it is not renewed for as long as the process lives."""
    lock = distlock(key, backend="memory", ttl=1.5)

    def run() -> None:
        async def enter() -> None:
            await lock.__aenter__()

        asyncio.run(enter())

    await asyncio.to_thread(run)
    assert await asyncio.to_thread(taken, lock)
    assert await asyncio.to_thread(eventually, lambda: grantable(lock), 8)
