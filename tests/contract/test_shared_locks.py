"""`shared=True` and `permits=N`: several leases of one key, in blocks, tasks and transactions."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    Lease,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock,
    distlock_all,
)
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Record
from django_distlock.fencing import Fence
from django_distlock.fencing.rejecting import require_fence
from django_distlock.handler import lock_backends
from django_distlock.locks import changing
from django_distlock.locks.acquire import insist
from django_distlock.process.heartbeat import held_here
from tests.backends import Registered

from .conftest import Hold
from .helpers import Later, held, noted, prompt
from .locking import eventually, grantable, held_elsewhere, lock_of, take_away, taken
from .stores import Stranger

SHARES = pytest.mark.requires("supports_sharing")


@SHARES
def test_readers_together_or_a_writer_alone(registered: Registered, key: str, hold: Hold) -> None:
    """However the block is written."""
    reader, writer = lock_of(registered, key, shared=True, wait=0), lock_of(registered, key, wait=0)

    def read(lease: Lease) -> None:
        assert lease.shared
        assert current_lease(key) is lease
        with held_elsewhere(reader) as other:
            assert (other.fence, other.token) != (lease.fence, lease.token)
        assert not grantable(writer)
        lease.check()

    hold(reader, read)
    assert not taken(reader)

    def write(lease: Lease) -> None:
        assert not lease.shared
        assert not grantable(reader)

    hold(writer, write)


@SHARES
def test_permits_are_held_by_so_many(registered: Registered, key: str, hold: Hold) -> None:
    """And no more, whoever asks; each is given back once."""
    lock = lock_of(registered, key, permits=3, wait=0)

    def work(lease: Lease) -> None:
        with held_elsewhere(lock) as one, held_elsewhere(lock):
            with pytest.raises(LockNotAcquired) as caught:
                Later(lock.acquire).result()
            assert caught.value.holder is not None
            assert Later(one.release).result() is True
            assert Later(one.release).result() is False
            with held_elsewhere(lock):
                assert not grantable(lock)
        assert lease.held

    hold(lock, work)
    assert not taken(lock)


@SHARES
def test_permits_of_the_arguments(registered: Registered, key: str) -> None:
    """A function of the call's arguments says how many, in sync and async; blocks have none."""

    def so_many(plan: str, more: int = 0) -> int:
        return {"small": 1, "large": 2}[plan] + more

    lock = lock_of(registered, key, permits=so_many, wait=0)

    def work(plan: str, more: int = 0) -> bool:
        lease = current_lease(key)
        return lease is not None and lease.shared

    async def awaited(plan: str, more: int = 0) -> bool:
        return work(plan, more)

    with held_elsewhere(lock_of(registered, key, permits=5)):
        assert lock(work)("large")
        assert asyncio.run(lock(awaited)("small", more=1))
        for refused in (
            lock(work),
            distlock_all(key, permits=so_many, wait=0, backend=registered.alias)(work),
        ):
            with pytest.raises(LockNotAcquired):
                refused("small")
    with pytest.raises(InvalidArgument, match="permits must be an int from 1"):
        lock(work)("small", -1)
    with pytest.raises(LockUsageError, match="goes with decorators"):
        lock.acquire()


@SHARES
def test_waiting_for_a_permit(registered: Registered, key: str) -> None:
    """The end of any of them wakes whoever waits, and so does that of one who is alone."""
    lock = lock_of(registered, key, permits=2, wait=20)
    one, two = Later(lock.acquire).result(), Later(lock.acquire).result()
    third = Later(lock.acquire)
    with pytest.raises(TimeoutError):
        third.result(0.3)
    assert Later(two.release).result() is True
    with prompt():
        lease = third.result()
    for each in (one, lease):
        assert Later(each.release).result() is True
    alone = Later(lock_of(registered, key).acquire).result()
    waiting = [Later(lock.acquire), Later(lock.acquire)]
    with pytest.raises(TimeoutError):
        waiting[0].result(0.3)
    assert Later(alone.release).result() is True
    for each in [each.result() for each in waiting]:
        assert Later(each.release).result() is True


