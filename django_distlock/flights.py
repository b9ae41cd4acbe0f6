"""Values that one caller computes, while others wait for the result or use the stale value.

A flight is what one caller of a process does to get a value: it acquires the lock and computes, or
waits for another process that computes. The other callers of its process wait for the flight. So a
process calls the store once for each value, however many threads and tasks want it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import (
    Any,
    Final,
    Literal,
    ParamSpec,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)
from uuid import uuid4
from weakref import ref

from django.core.cache import caches

from .core.bodies import whole
from .core.clock import monotonic
from .core.declarations import Declaration, Kind, declared
from .core.durations import Duration, seconds
from .core.errors import (
    BackendUnavailable,
    InvalidArgument,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    shown,
)
from .core.interruptions import pass_on
from .core.keys import OWN_MARKER, KeyTemplate, key_hash, own_key
from .core.logs import log_fields
from .core.threads import Bell, in_child
from .handler import lock_backends
from .locks.lease import Lease
from .locks.lock import Lock, distlock
from .locks.no_lease import tell_bypassed
from .locks.policy import Refusal, aattempt, attempt, choice

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger("django_distlock")

#: The default of the seconds to wait for a result.
WAIT: Final = 10.0
#: Seconds for which the cache keeps an error, or those of `wait`, if that is longer.
FAILED_FOR: Final = 60.0
#: The shortest time in a cache: some of them count in whole seconds.
SHORTEST: Final = 1.0

_NOTHING: Final[Any] = object()


class How(TypedDict, total=False):
    """The arguments of `single_flight`, which describes them."""

    timeout: Required[Duration | None]
    stale: Duration
    cache: str
    on_error: Literal["raise", "compute", "stale"]
    on_conflict: Literal["raise", "run"]
    wait: Duration
    ttl: Duration | None
    backend: str


@overload
def single_flight(key: str, compute: Callable[[], T], **how: Unpack[How]) -> T: ...


@overload
def single_flight(key: str, **how: Unpack[How]) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def single_flight(key: str, compute: Callable[[], Any] | None = None, **how: Unpack[How]) -> Any:
    """Return a value from Django's cache; if it is not there, compute it once for all callers.

    One caller computes under a lock, and the others wait for its result. Without `compute`, this is
    a decorator of a function, or of a coroutine function, whose result is the value.

    The cache has the value under `key`; after `cache.delete(key)` it is computed again. It can be
    any value that the cache can keep, None included. `compute` runs in the caller's transaction, if
    there is one; the lock is released before that ends.

    If the lock store is unavailable, each process computes the value once, without the lock. That
    is logged (`flight_without_lock`) and reported by the signal `lock_bypassed`.

    Args:
        key: The key in the cache and of the lock; for a decorator, a template of the parameters.
        compute: Returns the value.
        timeout: Seconds (or a `timedelta`) that the value is fresh, at least 1; None: for ever.
        stale: Seconds (or a `timedelta`) after `timeout` for which callers get the stale value
            while one computes it again, at least 1; 0: they wait.
        cache: An alias in `CACHES`.
        on_error: What happens if `compute` raises. "raise": waiting callers get the error, too, or
            a `LockError` if it cannot be pickled; "compute": they compute one after the other;
            "stale": the computing one gets the stale value, if any, and the error is logged.
        on_conflict: What happens after `wait`. "raise": `LockNotAcquired`; "run": the value is
            computed without the lock.
        wait: Seconds (or a `timedelta`) to wait for a result.
        ttl: Seconds (or a `timedelta`) of the lock's lease; None: the `TTL` of the backend. If a
            process dies while it computes, others wait for it that long, and a second.
        backend: An alias in `DISTLOCK`.

    Raises:
        InvalidArgument: An argument breaks a rule.
        LockNotAcquired: Another caller computed for all of `wait`.
        LockUsageError: `compute` requests the same key; or it is asynchronous.
    """
    if callable(key):
        raise InvalidArgument(
            f"single_flight got {shown(key)} as its key. Is it written without parentheses?"
            " Write @single_flight(…)."
        )
    if compute is not None and not callable(compute):
        raise InvalidArgument(f"compute must be a function, not {shown(compute)}.")
    plan = _Plan.of(key, **how)
    if compute is None:
        return plan.decorate
    return _Calls.done(plan.get(_Calls(), plan.lock.key, compute))


async def asingle_flight(key: str, compute: Callable[[], Awaitable[T]], **how: Unpack[How]) -> T:
    """See `single_flight`. The cache is called in threads of the lock backend.

    Raises:
        LockLost: The lease ended first, and the computing task was cancelled.
    """
    plan = _Plan.of(key, **how)
    return cast("T", await plan.get(_Awaits(plan), plan.lock.key, compute))


@dataclass(frozen=True, slots=True)
class _Found:
    """An answer of the cache."""

    value: Any
    is_fresh: bool = True

    @property
    def is_there(self) -> bool:
        return self.value is not _NOTHING


class _Flight:
    """What one caller does for all callers of its process.

    It saves calls to the store, and decides nothing: the lock decides.
    """

    def __init__(self, backend: str, cache: str, key: str):
        # With the cache's own name of the key, which may contain the tenant.
        self.name = backend, cache, caches[cache].make_key(key)
        self.key = key
        #: The result, if the flight has landed: the first one counts.
        self.results: list[bytes | None] = []
        # No future, whose mutex may stay locked after an exception of a signal's handler.
        self.landed = Bell()
        #: Called when the flight lands.
        self.calls: list[Callable[[], object]] = []
        #: Whether any caller waits for the flight.
        self.is_awaited = False

    def land(self, value: Any = _NOTHING, error: Exception | None = None) -> None:
        """Give others the result, unless they have it; without one, they look for themselves."""
        if not self.results:
            self.leave()
            # Packed, so that each caller gets its own copy, as from a cache.
            told = self.is_awaited and (error is not None or value is not _NOTHING)
            self.results.append(_packed(value if error is None else None, error) if told else None)
        # Also if an earlier call was interrupted before this line.
        self.landed.ring()
        for call in list(self.calls):
            call()

    def leave(self) -> None:
        """Let the next caller begin a flight of its own."""
        if _flights.get(self.name) is self:
            _flights.pop(self.name, None)


#: The flights of this process, by backend, cache and the cache's name for the key.
_flights: Final[dict[tuple[str, str, str], _Flight]] = {}
in_child(_flights.clear)

#: The flights whose values this context computes.
_computed_for: Final[ContextVar[tuple[ref[_Flight], ...]]] = ContextVar(
    "distlock_computed_for", default=()
)


class _Stopped(Exception):
    """A `StopIteration` of the project's function: Python lets no coroutine raise one."""


