"""Who waits inside a transaction waits for nobody who waits for that transaction."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction

from django_distlock import Lock, LockLost, LockNotAcquired, LockUsageError, distlock
from django_distlock.handler import lock_backends
from django_distlock.process import deferred_release
from tests.backends import Registered

from .helpers import Later, prompt
from .locking import eventually, grantable, held_elsewhere, lock_of

#: Seconds in which nothing hangs that is not stuck.
SOON = 5


def has_waiters(lock: Lock) -> bool:
    """Say whether somebody of this process waits for a key."""
    backend = lock_backends[lock.backend]
    return backend.queues.name_of(lock.key) in backend.queues


async def waits(lock: Lock) -> None:
    """Wait until somebody does for a key."""
    assert await asyncio.to_thread(eventually, lambda: has_waiters(lock), SOON)


@pytest.mark.requires("supports_sharing")
def test_reader_does_not_wait_for_a_reader(registered: Registered, key: str) -> None:
    """Who wants the key alone closes it, and is refused: it would give up first."""
    inner = lock_of(registered, f"{key}-inner", wait=20)
    shared = lock_of(registered, key, shared=True, wait=20)
    alone = lock_of(registered, key, wait=10)

    def read() -> None:
        with inner:
            inside.set()
            assert eventually(lambda: not grantable(replace(shared, wait=0)), SOON)
            with shared:
                pass

    inside = threading.Event()
    with shared:
        reading = Later(read)
        assert inside.wait(SOON)
        writing = Later(alone.acquire)
        inner.acquire().release()
        with pytest.raises(LockNotAcquired, match="waits for a caller that waits to share it"):
            writing.result()
    reading.result()


def test_tasks_of_one_transaction_go_on_with_the_lease(registered: Registered, key: str) -> None:
    """One that waits gets the key when the block of the other is left, not when they all end."""
    lock = lock_of(registered, key, ttl=20, wait=None)
    inside, seen = [0], []

    async def work() -> None:
        async with lock as lease:
            inside[0] += 1
            seen.append((inside[0], lease.token, lease.fence))
            if len(seen) == 1:
                await waits(lock)
            inside[0] -= 1

    async def main() -> None:
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(work() for _ in range(3)))

    with transaction.atomic():
        async_to_sync(main)()
        assert len(seen) == 3
        assert len(set(seen)) == 1, seen
        assert not grantable(lock)
    assert grantable(lock)


@pytest.mark.aliases("memory")
def test_task_that_waits_for_a_permit_goes_on_with_the_lease(
    registered: Registered, key: str
) -> None:
    """At once, while somebody else has the other permit."""
    lock = lock_of(registered, key, permits=2, ttl=20, wait=SOON)

    async def work(inside: asyncio.Event) -> None:
        async with lock:
            inside.set()
            await waits(lock)

    async def main() -> None:
        inside = asyncio.Event()
        task = asyncio.create_task(work(inside))
        await inside.wait()
        waiting = asyncio.create_task(lock.aacquire())
        await task
        with prompt():
            lease = await waiting
        await lease.arelease()

    with held_elsewhere(lock), transaction.atomic():
        async_to_sync(main)()


def test_synchronous_code_of_a_task_goes_on_with_the_lease(
    registered: Registered, key: str
) -> None:
    """It runs in the thread whose transaction keeps what another task has left."""
    lock = lock_of(registered, key, ttl=20, wait=SOON)
    fences = []

    def view() -> None:
        with lock as lease:
            fences.append(lease.fence)

    async def holder(started: asyncio.Event) -> None:
        async with lock as lease:
            fences.append(lease.fence)
            started.set()
            await waits(lock)

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(holder(started))
        await started.wait()
        await sync_to_async(view, thread_sensitive=True)()
        await task

    with transaction.atomic():
        async_to_sync(main)()
    assert fences == [fences[0]] * 2
    assert grantable(lock)


def refused_of(*calls: Callable[[], object]) -> str:
    """Call at once what goes on in a thread each; return what the one said that was refused."""
    refused = []
    for each in [Later(call) for call in calls]:
        try:
            each.result()
        except LockNotAcquired as error:
            refused.append(str(error))
    assert len(refused) == 1, refused
    return refused[0]


@pytest.mark.parametrize("way", ["transactions", "blocks"])
def test_of_two_that_wait_for_each_other_one_is_refused(
    registered: Registered, key: str, way: str
) -> None:
    """The one that would give up first, at once, with both keys; the other one goes on."""
    patient = lock_of(registered, f"{key}:patient", wait=60)
    hasty = lock_of(registered, f"{key}:hasty", wait=60)
    barrier = threading.Barrier(2)

    def take(one: Lock, other: Lock) -> None:
        with transaction.atomic() if way == "transactions" else one:
            # The transaction keeps what the block has left.
            with one if way == "transactions" else nullcontext():
                pass
            barrier.wait(SOON)
            with other:
                pass

    with prompt(SOON):
        error = refused_of(partial(take, patient, hasty), partial(take, hasty, patient))
    assert f"{key}:patient" in error
    assert f"{key}:hasty" in error
    assert grantable(patient)
    assert grantable(hasty)


def test_asynchronous_block_that_goes_on_with_a_lease_may_be_in_a_circle(key: str) -> None:
    """Whoever waits for it is refused at once, as in front of any other block."""
    x, y = (distlock(f"{key}:{name}", backend="memory", wait=60) for name in "xy")
    barrier = threading.Barrier(2)

    async def main() -> None:
        async with x:
            pass
        async with x:
            await asyncio.to_thread(barrier.wait, SOON)
            async with y:
                pass

    def one() -> None:
        with transaction.atomic(using="sqlite"):
            async_to_sync(main)()

    def other() -> None:
        with y:
            barrier.wait(SOON)
            with x:
                pass

    refused_of(one, other)


def test_who_waits_for_one_of_several_permits_is_in_no_circle(key: str) -> None:
    """Somebody else has a permit, too, and its end lets both go on."""
    some = distlock(f"{key}:some", backend="memory", wait=60, permits=2)
    one = distlock(f"{key}:one", backend="memory", wait=60)
    barrier = threading.Barrier(2)

    def work(outer: Lock, inner: Lock) -> None:
        with outer:
            barrier.wait(SOON)
            with inner:
                pass

    other = some.acquire()
    running = [Later(work, some, one), Later(work, one, some)]
    assert eventually(lambda: has_waiters(some) and has_waiters(one))
    assert other.release()
    for each in running:
        each.result()


@pytest.mark.parametrize("wait", [60, 10], ids=["patient_first", "hasty_first"])
def test_who_gives_up_first_is_refused(key: str, wait: float) -> None:
    """Nobody who would be granted the key in time is refused, whoever came last."""
    a, b = (distlock(f"{key}:{name}", backend="memory") for name in "ab")
    barrier, refused = threading.Barrier(2), []

    def work(one: Lock, other: Lock, waits: float, *, last: bool) -> None:
        with transaction.atomic(using="sqlite"):
            with one:
                pass
            barrier.wait(SOON)
            if last:
                assert eventually(lambda: has_waiters(one))
            try:
                with replace(other, wait=waits):
                    pass
            except LockNotAcquired:
                refused.append(waits)

    with prompt(SOON):
        for each in [Later(work, a, b, wait, last=False), Later(work, b, a, 30.0, last=True)]:
            each.result()
    assert refused == [min(wait, 30.0)]


def test_block_that_is_left_may_close_the_circle(key: str) -> None:
    """Of the tasks of a transaction, one waits while another leaves what somebody waits for."""
    x, y = (distlock(f"{key}:{name}", backend="memory", wait=30) for name in "xy")
    x_is_held, y_is_kept = threading.Event(), threading.Event()

    async def waiter() -> None:
        async with y:
            pass

    async def main() -> None:
        async with x:
            x_is_held.set()
            await asyncio.to_thread(y_is_kept.wait, SOON)
            task = asyncio.create_task(waiter())
            await waits(y)
            await waits(x)
        await task

    def one() -> None:
        with transaction.atomic(using="sqlite"):
            async_to_sync(main)()

    def other() -> None:
        with transaction.atomic(using="default"):
            x_is_held.wait(SOON)
            with y:
                pass
            y_is_kept.set()
            with x:
                pass

    with prompt(SOON):
        said = refused_of(one, other)
    assert x.key in said
    assert y.key in said


def test_task_that_was_begun_in_a_block_is_not_inside_of_it(key: str) -> None:
    """The block may be left before it ends: then nothing is a circle."""
    x, y = (distlock(f"{key}:{name}", backend="memory", wait=SOON) for name in "xy")

    async def other() -> None:
        async with y, x:
            pass

    async def main() -> None:
        async with x:
            task = asyncio.create_task(other(), context=Context())
            await waits(x)
            begun = asyncio.create_task(y.aacquire())
            await waits(y)
        lease = await begun
        await lease.arelease()
        await task

    asyncio.run(main())


def test_lease_that_nobody_renews_is_no_circle(key: str) -> None:
    """It ends by itself, and whoever waits for its key goes on."""
    barrier = threading.Barrier(2)
    brief = distlock(f"{key}:brief", backend="memory", ttl=0.2, heartbeat=False)
    other = distlock(f"{key}:other", backend="memory")

    def first() -> None:
        with brief:
            barrier.wait(SOON)
            with replace(other, wait=SOON):
                pass

    def second() -> None:
        with other:
            barrier.wait(SOON)
            with replace(brief, wait=2 * SOON):
                pass

    late, in_time = Later(first), Later(second)
    in_time.result()
    with pytest.raises(LockLost):
        late.result()


def test_release_that_was_carried_out_keeps_nothing(key: str) -> None:
    """Who still has it in hand, from a look at all that wait, refuses nothing for it."""
    released: list[str] = []

    def release() -> bool:
        released.append(key)
        return True

    with transaction.atomic():
        here = deferred_release.open_transactions()
        deferred = deferred_release.Deferred(("memory", key), object(), release, here)
        assert not deferred.is_over
    assert deferred.is_over
    # What tells of the end of a transaction may come late, and comes to nothing.
    deferred.unclaim()
    deferred.release_if_over()
    assert released == [key]


def test_release_that_was_interrupted_at_its_end_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A signal may come before it is taken from those that wait: it is carried out once more."""
    name, remove = ("memory", key), deferred_release._waiting.remove

    def strike(name: tuple[str, str], deferred: deferred_release.Deferred) -> None:
        monkeypatch.setattr(deferred_release._waiting, "remove", remove)
        raise ZeroDivisionError

    monkeypatch.setattr(deferred_release._waiting, "remove", strike)
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        here = deferred_release.open_transactions()
        deferred_release.Deferred(name, object(), lambda: True, here)
    assert eventually(lambda: not deferred_release._waiting.of(name))


