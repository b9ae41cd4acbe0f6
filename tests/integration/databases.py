"""Databases to make and drop, and what is in them."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import DatabaseError, connections
from django.db.backends.utils import CursorWrapper
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model

from django_distlock import distlock
from tests import services
from tests.conftest import DECLARED
from tests.contract.aliases import alias_like, locks_on

APP = "django_distlock"
FUNCTIONS = {
    "django_distlock_heldlock_acquire_v3",
    "django_distlock_heldlock_acquire_many_v3",
    "django_distlock_heldlock_extend_v3",
    "django_distlock_heldlock_extend_many_v3",
    "django_distlock_heldlock_release_v3",
    "django_distlock_heldlock_share_v3",
    "django_distlock_heldlock_transaction_lock_v3",
    "django_distlock_fencecounter_guard_v1",
}
TRIGGER = "distlock_fence_guard"
TABLES = {
    "django_distlock_heldlock",
    "django_distlock_fencecounter",
    "django_distlock_lockevent",
    "django_distlock_waiter",
    "django_distlock_seenfence",
    "django_distlock_runnote",
    "django_distlock_storedresponse",
    "django_distlock_failedtask",
}
#: On PostgreSQL, without models.
SIDE_TABLES = {"django_distlock_heldlock_salt", "django_distlock_heldlock_session"}


def forget_migration(using: str) -> None:
    """Let Django believe that our migration is yet to be applied."""
    MigrationRecorder(connections[using]).record_unapplied(APP, "0001_initial")


def all_tables(using: str) -> set[str]:
    """Return the names of the tables that our migrations make."""
    return TABLES | (SIDE_TABLES if connections[using].vendor == "postgresql" else set())


def server(database: str = "postgres", **more: Any) -> psycopg.Connection:
    """Connect to a database of the tests' PostgreSQL server, in autocommit."""
    url = os.environ["DISTLOCK_TEST_POSTGRES_URL"]
    return psycopg.connect(url, dbname=database, autocommit=True, **more)


@contextmanager
def new_database() -> Iterator[str]:
    """Make an empty PostgreSQL database, and drop it."""
    name = f"distlock_{secrets.token_hex(6)}"
    with server() as raw:
        raw.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    try:
        yield name
    finally:
        with server() as raw:
            raw.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def here(alias: str) -> str:
    """Give an alias back, or leave the test out where its server is missing."""
    if alias == "mariadb" and alias not in connections.settings:
        pytest.skip(f"{DECLARED}{services.NO_MARIADB}")
    return alias


def is_mariadb(using: str) -> bool:
    """Say whether what answers is MariaDB, and not MySQL."""
    return bool(getattr(connections[using], "mysql_is_mariadb", False))


def only_mariadb(using: str, what: str) -> None:
    """Leave the test out where MySQL answers, which lacks this."""
    if not is_mariadb(using):
        pytest.skip(f"{DECLARED}MySQL has no {what}")


def ask_mysql(statement: str, *arguments: Any, url: str = "", database: str = "") -> list[Any]:
    """Run a statement in a session of its own; give its rows.

    Args:
        url: The address of the server; "": that of the tests' MariaDB.
    """
    raw = services.mysql_connect(url or os.environ["DISTLOCK_TEST_MYSQL_URL"], database=database)
    try:
        with raw.cursor() as cursor:
            cursor.execute(statement, arguments or None)
            return list(cursor.fetchall()) if cursor.description else []
    finally:
        raw.close()


@contextmanager
def new_mysql_database() -> Iterator[str]:
    """Make an empty MariaDB database with the server's character set, and drop it."""
    name = f"distlock_{secrets.token_hex(6)}"
    ask_mysql(f"CREATE DATABASE {name}")
    try:
        yield name
    finally:
        for (session,) in ask_mysql(
            "SELECT id FROM information_schema.processlist WHERE db = %s", name
        ):
            # What still has a transaction open there would hold the drop up.
            with suppress(services.mysql_driver().OperationalError):
                ask_mysql(f"KILL CONNECTION {session}")
        ask_mysql(f"DROP DATABASE IF EXISTS {name}")


def ask(using: str, statement: str, *arguments: Any) -> list[Any]:
    """Run a statement on this thread's connection; give its rows."""
    with connections[using].cursor() as cursor:
        cursor.execute(statement, arguments or None)
        return list(cursor.fetchall()) if cursor.description else []