class _Calls:
    """Runs the steps of a flight with plain calls: none of them waits for an event loop."""

    async def ask(self, step: Callable[..., R], *arguments: Any) -> R:
        return step(*arguments)

    async def call(self, compute: Callable[[], Any]) -> Any:
        try:
            return whole(compute, awaits=False)()
        except StopIteration as error:
            raise _Stopped(error) from error

    async def wait(self, flight: _Flight, patience: float) -> None:
        flight.landed.wait(patience)

    @asynccontextmanager
    async def attempt(self, lock: Lock) -> AsyncIterator[Lease | Refusal]:
        with attempt(lock) as answer:
            yield answer

    @staticmethod
    def done(steps: Coroutine[Any, Any, R]) -> R:
        """Run the steps to their end without a pause."""
        try:
            steps.send(None)
        except StopIteration as end:
            return cast("R", end.value)
        except _Stopped as stopped:
            error: StopIteration = stopped.args[0]
        else:
            raise AssertionError  # No step waits for an event loop.
        raise error


class _Awaits:
    """Runs the steps with awaits; caches and locks are called in threads of the lock backend."""

    def __init__(self, plan: _Plan):
        self._run, self._cache = lock_backends[plan.lock.backend].threads.run, plan.cache
        self.attempt: Callable[[Lock], AbstractAsyncContextManager[Lease | Refusal]] = aattempt

    async def ask(self, step: Callable[..., R], *arguments: Any) -> R:
        context, cache = copy_context(), self._cache

        def asked() -> R:
            # The cache may make keys of the caller's context variables. A client is for one thread.
            context.run(caches.__setitem__, cache, caches[cache])
            return context.run(step, *arguments)

        return await self._run(asked)

    async def call(self, compute: Callable[[], Awaitable[Any]]) -> Any:
        return await compute()

    async def wait(self, flight: _Flight, patience: float) -> None:
        loop, landed = asyncio.get_running_loop(), asyncio.Event()

        def call() -> None:
            with suppress(RuntimeError):  # The loop was closed.
                loop.call_soon_threadsafe(landed.set)

        flight.calls.append(call)
        if not flight.results:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await landed.wait()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The steps to get a value. They are written with awaits, which `_Calls` runs as calls."""

    lock: Lock
    timeout: float | None
    stale: float
    cache: str
    on_error: str
    on_conflict: str
    wait: float

    @classmethod
    def of(  # noqa: PLR0913 - each says one thing, by name
        cls,
        key: str,
        *,
        timeout: Duration | None,
        stale: Duration = 0,
        cache: str = "default",
        on_error: str = "raise",
        on_conflict: str = "raise",
        wait: Duration = WAIT,
        ttl: Duration | None = None,
        backend: str = "default",
    ) -> _Plan:
        """Return the plan for these arguments of `single_flight`."""
        choice("on_error", on_error, ("raise", "compute", "stale"))
        choice("on_conflict", on_conflict, ("raise", "run"))
        fresh = None if timeout is None else seconds(timeout, "timeout", minimum=SHORTEST)
        more = seconds(stale, "stale", minimum=SHORTEST) if stale else 0.0
        if more and fresh is None:
            raise InvalidArgument("A value with timeout=None is never stale. Remove stale.")
        if on_error == "stale" and not more:
            raise InvalidArgument(
                'on_error="stale" requires stale, the seconds for which a stale value is kept.'
            )
        lock = distlock(key, ttl=ttl, wait=0, backend=backend, steal_if_dead=True)
        return cls(lock, fresh, more, cache, on_error, on_conflict, seconds(wait, "wait"))

    def decorate(self, function: Callable[..., Any]) -> Any:
        """Return the wrapper that is called in place of a function."""
        body = whole(function)
        template = KeyTemplate.for_function(self.lock.key, body)
        # Its keys are filled: what looks like a field in them is text.
        plan = replace(self, lock=replace(self.lock, _filled=True))
        if inspect.iscoroutinefunction(body):

            @functools.wraps(body)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                call = functools.partial(body, *args, **kwargs)
                return await plan.get(_Awaits(plan), template.render(args, kwargs), call)

        else:

            @functools.wraps(body)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                call = functools.partial(body, *args, **kwargs)
                return _Calls.done(plan.get(_Calls(), template.render(args, kwargs), call))

        shown = f"{OWN_MARKER}flight:{self.lock.key}@{self.cache}"
        declared[wrapper] = (Declaration(Kind.FUNCTION, shown, self.lock, self.on_conflict),)
        return wrapper

    async def get(self, by: _Calls | _Awaits, key: str, compute: Callable[[], Any]) -> Any:
        """Return the value."""
        until = monotonic() + self.wait
        while not (found := await by.ask(self._look, key)).is_fresh:
            flight = _Flight(self.lock.backend, self.cache, key)
            try:
                first = _flights.setdefault(flight.name, flight)
                if first is flight:
                    return await self._lead(by, flight, found, compute, until)
                if found.is_there:
                    break
                self._join(first)
                await by.wait(first, max(0.0, until - monotonic()))
                if not first.results:
                    await by.ask(self._go_without, key, self._late(first), self.wait)
                    return await self._compute(by, flight, found, compute)
                if (answer := self._answer(first)) is not None:
                    return answer.value
            finally:
                flight.land()
        return found.value

    async def _lead(
        self,
        by: _Calls | _Awaits,
        flight: _Flight,
        found: _Found,
        compute: Callable[[], Any],
        until: float,
    ) -> Any:
        """Acquire the lock for this process, and compute, unless another process has done so."""
        known, _error = await by.ask(self._failure, flight.key)
        began, made = monotonic(), None
        # One attempt first: with a wait, an unavailable store would be tried for all of it.
        lock = replace(self.lock, key=self._lock_key(flight.key))
        try:
            async with AsyncExitStack() as stack:
                answer = await stack.enter_async_context(by.attempt(lock))
                if isinstance(answer, LockNotAcquired) and not found.is_there:
                    waiting = replace(lock, wait=max(0.0, until - monotonic()))
                    answer = await stack.enter_async_context(by.attempt(waiting))
                if isinstance(answer, Lease):
                    try:
                        made = await by.ask(self._made_by_others, flight, known) or _Found(
                            await self._compute(by, flight, found, compute, answer)
                        )
                    finally:
                        # Now, and not at the end of the caller's transaction.
                        await by.ask(answer._release.quietly)
                elif found.is_there and isinstance(answer, LockNotAcquired):
                    made = found
                else:
                    await by.ask(self._go_without, flight.key, answer, monotonic() - began)
                    made = _Found(await self._compute(by, flight, found, compute))
        except LockLost:
            if made is None:
                raise
        # If the lease was lost, another process may have computed the value, too.
        return made.value

    async def _compute(
        self,
        by: _Calls | _Awaits,
        flight: _Flight,
        found: _Found,
        compute: Callable[[], Any],
        lease: Lease | None = None,
    ) -> Any:
        # Not reset, because no caller waits for a flight that has landed.
        around = [each for each in _computed_for.get() if each() is not None]
        _computed_for.set((*around, ref(flight)))
        try:
            value = await by.call(compute)
        except Exception as error:
            # A time limit of this caller's task is no error of the value.
            pass_on(error)
            if not await by.ask(self._bears, flight, found, error):
                raise
            return found.value
        await by.ask(self._keep, flight, value, lease)
        return value

    # Steps

    def _look(self, key: str) -> _Found:
        if not self.stale:
            value = caches[self.cache].get(key, _NOTHING)
            return _Found(value, value is not _NOTHING)
        # The cache's clock decides, and not that of the writer or the reader.
        fresh = _name("fresh", key)
        there = caches[self.cache].get_many([key, fresh])
        return _Found(there.get(key, _NOTHING), {key, fresh} <= there.keys())

    def _failure(self, key: str) -> tuple[str | None, Exception | str]:
        """Return the number of the last error of a flight in any process, and the error."""
        number, error = caches[self.cache].get(_name("failed", key)) or (None, "")
        return number, error

    def _lock_key(self, key: str) -> str:
        return own_key(f"flight:{key}@{self.cache}")

    def _made_by_others(self, flight: _Flight, known: str | None) -> _Found | None:
        """Return the value that another process computed during the wait; None: none did.

        Its error is raised if `on_error` allows that, unless the number was `known` before.
        """
        found = self._look(flight.key)
        if not found.is_fresh:
            number, error = self._failure(flight.key)
            if number in (None, known) or self.on_error == "compute":
                return None
            if not (self.on_error == "stale" and found.is_there):
                if isinstance(error, str):
                    error = LockError(error, key=flight.key)
                flight.land(error=error)
                raise error
        flight.land(found.value)
        return found

    def _keep(self, flight: _Flight, value: Any, lease: Lease | None) -> None:
        """Keep a value, unless the lease was lost: then a later value may be in the cache."""
        if lease is None or lease.held:
            cache, key = caches[self.cache], flight.key
            cache.set(key, value, None if self.timeout is None else self.timeout + self.stale)
            if self.stale:
                cache.set(_name("fresh", key), True, self.timeout)
        flight.land(value)

    def _bears(self, flight: _Flight, found: _Found, error: Exception) -> bool:
        """Pass an error on to waiting callers; return whether the stale value replaces it."""
        passed = _portable(error, flight.key)
        flight.land(error=passed)
        text = _text(error, flight.key)
        try:
            try:
                self._keep_failure(flight.key, passed if type(passed) is type(error) else text)
            except TypeError:
                # A cache that writes JSON keeps no errors.
                self._keep_failure(flight.key, text)
        except Exception:
            # Caches have no common error class. The caller gets its own error; others compute.
            extra = log_fields("flight_error_lost", key=flight.key, error=error)
            logger.exception("The cache did not keep an error of %r", flight.key, extra=extra)
        if self.on_error != "stale" or not found.is_there:
            return False
        extra = log_fields("flight_failed", backend=self.lock.backend, key=flight.key, error=error)
        logger.error("%r stays stale: %s", flight.key, error, exc_info=error, extra=extra)
        return True

    def _keep_failure(self, key: str, told: Exception | str) -> None:
        kept_for = max(FAILED_FOR, self.wait)
        caches[self.cache].set(_name("failed", key), (uuid4().hex, told), kept_for)

    # In a caller that waits

    def _join(self, first: _Flight) -> None:
        if any(each() is first for each in _computed_for.get()):
            # A signal may have ended that computation: the next caller begins a flight.
            first.leave()
            raise LockUsageError(
                f"The function that computes {first.key!r} requests the same key, and would wait"
                " for itself.",
                key=first.key,
                code="reentrant",
            )
        first.is_awaited = True

    def _answer(self, first: _Flight) -> _Found | None:
        """Return the result of a flight; None: none, or an error that `on_error` ignores."""
        packed = first.results[0]
        if packed is None:
            return None
        value, error = pickle.loads(packed)  # noqa: S301 - packed by this process
        if error is None:
            return _Found(value)
        if self.on_error == "compute":
            return None
        raise error

    def _late(self, first: _Flight) -> LockNotAcquired:
        # The flight may have been interrupted: no other caller should join it.
        first.leave()
        return LockNotAcquired(
            f"{first.key!r} has been computed in this process for more than {self.wait:g} s.",
            key=first.key,
        )

    def _go_without(self, key: str, refusal: Refusal, waited: float) -> None:
        """Report that a value is computed without the lock; or raise the refusal."""
        if isinstance(refusal, BackendUnavailable):
            extra = log_fields("flight_without_lock", backend=self.lock.backend, error=refusal)
            logger.warning("%r is computed without its lock: %s", key, refusal, extra=extra)
        elif self.on_conflict == "raise":
            raise refusal
        tell_bypassed(self.lock.backend, self._lock_key(key), waited, refusal)


# Python's error about a missing or unknown argument contains this name.
vars(_Plan)["of"].__func__.__qualname__ = "single_flight"


def _name(what: str, key: str) -> str:
    """Return the name of an entry about a value, which every cache accepts as a key."""
    return f"distlock:{what}:{key_hash(key)}"


def _packed(value: Any, error: Exception | None) -> bytes | None:
    """Return a result, pickled for other callers; None: it cannot be pickled."""
    try:
        return pickle.dumps((value, error))
    except Exception:  # noqa: BLE001 - a value of the project may raise anything
        return None


def _portable(error: Exception, key: str) -> Exception:
    """Return an error that can be pickled: the error itself, or one that describes it."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - packed here
    except Exception:  # noqa: BLE001 - code of the project may raise anything
        copy = None
    if type(copy) is type(error):
        return error
    return LockError(_text(error, key), key=key)


def _text(error: Exception, key: str) -> str:
    return f"{key!r} was not computed: {type(error).__qualname__}: {error}"
