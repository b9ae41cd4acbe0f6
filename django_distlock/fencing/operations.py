"""Operations of migrations by which a database refuses to lower a fence, in any write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import FieldDoesNotExist, FieldError
from django.db import DatabaseError, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation, OperationCategory
from django.db.migrations.operations.fields import FieldOperation
from django.db.migrations.operations.models import DeleteModel
from django.db.migrations.state import ModelState, ProjectState

from .triggers import EnforcedState, FenceTrigger, column_of, is_fence, trigger_name

#: The default name of the field.
_FENCE = "fence"
#: MySQL's errors for an account without a privilege: on the table; of the server; or the one
#: that it needs if the server writes a binary log.
_DENIED = {1142, 1227, 1419}
_ADVICE = (
    "EnforceFence makes a trigger. The account that migrates needs the TRIGGER privilege on the"
    " table and, where the server writes a binary log, either SUPER or a server with"
    " log_bin_trust_function_creators = 1."
)


class _FenceOperation(FieldOperation):
    """An operation on the trigger of a fence, which is an integer, and never null."""

    reduces_to_sql = True
    reversible = True

    def __init__(self, model_name: str, field: str = _FENCE):
        super().__init__(model_name, field)

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the arguments that `squashmigrations` writes."""
        arguments = {"model_name": self.model_name}
        if self.name != _FENCE:
            arguments["field"] = self.name
        return self.__class__.__name__, [], arguments

    def reduce(self, operation: Operation, app_label: str) -> bool | list[Operation]:
        """Return what is left of the two; a deletion of the model leaves only itself."""
        if isinstance(operation, DeleteModel) and operation.name_lower == self.model_name_lower:
            return [operation]
        if isinstance(operation, _FenceOperation) and self.is_same_field_operation(operation):
            return [operation] if type(operation) is type(self) else []
        return super().reduce(operation, app_label)

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        """Create the trigger of the new state, or drop that of the old state."""
        after = self._triggers(app_label, to_state).get(self.name)
        trigger = after or self._triggers(app_label, from_state).get(self.name)
        state = from_state if after is None else to_state
        model = state.apps.get_model(app_label, self.model_name)
        if trigger is None or not self.allow_migrate_model(schema_editor.connection.alias, model):
            return
        if after is None:
            trigger.uninstall(model, schema_editor)
            return
        try:
            trigger.install(model, schema_editor)
        except DatabaseError as error:
            number = error.args[0] if error.args else None
            if schema_editor.connection.vendor == "mysql" and number in _DENIED:
                error.add_note(_ADVICE)
            raise

    # The same on the way back.
    database_backwards = database_forwards

    def _triggers(self, app_label: str, state: ProjectState) -> Mapping[str, FenceTrigger]:
        """Return the model's triggers, by the names of their fields."""
        return getattr(state.models[app_label, self.model_name_lower], "triggers", {})

    def _set_triggers(
        self, app_label: str, state: ProjectState, triggers: Mapping[str, FenceTrigger]
    ) -> None:
        key = app_label, self.model_name_lower
        state.models[key] = EnforcedState.of(state.models[key], triggers)
        state.reload_model(*key, delay=True)

    def _fence(self, app_label: str, model: ModelState) -> models.Field[Any, Any]:
        """Return the field, which has to be the model's own, an integer, and never null."""
        field = model.fields.get(self.name)
        label = f"{app_label}.{model.name}"
        if field is None:
            raise FieldDoesNotExist(
                f"{label} has no field {self.name!r} of its own to enforce. Where another model's"
                f" table has it, EnforceFence belongs to that model."
            )
        if not is_fence(field):
            raise FieldError(
                f"{label}.{self.name} is not a fence: a fence is an integer, and never null."
            )
        return field


class EnforceFence(_FenceOperation):
    """Let the database refuse every `UPDATE` that lowers a fence, with an `IntegrityError`.

    Stale fenced writes are refused without it. It is for all others: raw SQL, old releases, other
    programs. It installs a trigger on PostgreSQL, MySQL, MariaDB and SQLite.

    Args:
        model_name: The model, in the app of the migration.
        field: The fence: an integer that is never null; by default, that of `FencedModel`.

    Raises:
        FieldDoesNotExist: The model's own table has no such field.
        FieldError: The field is no integer, or may be null; or a later operation makes it so,
            renames it or removes it without a `RelaxFence` before it.
        NotSupportedError: The database is none of these.
    """

    category = OperationCategory.ADDITION

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Record the trigger, so that it is kept where Django creates the table again."""
        triggers = self._triggers(app_label, state)
        if self.name in triggers:
            return
        key = app_label, self.model_name_lower
        model = state.models[key]
        column = column_of(self.name, self._fence(app_label, model))
        table = model.options.get("db_table") or "_".join(key)
        taken = {
            trigger.name
            for other in state.models.values()
            for trigger in getattr(other, "triggers", {}).values()
        }
        name = trigger_name(table, self.name, taken)
        trigger = FenceTrigger(name=name, field=self.name, column=column)
        self._set_triggers(app_label, state, {**triggers, self.name: trigger})

    def describe(self) -> str:
        return f"Refuse to lower {self.name} on {self.model_name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"enforce_{self.model_name_lower}_{self.name_lower}"


class RelaxFence(_FenceOperation):
    """Remove what `EnforceFence` has installed, such as before the field is renamed or removed.

    Args:
        model_name: The model, in the app of the migration.
        field: The fence.
    """

    category = OperationCategory.REMOVAL

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Forget the trigger."""
        triggers = dict(self._triggers(app_label, state))
        if triggers.pop(self.name, None) is not None:
            self._set_triggers(app_label, state, triggers)

    def describe(self) -> str:
        return f"No longer refuse to lower {self.name} on {self.model_name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"relax_{self.model_name_lower}_{self.name_lower}"
