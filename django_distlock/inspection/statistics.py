"""How much there is of everything, for whoever plans ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..backends.counts import Counts, Sizes, counted
from ..core.documents import by_name
from ..handler import lock_backends

#: Fence counters of a backend above which it warns: they are never deleted.
MANY_COUNTERS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """How much a backend keeps.

    Attributes:
        backend: Its alias.
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
        BackendUnavailable: The store did not answer.
        LockUsageError: The backend cannot list its locks, and has no other way to count them.
    """
    store = lock_backends[backend]
    return Statistics(backend=store.alias, counts=store.counts())