def test_release_that_is_deferred_amid_a_rollback_is_carried_out(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """As by the thread that gives up what was interrupted: Django tells it of no end any more."""
    name, here, connection = ("memory", key), threading.get_ident(), connections["default"]
    begin_autocommit = connection.set_autocommit

    def defer_elsewhere(autocommit: bool, *args: Any, **kwargs: Any) -> None:
        if autocommit:
            late = Later(deferred_release.defer_for, here, name, object(), lambda: True)
            assert not late.result().is_over
        begin_autocommit(autocommit, *args, **kwargs)

    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        monkeypatch.setattr(connection, "set_autocommit", defer_elsewhere)
        raise ZeroDivisionError
    monkeypatch.undo()
    assert eventually(lambda: not deferred_release._waiting.of(name), SOON)


def test_note_behind_a_commit_is_no_key(key: str) -> None:
    """Events wait for the end of a transaction as releases do, and nobody waits for them."""
    lock = distlock(key, backend="memory", wait=None)
    with transaction.atomic():
        deferred_release.defer(("", f"{key}:event"), None, lambda: True)
        with lock:
            pass
    assert grantable(lock)


def test_waiting_without_end_behind_another_key_is_refused(
    registered: Registered, key: str
) -> None:
    """What a transaction keeps may be waited for by another process, which nobody here can see."""
    first = lock_of(registered, f"{key}:1", wait=None)
    second = lock_of(registered, f"{key}:2", wait=None)
    with transaction.atomic():
        with first:
            pass
        with pytest.raises(LockUsageError) as caught:
            second.acquire()
        assert (caught.value.code, caught.value.key) == ("unsupported", f"{key}:2")
        assert f"{key}:1" in str(caught.value)
        with pytest.raises(LockUsageError):
            asyncio.run(second.aacquire())
        # The same key is gone on with, and a wait that ends is a wait.
        with first, lock_of(registered, f"{key}:2", wait=0.1):
            pass
    assert grantable(first)
    assert grantable(second)
    # Without a transaction nothing is kept.
    with first, second:
        pass


def test_bounded_wait_in_a_transaction_ends(registered: Registered, key: str) -> None:
    """Whatever others keep: what was kept here is free when the error leaves `atomic()`."""
    first, second = (lock_of(registered, f"{key}:{n}", wait=0.1) for n in (1, 2))

    def work() -> None:
        with transaction.atomic():
            with first:
                pass
            second.acquire()

    with held_elsewhere(second):
        with pytest.raises(LockNotAcquired):
            work()
        assert eventually(lambda: grantable(first))
