"""The values that backends take and answer."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, Literal

from .durations import GRACE
from .errors import LockError
from .holders import Holder, Session
from .keys import place_name
from .secrets import Token

_GRACE: Final = timedelta(seconds=GRACE)

#: What is raised where a record is made of what somebody else has written in its place.
SPOILED: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def known_holder(data: Any) -> Holder:
    """Return the holder that a row tells of, or nobody where that was spoiled.

    Who holds a key decides nothing: it stays one that is released, granted again and operated.
    """
    try:
        return Holder.from_json(data)
    except SPOILED:
        return Holder()


class Unknown(enum.Enum):
    """The type of `UNKNOWN`."""

    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        return False


#: The store did not get to answer within the bound: the record stands as it did. False in a
#: condition, and not the same as None or False, which mean that the lease is gone.
UNKNOWN: Final = Unknown.UNKNOWN
#: What became of a lease that was given back: "wanted" says that somebody waits for its key.
Freed = Literal["released", "wanted", "gone"]


@dataclass(frozen=True, slots=True)
class Grant:
    """A key was granted, or its lease extended.

    Attributes:
        token: The proof of ownership. A bearer secret, so that no grant can be pickled.
        fence: At least 1; grows with each grant of the key. An extend leaves it as it is.
        ttl: Seconds from the grant, or from the extend, to `expires_at`; None: no expiry.
        acquired_at: When it was granted, by the store's clock.
        expires_at: When it ends, as stored; None: no expiry.
        stop_requested: An operator requested a stop.
        shared: Others may hold the key at the same time.
    """

    key: str
    token: str = field(repr=False)
    fence: int
    ttl: float | None
    acquired_at: datetime
    expires_at: datetime | None
    stop_requested: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        if type(self.token) is not Token:
            object.__setattr__(self, "token", Token(self.token))

    def renewed(
        self,
        ttl: float | None,
        fence: int,
        acquired_at: datetime,
        expires_at: datetime | None,
        stop_requested: bool,
    ) -> Grant:
        """Return the answer to an extend."""
        facts = self.key, self.token, fence, ttl, acquired_at, expires_at, stop_requested
        return Grant(*facts, self.shared)


@dataclass(slots=True)
class Attempt:
    """What a store is asked for, once: a key.

    Attributes:
        name: What the key is called in the store.
        ttl: Seconds that the lease lasts; None: no expiry.
        wanted: Mark the grant that is in the way, so that its end wakes whoever asks.
        replace: Grant also if this is the token of the grant that is in the way: see `may_replace`.
        bound: Seconds to wait inside the store.
        permits: How many may hold the key at the same time; None: any number.
    """

    name: str
    key: str
    token: str = field(repr=False)
    ttl: float | None
    holder: Holder
    wanted: bool
    replace: str | None = field(repr=False)
    bound: float
    permits: int | None = 1

    @property
    def shared(self) -> bool:
        """Whether others may hold the key at the same time."""
        return self.permits != 1

    @property
    def place(self) -> str:
        """What its lease is called in the store."""
        return self.name if self.permits == 1 else place_name(self.name, self.token)

    def may_replace(self, record: Record) -> bool:
        """Whether a live record is no obstacle.

        One that this very token has settled is: a question that is heard behind the end of its own
        work takes nothing.
        """
        if self.replace is None:
            return False
        is_own = record.token == self.token
        # Of a place it may have been granted already: see `in_the_way`.
        is_meant = record.token == self.replace or (self.shared and is_own)
        return is_meant and not (is_own and record.is_settled)

    def record(self, fence: int, now: datetime, before: Iterable[Record] = ()) -> Record:
        """Return what the store keeps where the key is granted with this fence.

        Args:
            before: What goes for it. A request to stop stays where the holder does, and where the
                lease is handed over, which settles it first. Whoever takes it from a dead holder
                was not asked.
        """
        expires_at, free_at = lease_ends(now, self.ttl)
        made = Record(
            self.key, self.token, fence, self.ttl, now, now, expires_at, free_at, self.holder,
            shared=self.permits != 1,
        )  # fmt: skip
        for each in before:
            is_passed_on = each.is_settled or each.holder == self.holder
            if each.stop_requested_at is not None and each.is_live(now) and is_passed_on:
                until = each.renewed_until
                return replace(
                    made,
                    expires_at=min(expires_at or until, until) if until else expires_at,
                    stop_requested_at=each.stop_requested_at,
                    renewed_until=until,
                )
        return made

    def grant(self, fence: int, now: datetime, expires_at: datetime | None) -> Grant:
        """Return the answer then."""
        shared = self.permits != 1
        return Grant(self.key, self.token, fence, self.ttl, now, expires_at, shared=shared)


@dataclass(frozen=True, slots=True)
class Contended:
    """The key was not granted. Any field may be None when busy.

    Attributes:
        acquired_at: Since when, by the store's clock.
        expires_at: Until when, if nobody extends; None: no expiry.
        free_at: From when on it may be granted to somebody else; None: no expiry.
        observed_at: The store's clock when it looked. Only the difference between two times of
            one store means anything to a client whose own clock may be wrong.
        busy: No answer within the bound: a transaction holds a row that decides. The waiters'
            flag could not be set, and a holder may not be known.
        guarded: A guarded transaction of a lease that is over keeps the key.
    """

    holder: Holder | None = None
    fence: int | None = None
    acquired_at: datetime | None = None
    expires_at: datetime | None = None
    free_at: datetime | None = None
    observed_at: datetime | None = None
    busy: bool = False
    paused: bool = False
    guarded: bool = False

    @property
    def is_unclear(self) -> bool:
        """Whether it says nothing about the key: somebody is in the way, and may be a stranger."""
        return self.busy and self.fence is None and not self.guarded

    @property
    def settled(self) -> bool:
        """Whether the holder is done, and the key is kept behind its run on purpose."""
        return self.expires_at is not None and self.expires_at == self.free_at

    @property
    def held_for(self) -> float | None:
        """Seconds since the grant, as the store saw it."""
        return _between(self.acquired_at, self.observed_at)

    @property
    def expires_in(self) -> float | None:
        """Seconds until the lease ends, as the store saw it; None: unknown, or no expiry."""
        return _between(self.observed_at, self.expires_at)

    @property
    def free_in(self) -> float | None:
        """Seconds until the key is free, as the store saw it; None: unknown, or no expiry."""
        return _between(self.observed_at, self.free_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysAsked:
    """What a transaction of the caller's asks for: keys that it keeps until it ends.

    Attributes:
        keys: In the order in which they are locked, and whether each of them is shared.
        tokens: Leases with these are in nobody's way: the caller holds them.
        using: The alias of the connection with the transaction.
        bound: Seconds to wait for other transactions at most.
        keep: Keep what was locked where a lease is in the way: nobody else is granted the keys
            until the savepoint around the call is rolled back.
        stays: Takes the keys that are locked and not given up before the transaction ends, also
            where not all of them were to be had.
    """

    keys: Mapping[str, bool]
    tokens: Sequence[str] = field(default=(), repr=False)
    using: str
    bound: float
    keep: bool = False
    stays: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class InTheWay:
    """Why not all of the keys were granted that were asked for together.

    Attributes:
        key: One that somebody has.
        answer: Who has it.
        deadlock: The store found a circle of transactions that wait for each other.
    """

    key: str
    answer: Contended
    deadlock: bool = False


def all_or_none(
    answers: Iterable[Grant | Contended], attempts: Iterable[Attempt]
) -> list[Grant] | InTheWay:
    """Return the grants of keys that were asked for together, or the first that was none."""
    granted: list[Grant] = []
    for answer, attempt in zip(answers, attempts, strict=True):
        if isinstance(answer, Contended):
            return InTheWay(attempt.key, answer)
        granted.append(answer)
    return granted


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key that a transaction has locked, or waits for, for people to see.

    Attributes:
        key: "": the store knows its number alone.
        number: What the server calls it.
        waits: Whether the transaction waits for it; False: it has it.
        since: When it began to wait, or when the transaction began, by the store's clock.
    """

    key: str
    number: int
    shared: bool
    waits: bool
    since: datetime | None
    session: Session


