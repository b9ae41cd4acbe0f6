"""The highest fence that was seen for a key: a row that is only ever raised."""

from __future__ import annotations

from functools import cache

from django.db import IntegrityError, router

from .. import vendors
from ..connections import LockConnections, NoConnectionFree
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable
from ..models import SeenFence
from .rejecting import Fenced, require_fence

#: How many connections a process opens at most, where the thread's own cannot be used.
_CONNECTIONS = 4


def see(by: Fenced, using: str | None = None) -> int:
    """Raise the mark of a key to a fence, unless it is higher; return where it is then.

    The mark is committed when this returns, whatever becomes of a transaction of the caller's. A
    fence that was seen before costs one query, and writes nothing.

    Args:
        by: The key and the fence that came.
        using: The database; None: where the router writes `SeenFence`.

    Returns:
        The highest fence that was ever seen for the key: above that of `by`, if `by` is stale.

    Raises:
        LockUsageError: `by` has no fence; or SQLite, and a transaction of this thread's own is in
            the way of writing.
        BackendUnavailable: All of our connections were in use for a second.
    """
    key, fence = by.key, require_fence(by)
    using = router.db_for_write(SeenFence) if using is None else using
    ours = _connections(using)
    try:
        with ours.use(writes=False):
            mark = _mark(using, key)
        # Whoever is overtaken looks again, at a mark that has grown: this ends.
        while mark is None or mark < fence:
            with ours.use():
                done = _raise(using, key, fence) if mark is not None else _make(using, key, fence)
                mark = fence if done else _mark(using, key)
    except NoConnectionFree as error:
        raise BackendUnavailable(str(error), key=key, code="network_timeout") from error
    return mark


def _mark(using: str, key: str) -> int | None:
    found = SeenFence.objects.using(using).filter(pk=key).values_list("fence", flat=True)
    return found.first()


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
def _connections(using: str) -> LockConnections:
    return LockConnections(using, _CONNECTIONS)
