"""Migrations of an app that no project has, on the databases of tests."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connections, models
from django.db.migrations import Migration
from django.db.migrations.operations import CreateModel
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter

from tests.integration.databases import ask

BANK = "bank"
TABLE = "bank_payment"
FUNCTION = "django_distlock_enforce_fence_v1"
TRIGGERS = {
    "postgresql": "SELECT tgname, tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal",
    "mysql": "SELECT trigger_name, event_object_table FROM information_schema.triggers"
    " WHERE trigger_schema = DATABASE()",
    "sqlite": "SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'",
}


class Bank:
    """An app of which one migration after the other is applied to a database.

    Attributes:
        state: What the migrations so far make of the models.
    """

    def __init__(self, using: str):
        self.using = using
        self.state = ProjectState()
        self._done: list[tuple[ProjectState, Migration]] = []

    def migrate(self, *operations: Operation) -> Bank:
        """Apply a migration."""
        migration = migration_of(*operations)
        before = self.state.clone()
        with connections[self.using].schema_editor() as editor:
            self.state = migration.apply(self.state.clone(), editor)
        self._done.append((before, migration))
        return self

    def undo(self, times: int = 1) -> Bank:
        """Take migrations back, the last one first."""
        for _ in range(times):
            before, migration = self._done.pop()
            with connections[self.using].schema_editor() as editor:
                migration.unapply(before.clone(), editor)
            self.state = before
        return self

    def sql(self, *operations: Operation) -> str:
        """Return what `sqlmigrate` would print of a migration."""
        with connections[self.using].schema_editor(collect_sql=True) as editor:
            migration_of(*operations).apply(self.state.clone(), editor, collect_sql=True)
        return "\n".join(editor.collected_sql)

    def model(self, name: str = "Payment") -> Any:
        """Return a model as data migrations see it."""
        return self.state.apps.get_model(BANK, name)

    def add(self, fence: int, name: str = "Payment", **values: Any) -> Any:
        """Add a row; return its primary key."""
        return self.model(name).objects.using(self.using).create(fence=fence, **values).pk


def migration_of(*operations: Operation, **more: Any) -> Migration:
    """Return a migration of the bank."""
    kind = type("Migration", (Migration,), {"operations": list(operations), **more})
    migration: Migration = kind("0001", BANK)
    return migration


def written(*operations: Operation, after: tuple[str, str] | None = None) -> str:
    """Return what stands in the file of a migration of any app."""
    behind = [] if after is None else [after]
    migration = migration_of(*operations, initial=after is None, dependencies=behind)
    return MigrationWriter(migration, include_header=False).as_string()


def payment(name: str = "Payment", **options: Any) -> CreateModel:
    """Return the operation that makes a model with a fence, and a fence of another name."""
    return CreateModel(
        name,
        [
            ("id", models.BigAutoField(primary_key=True)),
            ("note", models.CharField(max_length=20, default="")),
            ("amount", models.IntegerField(default=0, unique=True, null=True)),
            ("fence", models.PositiveBigIntegerField(default=0, editable=False)),
            ("mark", models.PositiveIntegerField(default=0)),
        ],
        options,
    )


def set_fence(using: str, value: str, table: str = TABLE, column: str = "fence") -> None:
    """Write a fence by raw SQL."""
    ask(using, f"UPDATE {table} SET {column} = {value}")


def triggers(using: str) -> dict[str, str]:
    """Return the names of the triggers of a database and of their tables."""
    return dict(ask(using, TRIGGERS[connections[using].vendor]))


def text(**more: Any) -> models.Field[Any, Any]:
    """Return a field for words."""
    return models.CharField(max_length=30, **more)


def assert_enforced(using: str, table: str = TABLE, column: str = "fence") -> None:
    """See a lower fence refused, and a higher one taken."""
    set_fence(using, f"{column} + 2", table, column)
    with pytest.raises(IntegrityError, match=f"never goes back.*{column}"):
        set_fence(using, f"{column} - 1", table, column)


def vendor(bank: Bank) -> str:
    """Return what kind of database it is."""
    kind: str = connections[bank.using].vendor
    return kind
