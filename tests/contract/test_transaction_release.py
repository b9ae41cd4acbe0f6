"""Leaving a block inside `atomic()` keeps the key until the data is committed, or is not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_distlock import (
    Lease,
    Lock,
    LockNotAcquired,
    LockUsageError,
    Retry,
    current_lease,
    signals,
)
from tests.backends import Registered
from tests.shop.models import Row

from .helpers import Later, prompt
from .locking import (
    Heard,
    RollbackError,
    eventually,
    grantable,
    held_elsewhere,
    lock_of,
    rolled_back,
    taken,
)


def by_block(lock: Lock) -> Lease:
    """Enter and leave a block."""
    with lock as lease:
        pass
    return lease


def by_hand(lock: Lock) -> Lease:
    """Acquire and release."""
    lease = lock.acquire()
    assert lease.release() is True
    return lease


def by_decorator(lock: Lock) -> Lease:
    """Call a decorated function."""
    lease = lock(current_lease)()
    assert lease is not None
    return lease


@pytest.fixture(params=[by_block, by_hand, by_decorator], ids=lambda way: way.__name__)
def use(request: pytest.FixtureRequest) -> Callable[[Lock], Lease]:
    """Give every way to use a lock."""
    made: Callable[[Lock], Lease] = request.param
    return made


def test_key_is_free_once_the_data_is_committed(
    lock: Lock, key: str, use: Callable[[Lock], Lease]
) -> None:
    """Between the end of the block and the commit, nobody can have the key."""
    with transaction.atomic():
        Row.objects.create(name=key)
        lease = use(lock)
        assert not lease.held
        assert lease.is_released
        assert taken(lock)
        assert not grantable(lock)
    assert grantable(lock)


def test_key_is_free_once_the_data_is_rolled_back(lock: Lock, use: Callable[[Lock], Lease]) -> None:
    """A rollback ends the wait as a commit does."""
    with rolled_back():
        use(lock)
        assert taken(lock)
    assert eventually(lambda: grantable(lock))


def test_next_holder_sees_what_was_committed(registered: Registered, key: str) -> None:
    """Whoever gets the key next reads what was written under it."""
    row = Row.objects.create(name=key)
    lock = lock_of(registered, key, wait=10, retry=Retry(delay=0.01, factor=1, cap=0.01))

    def read() -> int:
        with lock:
            return Row.objects.get(pk=row.pk).value

    with transaction.atomic():
        with lock:
            Row.objects.filter(pk=row.pk).update(value=42)
        reader = Later(read)
        assert not eventually(lambda: not reader._thread.is_alive(), timeout=0.2)
    assert reader.result() == 42


def test_key_waits_for_the_outermost_of_nested_transactions(lock: Lock) -> None:
    """The end of an inner `atomic()` commits nothing."""
    with transaction.atomic():
        with transaction.atomic():
            with lock:
                pass
            assert taken(lock)
        assert taken(lock)
    assert grantable(lock)


def test_savepoint_that_is_rolled_back_frees_nothing_early(lock: Lock) -> None:
    """The writes before the savepoint are still open."""
    with transaction.atomic():
        with rolled_back(), lock:
            pass
        gc.collect()
        # Time for whoever frees in the background.
        assert not eventually(lambda: not taken(lock), timeout=0.2)
    assert grantable(lock)


def test_lock_taken_before_the_savepoint_waits_as_well(lock: Lock) -> None:
    """What counts is which transactions are open when the block is left."""
    with transaction.atomic():
        with lock, rolled_back():
            pass
        assert taken(lock)
    assert grantable(lock)


def test_lock_around_the_transaction_is_free_at_its_end(lock: Lock, key: str) -> None:
    """The right order needs no waiting: the block's end frees the key."""
    with lock:
        with transaction.atomic():
            Row.objects.create(name=key)
        assert taken(lock)
    assert grantable(lock)


def test_key_waits_for_the_last_of_several_databases(registered: Registered, key: str) -> None:
    """With transactions on two databases, the one that ends last frees the key."""
    # SQLite has one writer: there the second database of the caller is another.
    other = "serializable" if registered.store == "sqlite" else "sqlite"
    lock = lock_of(registered, key)
    lease = lock.acquire()
    with transaction.atomic():
        with transaction.atomic(using=other):
            assert lease.release() is True
            assert taken(lock)
        assert taken(lock)
    assert grantable(lock)
    lease = lock.acquire()
    with rolled_back(using=other):
        with transaction.atomic():
            assert lease.release() is True
        assert not eventually(lambda: not taken(lock), timeout=0.1)
    assert eventually(lambda: grantable(lock))


def test_transaction_on_any_database_counts(registered: Registered, key: str) -> None:
    """The data need not be where the locks are."""
    other = "default" if registered.store in ("sqlite", "memory") else "sqlite"
    lock = lock_of(registered, key)
    with transaction.atomic(using=other):
        with lock:
            Row.objects.using(other).create(name=key)
        assert taken(lock)
    assert grantable(lock)


