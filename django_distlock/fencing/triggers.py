"""The triggers that refuse to lower a fence, and the state of migrations that keeps them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any, Self, TypeGuard

from django.apps.registry import Apps
from django.core.exceptions import FieldError
from django.db import NotSupportedError, connections, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.backends.ddl_references import Columns, Statement, Table
from django.db.backends.utils import names_digest
from django.db.migrations.state import ModelState
from django.db.models.constraints import BaseConstraint

from ..database.sql import FIXED_PATH

#: PostgreSQL's function. One serves all tables; a changed function gets another name.
FUNCTION = "django_distlock_enforce_fence_v1"

# Names have at most 63 bytes, PostgreSQL's limit, which is the shortest of all databases.
_READABLE, _DIGEST = 34, 12

# Without NULL, which the column refuses: fenced writes on SQLite know that error as their own.
_GOES_BACK = "NEW.%(column)s < OLD.%(column)s"

_POSTGRESQL_FUNCTION = f"""CREATE OR REPLACE FUNCTION "{FUNCTION}"() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    RAISE EXCEPTION 'a fence never goes back (%.%, from % to %)', TG_TABLE_NAME, TG_ARGV[0],
        pg_catalog.to_jsonb(OLD) ->> TG_ARGV[0], pg_catalog.to_jsonb(NEW) ->> TG_ARGV[0]
        USING ERRCODE = 'check_violation', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
              COLUMN = TG_ARGV[0], CONSTRAINT = TG_NAME,
              HINT = 'A holder with a newer fence has written this row since.';
END $body$"""

# The function stays if another table needs it, or if another role owns it.
_POSTGRESQL_REMOVAL = f"""DO $do$ BEGIN
    DROP FUNCTION IF EXISTS "{FUNCTION}"();
EXCEPTION WHEN dependent_objects_still_exist OR insufficient_privilege THEN
    NULL;
END $do$"""

# The statements run without arguments, which would make a percent sign in a schema's name special.
_POSTGRESQL_UNFIXED = """
SELECT pg_catalog.format(
    'ALTER FUNCTION %%I.%%I() SET search_path = pg_catalog, pg_temp', n.nspname, p.proname
)
FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE p.proname = %s AND p.proconfig IS DISTINCT FROM ARRAY[%s]
    AND pg_catalog.pg_has_role(p.proowner, 'USAGE')
"""

_POSTGRESQL = (
    "%(function)s;\n"
    "CREATE OR REPLACE TRIGGER %(trigger)s BEFORE UPDATE ON %(table)s FOR EACH ROW"
    " WHEN (NEW.%(column)s OPERATOR(pg_catalog.<) OLD.%(column)s)"
    f' EXECUTE FUNCTION "{FUNCTION}"(%(argument)s)'
)
# MySQL takes 128 characters of a message, and 3819 is its number for a violated CHECK. Without
# strict mode, a NULL becomes 0 after the trigger, so the trigger checks for NULL.
_MYSQL = (
    "CREATE TRIGGER %(trigger)s BEFORE UPDATE ON %(table)s FOR EACH ROW BEGIN"
    " DECLARE said VARCHAR(512) CHARACTER SET utf8mb4;"
    " IF COALESCE(NEW.%(column)s, -1) < OLD.%(column)s THEN"
    " SET said = CONCAT('from ', OLD.%(column)s, ' to ', COALESCE(NEW.%(column)s, 'NULL'));"
    " SET said = LEFT(CONCAT('a fence never goes back (', said, ', ', %(message)s, ')'), 128);"
    " SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO = 3819, MESSAGE_TEXT = said;"
    " END IF; END"
)
# For the client that runs the output of `sqlmigrate`: it would split the body at its semicolons.
_MYSQL_PRINTED = f"DELIMITER $$\n{_MYSQL}$$\nDELIMITER ;"
# Before SQLite 3.47, the message must be a constant.
_SQLITE = (
    f"CREATE TRIGGER %(trigger)s BEFORE UPDATE ON %(table)s FOR EACH ROW WHEN {_GOES_BACK}"
    " BEGIN SELECT RAISE(ABORT, %(message)s); END"
)
_MESSAGES = {"mysql": "{}", "sqlite": "a fence never goes back ({})"}
_TEMPLATES = {"mysql": _MYSQL, "postgresql": _POSTGRESQL, "sqlite": _SQLITE}


def fix_path(using: str) -> None:
    """Fix the search path of PostgreSQL's function if an earlier release created it without one.

    Then the function calls nothing that was planted. One of another role stays as it is.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return
    with connection.cursor() as cursor:
        cursor.execute(_POSTGRESQL_UNFIXED, [FUNCTION, FIXED_PATH])
        for (statement,) in cursor.fetchall():
            cursor.execute(statement)


def trigger_name(table: str, field: str, taken: Collection[str]) -> str:
    """Return a name for the trigger on a field of a table that is not taken.

    A trigger keeps its name when its table is renamed, because databases do not rename it then.
    """
    readable = re.sub(r"\W+", "_", table, flags=re.ASCII).strip("_")[:_READABLE]
    names = (
        f"distlock_fence_{readable}_{names_digest(table, field, str(number), length=_DIGEST)}"
        for number in count()
    )
    return next(name for name in names if name not in taken)


