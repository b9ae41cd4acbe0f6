"""How what is in `sql/postgresql` gets into a database."""

from __future__ import annotations

import re
from typing import Any

from django.apps import apps
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

from ...conf import SIDE_TABLES, table
from . import SCHEMA_OF, SCRIPTS, quoted, removal, script, settings_in, side_table

_BODY = re.compile(r"FUNCTION\s[^(]*\"(\w+)\"\s*\(.*?\$body\$(.*?)\$body\$", re.DOTALL)


class InstallScripts(Operation):
    """Install the secret, functions, trigger and storage parameters on PostgreSQL, nowhere else.

    Where the role may not use PL/pgSQL, functions and trigger stay away: such a project sets
    `server_functions` to False.
    """

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Leave the state of the models as it is."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Run the scripts; `sqlmigrate` prints them."""
        connection = schema_editor.connection
        if not _concerned(connection, app_label):
            return
        schema, _ = _schema(connection)
        for name in _allowed_scripts(connection, schema, ask=not schema_editor.collect_sql):
            schema_editor.execute(script(name, schema), params=None)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Drop the functions of every version, and the secret. Triggers go with their functions."""
        if _concerned(schema_editor.connection, app_label):
            for statement in removal(_schema(schema_editor.connection)[0]):
                schema_editor.execute(statement, params=None)

    def describe(self) -> str:
        return "Install the functions, the trigger and the storage parameters (PostgreSQL)"

    @property
    def migration_name_fragment(self) -> str:
        return "install_scripts"


class CreateInnoDBTables(Operation):
    """Let what a migration creates between `begin=True` and `begin=False` be InnoDB on MySQL.

    Other engines have no row locks, and no transactions. The session's default is put back.
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, *, begin: bool):
        self.begin = begin

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Leave the state of the models as it is."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Set the session's default engine."""
        if schema_editor.connection.vendor == "mysql":
            for statement in _INNODB if self.begin else _BEFORE:
                schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, *states: ProjectState
    ) -> None:
        """Nothing is created on the way back."""

    def describe(self) -> str:
        return "Create InnoDB tables" if self.begin else "Create tables of the default engine again"


_INNODB = (
    "SET @distlock_engine = @@default_storage_engine",
    "SET SESSION default_storage_engine = InnoDB",
)
_BEFORE = ("SET SESSION default_storage_engine = @distlock_engine",)


def install_missing(using: str) -> None:
    """Install what a database lacks, where tables were made without migrations.

    Also brings a function up to date that names other tables than the settings do now.
    """
    connection = connections[using]
    if not _concerned(connection, "django_distlock"):
        return
    schema, is_there = _schema(connection)
    if not is_there or not _missing(connection, schema):
        return
    with transaction.atomic(using=using), connection.cursor() as cursor:
        # Two processes that replace one function at once disturb each other. No advisory lock: its
        # number would be known to everybody.
        locked = f"{quoted(schema)}.{quoted(table('locks'))}"
        cursor.execute(f"LOCK TABLE {locked} IN SHARE UPDATE EXCLUSIVE MODE")
        for name in _missing(connection, schema):
            cursor.execute(script(name, schema))


def _missing(connection: BaseDatabaseWrapper, schema: str) -> list[str]:
    """Return the scripts that this role may run, and that are not run yet or another release's."""
    allowed = _allowed_scripts(connection, schema, ask=True)
    return [name for name in allowed if not _is_installed(connection, schema, name)]


def _concerned(connection: BaseDatabaseWrapper, app_label: str) -> bool:
    # Asked about a model: the locks' tables are what the scripts need, and a router may send other
    # models elsewhere.
    return connection.vendor == "postgresql" and router.allow_migrate_model(
        connection.alias, apps.get_model(app_label, "HeldLock")
    )


def _schema(connection: BaseDatabaseWrapper) -> tuple[str, bool]:
    """Return the schema where a migration makes, or has made, the tables; whether it has."""
    with connection.cursor() as cursor:
        cursor.execute(SCHEMA_OF.format(table=table("locks")))
        schema, is_there = cursor.fetchone()
        return str(schema), bool(is_there)


def _allowed_scripts(connection: BaseDatabaseWrapper, schema: str, *, ask: bool) -> tuple[str, ...]:
    if not ask:
        return SCRIPTS
    if not _found(connection, "SELECT has_schema_privilege(%s, 'CREATE')", [schema]):
        return ()  # The tables are somebody else's, who installed what they need.
    if not _found(connection, "SELECT has_language_privilege('plpgsql', 'USAGE')", []):
        return tuple(name for name in SCRIPTS if name in ("secret", "storage"))
    return SCRIPTS


def _is_installed(connection: BaseDatabaseWrapper, schema: str, name: str) -> bool:
    if name == "fence_guard" and not _found(connection, _TRIGGER, [schema, table("fences")]):
        return False
    if name == "secret":
        salt, session = (side_table(each) for each in SIDE_TABLES)
        if not _found(connection, _TABLES, [schema, salt, schema, session]):
            return False
        # Only who may read it can fill it.
        filled = f"SELECT EXISTS (SELECT FROM {quoted(schema)}.{quoted(salt)})"  # noqa: S608
        return not _found(connection, _READABLE, [schema, salt]) or _found(connection, filled, [])
    text = script(name, schema)
    function = _BODY.search(text)
    if function is None:
        return _found(connection, _STORAGE, [schema, table("locks")])
    return _found(connection, _FUNCTION, [function[1], function[2], settings_in(text), schema])


# With types: bound on the server (`server_side_binding`), an argument of `format` has none.
_RELATION = "format('%%I.%%I', %s::text, %s::text)"
_TABLES = f"SELECT to_regclass({_RELATION}) IS NOT NULL AND to_regclass({_RELATION}) IS NOT NULL"
_READABLE = f"SELECT has_table_privilege({_RELATION}, 'SELECT')"
_FUNCTION = (
    "SELECT EXISTS (SELECT FROM pg_proc WHERE proname = %s AND prosrc = %s"
    " AND proconfig = %s::text[] AND pronamespace = quote_ident(%s)::regnamespace)"
)
_TRIGGER = (
    "SELECT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'distlock_fence_guard'"  # noqa: S608
    f" AND tgrelid = to_regclass({_RELATION}))"
)
_STORAGE = f"SELECT reloptions IS NOT NULL FROM pg_class WHERE oid = to_regclass({_RELATION})"  # noqa: S608


def _found(connection: BaseDatabaseWrapper, question: str, arguments: list[Any]) -> bool:
    with connection.cursor() as cursor:
        # The name of a schema may have a percent sign, which only arguments would make special.
        cursor.execute(question, arguments or None)
        row = cursor.fetchone()
        return bool(row and row[0])
