"""Listings as tables for people or as JSON, printed while they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from ..core.documents import plain
from ..core.wording import printable
from ..inspection import Failure, HeldKey, LockPage, list_locks

#: A cell, and what colours it once it is as wide as its column.
Cell = str | tuple[str, Callable[[str], str]]
#: Locks that are asked for at once.
PAGE = 1000


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


class _Output(Protocol):
    """What commands print to."""

    def write(self, msg: str = "", style_func: Any = None, ending: str | None = None) -> Any:
        """Print a text."""


def every_page(cursor: str | None, **asked: Any) -> Iterator[LockPage]:
    """Yield one page of `list_locks` after another, from a cursor to the end."""
    while True:
        page = list_locks(cursor=cursor, limit=PAGE, **asked)
        yield page
        if (cursor := page.cursor) is None:
            return


def stream_json(
    out: _Output, pages: Iterable[LockPage], failures: Iterable[Failure]
) -> tuple[Failure, ...]:
    """Print the document that one page would be, of one or many; return what could not be asked."""
    failed, before = [*failures], "\n"
    # Asked for first: what was asked wrongly is an error, and no beginning of a document.
    coming = iter(pages)
    first = next(coming)
    out.write('{\n  "locks": [', ending="")
    for page in chain((first,), coming):
        failed += page.failures
        cursor = page.cursor
        if page.locks:
            text = ",\n".join(f"    {json.dumps(each.as_json())}" for each in page.locks)
            out.write(before + text, ending="")
            before = ",\n"
    rest = {"cursor": cursor, "failures": plain(failed)}
    out.write("\n  ],\n" + json.dumps(rest, indent=2).removeprefix("{\n"))
    return tuple(failed)


def stream_table(
    out: _Output,
    headings: Sequence[str],
    pages: Iterable[LockPage],
    row: Callable[[HeldKey], Sequence[Cell]],
    style: Callable[[str], str],
) -> tuple[int, str | None, tuple[Failure, ...]]:
    """Print one table of pages; columns grow where a page has something wider.

    Return how many locks there were, where a further page starts, and what could not be asked.
    """
    widths = [0] * len(headings)
    number = 0
    failed: list[Failure] = []
    cursor = None
    for page in pages:
        failed += page.failures
        cursor = page.cursor
        if page.locks:
            lines = aligned(headings, map(row, page.locks), style, widths)
            # The headings stand above the first page alone.
            out.write("\n".join(lines if not number else list(lines)[1:]))
            number += len(page.locks)
    return number, cursor, tuple(failed)
