"""Locks: descriptions of what to hold, as context managers and decorators."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, ParamSpec, TypeVar, cast

from ..backends.base import BaseLockBackend
from ..core.bodies import whole
from ..core.declarations import Declaration, Kind, declared
from ..core.durations import MIN_TTL, Duration, seconds, ttl_seconds, wait_seconds
from ..core.errors import InvalidArgument, LockError, LockNotAcquired, LockUsageError, shown
from ..core.holders import validate_metadata
from ..core.keys import KeyTemplate, normalize_key
from ..core.retry import Retry
from ..handler import lock_backends
from ..process import deferred_release
from ..process.host import current_holder, monotonic
from . import blocks, context
from .acquire import aacquire, acquire
from .attempts import KeptHere, Request
from .blocks import Block, Leaving
from .lease import Lease
from .no_lease import NoLease, tell_bypassed
from .state import Terms

P = ParamSpec("P")
T = TypeVar("T")


def _leave(
    block: Block,
    lock: Lock,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    left, foreign = context.unbind(lock, block)
    if left is not None:
        if left.inner:
            left.lease.end_inner_block(exc)
        else:
            left.lease.end_block(exc)
        left.close()
    _raise_behind(foreign, exc)


def _aleave(
    block: Block,
    lock: Lock,
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> Coroutine[Any, Any, None]:
    left, foreign = context.unbind(lock, block)
    ending = _end_awaited(left, foreign, exc)
    if left is not None and not left.inner:
        # The statement lets go of what it has called, and keeps this until it is done.
        left.watch(ending)
    return ending


async def _end_awaited(
    left: Block | None, foreign: LockUsageError | None, exc: BaseException | None
) -> None:
    if left is not None:
        if left.inner:
            left.lease.end_inner_block(exc)
        else:
            await left.lease.aend_block(exc)
        left.close()
    _raise_behind(foreign, exc)


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
    heartbeat: bool = True
    hold: bool = False
    min_hold: float = 0.0
    reentrant: bool = False
    steal_if_dead: bool = False
    basic: bool = False
    on_conflict: Literal["raise", "run"] = "raise"
    retry: Retry | None = None
    max_lifetime: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if normalize_key(self.key) != self.key:
            raise InvalidArgument("The key of a Lock is in NFC; distlock() takes any spelling.")
        if not isinstance(self.backend, str):
            raise InvalidArgument(
                f"backend must be an alias in DISTLOCK, not {shown(self.backend)}."
            )
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise InvalidArgument(f"retry must be a Retry, not {shown(self.retry)}.")
        validate_metadata(self.metadata)
        self._check_times()
        self._check_modes()

    def _check_times(self) -> None:
        if self.ttl is not None:
            ttl_seconds(self.ttl)
        if not isinstance(self.wait, _Unset):
            wait_seconds(self.wait)
        seconds(self.min_hold, "min_hold")
        if self.max_lifetime is not None:
            self._check_lifetime(self.ttl)

    def _check_modes(self) -> None:
        for name in ("heartbeat", "hold", "reentrant", "steal_if_dead", "basic"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"{name} is True or False, not {shown(getattr(self, name))}.")
        if self.on_conflict not in ("raise", "run"):
            raise InvalidArgument(
                f'on_conflict is "raise" or "run", not {shown(self.on_conflict)}.'
            )
        if self.max_lifetime is not None and (self.basic or not self.heartbeat):
            raise InvalidArgument("max_lifetime is an end to renewals, and this lock has none.")
        if self.hold and self.min_hold:
            raise InvalidArgument("hold keeps the key for all of the ttl: leave min_hold out.")
        if self.hold and self.basic and self.ttl is None:
            raise InvalidArgument("hold keeps the key for the ttl: give a basic lock one.")

    def __bool__(self) -> NoReturn:
        """Raise: a description is neither true nor false."""
        raise LockUsageError(
            f"The lock on {self.key!r} is a description, and neither true nor false: the lease that"
            ' "with lock as lease" gives is true while it is held, and lock.locked() asks whether'
            " anybody holds the key.",
            key=self.key,
            code="unsupported",
        )

    def acquire(self) -> Lease:
        """Wait for the key and return a lease that no block is bound to: release it yourself.

        It takes `wait` and 5 s at most, and what a driver needs to open a connection.

        Raises:
            LockNotAcquired: Somebody else held it for all of `wait`.
            BackendUnavailable: The store did not answer until then, or too slowly.
            LockUsageError: The lock cannot be taken from here; the message says what to do.
        """
        return self._acquired(self._wait())

    async def aacquire(self) -> Lease:
        """See `acquire`."""
        return await self._aacquired(self._wait())

    def try_acquire(self) -> Lease | None:
        """Try once, and return a lease or None."""
        try:
            return self._acquired(0.0)
        except LockNotAcquired:
            return None

    async def atry_acquire(self) -> Lease | None:
        """See `try_acquire`."""
        try:
            return await self._aacquired(0.0)
        except LockNotAcquired:
            return None

    def locked(self) -> bool:
        """Return whether anybody holds the key now. It only reads."""
        # What this process has given up in a rollback is not held any more.
        deferred_release.flush((self.backend, self.key))
        return self._store.read(self.key) is not None

    async def alocked(self) -> bool:
        """See `locked`."""
        await deferred_release.aflush(self._store, (self.backend, self.key))
        return await self._store.threads.run(self._store.read, self.key) is not None

    def __enter__(self) -> Lease:
        block = context.enter(self, self.backend, self.key)
        try:
            again = self._entered_again(block)
            return self._enter(block) if again is None else again
        except LockError:
            context.drop(block)
            raise

    async def __aenter__(self) -> Lease:
        block = context.enter(self, self.backend, self.key)
        try:
            again = self._entered_again(block)
            return await self._aenter(block) if again is None else again
        except (LockError, asyncio.CancelledError):
            context.drop(block)
            raise

    if TYPE_CHECKING:

        def __exit__(
            self,
            exc_type: type[BaseException] | None,
            exc: BaseException | None,
            traceback: TracebackType | None,
        ) -> None: ...

        async def __aexit__(
            self,
            exc_type: type[BaseException] | None,
            exc: BaseException | None,
            traceback: TracebackType | None,
        ) -> None: ...

    else:
        __exit__ = Leaving(_leave)
        __aexit__ = Leaving(_aleave)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Hold the lock around each call of `function`, or around each await of it.

        Raises:
            InvalidArgument: The key is no template of the function's parameters.
            LockUsageError: A class; or its body would run when the call is over: a generator
                function, say. The call raises it where only what that returns tells.
        """
        function = whole(function)
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

        declared[wrapper] = (Declaration(Kind.FUNCTION, self.key, self, self.on_conflict),)
        return cast("Callable[P, T]", wrapper)

    @property
    def _store(self) -> BaseLockBackend:
        return lock_backends[self.backend]

    def _entered_again(self, block: Block) -> Lease | None:
        """Return what a block around this one holds, if this lock may enter it again."""
        around = context.holds(self.backend, self.key) if self.reentrant else None
        if around is None:
            context.refuse_reentry(self.backend, self.key)
        block.lease, block.inner = around, around is not None
        return around

    def _enter(self, block: Block) -> Lease:
        started_at = monotonic()
        try:
            lease = self._acquire(self._wait(), block)
        except LockNotAcquired as error:
            lease = self._bypass(error, monotonic() - started_at)
        lease.begin_block(heartbeat=self.heartbeat, block=block)
        return lease

    async def _aenter(self, block: Block) -> Lease:
        started_at = monotonic()
        try:
            lease = await self._aacquire(self._wait(), block)
        except LockNotAcquired as error:
            waited = monotonic() - started_at
            lease = await self._store.threads.run(self._bypass, error, waited)
        lease.begin_block(heartbeat=self.heartbeat, task=asyncio.current_task(), block=block)
        return lease

    def _bypass(self, error: LockNotAcquired, waited: float) -> Lease:
        """Return what stands for a lease where the block runs without; or raise the error."""
        if self.on_conflict == "raise":
            raise error
        tell_bypassed(self.backend, self.key, waited, error)
        return NoLease(self.backend, self.key)

    def _acquired(self, wait: float | None) -> Lease:
        block = Block(self)
        # What is watched over lies on the stack alone, where no traceback keeps it alive.
        return (block.watched(), self._taken(block, wait))[1]

    async def _aacquired(self, wait: float | None) -> Lease:
        block = Block(self)
        return (block.watched(), await self._ataken(block, wait))[1]

    def _taken(self, block: Block, wait: float | None) -> Lease:
        """Take the key for who asked by a call, and ends it by one."""
        try:
            lease = self._acquire(wait, block)
        except LockError:
            block.close()
            raise
        # The last step: no handler of a signal runs between here and the caller.
        del blocks.every[block]
        return lease

    async def _ataken(self, block: Block, wait: float | None) -> Lease:
        """See `_taken`."""
        try:
            lease = await self._aacquire(wait, block)
        except (LockError, asyncio.CancelledError):
            block.close()
            raise
        del blocks.every[block]
        return lease

    def _acquire(self, wait: float | None, block: Block) -> Lease:
        since = monotonic()
        name = block.name = self.backend, self.key
        terms = self._terms()
        _prepare()
        # What a rollback or an interruption has left must not be in the way of who comes next.
        blocks.flush(name)
        deferred_release.flush(name)
        request = self._request(terms, wait, since)
        adopted = context.adopt(*name, terms, wait, block)
        if adopted is not None:
            return adopted
        try:
            return Lease(self._store, acquire(self._store, request, block), terms, block)
        except KeptHere:
            # Meanwhile another block has left it to the transaction.
            return self._acquire(_left(wait, since), block)

    async def _aacquire(self, wait: float | None, block: Block) -> Lease:
        since = monotonic()
        name = block.name = self.backend, self.key
        terms = self._terms()
        _prepare()
        await blocks.aflush(self._store, name)
        await deferred_release.aflush(self._store, name)
        request = self._request(terms, wait, since)
        adopted = await context.aadopt(*name, terms, wait, block)
        if adopted is not None:
            return adopted
        try:
            return Lease(self._store, await aacquire(self._store, request, block), terms, block)
        except KeptHere:
            return await self._aacquire(_left(wait, since), block)

    def _wait(self) -> float | None:
        return self._store.config.wait if isinstance(self.wait, _Unset) else self.wait

    def _ttl(self) -> float | None:
        if self.basic and self.ttl is None:
            return None
        config = self._store.config
        ttl = config.ttl if self.ttl is None else self.ttl
        return ttl_seconds(ttl, maximum=config.max_ttl)

    def _terms(self) -> Terms:
        ttl, store = self._ttl(), self._store
        if self.max_lifetime is not None:
            self._check_lifetime(ttl)
        hold = (ttl or 0.0) if self.hold else self.min_hold
        if hold > store.config.max_ttl:
            raise InvalidArgument(
                f"min_hold is at most MAX_TTL ({store.config.max_ttl:g} s), not {hold:g}."
            )
        if hold and not store.supports_ttl:
            raise LockUsageError(
                f"The lock backend {self.backend!r} ({type(store).__name__}) cannot keep a key"
                " taken behind its holder: no lease of it ends by itself.",
                key=self.key,
                code="unsupported",
            )
        return Terms(
            ttl=ttl,
            holder=current_holder(self.metadata),
            retry=self.retry or store.config.retry,
            hold=hold,
            max_lifetime=self.max_lifetime,
            basic=self.basic,
        )

    def _request(self, terms: Terms, wait: float | None, since: float) -> Request:
        return Request(
            key=self.key,
            ttl=terms.ttl,
            wait=wait,
            holder=terms.holder,
            retry=terms.retry,
            since=since,
            steal_if_dead=self.steal_if_dead,
            home=deferred_release.home(),
            inside=context.entered_here(),
            passed=deferred_release.waiting_release((self.backend, self.key)),
        )

    def _check_lifetime(self, ttl: float | None) -> None:
        lifetime = seconds(self.max_lifetime, "max_lifetime", minimum=MIN_TTL)
        if ttl is not None and lifetime < ttl:
            raise InvalidArgument(
                f"max_lifetime ({lifetime:g} s) is below the ttl ({ttl:g} s), which nothing cuts"
                " short."
            )