def test_error_that_is_swallowed_does_not_free_early(lock: Lock, key: str) -> None:
    """Between lock and `atomic()` an error may be caught: the transaction commits all the same."""
    with transaction.atomic():
        with contextlib.suppress(ZeroDivisionError), lock:
            Row.objects.create(name=key)
            raise ZeroDivisionError
        assert taken(lock)
    assert grantable(lock)
    assert Row.objects.filter(name=key).exists()


def test_failing_hook_of_somebody_else_does_not_lose_the_release(
    registered: Registered, key: str
) -> None:
    """An `on_commit` hook that raises stops those behind it; the key is freed all the same."""

    def fail() -> None:
        raise ZeroDivisionError

    lock = lock_of(registered, key)
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        transaction.on_commit(fail)
        with lock:
            pass
    assert eventually(lambda: grantable(lock))


def test_failing_hook_behind_ours_changes_nothing(registered: Registered, key: str) -> None:
    """The same the other way round."""

    def fail() -> None:
        raise ZeroDivisionError

    lock = lock_of(registered, key)
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        with lock:
            pass
        transaction.on_commit(fail)
    assert grantable(lock)


def test_hooks_of_the_commit_may_take_the_key(registered: Registered, key: str) -> None:
    """`on_commit` is where work goes on: it can lock what the transaction had locked."""
    lock, fences = lock_of(registered, key, wait=0), []

    def follow() -> None:
        with lock as lease:
            fences.append(lease.fence)

    with transaction.atomic():
        with lock as first:
            pass
        transaction.on_commit(follow)
    assert registered.are_next(fences, first.fence)
    assert len(fences) == 1
    assert grantable(lock)


def test_rollback_that_was_asked_for_frees_the_key(lock: Lock) -> None:
    """`set_rollback(True)` ends a transaction without an error."""
    with transaction.atomic():
        with lock:
            pass
        transaction.set_rollback(True)
    assert eventually(lambda: grantable(lock))


def test_connection_that_is_closed_in_a_transaction_frees_the_key(lock: Lock, key: str) -> None:
    """A lost connection is a rollback."""
    with contextlib.suppress(Exception), transaction.atomic():
        Row.objects.filter(name=key).exists()
        with lock:
            pass
        connections["default"].close()
    assert eventually(lambda: grantable(lock))


def test_thread_that_rolled_back_gets_the_key_at_once(registered: Registered, key: str) -> None:
    """The next attempt of the same thread does not meet its own waiting release."""
    lock = lock_of(registered, key, wait=0)
    for _ in range(5):
        with rolled_back(), lock:
            pass
        with prompt():
            lease = lock.acquire()
        assert lease.release()


def test_second_block_in_the_transaction_goes_on_with_the_lease(
    registered: Registered, key: str
) -> None:
    """The key is this transaction's until its end: another block has the same token and fence."""
    with transaction.atomic():
        with lock_of(registered, key, ttl=20) as first:
            pass
        with lock_of(registered, key, ttl=60, wait=0) as second:
            assert second.held
            assert current_lease(key) is second
            assert (second.token, second.fence) == (first.token, first.fence)
            assert 59 < second.remaining() <= 60
            assert not first.held
            assert first.release() is False
            assert taken(lock_of(registered, key))
        assert taken(lock_of(registered, key))
    assert grantable(lock_of(registered, key))


def test_loop_that_locks_one_key_again_and_again(registered: Registered, key: str) -> None:
    """A loop over rows of one account locks the account for each of them."""
    lock, seen = lock_of(registered, key, wait=0), set()
    with transaction.atomic():
        for _ in range(3):
            with lock as lease:
                seen.add((lease.token, lease.fence))
        lease = lock.acquire()
        seen.add((lease.token, lease.fence))
        assert lease.release() is True
    assert len(seen) == 1
    assert grantable(lock)


def test_loop_in_a_transaction_that_rolls_back(registered: Registered, key: str) -> None:
    """The rollback frees what several blocks used, once."""
    lock = lock_of(registered, key, wait=0)
    with rolled_back():
        for _ in range(3):
            with lock:
                pass
    assert eventually(lambda: grantable(lock))
    with lock as lease:
        assert registered.is_next(lease.fence, grants=3)


def test_going_on_does_not_wait_for_the_garbage_collector(registered: Registered, key: str) -> None:
    """A block that adopted the lease keeps it, though the first one's hook is still there."""
    lock = lock_of(registered, key, wait=0)
    lease = None
    with transaction.atomic():
        with lock:
            pass
        lease = lock.acquire()
    gc.collect()
    # Taken inside, and not given back: the commit leaves it alone.
    assert not eventually(lambda: not taken(lock), timeout=0.2)
    assert lease.held
    assert lease.release() is True
    assert grantable(lock)


def test_adopting_block_may_fail_to_be_alone(registered: Registered, key: str) -> None:
    """Inside the second block re-entry is refused like in any other."""
    lock = lock_of(registered, key, wait=0)
    with transaction.atomic():
        with lock:
            pass
        with lock, pytest.raises(LockUsageError), lock:
            pytest.fail("entered twice")
    assert grantable(lock)


