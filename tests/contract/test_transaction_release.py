"""Leaving a block inside `atomic()` keeps the key until the data is committed, or is not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction

from django_distlock import (
    BackendUnavailable,
    Lease,
    Lock,
    LockUsageError,
    Retry,
    current_lease,
    lock_backends,
    signals,
)
from django_distlock.core import durations
from django_distlock.core.records import UNKNOWN
from django_distlock.process.deferred_release import waiting_release
from tests.backends import Registered
from tests.conftest import DECLARED
from tests.shop.models import Row

from .helpers import Later, prompt
from .locking import (
    Heard,
    RollbackError,
    by_hand,
    eventually,
    grantable,
    in_a_call,
    lock_of,
    rolled_back,
    take_away,
    taken,
)


def by_block(lock: Lock) -> Lease:
    """Enter and leave a block."""
    with lock as lease:
        pass
    return lease


USES = [by_block, by_hand, lambda lock: in_a_call(lock, lambda lease: lease)]


def test_block_that_is_left_in_another_thread(registered: Registered, key: str) -> None:
    """As of a generator that is closed there: its own transactions keep the key until they end."""
    lock = lock_of(registered, key, ttl=30)

    def rows() -> Iterator[Lease]:
        with lock as lease:
            yield lease

    for around in (transaction.atomic, rolled_back):
        with around():
            generator: Any = rows()
            next(generator)
            Later(generator.close).result()
            assert taken(lock)
        assert eventually(lambda: not taken(lock))


def test_release_whose_answer_is_lost_is_no_loss(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request hears that the lease is gone: the first one has released it.

    Behind a commit it comes at once, and otherwise if `release` is called again.
    """
    backend, lost = lock_backends[registered.alias], [1]
    release = backend._release

    def unheard(*args: Any, **how: Any) -> Any:
        answer = release(*args, **how)
        if lost[0]:
            lost[0] -= 1
            raise BackendUnavailable("The answer is lost.", code="network_timeout")
        return answer

    lock = lock_of(registered, key, ttl=30)
    with Heard(signals.lock_lost, key) as losses, Heard(signals.lock_released, key) as releases:
        with transaction.atomic(), lock as lease:
            monkeypatch.setattr(backend, "_release", unheard)
        assert (lease.is_released, lease.is_lost) == (True, False)
        assert releases.once["released"] is True
        lease = lock.acquire()
        lost[0] = 2
        with pytest.raises(BackendUnavailable):
            lease.release()
        assert lease.release(strict=True)
        assert losses.facts == []


@pytest.fixture(params=USES, ids=["by_block", "by_hand", "by_decorator"])
def use(request: pytest.FixtureRequest) -> Callable[[Lock], Lease]:
    """Give every way to use a lock."""
    made: Callable[[Lock], Lease] = request.param
    return made


def test_key_is_free_once_the_data_is_committed(
    lock: Lock, key: str, use: Callable[[Lock], Lease]
) -> None:
    """Or rolled back: between the end of the block and that, nobody can have the key."""
    for end in (transaction.atomic, rolled_back):
        with end():
            Row.objects.create(name=key)
            lease = use(lock)
            assert not lease.held
            assert lease.is_released
            assert taken(lock)
            assert not grantable(lock)
        assert grantable(lock) or (end is rolled_back and eventually(lambda: grantable(lock)))


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


def nested(lock: Lock) -> None:
    """End an inner `atomic()`, which commits nothing."""
    with transaction.atomic(), lock:
        pass


def undone(lock: Lock) -> None:
    """Roll a savepoint back: the writes before it are still open."""
    with rolled_back(), lock:
        pass


def before_the_savepoint(lock: Lock) -> None:
    """Leave the block behind a savepoint: what counts is what is open then."""
    with lock, rolled_back():
        pass


def swallowed(lock: Lock) -> None:
    """Catch an error between lock and `atomic()`: the transaction commits all the same."""
    with contextlib.suppress(ZeroDivisionError), lock:
        raise ZeroDivisionError


def on_two_databases(lock: Lock) -> None:
    """End the transaction on another database first."""
    # SQLite has one writer: there the second database of the caller is another.
    other = "serializable" if lock.backend.startswith("sqlite") else "sqlite"
    with transaction.atomic(using=other), lock:
        pass


def undone_elsewhere(lock: Lock) -> None:
    """Roll the transaction on another database back first."""
    with rolled_back("serializable" if lock.backend.startswith("sqlite") else "sqlite"), lock:
        pass


SHAPES = [nested, undone, before_the_savepoint, swallowed, on_two_databases, undone_elsewhere]


