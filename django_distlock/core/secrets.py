"""Texts that nobody is to read by chance: in a report of an error, or in a pickle."""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn, TypeVar

S = TypeVar("S", bound="Secret")

#: What stands between `//` and the last `@` of an address.
_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s'\"]*@")


class Secret(str):
    """A text that is one wherever it is used as such, and masked wherever it is shown.

    Reports of errors show the `repr` of what is in the frames. `str()` gives the plain text.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()}>"

    def __copy__(self: S) -> S:
        return self

    def __deepcopy__(self: S, memo: Any) -> S:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__.lower()} cannot be pickled, because the pickle would expose"
            " it. Use dump() to hand a lease to another process."
        )


class Token(Secret):
    """The proof that a lease is ours."""

    __slots__ = ()


def forget_frames(error: BaseException | None) -> None:
    """Drop what was going on where an error was raised, and the errors behind it.

    Some drivers write values into their statements, which stand in their frames then.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__


def without_credentials(text: str) -> str:
    """Return a text without what addresses in it tell of users and passwords."""
    return _CREDENTIALS.sub("…@", text)
