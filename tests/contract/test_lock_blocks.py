"""A block runs under the lock, and leaving it gives the key back."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from django_distlock import (
    Lease,
    Lock,
    LockError,
    LockNotAcquired,
    current_lease,
    distlock_all,
    lock_backends,
)
from tests.backends import Registered

from .conftest import Hold
from .locking import eventually, grantable, held_elsewhere, in_a_block, lock_of, taken


def test_block_runs_while_nobody_else_can_have_the_key(lock: Lock, hold: Hold) -> None:
    """Inside the block the key is taken for everybody else, behind it it is free at once."""

    def work(lease: Lease) -> Lease:
        assert lease.held
        assert taken(lock)
        assert not grantable(lock)
        return lease

    lease = hold(lock, work)
    assert not taken(lock)
    assert grantable(lock)
    assert (lease.is_released, lease.held) == (True, False)


def test_error_in_the_block_passes_and_frees_the_key(lock: Lock, hold: Hold) -> None:
    """What the body raises is what the caller sees, and the key is free."""
    errors: list[type[BaseException]] = [ValueError, LockError]
    if hold is in_a_block:
        errors += [KeyboardInterrupt, SystemExit]
    for error in errors:
        raised = error("from the body")

        def work(_: Lease, raised: BaseException = raised) -> None:
            raise raised

        with pytest.raises(error) as caught:
            hold(lock, work)
        assert caught.value is raised
        assert grantable(lock)


def test_leaving_early_frees_the_key(lock: Lock) -> None:
    """`return`, `break` and a closed generator leave the block as its end does."""

    def returns() -> None:
        with lock:
            return

    def yields() -> object:
        with lock:
            yield

    returns()
    assert grantable(lock)
    for _ in range(3):
        with lock:
            break
    assert grantable(lock)
    generator = yields()
    next(generator)  # type: ignore[call-overload]
    assert taken(lock)
    generator.close()  # type: ignore[attr-defined]
    assert grantable(lock)


def test_body_never_runs_without_the_lock(registered: Registered, key: str, hold: Hold) -> None:
    """Contention raises before the body's first line."""
    lock = lock_of(registered, key, wait=0)
    ran: list[Lease] = []
    with held_elsewhere(lock):
        with pytest.raises(LockNotAcquired):
            hold(lock, ran.append)
        assert taken(lock)
    assert ran == []


def test_releasing_inside_the_block_is_the_end_of_the_lease(lock: Lock) -> None:
    """A block that gave its lease back early ends quietly, and releases nobody else's."""
    with lock as lease:
        assert lease.release() is True
        with held_elsewhere(lock) as other:
            assert lease.release() is False
            assert other.held
            assert taken(lock)
    assert grantable(lock)


def test_block_leaves_nothing_to_the_garbage_collector(registered: Registered, key: str) -> None:
    """What it has made refers to nothing that refers to it, so it is gone when the block is."""
    lock = lock_of(registered, key)
    with lock:
        pass  # What is done first, such as sending a script, is done.
    with lock as lease:
        gone = weakref.ref(lease)
    del lease
    assert gone() is None


def test_error_of_an_inner_block_is_told_from_the_outer_ones(
    registered: Registered, key: str, hold: Hold
) -> None:
    """The error says which lock was not granted, however it was asked for."""
    outer = lock_of(registered, key, wait=0)
    inner = lock_of(registered, f"{key}:inner", wait=0)
    refused = []

    def work(_: Lease) -> None:
        with pytest.raises(LockNotAcquired) as caught:
            hold(inner, lambda lease: lease)
        refused.append(caught.value)

    with held_elsewhere(inner):
        hold(outer, work)
        ways: list[Callable[[], object]] = [inner.acquire, lambda: asyncio.run(inner.aacquire())]
        for ask in ways:
            with pytest.raises(LockNotAcquired) as caught:
                ask()
            refused.append(caught.value)
    with held_elsewhere(outer), pytest.raises(LockNotAcquired) as caught:
        hold(outer, work)
    assert [each.lock for each in refused] == [inner] * 3
    # A function's key is filled in for each of its calls.
    assert [each.lock is inner for each in refused[1:]] == [True, True]
    assert caught.value.lock == outer


@pytest.mark.aliases("memory")
def test_many_blocks_around_are_not_asked_whether_they_are_held(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many keys at once would cost more than the one before, and the last ones seconds."""
    asked = 0

    def held(lease: Lease) -> bool:
        nonlocal asked
        asked += 1
        return lease._holding.held

    monkeypatch.setattr(Lease, "held", property(held))
    with ExitStack() as stack:
        for number in range(50):
            stack.enter_context(lock_of(registered, f"{key}-{number}"))
        assert asked < 50
        assert current_lease(f"{key}-0")


@pytest.mark.aliases("memory")
@pytest.mark.parametrize("kind", ["lock", "set"])
def test_exit_that_was_only_looked_up_is_no_block(
    registered: Registered, key: str, kind: str
) -> None:
    """`ExitStack.push()` keeps it for what was entered before, and not for what comes next."""

    def made(name: str) -> Any:
        if kind == "set":
            return distlock_all(f"{key}:{name}", backend=registered.alias)
        return lock_of(registered, f"{key}:{name}")

    first, second = made("first"), made("second")
    for closes in (True, False):
        stack = ExitStack()
        one = first.__enter__()
        stack.push(first)
        other = second.__enter__()
        if closes:
            stack.close()
        else:
            stack.pop_all().pop_all()
        del stack
        assert (one.held, other.held) == (not closes, True)
        second.__exit__(None, None, None)
        if one.held:
            first.__exit__(None, None, None)
        assert not one.held
        assert not other.held


@pytest.mark.aliases("memory")
async def test_exit_that_a_wrapper_keeps_is_that_of_its_own_task(
    registered: Registered, key: str
) -> None:
    """Several tasks enter one lock by such wrappers, and each leaves what it has entered."""
    lock, queues = lock_of(registered, key, ttl=2, wait=20), lock_backends["memory"].queues

    class Guard:
        async def __aenter__(self) -> Lease:
            lease = await lock.__aenter__()
            self._exit = lock.__aexit__
            return lease

        async def __aexit__(self, *end: Any) -> None:
            await self._exit(*end)

    async def work(happens: Callable[[Lease, float], bool]) -> bool:
        async with Guard() as lease:
            entered.set()
            done = partial(happens, lease, lease.deadline)
            return await asyncio.to_thread(eventually, done, 10)

    entered = asyncio.Event()
    first = asyncio.create_task(work(lambda lease, until: queues.name_of(key) in queues))
    await entered.wait()
    assert await work(lambda lease, until: lease.deadline > until)
    assert await first
