"""Which schema the lock tables are in, whatever the connection of a caller is set to.

PostgreSQL looks names up by the session's `search_path`, and MySQL in the database that the session
uses. Both belong to the application, which may change them for each request. So the schema is asked
for once, on a new connection, and the tables are named with it in each statement of ours: see
docs/decisions/one-schema-for-each-backend.md.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import DEFAULT_TABLES, table
from ..core import budgets
from ..core.durations import MAX_BOUND
from .borrowing import LockConnections, Own
from .connections import CONNECT_SECONDS
from .sql import FUNCTIONS, SIDE_TABLES, function_name, side_table
from .vendors import VENDORS, of


class TableConnections(LockConnections):
    """The connections of one alias, on which tables are named with the schema of one of them."""

    def __init__(self, alias: str, limit: int, *, apart: bool = False, looked_for: str = "fences"):
        super().__init__(alias, limit, apart=apart)
        self._looked_for = looked_for
        #: The database that was asked, and its answer.
        self._decided: tuple[object, str | None] | None = None
        self._asking = threading.Lock()
        #: Each call names what it is about. By name and by what was decided.
        self._quoted: dict[tuple[str, tuple[object, str | None] | None], str] = {}

    def prepare(self) -> None:
        """Ask for the schema: that takes another connection."""
        _ = self.schema

    def has_moved(self, error: BaseException) -> bool:
        """After a switch-over the old server still answers, and is read-only."""
        vendor = of(self.alias)
        return not vendor.is_busy(error) and vendor.known_code(error) == "service_unavailable"

    def _made(self, template: BaseDatabaseWrapper, user: Any) -> Own:
        own = super()._made(template, user)
        if (schema := self.schema) is not None:
            # For good: a wrapper on the caller's connection would have to be taken off again.
            own.connection.execute_wrappers.append(_Naming(_quoted(template, schema)))
        return own

    def name(self, what: str) -> str:
        """Return the quoted name of one of the tables, such as `"locks"`, with its schema."""
        return self.named(table(what))

    def named(self, name: str) -> str:
        """Return the quoted name of what stands beside the tables, with its schema."""
        if (found := self._quoted.get((name, self._known()))) is not None:
            return found
        connection = connections[self.alias]
        quoted = str(connection.ops.quote_name(name))
        if (schema := self.schema) is not None:
            quoted = f"{_quoted(connection, schema)}.{quoted}"
        if (decided := self._known()) is not None:
            self._quoted[name, decided] = quoted
        return quoted

    @property
    def schema(self) -> str | None:
        """The schema of the tables; on MySQL the database. None: names need none here."""
        if (decided := self._known()) is not None:
            return decided[1]
        # One thread asks for all. Nobody relies on it: a signal may leave it locked.
        mine = self._asking.acquire(timeout=budgets.left(MAX_BOUND))
        try:
            if (decided := self._known()) is not None:
                return decided[1]
            template = connections[self.alias]
            schema, is_there = _asked(template, table(self._looked_for))
            if is_there:
                self._decided = template.settings_dict["NAME"], schema
            return schema
        finally:
            if mine:
                self._asking.release()

    @property
    def is_renamed(self) -> bool:
        """Whether the alias stands for another database than the one that was asked last."""
        return self._decided is not None and self._known() is None

    def _known(self) -> tuple[object, str | None] | None:
        # A test run renames its databases under the same alias.
        database, decided = connections[self.alias].settings_dict["NAME"], self._decided
        return decided if decided is not None and decided[0] == database else None


def _asked(template: BaseDatabaseWrapper, looked_for: str) -> tuple[str | None, bool]:
    """Return the schema in which a new connection finds a table, and whether it does.

    Where it does not, the schema is the one that a migration would make it in.
    """
    question = VENDORS[template.vendor].schema_of
    if question is None:
        return None, True
    apart = LockConnections(template.alias, 1, apart=True)
    try:
        with apart.use(writes=False, patience=CONNECT_SECONDS) as on:
            connection = connections[on]
            # By the driver's cursor: those of django-tenants set a path before each statement.
            with connection.wrap_database_errors, connection.connection.cursor() as cursor:
                cursor.execute(question.format(table=looked_for))
                schema, is_there = cursor.fetchone()
    finally:
        apart.close_all()
    return schema, bool(is_there)


def _quoted(connection: BaseDatabaseWrapper, schema: str) -> str:
    quote = str(connection.ops.quote_name("x")[0])
    return quote + schema.replace(quote, quote * 2) + quote


@cache
def _names(quote: str) -> re.Pattern[str]:
    """Return what finds our names where they have no schema."""
    names = [
        *map(table, DEFAULT_TABLES), *map(side_table, SIDE_TABLES), *map(function_name, FUNCTIONS)
    ]  # fmt: skip
    return re.compile(f"(?<!\\.){quote}(?:{'|'.join(names)}){quote}")


class _Naming:
    """Puts a schema, quoted, in front of our names in each statement."""

    def __init__(self, schema: str):
        self._names = _names(schema[0])
        # Statements have placeholders.
        self._schema = schema.replace("%", "%%")

    def __call__(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        return execute(self._names.sub(self._put, sql), params, many, context)

    def _put(self, found: re.Match[str]) -> str:
        return f"{self._schema}.{found[0]}"