@contextmanager
def role(using: str, *granted: str) -> Iterator[str]:
    """Make an account of a database; give an alias that logs in as it.

    Args:
        granted: What it is granted, as the manual says it: to `shop_app`, in the database `shop`.
    """
    connection = connections[using]
    name, database = f"app_{secrets.token_hex(4)}", connection.settings_dict["NAME"]
    on_mysql = connection.vendor == "mysql"
    password = "only for tests" if on_mysql else ""
    ask(using, f"CREATE USER {name} IDENTIFIED BY '{password}'" if on_mysql else
        f"CREATE ROLE {name} LOGIN")  # fmt: skip
    try:
        for statement in "".join(granted).split(";"):
            if statement.strip():
                said = re.sub(r"\bshop_(app|ops)\b", name, statement)
                ask(using, said.replace(" shop.", f" {database}."))
        with alias_like(using, USER=name, PASSWORD=password) as limited:
            yield limited
    finally:
        if not on_mysql:
            ask(using, f"DROP OWNED BY {name}")
        ask(using, f"DROP {'USER' if on_mysql else 'ROLE'} {name}")


class Routed:
    """A router that keeps models in one database.

    Args:
        using: Its alias; None: it says nothing.
        of: The models, or labels of their apps; without any, all there are.
        others: Where the other models are; None: wherever they are without it.
        made: On which aliases `migrate` makes the tables; None: wherever it makes them without it.
    """

    def __init__(
        self,
        using: str | None,
        *of: type[Model] | str,
        others: str | None = None,
        made: tuple[str, ...] | None = None,
    ):
        self._using, self._of, self._others, self._made = using, of, others, made

    def db_for_write(self, model: type[Model], **_: Any) -> str | None:
        """Name the alias of a model."""
        is_meant = not self._of or model in self._of or model._meta.app_label in self._of
        return self._using if is_meant else self._others

    db_for_read = db_for_write

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        """Say where the tables are made."""
        if self._made is None or (self._of and app_label not in self._of):
            return None
        return db in self._made


@contextmanager
def errors_on(using: str) -> Iterator[set[int]]:
    """Collect the numbers of the errors that MariaDB answers this thread with."""
    seen: set[int] = set()

    def note(execute: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return execute(*arguments)
        except DatabaseError as error:
            seen.add(getattr(error.__cause__, "args", [0])[0])
            raise

    with every_statement(using, note):
        yield seen


@contextmanager
def statements_on(using: str) -> Iterator[list[str]]:
    """Collect what this thread asks a database, on its own connection and on those of locks."""
    asked: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *more: Any) -> Any:
        asked.append(sql)
        return execute(sql, *more)

    with every_statement(using, note):
        yield asked


@contextmanager
def every_statement(using: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Wrap what this thread asks a database, on its own connection and on those of locks."""
    alias, here = connections[using].alias, threading.get_ident()
    execute = CursorWrapper._execute_with_wrappers  # type: ignore[attr-defined]

    def wrapped(self: Any, sql: Any, params: Any, many: bool, executor: Any) -> Any:
        if self.db.alias != alias or threading.get_ident() != here:
            return execute(self, sql, params, many, executor)
        return execute(self, sql, params, many, partial(wrapper, executor))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CursorWrapper, "_execute_with_wrappers", wrapped)
        yield


def migrate(using: str, target: str | None = None, **options: Any) -> None:
    """Apply the migrations of the app, or go to one of them."""
    targets = (APP,) if target is None else (APP, target)
    call_command("migrate", *targets, database=using, verbosity=0, **options)


def objects(using: str) -> dict[str, set[str]]:
    """Return the names of all that is in the database, but for Django's own table."""
    queries = {
        "sqlite": {"relations": "SELECT name FROM sqlite_master"},
        "mysql": {
            "relations": "SELECT table_name FROM information_schema.tables"
            " WHERE table_schema = DATABASE()",
            "routines": "SELECT routine_name FROM information_schema.routines"
            " WHERE routine_schema = DATABASE()",
            "triggers": "SELECT trigger_name FROM information_schema.triggers"
            " WHERE trigger_schema = DATABASE()",
        },
        "postgresql": {
            "relations": "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace",
            "functions": "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
            "triggers": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal",
            "types": "SELECT typname FROM pg_type WHERE typnamespace = 'public'::regnamespace",
        },
    }[connections[using].vendor]
    found = {kind: {name for (name,) in ask(using, query)} for kind, query in queries.items()}
    return {
        kind: {
            name
            for name in names
            if "django_migrations" not in name and not name.startswith("sqlite_sequence")
        }
        for kind, names in found.items()
    }


def tables(using: str) -> set[str]:
    """Return the names of the tables."""
    return set(connections[using].introspection.table_names()) - {"django_migrations"}


def lock_and_release(using: str, key: str = "invoice:42", **options: Any) -> int:
    """Take a lock in a database, extend it and give it back; return its fence."""
    with locks_on(using, OPTIONS={"using": using, **options}) as backend:
        lock = distlock(key, backend=backend, wait=0)
        with lock as lease:
            lease.extend()
            assert lock.try_acquire() is None
        assert not lock.locked()
        return lease.fence
