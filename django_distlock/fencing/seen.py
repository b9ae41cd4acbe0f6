"""The highest fence that was seen for a key, its mark: a row that only operators lower.

The argument `using`, and the errors, of all functions are those of `see`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final

from django.db import IntegrityError, connections, router

from .. import conf
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, InvalidArgument, LockUsageError
from ..core.keys import stored_key
from ..core.logs import log_fields
from ..core.records import clock_fence, validate_fence
from ..database import vendors
from ..database.borrowing import NoConnectionFree
from ..database.connections import rows_of
from ..database.schemas import TableConnections
from ..models import SeenFence
from .rejecting import Fenced, require_fence

#: Connections that a process opens at most, for use where the thread's own cannot be used.
_CONNECTIONS = 4

#: How far fences may be ahead of this host's clock or of the mark by default: farther than the
#: clocks of working services differ, or than a key's grants count in that time.
_AHEAD: Final = timedelta(days=1)
_JUMP: Final = _AHEAD // timedelta(microseconds=10)

logger = logging.getLogger("django_distlock")

#: The routers, and the database to which they sent the first mark of this process.
_first: list[tuple[object, str]] = []


class FenceJump(InvalidArgument):
    """A fence is so high that no lock can have granted it. It would refuse all later ones."""

    code = "fence_jump"


def see(by: Fenced, using: str | None = None) -> int:
    """Raise the mark of a key to a fence, unless the mark is higher; return the mark.

    The mark is committed when this returns, even if the caller's transaction is rolled back. A
    fence that was seen before costs one query and no write.

    Args:
        by: The key and the fence that was seen.
        using: The database; None: the one to which the router sends writes of `SeenFence` now.

    Returns:
        The highest fence that was ever seen for the key: above that of `by`, if `by` is stale.

    Raises:
        LockUsageError: `by` has no fence; a router does not send all marks to one database, or
            sends them to none that is supported; or, on SQLite, this thread's own transaction
            prevents the write.
        BackendUnavailable: All connections of this module were in use for a second.
        FenceJump: The fence is too far above the mark (`DISTLOCK_FENCE_JUMP`), which is unchanged.
        InvalidLockBackend: `DISTLOCK_FENCE_JUMP` breaks a rule.
    """
    key, fence = by.key, require_fence(by)
    with _marks(key, using) as ours:
        with ours.use(writes=False, single=True) as on:
            mark = _mark(ours, on, key)
        if mark is None or mark < fence:
            _require_near(key, fence, mark or 0)
        # After being overtaken, the next turn finds a higher mark, so the loop ends.
        while mark is None or mark < fence:
            with ours.use() as on:
                if mark is None:
                    done = _make(on, key, fence)
                else:
                    done = _write(on, key, fence, fence__lt=fence)
                mark = fence if done else _mark(ours, on, key)
    return mark


def mark_of(key: str, using: str | None = None) -> int | None:
    """Return the highest fence that was seen for a key; None: none was."""
    key = stored_key(key)
    with _marks(key, using) as ours, ours.use(writes=False, single=True) as on:
        return _mark(ours, on, key)


def seen_at(key: str, using: str | None = None) -> tuple[int, datetime] | None:
    """Return the mark of a key, and when it was set or confirmed last; None: there is none."""
    key = stored_key(key)
    with _marks(key, using) as ours, ours.use(writes=False) as on:
        return SeenFence.objects.using(on).filter(pk=key).values_list("fence", "raised_at").first()


def confirm_mark(key: str, fence: int, using: str | None = None) -> None:
    """Record the current time for the mark of a key, if the mark is this fence."""
    key = stored_key(key)
    with _marks(key, using) as ours, ours.use() as on:
        _write(on, key, fence, fence=fence)


def set_mark(key: str, fence: int, using: str | None = None) -> int | None:
    """Set the mark of a key, even to a lower fence; return the previous mark, or None.

    For operators, after a mistaken fence. Fences above the new mark pass again, stale or not.
    """
    key, fence = stored_key(key), validate_fence(fence)
    with _marks(key, using) as ours:
        while True:
            with ours.use() as on:
                before = _mark(ours, on, key)
                if before is None:
                    done = _make(on, key, fence)
                else:
                    done = before == fence or _write(on, key, fence, fence=before)
            if done:
                return before


@contextmanager
def _marks(key: str, using: str | None) -> Iterator[TableConnections]:
    try:
        yield _connections(_routed() if using is None else using)
    except NoConnectionFree as error:
        raise BackendUnavailable(str(error), key=key, code="network_timeout") from error


def _require_near(key: str, fence: int, mark: int) -> None:
    """Refuse a fence too far above the mark, because it would refuse all later ones."""
    jump = conf.fence_jump()
    if jump is not None:
        highest, rule = mark + jump, f"DISTLOCK_FENCE_JUMP of {jump}"
    else:
        # A fence counts grants or follows its store's clock, so it is never far above both.
        # This host's clock can replace the store's, because no grant depends on this check.
        highest = max(mark, clock_fence(datetime.now(UTC))) + _JUMP
        rule = "a day above both that and the clock"
    if fence <= highest:
        return
    message = (
        f"The fence {fence} of {key!r} is too far above {mark}, the highest fence seen. With"
        f" {rule}, up to {highest} is accepted."
    )
    extra = log_fields("fence_jump", key=key, fence=fence)
    logger.warning(
        "%s If the fence is correct, accept it with manage.py distlock_fence seen.",
        message,
        extra=extra,
    )
    raise FenceJump(message, key=key)


def _routed() -> str:
    """Return the database of the marks, which must stay the same: of two marks, none is valid."""
    using = router.db_for_write(SeenFence)
    # Other routers mean other settings, as in tests.
    if not _first or _first[-1][0] is not router.routers:
        _first[:] = [(router.routers, using)]
    first = _first[-1][1]
    if using != first:
        raise LockUsageError(
            f"The routers of DATABASE_ROUTERS send SeenFence to {using!r} now, and sent it to"
            f" {first!r} before. A stale fence would pass where a newer one was not seen. They"
            " must return the same database for django_distlock in every context."
        )
    return using


def _mark(ours: TableConnections, on: str, key: str) -> int | None:
    # Not by the model, which names no schema: the caller's connection may have another one.
    table, column = ours.name("seen").replace("%", "%%"), connections[on].ops.quote_name("key")
    found = rows_of(on, f"SELECT fence FROM {table} WHERE {column} = %s", key)  # noqa: S608
    return int(found[0][0]) if found else None


def _write(using: str, key: str, new: int, **which: int) -> bool:
    """Set the mark if it matches `which`; the statement that writes also compares."""
    store = vendors.of(using)
    with store.short_transaction(MAX_BOUND):
        store.make_durable()
        rows = SeenFence.objects.using(using).filter(pk=key, **which)
        return bool(rows.update(fence=new, raised_at=store.now()))


def _make(using: str, key: str, fence: int) -> bool:
    """Create the mark, if there is none."""
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
    if connections[using].vendor not in vendors.VENDORS:
        raise LockUsageError("No database stores the table SeenFence.", code="unsupported")
    return TableConnections(using, _CONNECTIONS, looked_for="seen")
