"""A decorated function runs under the lock."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    Lock,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock,
)
from tests.backends import Registered

from .helpers import Later
from .locking import grantable, held_elsewhere, lock_of, taken


def test_function_runs_under_the_lock(lock: Lock) -> None:
    """Arguments go in, the result comes out, and the key is taken; it looks like itself."""

    def work(a: int, *, b: int = 0) -> tuple[int, bool, bool]:
        """Work."""
        lease = current_lease()
        assert lease is not None
        return a + b, lease.held, taken(lock)

    decorated = lock(work)
    assert (decorated.__name__, decorated.__doc__) == ("work", "Work.")
    assert inspect.signature(decorated) == inspect.signature(work)
    assert decorated(1, b=2) == (3, True, True)
    assert decorated(1) == (1, True, True)
    assert grantable(lock)


@pytest.mark.aliases("memory")
def test_field_that_nothing_fills_warns(registered: Registered, key: str) -> None:
    """A block's key is what it says: a forgotten `f` warns. What a template made does not."""
    forgotten = lock_of(registered, f"{key}:{{invoice.pk:05d}}")
    with pytest.warns(RuntimeWarning, match=r"invoice\.pk:05d.*f-string") as caught, forgotten:
        pass
    assert [each.filename for each in caught] == [__file__]

    @lock_of(registered, f"{key}:{{text}}")
    def named(text: str) -> str:
        lease = current_lease()
        assert lease is not None
        return lease.key

    assert named("{pk}") == f"{key}:{{pk}}"
    for other in ("{}", '{"a": 1}', "{0}"):
        with lock_of(registered, f"{key}{other}") as lease:
            assert lease.held


async def test_coroutine_function_runs_under_the_lock(lock: Lock) -> None:
    """The decorator of a coroutine function makes one, and sees a partial of one."""

    async def work(a: int, b: int) -> tuple[int, bool]:
        await asyncio.sleep(0)
        return a + b, taken(lock)

    assert inspect.iscoroutinefunction(lock(work))
    for decorated in (lock(work), lock(functools.partial(work, b=3))):
        assert await decorated(2, b=3) == (5, True)
        assert grantable(lock)


def test_template_makes_a_lock_for_each_arguments(registered: Registered, key: str) -> None:
    """The key comes from the arguments, however they are passed, to either kind of function."""
    decorate = lock_of(registered, key + ":{invoice_id}:{part}", wait=0)

    def own() -> str:
        lease = current_lease()
        assert lease is not None
        return lease.key

    @decorate
    def pay(invoice_id: int, part: str = "all") -> str:
        assert not grantable(lock_of(registered, own()))
        return own()

    @decorate
    async def apay(invoice_id: int, part: str = "all") -> str:
        return own()

    async def several() -> list[str]:
        return list(await asyncio.gather(*map(apay, range(3))))

    assert pay(1) == f"{key}:1:all"
    assert pay(invoice_id=1, part="all") == f"{key}:1:all"
    assert pay(2, "tax") == f"{key}:2:tax"
    assert asyncio.run(several()) == [f"{key}:{number}:all" for number in range(3)]
    with held_elsewhere(lock_of(registered, f"{key}:1:all")):
        assert pay(2) == f"{key}:2:all"
        with pytest.raises(LockNotAcquired) as caught:
            pay(1)
    assert caught.value.key == f"{key}:1:all"


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


async def awaits() -> None:
    """Be awaited."""


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as many a decorator does: with a plain one, which looks like it."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Awaits:
    """An object whose call is awaited."""

    async def __call__(self) -> None:
        """Be awaited."""


class Generates:
    """An object whose call generates, below a decorator."""

    @around
    def __call__(self) -> Iterator[int]:
        """Generate."""
        yield 1


RUN_LATER = {
    "generator": generates,
    "asynchronous generator": agenerates,
    "wrapped coroutine function": around(awaits),
    "wrapped twice": around(around(awaits)),
    "wrapped generator": around(generates),
    "wrapped asynchronous generator": around(agenerates),
    "context manager": contextmanager(generates),
    "partial of a generator": functools.partial(generates),
    "partial of a wrapped coroutine function": functools.partial(around(awaits)),
    "cached coroutine function": functools.lru_cache(awaits),
    "static method": staticmethod(awaits),
    "object that awaits": Awaits(),
    "object that generates": Generates(),
    "partial of an object that awaits": functools.partial(Awaits()),
    "class": Awaits,
}


def test_what_cannot_be_decorated_is_refused_at_decoration() -> None:
    """Only functions are that run when they are called: the others would run without the lock.

    The error names them, as far as they have names. A slip in a template fails at import, too.
    """
    target: Any
    for what, target in RUN_LATER.items():
        name = getattr(inspect.unwrap(target), "__qualname__", "(partial|Awaits|Generates)")
        with pytest.raises(LockUsageError, match=name) as caught:
            pytest.fail(f"a {what} became {distlock('key')(target)}")
        assert caught.value.code == "unsupported"
    for target in (5, None, "work"):
        with pytest.raises(InvalidArgument, match=repr(target)):
            distlock("key")(target)
    for template in ("{nobody}", "{a}{b}", "{a", "{a!r}"):
        with pytest.raises(InvalidArgument):
            distlock(template)(lambda a, b: None)


class Promise:
    """What can be awaited."""

    def __await__(self) -> Generator[Any, Any, None]:
        """Be awaited."""
        yield


RETURNS: dict[str, Callable[[list[str]], Any]] = {}


def returns(function: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """Note a body that would run when it is awaited, or asked for more."""
    RETURNS[function.__name__] = function
    return function


@returns
async def coroutine(ran: list[str]) -> None:
    """Be a coroutine."""
    ran.append("ran")


@returns
def generator(ran: list[str]) -> Iterator[int]:
    """Be a generator."""
    ran.append("ran")
    yield 1


@returns
async def asynchronous_generator(ran: list[str]) -> AsyncIterator[int]:
    """Be an asynchronous generator."""
    ran.append("ran")
    yield 1


@returns
def awaitable(ran: list[str]) -> Awaitable[None]:
    """Be a task of the loop, which begins when the one that runs pauses; or of one to come."""
    try:
        return asyncio.get_running_loop().create_task(coroutine(ran))
    except RuntimeError:
        return Promise()


def test_body_that_is_returned_does_not_run(registered: Registered, key: str) -> None:
    """It is closed, the error says what to decorate, and the key is free again."""
    ran: list[str] = []
    lock = lock_of(registered, key)

    @lock
    def call(what: str) -> Any:
        return RETURNS[what](ran)

    @lock
    async def acall(what: str) -> Any:
        return RETURNS[what](ran)

    async def refused() -> None:
        for what in RETURNS:
            with pytest.raises(LockUsageError, match="acall returns"):
                await acall(what)
        # For what may have been begun.
        await asyncio.sleep(0)

    for what in RETURNS:
        with pytest.raises(LockUsageError, match=what.replace("_", " ")) as caught:
            call(what)
        assert "call returns" in str(caught.value)
    asyncio.run(refused())
    # A coroutine that nobody closed is told of here.
    gc.collect()
    assert ran == []
    assert grantable(lock)


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
            except (LockNotAcquired, BackendUnavailable):
                # Or a busy machine does not come to say who has it.
                continue
            granted += 1
        return granted

    granted = sum(each.result() for each in [Later(calls) for _ in range(8)])
    assert granted == ran[0] > 0
    assert overlaps[0] == 0
    assert grantable(lock_of(registered, key))
