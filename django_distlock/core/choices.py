"""Arguments that are one of a few words."""

from __future__ import annotations

from .errors import InvalidArgument, shown


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that an argument is one of the words it may be.

    Raises:
        InvalidArgument: It is not. The message names all of them.
    """
    if value not in choices:
        known = ", ".join(f'"{each}"' for each in choices)
        raise InvalidArgument(f"{name} is one of {known}, not {shown(value)}.")
