"""All that is known about one key, or about the holder of one token."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, router, transaction
from django.utils.connection import ConnectionDoesNotExist

from ..backends.base import BaseLockBackend
from ..core.documents import Document, by_name, plain
from ..core.errors import InvalidArgument, LockError, LockUsageError, shown
from ..core.keys import Key, normalize_key, stored_key
from ..core.logs import log_fields
from ..core.records import Counter, Holder, Record, Session, Waiting
from ..handler import lock_backends
from .held import HeldKey, hashed, token_hash
from .history import RELEASED, rare_kinds
from .summary import SOON

if TYPE_CHECKING:
    from ..models import LockEvent

#: The most events of a key that are shown, and the most releases.
EVENTS = 10
RELEASES = 30
#: The fields of an event in JSON.
_TOLD = ("at", "kind", "fence", "holder", "actor", "reason", "details")

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True)
class Link(Document):
    """A key that the holder before it waits for, and the holder of that key; None: not held now."""

    key: str
    holder: Holder | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    """What is known about a key, held or not.

    Attributes:
        backend: The alias of the backend that was queried.
        key_hash: The hash of the key, which logs have instead of it.
        held: The lock; of a shared key, the lock that is free last; None: the key is not held.
        sharing: The locks of all who share the key.
        expired: The lease that expired without a release; None: there is none, or the store has
            removed its record.
        counter: Its fence, and its pause; None: never granted, and not paused; see `knows_fence`.
        waiters: Those who have waited for more than a second, the first to come first; at most
            1000.
        guards: The sessions that keep the key from being granted; None: the store cannot tell.
        events: The latest events of the key, the last first; None: the table of events cannot be
            read from here.
        releases: The same of releases: see `DISTLOCK_HISTORY`. `events` has none of them.
        observed_at: The store's clock at the time of the reading.
    """

    backend: str
    key: str
    key_hash: str
    held: HeldKey | None
    sharing: tuple[HeldKey, ...]
    expired: HeldKey | None
    counter: Counter | None
    waiters: tuple[Waiting, ...]
    guards: tuple[Session, ...] | None
    events: tuple[LockEvent, ...] | None
    releases: tuple[LockEvent, ...] | None
    observed_at: datetime

    @property
    def fence(self) -> int:
        """The last fence that was granted; 0: none."""
        return 0 if self.counter is None else self.counter.fence

    @property
    def knows_fence(self) -> bool:
        """Whether the backend can tell the fence of a key that is not held."""
        return type(lock_backends[self.backend])._counter is not BaseLockBackend._counter

    @property
    def paused_until(self) -> datetime | None:
        """Until when the key is granted to nobody; None: it is not paused."""
        return None if self.counter is None else self.counter.paused_until

    def chain(self) -> tuple[Link, ...]:
        """Return the key that the holder waits for, then the key that its holder waits for, etc.

        Only the keys with the most waiters are searched. The chain ends if a key comes again, or
        the store does not answer. The coroutines of an event loop count as one holder.
        """
        found: list[Link] = []
        with suppress(LockError):  # All else is already known.
            if self.held is not None:
                found.extend(_chain(lock_backends[self.backend], self.key, self.held.holder))
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry: times as ISO 8601 in UTC, durations in seconds."""
        return {
            **by_name(
                self, "backend", "key", "key_hash", "held", "expired", "fence", "paused_until"
            ),
            "sharing": plain(self.sharing),
            "paused_by": None if self.counter is None else self.counter.paused_by,
            "waiters": [{**plain(each), "is_retrying": each.is_retrying} for each in self.waiters],
            "guards": plain(self.guards),
            "chain": plain(self.chain()),
            "events": _told(self.events),
            "releases": _told(self.releases),
            **by_name(self, "observed_at"),
        }


def show(key: str, backend: str = "default") -> KeyView:
    """Return all that is known about a key. This only reads.

    Raises:
        InvalidArgument: The key breaks a rule.
        InvalidLockBackend: There is no such backend.
        BackendUnavailable: The store is unavailable.
    """
    view = show_present(key, backend)
    events = _latest(view.backend, view.key, EVENTS, rare_kinds())
    # Do not wait twice for a database that does not answer.
    if events is not None:
        view = replace(
            view, events=events, releases=_latest(view.backend, view.key, RELEASES, [RELEASED])
        )
    return view


def show_present(key: str, backend: str = "default") -> KeyView:
    """Return what the store knows about a key, without past events: see `show`.

    Events may be in another database, which may be down.
    """
    key, store = stored_key(key), lock_backends[backend]
    record = store.read(key)
    sharing = store.records.sharing(key) if record is not None and record.shared else ()
    now = store.clock()
    waiters = tuple(store.waiters.of(key))
    held = None if record is None else HeldKey.of(store, record, now)
    over = [HeldKey.of(store, each, now) for each in store.expired(key, limit=1)]
    return KeyView(
        backend=store.alias,
        key=key,
        key_hash=hashed(key),
        held=held and replace(held, waits=store.waiters.count([key])[0]),
        sharing=tuple(HeldKey.of(store, each, now) for each in sharing),
        expired=over[0] if over else None,
        counter=_counter(store, key),
        waiters=waiters,
        guards=store.guards.sessions(key),
        events=None,
        releases=None,
        observed_at=now,
    )


