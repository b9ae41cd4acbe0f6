"""Optional features of a backend in groups: guards, transactions, records, waiters, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from ..core import durations
from ..core.durations import MAX_BOUND, Duration
from ..core.errors import InvalidArgument, LockUsageError
from ..core.keys import stored_key
from ..core.records import (
    Grant,
    Holder,
    InTheWay,
    KeptKey,
    KeysAsked,
    Record,
    Session,
    Waiting,
    Waits,
    validate_fence,
)

if TYPE_CHECKING:
    from .base import BaseLockBackend


class _Group:
    """The operations of a backend on one kind of object."""

    def __init__(self, backend: BaseLockBackend):
        self._backend = backend

    def _name(self, key: str) -> str:
        return self._backend._name(stored_key(key))


class _InTransactions(_Group):
    """Operations that last until the caller's transaction ends."""

    _capability: ClassVar[str]
    _otherwise: ClassVar[str]

    def alias(self, using: str | None = None) -> str:
        """Return the alias of the caller's transaction.

        Args:
            using: Another alias of the same database; None: that of the locks.

        Raises:
            LockUsageError: It is an alias of another database, or the store does not support this.
        """
        self._backend._require(self._capability, self._otherwise)
        return self._backend._alias_in_database(using)


class Guards(_InTransactions):
    """Transactions that keep a key from being granted anew. `supports_guard`."""

    _capability = "supports_guard"
    _otherwise = (
        "block a takeover during a transaction: write through FencedModel, whose rows refuse"
        " stale fences"
    )

    def hold(self, grant: Grant, using: str | None = None, *, bound: Duration = MAX_BOUND) -> bool:
        """Keep the key from being granted anew until the caller's transaction ends.

        Args:
            using: See `alias`.

        Returns:
            Whether the grant is not over, and the key has its fence; if not, nothing is locked.

        Raises:
            LockUsageError: No transaction is open there, or a read-only one.
            BackendUnavailable: Another transaction was in the way for longer than the bound.
        """
        using = self.alias(using)
        if grant.shared:
            raise LockUsageError(
                f"A lease that shares {grant.key!r} cannot guard a transaction, because others"
                " hold the key as well. Acquire it exclusively, or use"
                " transaction_lock(shared=True).",
                key=grant.key,
                code="unsupported",
            )
        name = self._name(grant.key)
        seconds = durations.seconds(bound, "bound", maximum=MAX_BOUND)
        return self._backend._guard(name, grant, using, bound=seconds)

    def sessions(self, key: str) -> tuple[Session, ...] | None:
        """Return the sessions whose open transactions guard a key, to be shown to people.

        Returns:
            The sessions, the longest one first; None: unknown to the store.
        """
        name = self._name(key)
        return self._backend._guards_of(name) if self._backend.supports_guard else ()


class Transactions(_InTransactions):
    """Keys that a transaction of the caller's locks until it ends. `supports_transactions`."""

    _capability = "supports_transactions"
    _otherwise = (
        "lock a key until a transaction ends: it takes no part in the transaction. Acquire a"
        " lease with distlock() outside atomic()"
    )

    def lock(self, asked: KeysAsked) -> InTheWay | None:
        """Lock keys until the caller's transaction ends, all or none; None: they are locked.

        Raises:
            LockUsageError: No transaction is open there, or one that cannot lock keys.
            BackendUnavailable: The store is unavailable.
        """
        found = self._backend._lock_for_transaction(asked)
        if found is None:
            return None
        answer = self._backend._clearer(self._name(found.key), found.answer, 1)
        return replace(found, answer=answer)

    def kept(self, limit: int = 1000) -> Sequence[KeptKey] | None:
        """Return the keys that transactions have locked or wait for, to be shown to people.

        Args:
            limit: How many at most.

        Returns:
            The keys, the longest one first; None: unknown to the store.
        """
        return self._backend._kept_by_transactions(limit)


