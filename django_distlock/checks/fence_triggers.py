"""`distlock.W109`: the triggers that `EnforceFence` made on tables of the project."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.apps import apps
from django.core import checks
from django.db import DatabaseError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import truncate_name
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ModelState

from ..core.pages import page
from ..database.connections import rows_of
from ..fencing.operations import EnforceFence
from ..fencing.triggers import FenceTrigger
from .schema import TRIGGER

#: MySQL's error for a trigger that does not exist, whatever the rights of the account.
_NO_TRIGGER = 1360


def fence_triggers(using: str, loader: MigrationLoader) -> Iterator[checks.CheckMessage]:
    """W109: the triggers that applied migrations have installed still exist.

    A warning: without the trigger, stale fenced writes are still refused, only other writes are
    not. And only a migration can create the trigger again.
    """
    connection = connections[using]
    is_there = _LOOKS.get(connection.vendor)
    if is_there is None:
        return
    for state, trigger in _installed(using, loader):
        table = _table(state)
        if not is_there(connection, table, trigger.name):
            yield checks.Warning(
                f"The table {table} of {using!r} lacks the trigger {trigger.name} of EnforceFence,"
                f" which makes the database refuse to lower {trigger.field!r} of"
                f" {state.app_label}.{state.name}, or the trigger is disabled.",
                hint=f"Add a migration with EnforceFence({state.name_lower!r},"
                f" field={trigger.field!r}), which creates it again: see"
                f" {page('reference/enforce-fence')}.",
                id="distlock.W109",
            )


def _installed(using: str, loader: MigrationLoader) -> Iterator[tuple[ModelState, FenceTrigger]]:
    """Yield the triggers of the applied migrations, each with the model of its table."""
    # The state after all migrations takes time to build, and most projects have no such trigger.
    if not any(_enforces(each.operations) for each in loader.graph.nodes.values()):
        return
    applied = [node for node in loader.applied_migrations or () if node in loader.graph.nodes]
    for (app_label, name), state in loader.project_state(applied).models.items():
        triggers: Mapping[str, FenceTrigger] = getattr(state, "triggers", {})
        if triggers and _is_made(using, app_label, name, state):
            yield from ((state, trigger) for trigger in triggers.values())


def _enforces(operations: Any) -> bool:
    return any(
        isinstance(each, EnforceFence) or _enforces(getattr(each, "state_operations", ()))
        for each in operations
    )


def _is_made(using: str, app_label: str, name: str, state: ModelState) -> bool:
    """Whether `migrate` makes the table of a model here."""
    if not state.options.get("managed", True):
        return False
    try:
        model = apps.get_model(app_label, name)
    except LookupError:
        return router.allow_migrate(using, app_label, model_name=name)
    return router.allow_migrate_model(using, model)


def _table(state: ModelState) -> str:
    if named := state.options.get("db_table"):
        return str(named)
    # As models do: by the default database, whatever database they are in.
    longest = connections["default"].ops.max_name_length()
    return str(truncate_name(f"{state.app_label}_{state.name_lower}", longest))


def _on_postgresql(connection: BaseDatabaseWrapper, table: str, name: str) -> bool:
    return bool(rows_of(connection.alias, TRIGGER, name, connection.ops.quote_name(table)))


def _on_mysql(connection: BaseDatabaseWrapper, table: str, name: str) -> bool:
    quote = connection.ops.quote_name
    schema, dot, _table = quote(table).rpartition("`.`")
    try:
        # If an account may not see triggers, lists of triggers are empty, but this is refused.
        rows_of(connection.alias, f"SHOW CREATE TRIGGER {schema}{dot[:2]}{quote(name)}")
    except DatabaseError as error:
        return bool(error.args) and error.args[0] != _NO_TRIGGER
    return True


def _on_sqlite(connection: BaseDatabaseWrapper, table: str, name: str) -> bool:
    question = "SELECT 1 FROM sqlite_master WHERE type = 'trigger' AND name = %s"
    return bool(rows_of(connection.alias, question, name))


_LOOKS: Mapping[str, Callable[[BaseDatabaseWrapper, str, str], bool]] = {
    "mysql": _on_mysql,
    "postgresql": _on_postgresql,
    "sqlite": _on_sqlite,
}