def test_waiting_release_of_another_thread_is_not_adopted(registered: Registered, key: str) -> None:
    """Each thread has transactions of its own: another one contends."""
    lock = lock_of(registered, key, wait=0)

    def contend() -> None:
        with transaction.atomic(), lock:
            pytest.fail("entered")

    with transaction.atomic():
        with lock:
            pass
        with pytest.raises(LockNotAcquired):
            Later(contend).result()
    assert grantable(lock)


def test_signal_of_the_release_comes_when_the_key_is_free(lock: Lock, key: str) -> None:
    """`lock_released` is about the store and not about the block."""
    with Heard(signals.lock_released, key) as heard:
        with transaction.atomic():
            with lock:
                pass
            assert heard.facts == []
        assert heard.once["released"] is True


def test_many_keys_are_freed_together(registered: Registered, key: str) -> None:
    """One transaction may have used several locks."""
    locks = [lock_of(registered, f"{key}:{n}") for n in range(4)]
    with transaction.atomic():
        for lock in locks:
            with lock:
                pass
        assert all(taken(lock) for lock in locks)
    assert all(grantable(lock) for lock in locks)


def test_fresh_transaction_starts_with_free_keys(registered: Registered, key: str) -> None:
    """Transactions that follow each other each take the key anew."""
    lock, fences = lock_of(registered, key, wait=0), []
    for _ in range(3):
        with transaction.atomic(), lock as lease:
            fences.append(lease.fence)
    assert registered.are_next(fences)
    assert len(fences) == 3


def test_lock_of_somebody_else_is_contended_in_a_transaction(
    registered: Registered, key: str
) -> None:
    """Waiting inside a transaction ends as it does outside, and the transaction goes on."""
    lock = lock_of(registered, key, wait=0.1)
    with held_elsewhere(lock), transaction.atomic():
        with pytest.raises(LockNotAcquired), lock:
            pytest.fail("entered")
        Row.objects.create(name=key)
    assert Row.objects.filter(name=key).exists()


def increment(lock: Lock, pk: int, times: int) -> None:
    """Read, think, write, with the lock inside of the transaction: the order that loses updates."""
    for _ in range(times):
        with transaction.atomic(), lock:
            row = Row.objects.get(pk=pk)
            row.value += 1
            row.save()


def test_increments_under_a_lock_inside_the_transaction_lose_nothing(
    registered: Registered, key: str
) -> None:
    """4 threads with 25 increments each lose none, though each commits behind its block."""
    # Where the store is slower, fewer will do: without the lock, the first ones collide.
    times = 25 if registered.alias in ("memory", "postgres") else 8
    pk = Row.objects.create(name=key).pk
    lock = lock_of(registered, key, wait=60, retry=Retry(delay=0.002, factor=1.5, cap=0.02))
    for thread in [Later(increment, lock, pk, times) for _ in range(4)]:
        thread.result(timeout=60)
    assert Row.objects.get(pk=pk).value == 4 * times


def test_increments_that_partly_roll_back_lose_nothing(registered: Registered, key: str) -> None:
    """Rollbacks in between neither lose updates nor let two in."""
    pk = Row.objects.create(name=key).pk
    lock = lock_of(registered, key, wait=60, retry=Retry(delay=0.002, factor=1.5, cap=0.02))

    def work() -> None:
        for number in range(10):
            with contextlib.suppress(RollbackError), transaction.atomic():
                with lock:
                    row = Row.objects.get(pk=pk)
                    row.value += 1
                    row.save()
                if number % 2:
                    raise RollbackError

    for thread in [Later(work) for _ in range(4)]:
        thread.result(timeout=60)
    assert Row.objects.get(pk=pk).value == 20


def test_asynchronous_release_is_not_held_up(lock: Lock) -> None:
    """Asynchronous code has no transaction of its own: its block frees the key."""

    async def work() -> None:
        async with lock:
            pass
        assert not await lock.alocked()

    asyncio.run(work())


def test_asynchronous_code_that_a_transaction_calls_waits_for_its_end(
    registered: Registered, key: str
) -> None:
    """`async_to_sync` runs asynchronous code for a thread: its transactions count."""
    lock = lock_of(registered, key, wait=0.2)

    async def work() -> int:
        async with lock as lease:
            return lease.fence

    with transaction.atomic():
        async_to_sync(work)()
        assert taken(lock)
    assert eventually(lambda: grantable(lock))
    with rolled_back():
        async_to_sync(work)()
        assert taken(lock)
    assert eventually(lambda: grantable(lock))


def test_asynchronous_code_goes_on_with_the_lease_of_its_transaction(
    registered: Registered, key: str
) -> None:
    """Called twice by one transaction, it has the same token and fence twice."""
    lock, seen = lock_of(registered, key, wait=0.2), set()

    async def work() -> None:
        async with lock as lease:
            seen.add((lease.token, lease.fence))

    with transaction.atomic():
        for _ in range(3):
            async_to_sync(work)()
        with lock as lease:
            seen.add((lease.token, lease.fence))
    assert len(seen) == 1
    assert eventually(lambda: grantable(lock))
