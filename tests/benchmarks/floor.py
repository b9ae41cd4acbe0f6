"""What the same work costs without a lock package: the least that a store can be asked.

A pair has to write durably once and to go to the server twice. So its floor is an upsert of a row
like a lock's, and one trivial round trip. SQLite has no server, and releases in its file: there the
floor is two transactions of one statement each. The floor of a losing attempt is a read of the
lock's row by its primary key.

Each is asked in three ways, because drivers differ:

driver      a bare connection with Django's own parameters: this is *the* floor
prepared    psycopg as it comes: bound by the server, prepared after the fifth time
django      Django's own cursor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any

import psycopg
from django.db import connections

from django_distlock import lock_backends
from django_distlock.conf import table
from django_distlock.core.keys import new_token

from .databases import ask, columns, hold
from .timing import Step, Subject

TABLE = "distlock_floor"
TRIP = "SELECT 1"

#: Runs a statement to its end.
Execute = Callable[[str, Sequence[Any]], object]

CREATE = {
    "postgresql": (
        f"CREATE TABLE IF NOT EXISTS {TABLE} (LIKE {{locks}})",
        f"CREATE UNIQUE INDEX IF NOT EXISTS {TABLE}_key ON {TABLE} (storage_key)",
        # Room on the page for the next version of a row, as the lock's table has it.
        f"ALTER TABLE {TABLE} SET (fillfactor = 50)",
    ),
    "sqlite": (
        f"CREATE TABLE IF NOT EXISTS {TABLE} AS SELECT * FROM {{locks}} WHERE false",
        f"CREATE UNIQUE INDEX IF NOT EXISTS {TABLE}_key ON {TABLE} (storage_key)",
    ),
    "mysql": (f"CREATE TABLE IF NOT EXISTS {TABLE} LIKE {{locks}}",),
}
#: What stands before the assignments, and what a column's new value is called there.
UPSERT = {
    "postgresql": ("ON CONFLICT (storage_key) DO UPDATE SET", "excluded.{}"),
    "sqlite": ("ON CONFLICT (storage_key) DO UPDATE SET", "excluded.{}"),
    "mysql": ("ON DUPLICATE KEY UPDATE", "VALUES({})"),
}


def make_table(alias: str) -> None:
    """Make the table that the floor writes to, unless it is there."""
    for statement in CREATE[connections[alias].vendor]:
        ask(alias, statement.format(locks=table("locks")))


class Floor:
    """The statements on one database, which has the table.

    Args:
        alias: The database.
        backend: The lock backend on it, whose rows are copied.
        key: Where to take a row from: nobody else's.
    """

    def __init__(self, alias: str, backend: str, key: str = "floor:template"):
        self.vendor = connections[alias].vendor
        self._locks = table("locks")
        self._names = [connections[alias].ops.quote_name(each) for each in columns()]
        self._row = self._written(alias, backend, key)
        self._token = columns().index("token")

    @property
    def upsert(self) -> str:
        """Return the statement that writes a row."""
        places = ", ".join(["%s"] * len(self._names))
        clause, offered = UPSERT[self.vendor]
        assignments = ", ".join(f"{name} = {offered.format(name)}" for name in self._names[1:])
        values = f"INSERT INTO {TABLE} ({', '.join(self._names)}) VALUES ({places})"
        return f"{values} {clause} {assignments}"

    @property
    def delete(self) -> str:
        """Return the statement that removes a row."""
        return f"DELETE FROM {TABLE} WHERE storage_key = %s"

    @property
    def read(self) -> str:
        """Return the statement that reads a lock."""
        return f"SELECT * FROM {self._locks} WHERE storage_key = %s"

    def row(self, key: str) -> list[Any]:
        """Return a row like a lock's, with a token of its own."""
        row = [key, *self._row[1:]]
        row[self._token] = new_token()
        return row

    def _written(self, alias: str, backend: str, key: str) -> list[Any]:
        grant = hold(backend, key)
        read = f"SELECT {', '.join(self._names)} FROM {self._locks} WHERE token = %s"
        row = list(ask(alias, read, grant.token)[0])
        lock_backends[backend].release(grant)
        return row


