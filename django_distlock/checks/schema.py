"""`distlock.W106`, `W107`, `W111` to `W114`: what the tables need around them, and its rights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from django.core import checks
from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.models import CheckConstraint

from ..backends.database import DatabaseBackend
from ..conf import SIDE_TABLES
from ..core.pages import page
from ..database.connections import rows_of
from ..database.sql import (
    FUNCTIONS,
    SCHEMA_OF,
    fence_guard_name,
    function_name,
    quoted,
    script,
    settings_in,
    side_table,
)
from ..models import FenceCounter
from .configured import DOCS, configured

APP: Final = "django_distlock"
_GUARD: Final = "distlock_fence_guard"
_BODY = re.compile(r"\$body\$(.*?)\$body\$", re.DOTALL)


def unapplied(using: str, loader: MigrationLoader) -> Iterator[checks.CheckMessage]:
    """W106: the migrations of this release were applied."""
    applied = loader.applied_migrations or {}
    names = sorted(
        name for app, name in loader.graph.nodes if app == APP and (app, name) not in applied
    )
    if names:
        yield checks.Warning(
            f"The database {using!r} has unapplied migrations of {APP}: {', '.join(names)}.",
            hint=f"Run manage.py migrate {APP} --database {using}. {DOCS}",
            id="distlock.W106",
        )


def functions(using: str) -> Iterator[checks.CheckMessage]:
    """W107: PostgreSQL has this release's functions, a secret, and the trigger that guards fences.

    A warning, because `migrate` creates what is missing, but stops at errors.
    """
    ((schema, is_there),) = rows_of(using, SCHEMA_OF.format(table=FenceCounter._meta.db_table))
    if not is_there:
        return
    wanted = {function_name(each): script(each, schema) for each in _called(using)}
    # If this role may not use PL/pgSQL, counters have no trigger.
    guarded = bool(rows_of(using, _PLPGSQL))
    if guarded:
        wanted[fence_guard_name()] = script("fence_guard", schema)
    wrong = [*_wrong_functions(using, schema, wanted), *_lacking_secret(using, schema)]
    if guarded and not rows_of(using, TRIGGER, _GUARD, quoted(FenceCounter._meta.db_table)):
        wrong.append(
            f"the trigger {_GUARD} is missing or disabled (it refuses to delete or lower a fence"
            " counter)"
        )
    if wrong:
        yield checks.Warning(
            f"In the database {using!r}, {'; '.join(wrong)}.",
            hint=f"Run manage.py migrate {APP} --database {using}, as a role that may create"
            " functions. If no role may, set OPTIONS['server_functions'] to False. To enable"
            f" a disabled trigger, use ALTER TABLE … ENABLE TRIGGER {_GUARD}. See"
            f" {page('howto/choose-a-database')}.",
            id="distlock.W107",
        )


def several(using: str) -> Iterator[checks.CheckMessage]:
    """W112: on PostgreSQL, the search path leads to one table of locks.

    A warning: all connections with this path use the first table. But roles with another path may
    use another table.
    """
    found = [schema for (schema,) in rows_of(using, _SCHEMAS, FenceCounter._meta.db_table)]
    if len(found) > 1:
        yield checks.Warning(
            f"The table {FenceCounter._meta.db_table} of {using!r} is in several schemas of the"
            f" search path: {', '.join(found)}. A process with another search path would use other"
            " tables, so two processes could hold the same key.",
            hint=f"Drop the unused tables. Their fences are dropped as well. {DOCS}",
            id="distlock.W112",
        )


def creators(using: str) -> Iterator[checks.CheckMessage]:
    """W113: on PostgreSQL, no other role may create in the schemas of the search path.

    Our functions look nothing up there. But the statements of the ORM do, the project's own as
    well: they would call a function or an operator that fits better, with the caller's rights.
    """
    told = [
        f"in {schema}: {', '.join(roles)}"
        for schema, roles in rows_of(using, _CREATORS, FenceCounter._meta.db_table)
    ]
    if told:
        yield checks.Warning(
            f"In the database {using!r}, roles that do not own it may create functions and"
            " operators in its search path. These would run with the rights of the application"
            f" ({'; '.join(told)}).",
            hint="REVOKE CREATE ON SCHEMA … FROM these roles or from PUBLIC: see"
            f" {page('howto/grant-least-privilege')}.",
            id="distlock.W113",
        )


def readers(using: str) -> Iterator[checks.CheckMessage]:
    """W114: on PostgreSQL, PUBLIC may not read the secret of numbers and channels."""
    salt = side_table("salt")
    if rows_of(using, _READERS, salt):
        yield checks.Warning(
            f"In the database {using!r}, every role may read the table {salt}. A role that can"
            " connect could then block any key and listen to its waiters.",
            hint=f"REVOKE ALL ON {salt} FROM PUBLIC, and DELETE its row while no process acquires"
            f" locks. Migrate creates a new one. See {page('howto/grant-least-privilege')}.",
            id="distlock.W114",
        )


def indexes(using: str, present: list[type[models.Model]]) -> Iterator[checks.CheckMessage]:
    """W111: the tables have the columns, indexes and constraints of their models."""
    connection = connections[using]
    if connection.vendor not in _COLUMNS:
        return
    for model in present:
        table = model._meta.db_table
        there = {name for (name,) in rows_of(using, _COLUMNS[connection.vendor], table)}
        wanted = [each.column for each in model._meta.local_concrete_fields]
        lacks = [f"the column {each}" for each in wanted if each not in there]
        with connection.cursor() as cursor:
            found = connection.introspection.get_constraints(cursor, table)
        lacks += _missing(model, found, connection)
        if lacks:
            yield checks.Warning(
                f"The table {table} of {using!r} lacks {', '.join(lacks)}.",
                hint="Create it again as `manage.py sqlmigrate` prints it. For the columns, see"
                f" {page('reference/database-schema')}.",
                id="distlock.W111",
            )


def _missing(
    model: type[models.Model], found: Mapping[str, Any], connection: BaseDatabaseWrapper
) -> Iterator[str]:
    """Yield the names of what a model declares and its table lacks."""
    primary = found.get("PRIMARY")
    checks_too = _shows_checks(connection)
    fields: Iterable[Any] = model._meta.local_concrete_fields
    for field in fields:
        keys = [each for each in found.values() if each["columns"] == [field.column]]
        if field.primary_key:
            if primary not in keys and not any(each["primary_key"] for each in keys):
                yield f"its primary key ({field.column})"
        elif field.unique:
            if not any(each["unique"] for each in keys):
                yield f"the unique index on {field.column}"
        elif field.db_index and not any(each["index"] or each["unique"] for each in keys):
            yield f"the index on {field.column}"
    for named in (*model._meta.indexes, *model._meta.constraints):
        if isinstance(named, CheckConstraint) and not checks_too:
            continue
        if named.name not in found and not _is_alike(model, named, found, connection):
            yield f"{named.name}"


def _shows_checks(connection: BaseDatabaseWrapper) -> bool:
    """Whether the server has check constraints, and shows them to this role."""
    if getattr(connection, "mysql_is_mariadb", False):
        # MariaDB hides them from a role with rights on tables only. JSON columns have some, too.
        return bool(rows_of(connection.alias, _CHECKS))
    # MySQL has them only since 8.0.16.
    return bool(connection.features.can_introspect_check_constraints)


def _is_alike(
    model: type[models.Model], named: Any, found: Mapping[str, Any], connection: BaseDatabaseWrapper
) -> bool:
    """Whether one of another name is on the same columns: a renamed table keeps its old names."""
    is_check = type(named) is CheckConstraint
    names = [name.partition("__")[0] for name, _ in named.condition.children] if is_check else ()
    fields: list[Any] = [model._meta.get_field(each) for each in names or named.fields]
    columns, kind = [each.column for each in fields], "check" if is_check else "index"
    alike = [each for each in found.values() if each[kind] and each["columns"] == columns]
    # A column of non-negative numbers has a check of its own.
    others = [each for each in fields if is_check and each.db_check(connection)]
    return len(alike) > len(others)


def _called(using: str) -> tuple[str, ...]:
    """Return the operations that a backend calls as functions on this database."""
    calls = any(
        backend.config.options.get("server_functions", True)
        for backend in configured(DatabaseBackend)
        if backend.using == using
    )
    return FUNCTIONS if calls else ()


def _wrong_functions(using: str, schema: str, wanted: dict[str, str]) -> Iterator[str]:
    """Yield which functions are missing, or are of another release."""
    there: dict[str, Any] = {
        name: more for name, *more in rows_of(using, _FUNCTIONS, schema, list(wanted))
    }
    for name, text in wanted.items():
        body = _BODY.search(text)
        if name not in there:
            yield f"the function {name} is missing in the schema {schema}"
        elif body is None or there[name] != [body[1], settings_in(text)]:
            yield f"the function {name} is not that of this release"


def _lacking_secret(using: str, schema: str) -> Iterator[str]:
    """Yield which tables without models are missing, and why the secret cannot be read."""
    names = [side_table(each) for each in SIDE_TABLES]
    there = dict(rows_of(using, _READABLE, schema, names))
    for name in names:
        if name not in there:
            yield f"the table {name} is missing in the schema {schema}"
    salt = side_table("salt")
    if there.get(salt) is False:
        yield f"this role may not read the table {salt}"
    elif salt in there and not rows_of(using, f"SELECT true FROM {quoted(schema)}.{quoted(salt)}"):  # noqa: S608
        yield f"the table {salt} is empty"


# These queries need no right to read the tables.
_COLUMNS = {
    "mysql": (
        "SELECT column_name FROM information_schema.columns"
        " WHERE table_schema = DATABASE() AND table_name = %s"
    ),
    "postgresql": (
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(quote_ident(%s))"
        " AND attnum > 0 AND NOT attisdropped"
    ),
    "sqlite": "SELECT name FROM pragma_table_info(%s)",
}
_CHECKS = """
SELECT constraint_name FROM information_schema.check_constraints
WHERE constraint_schema = DATABASE() LIMIT 1
"""
_READABLE = """
SELECT c.relname, has_table_privilege(c.oid, 'SELECT')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = ANY(%s)
"""
_READERS = """
SELECT true FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) acl
WHERE c.oid = to_regclass(quote_ident(%s)) AND acl.grantee = 0
"""
_FUNCTIONS = """
SELECT p.proname, p.prosrc, p.proconfig FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = %s AND p.proname = ANY(%s)
"""
_SCHEMAS = """
SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = %s AND n.nspname = ANY(current_schemas(false))
ORDER BY array_position(current_schemas(false), n.nspname)
"""
# The owners of the tables, a schema or the database can change what runs there anyway.
_CREATORS = """
WITH trusted AS (
    SELECT relowner AS role FROM pg_catalog.pg_class
        WHERE oid = pg_catalog.to_regclass(pg_catalog.quote_ident(%s))
    UNION SELECT datdba FROM pg_catalog.pg_database
        WHERE datname = pg_catalog.current_database()
), found AS (
    SELECT n.nspname, CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE r.rolname END AS name
    FROM pg_catalog.pg_namespace n
    CROSS JOIN LATERAL pg_catalog.aclexplode(n.nspacl) acl
    LEFT JOIN pg_catalog.pg_roles r ON NOT r.rolsuper AND r.rolcanlogin
        AND r.rolname <> current_user AND acl.grantee <> 0
        AND pg_catalog.pg_has_role(r.oid, acl.grantee, 'MEMBER')
        AND NOT pg_catalog.pg_has_role(r.oid, n.nspowner, 'MEMBER')
        AND NOT EXISTS (
            SELECT FROM trusted t WHERE pg_catalog.pg_has_role(r.oid, t.role, 'MEMBER')
        )
    WHERE acl.privilege_type = 'CREATE' AND n.nspname = ANY(pg_catalog.current_schemas(false))
)
SELECT nspname, pg_catalog.array_agg(DISTINCT name ORDER BY name) FROM found
WHERE name IS NOT NULL GROUP BY nspname ORDER BY nspname
"""
_PLPGSQL = """
SELECT true FROM pg_language WHERE lanname = 'plpgsql' AND has_language_privilege(oid, 'USAGE')
"""
#: Parameters: the name of a trigger, and the quoted name of its table.
TRIGGER = """
SELECT true FROM pg_trigger
WHERE tgname = %s AND tgrelid = to_regclass(%s) AND tgenabled <> 'D'
"""
