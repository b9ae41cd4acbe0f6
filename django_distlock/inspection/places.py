"""Where in the code something stands, as far as Python tells without its source."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A function, or a class, in a file.

    Attributes:
        file: As Python knows it, most often an absolute path; "": nobody knows.
        line: Of its first decorator, or of `def` and `class` themselves; None: nobody knows.
        name: Its dotted name.
    """

    file: str
    line: int | None
    name: str

    @classmethod
    def of(cls, made: object) -> Place:
        """Return where that stands which a decorator was put on."""
        # What `as_view()` returns stands in Django.
        subject = _innermost(getattr(made, "view_class", made))
        code = getattr(subject, "__code__", None)
        if code is not None:
            return cls(file=code.co_filename, line=code.co_firstlineno, name=_name(subject))
        kind = subject if isinstance(subject, type) else type(subject)
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        return cls(file=file, line=_line(kind, file), name=_name(kind))


def _innermost(made: Any) -> Any:
    """Return the function that others are wrapped around."""
    while not isinstance(made, type):
        inner = getattr(made, "__wrapped__", None) or getattr(made, "__func__", None)
        # Of a partial.
        inner = inner or (None if inspect.isfunction(made) else getattr(made, "func", None))
        if inner is None:
            break
        made = inner
    return made


def _line(kind: type, file: str) -> int | None:
    """Return the line where a class begins; before Python 3.13, where its first method does."""
    first = vars(kind).get("__firstlineno__")
    if first is not None:
        return int(first)
    codes = [getattr(_innermost(each), "__code__", None) for each in vars(kind).values()]
    lines = [code.co_firstlineno for code in codes if code and code.co_filename == file]
    return min(lines, default=None)


def _name(subject: Any) -> str:
    return f"{subject.__module__}.{subject.__qualname__}"
