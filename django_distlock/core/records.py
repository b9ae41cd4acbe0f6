"""The arguments and results of backends: holders, grants, records, fences, and instants."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, Literal

from .durations import GRACE
from .errors import InvalidArgument, LockError, shown
from .keys import place_name
from .logs import log_fields
from .metadata import is_plain_text
from .secrets import Token

_GRACE: Final = timedelta(seconds=GRACE)

#: Metadata of a holder whom others do not wait out, but stand by for: a leader.
LEADER: Mapping[str, Any] = {"role": "leader"}

#: Characters that a column takes.
MAX_TEXT = 255

#: A grant with a fence above this logs a warning; above the maximum there are none.
FENCE_WARNING: Final = 800_000_000_000_000
FENCE_MAX: Final = 900_000_000_000_000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: What a fence that follows the clock counts: 15 digits last until the year 2255.
_STEP: Final = timedelta(microseconds=10)
_MICROSECOND: Final = timedelta(microseconds=1)

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The identity of a holder, as it is stored beside its lock.

    Attributes:
        host: The host's name, after `DISTLOCK_HOLDER["prefix"]`.
        boot_id: What tells the start of the host's kernel, and the PID namespace in it, from
            others: "<boot id>/<inode>"; "" if unknown. Where two are equal, so are the processes
            that a `pid` can mean.
        process: A name that a restarted worker keeps.
        started_at: When the process started, in seconds since the host's boot; None if unknown.
        task_id: The id of the task or job that runs, if one does.
        metadata: What the application adds: a user, a reason. JSON, at most 4096 bytes.
    """

    host: str = ""
    boot_id: str = ""
    process: str = ""
    pid: int = 0
    started_at: float | None = None
    thread: str = ""
    task_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("host", "boot_id", "process", "thread", "task_id"):
            value = getattr(self, name)
            if value is None and name == "task_id":
                continue
            if not is_plain_text(value) or len(value) > MAX_TEXT:
                raise InvalidArgument(
                    f"A holder's {name} must be a str of at most {MAX_TEXT} characters without NUL"
                    f" and surrogates, not {shown(value)}."
                )

    def is_one(self, host: str | None, task_id: str | None) -> bool:
        """Whether it has this host and this task; None: any."""
        return host in (None, self.host) and task_id in (None, self.task_id)

    @property
    def is_queued(self) -> bool:
        """Whether a task holds the key, or waits for it, from its queue: no process has to live."""
        return self.pid == 0 and self.host != "" and self.task_id is not None

    def as_queued(self) -> Holder:
        """Return a task in its queue: see `is_queued`."""
        return replace(self, pid=0, started_at=None, thread="")

    @property
    def where(self) -> str:
        """Where it runs, as tables show it; "": the store does not tell."""
        process = f"{self.process}[{self.pid}]" if self.pid else self.process
        return " ".join(each for each in (self.host, process) if each)

    @property
    def who(self) -> str:
        """Who it is, as sentences name it."""
        return f"{self.process or 'a process'} (pid {self.pid}) on {self.host or 'some host'}"

    def is_caller(self, other: Holder) -> bool:
        """Whether both are known to be the same thread of a process, or the same task."""
        if self.task_id is not None or not (self.host and self.pid):
            return self.task_id is not None and self.task_id == other.task_id
        ours = (self.host, self.boot_id, self.pid, self.started_at, self.thread)
        return ours == (other.host, other.boot_id, other.pid, other.started_at, other.thread)

    @property
    def leads(self) -> bool:
        """Whether it leads, and those stand by who do not get the key."""
        return bool(self.metadata.get("role") == LEADER["role"])

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary that `from_json` reads."""
        return {name: getattr(self, name) for name in _NAMES} | {"metadata": dict(self.metadata)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Holder:
        """Return the holder that `data` describes.

        Names it does not know are left out: a newer version may have written them.

        Raises:
            InvalidArgument: Something in it is not what `as_json` would have written.
        """
        found = cls(**{name: value for name, value in data.items() if name in _NAMES})
        if not isinstance(found.metadata, Mapping) or not isinstance(found.pid, int):
            raise InvalidArgument(f"A holder must have a pid and metadata, not {shown(data)}.")
        since = found.started_at
        if not (since is None or (isinstance(since, int | float) and abs(since) < 2**63)):
            raise InvalidArgument(f"A holder's started_at must be a number, not {shown(since)}.")
        return found


_NAMES = {each.name: None for each in fields(Holder)}


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a store with a transaction that keeps a key from being granted anew.

    Attributes:
        pid: The server's number for it; for locks in memory, this process's.
        application: What it calls itself; "": nothing, or the server does not tell.
        client: The address it came from; "": a socket of the server's machine.
        since: When its transaction began, by the store's clock; None: not known.
    """

    pid: int
    application: str = ""
    user: str = ""
    client: str = ""
    since: datetime | None = None


