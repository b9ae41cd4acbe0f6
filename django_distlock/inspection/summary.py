"""How much a backend keeps, and how many of its keys are in which state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..backends.counts import Counts, Sizes, States, counted
from ..core.documents import by_name
from ..core.durations import Duration, seconds
from ..handler import lock_backends

#: Seconds within which a lease "ends soon", where nobody says otherwise.
SOON = 10.0
#: Fence counters of a backend above which it warns: they are never deleted.
MANY_COUNTERS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(States):
    """How many keys of a backend are in which state.

    Attributes:
        held: Leases that are held now, in whatever state; of a shared key each.
        waiting: Who waits, and is noted; None: the store does not note it.
        ending_soon: Leases that end within `soon` seconds, unless they are renewed.
        past_expiry: Leases that ended by their time, and that nobody has given back: those in
            `State.PAST_EXPIRY`, and those whose key is free again and was not taken since. Redis
            removes their records by itself.
        settled: Keys that are kept after their run: `State.SETTLED`.
        no_expiry: Keys that are held without expiry: `State.NO_EXPIRY`.
        stop_requested: Holders that were asked to stop, and have not.
        overdue: Of all leases that have been renewed, the most of its ttl that has gone since:
            about 1/3 where every holder lives; None: there are none, or too many to look at.
        most_waited: The keys that most wait for, and how many do.
        observed_at: The store's clock when it was looked at.
    """

    backend: str
    overdue: float | None
    most_waited: tuple[tuple[str, int], ...]
    soon: float
    observed_at: datetime

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry. `estimated` names the numbers that are about so."""
        waited = [{"key": key, "waiting": number} for key, number in self.most_waited]
        return {
            "backend": self.backend,
            **counted(self, States),
            "overdue": self.overdue,
            "most_waited": waited,
            **by_name(self, "soon", "observed_at"),
        }


def summary(backend: str = "default", *, soon: Duration = SOON) -> Summary:
    """Count what is held by its state. It only reads, and takes no longer where there is more.

    On PostgreSQL numbers are estimated where there are more than 100 000 records. On Redis they
    are those of a sample of 10 000 of the server's keys, where there are more.

    Args:
        soon: Seconds within which a lease ends to be counted as ending soon.

    Raises:
        InvalidLockBackend: There is no such backend.
        BackendUnavailable: The store is unavailable.
        LockUsageError: The backend cannot list its locks.
    """
    store, within = lock_backends[backend], seconds(soon, "soon")
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
    """How much a backend keeps.

    Attributes:
        counts: Of locks, waiters and counters, of this backend alone.
    """

    backend: str
    counts: Counts

    @property
    def sizes(self) -> Sizes | None:
        """Of the tables that it shares with others of its database; None: it has none."""
        return self.counts.sizes

    @property
    def memory(self) -> int | None:
        """Bytes that its servers use for all that they keep; None: it has none, or is not told."""
        return self.counts.memory

    @property
    def warnings(self) -> tuple[str, ...]:
        """What somebody should know."""
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
    """Count what a backend keeps. It only reads.

    Raises:
        InvalidLockBackend: There is no such backend.
        BackendUnavailable: The store is unavailable.
        LockUsageError: The backend cannot list its locks, and has no other way to count them.
    """
    store = lock_backends[backend]
    return Statistics(backend=store.alias, counts=store.counts())