@SHARES
def test_writer_is_not_starved(registered: Registered, key: str) -> None:
    """Readers that come behind a waiting writer wait for it."""
    reader, writer = lock_of(registered, key, shared=True, wait=20), lock_of(registered, key)
    first = Later(reader.acquire).result()
    writing = Later(writer.acquire)
    assert eventually(lambda: not grantable(lock_of(registered, key, shared=True, wait=0)))
    second = Later(reader.acquire)
    with pytest.raises(TimeoutError):
        second.result(0.3)
    assert Later(first.release).result() is True
    alone = writing.result()
    with pytest.raises(TimeoutError):
        second.result(0.3)
    assert Later(alone.release).result() is True
    assert second.result().fence > alone.fence > first.fence
    assert Later(second.result().release).result() is True


@SHARES
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["refused", "cancelled"])
def test_writer_that_gives_up_lets_readers_join(
    registered: Registered, key: str, is_cancelled: bool
) -> None:
    """At once, and not when the store would let them without it."""
    reader = lock_of(registered, key, shared=True, wait=0)
    first = Later(reader.acquire).result()

    async def give_up() -> None:
        writing = asyncio.create_task(lock_of(registered, key, wait=30).aacquire())
        while await asyncio.to_thread(grantable, reader):
            pass
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    if is_cancelled:
        asyncio.run(give_up())
    else:
        with pytest.raises(LockNotAcquired):
            lock_of(registered, key, wait=0.5).acquire()
    assert grantable(reader)
    assert Later(first.release).result() is True


@SHARES
def test_reader_is_told_that_a_writer_comes_first(registered: Registered, key: str) -> None:
    """Nobody holds the key, and so nobody is named."""
    backend, reader = lock_backends[registered.alias], lock_of(registered, key, shared=True, wait=0)
    first = Later(reader.acquire).result()
    with pytest.raises(LockNotAcquired, match="has held it for"):
        lock_of(registered, key, wait=0).acquire()
    assert Later(take_and_mark, backend, key).result()
    assert Later(first.release).result() is True
    with pytest.raises(LockNotAcquired, match="somebody waits to hold it alone") as caught:
        reader.acquire()
    assert caught.value.holder is None
    writer = lock_of(registered, key, wait=0).acquire()
    assert writer.release() is True


def take_and_mark(backend: BaseLockBackend, key: str) -> bool:
    """Ask as a writer that waits; return whether it was refused."""
    answer = backend.acquire(key, new_token(), 5, wanted=True)
    return isinstance(answer, Contended)


@pytest.mark.requires("supports_sharing", "supports_ttl")
def test_shared_lease_is_renewed(registered: Registered, key: str) -> None:
    """Each by itself, for as long as its block runs."""
    lock = lock_of(registered, key, shared=True, ttl=3)
    with lock as lease, held_elsewhere(lock_of(registered, key, shared=True, ttl=30)):
        first = lease.expires_at
        assert eventually(lambda: lease.expires_at != first)
        lease.check()
        lease.extend(7)
        assert 6 < lease.remaining() <= 7
        assert lease.shared


@pytest.mark.requires("supports_sharing", "supports_operators")
def test_shared_lease_is_lost(registered: Registered, key: str) -> None:
    """An operator takes the key from all who share it."""
    lock = lock_of(registered, key, shared=True)
    with ExitStack() as stack:
        lease = stack.enter_context(lock)
        other = stack.enter_context(held_elsewhere(lock))
        take_away(lease)
        for each in (lease, other):
            with pytest.raises(LockLost):
                each.extend()
        stack.pop_all()


@SHARES
def test_lease_is_downgraded(registered: Registered, key: str) -> None:
    """Readers who waited join at once; no writer comes in between."""
    reader = lock_of(registered, key, shared=True, wait=20)
    with lock_of(registered, key) as lease:
        waiting = Later(reader.acquire)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        fence = lease.fence
        lease.downgrade()
        assert lease.shared
        assert lease.fence > fence
        joined = waiting.result()
        assert joined.fence > lease.fence
        lease.downgrade()
        lease.extend()
        lease.check()
        assert not grantable(lock_of(registered, key, wait=0))
        assert Later(joined.release).result() is True
        assert not grantable(lock_of(registered, key, wait=0))
    assert not taken(reader)


