"""The interface of all backends, with the validation that is the same for all of them."""

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
from ..core.keys import normalize_prefix, place_name, storage_key, stored_key, validate_token
from ..core.metadata import is_plain_text
from ..core.records import (
    UNKNOWN,
    Attempt,
    Contended,
    Counter,
    Grant,
    Holder,
    InTheWay,
    KeptKey,
    KeysAsked,
    Page,
    Raised,
    Record,
    Session,
    Unknown,
    Waiting,
    Waits,
    validate_fence,
)
from ..core.sharing import validate_permits
from ..core.threads import in_child
from ..core.wording import suggestion
from ..exceptions import InvalidLockBackend
from .call_threads import CallThreads
from .counts import Count, Counts, States, Strain, every_record, listed_states
from .groups import Guards, Notes, Records, Transactions, Waiters
from .listening import Listener
from .queues import Queues

T = TypeVar("T")

#: All backends of this process, to be reset in a forked child.
every: weakref.WeakSet[BaseLockBackend] = weakref.WeakSet()

#: The holder if the caller names none.
_NOBODY = Holder()


#: How many counters are read one by one at most, by a backend without a better way.
ONE_BY_ONE: Final = 100

#: Capabilities, and the method by which a backend shows that it has them.
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
    """A store of locks.

    Each public operation is one attempt, atomic in the store, without retries. It validates its
    arguments before any I/O, and passes the storage key to the method of the same name with a
    leading underscore, which a backend defines. Contention and loss are results; a store that
    cannot be reached raises `BackendUnavailable`.

    An operation that would have to wait longer than `bound` seconds for another transaction returns
    `Contended(busy=True)`, or `UNKNOWN` if it is about the caller's own lease.

    Async code runs all operations by `threads.run`.

    Args:
        config: The entry of the alias in `DISTLOCK`.
        unknown: Options that no class of the backend takes.

    Raises:
        InvalidLockBackend: An unknown option, or a key prefix that this store cannot take.
    """

    # Do processes on different hosts see each other's locks?
    distributed: ClassVar[bool] = False
    # Does every grant carry a fence that grows?
    supports_fencing: ClassVar[bool] = True
    # Do leases expire?
    supports_ttl: ClassVar[bool] = True
    # Does the store wake its waiters?
    supports_wakeups: ClassVar[bool] = False
    # Can a transaction keep a key from being taken over until its end? True if `_guard` is defined.
    supports_guard: bool = False
    # Can the caller's transaction lock keys? True if `_lock_for_transaction` is defined.
    supports_transactions: bool = False
    # Are several keys granted in one step? True if `_acquire_many` is defined.
    acquires_together: bool = False
    # Can several hold a key at the same time? True if `_sharing` is defined.
    supports_sharing: ClassVar[bool] = False
    # Can held locks be listed? True if `_list` is defined.
    supports_listing: ClassVar[bool] = False
    # Can a lock be found by its token? True if `_read_token` is defined.
    supports_token_lookup: ClassVar[bool] = False
    # Can operators end a lease? True if `_force_release` is defined.
    supports_operators: ClassVar[bool] = False
    # Can another thread extend the lease that this one acquired?
    can_renew: bool = True
    # Whose clock decides when a lease ends?
    time_authority: Literal["server", "client"] = "server"
    # How many bytes does the longest storage key have?
    storage_key_limit: ClassVar[int] = 1000

    #: The alias of the database with its fences, and with its locks if they are rows.
    using = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for capability, hook in _SHOWN_BY.items():
            # The nearest class that sets the capability or defines its method.
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
        #: The clock by which this process counts its leases. A test may replace it.
        self.monotonic: Callable[[], float] = monotonic
        #: The threads in which async code makes its calls.
        self.threads = CallThreads(f"distlock-{self.alias}", self._own_thread)
        #: The waiters of this process, by storage key.
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

        If it is contended, no fence is used up, and nothing is written but the mark of `wanted`.

        Args:
            ttl: Seconds until the lease expires, from 0.1 to `MAX_TTL`; None: no expiry.
            holder: The identity of the caller.
            wanted: Mark the grant in the way, so that its end wakes the caller.
            replace: The token of a grant that may be replaced; but not one that `token` itself has
                settled.
            permits: How many may hold the key at the same time, from 1 to 10,000; None: any number.
                Other than 1: `supports_sharing`.
            bound: Seconds to wait inside the store, at most 1.

        Raises:
            InvalidArgument: Key, token, ttl or bound break a rule.
            BackendUnavailable: The store is unavailable. The key may have been granted: release it
                with this token, or acquire with `replace=token`.
            LockUsageError: The store cannot be used here, such as in a broken transaction.
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
        """Make the lease end `ttl` seconds from now.

        Args:
            ttl: Seconds; None: the ttl of the grant.

        Returns:
            The grant with its new end; None: the lease is gone; `UNKNOWN`: a transaction had locked
            the record for all of the bound.
        """
        validate_token(grant.token)
        ttl = grant.ttl if ttl is None else ttl
        name = self._place(grant)
        return self._extend(name, grant, self._ttl(ttl), bound=_bound(bound))

    def release(
        self, grant: Grant, held: Duration | None = None, *, bound: Duration = MAX_BOUND
    ) -> bool | Unknown:
        """Release the key. Return True once, False if the lease is gone, or `UNKNOWN`.

        Args:
            held: Settle instead: spend the token, but keep the key taken, without grace, for so
                many seconds from the grant. If these are over, release at once. `supports_ttl`.
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

        If several share the key, this is the one that ends last.
        """
        return self._read(self._name(stored_key(key)))

    # Leases

    def extend_many(self, grants: Sequence[Grant]) -> Sequence[Grant | Unknown | None]:
        """Extend several leases, each by its own ttl, in one round trip.

        A record that a transaction has locked is skipped as `UNKNOWN`.

        Returns:
            The result of `extend` for each grant, in the order of `grants`.
        """
        for grant in grants:
            validate_token(grant.token)
            self._ttl(grant.ttl)
        named = [(self._place(grant), grant) for grant in grants]
        return self._extend_many(named) if named else []

    def is_cut_off(self, grant: Grant) -> bool:
        """Whether the store has reported by itself that the lease is gone.

        This neither sends a request nor blocks. It is False for stores that report nothing, and for
        leases that this process does not hold.
        """
        return False

    def clock(self) -> datetime:
        """Return the time by which leases end: by the store's clock, or see `time_authority`."""
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
            prefix: Only keys that start with this.
            cursor: The `cursor` of the page before.
            host: Only locks of this `Holder.host`.
            task_id: Only locks of this `Holder.task_id`.
            limit: The size of the page, from 1 to 10 000.
        """
        self._require("supports_listing", "list its locks")
        durations.whole_number(limit, "limit", 10_000)
        for name, value in (("cursor", cursor), ("host", host), ("task_id", task_id)):
            _text(value, name)
        prefix = stored_key(prefix) if prefix else ""
        return self._list(prefix, cursor, host=host, task_id=task_id, limit=limit)

    def expired(self, key: str | None = None, *, limit: int = 100) -> Sequence[Record]:
        """Return expired leases whose keys were neither released nor acquired since.

        The last one to end comes first. Settled keys are not among them.

        Args:
            key: Only the lease on this key; None: all.
            limit: How many at most, from 1 to 10 000.

        Returns:
            Their records; () if the store removes expired records by itself.
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
        """Return a key's fence and its pause, if any; None: it was never granted or paused.

        Args:
            beside: The database of the caller's transaction, which has written and may lock others
                out.
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
        """Raise fence counters after a store was changed or restored.

        Held keys are left alone, because the guarded writes of their holders would fail.

        Args:
            to: The fence that the next grant exceeds; None: one from the store's clock.
            key: Only the counter of this key, which is created if missing; None: a page of all.
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
        """Force-release a key: raise its fence, then remove the record.

        Args:
            fence: Only if the holder has this fence, compared in the same step.

        Returns:
            The record that was removed, the last one if several shared the key; None: nobody held
            it, or not with that fence; busy: a guarded transaction of a holder is open, whose lease
            was left as it is.
        """
        key = stored_key(key)
        _seen(fence)
        seconds = _bound(bound)
        return self._of_each_holder(
            key, None, fence, lambda place: self._force_release(place, key, fence, bound=seconds)
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
        """Ask the holder to stop: its next extend says `stop_requested`.

        Args:
            within: Also end its renewals after so many seconds. `supports_ttl`. From then on its
                extends are refused. Nobody else is granted the key before the holder must have
                noticed: the key is free at its release, or at the end that the last extend
                promised. An end never moves later, and a lease without expiry keeps none. A settled
                key, which has no holder, is free at the new end.
            token: Only if the holder has this token.
            fence: See `force_release`.

        Returns:
            The new record; None: nobody holds the key, or not with that token or fence; busy.
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
            key,
            token,
            fence,
            lambda place: self._request_stop(place, within, token, fence, bound=seconds),
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
            by: Who pauses it, to be shown to people; at most 200 characters.

        Returns:
            Whether the key is paused now; when a pause is ended, whether it was; busy: nothing was
            changed.
        """
        key = stored_key(key)
        if until is None:
            return self._resume(self._name(key), bound=_bound(bound))
        until = _aware(until, "until")
        if not 1 < until.year < 9999:
            # It could be stored but not read: in some time zones, it is out of range.
            raise InvalidArgument(f"until must be in the years 2 to 9998, not {shown(until)}.")
        _text(by, "by", 200)
        answer = self._pause(self._name(key), key, until, by, bound=_bound(bound))
        return True if answer is None else answer

    def cleanup(self, before: datetime, limit: int = 1000) -> int:
        """Remove leases and notes that ended before `before`; return how many records went.

        Records that a transaction has locked are skipped. Fence counters are never touched.

        Args:
            before: An aware datetime; a future one counts as now. Live records are never removed.
            limit: How many to remove at most, from 1 to 100 000.
        """
        durations.whole_number(limit, "limit", 100_000)
        return self._cleanup(_aware(before, "before"), limit)

    # Wake-ups

    @property
    def is_listening(self) -> bool:
        """Whether this process is subscribed to wake-ups right now."""
        return self._listener is not None and self._listener.is_live

    def listen(self, bound: float = 0.0) -> bool:
        """Subscribe this process to wake-ups, if the store has them.

        To rely on them, join `queues` before, and make an attempt with `wanted` after.

        Args:
            bound: Seconds to wait for the subscription.

        Returns:
            Whether wake-ups come: `is_listening`.
        """
        return self.is_listening if self._listener is None else self._listener.ensure(bound)

    # Counts

    def counts(self) -> Counts:
        """Count the locks, waiters, fence counters and bytes in the store. It only reads."""
        return self._counts()

    def states(self, soon: Duration) -> tuple[States, Strain]:
        """Count, or estimate, held keys by state, and the strain on the store.

        Args:
            soon: A lease counts as ending soon if it has fewer seconds left.
        """
        return self._states(durations.seconds(soon, "soon"))

    def _of_each_holder(
        self, key: str, token: str | None, fence: int | None, operate: Callable[[str], T]
    ) -> T | None:
        """Operate on each holder of a key, or the one with a token or fence.

        Return the last answer; or that it was busy, if a holder was left because of that.
        """
        name = self._name(key)
        answer: T | None = operate(name)
        if answer is not None or not self.supports_sharing:
            return answer
        seen = [] if token is not None else self._sharing(name)
        tokens = [each.token for each in seen if fence is None or each.fence == fence]
        for each in tokens if token is None else [token]:
            found = operate(place := place_name(name, each))
            if isinstance(found, Contended):
                # Another caller may have acquired the key at this moment.
                found = operate(place)
            if found is not None and not isinstance(answer, Contended):
                answer = found
        return answer

    # Hooks that a backend defines: the first four, and optional ones

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
            # A stale holder must not take "unknown" for "nobody was granted the key since".
            raise self._cannot("read the fence of a key that is not held")
        return Counter(record.fence)

    def _counter_beside(self, name: str, using: str) -> Counter | None:
        return self._counter(name)

    def _fences_of(self, names: Sequence[str]) -> Sequence[int | None]:
        """Return the fences of these keys; 0: never granted; None: unknown, or spoiled."""
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
        """Whether a guarded transaction keeps the key; False also if that is unknown."""
        return False

    def _guards_of(self, name: str) -> tuple[Session, ...] | None:
        return None

    def _note_waiter(
        self, name: str, holder: Holder, seconds: float, note: str | None
    ) -> str | None:
        return None

    def _open_door(self, name: str) -> None:
        pass

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
        """Prepare a new thread of this package; `keeps_leases`: the heartbeat's."""

    def _keep_no_connections(self) -> None:
        """Close connections as soon as they are not in use, because settings have changed."""

    def _begin_in_child(self) -> None:
        """Forget what a fork has copied: waiters, leases and connections are the parent's."""
        self.queues.forget()
        if self._listener is not None:
            self._listener.forget()

    # Shared helpers

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
        """Add to an unclear answer whether a guarded transaction is in the way."""
        if answer.busy and permits != 1:
            # The named holder may share the key, and leave a permit free.
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
        # Without wake-ups, at least the waiters of this process are woken.
        if answer is True and self.queues and not self.is_listening:
            self.queues.ring(name)
        return answer

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the alias stands for another store now than at the last request."""
        return False

    def _name(self, key: str) -> str:
        return storage_key(self.key_prefix, key, self.storage_key_limit)

    def _place(self, grant: Grant) -> str:
        """Return the name of a lease in the store."""
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
    # A backend whose options were refused is incomplete, and fails here. The others go on.
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