class _Raw:
    """A slot for raw values that neither `vars()` nor a dataclass's tools show."""

    __slots__ = ("_raw",)

    _raw: tuple[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockInfo(_Raw):
    """What may be known about a held key.

    Attributes:
        key_hash: 24 lower-case hex digits: HMAC-SHA256 of the key with the project's secret.
        token_hash: The same of the token; "": the store does not report it.
        acquired_at: When the key was granted, by the store's clock.
        expires_at: When the lease expires; None: no expiry.
        renewed_at: When the lease was last extended, or granted.
        waiters: Those who have waited for more than a second, the first to come first.
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
        # Copies and pickles may leave the process, so they have no raw values.
        return partial(
            LockInfo, **{each.name: getattr(self, each.name) for each in fields(self)}
        ), ()

    @property
    def key(self) -> str | None:
        """The key, if it was requested with `raw=True`."""
        return self._raw[0] if self._raw else None

    @property
    def token(self) -> str | None:
        """The token, if it was requested with `raw=True`. It is a bearer secret."""
        return self._raw[1] if self._raw else None


def get_by_key(key: Key, *, backend: str = "default", raw: bool = False) -> LockInfo | None:
    """Return the lock on `key`; None: it is not held.

    Args:
        raw: Whether `key` and `token` can be read from the result.
    """
    store = lock_backends[backend]
    return _info(store, store.read(stored_key(key)), raw=raw)


def held_keys(keys: Iterable[Key], *, backend: str = "default") -> dict[str, Holder]:
    """Return those of these keys that are held, with their holders, in one query.

    An example is workers that prove by a lock that they live.

    Args:
        keys: Any number. On a cluster, each node gets a query; a database gets one for each
            thousand.

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
    """Return the lock that `token` holds; None: none."""
    store = lock_backends[backend]
    return _info(store, store.read_token(token), raw=raw)


def owns(token: str, *, backend: str = "default") -> bool:
    """Return whether `token` holds a key now. For diagnosis: that may end a moment later."""
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


def expired_locks(backend: str = "default", *, limit: int = 100) -> tuple[HeldKey, ...]:
    """Return leases that expired without a release: see `KeyView.expired`.

    The last to expire comes first. If its holder lives, it may still work without its lock.

    Args:
        limit: The most leases to return, from 1 to 10 000.

    Raises:
        InvalidLockBackend: There is no such backend.
        BackendUnavailable: The store is unavailable.
    """
    store = lock_backends[backend]
    found = store.expired(limit=limit)
    now = store.clock()
    return tuple(HeldKey.of(store, each, now) for each in found)


def _chain(store: BaseLockBackend, key: str, holder: Holder | None) -> Iterator[Link]:
    if not store.supports_listing or type(store)._states is BaseLockBackend._states:
        return  # The store does not count waiters.
    waited = [each for each, _number in store.states(SOON)[1].most_waited if each != key]
    waiters = {each: [waiting.holder for waiting in store.waiters.of(each)] for each in waited}
    seen = {key}
    while holder is not None:
        found = (each for each in waited if any(map(holder.is_caller, waiters[each])))
        if (following := next(found, None)) is None or following in seen:
            return
        seen.add(following)
        record = store.read(following)
        holder = None if record is None else record.holder
        yield Link(following, holder)


def _counter(store: BaseLockBackend, key: str) -> Counter | None:
    # A third-party backend need not know the fence of a key that is not held.
    with suppress(LockUsageError):
        return store.counter(key)
    return None


def _told(events: tuple[LockEvent, ...] | None) -> list[dict[str, Any]] | None:
    return None if events is None else [by_name(each, *_TOLD) for each in events]


def _latest(alias: str, key: str, number: int, kinds: list[str]) -> tuple[LockEvent, ...] | None:
    model: type[LockEvent] = apps.get_model("django_distlock", "LockEvent")
    try:
        using = router.db_for_read(model)
        # In a block of its own, so that an error leaves the caller's transaction as it was.
        with transaction.atomic(using=using):
            rows = model.objects.using(using).filter(backend=alias, key=key, kind__in=kinds)
            return tuple(rows.order_by("-at", "-pk")[:number])
    except ImproperlyConfigured:
        return ()  # The project has no database, so it keeps no events.
    except (Error, ConnectionDoesNotExist) as error:
        extra = log_fields("events_unread", backend=alias, key=key)
        logger.warning("Lock events cannot be read: %s", error, extra=extra)
        return None
