"""Detects whether Redis has lost its data, by a mark in it that a database remembers."""

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
from ...core.keys import hashed_key, own_key
from ...core.logs import log_fields
from ...core.wording import instant
from ...fencing.seen import confirm_mark, seen_at, set_mark
from ...handler import lock_backends
from .findings import Mark, Notes

if TYPE_CHECKING:
    from ...backends.redis import RedisBackend

logger = logging.getLogger("django_distlock")

_WHAT: Final = "data"
#: Errors of a database that cannot remember a mark.
_UNTOLD: Final = (Error, ConnectionDoesNotExist, ImproperlyConfigured, LockUsageError)
_LOST: Final = (
    "Keys that were held may be granted again, queued unique tasks may run a second time, and"
    " pauses are lost. Fences follow the clock and still rise, except fences that were raised"
    " above the clock. After you have followed the runbook, run: distlock_doctor --accept-loss"
    " {alias}"
)


def look_for_loss(store: BaseLockBackend, notes: Notes, *, writes: bool) -> None:
    """Note whether a Redis has lost its data since the last look at it.

    The first look gives it a mark, if `writes` allows that.
    """
    if not is_redis(store):
        return
    found = store.data_mark()
    try:
        text = _compared(store, found, notes, writes=writes)
    except _UNTOLD as error:
        text = f"data loss cannot be detected, because the database that records it failed: {error}"
        notes.skip(_WHAT, text)
    else:
        if text:
            notes.look(_WHAT, text, Mark.SKIPPED if found is None and not writes else Mark.OK)


def has_lost(store: BaseLockBackend) -> bool:
    """Return whether a Redis has lost its data; False if that is not known. This writes nothing."""
    if not is_redis(store):
        return False
    found = store.data_mark()
    try:
        known = seen_at(_name(store))
    except _UNTOLD:
        return False
    return known is not None and (found is None or found[0] != known[0])


def accept_loss(alias: str, actor: str) -> None:
    """Accept the present data of a Redis as its own, whatever it has lost before."""
    store = lock_backends[alias]
    if not is_redis(store):
        raise LockUsageError(f"{alias!r} is not a Redis backend. Only Redis backends are marked.")
    mark, at = store.mark_data()
    before = set_mark(_name(store), mark)
    extra = log_fields("loss_accepted", backend=alias)
    logger.warning(
        "The data of %r since %s was accepted by %s. The previous mark was %s.",
        alias, instant(at), actor, before, extra=extra,
    )  # fmt: skip


def _compared(
    store: RedisBackend, found: tuple[int, datetime] | None, notes: Notes, *, writes: bool
) -> str:
    """Return what was seen if nothing is wrong; "": there is a finding."""
    known = seen_at(_name(store))
    if known is None:
        if not writes:
            return "not marked yet: run distlock_doctor without --no-write"
        mark, at = found or store.mark_data()
        set_mark(_name(store), mark)
        return f"marked: data loss is detected from now on (since {instant(at)})"
    mark, seen = known
    if found is not None and found[0] == mark:
        if writes:
            confirm_mark(_name(store), mark)
        return f"all data since {instant(found[1])}"
    until = store.clock() if found is None else found[1]
    notes.find(
        "D022",
        _WHAT,
        f"Redis has lost its data, between {instant(seen)} and {instant(until)}: it was flushed,"
        " restarted without its data, or replaced by another server",
        _LOST.format(alias=store.alias),
        level=checks.ERROR,
    )
    return ""


def _name(store: BaseLockBackend) -> str:
    # Hashed, because a prefix may be longer than a key.
    return own_key(hashed_key("data-mark", f"{store.alias}:{store.key_prefix}"))
