"""What stands for a key in a metric: text of the project's code, and never of its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Final

from ...core.declarations import declarations, declared, head_of
from ...core.errors import InvalidArgument, shown
from ...core.keys import OWN_MARKER, nfc

#: Prefixes that are told apart, unless an exporter is installed with another number.
MOST: Final = 100
#: Characters of the longest one.
LONGEST: Final = 64
#: Stands for those above either number, for what nobody has declared, and for a key that has none.
OTHER: Final = "other"
NONE: Final = "none"


def before_colon(key: str) -> str:
    """Return the part of a key before its first colon; "": it has none.

    Of a key of this package's own, which begins with its kind, before the second one: the name of a
    schedule, or the prefix of a unique task.
    """
    if key.startswith(OWN_MARKER):
        return ":".join(key.split(":", 2)[:2])
    prefix, colon, _rest = key.partition(":")
    return prefix if colon else ""


class Prefixes:
    """Gives the prefixes of keys that the project's code names, and `"other"` for the rest.

    A prefix is named where it is in `named`, or where a template that a decorator declares has it,
    and the character after it, before its first field.

    Args:
        most: How many are told apart: those that this process meets first.
        prefix_of: Gives the prefix of a key; "" where it has none.
        named: Prefixes that are told apart though no template begins with them.

    Raises:
        InvalidArgument: `most` is no int of at least 0; `named` is no collection of texts.
    """

    def __init__(
        self,
        most: int = MOST,
        prefix_of: Callable[[str], str] | None = None,
        named: Collection[str] = (),
    ):
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise InvalidArgument(f"prefixes must be an int of at least 0, not {shown(most)}.")
        if (
            isinstance(named, str)
            or not isinstance(named, Collection)
            or not all(isinstance(each, str) for each in named)
        ):
            raise InvalidArgument(f"named must be a list of prefixes, not {shown(named)}.")
        self._most = most
        self._prefix_of = prefix_of or before_colon
        self._named = frozenset(map(nfc, named))
        self._known: set[str] = set()
        self._heads: tuple[object, frozenset[str]] = (None, frozenset())
        self._mutex = threading.Lock()

    def of(self, key: str | None) -> str:
        """Return what stands for a key."""
        prefix = self._prefix_of(key) if key else ""
        if not key or not prefix:
            return NONE
        if key.startswith(OWN_MARKER) and not self._is_named(prefix, key):
            prefix = key.partition(":")[0]  # This package's own word.
        if len(prefix) > LONGEST or not prefix.isprintable() or not self._is_named(prefix, key):
            return OTHER
        if prefix not in self._known:
            with self._mutex:
                if len(self._known) < self._most:
                    self._known.add(prefix)
        return prefix if prefix in self._known else OTHER

    def _is_named(self, prefix: str, key: str) -> bool:
        if prefix in self._named:
            return True
        if not key.startswith(prefix):
            return False
        if key.startswith(OWN_MARKER) and prefix == key.partition(":")[0]:
            return True
        # With what ends it: a client's `inv:` is not the `invoice:` of a template.
        start = key[: len(prefix) + 1]
        ends = start == prefix
        return any(head == start if ends else head.startswith(start) for head in self._declared())

    def _declared(self) -> frozenset[str]:
        """Return what the templates begin with that are declared by now."""
        version, heads = self._heads
        if version is not declared.version:
            # Before the look: what is added meanwhile makes the next one look again.
            version = declared.version
            found = (each for _made, each in declarations() if each.is_template)
            heads = frozenset(_stored(head_of(each.key)[0]) for each in found)
            self._heads = version, heads
        return heads


def _stored(head: str) -> str:
    """Return the beginning of a template as keys have it. The marker is in no NFC text."""
    if head.startswith(OWN_MARKER):
        return OWN_MARKER + nfc(head.removeprefix(OWN_MARKER))
    return nfc(head)