def distlock(  # noqa: PLR0913 - each says one thing, by name
    key: str,
    *,
    ttl: Duration | None = None,
    wait: Duration | _Unset | None = UNSET,
    backend: str = "default",
    heartbeat: bool = True,
    hold: bool = False,
    min_hold: Duration = 0,
    reentrant: bool = False,
    steal_if_dead: bool = False,
    basic: bool = False,
    on_conflict: Literal["raise", "run"] = "raise",
    retry: Retry | None = None,
    max_lifetime: Duration | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Lock:
    """Describe a lock to hold around a block or a call.

    Args:
        key: What is locked: text of at most 512 bytes of UTF-8. For a decorator, a template.
        ttl: Seconds (or a `timedelta`) until the lease ends by itself, at least 0.1 and at most
            the `MAX_TTL` of the backend; None: its `TTL`, or no expiry if `basic`.
        wait: Seconds (or a `timedelta`) to keep trying; 0: one attempt; None: for ever, unless the
            transaction around it keeps another key until its end; left out: the `WAIT` of the
            backend. A slow store gets 5 s more for all that it is asked, connecting included.
        backend: An alias in `DISTLOCK`.
        heartbeat: Whether the lease of a block is renewed while the block runs.
        hold: Keep the key taken for all of the ttl, also when the work ends sooner: at most one
            run per window.
        min_hold: Seconds (or a `timedelta`) since the grant for which the key stays taken at
            least.
        reentrant: Whether a block inside of one that holds the key may enter again. It gets the
            same lease, which the outer block releases.
        steal_if_dead: Whether to take the key over at once where its holder is provably gone:
            a process of this machine that ended, or the same named worker before a restart.
        basic: No heartbeat, and with `ttl=None` no expiry: it ends by release or by an operator.
        on_conflict: What a block does that was not granted the key within `wait`. "raise":
            `LockNotAcquired`; "run": it runs without the lock, and its lease is not `held`.
        retry: Pauses between attempts; None: the `RETRY` of the backend.
        max_lifetime: Seconds (or a `timedelta`) since the grant until which the heartbeat renews
            the lease, at least the ttl; None: for as long as the block runs.
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
        heartbeat=heartbeat,
        hold=hold,
        min_hold=seconds(min_hold, "min_hold"),
        reentrant=reentrant,
        steal_if_dead=steal_if_dead,
        basic=basic,
        on_conflict=on_conflict,
        retry=retry,
        max_lifetime=None if max_lifetime is None else seconds(max_lifetime, "max_lifetime"),
        metadata=validate_metadata({} if metadata is None else metadata),
    )


def _raise_behind(error: LockUsageError | None, body: BaseException | None) -> None:
    """Raise `error`, unless the block has raised: its own exception is never hidden."""
    if error is None:
        return
    if body is None:
        raise error
    body.add_note(f"{type(error).__name__}: {error}")


def _left(wait: float | None, since: float) -> float | None:
    return None if wait is None else max(0.0, since + wait - monotonic())


def _prepare() -> None:
    deferred_release.refuse_manual_transactions()
    for connection in deferred_release.open_transactions():
        if deferred_release.reads_a_snapshot(connection):
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
