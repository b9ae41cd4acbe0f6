"""A decorated function runs under the lock."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from django_distlock import (
    InvalidArgument,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock,
)
from tests.backends import Registered

from .helpers import Later
from .locking import grantable, held_elsewhere, lock_of, taken


def test_function_runs_under_the_lock(registered: Registered, key: str) -> None:
    """Arguments go in, the result comes out, and the key is taken in between."""
    lock = lock_of(registered, key)

    @lock
    def work(a: int, *, b: int = 0) -> tuple[int, bool, bool]:
        lease = current_lease()
        assert lease is not None
        return a + b, lease.held, taken(lock)

    assert work(1, b=2) == (3, True, True)
    assert work(1) == (1, True, True)
    assert grantable(lock)


async def test_coroutine_function_runs_under_the_lock(registered: Registered, key: str) -> None:
    """The decorator of a coroutine function makes a coroutine function."""
    lock = lock_of(registered, key)

    @lock
    async def work(a: int) -> tuple[int, bool]:
        await asyncio.sleep(0)
        return a, taken(lock)

    assert inspect.iscoroutinefunction(work)
    assert await work(5) == (5, True)
    assert grantable(lock)


def test_function_keeps_its_name_and_signature(registered: Registered, key: str) -> None:
    """A decorated function looks like itself."""

    def work(a: int, *, b: str = "x") -> None:
        """Work."""

    decorated = lock_of(registered, key)(work)
    assert decorated.__name__ == "work"
    assert decorated.__doc__ == "Work."
    assert inspect.signature(decorated) == inspect.signature(work)


def test_error_passes_and_frees_the_key(registered: Registered, key: str) -> None:
    """What the function raises is what the caller sees."""
    lock = lock_of(registered, key)

    @lock
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert grantable(lock)


def test_function_never_runs_without_the_lock(registered: Registered, key: str) -> None:
    """Contention raises, and the function is not called."""
    lock, ran = lock_of(registered, key, wait=0), []

    @lock
    def work() -> None:
        ran.append("work")

    with held_elsewhere(lock):
        with pytest.raises(LockNotAcquired):
            work()
        assert taken(lock)
    assert ran == []
    work()
    assert ran == ["work"]


def test_template_makes_a_lock_for_each_arguments(registered: Registered, key: str) -> None:
    """The key comes from the arguments, however they are passed."""

    @lock_of(registered, key + ":{invoice_id}:{part}", wait=0)
    def pay(invoice_id: int, part: str = "all") -> str:
        lease = current_lease()
        assert lease is not None
        assert not grantable(lock_of(registered, lease.key))
        return lease.key

    assert pay(1) == f"{key}:1:all"
    assert pay(invoice_id=1, part="all") == f"{key}:1:all"
    assert pay(2, "tax") == f"{key}:2:tax"
    with held_elsewhere(lock_of(registered, f"{key}:1:all")):
        assert pay(2) == f"{key}:2:all"
        with pytest.raises(LockNotAcquired) as caught:
            pay(1)
    assert caught.value.key == f"{key}:1:all"


async def test_template_of_a_coroutine_function(registered: Registered, key: str) -> None:
    """The same for coroutine functions."""

    @lock_of(registered, key + ":{n}")
    async def work(n: int) -> str:
        lease = current_lease()
        assert lease is not None
        return lease.key

    keys = await asyncio.gather(*(work(n) for n in range(3)))
    assert keys == [f"{key}:0", f"{key}:1", f"{key}:2"]


def test_methods_may_be_decorated(registered: Registered, key: str) -> None:
    """Methods, class methods and static methods are functions too, and see their object."""

    class Account:
        """Something with a key of its own."""

        pk = 7

        @lock_of(registered, key + ":{self.pk}:{amount}")
        def pay(self, amount: int) -> tuple[int, str]:
            """Pay."""
            lease = current_lease()
            assert lease is not None
            return self.pk + amount, lease.key

        @lock_of(registered, key + ":{self.pk}")
        async def apay(self) -> int:
            """Pay."""
            return self.pk

        @classmethod
        @lock_of(registered, key)
        def of_class(cls) -> type:
            """Give the class."""
            return cls

        @staticmethod
        @lock_of(registered, key)
        def of_nothing(a: int) -> int:
            """Give the argument."""
            return a

    account = Account()
    assert account.pay(3) == (10, f"{key}:7:3")
    assert Account.pay(account, amount=3) == (10, f"{key}:7:3")
    assert asyncio.run(account.apay()) == 7
    assert Account.of_class() is Account
    assert account.of_nothing(1) == Account.of_nothing(1) == 1


def generates() -> Iterator[int]:
    """Generate."""
    yield 1


async def agenerates() -> AsyncIterator[int]:
    """Generate."""
    yield 1


@pytest.mark.parametrize("target", [generates, agenerates])
def test_generators_are_refused_at_decoration(target: Any) -> None:
    """The body of a generator would run behind the lock; the error names the function."""
    with pytest.raises(LockUsageError, match="generates") as caught:
        distlock("key")(target)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("template", ["{nobody}", "{a}{b}", "{a", "{a!r}"])
def test_bad_template_is_refused_at_decoration(template: str) -> None:
    """A slip in a template fails at import, not at the first call."""
    with pytest.raises(InvalidArgument):

        @distlock(template)
        def work(a: int, b: int) -> None:
            """Work."""


def test_recursion_under_one_key_is_refused(registered: Registered, key: str) -> None:
    """A decorated function that calls itself would wait for itself."""

    @lock_of(registered, key)
    def work(depth: int) -> None:
        if depth:
            work(depth - 1)

    work(0)
    with pytest.raises(LockUsageError) as caught:
        work(1)
    assert caught.value.code == "reentrant"
    assert grantable(lock_of(registered, key))


def test_threads_share_a_decorated_function(registered: Registered, key: str) -> None:
    """Of 8 threads with 30 calls each, exactly the granted calls run, one at a time."""
    inside, ran, overlaps = [0], [0], [0]
    # A shared counter without a lock of its own: only calls that were granted reach it.
    barrier = threading.Barrier(8)

    @lock_of(registered, key, wait=0)
    def work() -> None:
        inside[0] += 1
        overlaps[0] += inside[0] > 1
        ran[0] += 1
        inside[0] -= 1

    def calls() -> int:
        barrier.wait(timeout=20)
        granted = 0
        for _ in range(30):
            try:
                work()
            except LockNotAcquired:
                continue
            granted += 1
        return granted

    granted = sum(each.result() for each in [Later(calls) for _ in range(8)])
    assert granted == ran[0] > 0
    assert overlaps[0] == 0
    assert grantable(lock_of(registered, key))
