"""How the lock tables are asked: in which schema they are, and what a database's errors mean.

PostgreSQL looks names up by the `search_path` of the session, and MySQL in its current database.
The application may change both for each request. So the schema is found once, on a new connection,
and all statements name the tables with it, whatever the caller's connection is set to: see
docs/decisions/one-schema-for-each-backend.md.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error

from ..conf import DEFAULT_TABLES, SIDE_TABLES, table
from ..core import durations
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, InvalidArgument, LockError, LockUsageError
from ..core.interruptions import pass_on
from ..core.secrets import forget_frames
from .borrowing import LockConnections, NoConnectionFree, Own, Use
from .connections import CONNECT_SECONDS
from .sql import FUNCTIONS, function_name, side_table
from .vendors import VENDORS, of

T = TypeVar("T")


class TableConnections(LockConnections):
    """The connections of one alias, with table names that include the schema."""

    def __init__(self, alias: str, limit: int, *, apart: bool = False, looked_for: str = "fences"):
        super().__init__(alias, limit, apart=apart)
        self._looked_for = looked_for
        #: The database that was asked for the schema, and its answer.
        self._decided: tuple[object, str | None] | None = None
        self._asking = threading.Lock()
        #: Quoted names, by name and decision, because each call needs some.
        self._quoted: dict[tuple[str, tuple[object, str | None] | None], str] = {}

    def prepare(self) -> None:
        """Find the schema beforehand, because that needs another connection."""
        _ = self.schema
        if (decided := self._known()) is not None:
            self.prepared_for = decided[0]

    def ask_within(self, question: Callable[[str], T], *, long: bool = False) -> T:
        """Read within the bound of all operations, also if the tables are locked."""

        def bounded(on: str) -> T:
            with of(on).short_transaction(MAX_BOUND, writes=False):
                return question(on)

        return self.ask(bounded, writes=False, long=long)

    def is_busy(self, error: Exception, use: Use) -> bool:
        """Whether it has failed because other transactions were in the way."""
        if not isinstance(error, Error):
            return super().is_busy(error, use)
        vendor = of(self.alias)
        if vendor.writes_values_out:
            forget_frames(error)
        return not use.was_cut and vendor.is_busy(error)

    def explained(self, error: Exception, use: Use, key: str | None) -> LockError:
        """Return what the caller of a failed operation is told."""
        if isinstance(error, SynchronousOnlyOperation):
            return self.in_coroutine(key)
        if isinstance(error, NoConnectionFree):
            return super().explained(error, use, key)
        if use.was_cut:
            return BackendUnavailable(
                f"The lock store {self.alias!r} has not answered for {use.silent_for:.1f} s.",
                key=key,
                code="network_timeout",
            )
        return self.translated(error, key)

    def in_coroutine(self, key: str | None) -> LockUsageError:
        """Return the error for a question that would block an event loop."""
        return LockUsageError(
            f"A coroutine asks the lock store {self.alias!r} without await, which would block its"
            " event loop. Write async with distlock(…), or await lock.aacquire() and await"
            " lease.arelease().",
            key=key,
            code="unsupported",
        )

    def translated(self, error: Exception, key: str | None) -> LockError:
        """Return what the caller is told of an error of the database."""
        pass_on(error)
        vendor, about = of(self.alias), f"The lock store {self.alias!r}"
        if vendor.is_duplicate(error):
            return InvalidArgument("This token already holds another key.", key=key)
        if vendor.is_missing(error):
            # Without PostgreSQL's hint, which is about types of arguments.
            said = str(error).partition("\n")[0]
            return LockError(
                f"{about}: lock tables are missing: {said}. Run manage.py migrate --database"
                f" {self.alias}.",
                key=key,
            )
        code = vendor.unavailable_code(error)
        if code is not None:
            answered = vendor.has_answered(error)
            return BackendUnavailable.of(about, error, code, key, answered=answered)
        return LockError(f"{about} failed: {error}", key=key)

    def has_moved(self, error: BaseException) -> bool:
        """Whether an error means a switch-over: the old server still answers, but is read-only."""
        vendor = of(self.alias)
        return not vendor.is_busy(error) and vendor.known_code(error) == "service_unavailable"

    def _made(self, template: BaseDatabaseWrapper, user: Any) -> Own:
        own = super()._made(template, user)
        if (schema := self.schema) is not None:
            # The wrapper stays. On a connection of the caller it would have to be removed again.
            own.connection.execute_wrappers.append(_Naming(_quoted(template, schema)))
        return own

    def name(self, what: str) -> str:
        """Return the quoted name of one of the tables, such as `"locks"`, with its schema."""
        return self.named(table(what))

    def named(self, name: str) -> str:
        """Return the quoted name of another object in the schema of the tables."""
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
        """The schema of the tables; on MySQL the database; None: not needed here."""
        if (decided := self._known()) is not None:
            return decided[1]
        # One thread asks for all. With a time limit, because a signal may leave it locked.
        mine = self._asking.acquire(timeout=durations.left(MAX_BOUND))
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
        """Whether the alias stands for another database now than when the schema was found."""
        return self._decided is not None and self._known() is None

    def _known(self) -> tuple[object, str | None] | None:
        # A test run renames its databases under the same alias.
        database, decided = connections[self.alias].settings_dict["NAME"], self._decided
        return decided if decided is not None and decided[0] == database else None


def _asked(template: BaseDatabaseWrapper, looked_for: str) -> tuple[str | None, bool]:
    """Return the schema in which a new connection finds a table, and whether it finds it.

    If not, this is the schema in which a migration would create the table.
    """
    question = VENDORS[template.vendor].schema_of
    if question is None:
        return None, True
    apart = LockConnections(template.alias, 1, apart=True)
    try:
        with apart.use(writes=False, patience=CONNECT_SECONDS) as on:
            connection = connections[on]
            # With the driver's cursor, because that of django-tenants changes the search_path.
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
    """Return a pattern for our table names without a schema."""
    names = [
        *map(table, DEFAULT_TABLES), *map(side_table, SIDE_TABLES), *map(function_name, FUNCTIONS)
    ]  # fmt: skip
    return re.compile(f"(?<!\\.){quote}(?:{'|'.join(names)}){quote}")


class _Naming:
    """An execute wrapper that adds the quoted schema to our table names."""

    def __init__(self, schema: str):
        self._names = _names(schema[0])
        # Escaped, because the statements have placeholders.
        self._schema = schema.replace("%", "%%")

    def __call__(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        return execute(self._names.sub(self._put, sql), params, many, context)

    def _put(self, found: re.Match[str]) -> str:
        return f"{self._schema}.{found[0]}"
