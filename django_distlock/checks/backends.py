"""`distlock.W004` to `W006`: settings that are legal, and cost something."""

from __future__ import annotations

from typing import Any, Final

from django.core import checks

from ..backends.base import BaseLockBackend
from ..declarations import declarations
from ..scheduling import RunScope
from .configured import DOCS, configured, where

#: The part of a ttl after which two renewals fit into what is left of it.
_MOST_OF_THE_TTL: Final = 1 / 3

#: Bytes. With more, a counter takes twice the room and above that it takes behind "distlock": 258
#: bytes for 135 on PostgreSQL, where the prefix is in the row and in the index. And it stays.
_LONG_PREFIX: Final = 64

#: Schedules that say themselves that each node may run them.
_PER_NODE: Final = {RunScope.PREFER_GLOBAL.value, RunScope.NODE_LOCAL.value}


@checks.register("distlock")
def check_heartbeat(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W004: a renewal that gets no answer leaves the time for another one."""
    return [
        checks.Warning(
            f"{where(backend)} renews a lease after {part:.0%} of its ttl (HEARTBEAT). Where one"
            f" renewal gets no answer, at most {1 - 2 * part:.0%} of the ttl is left when the next"
            " one is due, less the time that the first one waited: one failure may end a lease.",
            hint=f"Set HEARTBEAT to 1/3 or less. {DOCS}",
            id="distlock.W004",
        )
        for backend in configured(BaseLockBackend)
        if (part := backend.config.heartbeat) > _MOST_OF_THE_TTL
    ]


@checks.register("distlock", deploy=True)
def check_memory(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W005: no other process sees the locks. Asked by `check --deploy` alone.

    Quiet where all that is known to use a backend are schedules that may run on each node.
    """
    found: list[checks.CheckMessage] = []
    for backend in configured(BaseLockBackend):
        users = [each for _, each in declarations() if each.lock.backend == backend.alias]
        strict = sorted({each.key for each in users if each.scope not in _PER_NODE})
        if backend.distributed or (users and not strict):
            continue
        named = f" Among others, {strict[0]!r} is locked there." if strict else ""
        found.append(
            checks.Warning(
                f"{where(backend)} keeps its locks in the memory of a process: no other process"
                f" sees them, and each may hold the same key.{named}",
                hint="Use a backend that processes share: see docs/howto/choose-a-database.md.",
                id="distlock.W005",
            )
        )
    return found


@checks.register("distlock")
def check_prefixes(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W006: a prefix costs its length for each key that was ever locked.

    One that a store cannot take is refused, as `distlock.E001`. What is left is only wasteful.
    """
    return [
        checks.Warning(
            f"{where(backend)} has a KEY_PREFIX of {size} bytes. It is kept with each key that was"
            " ever locked, for good.",
            hint=f"Choose one of at most {_LONG_PREFIX} bytes before there are counters: with"
            f" another prefix, fences start anew. {DOCS}",
            id="distlock.W006",
        )
        for backend in configured(BaseLockBackend)
        if (size := len(backend.key_prefix.encode())) > _LONG_PREFIX
    ]