@pytest.mark.requires("supports_sharing", "supports_operators")
@pytest.mark.parametrize("within", [None, 30])
def test_request_to_stop_outlasts_a_downgrade(
    registered: Registered, key: str, within: float | None
) -> None:
    """The holder stays the same, and was asked."""
    store = lock_backends[registered.alias]
    lease = lock_of(registered, key, ttl=300).acquire()
    asked = store.request_stop(key, within)
    assert isinstance(asked, Record)
    lease.extend()
    lease.downgrade()
    assert lease.stop_requested
    lease.extend()
    assert lease.stop_requested
    record = held(store, key)
    assert record.stop_requested_at == asked.stop_requested_at
    assert record.renewed_until == asked.renewed_until
    assert within is None or record.expires_at == asked.renewed_until
    assert lease.release() is True


@SHARES
@pytest.mark.parametrize("breaks_off", ["a signal", "a return", "no answer"])
def test_downgrade_that_breaks_off_ends_the_lease(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch, breaks_off: str
) -> None:
    """The store may have shared the key, and frees it then: nobody works on under the lease."""
    lock = lock_of(registered, key, ttl=300, wait=10)
    lease, store = lock.acquire(heartbeat=True), lock_backends[registered.alias]
    acquire = store.acquire

    def interrupted_return(*args: Any) -> None:
        insist(*args)
        raise KeyboardInterrupt

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def unheard(*args: Any, **how: Any) -> None:
        acquire(*args, **how)
        raise BackendUnavailable("The answer is lost.", code="network_timeout")

    with monkeypatch.context() as patch:
        if breaks_off == "a signal":
            patch.setattr(held_here, "rename", interrupted)
        elif breaks_off == "a return":
            patch.setattr(changing, "insist", interrupted_return)
        else:
            patch.setattr(store, "acquire", unheard)
        with pytest.raises((KeyboardInterrupt, BackendUnavailable)):
            lease.downgrade()
    other = Later(lock.acquire).result()
    assert not lease.held
    with pytest.raises(LockUsageError, match="release or downgrade"):
        lease.check()
    assert Later(other.release).result() is True
    lease.release()
    assert eventually(lambda: not taken(lock), 10)


@SHARES
async def test_awaited_downgrade(registered: Registered, key: str) -> None:
    """The event loop goes on meanwhile."""
    async with lock_of(registered, key) as lease:
        await lease.adowngrade()
        assert lease.shared
        async with lock_of(registered, key, shared=True, reentrant=True, wait=0) as inner:
            assert inner is lease


@pytest.mark.requires("supports_sharing", "supports_operators")
def test_lost_lease_is_not_downgraded(registered: Registered, key: str) -> None:
    """Whoever had the key in between may have written."""
    lease = lock_of(registered, key).acquire()
    take_away(lease)
    with pytest.raises(LockLost):
        lease.downgrade()
    assert lease.is_lost
    assert not taken(lock_of(registered, key))


@pytest.mark.requires("supports_sharing", "supports_operators")
def test_downgrade_of_a_paused_key(registered: Registered, key: str) -> None:
    """It is refused, and the lease stands."""
    store = lock_backends[registered.alias]
    with lock_of(registered, key) as lease:
        store.pause(key, store.clock() + timedelta(days=1))
        with pytest.raises(LockNotAcquired, match="paused"):
            lease.downgrade()
        lease.extend()
        assert not lease.shared
        store.pause(key, None)


