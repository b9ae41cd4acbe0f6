"""How people read durations, times, and text that others wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Final

#: What Python calls printable, and fonts show as nothing: of Unicode's
#: `Default_Ignorable_Code_Point`, and the blank of Braille.
_UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


def printable(text: str) -> str:
    """Return a text with an escape for each character that cannot be seen.

    Line ends, control characters, characters without width and those that turn the direction of
    text: they forge lines of a log, and make one key look like another.
    """
    if is_seen(text):
        return text
    return "".join(
        each if is_seen(each) else each.encode("unicode_escape").decode() for each in text
    )


def is_seen(text: str) -> bool:
    """Return whether a text has no character that cannot be seen."""
    return text.isprintable() and _UNSEEN.search(text) is None


def span(seconds: float | None, digits: int = 1) -> str:
    """Return a duration in the two units that say most, with `digits` of seconds; "-": none."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{math.floor(seconds * 10**digits) / 10**digits:.{digits}f} s"
    for unit, size, smaller, part in (("min", 60, "s", 1), ("h", 3600, "min", 60)):
        if seconds < size * (60 if unit == "min" else 24):
            return f"{seconds // size:.0f} {unit} {seconds % size // part:.0f} {smaller}"
    return f"{seconds // 86400:.0f} d {seconds % 86400 // 3600:.0f} h"


def instant(when: datetime | None) -> str:
    """Return a time in UTC, to the second; "-": none."""
    return "-" if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def counted(number: int, noun: str) -> str:
    """Return a number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def suggestion(unknown: object, known: Collection[str]) -> str:
    """Return a sentence that names the nearest of the known names, with a space before; "": none.

    Args:
        unknown: What somebody wrote instead. Capitals make no difference.
    """
    names = {each.casefold(): each for each in known}
    near = get_close_matches(str(unknown).casefold(), names, 1, cutoff=0.7)
    return f" Did you mean {names[near[0]]!r}?" if near else ""
