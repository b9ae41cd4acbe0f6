"""Counts what a backend keeps, and its keys in each state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..backends.counts import Counts, Sizes, States, counted
from ..core.documents import by_name
from ..core.durations import LONGEST, Duration, seconds
from ..handler import lock_backends

#: Seconds within which a lease "ends soon", by default.
SOON = 10.0
#: Fence counters of a backend above which statistics warn: counters are never deleted.
MANY_COUNTERS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(States):
    """The number of keys of a backend in each state.

    Attributes:
        held: Leases that are held now, in any state; each one of a shared key.
        waiting: The waiters that the store has noted; None: the store notes none.
        ending_soon: Leases that expire within `soon` seconds, unless they are renewed.
        past_expiry: Leases that expired without a release: those in `State.PAST_EXPIRY`, and those
            whose key is free again and was not granted since. Redis removes their records by
            itself.
        settled: Keys that are kept after their run: `State.SETTLED`.
        no_expiry: Keys that are held without expiry: `State.NO_EXPIRY`.
        stop_requested: Holders that were asked to stop, and have not.
        overdue: The largest part of its ttl that has passed since a lease was last renewed: about
            1/3 if every holder lives; None: there are none, or too many to look at.
        most_waited: The keys with the most waiters, and the number of these.
        observed_at: The store's clock at the time of the reading.
    """

    backend: str
    overdue: float | None
    most_waited: tuple[tuple[str, int], ...]
    soon: float
    observed_at: datetime

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry. `estimated` names the numbers that are estimates."""
        waited = [{"key": key, "waiting": number} for key, number in self.most_waited]
        return {
            "backend": self.backend,
            **counted(self, States),
            "overdue": self.overdue,
            "most_waited": waited,
            **by_name(self, "soon", "observed_at"),
        }


def summary(backend: str = "default", *, soon: Duration = SOON) -> Summary:
    """Count held keys by their state. This only reads, and takes no longer if there are more.

    On PostgreSQL, numbers are estimates if there are more than 100 000 records. On Redis, they are
    those of a sample of 10 000 of the server's keys if there are more.

    Args:
        soon: Seconds within which a lease counts as ending soon.

    Raises:
        InvalidLockBackend: There is no such backend.
        BackendUnavailable: The store is unavailable.
        LockUsageError: The backend cannot list its locks.
    """
    store, within = lock_backends[backend], seconds(soon, "soon", maximum=LONGEST)
    now = store.clock()
    states, strain = store.states(within)
    return Summary(
        backend=store.alias,
        overdue=strain.overdue,
        most_waited=strain.most_waited,
        soon=within,
        observed_at=now,
        **{name: getattr(states, name) for name in States.__dataclass_fields__},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts and sizes of what a backend keeps.

    Attributes:
        counts: The numbers of locks, waiters and counters of this backend alone.
    """

    backend: str
    counts: Counts

    @property
    def sizes(self) -> Sizes | None:
        """The sizes of the tables, shared with other backends of the database; None: no tables."""
        return self.counts.sizes

    @property
    def memory(self) -> int | None:
        """Bytes that its servers use for all their data; None: it has none, or cannot see that."""
        return self.counts.memory

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know."""
        counters = self.counts.counters
        if counters is None or counters.number <= MANY_COUNTERS:
            return ()
        about = "" if counters.is_exact else "about "
        warning = (
            f"The lock backend {self.backend!r} has {about}{counters.number} fence counters, more"
            f" than {MANY_COUNTERS}. Counters are never deleted, so use a bounded number"
            " of keys."
        )
        return (warning,)

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry: sizes in bytes, times as ISO 8601 in UTC."""
        return {
            "backend": self.backend,
            **counted(self.counts, Counts),
            **by_name(self, "memory", "sizes", "warnings"),
        }


def statistics(backend: str = "default") -> Statistics:
    """Count what a backend keeps. This only reads.

    Raises:
        InvalidLockBackend: There is no such backend.
        BackendUnavailable: The store is unavailable.
        LockUsageError: The backend cannot list its locks, and has no other way to count them.
    """
    store = lock_backends[backend]
    return Statistics(backend=store.alias, counts=store.counts())
