"""A lease that is lost cancels the task that works under it, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from django_distlock import Lease, Lock, LockLost, signals
from django_distlock.core.clock import monotonic
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.integration.wires import Wire

from .helpers import NOISE
from .locking import Heard, grantable, lock_of, take_away
from .test_lost_leases import WIRED, hanging

#: Longer than any test takes: whoever sleeps so long was not cancelled.
LONG = 20.0
MANY = 100


def short(key: str, **more: Any) -> Lock:
    """Describe a lock whose lease is lost soon."""
    return Lock(key=key, backend="memory", **{"ttl": 0.4, "heartbeat": False, **more})


def this_task() -> asyncio.Task[Any]:
    """Give the running task."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def seen_in(work: Callable[[], Awaitable[Any]]) -> tuple[type[BaseException] | None, int]:
    """Run in a task of its own; give its error, and what was left of cancellations."""
    cancelling = -1

    async def run() -> None:
        nonlocal cancelling
        try:
            await work()
        finally:
            cancelling = this_task().cancelling()

    task = asyncio.create_task(run())
    await asyncio.wait([task], timeout=LONG)
    assert task.done()
    if task.cancelled():
        return asyncio.CancelledError, cancelling
    error = task.exception()
    return (None if error is None else type(error)), cancelling


async def test_awaiting_task_is_cancelled_and_told_why(registered: Registered, key: str) -> None:
    """It does not sleep on under a lease that another one may have by now."""
    lock, left = lock_of(registered, key, ttl=0.6, heartbeat=False), []

    async def work() -> None:
        async with lock as lease:
            try:
                await asyncio.sleep(LONG)
            finally:
                left.append(monotonic() - lease.deadline)

    with Heard(signals.lock_lost, key) as heard:
        assert await seen_in(work) == (LockLost, 0)
        assert 0 <= left[0] < NOISE, f"took {left[0]:.3f} s instead of 0 s"
        await asyncio.sleep(0.3)
        assert heard.once["cause"]


async def test_task_whose_key_was_taken_away_is_cancelled(registered: Registered, key: str) -> None:
    """At the next beat, long before the deadline."""
    lock = lock_of(registered, key, ttl=9)

    async def work() -> None:
        async with lock as lease:
            await asyncio.to_thread(take_away, lease)
            await asyncio.sleep(LONG)

    began = monotonic()
    assert await seen_in(work) == (LockLost, 0)
    assert monotonic() - began < 9
    assert await asyncio.to_thread(grantable, lock)


async def decorated(key: str) -> None:
    """Wait in a decorated coroutine."""
    await short(key)(asyncio.sleep)(LONG)


async def swallows(key: str) -> None:
    """Make nothing of the cancellation: the result is not taken for one made under the lease."""
    async with short(key):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG)
        await asyncio.sleep(0.2)  # Once is enough: it may clear up in peace.


async def raises(key: str) -> None:
    """Make an error of the cancellation, which is what is seen."""
    async with short(key):
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            raise ZeroDivisionError from None


async def checks(key: str) -> None:
    """Find out without an await, leave by `LockLost`, and go on."""
    with contextlib.suppress(LockLost):
        async with short(key) as lease:
            while monotonic() < lease.deadline:
                time.sleep(0.01)  # noqa: ASYNC251 - a body that does not await
            lease.check()
        raise AssertionError("The lease should have been lost.")
    await asyncio.sleep(0.3)


async def timeout_around(key: str) -> None:
    """Be in a timeout that expires first."""
    async with asyncio.timeout(0.3), short(key, ttl=30):
        await asyncio.sleep(LONG)


async def long_timeout_around(key: str) -> None:
    """Be in a timeout that does not expire."""
    async with asyncio.timeout(LONG), short(key):
        await asyncio.sleep(LONG)


async def long_timeout_inside(key: str) -> None:
    """Wait in a timeout that does not expire."""
    async with short(key), asyncio.timeout(LONG):
        await asyncio.sleep(LONG)


async def timeout_inside(key: str) -> None:
    """Catch a timeout of the body's own."""
    async with short(key, ttl=30):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.sleep(LONG)
        await asyncio.sleep(0)


async def cancelled_before(key: str) -> None:
    """Lose a lease while clearing up behind a cancellation, as any other work may."""
    this_task().cancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        assert this_task().cancelling() == 1
        async with short(key):
            await asyncio.sleep(LONG)


