"""Whether something is going on that a signal's exception may end in its midst."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING


class Underway:
    """Is true for as long as a block of it is open, also where that was left in its midst."""

    def __init__(self) -> None:
        self._open: Callable[[], object] = _is_not

    def __bool__(self) -> bool:
        return self._open() is not None

    def __enter__(self) -> None:
        return None

    if TYPE_CHECKING:

        def __exit__(self, *_: object) -> None: ...

    else:

        def _watched(self):
            sentinel = functools.partial(_is_not)
            self._open = weakref.ref(sentinel)
            return sentinel

        __exit__ = property(_watched)


def _is_not(*_: object) -> None:
    return None
