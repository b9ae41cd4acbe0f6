"""Locks, as context managers and decorators. Start reading here: `distlock()`.

A `Lock` is a description without state; each time it is acquired, the state is in a new `Lease`.
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
from ..core.keys import Key, KeyTemplate, normalize_key
from ..core.metadata import validate_metadata
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
        ttl: Seconds (or a `timedelta`) until the lease expires, at least 0.1 and at most the
            `MAX_TTL` of the backend (7 days); None: its `TTL` (30 s), or no expiry if `basic`.
        wait: Seconds (or a `timedelta`) to keep trying; 0: one attempt; None: for ever, unless the
            transaction around it keeps another key until its end; left out: the `WAIT` of the
            backend (5 s). A slow store gets 5 s more for all requests, connecting included.
        backend: An alias in `DISTLOCK`.
        heartbeat: Whether the lease of a block is renewed while the block runs.
        hold: Keep the key held for all of the ttl, even if the work ends sooner: at most one run
            per window.
        min_hold: Keep the key held for at least so many seconds (or a `timedelta`) from the grant.
        reentrant: Whether a block may be entered inside another one that holds the key. It gets the
            same lease, which the outer block releases.
        shared: Whether other shared leases may hold the key at the same time, any number of them.
        permits: How many may hold the key at once, 1 to 10,000. For a decorator, also a function of
            the call's arguments.
        steal_if_dead: Whether to take the key over at once if its holder is provably gone: an ended
            process of this machine, or the same named worker before a restart.
        basic: No heartbeat, and with `ttl=None` no expiry: it ends by release or by an operator.
        on_conflict: What happens if the key is not granted within `wait`. "raise":
            `LockNotAcquired`; "run": the block runs without a lease; "yield": it runs, and checks
            for itself whether it has a lease.
        on_lost: What happens at the end of a block whose lease was lost. "raise": `LockLost`, and
            asynchronous code is cancelled at the loss; "ignore": nothing, for a block that may
            outlive its lease. `check()`, the log, callbacks and the signal report the loss anyway.
        retry: Pauses between attempts; None: the `RETRY` of the backend.
        max_lifetime: Seconds (or a `timedelta`) from the grant after which the heartbeat no longer
            renews the lease, at least the ttl; None: it renews for as long as the block runs.
        metadata: Data to store with the holder's identity: JSON of at most 4096 bytes.

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
    """Which key to hold, for how long, and how long to wait for it. Made by `distlock()`.

    It has no state: threads may share it, and use it any number of times.

    As a context manager, sync or async, it gives the lease to the block and releases it at the end.
    It raises `LockLost` there if the block succeeded but the lease was lost (see `on_lost`). As a
    decorator it does so around each call, and its key is a template, filled from the arguments.
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
        """Raise `LockUsageError`: a description has no truth value."""
        raise LockUsageError(
            f'The lock on {self.key!r} is only a description and has no truth value. Use "with'
            ' lock as lease" and test the lease, or call lock.locked().',
            key=self.key,
            code="unsupported",
        )

    def acquire(self, *, heartbeat: bool = False) -> Lease:
        """Wait for the key, and return a lease without a block: release it yourself.

        It takes `wait` and 5 s at most, and the time that a driver needs to open a connection.

        Args:
            heartbeat: Renew the lease until it is released, by any thread. If the object is dropped
                without a release, the lease expires, and a `ResourceWarning` and the log say so.
                Without a heartbeat, the lease has `ttl` seconds, and more by `extend`.

        Raises:
            InvalidArgument: A heartbeat is asked for, and the lock is `basic`.
            LockNotAcquired: Somebody else held the key for all of `wait`.
            BackendUnavailable: The store is unavailable until then, or too slow.
            LockUsageError: The lock cannot be acquired here; the message says what to do.
        """
        return taking.by_call(self, self.wait, heartbeat=heartbeat)

    async def aacquire(self, *, heartbeat: bool = False) -> Lease:
        """See `acquire`."""
        return await taking.aby_call(self, self.wait, heartbeat=heartbeat)

    def try_acquire(self, *, heartbeat: bool = False) -> Lease | None:
        """Make one attempt, and return a lease or None; see `acquire`."""
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
        """Return whether anybody holds the key now, without acquiring it."""
        # A lease that a rollback has released may still be on its way to the store.
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

    _terms = taking.terms_of

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Hold the lock around each call of `function`, or around each await of it.

        Raises:
            InvalidArgument: The key is not a template of the function's parameters.
            LockUsageError: This is a class; `on_conflict="yield"`; or the body would run after the
                call, as that of a generator function does. If only the returned object shows that,
                the call raises it.
        """
        function = whole(function)
        template = KeyTemplate.for_function(checking.template(self), function)

        wrapper = checking.around(function, functools.partial(checking.for_call, self, template))
        declared[wrapper] = (Declaration(Kind.FUNCTION, self.key, self, self.on_conflict),)
        return wrapper
