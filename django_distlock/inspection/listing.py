"""Lists held keys over all backends, page by page; and the keys that transactions have locked."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..backends.counts import overdue, tally
from ..core.documents import Document, by_name
from ..core.durations import LONGEST, Duration, number, seconds, whole_number
from ..core.errors import InvalidArgument, LockError, shown
from ..core.records import KeptKey, Record, Waits
from ..handler import lock_backends
from .held import HeldKey, State

#: The code of a failure that is about one record.
_UNREADABLE = "unreadable"
#: The most locks of a page.
MAX_LIMIT = 10_000
#: Locks that one query reads from a store if only some of them may be wanted.
_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Document):
    """A backend that could not be queried, or one of its records that cannot be read.

    Attributes:
        code: That of the error, such as `"service_unavailable"`; `"unsupported"`: it cannot list;
            `"misconfigured"`: its settings break a rule; `"unreadable"`: something else has written
            to the record of a key, and the rest of the backend is listed.
        key: The key of the record; "": the failure is about the backend.
    """

    backend: str
    code: str
    message: str
    key: str = ""

    @classmethod
    def of(cls, alias: str, error: LockError | ImproperlyConfigured, key: str = "") -> Failure:
        """Return the failure for an error of a backend."""
        code = error.code if isinstance(error, LockError) else "misconfigured"
        return cls(backend=alias, code=code, message=str(error), key=key)

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry: the key only if the failure is about one."""
        of_key = ("key",) if self.key or self.is_of_key else ()
        return by_name(self, "backend", "code", "message", *of_key)

    @property
    def is_of_key(self) -> bool:
        """Whether the failure is about one record, and the rest of its backend was listed."""
        return self.code == _UNREADABLE


