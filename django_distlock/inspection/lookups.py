"""One key, or one token, looked up without its raw value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, fields
from datetime import datetime
from functools import partial
from typing import Any

from ..backends.base import BaseLockBackend
from ..core.errors import InvalidArgument, shown
from ..core.holders import Holder
from ..core.keys import Key, normalize_key, stored_key
from ..core.records import Record, Waiting
from ..handler import lock_backends
from .held import hashed, token_hash


class _Raw:
    """A place for raw values that neither `vars()` nor a dataclass's tools look at."""

    __slots__ = ("_raw",)

    _raw: tuple[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockInfo(_Raw):
    """What may be known about a held key.

    Attributes:
        key_hash: 24 lower-case hex digits: HMAC-SHA256 of the key with the project's secret.
        token_hash: The same of the token; "": the store does not tell it.
        fence: The holder's fence.
        acquired_at: Since when, by the store's clock.
        expires_at: Until when; None: no expiry.
        renewed_at: When it was last extended, or granted.
        holder: Who holds it.
        waiters: Who has been waiting for it for more than a second, the first to come first.
    """

    key_hash: str
    token_hash: str
    fence: int
    acquired_at: datetime
    expires_at: datetime | None
    renewed_at: datetime
    holder: Holder
    waiters: tuple[Waiting, ...] = ()
    raw: InitVar[tuple[str, str] | None] = None

    def __post_init__(self, raw: tuple[str, str] | None) -> None:
        object.__setattr__(self, "_raw", raw)

    def __reduce__(self) -> Any:
        # Copies and pickles travel: they are without raw values.
        return partial(
            LockInfo, **{each.name: getattr(self, each.name) for each in fields(self)}
        ), ()

    @property
    def key(self) -> str | None:
        """The key, where it was asked for with `raw=True`."""
        return self._raw[0] if self._raw else None

    @property
    def token(self) -> str | None:
        """The token, where it was asked for with `raw=True`. A bearer secret."""
        return self._raw[1] if self._raw else None


def get_by_key(key: Key, *, backend: str = "default", raw: bool = False) -> LockInfo | None:
    """Return who holds `key`; None: nobody.

    Args:
        raw: Whether `key` and `token` can be read from the answer.
    """
    store = lock_backends[backend]
    return _info(store, store.read(stored_key(key)), raw=raw)


def held_keys(keys: Iterable[Key], *, backend: str = "default") -> dict[str, Holder]:
    """Return which of these keys are held, and by whom, in one query.

    For workers that prove by a lock that they live, say.

    Args:
        keys: Any number; on a cluster it is a query to each node, and in a database one for
            each thousand.

    Raises:
        InvalidArgument: A key breaks a rule.
        BackendUnavailable: The store is unavailable.
    """
    if isinstance(keys, str):
        raise InvalidArgument(f"keys must be several keys, not the text {shown(keys)}.")
    asked = [*dict.fromkeys(map(normalize_key, keys))]
    found = zip(asked, lock_backends[backend].records.of(asked), strict=True)
    return {key: record.holder for key, record in found if record is not None}


def get_by_token(token: str, *, backend: str = "default", raw: bool = False) -> LockInfo | None:
    """Return what `token` holds; None: nothing."""
    store = lock_backends[backend]
    return _info(store, store.read_token(token), raw=raw)


def owns(token: str, *, backend: str = "default") -> bool:
    """Return whether `token` holds a key now. For diagnosis: it may be over a moment later."""
    return lock_backends[backend].read_token(token) is not None


async def aowns(token: str, *, backend: str = "default") -> bool:
    """See `owns`."""
    store = lock_backends[backend]
    return await store.threads.run(store.read_token, token) is not None


def _info(store: BaseLockBackend, record: Record | None, *, raw: bool) -> LockInfo | None:
    if record is None:
        return None
    return LockInfo(
        key_hash=hashed(record.key),
        token_hash=token_hash(record.token),
        fence=record.fence,
        acquired_at=record.acquired_at,
        expires_at=record.expires_at,
        renewed_at=record.renewed_at,
        holder=record.holder,
        waiters=tuple(store.waiters.of(record.key)),
        raw=(record.key, record.token) if raw else None,
    )