@dataclass(frozen=True, slots=True)
class Record:
    """What a store keeps about a held key.

    Attributes:
        token: That of the grant. A bearer secret, so that no record can be pickled.
        ttl: Seconds that the last grant or extend gave; None: no expiry.
        free_at: `expires_at` plus the grace; equal to it once settled; later where the lease was
            shortened, because its holder was promised that much; None: no expiry.
        renewed_until: When a shortened lease ends, however often it is renewed.
        wanted: A waiter of this grant sleeps, and its end must wake it.
        shared: Others may hold the key at the same time.
    """

    key: str
    token: str = field(repr=False)
    fence: int
    ttl: float | None
    acquired_at: datetime
    renewed_at: datetime
    expires_at: datetime | None
    free_at: datetime | None
    holder: Holder
    wanted: bool = False
    stop_requested_at: datetime | None = None
    shared: bool = False
    renewed_until: datetime | None = None

    def __post_init__(self) -> None:
        if type(self.token) is not Token:
            object.__setattr__(self, "token", Token(self.token))

    @property
    def grant(self) -> Grant:
        """What it takes to extend or release what somebody else has acquired."""
        return Grant(
            self.key, self.token, self.fence, self.ttl, self.acquired_at, self.expires_at,
            shared=self.shared,
        )  # fmt: skip

    @property
    def fence_token(self) -> str:
        """See `Lease.fence_token`."""
        return f"{self.fence:015d}"

    def is_live(self, now: datetime) -> bool:
        """Whether nobody else may be granted the key: the one predicate, everywhere."""
        return self.free_at is None or now < self.free_at

    @property
    def is_settled(self) -> bool:
        """Whether its holder is done with it: the key stays taken, the token is spent."""
        return self.free_at is not None and self.free_at == self.expires_at

    def is_seen(self, fence: int | None) -> bool:
        """Whether it is the grant of this fence (None: of any), which somebody has looked at."""
        return fence is None or self.fence == fence

    def is_expired(self, now: datetime) -> bool:
        """Whether it ended by its time, and its holder has not given it back."""
        return self.expires_at is not None and self.expires_at <= now and not self.is_settled

    def is_owned(self, token: str | None, now: datetime) -> bool:
        """Whether this token (None: any) holds the key and may extend or release it."""
        if token is None:
            return self.is_live(now)
        return self.token == token and self.is_live(now) and not self.is_settled

    def asked_to_stop(self, now: datetime, within: float | None) -> Record:
        """Return the record of a holder that is asked to stop.

        Args:
            within: Seconds for which it is renewed at the most; they never get more. Until the
                holder knows of the new end, the old one stands for it. None: as long as it was.
        """
        asked_at = self.stop_requested_at or now
        if within is None:
            return replace(self, stop_requested_at=asked_at)
        if self.expires_at is None:
            return self
        until = now + timedelta(seconds=within)
        expires_at = min(self.expires_at, until)
        if self.is_settled:
            return replace(self, expires_at=expires_at, free_at=expires_at)
        return replace(
            self,
            expires_at=expires_at,
            stop_requested_at=asked_at,
            renewed_until=min(self.renewed_until or until, until),
        )

    def extended(self, now: datetime, ttl: float | None) -> Record | None:
        """Return the record of a live lease with another ttl; None: it is renewed no more."""
        expires_at, free_at = lease_ends(now, ttl)
        if self.renewed_until is not None:
            if self.renewed_until <= now:
                return None
            expires_at = min(self.renewed_until, expires_at or self.renewed_until)
        return replace(self, ttl=ttl, renewed_at=now, expires_at=expires_at, free_at=free_at)

    def renewal(self, grant: Grant, ttl: float | None, now: datetime) -> Grant:
        """Return the answer to an extend of its lease."""
        expires_at, stops = lease_ends(now, ttl)[0], self.stop_requested_at is not None
        return grant.renewed(ttl, self.fence, self.acquired_at, expires_at, stops)

    def contended(self, now: datetime, *, busy: bool = False, paused: bool = False) -> Contended:
        """Return what a caller who is not granted the key gets to know."""
        return Contended(
            holder=self.holder,
            fence=self.fence,
            acquired_at=self.acquired_at,
            expires_at=self.expires_at,
            free_at=self.free_at,
            observed_at=now,
            busy=busy,
            paused=paused,
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody who waits for a key, for people to see: no decision rests on it.

    Attributes:
        since: When it was noted, by the store's clock.
        until: When the note ends by itself, if its waiter died.
        is_woken: Whether wake-ups came at that time; False: it polls.
    """

    holder: Holder
    since: datetime
    until: datetime
    is_woken: bool

    @property
    def is_retrying(self) -> bool:
        """Whether it is a task that was queued again, and is tried again later."""
        return self.holder.is_queued


@dataclass(frozen=True, slots=True)
class Waits:
    """How many wait for a key.

    Attributes:
        waiting: Callers that wait right now, each in its process.
        retrying: Tasks that were queued again, and are tried again later.
    """

    waiting: int = 0
    retrying: int = 0

    @classmethod
    def of(cls, waiters: Sequence[Waiting]) -> Waits:
        """Count them."""
        retrying = sum(each.is_retrying for each in waiters)
        return cls(len(waiters) - retrying, retrying)

    @property
    def total(self) -> int:
        """How many in all."""
        return self.waiting + self.retrying


@dataclass(frozen=True, slots=True)
class Counter:
    """What a store keeps about a key whether anybody holds it or not.

    Attributes:
        fence: That of the last grant, or above it; 0: the key was never granted.
        paused_until: Until when the key is granted to nobody; None: it is not paused now.
        paused_by: Who wanted it so.
    """

    fence: int
    paused_until: datetime | None = None
    paused_by: str | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that somebody else has written to: its key may be taken, nobody knows by whom."""

    key: str
    error: LockError

    @classmethod
    def of(cls, key: str, error: Exception) -> Unreadable:
        """Say of which key it is, and what is wrong."""
        text = f"The record of {key!r} cannot be read. Another program has changed it: {error!r}."
        return cls(key, LockError(text, key=key))


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing.

    Attributes:
        records: Live records, in the order of their storage keys.
        cursor: Where the next page starts; None: this was the last one.
        unreadable: Records among these that cannot be read.
    """

    records: tuple[Record, ...]
    cursor: str | None
    unreadable: tuple[Unreadable, ...] = ()

    @classmethod
    def of(
        cls,
        found: Mapping[str, Record],
        prefix: str,
        cursor: str | None,
        *,
        host: str | None,
        task_id: str | None,
        limit: int,
    ) -> Page:
        """Return a page of these, which are all: see `BaseLockBackend.list`."""
        shown = [
            name for name, each in sorted(found.items(), key=itemgetter(0))
            if (cursor is None or name > cursor)
            and each.key.startswith(prefix) and each.holder.is_one(host, task_id)
        ]  # fmt: skip
        page = shown[:limit]
        return cls(tuple(map(found.__getitem__, page)), page[-1] if len(shown) > limit else None)


@dataclass(frozen=True, slots=True)
class Raised:
    """What became of fence counters that were to be raised.

    Attributes:
        raised: How many were.
        left: Keys whose counters are still lower: held by somebody, or with a counter that is
            locked, or spoiled.
        cursor: Where the next page starts; None: this was the last one.
    """

    raised: int
    left: tuple[str, ...] = ()
    cursor: str | None = None


def lease_ends(now: datetime, ttl: float | None) -> tuple[datetime | None, datetime | None]:
    """Return `expires_at` and `free_at` of a lease that is granted or extended `now`."""
    if ttl is None:
        return None, None
    expires_at = now + _span(ttl)
    return expires_at, expires_at + _GRACE


@lru_cache(maxsize=128)
def _span(ttl: float) -> timedelta:
    # Slower than all the rest of `lease_ends`, and a project has few ttls.
    return timedelta(seconds=ttl)


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds()
