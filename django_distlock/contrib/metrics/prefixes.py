"""What stands for a key in a metric: never the key itself, and one of a bounded number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from ...core.errors import InvalidArgument, shown

#: Prefixes that are told apart, unless an exporter is installed with another number.
MOST: Final = 100
#: Characters of the longest one.
LONGEST: Final = 64
#: Stands for those above either number, and for a key that has none.
OTHER: Final = "other"
NONE: Final = "none"


def before_colon(key: str) -> str:
    """Return the part of a key before its first colon; "": it has none."""
    prefix, colon, _rest = key.partition(":")
    return prefix if colon else ""


class Prefixes:
    """Gives the prefixes of keys, and `"other"` once there are too many.

    Args:
        most: How many are told apart: those that this process meets first.
        prefix_of: Gives the prefix of a key; "" where it has none.

    Raises:
        InvalidArgument: `most` is no int of at least 0.
    """

    def __init__(self, most: int = MOST, prefix_of: Callable[[str], str] | None = None):
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise InvalidArgument(f"prefixes must be an int of at least 0, not {shown(most)}.")
        self._most = most
        self._prefix_of = prefix_of or before_colon
        self._known: set[str] = set()
        self._mutex = threading.Lock()

    def of(self, key: str | None) -> str:
        """Return what stands for a key."""
        prefix = self._prefix_of(key) if key else ""
        if not prefix:
            return NONE
        if prefix in self._known:
            return prefix
        if len(prefix) > LONGEST or not prefix.isprintable():
            return OTHER
        with self._mutex:
            if len(self._known) < self._most:
                self._known.add(prefix)
        return prefix if prefix in self._known else OTHER
