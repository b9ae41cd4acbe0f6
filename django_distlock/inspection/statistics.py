"""How much there is of everything, for whoever plans ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..backends.base import BaseLockBackend
from ..backends.counts import Count, Counts, Sizes, counted
from ..core.documents import by_name
from ..handler import lock_backends

#: Fence counters of a backend above which it warns: they are never deleted.
MANY_COUNTERS = 10_000_000

_REDIS = "django_distlock.backends.redis.RedisBackend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """How much a backend keeps.

    Attributes:
        backend: Its alias.
        counts: Of locks, waiters and counters, of this backend alone.
        sizes: Of the tables that it shares with others of its database; None: it has none.
        memory: Bytes that its servers use for all that they keep; None: it has none, or they do
            not tell.
    """

    backend: str
    counts: Counts
    sizes: Sizes | None = None
    memory: int | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What somebody should know."""
        counters = self.counts.counters
        if counters is None or counters.number <= MANY_COUNTERS:
            return ()
        about = "" if counters.is_exact else "about "
        warning = (
            f"The lock backend {self.backend!r} has {about}{counters.number} fence counters, more"
            f" than {MANY_COUNTERS}. They are never deleted: lock what there is a bounded"
            " number of."
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
    # With these come the models, which are there when the apps are ready.
    from ..backends.counting import count_rows, sizes
    from ..backends.database import DatabaseBackend
    from ..backends.tables import FenceTable

    store = lock_backends[backend]
    if isinstance(store, DatabaseBackend):
        counts = count_rows(store, locks=True)
        return Statistics(backend=store.alias, counts=counts, sizes=sizes(store))
    if isinstance(store, FenceTable):
        rows = count_rows(store, locks=False)
        counts = Counts(held=_listed(store), counters=rows.counters, highest=rows.highest)
        return Statistics(backend=store.alias, counts=counts, sizes=sizes(store))
    if is_redis(store):
        # Its driver need not be installed for the others.
        from ..backends.redis.counting import count_keys, used_memory

        memory = used_memory(store)  # type: ignore[arg-type]
        return Statistics(backend=store.alias, counts=count_keys(store), memory=memory)  # type: ignore[arg-type]
    return Statistics(backend=store.alias, counts=Counts(held=_listed(store)))


def is_redis(store: BaseLockBackend) -> bool:
    """Whether a backend is that of Redis, whose driver need not be installed for the others."""
    return any(f"{each.__module__}.{each.__qualname__}" == _REDIS for each in type(store).__mro__)


def _listed(store: BaseLockBackend) -> Count:
    """Count what is held, page by page."""
    number, cursor = 0, None
    while True:
        page = store.list(cursor=cursor, limit=1000)
        number += len(page.records)
        if (cursor := page.cursor) is None:
            return Count(number)