class Records(_Group):
    """Operations on several keys. A backend without a hook of its own is asked for each key."""

    def of(self, keys: Sequence[str]) -> Sequence[Record | None]:
        """Return the record of each key, in their order, in one query; None: it is free.

        If several share a key, this is the one that ends last.
        """
        names = [self._name(key) for key in keys]
        return self._backend._read_many(names) if names else []

    def sharing(self, key: str) -> Sequence[Record]:
        """Return the records of all that share a key now; () if it is free or held exclusively."""
        return self._backend._sharing(self._name(key))

    def acquire(
        self,
        tokens: Mapping[str, str],
        ttl: Duration | None,
        holder: Holder | None = None,
        *,
        permits: int | None = 1,
        bound: Duration = MAX_BOUND,
    ) -> Sequence[Grant] | InTheWay:
        """Grant several keys at once, each to a token of its own, or none of them.

        With `acquires_together` this is one round trip, and a refusal writes nothing and uses no
        fence. Without, the keys are acquired one by one, and released if one is contended.

        Args:
            tokens: A token for each key.
            ttl: As for `acquire` of one key, like the other arguments. All keys have the same.
            bound: Seconds to wait inside the store, for all keys together, at most 1.

        Returns:
            A grant for each key, in the order of `tokens`; or a key that is contended.

        Raises:
            InvalidArgument: An argument breaks a rule, or two keys or two tokens are the same.
            LockError: See `acquire`. Any of the keys may have been granted: release all of them.
        """
        store = self._backend
        attempts = [
            store._attempt_for(key, token, ttl, holder, permits, bound)
            for key, token in tokens.items()
        ]
        for what in ("name", "token"):
            if len({getattr(each, what) for each in attempts}) < len(attempts):
                raise InvalidArgument(f"Two keys have the same {what} here: each needs its own.")
        if not attempts:
            return []
        # All callers use the same order, so that they never deadlock.
        found = store._acquire_many(sorted(attempts, key=lambda each: each.name))
        if isinstance(found, InTheWay):
            name = store._name(stored_key(found.key))
            return replace(found, answer=store._clearer(name, found.answer, permits))
        grants = {each.token: each for each in found}
        return [grants[each.token] for each in attempts]


class Waiters(_Group):
    """The waiters of a key, to be shown to people. A backend without hooks for it shows none."""

    def note(self, key: str, holder: Holder, seconds: float, note: str | None = None) -> str | None:
        """Note a waiter of a key, for `seconds` at most.

        Args:
            note: The result of an earlier call, to renew that note.

        Returns:
            The argument for `drop`; None: the store notes no waiters.
        """
        return self._backend._note_waiter(self._name(key), holder, seconds, note)

    def drop(self, key: str, note: str) -> None:
        """Remove the note of a waiter."""
        self._backend._drop_waiter(self._name(key), note)

    def give_up(self, key: str) -> None:
        """Let others share a key again, which nobody was granted shared while a waiter asked."""
        name = self._name(key)
        self._backend._open_door(name)
        # The next waiter of this process may wait to hold it alone as well.
        self._backend.queues.ring(name)

    def of(self, key: str) -> Sequence[Waiting]:
        """Return the waiters of a key, the first to come first, at most `MOST_SHOWN`."""
        return self._backend._waiters(self._name(key))

    def count(self, keys: Sequence[str]) -> Sequence[Waits]:
        """Return how many wait for each key, in their order, in one round trip."""
        return self._backend._count_waiters([self._name(key) for key in keys])


class Notes(_Group):
    """Fences stored under a name for some time, to remember that something was done.

    They are not locks: no key collides with one, and no listing shows them.
    """

    def put(self, name: str, fence: int, seconds: Duration) -> None:
        """Store a fence under a name, replacing an earlier one. A store without notes ignores it.

        Args:
            name: A text that follows the rules of keys.
        """
        name = stored_key(name)
        self._backend._note(name, validate_fence(fence), durations.seconds(seconds, "seconds"))

    def get(self, name: str) -> int | None:
        """Return the fence stored under a name; None: there is none, or its time is over."""
        return self._backend._noted(stored_key(name))
