"""Aligned text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.wording import instant, printable, span

__all__ = ["Cell", "aligned", "instant", "printable", "span"]

#: A cell, and what colours it once it is as wide as its column.
Cell = str | tuple[str, Callable[[str], str]]


def aligned(
    headings: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    style: Callable[[str], str],
    least: list[int] | None = None,
) -> Iterator[str]:
    """Yield the lines of a table, in columns as wide as what is in them.

    Args:
        least: How wide the columns are at least; becomes how wide they are.
    """
    table = [[_parts(cell) for cell in row] for row in rows]
    head = [(heading, style) for heading in headings]
    widths = [max(len(text) for text, _ in column) for column in zip(head, *table, strict=True)]
    if least is not None:
        widths = least[:] = [max(pair) for pair in zip(widths, least, strict=True)]
    for row in (head, *table):
        cells = [
            colour(text.ljust(width)) for (text, colour), width in zip(row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _parts(cell: Cell) -> tuple[str, Callable[[str], str]]:
    text, colour = (cell, str) if isinstance(cell, str) else cell
    return printable(text), colour
