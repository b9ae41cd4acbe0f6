"""The highest fence that was seen for a key: a row that is only ever raised."""

from __future__ import annotations

from functools import cache

from django.db import IntegrityError, connections, router

from .. import vendors
from ..borrowing import NoConnectionFree
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, LockUsageError
from ..models import SeenFence
from ..schemas import TableConnections
from .rejecting import Fenced, require_fence

#: How many connections a process opens at most, where the thread's own cannot be used.
_CONNECTIONS = 4

#: Where these routers wrote the first mark of this process.
_first: list[tuple[object, str]] = []


def see(by: Fenced, using: str | None = None) -> int:
    """Raise the mark of a key to a fence, unless it is higher; return where it is then.

    The mark is committed when this returns, whatever becomes of a transaction of the caller's. A
    fence that was seen before costs one query, and writes nothing.

    Args:
        by: The key and the fence that came.
        using: The database; None: where the router writes `SeenFence`, each time.

    Returns:
        The highest fence that was ever seen for the key: above that of `by`, if `by` is stale.

    Raises:
        LockUsageError: `by` has no fence; or a router does not send all marks to one database; or
            SQLite, and a transaction of this thread's own is in the way of writing.
        BackendUnavailable: All of our connections were in use for a second.
    """
    key, fence = by.key, require_fence(by)
    using = _routed() if using is None else using
    ours = _connections(using)
    try:
        with ours.use(writes=False, single=True) as on:
            mark = _mark(ours, on, key)
        # Whoever is overtaken looks again, at a mark that has grown: this ends.
        while mark is None or mark < fence:
            with ours.use() as on:
                done = _raise(on, key, fence) if mark is not None else _make(on, key, fence)
                mark = fence if done else _mark(ours, on, key)
    except NoConnectionFree as error:
        raise BackendUnavailable(str(error), key=key, code="network_timeout") from error
    return mark


def _routed() -> str:
    """Return where the router writes marks, as it did before: in two places none is the highest.

    Raises:
        LockUsageError: It answers otherwise now.
    """
    using = router.db_for_write(SeenFence)
    # Other routers are other settings, as in tests.
    if not _first or _first[-1][0] is not router.routers:
        _first[:] = [(router.routers, using)]
    first = _first[-1][1]
    if using != first:
        raise LockUsageError(
            f"The routers of DATABASE_ROUTERS send SeenFence to {using!r} now, and sent it to"
            f" {first!r} before. A stale fence would pass where a newer one was not seen: let them"
            f" answer the same for django_distlock in every context."
        )
    return using


def _mark(ours: TableConnections, on: str, key: str) -> int | None:
    # Not by the model, which names no schema: the caller's connection may look in another one.
    table, column = ours.name("seen").replace("%", "%%"), connections[on].ops.quote_name("key")
    with connections[on].cursor() as cursor:
        cursor.execute(f"SELECT fence FROM {table} WHERE {column} = %s", [key])  # noqa: S608
        found = cursor.fetchone()
    return None if found is None else int(found[0])


def _raise(using: str, key: str, fence: int) -> bool:
    """Raise the mark, if it is lower; compared in the statement that writes."""
    store = vendors.of(using)
    with store.short_transaction(MAX_BOUND):
        store.make_durable()
        lower = SeenFence.objects.using(using).filter(pk=key, fence__lt=fence)
        return bool(lower.update(fence=fence, raised_at=store.now()))


def _make(using: str, key: str, fence: int) -> bool:
    """Make the mark, if there is none."""
    store = vendors.of(using)
    try:
        with store.short_transaction(MAX_BOUND):
            store.make_durable()
            rows = SeenFence.objects.using(using)
            rows.create(key=key, fence=fence, raised_at=store.now())
    except IntegrityError as error:
        if not store.is_duplicate(error):
            raise
        return False
    return True


@cache
def _connections(using: str) -> TableConnections:
    return TableConnections(using, _CONNECTIONS, looked_for="seen")