@SHARES
@pytest.mark.stores("sqlite", "postgresql", "mysql", why="no transaction can be in the way")
@pytest.mark.parametrize("way", ["queue", "guard"])
def test_downgrade_waits_for_a_transaction(
    registered: Registered, key: str, stranger: Stranger, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is in the way for a moment says nothing about the lease."""
    with lock_of(registered, key) as lease:
        answers = noted(monkeypatch, lock_backends[registered.alias], "acquire")
        getattr(stranger, way)(key)
        sharing = Later(lease.downgrade)
        assert eventually(lambda: len(answers) > 0)
        stranger.rollback()
        sharing.result()
        assert answers[0].busy
        assert lease.shared
        lease.extend()


@pytest.mark.requires("supports_sharing", "supports_ttl")
def test_downgrade_does_not_move_the_window(registered: Registered, key: str) -> None:
    """It counts from the first grant, and the downgrade is another one."""
    store = lock_backends[registered.alias]
    lease = lock_of(registered, key, ttl=20, hold=True).acquire()
    began = lease.acquired_at
    assert eventually(lambda: store.clock() - began > timedelta(seconds=0.02))
    lease.downgrade()
    lease.release()
    ends_at = held(store, key).expires_at
    assert ends_at is not None
    assert abs(ends_at - began - timedelta(seconds=20)) < timedelta(seconds=0.001)


@SHARES
def test_downgrade_inside_a_transaction(registered: Registered, key: str) -> None:
    """Readers would read what is not committed: it is refused, and the lease stands."""
    refused = pytest.raises(LockUsageError, match="before the data is committed")
    with lock_of(registered, key, ttl=20) as lease:
        with transaction.atomic():
            with refused:
                lease.downgrade()
            with refused:
                async_to_sync(lease.adowngrade)()
            assert not grantable(lock_of(registered, key, shared=True, wait=0))
        lease.extend()
        lease.downgrade()
        with transaction.atomic():
            # It is shared already.
            lease.downgrade()
        assert lease.shared


@SHARES
def test_entering_again(registered: Registered, key: str) -> None:
    """A reader inside a writer, or a reader, works under that lease; a writer inside is refused.

    Two readers who wait to be alone would wait for each other.
    """
    writer = lock_of(registered, key, reentrant=True)
    for outer in (lock_of(registered, key), lock_of(registered, key, permits=2)):
        with outer as lease:
            with lock_of(registered, key, shared=True, reentrant=True) as inner:
                assert inner is lease
            with pytest.raises(LockUsageError) as caught, lock_of(registered, key, shared=True):
                pass
            assert caught.value.code == "reentrant"
            lease.check()
    refused = pytest.raises(LockUsageError, match=r"cannot be locked exclusively.*downgrade")
    with lock_of(registered, key, shared=True) as lease:
        with prompt(), refused as caught, writer:
            pass
        assert caught.value.code == "reentrant"
        assert lease.held


@SHARES
@pytest.mark.stores("memory", "postgresql", "redis", why="it is the same in each")
def test_transaction_keeps_a_shared_lease(registered: Registered, key: str) -> None:
    """To its commit; the next block goes on with it, and none is alone with the key."""
    reader, writer = lock_of(registered, key, shared=True, wait=0), lock_of(registered, key, wait=0)
    with transaction.atomic():
        with reader as first:
            pass
        assert not grantable(writer)
        assert grantable(reader)
        with reader as second:
            assert second.token == first.token
            assert second.shared
        with prompt(), pytest.raises(LockUsageError, match="cannot be locked exclusively"), writer:
            pass
    assert eventually(lambda: grantable(writer))


@pytest.mark.requires("supports_sharing", "supports_ttl")
@pytest.mark.stores("memory", "postgresql", "redis", why="it is the same in each")
def test_each_block_of_a_rate_takes_a_permit(registered: Registered, key: str) -> None:
    """Also in one transaction, which keeps all of them; and no more than there are."""
    rate = lock_of(registered, key, permits=2, ttl=20, hold=True, wait=0)
    with transaction.atomic():
        fences = set()
        for _ in range(2):
            with rate as lease:
                fences.add(lease.fence)
        assert len(fences) == 2
        with pytest.raises(LockNotAcquired), rate:
            pass
        with pytest.raises(LockUsageError, match="without a limit"):
            lock_of(registered, key, permits=5, wait=None).acquire()
    sharing = lock_backends[registered.alias].records.sharing
    assert eventually(lambda: [each.is_settled for each in sharing(key)] == [True, True])


@pytest.mark.requires("supports_sharing", "supports_ttl")
def test_block_goes_on_with_the_permit_that_has_no_window(registered: Registered, key: str) -> None:
    """Whichever its transaction has kept first."""
    lock = lock_of(registered, key, permits=2, wait=20)
    with transaction.atomic():
        with replace(lock, ttl=20.0, hold=True):
            pass
        with lock as lease:
            pass
        with prompt(), lock as again:
            assert again.token == lease.token


@pytest.mark.requires("supports_sharing", "supports_ttl", "distributed")
def test_shared_lease_is_handed_over(registered: Registered, key: str) -> None:
    """Once, with the place that it has; the others go on."""
    lock = lock_of(registered, key, permits=2, wait=0)
    lease = lock.acquire()
    with held_elsewhere(lock):
        text = lease.dump()
        assert not grantable(lock)
        loaded = Lease.load(text)
        assert loaded.shared
        assert loaded.fence > lease.fence
        with pytest.raises(LockLost):
            Lease.load(text)
        assert not grantable(lock)
        assert loaded.release()
        assert grantable(lock)


@SHARES
@pytest.mark.stores("memory", "postgresql", "redis", why="it is the same in each")
def test_lease_that_a_transaction_kept_is_handed_over(registered: Registered, key: str) -> None:
    """Whoever went on with it asked for a shared one, and got the one that was kept: alone."""
    with transaction.atomic():
        with lock_of(registered, key):
            pass
        lease = lock_of(registered, key, shared=True).acquire()
    assert not lease.shared
    loaded = Lease.load(lease.dump())
    assert not loaded.shared
    assert loaded.release()
    assert not taken(lock_of(registered, key))


@SHARES
def test_shared_lease_fences_nothing(registered: Registered, key: str) -> None:
    """A fence would refuse those who were granted the key before, and hold it still."""
    with lock_of(registered, key, shared=True) as lease:
        with pytest.raises(LockUsageError, match="shares the key"):
            require_fence(lease)
        assert require_fence(Fence(key, lease.fence)) == lease.fence


@pytest.mark.requires("supports_sharing", "supports_ttl")
def test_so_many_in_a_window(registered: Registered, key: str) -> None:
    """`hold` keeps a place for all of its ttl, also when the work ends sooner."""
    lock = lock_of(registered, key, permits=2, hold=True, ttl=1, wait=0)
    for _ in range(2):
        with lock:
            pass
    assert not grantable(lock_of(registered, key, permits=2, wait=0))
    assert eventually(lambda: grantable(lock_of(registered, key, permits=2, wait=0)))


@SHARES
async def test_tasks_share_a_key(registered: Registered, key: str) -> None:
    """As many as have permits, and all of them in the end."""
    inside: list[int] = []

    async def work(number: int) -> int:
        async with lock_of(registered, key, permits=2, wait=30):
            inside.append(number)
            most = len(inside)
            await asyncio.sleep(0.01)
            inside.remove(number)
        return most

    assert max(await asyncio.gather(*map(work, range(6)))) <= 2


@pytest.mark.parametrize(
    "how",
    [
        {"permits": 0},
        {"permits": 10_001},
        {"permits": True},
        {"permits": None},
        {"permits": 2.0},
        {"shared": 1},
        {"shared": True, "permits": 2},
        {"shared": True, "steal_if_dead": True},
        {"permits": 2, "steal_if_dead": True},
    ],
)
@pytest.mark.aliases("memory")
def test_wrong_arguments(registered: Registered, key: str, how: dict[str, Any]) -> None:
    """Nothing was touched."""
    with pytest.raises(InvalidArgument):
        distlock(key, backend=registered.alias, **how)


def test_backend_that_cannot_share(registered: Registered, key: str) -> None:
    """It says so, and a single permit is a lock like any other."""
    lock = lock_of(registered, key, shared=True)
    with lock_of(registered, key, permits=1) as lease:
        assert not lease.shared
    if lock_backends[registered.alias].supports_sharing:
        return
    with pytest.raises(LockUsageError, match="several holders share a key") as caught, lock:
        pass
    assert caught.value.code == "unsupported"
