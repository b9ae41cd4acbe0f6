"""Validate the arguments of `distlock()`.

This needs no store. Rules that depend on settings are checked when a lock is acquired: see
`taking.terms_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from ..core.durations import seconds, ttl_seconds, wait_seconds
from ..core.errors import InvalidArgument, LockUsageError, shown
from ..core.keys import KeyTemplate, normalize_key
from ..core.metadata import validate_metadata
from ..core.retry import Retry
from ..core.sharing import validate_permits
from .taking import Unset, check_lifetime

if TYPE_CHECKING:
    from .lock import Lock

L = TypeVar("L", bound="Lock")
P = ParamSpec("P")
T = TypeVar("T")

#: Arguments of other packages, and what they are called here.
_ELSEWHERE: Final = {
    "timeout": "ttl (seconds until the lease expires) or wait (seconds to wait for the lock)",
    "blocking_timeout": "wait (seconds to wait for the lock)",
    "blocking": "wait=0 for one attempt",
    "expire": "ttl (seconds until the lease expires)",
    "using": "backend (an alias of DISTLOCK)",
}


def names_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Add a hint to the `TypeError` for an argument that other packages have."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError:
            for name in _ELSEWHERE.keys() & kwargs.keys():
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}. Use {_ELSEWHERE[name]}."
                ) from None
            raise

    return called


def check(lock: Lock) -> None:
    """Raise `InvalidArgument` for an argument that breaks a rule."""
    if normalize_key(lock.key) != lock.key:
        raise InvalidArgument("The key of a Lock must be in NFC. distlock() accepts any spelling.")
    if not isinstance(lock.backend, str):
        raise InvalidArgument(f"backend must be an alias in DISTLOCK, not {shown(lock.backend)}.")
    if lock.retry is not None and not isinstance(lock.retry, Retry):
        raise InvalidArgument(f"retry must be a Retry, not {shown(lock.retry)}.")
    if lock.metadata != {}:
        validate_metadata(lock.metadata)
    if lock.ttl is not None:
        ttl_seconds(lock.ttl)
    if not isinstance(lock.wait, Unset):
        wait_seconds(lock.wait)
    seconds(lock.min_hold, "min_hold")
    if lock.max_lifetime is not None:
        check_lifetime(lock, lock.ttl)
    _check_modes(lock)


def template(lock: Lock) -> str:
    """Return the key template of a decorator; refuse `on_conflict="yield"`, which needs a block."""
    if lock.on_conflict == "yield":
        raise LockUsageError(
            f'on_conflict="yield" lets a block decide whether it runs without {lock.key!r}, and a'
            ' function cannot. Use "raise", "run", or a block inside the function.',
            key=lock.key,
            code="unsupported",
        )
    return lock.key


def around(
    function: Callable[P, T], block: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> Callable[P, T]:
    """Wrap a function so that each call or await of it runs inside a `block` of its own."""
    if inspect.iscoroutinefunction(function):

        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            async with block(args, kwargs):
                return await function(*args, **kwargs)

        return cast("Callable[P, T]", wraps(function)(awaited))

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with block(args, kwargs):
            return function(*args, **kwargs)

    return called


def for_call(
    lock: L, key: str | KeyTemplate, args: Sequence[Any], kwargs: Mapping[str, Any], **more: Any
) -> L:
    """Return the lock for one call of a decorated function; `key`: a key, or its template."""
    if isinstance(key, KeyTemplate):
        key = key.render(args, kwargs)
    permits = lock.permits
    if callable(permits):
        permits = validate_permits(permits(*args, **kwargs))
    return replace(lock, key=key, permits=permits, _filled=True, **more)


def _check_sharing(lock: Lock) -> None:
    if not callable(lock.permits):
        validate_permits(lock.permits)
    if lock.shared and lock.permits != 1:
        raise InvalidArgument("shared allows any number of holders. Remove permits.")
    if lock.steal_if_dead and (lock.shared or lock.permits != 1):
        raise InvalidArgument(
            "steal_if_dead takes a key over from a single holder. It cannot be combined with"
            " shared or permits, where the lease of a dead holder expires after its ttl."
        )


def _check_modes(lock: Lock) -> None:
    for name in ("heartbeat", "hold", "reentrant", "shared", "steal_if_dead", "basic"):
        if not isinstance(getattr(lock, name), bool):
            raise InvalidArgument(
                f"{name} must be True or False, not {shown(getattr(lock, name))}."
            )
    if lock.on_conflict not in ("raise", "run", "yield"):
        raise InvalidArgument(
            f'on_conflict must be "raise", "run" or "yield", not {shown(lock.on_conflict)}.'
        )
    if lock.on_lost not in ("raise", "ignore"):
        raise InvalidArgument(f'on_lost must be "raise" or "ignore", not {shown(lock.on_lost)}.')
    _check_sharing(lock)
    if lock.max_lifetime is not None and (lock.basic or not lock.heartbeat):
        raise InvalidArgument(
            "max_lifetime limits renewals, and this lock is not renewed. Remove max_lifetime."
        )
    if lock.hold and lock.min_hold:
        raise InvalidArgument("hold keeps the key for the full ttl. Remove min_hold.")
    if lock.hold and lock.basic and lock.ttl is None:
        raise InvalidArgument("hold keeps the key for the ttl. Set a ttl for a basic lock.")