async def cancelled_by_somebody(key: str) -> None:
    """Be cancelled while the lease is held."""
    async with short(key, ttl=30):
        asyncio.get_running_loop().call_later(0.1, this_task().cancel)
        await asyncio.sleep(LONG)


@pytest.mark.parametrize(
    ("work", "error", "cancelling"),
    [
        (decorated, LockLost, 0),
        (swallows, LockLost, 0),
        (raises, ZeroDivisionError, 0),
        (checks, None, 0),
        (timeout_around, TimeoutError, 0),
        (long_timeout_around, LockLost, 0),
        (long_timeout_inside, LockLost, 0),
        (timeout_inside, None, 0),
        (cancelled_before, LockLost, 1),
        (cancelled_by_somebody, asyncio.CancelledError, 1),
    ],
)
async def test_task_sees_what_happened_to_it(
    key: str, work: Callable[[str], Awaitable[None]], error: type | None, cancelling: int
) -> None:
    """A loss, a timeout, a cancellation or its own error; and it is cancelled by no other."""
    assert await seen_in(lambda: work(key)) == (error, cancelling)


async def test_cancellation_of_somebody_else_is_not_eaten_by_a_loss(key: str) -> None:
    """Cancelled by both, a task is cancelled: who asked for it gets what was asked for."""
    lease_lost = asyncio.Event()

    async def work() -> None:
        async with short(key):
            try:
                await asyncio.sleep(LONG)
            finally:
                # Its own cancelling has come; the other one comes while it clears up.
                lease_lost.set()
                await asyncio.sleep(LONG)

    task = asyncio.create_task(work())
    await lease_lost.wait()
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert task.cancelling() == 1


# With asyncio's own


async def test_timeout_at_the_moment_of_the_loss(key: str) -> None:
    """Whichever comes first, the task ends, by one of the two, and nothing is left of either."""

    async def work(number: int) -> None:
        lock = short(f"{key}:{number}", ttl=0.5)
        async with lock as lease:
            left = lease.deadline - monotonic()
            async with asyncio.timeout(left + (number - 10) / 1000):
                await asyncio.sleep(LONG)

    outcomes = await asyncio.gather(*(seen_in(lambda n=each: work(n)) for each in range(20)))  # type: ignore[misc]
    for error, cancelling in outcomes:
        assert error in (LockLost, TimeoutError)
        assert cancelling == 0


async def test_group_of_which_one_task_loses_fails_by_the_loss(key: str) -> None:
    """A loss is an error, which a group reports, and not a cancellation, which it swallows."""
    others: list[BaseException] = []

    async def work() -> None:
        async with short(key):
            await asyncio.sleep(LONG)

    async def other() -> None:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError as error:
            others.append(error)
            raise

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            group.create_task(other())

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert [type(error) for error in caught.value.exceptions] == [LockLost]
    assert len(others) == 1
    if sys.version_info >= (3, 13):
        # A group of before leaves the count of its own cancellation.
        assert this_task().cancelling() == 0


async def test_group_inside_of_a_block_ends_with_it(key: str) -> None:
    """The tasks that work under a lost lease are cancelled with the one that took it."""
    ended: list[bool] = []

    async def child() -> None:
        try:
            await asyncio.sleep(LONG)
        finally:
            ended.append(True)

    async def work() -> None:
        async with short(key), asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())

    assert await seen_in(work) == (LockLost, 0)
    assert ended == [True, True]


async def test_failing_group_around_a_block_is_a_failing_group(key: str) -> None:
    """A block that is cancelled by its group leaves by that, with nothing held."""

    async def fail() -> None:
        await asyncio.sleep(0.1)
        raise ZeroDivisionError

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            async with short(key, ttl=30):
                await asyncio.sleep(LONG)

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    assert await asyncio.to_thread(grantable, short(key))


# Whom it does not cancel


async def test_loss_just_behind_the_block_cancels_nothing(key: str) -> None:
    """A lease whose block has ended in time is nobody's any more."""

    async def work(number: int) -> str:
        try:
            async with short(f"{key}:{number}", ttl=0.5) as lease:
                until = lease.deadline - 0.02 + number * 0.001
                await asyncio.sleep(max(0.0, until - monotonic() - 0.01))
                while monotonic() < until:
                    pass
        except LockLost:
            outcome = "lost"
        else:
            outcome = "released"
        await asyncio.sleep(0.5)  # Not cancelled here.
        assert this_task().cancelling() == 0
        return outcome

    outcomes = set()
    for start in range(0, 40, 8):
        outcomes |= set(await asyncio.gather(*map(work, range(start, start + 8))))
    assert outcomes <= {"lost", "released"}
    assert "lost" in outcomes