#: The errors of reading a record that another program has changed.
SPOILED: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def known_holder(data: Any) -> Holder:
    """Return the holder in a row, or an empty one if the data is spoiled.

    No decision depends on the holder, so such a key can still be released, granted and operated.
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


#: The store could not carry the request out within the bound; the record is unchanged. It is false
#: in a condition, but differs from None and False, which mean that the lease is gone.
UNKNOWN: Final = Unknown.UNKNOWN
#: The result of a release; "wanted": it was released, and somebody waits for the key.
Freed = Literal["released", "wanted", "gone"]


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to an acquire that was granted, or to an extend.

    Attributes:
        token: The proof of ownership. It is a bearer secret, so a grant cannot be pickled.
        fence: At least 1; grows with each grant of the key. An extend does not change it.
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
    """One request to acquire a key.

    Attributes:
        name: The name of the key in the store.
        ttl: Seconds that the lease lasts; None: no expiry.
        wanted: Mark the grant in the way, so that its end wakes the caller.
        replace: The token of a grant that may be replaced: see `may_replace`.
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
        """The name of its lease in the store."""
        return self.name if self.permits == 1 else place_name(self.name, self.token)

    def may_replace(self, record: Record) -> bool:
        """Whether this attempt may replace a live record.

        It may not replace one that its own token has settled, so that a request which arrives after
        the end of its own work takes nothing.
        """
        if self.replace is None:
            return False
        is_own = record.token == self.token
        # With permits, the token may have its place already: see `in_the_way`.
        is_meant = record.token == self.replace or (self.shared and is_own)
        return is_meant and not (is_own and record.is_settled)

    def record(self, fence: int, now: datetime, before: Iterable[Record] = ()) -> Record:
        """Return the record to store if the key is granted with this fence.

        Args:
            before: The records that it replaces. A request to stop is passed on if the holder is
                the same, and if the lease is handed over, which settles it first. It is not passed
                on to whoever takes the key over from a dead holder.
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

    def granted(self, fence: int, at: int) -> tuple[Grant, list[int | None]]:
        """Return the answer if the key is granted at this instant, and the ends of its lease.

        These and the instant are as stores keep them.
        """
        now = from_microseconds(at)
        expires_at, free_at = lease_ends(now, self.ttl)
        return self.grant(fence, now, expires_at), stored(expires_at, free_at)

    def grant(self, fence: int, now: datetime, expires_at: datetime | None) -> Grant:
        """Return the answer if the key is granted."""
        shared = self.permits != 1
        return Grant(self.key, self.token, fence, self.ttl, now, expires_at, shared=shared)


@dataclass(frozen=True, slots=True)
class Contended:
    """The key was not granted. If busy, any other field may be None.

    Attributes:
        acquired_at: When the holder was granted the key, by the store's clock.
        expires_at: When its lease ends unless it is extended; None: no expiry.
        free_at: When the key may be granted to somebody else; None: no expiry.
        observed_at: The store's clock at the attempt. A client should use only differences of the
            store's times, because its own clock may be wrong.
        busy: A transaction has locked a row, and the bound passed. The grant in the way could not
            be marked, and the holder may be unknown.
        guarded: A guarded transaction, whose lease is over, keeps the key.
        shared: Others may hold the key beside this holder.
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
    shared: bool = False

    @property
    def is_unclear(self) -> bool:
        """Whether it says nothing about the key: any transaction may have locked a row."""
        return self.busy and self.fence is None and not self.guarded

    @property
    def settled(self) -> bool:
        """Whether the holder has released the key, which stays taken for its window."""
        return self.expires_at is not None and self.expires_at == self.free_at

    @property
    def held_for(self) -> float | None:
        """Seconds since the grant, by the store's clock."""
        return _between(self.acquired_at, self.observed_at)

    @property
    def expires_in(self) -> float | None:
        """Seconds until the lease ends, by the store's clock; None: unknown, or no expiry."""
        return _between(self.observed_at, self.expires_at)

    @property
    def free_in(self) -> float | None:
        """Seconds until the key is free, by the store's clock; None: unknown, or no expiry."""
        return _between(self.observed_at, self.free_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysAsked:
    """A request to lock keys until the caller's transaction ends.

    Attributes:
        keys: The keys in the order of locking, and whether each is shared.
        tokens: The tokens of the caller's own leases, which are not in the way.
        using: The alias of the connection with the transaction.
        bound: Seconds to wait for other transactions at most.
        keep: If a lease is in the way, keep the other keys locked until the savepoint around the
            call is rolled back.
        stays: Collects the keys that stay locked until the transaction ends, even if not all keys
            could be locked.
    """

    keys: Mapping[str, bool]
    tokens: Sequence[str] = field(default=(), repr=False)
    using: str
    bound: float
    keep: bool = False
    stays: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class InTheWay:
    """The answer to a request for several keys that was refused.

    Attributes:
        key: A key that is not available.
        answer: The reason, such as its holder.
        deadlock: Whether the store found a deadlock.
    """

    key: str
    answer: Contended
    deadlock: bool = False


def all_or_none(
    answers: Iterable[Grant | Contended], attempts: Iterable[Attempt]
) -> list[Grant] | InTheWay:
    """Return the grants of all keys, or the first refusal."""
    granted: list[Grant] = []
    for answer, attempt in zip(answers, attempts, strict=True):
        if isinstance(answer, Contended):
            return InTheWay(attempt.key, answer)
        granted.append(answer)
    return granted


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key that a transaction has locked or waits for, to be shown to people.

    Attributes:
        key: The key; "" if only its number is known.
        number: The number of the advisory lock.
        waits: Whether the transaction waits for it; False: it has locked it.
        since: When the wait began, or the transaction, by the store's clock.
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
        token: That of the grant. It is a bearer secret, so a record cannot be pickled.
        ttl: Seconds that the last grant or extend gave; None: no expiry.
        free_at: `expires_at` plus the grace; equal to `expires_at` once settled; later if an
            operator shortened the lease, because its holder relies on the old end; None: no expiry.
        renewed_until: When a shortened lease ends, even if it is renewed.
        wanted: A waiter sleeps until this grant ends, and must be woken then.
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
        """A grant with which this lease can be extended or released."""
        return Grant(
            self.key, self.token, self.fence, self.ttl, self.acquired_at, self.expires_at,
            shared=self.shared,
        )  # fmt: skip

    @property
    def fence_token(self) -> str:
        """See `Lease.fence_token`."""
        return f"{self.fence:015d}"

    def is_live(self, now: datetime) -> bool:
        """Whether nobody else may be granted the key. All backends use this rule."""
        return self.free_at is None or now < self.free_at

    @property
    def is_settled(self) -> bool:
        """Whether it was released, but the key stays taken for its window."""
        return self.free_at is not None and self.free_at == self.expires_at

    def is_seen(self, fence: int | None) -> bool:
        """Whether it is the grant with this fence, which an operator has seen; None: any."""
        return fence is None or self.fence == fence

    def is_expired(self, now: datetime) -> bool:
        """Whether its lease has expired without a release."""
        return self.expires_at is not None and self.expires_at <= now and not self.is_settled

    def is_owned(self, token: str | None, now: datetime) -> bool:
        """Whether this token (None: any) holds the key, and may extend or release it."""
        if token is None:
            return self.is_live(now)
        return self.token == token and self.is_live(now) and not self.is_settled

    def asked_to_stop(self, now: datetime, within: float | None) -> Record:
        """Return the record after a request to stop.

        Args:
            within: Seconds after which renewals end; a later request cannot make them more. The old
                end still counts until the holder has learned of the new one. None: no limit.
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
        """Return the record of a live lease after an extend; None: its renewals have ended."""
        expires_at, free_at = lease_ends(now, ttl)
        if self.renewed_until is not None:
            if self.renewed_until <= now:
                return None
            expires_at = min(self.renewed_until, expires_at or self.renewed_until)
        return replace(self, ttl=ttl, renewed_at=now, expires_at=expires_at, free_at=free_at)

    def renewal(self, grant: Grant, ttl: float | None, now: datetime) -> Grant:
        """Return the answer to an extend of this lease."""
        expires_at, stops = lease_ends(now, ttl)[0], self.stop_requested_at is not None
        return grant.renewed(ttl, self.fence, self.acquired_at, expires_at, stops)

    def contended(self, now: datetime, *, busy: bool = False, paused: bool = False) -> Contended:
        """Return the answer to a caller that is refused because of this record."""
        return Contended(
            holder=self.holder,
            fence=self.fence,
            acquired_at=self.acquired_at,
            expires_at=self.expires_at,
            free_at=self.free_at,
            observed_at=now,
            busy=busy,
            paused=paused,
            shared=self.shared,
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiter for a key, to be shown to people. No decision depends on it.

    Attributes:
        since: When the waiter was noted, by the store's clock.
        until: When the note expires unless it is renewed.
        is_woken: Whether the waiter is woken; False: it polls.
    """

    holder: Holder
    since: datetime
    until: datetime
    is_woken: bool

    @property
    def is_retrying(self) -> bool:
        """Whether it is a task that was queued again for another try."""
        return self.holder.is_queued


#: How many waiters of a key are shown at most; all of them are counted.
MOST_SHOWN: Final = 1000


@dataclass(frozen=True, slots=True)
class Waits:
    """How many wait for a key.

    Attributes:
        waiting: Callers that wait right now, in some process.
        retrying: Tasks that were queued again for another try.
    """

    waiting: int = 0
    retrying: int = 0

    @classmethod
    def of(cls, waiters: Sequence[Waiting]) -> Waits:
        """Count waiters."""
        retrying = sum(each.is_retrying for each in waiters)
        return cls(len(waiters) - retrying, retrying)

    @property
    def total(self) -> int:
        """How many in all."""
        return self.waiting + self.retrying


@dataclass(frozen=True, slots=True)
class Counter:
    """What a store keeps about a key, even while nobody holds it.

    Attributes:
        fence: That of the last grant, or above it; 0: the key was never granted.
        paused_until: When the pause of the key ends; None: it is not paused.
        paused_by: Who paused it.
    """

    fence: int
    paused_until: datetime | None = None
    paused_by: str | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that another program has changed: the key may be taken, by an unknown holder."""

    key: str
    error: LockError

    @classmethod
    def of(cls, key: str, error: Exception) -> Unreadable:
        """Describe the record of a key, and what is wrong with it."""
        text = f"The record of {key!r} cannot be read. Another program has changed it: {error!r}."
        return cls(key, LockError(text, key=key))


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing.

    Attributes:
        records: Live records, in the order of their storage keys.
        cursor: Where the next page starts; None: this was the last one.
        unreadable: Records on this page that cannot be read.
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
        """Return a page of all records: see `BaseLockBackend.list`."""
        shown = [
            name for name, each in sorted(found.items(), key=itemgetter(0))
            if (cursor is None or name > cursor)
            and each.key.startswith(prefix) and each.holder.is_one(host, task_id)
        ]  # fmt: skip
        page = shown[:limit]
        return cls(tuple(map(found.__getitem__, page)), page[-1] if len(shown) > limit else None)


@dataclass(frozen=True, slots=True)
class Raised:
    """The result of raising fence counters.

    Attributes:
        raised: How many were raised.
        left: Keys whose counters are still lower: the key is held, or the counter is locked or
            spoiled.
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
    # Cached, because this is the slowest part of `lease_ends`, and a project has few ttls.
    return timedelta(seconds=ttl)


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds()


# Fences: numbers that order the writes of a key's holders


def clock_fence(now: datetime) -> int:
    """Return the least fence of a grant at `now`, where fences follow the clock."""
    return (now - _EPOCH) // _STEP


def next_fence(key: str, last: int, floor: datetime | None) -> int:
    """Return the fence after `last`.

    Args:
        last: The counter of the key; 0: it had none yet.
        floor: The time whose `clock_fence` it is not to be below; None: it just counts.

    Raises:
        LockError: There is none: the key has used up its fences.
    """
    fence = last + 1 if floor is None else max(last + 1, clock_fence(floor))
    if fence > FENCE_WARNING:
        check_fence(key, fence)
    return fence


def check_fence(key: str, fence: int) -> None:
    """Warn before a key runs out of fences, and refuse the one after the last."""
    if fence > FENCE_MAX:
        raise used_up(key)
    if fence > FENCE_WARNING:
        extra = log_fields("fences_run_out", key=key, fence=fence)
        logger.warning("The fence of %r is %d; %d is the last.", key, fence, FENCE_MAX, extra=extra)


def used_up(key: str | None) -> LockError:
    """Return why a key is granted no more."""
    return LockError(f"The key {key!r} has used all its fences ({FENCE_MAX}).", key=key)


def validate_fence(value: object, *, least: int = 1, most: int = FENCE_MAX) -> int:
    """Return a fence that a counter may be raised to, or have.

    Args:
        least: 0 where that of a key that was never granted will do.
        most: Less where the key is to have some left.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgument(f"A fence must be an int from {least} to {most}, not {shown(value)}.")
    return value


# Instants, as stores keep them: see docs/decisions/instants-are-integers.md


def to_microseconds(instant: datetime) -> int:
    """Return an aware datetime as microseconds since 1970, exactly."""
    return (instant - _EPOCH) // _MICROSECOND


def stored(*instants: datetime | None) -> list[int | None]:
    """Return each as microseconds since 1970; None stays None."""
    return [None if each is None else to_microseconds(each) for each in instants]


def instant(value: int | None) -> datetime | None:
    """Return microseconds since 1970 as a datetime; None stays None."""
    return None if value is None else from_microseconds(value)


def from_microseconds(value: int) -> datetime:
    """Return microseconds since 1970 as an aware datetime in UTC.

    Raises:
        OverflowError: It is in the first or last year of the calendar, or beyond, and so out of
            range in some time zones.
    """
    if not _FIRST <= value <= _LAST:
        raise OverflowError(f"{value} microseconds since 1970 is no time that locks have.")
    return _EPOCH + timedelta(microseconds=value)


_FIRST = to_microseconds(datetime(2, 1, 1, tzinfo=UTC))
_LAST = to_microseconds(datetime(9999, 1, 1, tzinfo=UTC))