@dataclass(frozen=True, slots=True)
class LockPage(Document):
    """A part of a listing.

    Attributes:
        locks: Held keys, by backend in the order of the settings.
        cursor: Where the next page starts; None: this was the last one.
        failures: Backends that this page should have shown and could not, and unreadable records
            of this page.
    """

    locks: tuple[HeldKey, ...]
    cursor: str | None = None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The filters that no store applies."""

    held_longer_than: float | None
    ends_within: float | None
    overdue: float | None
    states: frozenset[State] | None
    contains: str = ""

    @property
    def everything(self) -> bool:
        """Whether any lock is wanted."""
        return self == _Wanted(None, None, None, None)

    def may_fit(self, record: Record, now: datetime) -> bool:
        """Whether the key and the times of a lock pass, for which its record is enough."""
        least, soon, part = self.held_longer_than, self.ends_within, self.overdue
        return (
            self.contains in record.key
            and (least is None or (now - record.acquired_at).total_seconds() > least)
            and (soon is None or "ending_soon" in tally(record, now, soon))
            and (part is None or (overdue(record, now) or 0) > part)
        )

    def fits(self, lock: HeldKey) -> bool:
        """Whether the state of a lock passes."""
        return self.states is None or lock.state in self.states


def list_locks(  # noqa: PLR0913 - filters, each by its name
    *,
    backends: Collection[str] | None = None,
    prefix: str = "",
    contains: str = "",
    host: str | None = None,
    task_id: str | None = None,
    held_longer_than: Duration | None = None,
    ends_within: Duration | None = None,
    overdue: float | None = None,
    states: Collection[State] | None = None,
    cursor: str | None = None,
    limit: int = 100,
    waits: bool = False,
) -> LockPage:
    """Return a page of the held keys, on all backends that can list them.

    Two aliases of one store with the same key prefix both show the same keys.

    Args:
        backends: Aliases in `DISTLOCK`; None: all of them.
        prefix: What the keys start with.
        contains: A text anywhere in the keys. No store has an index for it: all keys that `prefix`
            leaves are read.
        host: Only what is held by this `Holder.host`.
        task_id: Only what is held by this `Holder.task_id`.
        held_longer_than: Only keys granted longer ago than this, by the store's clock. A page may
            then have fewer than `limit` locks without being the last one.
        ends_within: Only leases that expire within this, unless they are renewed. Pages may be
            short with this and the next two filters, too.
        overdue: Only leases whose last renewal is longer ago than this part of their ttl, from 0 to
            1: it is about 1/3 at most if the holder lives.
        states: Only keys in one of these states.
        cursor: The `cursor` of the page before, for the same `backends` and filters.
        limit: The size of the page, from 1 to 10 000.
        waits: Whether to count the waiters of each, with one more query to each backend.

    Raises:
        InvalidArgument: An argument breaks a rule, or the cursor is invalid.
        InvalidLockBackend: There is no such alias.
    """
    whole_number(limit, "limit", MAX_LIMIT)
    filters = {"prefix": prefix, "host": host, "task_id": task_id}
    wanted = _Wanted(
        None if held_longer_than is None else seconds(held_longer_than, "held_longer_than"),
        None if ends_within is None else seconds(ends_within, "ends_within", maximum=LONGEST),
        None if overdue is None else number(overdue, "overdue", minimum=0, maximum=1),
        None if states is None else _states(states),
        _part_of_key(contains),
    )
    page = _page(chosen(backends), cursor, wanted, filters, limit)
    return replace(page, locks=tuple(_with_waits(page.locks))) if waits else page


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLock(KeptKey, Document):
    """A key that a transaction has locked, or waits for.

    Attributes:
        backend: The alias of the backend that was queried.
        seconds: How long ago `since` was, by the store's clock.
        kind: `"transaction"`.
    """

    backend: str
    seconds: float | None
    kind: str = "transaction"

    @property
    def name(self) -> str:
        """The key, or its number, as people see it."""
        return self.key or f"number {self.number}"


@dataclass(frozen=True, slots=True)
class TransactionLocks(Document):
    """The keys that transactions have locked, or wait for.

    Attributes:
        transactions: By backend in the order of the settings, the longest one first.
        failures: Backends that could not be queried, or cannot list transaction locks.
    """

    transactions: tuple[TransactionLock, ...]
    failures: tuple[Failure, ...] = ()


def list_transactions(*, backends: Collection[str] | None = None) -> TransactionLocks:
    """Return which keys transactions have locked by `transaction_lock()`, or wait for.

    If several aliases of one database report a lock, it is listed once, with the alias that knows
    the key.

    Args:
        backends: Aliases in `DISTLOCK`; None: all that can list transaction locks.

    Raises:
        InvalidLockBackend: There is no such alias.
    """
    # Numbers differ between databases: they are hashes with a database's secret.
    found: dict[tuple[int, int], TransactionLock] = {}
    failures: list[Failure] = []
    for alias in chosen(backends):
        try:
            kept = lock_backends[alias].transactions.kept()
            now = lock_backends[alias].clock() if kept else None
        except (LockError, ImproperlyConfigured) as error:
            failures.append(Failure.of(alias, error))
            continue
        if kept is None and backends is not None:
            message = f"The lock backend {alias!r} cannot list transaction locks."
            failures.append(Failure(backend=alias, code="unsupported", message=message))
        for each in kept or ():
            before = found.get((each.number, each.session.pid))
            if before is None or not before.key:
                found[each.number, each.session.pid] = TransactionLock(
                    each.key, each.number, each.shared, each.waits, each.since, each.session,
                    backend=alias,
                    seconds=(now - each.since).total_seconds() if now and each.since else None,
                )  # fmt: skip
    return TransactionLocks(tuple(found.values()), tuple(failures))


def _page(
    aliases: tuple[str, ...],
    cursor: str | None,
    wanted: _Wanted,
    filters: dict[str, Any],
    limit: int,
) -> LockPage:
    locks: list[HeldKey] = []
    failures: list[Failure] = []
    for alias, start in _from(aliases, cursor):
        try:
            for found, spoiled, following in _pages(
                alias, start, wanted, filters, limit - len(locks)
            ):
                locks += found
                failures += spoiled
                if following is not None and locks:
                    return LockPage(tuple(locks), _packed(alias, following), tuple(failures))
        except InvalidArgument:
            raise
        except (LockError, ImproperlyConfigured) as error:
            failures.append(Failure.of(alias, error))
        if len(locks) == limit:
            return LockPage(tuple(locks), _behind(alias, aliases), tuple(failures))
    return LockPage(tuple(locks), None, tuple(failures))


def _states(states: Collection[str]) -> frozenset[State]:
    try:
        return frozenset(map(State, states))
    except (TypeError, ValueError):
        names = ", ".join(State)
        raise InvalidArgument(f"states must be some of {names}, not {shown(states)}.") from None


def _part_of_key(contains: object) -> str:
    if not isinstance(contains, str):
        raise InvalidArgument(f"contains must be a str, not {shown(contains)}.")
    return unicodedata.normalize("NFC", contains)


def _with_waits(locks: tuple[HeldKey, ...]) -> list[HeldKey]:
    """Count the waiters of locks at each backend; one that does not report them is left out."""
    found: dict[tuple[str, str], Waits] = {}
    for alias in dict.fromkeys(each.backend for each in locks):
        keys = [each.key for each in locks if each.backend == alias]
        with suppress(LockError):
            counted = lock_backends[alias].waiters.count(keys)
            found |= {(alias, key): waits for key, waits in zip(keys, counted, strict=True)}
    return [replace(each, waits=found.get((each.backend, each.key))) for each in locks]


def _pages(
    alias: str, start: str | None, wanted: _Wanted, filters: dict[str, Any], limit: int
) -> Iterator[tuple[list[HeldKey], list[Failure], str | None]]:
    """Yield held keys of a backend, unreadable records, and the cursor of the rest."""
    store = lock_backends[alias]
    size = limit if wanted.everything else max(limit, _LOOKED_AT)
    while True:
        page = store.list(cursor=start, limit=size, **filters)
        now = store.clock()
        found: list[HeldKey] = []
        for at, record in enumerate(page.records, 1):
            if wanted.may_fit(record, now) and wanted.fits(each := HeldKey.of(store, record, now)):
                found.append(each)
                if len(found) == limit and at < len(page.records):
                    # The rest is for the next page. Read fewer again, to get the store's cursor.
                    size = at
                    break
        else:
            spoiled = [
                Failure(backend=alias, code=_UNREADABLE, message=str(each.error), key=each.key)
                for each in page.unreadable
            ]
            yield found, spoiled, page.cursor
            if (start := page.cursor) is None:
                return
            size = limit if wanted.everything else max(limit, _LOOKED_AT)


def chosen(backends: Collection[str] | None) -> tuple[str, ...]:
    """Return these aliases in the order of the settings; None: all of them.

    Raises:
        InvalidArgument: `backends` is a single text.
        InvalidLockBackend: There is no such alias.
    """
    known = tuple(lock_backends)
    if backends is None:
        return known
    if isinstance(backends, str):
        raise InvalidArgument(f"backends must be several aliases, not {shown(backends)}.")
    for alias in backends:
        if alias not in known:
            _ = lock_backends[alias]  # It raises the error.
    return tuple(alias for alias in known if alias in backends)


def _from(aliases: tuple[str, ...], cursor: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the remaining backends, each with the cursor to start at."""
    alias, start = (None, None) if cursor is None else _unpacked(cursor, aliases)
    at = 0 if alias is None else aliases.index(alias)
    for each in aliases[at:]:
        yield each, start if each == alias else None


def _behind(alias: str, aliases: tuple[str, ...]) -> str | None:
    rest = aliases[aliases.index(alias) + 1 :]
    return _packed(rest[0], None) if rest else None


def _packed(alias: str, start: str | None) -> str:
    text = json.dumps([alias, start], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _unpacked(cursor: str, aliases: tuple[str, ...]) -> tuple[str, str | None]:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        alias, start = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        alias = start = None
    if alias not in aliases or not (start is None or isinstance(start, str)):
        raise InvalidArgument(
            f"cursor must be that of a page of the same listing, not {shown(cursor)}."
        )
    return alias, start
