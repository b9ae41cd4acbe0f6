"""Locks: descriptions of what to hold, as context managers and decorators."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, cast

from . import holding, transactions
from .backends.base import BaseLockBackend
from .core.durations import Duration, ttl_seconds, wait_seconds
from .core.errors import InvalidArgument, LockNotAcquired, LockUsageError, shown
from .core.holders import validate_metadata
from .core.keys import KeyTemplate, normalize_key
from .core.retry import Retry
from .handler import lock_backends
from .host import current_holder
from .leases import Lease
from .waiting import Granted, Request, aacquire, acquire

P = ParamSpec("P")
T = TypeVar("T")


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


#: Says that the setting decides, where None has a meaning of its own.
UNSET: Final = _Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What to hold, for how long, and how long to wait for it. Made by `distlock()`.

    Holds no state: it may be shared between threads and used as often as one likes. What one
    holding of it has is in the `Lease`.

    As a context manager, sync or async, it gives the lease, releases it behind the block, and
    raises `LockLost` there if the block succeeded but the lease had ended first. As a decorator it
    does so around each call, and its key is a template that is filled from the arguments.
    """

    key: str
    ttl: float | None = None
    wait: float | _Unset | None = UNSET
    backend: str = "default"
    retry: Retry | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if normalize_key(self.key) != self.key:
            raise InvalidArgument("The key of a Lock is in NFC; distlock() takes any spelling.")
        if self.ttl is not None:
            ttl_seconds(self.ttl)
        if not isinstance(self.wait, _Unset):
            wait_seconds(self.wait)
        if not isinstance(self.backend, str):
            raise InvalidArgument(
                f"backend must be an alias in DISTLOCK, not {shown(self.backend)}."
            )
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise InvalidArgument(f"retry must be a Retry, not {shown(self.retry)}.")
        validate_metadata(self.metadata)

    def acquire(self) -> Lease:
        """Wait for the key and return a lease that no block is bound to: release it yourself.

        Raises:
            LockNotAcquired: Somebody else held it for all of `wait`.
            BackendUnavailable: The store did not answer until then.
            LockUsageError: The lock cannot be taken from here; the message says what to do.
        """
        return self._acquire(self._wait())

    async def aacquire(self) -> Lease:
        """See `acquire`."""
        return await self._aacquire(self._wait())

    def try_acquire(self) -> Lease | None:
        """Try once, and return a lease or None."""
        try:
            return self._acquire(0.0)
        except LockNotAcquired:
            return None

    async def atry_acquire(self) -> Lease | None:
        """See `try_acquire`."""
        try:
            return await self._aacquire(0.0)
        except LockNotAcquired:
            return None

    def locked(self) -> bool:
        """Return whether anybody holds the key now. It only reads."""
        # What this process has given up in a rollback is not held any more.
        transactions.flush((self.backend, self.key))
        return self._store.read(self.key) is not None

    async def alocked(self) -> bool:
        """See `locked`."""
        await transactions.aflush(self._store, (self.backend, self.key))
        return await self._store.aread(self.key) is not None

    def __enter__(self) -> Lease:
        holding.refuse_reentry(self.backend, self.key)
        return holding.bind(self, self._acquire(self._wait()))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease, foreign = holding.unbind(self)
        if lease is not None:
            lease.end_block(exc)
        _raise_behind(foreign, exc)

    async def __aenter__(self) -> Lease:
        holding.refuse_reentry(self.backend, self.key)
        return holding.bind(self, await self._aacquire(self._wait()))

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease, foreign = holding.unbind(self)
        if lease is not None:
            await lease.aend_block(exc)
        _raise_behind(foreign, exc)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Hold the lock around each call of `function`, or around each await of it.

        Raises:
            InvalidArgument: The key is no template of the function's parameters.
            LockUsageError: A generator function: its body runs after the call has returned.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise LockUsageError(
                f"{function.__qualname__} is a generator: its body runs when the call is over and"
                " the lock released. Use a with block inside of it.",
                code="unsupported",
            )
        template = KeyTemplate.for_function(self.key, function)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with replace(self, key=template.render(args, kwargs)):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
                with replace(self, key=template.render(args, kwargs)):
                    return function(*args, **kwargs)

        return cast("Callable[P, T]", wrapper)

    @property
    def _store(self) -> BaseLockBackend:
        return lock_backends[self.backend]

    def _acquire(self, wait: float | None) -> Lease:
        _prepare()
        # What a rollback has given up must not be in the way of who comes next.
        transactions.flush((self.backend, self.key))
        adopted = holding.adopt(self.backend, self.key, self._ttl(), wait)
        if adopted is not None:
            return adopted
        request = self._request(wait)
        return self._lease(acquire(self._store, request), request)

    async def _aacquire(self, wait: float | None) -> Lease:
        _prepare()
        await transactions.aflush(self._store, (self.backend, self.key))
        adopted = await holding.aadopt(self.backend, self.key, self._ttl(), wait)
        if adopted is not None:
            return adopted
        request = self._request(wait)
        return self._lease(await aacquire(self._store, request), request)

    def _wait(self) -> float | None:
        return self._store.config.wait if isinstance(self.wait, _Unset) else self.wait

    def _ttl(self) -> float:
        config = self._store.config
        ttl = config.ttl if self.ttl is None else self.ttl
        return ttl_seconds(ttl, maximum=config.max_ttl)

    def _request(self, wait: float | None) -> Request:
        return Request(
            key=self.key,
            ttl=self._ttl(),
            wait=wait,
            holder=current_holder(self.metadata),
            retry=self.retry or self._store.config.retry,
        )

    def _lease(self, granted: Granted, request: Request) -> Lease:
        return Lease(
            self._store, granted, ttl=request.ttl, holder=request.holder, retry=request.retry
        )


