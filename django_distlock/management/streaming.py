"""Listings of any length, printed while they are read: little of them is kept in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from ..core.documents import plain
from ..inspection import Failure, HeldKey, LockPage, list_locks
from .tables import Cell, aligned

#: Locks that are asked for at once.
PAGE = 1000


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
    """Print the document that one page would be, of many.

    Args:
        failures: Those that are known before.

    Returns:
        What could not be asked.
    """
    failed, before = [*failures], "\n"
    # Asked for first: what was asked wrongly is an error, and no beginning of a document.
    coming = iter(pages)
    first = next(coming)
    out.write('{\n  "locks": [', ending="")
    for page in chain((first,), coming):
        failed += page.failures
        if page.locks:
            text = ",\n".join(f"    {json.dumps(each.as_json())}" for each in page.locks)
            out.write(before + text, ending="")
            before = ",\n"
    told = json.dumps(plain(failed))
    out.write(f'\n  ],\n  "cursor": null,\n  "failures": {told}\n}}')
    return tuple(failed)


def stream_table(
    out: _Output,
    headings: Sequence[str],
    pages: Iterable[LockPage],
    row: Callable[[HeldKey], Sequence[Cell]],
    style: Callable[[str], str],
) -> tuple[int, tuple[Failure, ...]]:
    """Print one table of many pages; columns grow where a page has something wider.

    Returns:
        How many locks there were, and what could not be asked.
    """
    widths = [0] * len(headings)
    number = 0
    failed: list[Failure] = []
    for page in pages:
        failed += page.failures
        if page.locks:
            lines = aligned(headings, map(row, page.locks), style, widths)
            # The headings stand above the first page alone.
            out.write("\n".join(lines if not number else list(lines)[1:]))
            number += len(page.locks)
    return number, tuple(failed)
