"""Locks: what to hold, as a context manager and a decorator. Begin here: `distlock()`.

A `Lock` is a description without state; what one holding of it has is in a `Lease`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

from ..core.bodies import whole
from ..core.declarations import Declaration, Kind, declared
from ..core.durations import Duration, seconds, ttl_seconds, wait_seconds
from ..core.errors import LockNotAcquired, LockUsageError
from ..core.holders import validate_metadata
from ..core.keys import Key, KeyTemplate, normalize_key
from ..core.retry import Retry
from ..core.sharing import Permits
from ..handler import lock_backends
from ..process import deferred_release
from . import checking, taking
from .attempts import Answered
from .blocks import Leaving
from .lease import Lease
from .taking import UNSET, Unset

P = ParamSpec("P")
T = TypeVar("T")


@checking.names_arguments
def distlock(  # noqa: PLR0913 - each says one thing, by name
    key: Key,
    *,
    ttl: Duration | None = None,
    wait: Duration | Unset | None = UNSET,
    backend: str = "default",
    heartbeat: bool = True,
    hold: bool = False,
    min_hold: Duration = 0,
    reentrant: bool = False,
    shared: bool = False,
    permits: Permits = 1,
    steal_if_dead: bool = False,
    basic: bool = False,
    on_conflict: Literal["raise", "run", "yield"] = "raise",
    on_lost: Literal["raise", "ignore"] = "raise",
    retry: Retry | None = None,
    max_lifetime: Duration | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Lock:
    """Describe a lock to hold around a block or a call.

        with distlock("invoice:42", ttl=60, wait=5) as lease: ...

        @distlock("invoice:{invoice_id}")
        def send(invoice_id): ...

    Args:
        key: Text of at most 512 bytes of UTF-8, or an int: its digits. For a decorator, a template.
        ttl: Seconds (or a `timedelta`) until the lease ends by itself, at least 0.1 and at most
            the `MAX_TTL` of the backend (7 days); None: its `TTL` (30 s), or no expiry if `basic`.
        wait: Seconds (or a `timedelta`) to keep trying; 0: one attempt; None: for ever, unless the
            transaction around it keeps another key until its end; left out: the `WAIT` of the
            backend (5 s). A slow store gets 5 s more for all that it is asked, connecting included.
        backend: An alias in `DISTLOCK`.
        heartbeat: Whether the lease of a block is renewed while the block runs.
        hold: Keep the key held for all of the ttl, even if the work ends sooner: at most one run
            per window.
        min_hold: Seconds (or a `timedelta`) from the grant for which the key at least stays held.
        reentrant: Whether a block inside of one that holds the key may enter again. It gets the
            same lease, which the outer block releases.
        shared: Whether any number of shared leases may hold the key at once, or else one alone.
        permits: How many may hold the key at once, 1 to 10,000. Decorators: or what returns it.
        steal_if_dead: Whether to take the key over at once where its holder is provably gone:
            a process of this machine that ended, or the same named worker before a restart.
        basic: No heartbeat, and with `ttl=None` no expiry: it ends by release or by an operator.
        on_conflict: What a block does that was not granted the key within `wait`. "raise":
            `LockNotAcquired`; "run": it runs without; "yield": it runs to look at its lease.
        on_lost: What the end of a block does whose lease ended first. "raise": `LockLost`, and
            asynchronous code is cancelled before; "ignore": nothing, for a block that may outlive
            its lease. `check()`, the log, callbacks and the signal tell of the loss all the same.
        retry: Pauses between attempts; None: the `RETRY` of the backend.
        max_lifetime: Seconds (or a `timedelta`) since the grant until which the heartbeat renews
            the lease, at least the ttl; None: for as long as the block runs.
        metadata: What to keep beside the holder's identity: JSON of at most 4096 bytes.

    Raises:
        InvalidArgument: An argument breaks a rule. Nothing was touched.
    """
    return Lock(
        key=normalize_key(key),
        ttl=None if ttl is None else ttl_seconds(ttl),
        wait=UNSET if isinstance(wait, Unset) else wait_seconds(wait),
        backend=backend,
        heartbeat=heartbeat,
        hold=hold,
        min_hold=seconds(min_hold, "min_hold"),
        reentrant=reentrant,
        shared=shared,
        permits=permits,
        steal_if_dead=steal_if_dead,
        basic=basic,
        on_conflict=on_conflict,
        on_lost=on_lost,
        retry=retry,
        max_lifetime=None if max_lifetime is None else seconds(max_lifetime, "max_lifetime"),
        metadata={} if metadata is None else validate_metadata(metadata),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What to hold, for how long, and how long to wait for it. Made by `distlock()`.

    Holds no state: it may be shared between threads and used as often as one likes.

    As a context manager, sync or async, it gives the lease, releases it behind the block, and
    raises `LockLost` there if the block succeeded but the lease had ended first (see `on_lost`). As
    a decorator it does so around each call, and its key is a template that is filled from the
    arguments.
    """

    key: str
    ttl: float | None = None
    wait: float | Unset | None = UNSET
    backend: str = "default"
    heartbeat: bool = True
    hold: bool = False
    min_hold: float = 0.0
    reentrant: bool = False
    shared: bool = False
    permits: Permits = 1
    steal_if_dead: bool = False
    basic: bool = False
    on_conflict: Literal["raise", "run", "yield"] = "raise"
    on_lost: Literal["raise", "ignore"] = "raise"
    retry: Retry | None = None
    max_lifetime: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: Whether the key was made of a template; and see `Request.answered`.
    _filled: bool = field(default=False, repr=False, compare=False)
    _answered: Callable[[], Answered | None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        checking.check(self)

    def __bool__(self) -> NoReturn:
        """Raise: a description is neither true nor false."""
        raise LockUsageError(
            f'The lock on {self.key!r} is only a description and has no truth value. Use "with'
            ' lock as lease" and test the lease, or call lock.locked().',
            key=self.key,
            code="unsupported",
        )

    def acquire(self, *, heartbeat: bool = False) -> Lease:
        """Wait for the key and return a lease that no block is bound to: release it yourself.

        It takes `wait` and 5 s at most, and what a driver needs to open a connection.

        Args:
            heartbeat: Renew the lease until it is released, by any thread. One that is dropped
                instead, so that nobody can release it any more, expires: a `ResourceWarning` and
                the log say so. Without it the lease has `ttl` seconds, and what `extend` gives.

        Raises:
            InvalidArgument: A heartbeat is asked for, and the lock is `basic`.
            LockNotAcquired: Somebody else held it for all of `wait`.
            BackendUnavailable: The store is unavailable until then, or too slowly.
            LockUsageError: The lock cannot be taken from here; the message says what to do.
        """
        return taking.by_call(self, self.wait, heartbeat=heartbeat)

    async def aacquire(self, *, heartbeat: bool = False) -> Lease:
        """See `acquire`."""
        return await taking.aby_call(self, self.wait, heartbeat=heartbeat)

    def try_acquire(self, *, heartbeat: bool = False) -> Lease | None:
        """Try once, and return a lease or None; see `acquire`."""
        try:
            return taking.by_call(self, 0.0, heartbeat=heartbeat)
        except LockNotAcquired:
            return None

    async def atry_acquire(self, *, heartbeat: bool = False) -> Lease | None:
        """See `try_acquire`."""
        try:
            return await taking.aby_call(self, 0.0, heartbeat=heartbeat)
        except LockNotAcquired:
            return None

    def locked(self) -> bool:
        """Return whether anybody holds the key now. It only reads."""
        # What this process has given up in a rollback is not held any more.
        deferred_release.flush((self.backend, self.key))
        return lock_backends[self.backend].read(self.key) is not None

    async def alocked(self) -> bool:
        """See `locked`."""
        store = lock_backends[self.backend]
        await deferred_release.aflush(store, (self.backend, self.key))
        return await store.threads.run(store.read, self.key) is not None

    __enter__ = taking.enter
    __aenter__ = taking.aenter

    __exit__ = Leaving.by(taking.leave)
    __aexit__ = Leaving.by(taking.aleave)

    _terms = checking.terms_of

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Hold the lock around each call of `function`, or around each await of it.

        Raises:
            InvalidArgument: The key is no template of the function's parameters.
            LockUsageError: A class; `on_conflict="yield"`; or its body would run behind the call: a
                generator function, say. The call raises it where only what that returns tells.
        """
        function = whole(function)
        template = KeyTemplate.for_function(checking.template(self), function)

        wrapper = checking.around(function, functools.partial(checking.for_call, self, template))
        declared[wrapper] = (Declaration(Kind.FUNCTION, self.key, self, self.on_conflict),)
        return wrapper
