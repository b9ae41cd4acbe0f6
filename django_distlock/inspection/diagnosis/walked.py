"""What Redis keeps beside the locks, found by walking through its keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ...backends.redis import RedisBackend
from ...core.holders import Holder

#: Keys of a page.
PAGE: Final = 1000


def waiting(store: RedisBackend) -> Iterator[tuple[str, list[Holder]]]:
    """Yield the keys that somebody waits for, and who."""
    for key in keys_with(store, "waiters"):
        yield key, [each.holder for each in store.waiters.of(key)]


def keys_with(store: RedisBackend, role: str) -> Iterator[str]:
    """Yield the keys that something is kept of, such as `"waiters"`, each once."""
    ours = re.compile(r"\{.{22}\}:(.*)", re.DOTALL)
    known: set[str] = set()
    for page in store.store.walk(store._at(role, ""), "*", None, PAGE):
        for name, _place in page:
            if (match := ours.fullmatch(name)) and match[1] not in known:
                known.add(match[1])
                yield match[1]