class FenceTrigger(BaseConstraint):
    """A trigger in the form of a constraint, on models in the state of migrations only.

    A constraint is kept where Django creates a table again: on SQLite, where it alters a table by
    copying it, and when it reverses `DeleteModel`.

    Args:
        field: The field whose value must not fall.
        column: The field's column when the trigger was created.
    """

    def __init__(self, *, name: str, field: str, column: str):
        super().__init__(name=name)
        self.field = field
        self.column = column

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that creates the trigger, or raise `NotSupportedError`."""
        connection = schema_editor.connection
        template = _TEMPLATES.get(connection.vendor)
        if template is None:
            raise NotSupportedError(
                f"EnforceFence does not support {connection.display_name}. Omit it there. Stale"
                " fenced writes are refused without it, but other writes are not checked."
            )
        if template is _MYSQL and schema_editor.collect_sql:
            template = _MYSQL_PRINTED
        return Statement(template, **self._parts(model, schema_editor))

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that drops the trigger, if it is there."""
        template = "DROP TRIGGER IF EXISTS %(trigger)s"
        if schema_editor.connection.vendor == "postgresql":
            template += " ON %(table)s"
        return Statement(template, **self._parts(model, schema_editor))

    def constraint_sql(self, model: Any, schema_editor: Any) -> str:
        """Defer the trigger until the table has its final name; return "" for the table's SQL."""
        schema_editor.deferred_sql.append(self.create_sql(model, schema_editor))
        return ""

    def install(self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor) -> None:
        """Create the trigger on an existing table, even if the trigger exists."""
        statement = self.create_sql(model, schema_editor)
        if schema_editor.connection.vendor != "postgresql":
            schema_editor.execute(self.remove_sql(model, schema_editor), params=None)
        schema_editor.execute(statement, params=None)

    def uninstall(self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor) -> None:
        """Drop the trigger, also one that is deferred, and the function if nothing calls it."""
        schema_editor.deferred_sql[:] = [
            statement
            for statement in schema_editor.deferred_sql
            if not (
                isinstance(statement, Statement) and str(statement.parts.get("name")) == self.name
            )
        ]
        schema_editor.execute(self.remove_sql(model, schema_editor), params=None)
        if schema_editor.connection.vendor == "postgresql":
            schema_editor.execute(_POSTGRESQL_REMOVAL, params=None)

    def validate(self, *arguments: Any, **more: Any) -> None:
        """Do nothing: only the database knows the row's previous fence."""

    def deconstruct(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Return what clones are made from."""
        path, arguments, more = super().deconstruct()
        return path, tuple(arguments), {**more, "field": self.field, "column": self.column}

    def _parts(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor
    ) -> dict[str, Any]:
        """Return the parts of the templates, as references that follow a renamed table."""
        table, column = model._meta.db_table, _column(model, self.field)
        quote, literal = schema_editor.quote_name, schema_editor.quote_value
        said = _MESSAGES.get(schema_editor.connection.vendor, "{}")
        return {
            "name": self.name,
            "trigger": Table(table, lambda name: _beside(quote(name), quote(self.name))),
            "table": Table(table, quote),
            "column": Columns(table, [column], quote),
            "argument": literal(column),
            "message": Table(table, lambda name: literal(said.format(f"{name}.{column}"))),
            "function": _POSTGRESQL_FUNCTION,
        }


class EnforcedState(ModelState):
    """A model's state in migrations, with the triggers on its fences.

    All operations after `EnforceFence` keep it. `makemigrations` compares only fields and options,
    so it does not see the triggers.

    Attributes:
        triggers: The triggers, by the names of their fields.
    """

    triggers: Mapping[str, FenceTrigger] = {}

    @classmethod
    def of(cls, state: ModelState, triggers: Mapping[str, FenceTrigger]) -> ModelState:
        """Return the same state with these triggers."""
        new: ModelState = object.__new__(_enforced(type(state)))
        vars(new).update(vars(state.clone()), triggers=triggers)
        return new

    def clone(self) -> Self:
        """Copy the state with its triggers."""
        clone: Self = super().clone()  # type: ignore[assignment]
        clone.triggers = self.triggers
        return clone

    def render(self, apps: Apps) -> Any:
        """Make the model, with the triggers among its constraints.

        Raises:
            FieldError: A fence with a trigger was removed, has another column, or is no fence any
                more.
        """
        for name, trigger in self.triggers.items():
            field = self.fields.get(name)
            if not is_fence(field) or column_of(name, field) != trigger.column:
                raise FieldError(
                    f"The fence {name!r} of {self.app_label}.{self.name} was renamed, removed or"
                    " altered while its trigger exists. Before that, put"
                    f" RelaxFence({self.name!r}, field={name!r}) in the migration. Behind it, add"
                    " EnforceFence again, unless the fence is gone."
                )
        model = super().render(apps)
        model._meta.constraints = [*model._meta.constraints, *self.triggers.values()]
        return model


def _enforced(kind: type[ModelState]) -> type[EnforcedState]:
    """Return the class of states with triggers that replaces a model's class of states."""
    if issubclass(kind, EnforcedState):
        return kind
    if kind is ModelState:
        return EnforcedState
    made: type[EnforcedState] = type(f"Enforced{kind.__name__}", (EnforcedState, kind), {})
    return made


def is_fence(field: models.Field[Any, Any] | None) -> TypeGuard[models.IntegerField[Any, Any]]:
    """Say whether a field is an integer that is never null."""
    return isinstance(field, models.IntegerField) and not field.null


def column_of(name: str, field: models.Field[Any, Any]) -> str:
    """Return the column of a field in a migration's state, which no model has yet."""
    return field.db_column or name


def _column(model: type[models.Model], field: str) -> str:
    return str(model._meta.get_field(field).column)  # type: ignore[union-attr]


def _beside(table: str, trigger: str) -> str:
    """Return the trigger's name, with the schema if the table's name has one on MySQL."""
    schema, dot, _ = table.rpartition("`.`")
    return f"{schema}{dot[:2]}{trigger}"