def pair_steps(floor: Floor, execute: Execute, keys: Sequence[str]) -> dict[str, Step]:
    """Return the two halves of a pair's floor."""
    turns, upsert = cycle(keys), floor.upsert
    if floor.vendor == "sqlite":
        gone = cycle(keys)
        return {
            "upsert": lambda: _written(execute, upsert, floor.row(next(turns))),
            "delete": lambda: _written(execute, floor.delete, [next(gone)]),
        }
    return {
        "upsert": lambda: execute(upsert, floor.row(next(turns))),
        "trip": lambda: execute(TRIP, ()),
    }


def _written(execute: Execute, statement: str, values: Sequence[Any]) -> None:
    for each, its in (("BEGIN IMMEDIATE", ()), (statement, values), ("COMMIT", ())):
        execute(each, its)


def subjects(alias: str, backend: str, keys: Sequence[str], hot: str) -> Iterator[list[Subject]]:
    """Give the floor of every way to ask a database, for as long as the generator lives.

    Args:
        hot: The storage key of a lock that is held.
    """
    make_table(alias)
    floor = Floor(alias, backend)
    name = "floor" if connections[alias].vendor == "postgresql" else f"{alias}-floor"
    with ExitStack() as stack:
        made = []
        for way, opened in WAYS[connections[alias].vendor].items():
            execute = stack.enter_context(opened(alias))
            read = floor.read
            made += [
                Subject(f"{name}/{way}", pair_steps(floor, execute, keys), "pair"),
                Subject(f"{name}/{way}", {"read": _reads(execute, read, hot)}),
            ]
        yield made


def _reads(execute: Execute, read: str, hot: str) -> Step:
    return lambda: execute(read, (hot,))


# Ways to ask


@contextmanager
def as_django_opens(alias: str) -> Iterator[Execute]:
    """Open a connection as Django does, and then leave Django out."""
    wrapper = connections[alias].copy()
    wrapper.ensure_connection()
    cursor = wrapper.connection.cursor()
    try:
        yield _by(cursor)
    finally:
        cursor.close()
        wrapper.close()


@contextmanager
def as_psycopg_opens(alias: str) -> Iterator[Execute]:
    """Open a connection with psycopg's own defaults."""
    where = connections[alias].settings_dict
    with psycopg.connect(
        dbname=where["NAME"], user=where["USER"], host=where["HOST"], port=where["PORT"],
        autocommit=True,
    ) as connection, connection.cursor() as cursor:  # fmt: skip
        yield _by(cursor)


@contextmanager
def by_sqlite3(alias: str) -> Iterator[Execute]:
    """Open a connection as Django does, whose placeholders are sqlite3's own."""
    with as_django_opens(alias) as execute:
        # The driver caches statements by their text.
        texts: dict[str, str] = {}

        def run(statement: str, arguments: Sequence[Any]) -> object:
            if statement not in texts:
                texts[statement] = statement.replace("%s", "?")
            return execute(texts[statement], arguments)

        yield run


@contextmanager
def by_django(alias: str) -> Iterator[Execute]:
    """Use Django's cursors on this thread's connection, as application code does."""

    def run(statement: str, arguments: Sequence[Any]) -> object:
        with connections[alias].cursor() as cursor:
            cursor.execute(statement, arguments or None)
            return cursor.fetchall() if cursor.description else None

    yield run


def _by(cursor: Any) -> Execute:
    def run(statement: str, arguments: Sequence[Any]) -> object:
        cursor.execute(statement, arguments)
        return cursor.fetchall() if cursor.description else None

    return run


WAYS = {
    "postgresql": {
        "driver": as_django_opens,
        "prepared": as_psycopg_opens,
        "django": by_django,
    },
    "sqlite": {"driver": by_sqlite3},
    "mysql": {"driver": as_django_opens, "django": by_django},
}