async def test_task_of_another_lease_is_not_cancelled(key: str) -> None:
    """Each loss is its own task's; who takes a lease without a block asks it, or is called back."""
    events: list[str] = []
    told: list[Lease] = []
    unbound = await short(key).aacquire()
    unbound.on_lost(told.append)

    async def work(name: str, ttl: float) -> None:
        try:
            async with short(f"{key}:{name}", ttl=ttl):
                await asyncio.sleep(1.2)
            events.append(f"{name} finished")
        except LockLost:
            events.append(f"{name} lost")

    await asyncio.gather(work("a", 0.4), work("b", 30))
    assert events == ["a lost", "b finished"]
    assert told == [unbound]
    assert this_task().cancelling() == 0
    await unbound.arelease()


async def test_closed_loop_is_no_trouble(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """A task whose loop is gone has ended: its loss is logged, and no error."""

    def run() -> Lease:
        async def work() -> Lease:
            lock = short(key)
            # Left open, as by a program that ends its loop in the middle.
            return await lock.__aenter__()

        return asyncio.run(work())

    lease = await asyncio.to_thread(run)
    await asyncio.sleep(1)
    assert lease.is_lost
    assert not [each for each in caplog.records if each.exc_info]
    await lease.arelease()


# The event loop


async def ticks(until: Callable[[], bool]) -> float:
    """Tick each 10 ms; give the longest time between two ticks."""
    longest, last = 0.0, time.monotonic()
    while not until():
        await asyncio.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


@WIRED
def test_store_that_hangs_does_not_block_the_loop(registered: Registered, key: str) -> None:
    """Renewal and release wait for the store in threads; the task is cancelled in time."""
    cancelled: list[float] = []

    async def work(alias: str, wire: Wire) -> None:
        async with Lock(key=key, backend=alias, ttl=2.4) as lease:
            wire.hang()
            try:
                await asyncio.sleep(LONG)
            finally:
                cancelled.append(monotonic() - lease.deadline)

    async def watch(alias: str, wire: Wire) -> float:
        task = asyncio.create_task(work(alias, wire))
        longest = await ticks(lambda: bool(cancelled))
        # The release hangs as well.
        until = time.monotonic() + 1
        longest = max(longest, await ticks(lambda: time.monotonic() >= until))
        wire.close()
        with pytest.raises(LockLost):
            await task
        return longest

    with hanging(registered) as (alias, wire):
        longest = asyncio.run(watch(alias, wire))
    assert 0 <= cancelled[0] < NOISE, f"took {cancelled[0]:.3f} s instead of 0 s"
    assert longest < NOISE, f"took {longest:.3f} s instead of 0.01 s"


async def test_many_tasks_are_cancelled_at_once(key: str) -> None:
    """A store's loss of all its leases reaches every task."""

    async def work(number: int) -> str:
        try:
            async with Lock(key=f"{key}:{number}", backend="memory", ttl=3):
                begun.add(number)
                if len(begun) == MANY:
                    all_have_begun.set()
                await asyncio.sleep(LONG)
        except LockLost:
            return "lost"
        return "went on"

    begun, all_have_begun = set[int](), asyncio.Event()
    tasks = [asyncio.create_task(work(number)) for number in range(MANY)]
    await asyncio.wait_for(all_have_begun.wait(), LONG)
    for number in range(MANY):
        lock_backends["memory"].force_release(f"{key}:{number}")
    assert set(await asyncio.wait_for(asyncio.gather(*tasks), LONG)) == {"lost"}


async def test_loss_that_an_awaited_call_finds_is_told_once(
    registered: Registered, key: str
) -> None:
    """Who is cancelled for it gets `LockLost`; the event loop has no error left over."""
    unasked: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: unasked.append(context))
    lock = lock_of(registered, key)

    async def work(operation: str) -> None:
        async with lock as lease:
            take_away(lease)
            await getattr(lease, operation)()
            await asyncio.sleep(1)

    for operation in ("aextend", "arelease"):
        with pytest.raises(LockLost):
            await work(operation)
    gc.collect()
    await asyncio.sleep(0)
    assert unasked == []