# Of the other database that SQLite leaves.
@pytest.mark.filterwarnings("ignore:The transaction on 'serializable':RuntimeWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_key_waits_for_the_outermost_transaction(lock: Lock, shape: Callable[[Lock], None]) -> None:
    """Whatever ends before it, and however the block is left."""
    with transaction.atomic():
        shape(lock)
        gc.collect()
        # Time for whoever frees in the background.
        assert not eventually(lambda: not taken(lock), timeout=0.2)
    assert grantable(lock)


def test_lock_around_the_transaction_is_free_at_its_end(lock: Lock, key: str) -> None:
    """The right order needs no waiting: the block's end frees the key."""
    with lock:
        with transaction.atomic():
            Row.objects.create(name=key)
        assert taken(lock)
    assert grantable(lock)


def test_transaction_on_any_database_counts(registered: Registered, key: str) -> None:
    """The data need not be where the locks are."""
    other = "default" if registered.store in ("sqlite", "memory") else "sqlite"
    lock = lock_of(registered, key)
    with transaction.atomic(using=other):
        with lock:
            Row.objects.using(other).create(name=key)
        assert taken(lock)
    assert grantable(lock)


@pytest.mark.parametrize("comes_first", [True, False])
def test_failing_hook_of_somebody_else_does_not_lose_the_release(
    lock: Lock, *, comes_first: bool
) -> None:
    """An `on_commit` hook that raises stops those behind it; the key is freed all the same."""

    def fail() -> None:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        if comes_first:
            transaction.on_commit(fail)
        with lock:
            pass
        if not comes_first:
            transaction.on_commit(fail)
    assert eventually(lambda: grantable(lock))


@pytest.mark.parametrize("is_next", ["the same key", "another one, without an end"])
def test_error_that_is_kept_keeps_no_key(registered: Registered, key: str, is_next: str) -> None:
    """Its traceback refers to the hooks behind the one that raised: they are over all the same."""
    lock = lock_of(registered, key, wait=0)

    def fail() -> None:
        raise ZeroDivisionError

    def work() -> None:
        with transaction.atomic():
            transaction.on_commit(fail)
            with lock as lease:
                tokens.append(lease.token)

    tokens: list[str] = []
    with pytest.raises(ZeroDivisionError) as kept:
        work()
    following = lock if is_next == "the same key" else lock_of(registered, f"{key}:2", wait=None)
    with following as lease:
        assert lease.token not in tokens
    assert kept.tb is not None


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


@pytest.mark.parametrize("how", ["asked for", "closed behind", "closed inside", "closed before"])
def test_rollback_without_an_error_frees_the_key(lock: Lock, how: str) -> None:
    """By `set_rollback(True)`; and a lost connection is a rollback too."""
    with contextlib.suppress(Exception), transaction.atomic():
        Row.objects.exists()
        if how == "closed before":
            connections["default"].close()
        with lock:
            if how == "closed inside":
                connections["default"].close()
        if how == "asked for":
            transaction.set_rollback(True)
        if how == "closed behind":
            connections["default"].close()
    # Sooner than the heartbeat would find out.
    assert eventually(lambda: not taken(lock), 5)


def test_thread_that_rolled_back_gets_the_key_at_once(registered: Registered, key: str) -> None:
    """Its next attempt does not meet its own waiting release, which is one for several blocks."""
    lock = lock_of(registered, key, wait=0)
    for _ in range(5):
        with rolled_back():
            for _ in range(3):
                with lock, pytest.raises(LockUsageError), lock:
                    pytest.fail("entered twice")
        with prompt():
            lease = lock.acquire()
        assert lease.release()
    assert registered.is_next(lease.fence, grants=10)


def test_second_block_in_the_transaction_goes_on_with_the_lease(
    registered: Registered, key: str
) -> None:
    """The key is this transaction's until its end: other blocks and calls have the same lease."""
    lock, again = lock_of(registered, key, ttl=20), lock_of(registered, key, ttl=60, wait=0)
    with transaction.atomic():
        with lock as first:
            pass
        for _ in range(2):
            with again as second:
                assert second.held
                assert current_lease(key) is second
                assert (second.token, second.fence) == (first.token, first.fence)
                assert 59 < second.remaining() <= 60
                assert not first.held
                assert first.release() is False
                assert taken(lock)
            assert taken(lock)
        third = lock.acquire()
        assert (third.token, third.fence) == (first.token, first.fence)
        assert third.release() is True
    assert grantable(lock)


@pytest.mark.aliases("memory")
def test_lease_whose_extend_is_heard_too_late_is_not_gone_on_with(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a grant that comes too late, it is none: the key is asked for."""
    store, lock = lock_backends[registered.alias], lock_of(registered, key, ttl=2)
    extend, clock = store._extend, store.monotonic

    def heard_late(*args: Any, **how: Any) -> Any:
        answer = extend(*args, **how)
        monkeypatch.setattr(store, "monotonic", lambda: clock() + 3)
        return answer

    with transaction.atomic():
        with lock as first:
            pass
        monkeypatch.setattr(store, "_extend", heard_late)
        with lock as second:
            assert second.held
            assert second.fence > first.fence


def test_lease_that_a_transaction_has_kept_waits_for_its_end_whoever_releases_it(
    lock: Lock, use: Callable[[Lock], Lease]
) -> None:
    """A thread without a transaction gives it up, and the data is not committed yet."""
    with transaction.atomic():
        use(lock)
        assert Later(lock.acquire().release).result()
        assert not grantable(lock)
        use(lock)
        lease = lock.acquire()
    assert Later(lease.release).result()
    assert eventually(lambda: grantable(lock))


@pytest.mark.aliases("memory")
def test_lease_that_another_thread_releases_amid_the_rollback_is_given_back(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django has dropped its hooks by then, and calls none that comes later."""
    lock, connection = lock_of(registered, key, ttl=60), connections["default"]
    begin_autocommit = connection.set_autocommit

    def release_before(autocommit: bool, *args: Any, **how: Any) -> None:
        if autocommit:
            assert Later(lease.release).result()
        begin_autocommit(autocommit, *args, **how)

    with rolled_back():
        with lock:
            pass
        lease = lock.acquire()
        monkeypatch.setattr(connection, "set_autocommit", release_before)
    monkeypatch.undo()
    # Sooner than the heartbeat would find out.
    assert eventually(lambda: not taken(lock), 5)


@pytest.mark.aliases("memory")
@pytest.mark.parametrize(
    "how", [{"heartbeat": False}, {"basic": True}, {"max_lifetime": 20}], ids=str
)
def test_lease_that_a_transaction_keeps_is_renewed_whoever_goes_on_with_it(
    registered: Registered, key: str, how: dict[str, Any]
) -> None:
    """Data may have been written under it that is not committed yet."""
    lock = lock_of(registered, key, ttl=20)
    with transaction.atomic():
        for each in (lock, lock_of(registered, key, ttl=20, **how)):
            with each as lease:
                pass
            assert lease._holding.lasts
        lease = lock.acquire()
        assert lease._holding.lasts
        assert lease.release()


@pytest.mark.requires("supports_ttl")
@pytest.mark.parametrize("by", [{"heartbeat": False}, {"max_lifetime": 0.5}, None], ids=str)
def test_lease_that_goes_on_lasts_as_long_as_the_one_before(
    registered: Registered, key: str, by: dict[str, Any] | None
) -> None:
    """However short its own end is: renewed, if the other one was not to end before."""
    with transaction.atomic():
        with lock_of(registered, key, basic=True, ttl=60):
            pass
        if by is None:
            lease = lock_of(registered, key, ttl=0.5).acquire()
            threading.Event().wait(1.8)
            assert lease.release() is True
        else:
            with lock_of(registered, key, ttl=0.5, **by) as lease:
                threading.Event().wait(1.8)
                assert lease.held
        assert not grantable(lock_of(registered, key, wait=0))
    assert eventually(lambda: grantable(lock_of(registered, key, wait=0)))


@pytest.mark.requires("supports_ttl")
@pytest.mark.parametrize("ttl", [None, 60])
def test_block_that_is_not_renewed_shortens_nothing(
    registered: Registered, key: str, ttl: float | None
) -> None:
    """The transaction keeps the key for what the block before it was to keep it for."""
    with transaction.atomic():
        with lock_of(registered, key, basic=True, ttl=ttl):
            pass
        with lock_of(registered, key, basic=True, ttl=0.5) as lease:
            lease.extend()
            assert lease.remaining() > 40
        assert not grantable(lock_of(registered, key, wait=0))
    assert eventually(lambda: grantable(lock_of(registered, key, wait=0)))


@pytest.mark.parametrize("permits", [1, 2])
def test_blocks_behind_a_lease_that_was_taken_away_go_on_with_the_next_one(
    registered: Registered, key: str, permits: int
) -> None:
    """What the transaction keeps no more is not in the way of what it keeps since."""
    if permits > 1 and not lock_backends[registered.alias].supports_sharing:
        pytest.skip(f"{DECLARED}{registered.alias}: supports_sharing is False")
    lock = lock_of(registered, key, wait=20, permits=permits)
    with transaction.atomic():
        with lock as lease:
            pass
        take_away(lease)
        with Heard(signals.lock_lost, key) as lost, lock as second:
            pass
        assert lost.once["fence"] == lease.fence
        for _ in range(permits + 1):
            with prompt(), lock as again:
                assert (again.token, again.fence) == (second.token, second.fence)
    assert eventually(lambda: grantable(lock))


def test_what_was_taken_away_is_ended_in_the_time_of_the_call(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a store that does not answer, `wait=0` and its five seconds are not exceeded by that."""
    store, left = lock_backends[registered.alias], list[float]()
    release = store.release

    def measured(*args: Any, **how: Any) -> Any:
        left.append(durations.left())
        return release(*args, **how)

    lock = lock_of(registered, key, wait=0)
    with transaction.atomic():
        take_away(by_block(lock))
        monkeypatch.setattr(store, "release", measured)
        with lock:
            assert left != []
            assert max(left) <= durations.PATIENCE


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


def test_lease_goes_on_where_the_commit_could_not_release_it(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the release is tried again, its thread may go on: under the same fence."""
    lock = lock_of(registered, key, wait=5)
    with monkeypatch.context() as busy:
        with transaction.atomic():
            with lock as lease:
                pass
            busy.setattr(lock_backends[lock.backend], "_release", lambda *_, **__: UNKNOWN)
        with lock as again:
            # Not earlier: on a slow machine, the next try may come before this block.
            busy.undo()
            assert again.fence == lease.fence
            assert not Later(grantable, lock).result()
    assert eventually(lambda: grantable(lock))


def test_signal_of_the_release_comes_when_the_key_is_free(lock: Lock, key: str) -> None:
    """`lock_released` is about the store and not about the block."""
    with Heard(signals.lock_released, key) as heard:
        with transaction.atomic():
            with lock:
                pass
            assert heard.facts == []
        assert heard.once["released"] is True


def increment(lock: Lock, pk: int, times: int, *, rolls_back: bool = False) -> None:
    """Read, think, write, with the lock inside of the transaction: the order that loses updates."""
    for number in range(times):
        with contextlib.suppress(RollbackError), transaction.atomic():
            with lock:
                row = Row.objects.get(pk=pk)
                row.value += 1
                row.save()
            if rolls_back and number % 2:
                raise RollbackError


@pytest.mark.parametrize("rolls_back", [False, True])
def test_increments_under_a_lock_inside_the_transaction_lose_nothing(
    registered: Registered, key: str, *, rolls_back: bool
) -> None:
    """4 threads lose none, though each commits behind its block, or rolls back now and then."""
    # Where the store is slower, fewer will do: without the lock, the first ones collide.
    times = 24 if registered.alias in ("memory", "postgres") else 8
    pk = Row.objects.create(name=key).pk
    lock = lock_of(registered, key, wait=60, retry=Retry(delay=0.002, factor=1.5, cap=0.02))
    for thread in [Later(increment, lock, pk, times, rolls_back=rolls_back) for _ in range(4)]:
        thread.result(timeout=60)
    assert Row.objects.get(pk=pk).value == 4 * times // (2 if rolls_back else 1)


@pytest.mark.parametrize("end", [transaction.atomic, rolled_back])
def test_asynchronous_code_that_a_transaction_calls_waits_for_its_end(
    registered: Registered, key: str, end: Callable[[], AbstractContextManager[None]]
) -> None:
    """`async_to_sync` runs asynchronous code for a thread: its transactions count, as one lease."""
    lock, seen = lock_of(registered, key, wait=0.2), set()

    async def work() -> None:
        async with lock as lease:
            seen.add((lease.token, lease.fence))

    with end():
        for _ in range(3):
            async_to_sync(work)()
        with lock as lease:
            seen.add((lease.token, lease.fence))
        assert taken(lock)
    assert len(seen) == 1
    assert eventually(lambda: grantable(lock))


@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_acquire_leaves_the_key_to_the_transaction(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Also if its task is cancelled again while the store has not answered."""
    lock, store = lock_of(registered, key), lock_backends[registered.alias]
    asked, goes_on, extend = threading.Event(), threading.Event(), store.extend

    def late(*args: Any, **kwargs: Any) -> Any:
        asked.set()
        assert goes_on.wait(20)
        return extend(*args, **kwargs)

    async def cancel() -> None:
        task = asyncio.create_task(lock.aacquire())
        assert await asyncio.to_thread(asked.wait, 20)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        goes_on.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with transaction.atomic():
        by_block(lock)
        with monkeypatch.context() as patch:
            patch.setattr(store, "extend", late)
            async_to_sync(cancel)()
        assert eventually(lambda: waiting_release((lock.backend, key)) is not None)
        assert taken(lock)
    assert eventually(lambda: grantable(lock))
