"""Label metrics with prefixes of keys: texts of the project's code, never of its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Final

from ...core.declarations import declarations, declared, head_of
from ...core.errors import InvalidArgument, shown
from ...core.keys import OWN_MARKER, nfc

#: How many prefixes have a label of their own, unless an exporter is installed with another number.
MOST: Final = 100
#: Characters of the longest prefix.
LONGEST: Final = 64
#: The labels of prefixes above either limit or not declared, and of keys without a prefix.
OTHER: Final = "other"
NONE: Final = "none"


def before_colon(key: str) -> str:
    """Return the part of a key before its first colon; "": it has none.

    Of this package's own keys, which begin with their kind, it is the part before the second colon:
    the kind, with the name of a schedule or the prefix of a unique task.
    """
    if key.startswith(OWN_MARKER):
        return ":".join(key.split(":", 2)[:2])
    prefix, colon, _rest = key.partition(":")
    return prefix if colon else ""


class Prefixes:
    """Finds the prefix of a key if the project's code names it; `"other"` for all others.

    A prefix is named if it is in `named`, or if the template of a decorator has the prefix and the
    character after it before its first field.

    Args:
        most: How many prefixes get a label of their own: those that this process meets first.
        prefix_of: Returns the prefix of a key; "" if it has none.
        named: Prefixes with a label of their own although no template begins with them.

    Raises:
        InvalidArgument: `most` is no int of at least 0, or `named` is no collection of texts.
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
        """Return the label of a key."""
        prefix = self._prefix_of(key) if key else ""
        if not key or not prefix:
            return NONE
        if key.startswith(OWN_MARKER) and not self._is_named(prefix, key):
            prefix = key.partition(":")[0]  # The kind of this package's own key.
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
        # Compare the next character, too: a client's `inv:` is not the `invoice:` of a template.
        start = key[: len(prefix) + 1]
        ends = start == prefix
        return any(head == start if ends else head.startswith(start) for head in self._declared())

    def _declared(self) -> frozenset[str]:
        """Return the texts with which the templates declared so far begin."""
        version, heads = self._heads
        if version is not declared.version:
            # Read the version first, so that a declaration added meanwhile is found next time.
            version = declared.version
            found = (each for _made, each in declarations() if each.is_template)
            heads = frozenset(_stored(head_of(each.key)[0]) for each in found)
            self._heads = version, heads
        return heads


def _stored(head: str) -> str:
    """Return the beginning of a template as in stored keys. No NFC text contains the marker."""
    if head.startswith(OWN_MARKER):
        return OWN_MARKER + nfc(head.removeprefix(OWN_MARKER))
    return nfc(head)