def distlock(
    key: str,
    *,
    ttl: Duration | None = None,
    wait: Duration | _Unset | None = UNSET,
    backend: str = "default",
    retry: Retry | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Lock:
    """Describe a lock to hold around a block or a call.

    Args:
        key: What is locked: text of at most 512 bytes of UTF-8. For a decorator, a template.
        ttl: Seconds (or a `timedelta`) until the lease ends by itself, at least 0.1 and at most
            the `MAX_TTL` of the backend; None: its `TTL`.
        wait: Seconds (or a `timedelta`) to keep trying; 0: one attempt; None: for ever; left out:
            the `WAIT` of the backend.
        backend: An alias in `DISTLOCK`.
        retry: Pauses between attempts; None: the `RETRY` of the backend.
        metadata: What to keep beside the holder's identity: a user, a reason. JSON, at most 4096
            bytes.

    Raises:
        InvalidArgument: An argument breaks a rule. Nothing was touched.
    """
    return Lock(
        key=normalize_key(key),
        ttl=None if ttl is None else ttl_seconds(ttl),
        wait=UNSET if isinstance(wait, _Unset) else wait_seconds(wait),
        backend=backend,
        retry=retry,
        metadata=validate_metadata(metadata or {}),
    )


def _raise_behind(error: LockUsageError | None, body: BaseException | None) -> None:
    """Raise `error`, unless the block has raised: its own exception is never hidden."""
    if error is None:
        return
    if body is None:
        raise error
    body.add_note(f"{type(error).__name__}: {error}")


def _prepare() -> None:
    transactions.refuse_manual_transactions()
    for connection in transactions.open_transactions():
        if transactions.reads_a_snapshot(connection):
            warnings.warn(
                f"The transaction on {connection.alias!r} reads from a snapshot that may be older"
                " than the lock taken inside of it: what the holder before wrote may not be seen."
                " Take the lock outside of atomic(), or use READ COMMITTED.",
                RuntimeWarning,
                stacklevel=_callers_level(),
            )


def _callers_level() -> int:
    """Return the `stacklevel` of the code that uses this package, so that it is warned once."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        level, frame = level + 1, frame.f_back
    return level
