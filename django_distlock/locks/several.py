"""Several keys at once, all or none: `distlock_all()`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from ..core.bodies import whole
from ..core.declarations import Declaration, Kind, declared
from ..core.durations import Duration
from ..core.errors import InvalidArgument, LockNotAcquired, LockUsageError
from ..core.keys import Key, KeyTemplate, normalize_key
from ..handler import lock_backends
from .blocks import Entered, Keeping, entered_by
from .checking import around, for_call
from .lease import Lease
from .lock import Lock, distlock
from .opening import Opening
from .taking import UNSET, Unset

P = ParamSpec("P")
T = TypeVar("T")


def distlock_all(
    *keys: Key, wait: Duration | Unset | None = UNSET, backend: str = "default", **how: Any
) -> LockSet:
    """Describe several locks to hold at the same time around a block or a call: all, or none.

    One request asks for all of them: one round trip on PostgreSQL and on a single Redis server. If
    a key is contended, that request takes nothing, and the keys are acquired one after the other in
    sorted order. So callers with the same keys never deadlock, in whatever order they name them.

    Args:
        keys: The keys, each counted once. For a decorator, templates.
        wait: Seconds (or a `timedelta`) to keep trying, for all of them together; 0: one attempt
            for each; None: for ever; left out: the `WAIT` of the backend.
        backend: An alias in `DISTLOCK`.
        how: Other arguments of `distlock`, except `on_conflict` and `reentrant`, for all keys.

    Raises:
        InvalidArgument: An argument breaks a rule, or there is no key. Nothing was touched.
    """
    if not keys:
        raise InvalidArgument("distlock_all() needs at least one key.")
    if left_out := {"on_conflict", "reentrant"} & how.keys():
        raise InvalidArgument(
            f"distlock_all() does not accept {' and no '.join(sorted(left_out))}."
        )
    return LockSet([distlock(key, wait=wait, backend=backend, **how) for key in keys])


class Leases(Mapping[str, Lease]):
    """The leases of several keys, by key, in the order in which they were granted.

    A lookup accepts any spelling of a key that `distlock` accepts, such as an int.
    """

    def __init__(self, leases: Iterable[Lease]):
        self._leases = {each.key: each for each in leases}

    def __getitem__(self, key: Key) -> Lease:
        return self._leases[normalize_key(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def __bool__(self) -> bool:
        return self.held

    @property
    def held(self) -> bool:
        """Whether all of them are held."""
        return all(each.held for each in self.values())

    def check(self) -> None:
        """Do nothing while all of them are held; see `Lease.check`."""
        for each in self.values():
            each.check()

    def extend(self, ttl: Duration | None = None) -> None:
        """Give each of them `ttl` seconds from now; see `Lease.extend`."""
        for each in self.values():
            each.extend(ttl)

    async def aextend(self, ttl: Duration | None = None) -> None:
        """See `extend`."""
        for each in self.values():
            await each.aextend(ttl)

    def release(self, *, strict: bool = False) -> bool:
        """Release all keys, the last one first, even after an error; see `Lease.release`."""
        released: list[bool] = []
        with ExitStack() as stack:
            for each in self.values():
                stack.callback(lambda lease: released.append(lease.release(strict=strict)), each)
        return all(released)

    async def arelease(self, *, strict: bool = False) -> bool:
        """See `release`."""
        released: list[bool] = []

        async def release(lease: Lease) -> None:
            released.append(await lease.arelease(strict=strict))

        async with AsyncExitStack() as stack:
            for each in self.values():
                stack.push_async_callback(release, each)
        return all(released)


def _leave(entered: Entered, locks: LockSet, *end: Any) -> bool | None:
    block = entered.left() or (locks._by_hand or entered).left()
    return None if block is None else block.__exit__(*end)


async def _aleave(entered: Entered, locks: LockSet, *end: Any) -> bool | None:
    block = entered.left() or (locks._by_hand or entered).left()
    return None if block is None else await block.__aexit__(*end)


class LockSet:
    """Several locks, to be held by one block at a time. Made by `distlock_all()`.

    As a context manager, sync or async, it gives `Leases` to the block, and releases them at its
    end. As a decorator it does so around each call, and the keys are templates.
    """

    def __init__(self, locks: Iterable[Lock]):
        by_key = {each.key: each for each in locks}
        self._locks = [by_key[key] for key in sorted(by_key)]
        # The blocks that have entered it or want to, first come, first served; and the one that was
        # entered without a `with` statement.
        self._users: list[weakref.ref[Entered]] = []
        self._by_hand: Entered | None = None

    def __repr__(self) -> str:
        return f"<LockSet {', '.join(repr(each.key) for each in self._locks)}>"

    def acquire(self, *, heartbeat: bool = False) -> Leases:
        """Acquire all keys without a block: see `Lock.acquire`."""
        taken: list[Lease] = []

        def give_back() -> None:
            if taken:
                Leases(taken).release()

        with ExitStack() as stack:
            stack.callback(give_back)
            leases = self._granted(taken, lambda lock: lock.acquire(heartbeat=heartbeat))
            stack.pop_all()
        return leases

    async def aacquire(self, *, heartbeat: bool = False) -> Leases:
        """See `acquire`."""
        taken: list[Lease] = []

        async def give_back() -> None:
            if taken:
                await Leases(taken).arelease()

        async with AsyncExitStack() as stack:
            stack.push_async_callback(give_back)
            leases = await self._agranted(taken, lambda lock: lock.aacquire(heartbeat=heartbeat))
            stack.pop_all()
        return leases

    def __enter__(self) -> Leases:
        opened = entered_by(self)
        entered = self._claimed(opened or Entered(), self._entered())
        try:
            leases: Leases = entered.block.__enter__()
        except Exception:
            entered.block = None
            raise
        if opened is None:
            self._by_hand = entered
        return leases

    async def __aenter__(self) -> Leases:
        opened = entered_by(self)
        entered = self._claimed(opened or Entered(), self._aentered())
        try:
            leases: Leases = await entered.block.__aenter__()
        except (Exception, asyncio.CancelledError):
            entered.block = None
            raise
        if opened is None:
            self._by_hand = entered
        return leases

    __exit__ = Keeping.by(_leave)
    __aexit__ = Keeping.by(_aleave)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Hold the locks around each call of `function`, or around each await of it."""
        function = whole(function)
        templates = [KeyTemplate.for_function(each.key, function) for each in self._locks]

        def filled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LockSet:
            each = zip(self._locks, templates, strict=True)
            return LockSet(for_call(lock, template, args, kwargs) for lock, template in each)

        wrapper = around(function, filled)
        declared[wrapper] = tuple(
            Declaration(Kind.FUNCTION, each.key, each, each.on_conflict) for each in self._locks
        )
        return wrapper

    @contextmanager
    def _entered(self) -> Iterator[Leases]:
        with ExitStack() as stack:
            yield self._granted([], stack.enter_context)

    def _granted(self, taken: list[Lease], take: Callable[[Lock], Lease]) -> Leases:
        """Acquire all of the locks, adding their leases to a list."""
        with self._opening(taken) as opening:
            if opening.asks:
                opening.ask()
            for lock in self._in_turn(opening):
                taken.append(take(lock))
                _require_all(taken)
            opening.complete()
        return Leases(taken)

    @asynccontextmanager
    async def _aentered(self) -> AsyncIterator[Leases]:
        async with AsyncExitStack() as stack:
            yield await self._agranted([], stack.enter_async_context)

    async def _agranted(
        self, taken: list[Lease], take: Callable[[Lock], Awaitable[Lease]]
    ) -> Leases:
        async with self._opening(taken) as opening:
            if opening.asks:
                await opening.backend.threads.run(opening.ask)
            for lock in self._in_turn(opening):
                taken.append(await take(lock))
                _require_all(taken)
            opening.complete()
        return Leases(taken)

    def _opening(self, taken: list[Lease]) -> Opening:
        store, wait = lock_backends[self._locks[0].backend], self._locks[0].wait
        seconds = store.config.wait if isinstance(wait, Unset) else wait
        return Opening(store, self._locks, seconds, taken)

    def _in_turn(self, opening: Opening) -> Iterator[Lock]:
        """Yield each lock with its part of the answer, and with the rest of the time for all."""
        # A key that was refused comes first, so that no other key is touched.
        for lock in sorted(self._locks, key=lambda each: each.key != opening.refused):
            left = opening.wait
            if left is not None:
                left = max(0.0, left - (opening.backend.monotonic() - opening.began))
            # While a key may still be refused, none is kept after a release: `Opening.complete`.
            yield replace(
                lock,
                wait=left,
                hold=False,
                min_hold=0.0,
                _answered=partial(opening.take, lock.key),
            )
            opening.leave_to_lease(lock.key)

    def _claimed(self, entered: Entered, block: Any) -> Entered:
        """Let `entered` use this object for a block; refuse that while another one does."""
        entered.block = block
        self._users.append(weakref.ref(entered))
        for user in list(self._users):
            if (other := user()) is entered:
                return entered
            if other is not None and other.block is not None:
                break
            with suppress(ValueError):
                self._users.remove(user)
        entered.block = None
        raise LockUsageError(
            f"{self!r} is already in use. Call distlock_all() for each block.",
            code="unsupported",
        )


def _require_all(taken: list[Lease]) -> None:
    """Raise `LockNotAcquired` if a lease has ended while later keys were waited for."""
    ended = next((each for each in taken if not each.held), None)
    if ended is not None:
        raise LockNotAcquired(
            f"Not all keys were granted: the lease of {ended.key!r} ended while {taken[-1].key!r}"
            " was waited for. Set a ttl that is longer than the wait.",
            key=ended.key,
        )
