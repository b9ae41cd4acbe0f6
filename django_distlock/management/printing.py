"""What commands print, to whoever is there to read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from django.core.management.base import OutputWrapper


class Printer(OutputWrapper):
    """Prints an escape for each letter of a key that the encoding of the terminal lacks.

    A text that cannot be printed stops no command in the middle of its work: nobody reads it any
    more, as behind `| head`, the disk is full, or `2>&-` has closed the stream.

    Attributes:
        failure: Why something is missing that somebody may look for; None: nothing is.
    """

    failure: OSError | None = None

    @classmethod
    def instead_of(cls, wrapper: OutputWrapper) -> Self:
        """Return one that prints to the same place, in the same style."""
        printer = cls(wrapper._out)  # type: ignore[arg-type]
        printer.style_func = wrapper.style_func
        return printer

    def write(  # type: ignore[override]
        self, msg: str = "", style_func: Any = None, ending: str | None = None
    ) -> None:
        """Print a text."""
        if self._out is None:
            return
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        text = msg.encode(encoding, "backslashreplace").decode(encoding)
        with self._unread():
            super().write(text, style_func, ending)

    def flush(self) -> None:
        """Print what was not printed yet."""
        with self._unread():
            super().flush()

    @contextmanager
    def _unread(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.failure = error
            # Also what is still to be written, when the interpreter ends.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())  # type: ignore[attr-defined]
