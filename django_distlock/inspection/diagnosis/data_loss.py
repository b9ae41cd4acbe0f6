"""Whether Redis still has its data: a mark in it, and what a database remembers of that mark."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING, Final

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.utils.connection import ConnectionDoesNotExist

from ...backends.base import BaseLockBackend
from ...checks.configured import is_redis
from ...core.errors import LockUsageError
from ...core.keys import own_key
from ...core.logs import log_fields
from ...core.wording import instant
from ...fencing.seen import confirm_mark, seen_at, set_mark
from ...handler import lock_backends
from .findings import Mark, Notes

if TYPE_CHECKING:
    from ...backends.redis import RedisBackend

logger = logging.getLogger("django_distlock")

_WHAT: Final = "data"
#: What comes of a database that remembers nothing.
_UNTOLD: Final = (Error, ConnectionDoesNotExist, ImproperlyConfigured, LockUsageError)
_LOST: Final = (
    "What was held then may be granted again, unique tasks that were queued may be queued and run a"
    " second time, and pauses are gone. Fences follow the clock, so they rise all the same, but for"
    " those that were raised above it. When that is dealt with, as the runbook says:"
    " distlock_doctor --accept-loss {alias}"
)


def look_for_loss(store: BaseLockBackend, notes: Notes, *, writes: bool) -> None:
    """Note whether a Redis has lost its data since it was looked at last.

    The first look gives it a mark, where it may write.

    Raises:
        LockError: It did not answer.
    """
    if not is_redis(store):
        return
    found = store.data_mark()
    try:
        text = _compared(store, found, notes, writes=writes)
    except _UNTOLD as error:
        text = f"whether it was lost cannot be told without a database that remembers: {error}"
        notes.skip(_WHAT, text)
    else:
        if text:
            notes.look(_WHAT, text, Mark.SKIPPED if found is None and not writes else Mark.OK)


def has_lost(store: BaseLockBackend) -> bool:
    """Say whether a Redis has lost its data, as far as that can be told. It writes nothing.

    Raises:
        LockError: It did not answer.
    """
    if not is_redis(store):
        return False
    found = store.data_mark()
    try:
        known = seen_at(_name(store))
    except _UNTOLD:
        return False
    return known is not None and (found is None or found[0] != known[0])


def accept_loss(alias: str, actor: str) -> None:
    """Remember the data that a Redis has now as its own, whatever it has lost before.

    Raises:
        LockUsageError: The backend is none of Redis.
        LockError: The store did not answer.
        django.db.Error: The database that remembers did not.
    """
    store = lock_backends[alias]
    if not is_redis(store):
        raise LockUsageError(f"{alias!r} is no backend of Redis: only those are marked.")
    mark, at = store.mark_data()
    before = set_mark(_name(store), mark)
    extra = log_fields("loss_accepted", backend=alias)
    logger.warning(
        "The data of %r since %s counts from now on, by %s; the mark was %s.",
        alias, instant(at), actor, before, extra=extra,
    )  # fmt: skip


def _compared(
    store: RedisBackend, found: tuple[int, datetime] | None, notes: Notes, *, writes: bool
) -> str:
    """Return what was seen where nothing is wrong; "": there is a finding."""
    known = seen_at(_name(store))
    if known is None:
        if not writes:
            return "not marked yet: that needs a run without --no-write"
        mark, at = found or store.mark_data()
        set_mark(_name(store), mark)
        return f"marked: what is lost from now on is noticed (since {instant(at)})"
    mark, seen = known
    if found is not None and found[0] == mark:
        if writes:
            confirm_mark(_name(store), mark)
        return f"all that there was since {instant(found[1])}"
    until = store.clock() if found is None else found[1]
    notes.find(
        "D022",
        _WHAT,
        f"Redis has lost its data, between {instant(seen)} and {instant(until)}: it was"
        " emptied, came back without it, or is another server",
        _LOST.format(alias=store.alias),
        level=checks.ERROR,
    )
    return ""


def _name(store: BaseLockBackend) -> str:
    return own_key(f"data-mark:{store.alias}:{store.key_prefix}")
