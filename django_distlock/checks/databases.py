"""`distlock.E1xx` and `W1xx`: the databases of locks and fences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core import checks
from django.db import DatabaseError, connections, models, router

from ..backends.tables import FenceTable
from ..connections import database_file
from ..models import FenceCounter, HeldLock, LockEvent
from .configured import DOCS, configured, where


@checks.register("distlock")
def check_aliases(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E102 and W101: the locks' database is no mirror, and a SQLite file of their own."""
    found: list[checks.CheckMessage] = []
    for backend in configured(FenceTable):
        connection = connections[backend.using]
        setting = where(backend)
        if (connection.settings_dict.get("TEST") or {}).get("MIRROR"):
            found.append(
                checks.Error(
                    f"{setting} keeps its locks in {backend.using!r}, which is a mirror of another"
                    " database. A replica lags behind: two would hold one lock.",
                    hint=f"Set OPTIONS['using'] to the database that is written. {DOCS}",
                    id="distlock.E102",
                )
            )
        if connection.vendor == "sqlite" and _shares_file(backend.using):
            found.append(
                checks.Warning(
                    f"{setting} keeps its locks in the SQLite file of other models"
                    f" ({backend.using!r}). SQLite has one writer per file: inside atomic() on it,"
                    " acquire is refused.",
                    hint="Give the locks an alias with a file of its own, and a router: see"
                    " docs/howto/choose-a-database.md.",
                    id="distlock.W101",
                )
            )
    return found


@checks.register(checks.Tags.database)
def check_tables(
    app_configs: Any, databases: Sequence[str] | None, **_: Any
) -> list[checks.CheckMessage]:
    """W103: the tables that the settings name exist.

    A warning, because `migrate` runs these checks too and stops at errors.
    """
    found: list[checks.CheckMessage] = []
    for using in _checked(databases):
        expected = [model._meta.db_table for model in (HeldLock, FenceCounter, LockEvent)]
        try:
            existing = set(connections[using].introspection.table_names())
        except DatabaseError as error:
            message = f"The lock tables in {using!r} cannot be looked for: {error}"
            found.append(checks.Warning(message, hint=DOCS, id="distlock.W102"))
            continue
        missing = [name for name in expected if name not in existing]
        if missing:
            found.append(
                checks.Warning(
                    f"The database {using!r} has no table {', '.join(missing)}.",
                    hint=f"Run manage.py migrate --database {using}. If DISTLOCK_TABLES was"
                    " changed after a migration, the tables have to be renamed: see"
                    " docs/howto/rename-tables.md.",
                    id="distlock.W103",
                )
            )
    return found


@checks.register(checks.Tags.database)
def check_mysql(
    app_configs: Any, databases: Sequence[str] | None, **_: Any
) -> list[checks.CheckMessage]:
    """E103, W104 and W105: MariaDB and MySQL lock rows, and keep what they commit."""
    found: list[checks.CheckMessage] = []
    for using in _checked(databases):
        if connections[using].vendor != "mysql":
            continue
        try:
            found += _mysql_findings(using)
        except DatabaseError:
            continue  # W102 says so.
    return found


def _mysql_findings(using: str) -> Iterator[checks.CheckMessage]:
    connection = connections[using]
    if not connection.features.has_select_for_update_skip_locked:
        yield checks.Error(
            f"The database {using!r} cannot skip locked rows, which several leases are extended"
            " with.",
            hint=f"Use MariaDB 10.6 or MySQL 8.0.1, or newer. {DOCS}",
            id="distlock.E103",
        )
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, engine FROM information_schema.tables WHERE table_schema ="
            " DATABASE() AND table_name IN (%s, %s) AND engine <> 'InnoDB'",
            [HeldLock._meta.db_table, FenceCounter._meta.db_table],
        )
        for name, engine in cursor.fetchall():
            yield checks.Warning(
                f"The table {name} of {using!r} is kept by {engine}, which cannot lock rows: two"
                " could hold one lock.",
                hint=f"ALTER TABLE `{name}` ENGINE = InnoDB. {DOCS}",
                id="distlock.W104",
            )
        cursor.execute("SELECT @@innodb_flush_log_at_trx_commit")
        if cursor.fetchone()[0] != 1:
            yield checks.Warning(
                f"The database {using!r} does not write its log at each commit: a crash may undo"
                " grants, and hand out their fences again.",
                hint=f"Set innodb_flush_log_at_trx_commit to 1, or FENCE_FLOOR. {DOCS}",
                id="distlock.W105",
            )


def _checked(databases: Sequence[str] | None) -> list[str]:
    """Return which of the databases that are looked into hold locks or fences."""
    return sorted({each.using for each in configured(FenceTable)} & {*(databases or ())})


def _shares_file(using: str) -> bool:
    """Whether models of other apps are written to the file of this alias."""
    file = database_file(connections[using])
    same = [
        alias
        for alias in connections
        if connections[alias].vendor == "sqlite" and database_file(connections[alias]) == file
    ]
    return any(_is_written_to(model, same) for model in apps.get_models(include_auto_created=True))


def _is_written_to(model: type[models.Model], aliases: Sequence[str]) -> bool:
    return (
        model._meta.app_label != "django_distlock"
        and model._meta.managed
        and router.db_for_write(model) in aliases
    )
