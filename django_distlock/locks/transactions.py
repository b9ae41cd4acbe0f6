"""Lock keys until a transaction ends, on its own connection: see `transaction_lock`.

Such a lock is not a lease: it has no ttl, token or fence, and the database frees it with the commit
or the rollback. Leases on the same keys exclude it, and it excludes them.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from ..backends.base import BaseLockBackend
from ..core.bodies import whole
from ..core.clock import monotonic
from ..core.durations import Duration, wait_seconds, whole_number
from ..core.errors import (
    BackendUnavailable,
    InvalidArgument,
    LockNotAcquired,
    LockUsageError,
    shown,
)
from ..core.keys import Key, KeyTemplate, normalize_key
from ..core.pacing import Pacing
from ..core.records import InTheWay, KeysAsked
from ..database.connections import older_snapshot
from ..handler import lock_backends
from ..process import deferred_release
from ..process.transaction_locks import Kept, keep, kept_by
from . import blocks
from .attempts import BUSY_SECONDS, endless, refusal, unclear
from .owning import callers_level, callers_place
from .taking import UNSET, Unset

#: For how many seconds at a time a transaction that waits for a lease keeps others from the key.
KEPT_SECONDS = 0.5

P = ParamSpec("P")
T = TypeVar("T")


def transaction_lock(
    *keys: Key,
    shared: bool = False,
    wait: Duration | Unset | None = UNSET,
    using: str | None = None,
    backend: str = "default",
    parent: Key | None = None,
    escalate_at: int | None = None,
) -> None:
    """Lock keys until the open transaction ends: all of them, or none.

    The keys are sorted, so callers with the same keys never deadlock, in whatever order they name
    them. A rollback to a savepoint unlocks what was locked after that.

    Args:
        keys: The keys, as for `distlock`; each counts once.
        shared: Whether others may lock the same keys at the same time, if they are shared, too.
        wait: Seconds (or a `timedelta`) to keep trying; 0: one attempt; None: for ever; left out:
            the `WAIT` of the backend.
        using: The alias of the connection with the transaction; None: that of the lock tables.
        backend: An alias in `DISTLOCK`.
        parent: A key that stands for all of the keys, and is locked shared with them. Whoever locks
            it exclusively keeps out everybody who names it as a parent.
        escalate_at: If there are more keys than this, lock only the parent, and exclusively: one
            lock instead of thousands. At least 1; needs a `parent`.

    Raises:
        InvalidArgument: An argument breaks a rule. Nothing was touched.
        LockUsageError: No transaction is open on that connection, it reads from a snapshot, it
            keeps another key and `wait` is None, or the backend does not support this; the message
            says what to do.
        LockNotAcquired: Somebody else had one of the keys for all of `wait`; or, with the code
            `"deadlock"`, the database found a deadlock. None of the keys is locked, and the
            transaction can go on. (MariaDB, MySQL and SQLite unlock nothing before the end of the
            transaction. MariaDB and MySQL roll back the whole transaction at a deadlock, and with
            `innodb_rollback_on_timeout` after a wait in vain.)
        BackendUnavailable: The store is unavailable.
    """
    asked = _sorted(keys, shared=shared, parent=parent, escalate_at=escalate_at)
    store = lock_backends[backend]
    seconds = store.config.wait if isinstance(wait, Unset) else wait_seconds(wait)
    using = store.transactions.alias(using)
    connection = connections[using]
    if deferred_release.reads_a_snapshot(connection):
        raise older_snapshot(using)
    if asked:
        if seconds is None:
            names, home = [(store.alias, key) for key in asked], deferred_release.home()
            if (other := deferred_release.kept_beside(names, home)) is not None:
                raise endless(next(iter(asked)), other)
        kept = Kept(store.alias, asked, str(callers_place()))
        _warn_of_order(kept, list(kept_by(connection)))
        stays: set[str] = set()
        ask = partial(KeysAsked, keys=asked, tokens=_own(store, asked), using=using, stays=stays)
        try:
            _lock(store, ask, seconds)
        except (LockNotAcquired, BackendUnavailable):
            if stays and not connection.needs_rollback:
                left = {key: shared for key, shared in asked.items() if key in stays}
                keep(connection, replace(kept, keys=left), with_savepoints=False)
            raise
        keep(connection, kept, with_savepoints=connection.vendor == "postgresql")


async def atransaction_lock(*keys: Key, **how: Any) -> None:
    """See `transaction_lock`. The transaction is that of the thread that `sync_to_async` uses."""
    await sync_to_async(transaction_lock, thread_sensitive=True)(*keys, **how)


def transaction_locked(
    *templates: str,
    shared: bool = False,
    wait: Duration | Unset | None = UNSET,
    using: str | None = None,
    backend: str = "default",
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Open a transaction around each call of a function, and lock keys in it.

    Args:
        templates: Key templates, filled from the arguments: `"stock:{pk}"`.
        shared: See `transaction_lock`, also for the next three.

    Raises:
        InvalidArgument: A key is not a template of the function's parameters.
        LockUsageError: This is a class, or a function whose body runs after the call.
    """
    if not templates:
        raise InvalidArgument("transaction_locked() needs at least one key.")
    for each in templates:
        if not isinstance(each, str):
            raise InvalidArgument(
                f"transaction_locked got {shown(each)} as a key. Is it written without"
                " parentheses? Write @transaction_locked(…)."
            )
    if not isinstance(wait, Unset):
        wait_seconds(wait)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        function = whole(function)
        if inspect.iscoroutinefunction(function):
            raise LockUsageError(
                f"{function.__qualname__} is a coroutine function, and Django's transactions are"
                " synchronous. Decorate the function that it calls by sync_to_async().",
                code="unsupported",
            )
        filled = [KeyTemplate.for_function(each, function) for each in templates]

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            keys = [each.render(args, kwargs) for each in filled]
            alias = lock_backends[backend].transactions.alias(using)
            with transaction.atomic(using=alias):
                transaction_lock(*keys, shared=shared, wait=wait, using=alias, backend=backend)
                return function(*args, **kwargs)

        return wrapper

    return decorate


