"""How much Redis keeps of locks: counted in one walk through its keys, a page at a time."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ...core.errors import LockError
from ..counts import Count, Counts
from .lines import ThreadLines
from .store import text

if TYPE_CHECKING:
    from . import RedisBackend

#: Keys that are asked about at once.
_PAGE: Final = 1000

_OURS = re.compile(r"(lock|fence|waiters):(\{.{22}\}:)", re.DOTALL)


def count_keys(store: RedisBackend) -> Counts:
    """Count what a backend keeps. The server goes on with its work meanwhile.

    All numbers are about so: what comes and goes meanwhile may be counted or not, and a key twice
    where the server makes its table of keys larger or smaller.
    """
    found: Counter[str] = Counter()
    highest = waiters = 0
    prefix = f"{store.key_prefix}:" if store.key_prefix else ""
    for line, page in store.store.walk_lines(prefix, "*", None, _PAGE):
        names: dict[str, list[str]] = {"lock": [], "fence": [], "waiters": []}
        for name, _place in page:
            if match := _OURS.match(name):
                names[match[1]].append(name.removeprefix(f"{match[1]}:"))
        found.update({role: len(each) for role, each in names.items()})
        highest = max([highest, *_fences(store, line, prefix, names["fence"])])
        waiters += sum(
            store.store.waiting(line, [f"{prefix}waiters:{each}" for each in names["waiters"]])
        )
    return Counts(
        held=Count(found["lock"], is_exact=False),
        # The server removes them by itself.
        expired=Count(0),
        waiters=Count(waiters, is_exact=False),
        counters=Count(found["fence"], is_exact=False),
        highest=Count(highest, is_exact=False) if highest else None,
        memory=_used_memory(store),
    )


def _used_memory(store: RedisBackend) -> int | None:
    """Return the bytes that the servers use for all that they keep; None: they do not tell."""
    with suppress(LockError):
        told = store.store.of_each_server("INFO", "memory")
        return sum(map(_used, told.values()))
    return None


def _used(told: Any) -> int:
    found = re.search(r"^used_memory:(\d+)", text(told), re.MULTILINE)
    return int(found[1]) if found else 0


def _fences(store: RedisBackend, line: ThreadLines, prefix: str, names: list[str]) -> list[int]:
    told = store.store.values(line, [f"{prefix}fence:{name}" for name in names])
    # What somebody has spoiled is counted, and hides nothing of the rest.
    return [int(each) for each in told if each.isdecimal()]
