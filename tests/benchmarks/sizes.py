"""Bytes of a lock and of a counter on disk: the table's and each index's."""

from __future__ import annotations

from typing import Any

from django_distlock.conf import table

from .databases import ask, create, drop, fill
from .options import Options
from .report import Result, Sheet

DATABASE = "sizes"


def databases(options: Options) -> list[str]:
    """Return the databases that this takes for itself."""
    return [DATABASE]


def run(options: Options) -> Result:
    """Hold many keys and look at what they take."""
    create(DATABASE)
    try:
        fill(DATABASE, locks=options.rows)
        figures = {
            f"{what}/{part}": taken / options.rows
            for what, name in (("lock", "locks"), ("counter", "fences"))
            for part, taken in relations(DATABASE, name).items()
        }
        row = ask(DATABASE, f"SELECT avg(pg_column_size(l.*)) FROM {table('locks')} l")[0][0]
    finally:
        drop(DATABASE)
    rows = [[name, f"{taken:,.1f}"] for name, taken in figures.items()]
    title = f"Sizes: bytes per row, of {options.rows:,} live locks; a lock's row has {row:.0f}"
    return Result(
        {"figures": figures, "rows": options.rows, "lock_row_bytes": float(row)},
        [Sheet(title, ["", "bytes"], rows)],
    )


def relations(alias: str, name: str) -> dict[str, int]:
    """Return the bytes of a table's parts: the heap, each index, and all there is.

    Args:
        name: `"locks"` or `"fences"`.
    """
    found: list[Any] = ask(
        alias,
        "SELECT i.indexrelid::regclass::text, pg_relation_size(i.indexrelid)"
        " FROM pg_index i WHERE i.indrelid = %s::regclass ORDER BY 1",
        table(name),
    )
    heap, everything = ask(
        alias,
        "SELECT pg_relation_size(t), pg_total_relation_size(t) FROM (SELECT %s::regclass t) x",
        table(name),
    )[0]
    indexes = {index.removeprefix(f"{table(name)}_").strip('"'): size for index, size in found}
    return {"heap": heap, **indexes, "total": everything}