def _sorted(
    keys: Iterable[Key], *, shared: bool, parent: Key | None, escalate_at: int | None
) -> Mapping[str, bool]:
    """Return the keys to lock, in order, and whether each is shared."""
    if not isinstance(shared, bool):
        raise InvalidArgument(f"shared must be True or False, not {shown(shared)}.")
    if parent is None and escalate_at is not None:
        raise InvalidArgument("escalate_at requires parent, the key that stands for all keys.")
    if escalate_at is not None:
        whole_number(escalate_at, "escalate_at")
    asked = dict.fromkeys(sorted(map(normalize_key, keys)), shared)
    if parent is None:
        return asked
    parent = normalize_key(parent)
    if not asked:
        return {}
    if escalate_at is not None and len(asked) > escalate_at:
        return {parent: False}
    return dict(sorted({parent: True, **asked}.items()))


def _own(store: BaseLockBackend, keys: Iterable[str]) -> list[str]:
    """Return the tokens of the caller's leases on these keys, and of those that it still keeps."""
    tokens: list[str] = []
    if not (blocks.has_blocks() or deferred_release.has_waiting()):
        return tokens
    for key in keys:
        name = store.alias, key
        if (lease := blocks.holds(*name)) is not None:
            tokens.append(lease.token)
        tokens += [each.owner.token for each in deferred_release.waiting_releases(name)]
    return tokens


def _lock(store: BaseLockBackend, ask: Callable[..., KeysAsked], wait: float | None) -> None:
    """Make attempts until all keys are locked, or the time is over."""
    began = monotonic()
    deadline = math.inf if wait is None else began + wait
    pacing = Pacing(store.config.retry.pauses())
    while True:
        found = store.transactions.lock(ask(bound=max(0.0, deadline - monotonic())))
        if found is not None and _is_lease(found) and monotonic() < deadline:
            found = _keeping(store, ask, pacing, min(deadline, monotonic() + KEPT_SECONDS))
        if found is None:
            return
        now, step = monotonic(), pacing.step()
        # Where nobody is known to have the key, it may be an acquire that is under way.
        until = max(deadline, began + BUSY_SECONDS) if found.answer.is_unclear else deadline
        is_over = connections[ask(bound=0.0).using].needs_rollback
        if found.deadlock or is_over or now >= until or step is None:
            raise _error(store, found, wait, now - began)
        pacing.see(found.answer)
        pause = pacing.pause(found.answer, step, listening=False)
        time.sleep(max(0.0, min(pause, until - now)))


def _keeping(
    store: BaseLockBackend, ask: Callable[..., KeysAsked], pacing: Pacing, until: float
) -> InTheWay | None:
    """Make attempts while a lease is in the way, keeping the other keys locked meanwhile.

    Not for long: operators, and whoever takes a handed-over lease, need the key as well.
    """
    using = ask(bound=0.0).using
    with transaction.atomic(using=using):
        while True:
            left = max(0.0, until - monotonic())
            found = store.transactions.lock(ask(bound=left, keep=True))
            if found is None:
                return None
            step = pacing.step()
            if not _is_lease(found) or step is None or not left:
                # The rollback to the savepoint unlocks the keys.
                transaction.set_rollback(True, using=using)
                return found
            pacing.see(found.answer)
            pause = pacing.pause(found.answer, step, listening=False)
            time.sleep(min(pause, left))


def _is_lease(found: InTheWay) -> bool:
    """Whether a lease is in the way that can be waited for."""
    return found.answer.fence is not None and not found.deadlock


def _error(
    store: BaseLockBackend, found: InTheWay, wait: float | None, took: float
) -> LockNotAcquired | BackendUnavailable:
    if found.deadlock and not found.answer.paused:
        why = "the database found a deadlock. Lock all keys in one call, or in one order everywhere"
        if (holder := found.answer.holder) is not None:
            why = f"{holder.who} has it, and may wait for this transaction. Roll back, and retry"
        return LockNotAcquired(
            f"The key {found.key!r} was not locked: {why}.", key=found.key, code="deadlock"
        )
    if found.answer.is_unclear:
        return unclear(store, found.key, took)
    return refusal(found.key, 0 if found.deadlock else wait, found.answer)


def _warn_of_order(kept: Kept, before: list[Kept]) -> None:
    """Warn if a transaction locks a key that sorts before one that it has locked already."""
    held = {key: each for each in before if each.backend == kept.backend for key in each.keys}
    new = [key for key in kept.keys if key not in held]
    if not held or not new or min(new) > (last := max(held)):
        return
    warnings.warn(
        f"The transaction locks {min(new)!r} at {kept.site} behind {last!r}, which it has locked"
        f" at {held[last].site}. A transaction that locks them in the opposite order would"
        " deadlock with it. Lock all keys in one call, or in sorted order.",
        RuntimeWarning,
        stacklevel=callers_level(),
    )
