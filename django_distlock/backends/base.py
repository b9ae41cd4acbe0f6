"""The narrow waist: what every backend answers, and the checks that are the same for all."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace as changed
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Literal, TypeVar

from ..conf import BackendConfig
from ..core import durations
from ..core.clock import monotonic
from ..core.durations import MAX_BOUND, Duration
from ..core.errors import BackendUnavailable, InvalidArgument, LockUsageError, shown
from ..core.fences import validate_fence
from ..core.holders import Holder, Session, is_plain_text
from ..core.keys import normalize_prefix, place_name, storage_key, stored_key, validate_token
from ..core.records import (
    UNKNOWN,
    Attempt,
    Contended,
    Counter,
    Grant,
    InTheWay,
    KeptKey,
    KeysAsked,
    Page,
    Raised,
    Record,
    Unknown,
    Waiting,
    Waits,
)
from ..core.sharing import validate_permits
from ..core.threads import in_child
from ..core.wording import suggestion
from ..exceptions import InvalidLockBackend
from .counts import Count, Counts, States, Strain, every_record, listed_states
from .groups import Guards, Notes, Records, Transactions, Waiters
from .listening import Listener
from .queues import Queues
from .threads import CallThreads

T = TypeVar("T")

#: Every backend of this process: a fork copies them all.
every: weakref.WeakSet[BaseLockBackend] = weakref.WeakSet()

#: Who asks where nobody says.
_NOBODY = Holder()


#: Counters that are asked for one by one at most, where a store knows no other way.
ONE_BY_ONE: Final = 100

#: What a backend can do, by the method that it has for it.
_SHOWN_BY = {
    "acquires_together": "_acquire_many",
    "supports_guard": "_guard",
    "supports_listing": "_list",
    "supports_operators": "_force_release",
    "supports_sharing": "_sharing",
    "supports_token_lookup": "_read_token",
    "supports_transactions": "_lock_for_transaction",
}


class BaseLockBackend:
    """A store of locks, asked once per call.

    Each public operation is one attempt, atomic in the store, without retries. It checks its
    arguments before any I/O and hands the storage key to the method of the same name with a
    leading underscore, which a backend defines. Contention and loss are answers; a store that
    cannot be reached raises `BackendUnavailable`.

    An operation that would have to wait longer than `bound` seconds for somebody else's
    transaction answers `Contended(busy=True)`, or `UNKNOWN` where it is about a lease of one's own.

    Asynchronous code runs any of them by `threads.run`.

    Args:
        config: What `DISTLOCK` says about the alias.
        unknown: Options that no class on the way here knows.

    Raises:
        InvalidLockBackend: An unknown option, or a key prefix that this store cannot take.
    """

    # Do processes on different hosts see each other's locks?
    distributed: ClassVar[bool] = False
    # Does every grant carry a fence that grows?
    supports_fencing: ClassVar[bool] = True
    # Does a lease end by itself?
    supports_ttl: ClassVar[bool] = True
    # Does the store wake its waiters?
    supports_wakeups: ClassVar[bool] = False
    # Can a transaction keep a key from being taken over until its end? Who has `_guard` can.
    supports_guard: bool = False
    # Can the caller's transaction lock keys until its end? Who has `_lock_for_transaction` can.
    supports_transactions: bool = False
    # Are several keys granted in one step? Who has `_acquire_many` does that.
    acquires_together: bool = False
    # Can several hold a key at the same time? Who has `_sharing` can.
    supports_sharing: ClassVar[bool] = False
    # Can held locks be listed? Who has `_list` can.
    supports_listing: ClassVar[bool] = False
    # Can a lock be found by its token? Who has `_read_token` can.
    supports_token_lookup: ClassVar[bool] = False
    # Can somebody else end a lease? Who has `_force_release` can.
    supports_operators: ClassVar[bool] = False
    # Can another thread extend what this one takes?
    can_renew: bool = True
    # Whose clock decides when a lease ends?
    time_authority: Literal["server", "client"] = "server"
    # How many bytes does the longest storage key have?
    storage_key_limit: ClassVar[int] = 1000

    #: The alias of the database that keeps its fences, and its locks where they are rows.
    using = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for capability, hook in _SHOWN_BY.items():
            # The nearest class that says it, or shows it by its method.
            nearest = next(each for each in cls.__mro__ if {capability, hook} & vars(each).keys())
            if capability not in vars(nearest):
                setattr(cls, capability, True)

    def __init__(self, config: BackendConfig, **unknown: Any):
        self.config = config
        self.alias = config.alias
        if unknown:
            names = sorted(unknown)
            known = _options_of(type(self))
            raise InvalidLockBackend(
                f"DISTLOCK[{self.alias!r}]: Unknown options: {', '.join(map(repr, names))}. Known"
                f" options: {', '.join(known) or 'none'}.{suggestion(names[0], known)}"
            )
        try:
            self.key_prefix = normalize_prefix(config.key_prefix, self.storage_key_limit)
        except InvalidArgument as error:
            raise InvalidLockBackend(f"DISTLOCK[{self.alias!r}]: KEY_PREFIX: {error}") from None
        #: The clock by which this process counts its leases. That of a test goes as the test says.
        self.monotonic: Callable[[], float] = monotonic
        #: Where calls are made for asynchronous code.
        self.threads = CallThreads(f"distlock-{self.alias}", self._own_thread)
        #: Who waits in this process, by storage key.
        self.queues = Queues(self._name)
        #: Hears of keys that became free; None: the store tells nobody, or wakes them by itself.
        self._listener: Listener | None = None
        self.guards, self.transactions = Guards(self), Transactions(self)
        self.records, self.waiters, self.notes = Records(self), Waiters(self), Notes(self)
        every.add(self)

    # Required

    def acquire(
        self,
        key: str,
        token: str,
        ttl: Duration | None,
        holder: Holder | None = None,
        *,
        wanted: bool = False,
        replace: str | None = None,
        permits: int | None = 1,
        bound: Duration = MAX_BOUND,
    ) -> Grant | Contended:
        """Grant the key to `token` if it is free.

        Contended, nothing is written and no fence is used up.

        Args:
            ttl: Seconds until the lease ends by itself, from 0.1 to `MAX_TTL`; None: no expiry.
            holder: Who asks.
            wanted: Mark the grant that is in the way, so that its end wakes the caller.
            replace: Grant also if this is the token of the grant that is in the way; not if it is
                `token` itself, which has settled it.
            permits: How many may hold the key at the same time, from 1 to 10,000; None: any number.
                Other than 1: `supports_sharing`.
            bound: Seconds to wait inside the store, at most 1.

        Raises:
            InvalidArgument: Key, token, ttl or bound break a rule.
            BackendUnavailable: The store is unavailable. The key may have been granted: release it
                with this token, or acquire with `replace=token`.
            LockUsageError: The store cannot be asked from here.
            LockError: The key has used up its fences.
        """
        attempt = self._attempt_for(key, token, ttl, holder, permits, bound)
        attempt.wanted = wanted
        if replace is not None:
            attempt.replace = validate_token(replace)
        answer = self._acquire(attempt)
        if isinstance(answer, Contended):
            return self._clearer(attempt.name, answer, permits)
        return answer

    def extend(
        self, grant: Grant, ttl: Duration | None = None, *, bound: Duration = MAX_BOUND
    ) -> Grant | Unknown | None:
        """Give the lease `ttl` more seconds from now, replacing what it had left.

        Args:
            ttl: Seconds; None: as many as the grant had.

        Returns:
            The grant with its new end; None: the lease is gone; `UNKNOWN`: no answer within the
            bound.
        """
        validate_token(grant.token)
        ttl = grant.ttl if ttl is None else ttl
        name = self._place(grant)
        return self._extend(name, grant, self._ttl(ttl), bound=_bound(bound))

    def release(
        self, grant: Grant, held: Duration | None = None, *, bound: Duration = MAX_BOUND
    ) -> bool | Unknown:
        """Give the key back. Return True once, False if the lease is gone, or `UNKNOWN`.

        Args:
            held: Settle instead: end the work, but keep the key taken, without grace, for so many
                seconds since the grant. If that is past, the key goes at once. `supports_ttl`.
        """
        validate_token(grant.token)
        name = self._place(grant)
        if held is not None:
            # A lease that is renewed may be older than `MAX_TTL`.
            held = durations.seconds(held, "held", maximum=durations.LONGEST)
        seconds = _bound(bound)
        if held is not None:
            self._require("supports_ttl", "keep a key held until a time: its leases do not expire")
        return self._freed(name, self._release(name, grant, held, bound=seconds))

    def read(self, key: str) -> Record | None:
        """Return the record of a held key; None: nobody holds it.

        Of several that share it, that which is free last.
        """
        return self._read(self._name(stored_key(key)))

    # Leases

    def extend_many(self, grants: Sequence[Grant]) -> Sequence[Grant | Unknown | None]:
        """Extend several leases, each by its own ttl, in one round trip.

        A record that a transaction holds is skipped as `UNKNOWN`.

        Returns:
            An answer as `extend` gives it for each grant, in the order of `grants`.
        """
        for grant in grants:
            validate_token(grant.token)
            self._ttl(grant.ttl)
        named = [(self._place(grant), grant) for grant in grants]
        return self._extend_many(named) if named else []

    def is_cut_off(self, grant: Grant) -> bool:
        """Whether the store has said, without being asked, that the lease is gone.

        A look at what has arrived: nothing is sent, and nobody is waited for. False where the store
        says nothing by itself, and about a lease that this process does not hold.
        """
        return False

    def clock(self) -> datetime:
        """Return the time by which leases end here: the store's, where `time_authority` says so."""
        return self._time()

    # Listing and tokens

    def list(
        self,
        prefix: str = "",
        cursor: str | None = None,
        *,
        host: str | None = None,
        task_id: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return a page of held locks. `supports_listing`.

        Args:
            prefix: What their keys start with.
            cursor: The `cursor` of the page before.
            host: Only those of this `Holder.host`.
            task_id: Only those of this `Holder.task_id`.
            limit: The size of the page, from 1 to 10 000.
        """
        self._require("supports_listing", "list its locks")
        durations.whole_number(limit, "limit", 10_000)
        for name, value in (("cursor", cursor), ("host", host), ("task_id", task_id)):
            _text(value, name)
        prefix = stored_key(prefix) if prefix else ""
        return self._list(prefix, cursor, host=host, task_id=task_id, limit=limit)

    def expired(self, key: str | None = None, *, limit: int = 100) -> Sequence[Record]:
        """Return leases that ended by their time, whose keys nobody has given back or taken since.

        The last one to end comes first. A lease that is kept behind its run is none of them.

        Args:
            key: Only that of this key; None: of all.
            limit: How many at most, from 1 to 10 000.

        Returns:
            Their records; () where the store removes them by itself.
        """
        durations.whole_number(limit, "limit", 10_000)
        return self._expired(None if key is None else self._name(stored_key(key)), limit)

    def read_token(self, token: str) -> Record | None:
        """Return the record that this token holds; None: none. `supports_token_lookup`."""
        token = validate_token(token)
        self._require("supports_token_lookup", "find a lock by its token")
        return self._read_token(token)

    # Fences

    def counter(self, key: str, *, beside: str | None = None) -> Counter | None:
        """Return a key's fence and its pause; None: it was never granted, and is not paused.

        A pause that is over is none.

        Args:
            beside: The database of a transaction that has written, and may keep others out.
        """
        name = self._name(stored_key(key))
        return self._counter(name) if beside is None else self._counter_beside(name, beside)

    def raise_fences(
        self,
        to: int | None = None,
        *,
        key: str | None = None,
        cursor: str | None = None,
        limit: int = 1000,
    ) -> Raised:
        """Raise fence counters, after a store was changed or restored.

        A key that somebody holds is left alone: its holder's guarded writes would fail.

        Args:
            to: The fence that the next grant exceeds; None: what the store's clock says.
            key: The counter of this key, which is made where there is none; None: a page of all.
            cursor: The `cursor` of the page before.
            limit: The size of the page, from 1 to 10 000.
        """
        if to is not None:
            validate_fence(to)
        durations.whole_number(limit, "limit", 10_000)
        _text(cursor, "cursor")
        key = None if key is None else stored_key(key)
        name = None if key is None else self._name(key)
        return self._raise_fences(to, name, key, cursor=cursor, limit=limit)

    # Operators

    def force_release(
        self, key: str, *, fence: int | None = None, bound: Duration = MAX_BOUND
    ) -> Record | Contended | None:
        """Force-release a key: the fence moves on first, then the record goes.

        Args:
            fence: Only if this is the holder's fence, compared in the same step; none that is held
                has 0.

        Returns:
            The record that was removed, of several that shared the key the last one; None: nobody
            held it (or not by that fence); busy: a guarded transaction of the holder is open,
            nothing was changed.
        """
        key = stored_key(key)
        _seen(fence)
        seconds = _bound(bound)
        return self._of_each_holder(
            key, None, lambda place: self._force_release(place, key, fence, bound=seconds)
        )

    def request_stop(
        self,
        key: str,
        within: Duration | None = None,
        token: str | None = None,
        *,
        fence: int | None = None,
        bound: Duration = MAX_BOUND,
    ) -> Record | Contended | None:
        """Request that the holder stops: its next extend says `stop_requested`.

        Args:
            within: Let its lease be renewed for so many seconds at the most. `supports_ttl`.
                Behind that end its holder is refused. Nobody else is granted the key before the
                holder must have noticed: it is free at its release, or at the end that the last
                extend promised. An end never gets later, and a lease without expiry stays as it
                is. A settled key has no holder any more: it is free at the new end.
            token: Only if this is the holder's token.
            fence: See `force_release`.

        Returns:
            The record as it is now; None: nobody holds it (or not by that token, or fence); busy.
        """
        key = stored_key(key)
        if token is not None:
            token = validate_token(token)
        _seen(fence)
        if within is not None:
            within = durations.seconds(within, "within", maximum=self.config.max_ttl)
        seconds = _bound(bound)
        if within is not None:
            self._require("supports_ttl", "shorten a lease: its leases do not expire")
        return self._of_each_holder(
            key, token, lambda place: self._request_stop(place, within, token, fence, bound=seconds)
        )

    def pause(
        self,
        key: str,
        until: datetime | None,
        by: str | None = None,
        *,
        bound: Duration = MAX_BOUND,
    ) -> bool | Contended:
        """Grant the key to nobody until `until`, by the store's clock. A holder keeps its lease.

        Args:
            until: An aware datetime, in the years 2 to 9998; None: end the pause.
            by: Who wants it so, for people to read; at most 200 characters.

        Returns:
            Whether the key is paused now, or was if the pause is ended; busy: nothing was changed.
        """
        key = stored_key(key)
        if until is None:
            return self._resume(self._name(key), bound=_bound(bound))
        until = _aware(until, "until")
        if not 1 < until.year < 9999:
            # It could be stored, and not be read: in some time zones it is no date.
            raise InvalidArgument(f"until must be in the years 2 to 9998, not {shown(until)}.")
        _text(by, "by", 200)
        answer = self._pause(self._name(key), key, until, by, bound=_bound(bound))
        return True if answer is None else answer

    def cleanup(self, before: datetime, limit: int = 1000) -> int:
        """Remove leases, and notes, that were over before `before`; return how many records went.

        What a transaction holds is skipped. Fence counters are never touched.

        Args:
            before: An aware datetime. A future one counts as now: no live record goes.
            limit: How many to remove at most, from 1 to 100 000.
        """
        durations.whole_number(limit, "limit", 100_000)
        return self._cleanup(_aware(before, "before"), limit)

    # Wake-ups

    @property
    def is_listening(self) -> bool:
        """Whether this process is woken right now when a key becomes free."""
        return self._listener is not None and self._listener.is_live

    def listen(self, bound: float = 0.0) -> bool:
        """Let this process be woken when keys become free, as far as the store can do that.

        Whoever relies on it is in `queues` before, and asks once more with `wanted` behind it.

        Args:
            bound: Seconds to wait until it does.

        Returns:
            Whether wake-ups come: `is_listening`.
        """
        return self.is_listening if self._listener is None else self._listener.ensure(bound)

    # Counts

    def counts(self) -> Counts:
        """Count what the store keeps: locks, waiters, fence counters, bytes. It only reads."""
        return self._counts()

    def states(self, soon: Duration) -> tuple[States, Strain]:
        """Count what is held by its state, or estimate it, and say where it is tight.

        Args:
            soon: Seconds within which a lease ends to be counted as ending soon.
        """
        return self._states(durations.seconds(soon, "soon"))

    def _of_each_holder(self, key: str, token: str | None, operate: Callable[[str], T]) -> T | None:
        """Operate on who holds a key, by a token or whoever it is; return the last answer."""
        name = self._name(key)
        answer: T | None = operate(name)
        if answer is not None or not self.supports_sharing:
            return answer
        places = (
            [place_name(name, each.token) for each in self._sharing(name)]
            if token is None
            else [place_name(name, token)]
        )
        for place in places:
            found = operate(place)
            answer = answer if found is None else found
        return answer

    # What a backend defines: the first four, and what else its store can do

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        raise NotImplementedError

    def _acquire_many(self, attempts: Sequence[Attempt]) -> Sequence[Grant] | InTheWay:
        until = self.monotonic() + attempts[0].bound
        granted: list[Grant] = []
        for attempt in attempts:
            left = max(0.0, until - self.monotonic())
            answer = self._acquire(changed(attempt, bound=left))
            if isinstance(answer, Contended):
                self._give_back(granted)
                return InTheWay(attempt.key, answer)
            granted.append(answer)
        return granted

    def _extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        raise NotImplementedError

    def _release(
        self, name: str, grant: Grant, held: float | None, *, bound: float
    ) -> bool | Unknown:
        raise NotImplementedError

    def _read(self, name: str) -> Record | None:
        raise NotImplementedError

    def _read_many(self, names: Sequence[str]) -> Sequence[Record | None]:
        return [self._read(name) for name in names]

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> Sequence[Grant | Unknown | None]:
        return [self._extend(name, grant, grant.ttl, bound=MAX_BOUND) for name, grant in named]

    def _sharing(self, name: str) -> Sequence[Record]:
        """Return the records of all who share a key now."""
        return ()

    def _time(self) -> datetime:
        return datetime.now(UTC)

    def _clocks(self) -> Mapping[str, datetime]:
        """Return the time of each server, by its name; "" where there is one."""
        return {"": self._time()}

    def _list(
        self, prefix: str, cursor: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> Page:
        raise self._cannot("list its locks")

    def _expired(self, name: str | None, limit: int) -> Sequence[Record]:
        return ()

    def _read_token(self, token: str) -> Record | None:
        raise self._cannot("find a lock by its token")

    def _counter(self, name: str) -> Counter | None:
        if (record := self._read(name)) is None:
            # Who is late must not take it for "nobody came after me".
            raise self._cannot("read the fence of a key that is not held")
        return Counter(record.fence)

    def _counter_beside(self, name: str, using: str) -> Counter | None:
        return self._counter(name)

    def _fences_of(self, names: Sequence[str]) -> Sequence[int | None]:
        """Return the fences of these keys; 0: never granted; None: not asked for, or spoiled."""
        found: list[int | None] = [None] * len(names)
        for number, name in enumerate(names[:ONE_BY_ONE]):
            with suppress(LockUsageError):
                counter = self._counter(name)
                found[number] = 0 if counter is None else counter.fence
        return found

    def _raise_fences(
        self, to: int | None, name: str | None, key: str | None, *, cursor: str | None, limit: int
    ) -> Raised:
        raise self._cannot("raise its fences")

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        raise self._cannot("force-release a key")

    def _request_stop(
        self, name: str, within: float | None, token: str | None, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        raise self._cannot("request a stop")

    def _pause(
        self, name: str, key: str, until: datetime, by: str | None, *, bound: float
    ) -> Contended | None:
        raise self._cannot("pause a key")

    def _resume(self, name: str, *, bound: float) -> bool | Contended:
        return False

    def _cleanup(self, before: datetime, limit: int) -> int:
        return 0

    def _counts(self) -> Counts:
        return Counts(held=Count(sum(1 for _each in every_record(self))))

    def _states(self, soon: float) -> tuple[States, Strain]:
        return listed_states(self, soon)

    # Guards, waiters and notes: see `groups`

    def _alias_in_database(self, using: str | None) -> str:
        raise NotImplementedError

    def _guard(self, name: str, grant: Grant, using: str, *, bound: float) -> bool:
        raise NotImplementedError

    def _lock_for_transaction(self, asked: KeysAsked) -> InTheWay | None:
        raise NotImplementedError

    def _kept_by_transactions(self, limit: int) -> Sequence[KeptKey] | None:
        return None

    def _is_guarded(self, name: str) -> bool:
        """Whether a guarded transaction keeps the key. False where the store cannot tell now."""
        return False

    def _guards_of(self, name: str) -> tuple[Session, ...] | None:
        return None

    def _note_waiter(
        self, name: str, holder: Holder, seconds: float, note: str | None
    ) -> str | None:
        return None

    def _drop_waiter(self, name: str, note: str) -> None:
        pass

    def _waiters(self, name: str) -> Sequence[Waiting]:
        return ()

    def _count_waiters(self, names: Sequence[str]) -> Sequence[Waits]:
        return [Waits.of(self._waiters(name)) for name in names]

    def _note(self, name: str, fence: int, seconds: float) -> None:
        pass

    def _noted(self, name: str) -> int | None:
        return None

    # Threads and forks

    def _own_thread(self, *, keeps_leases: bool = False) -> None:
        """Prepare a thread for asynchronous operations; one that keeps leases waits for none."""

    def _keep_no_connections(self) -> None:
        """Close each connection from now on when it is not in use: settings have changed."""

    def _begin_in_child(self) -> None:
        """Forget what a fork copied: waiters, leases and words on sockets are the parent's."""
        self.queues.forget()
        if self._listener is not None:
            self._listener.forget()

    # What these share

    def _attempt_for(
        self,
        key: str,
        token: str,
        ttl: Duration | None,
        holder: Holder | None,
        permits: int | None,
        bound: Duration,
    ) -> Attempt:
        key, token = stored_key(key), validate_token(token)
        if type(permits) is not int or permits != 1:
            if permits is not None:
                validate_permits(permits)
            self._require("supports_sharing", "let several holders share a key")
        return Attempt(
            *(self._name(key), key, token, self._ttl(ttl), holder or _NOBODY),
            wanted=False,
            replace=None,
            bound=_bound(bound),
            permits=permits,
        )

    def _clearer(self, name: str, answer: Contended, permits: int | None) -> Contended:
        """Return an answer that says nothing about the key with whether a guard is in the way."""
        if answer.busy and permits != 1:
            # Whoever is named may share the key, and leave room for another one.
            answer = changed(answer, fence=None)
        if self.supports_guard and answer.is_unclear:
            return changed(answer, guarded=self._is_guarded(name))
        return answer

    def _give_back(self, grants: Sequence[Grant]) -> None:
        for grant in reversed(grants):
            name = self._place(grant)
            freed = self._release(name, grant, None, bound=MAX_BOUND)
            if self._freed(name, freed) is UNKNOWN:
                raise BackendUnavailable(
                    f"{grant.key!r} was granted beside a key that was not, and could not be given"
                    f" back within {MAX_BOUND:g} s.",
                    key=grant.key,
                    code="network_timeout",
                )

    def _freed(self, name: str, answer: bool | Unknown) -> bool | Unknown:
        # Without wake-ups, at least those who wait in this process need not wait for longer.
        if answer is True and self.queues and not self.is_listening:
            self.queues.ring(name)
        return answer

    @property
    def _is_elsewhere(self) -> bool:
        """Whether what was asked last is another store than what is asked by now."""
        return False

    def _name(self, key: str) -> str:
        return storage_key(self.key_prefix, key, self.storage_key_limit)

    def _place(self, grant: Grant) -> str:
        """Return what the store calls a lease."""
        name = self._name(stored_key(grant.key))
        return place_name(name, grant.token) if grant.shared else name

    def _ttl(self, ttl: Duration | None) -> float | None:
        return None if ttl is None else durations.ttl_seconds(ttl, maximum=self.config.max_ttl)

    def _require(self, capability: str, what: str) -> None:
        if not getattr(self, capability):
            raise self._cannot(what)

    def _cannot(self, what: str) -> LockUsageError:
        return LockUsageError(
            f"The lock backend {self.alias!r} ({type(self).__name__}) cannot {what}.",
            code="unsupported",
        )


def _bound(bound: Duration) -> float:
    if type(bound) is float and 0.0 <= bound <= MAX_BOUND:
        return bound
    return min(MAX_BOUND, durations.seconds(bound, "bound"))


def _seen(fence: int | None) -> None:
    if fence is not None:
        validate_fence(fence, least=0)


def _text(value: str | None, name: str, maximum: int = 1000) -> None:
    if value is not None and not (is_plain_text(value) and len(value) <= maximum):
        raise InvalidArgument(
            f"{name} must be a str of at most {maximum} characters without NUL and surrogates, not"
            f" {shown(value)}."
        )


def _aware(value: datetime, name: str) -> datetime:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidArgument(f"{name} must be an aware datetime, not {shown(value)}.")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidArgument(
            f"{name} must be a time that exists in UTC, not {shown(value)}."
        ) from None


def _begin_in_child() -> None:
    # One whose options were refused has not all of its parts, and fails. The others go on.
    with ExitStack() as stack:
        for backend in list(every):
            stack.callback(backend._begin_in_child)


in_child(_begin_in_child)


def _options_of(backend_class: type[BaseLockBackend]) -> list[str]:
    """Return the names of the options that a class and its bases take."""
    found = {
        name
        for each in backend_class.__mro__
        if "__init__" in vars(each) and issubclass(each, BaseLockBackend)
        for name, parameter in inspect.signature(vars(each)["__init__"]).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    return sorted(found - {"self", "config"})
