"""System checks of what migrations leave besides tables: functions, triggers, indexes."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import connections
from django.test import override_settings

from django_distlock.conf import index_name
from django_distlock.database.sql import FUNCTIONS, fence_guard_name, function_name
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import there
from tests.salted import SALT

from .databases import APP, TRIGGER, ask, forget_migration, migrate, role
from .projects import ROOT, Project
from .test_checks import HASTY

GUARD = fence_guard_name()
FENCES = "django_distlock_fencecounter"
ENFORCES = """
CREATE FUNCTION django_distlock_enforce_fence_v1() RETURNS trigger
LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'
"""


def found(using: str, **options: Any) -> dict[str, str]:
    """Look into a database of locks; give ids and texts of what is said about it."""
    with locks_on(using, OPTIONS={"using": using, **options}):
        messages = checks.run_checks(tags=[checks.Tags.database], databases=[using])
    ours = [each for each in messages if str(each.id).startswith("distlock.")]
    return {str(each.id): each.msg for each in ours if each.id not in HASTY}


def drop_index(using: str) -> None:
    """Take away what finds locks by their tasks."""
    connection = connections[using]
    with connection.cursor() as cursor:
        indexes = connection.introspection.get_constraints(cursor, "django_distlock_heldlock")
    (name,) = [name for name, each in indexes.items() if each["columns"] == ["task_id"]]
    where = " ON django_distlock_heldlock" if connection.vendor == "mysql" else ""
    ask(using, f"DROP INDEX {name}{where}")


# Migrations


def test_migration_that_was_not_applied(empty: str) -> None:
    """W106 names it; what it would have made is not missed twice."""
    # Before the first migration, W103 says all there is to say.
    assert list(found(empty)) == ["distlock.W103"]
    migrate(empty)
    forget_migration(empty)
    drop_index(empty)
    told = found(empty)
    assert list(told) == ["distlock.W106"]
    assert told["distlock.W106"].endswith(f"has unapplied migrations of {APP}: 0001_initial.")
    call_command("migrate", APP, database=empty, fake=True, verbosity=0)
    assert list(found(empty)) == ["distlock.W111"]
    # Where the project makes the tables without migrations, none is missing.
    migrate(empty, "zero")
    with override_settings(MIGRATION_MODULES={APP: None}):
        call_command("migrate", database=empty, run_syncdb=True, verbosity=0)
        assert found(empty) == {}


def test_migrations_of_others_that_cannot_be_loaded(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in another app ends no check: `migrate` tells of it."""
    broken = tmp_path / f"broken_{secrets.token_hex(4)}"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "0001_initial.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    migrate(sqlite)
    with override_settings(MIGRATION_MODULES={"shop": broken.name}):
        assert found(sqlite) == {}


def test_account_that_may_not_read_what_was_applied(postgresql: str) -> None:
    """Where nothing tells, nothing is said to be missing."""
    migrate(postgresql)
    with role(postgresql) as limited:
        assert "may not read the table" in found(limited)["distlock.W107"]
        ask(postgresql, f"GRANT SELECT ON {SALT} TO {connections[limited].settings_dict['USER']}")
        assert found(limited) == {}


# Functions, and the trigger that keeps the counters


def test_functions_that_are_missing_or_others(postgresql: str) -> None:
    """W107 names each that is missing, of another release, or in another schema."""
    migrate(postgresql)
    for name in map(function_name, FUNCTIONS):
        ask(postgresql, f"DROP FUNCTION {name}")
        assert f"the function {name} is missing" in found(postgresql)["distlock.W107"]
    # `migrate` gets through, and brings them.
    assert "(distlock.W107)" in Project(postgresql).manage("migrate")
    assert found(postgresql) == {}
    for name in (function_name("release"), GUARD):
        ((text, signature),) = ask(
            postgresql,
            "SELECT pg_get_functiondef(oid), oid::regprocedure::text FROM pg_proc"
            " WHERE proname = %s",
            name,
        )
        # Its body is another one, or looks names up by the callers' path.
        for change in (
            text.replace("BEGIN", "BEGIN -- as it was", 1),
            f"ALTER FUNCTION {signature} RESET search_path",
        ):
            ask(postgresql, change)
            told = found(postgresql)["distlock.W107"]
            assert told.endswith(f", the function {name} is not that of this release.")
            migrate(postgresql)
            assert found(postgresql) == {}
    # It is called where the tables are, whatever else is on the path.
    name = function_name("acquire")
    ask(postgresql, "CREATE SCHEMA attic")
    ((signature,),) = ask(
        postgresql, "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = %s", name
    )
    ask(postgresql, f"ALTER FUNCTION {signature} SET SCHEMA attic")
    ask(postgresql, "SET search_path = public, attic")
    told = found(postgresql)["distlock.W107"]
    assert f"{name} is missing in the schema public" in told


def test_tables_of_several_schemas(postgresql: str) -> None:
    """W112 names the schemas of the path that have tables, the one that counts first."""
    migrate(postgresql)
    ask(postgresql, "CREATE SCHEMA attic")
    for path, told in (("attic", None), ("attic,public", "attic, public"), ("public", None)):
        options = {"options": f"-c search_path={path}"}
        with alias_like(postgresql, OPTIONS=options) as alias:
            if path == "attic":
                migrate(alias)
            said = found(alias).get("distlock.W112")
            assert said is None if told is None else f"search path: {told}." in str(said)


def test_schema_where_others_may_create(postgresql: str) -> None:
    """W113 names everybody, and the login roles that got the right themselves or by a group."""
    migrate(postgresql)
    ask(postgresql, "GRANT CREATE ON SCHEMA public TO PUBLIC")
    assert "(in public: PUBLIC)" in found(postgresql)["distlock.W113"]
    ask(postgresql, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert found(postgresql) == {}
    stranger, group, owner = (f"role_{each}_{secrets.token_hex(4)}" for each in "sgo")
    for made in (group, f"{stranger} LOGIN IN ROLE {group}", f"{owner} LOGIN IN ROLE {group}"):
        ask(postgresql, f"CREATE ROLE {made}")
    try:
        ask(postgresql, f"ALTER TABLE {FENCES} OWNER TO {owner}")
        assert found(postgresql) == {}
        ask(postgresql, f"GRANT CREATE ON SCHEMA public TO {group}")
        assert f"(in public: {stranger})" in found(postgresql)["distlock.W113"]
        ask(postgresql, f"REVOKE CREATE ON SCHEMA public FROM {group}")
        # Where no name is looked up, nothing that is planted is found.
        ask(postgresql, "CREATE SCHEMA attic")
        ask(postgresql, "GRANT CREATE ON SCHEMA attic TO PUBLIC")
        assert found(postgresql) == {}
        ask(postgresql, "SET search_path = public, attic")
        assert "(in attic: PUBLIC)" in found(postgresql)["distlock.W113"]
    finally:
        ask(postgresql, f"DROP OWNED BY {group}, {stranger}, {owner} CASCADE")
        ask(postgresql, f"DROP ROLE {group}, {stranger}, {owner}")


def test_functions_that_nobody_calls(postgresql: str) -> None:
    """Without `server_functions` none is missed, and the trigger is, missing or disabled.

    Not where PL/pgSQL may not be used, as the migration allows for.
    """
    migrate(postgresql)
    for operation in FUNCTIONS:
        ask(postgresql, f"DROP FUNCTION {function_name(operation)}")
    assert found(postgresql, server_functions=False) == {}
    for change in (
        f"ALTER TABLE {FENCES} DISABLE TRIGGER {TRIGGER}",
        f"DROP TRIGGER {TRIGGER} ON {FENCES}",
    ):
        ask(postgresql, change)
        told = found(postgresql, server_functions=False)["distlock.W107"]
        assert f"the trigger {TRIGGER} is missing or disabled" in told
    ask(postgresql, "REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC")
    with role(postgresql, f"GRANT SELECT ON {SALT} TO shop_app") as limited:
        assert found(limited, server_functions=False) == {}


# Indexes and constraints


#: What takes one away on each database, and what is said then.
LOST = {
    "postgresql": {
        "ALTER TABLE django_distlock_heldlock DROP CONSTRAINT django_distlock_heldlock_pkey": (
            "its primary key (storage_key)"
        ),
        "ALTER TABLE django_distlock_fencecounter DROP CONSTRAINT django_distlock_fencecounter_max":
            "django_distlock_fencecounter_max",
    },
    "mysql": {
        "ALTER TABLE django_distlock_heldlock DROP PRIMARY KEY": "its primary key (storage_key)",
        "ALTER TABLE django_distlock_heldlock DROP INDEX token": "the unique index on token",
        "ALTER TABLE django_distlock_fencecounter DROP CONSTRAINT django_distlock_fencecounter_max":
            "django_distlock_fencecounter_max",
    },
    "sqlite": {},
}  # fmt: skip


def test_what_somebody_has_dropped(empty: str) -> None:
    """W111 names the table, and the index, key, check or column; nothing when it is back.

    A column may lack where a pre-release has applied the migration.
    """
    migrate(empty)
    drop_index(empty)
    told = found(empty)
    assert list(told) == ["distlock.W111"]
    assert "django_distlock_heldlock of" in told["distlock.W111"]
    assert told["distlock.W111"].endswith("lacks the index on task_id.")
    ask(empty, "CREATE INDEX again ON django_distlock_heldlock (task_id)")
    assert found(empty) == {}
    for statement, said in LOST[connections[empty].vendor].items():
        ask(empty, statement)
        assert said in found(empty)["distlock.W111"]
    if connections[empty].vendor == "sqlite":
        # Its keys and constraints go with no statement of their own.
        ask(empty, "DROP TABLE django_distlock_fencecounter")
        columns = "storage_key text, key text, fence bigint, paused_until bigint, paused_by text"
        ask(empty, f"CREATE TABLE django_distlock_fencecounter ({columns})")
        message = found(empty)["distlock.W111"]
        assert "its primary key (storage_key), django_distlock_fencecounter_max" in message
    else:
        ask(empty, "ALTER TABLE django_distlock_fencecounter DROP COLUMN closed_until")
    assert "the column closed_until" in found(empty)["distlock.W111"]


OTHERS = "django_distlock_heldlock_acquire_v3"


@pytest.mark.parametrize("kind", ["mysql", "postgresql", "sqlite"])
def test_tables_renamed_as_the_page_says(request: pytest.FixtureRequest, kind: str) -> None:
    """They keep the names of their indexes, and nothing is missing."""
    using = request.getfixturevalue(kind)
    migrate(using)
    page = (ROOT / "docs/howto/rename-tables.md").read_text()
    statements = re.findall(r"ALTER TABLE .*(?=;)", page)
    names = dict(re.findall(r'"(\w+)": "(acme_\w+)"', page))
    assert (len(statements), len(names)) == (11, 8)
    for each in statements if kind == "postgresql" else statements[:-3]:
        ask(using, each)
    project = Project(using, DISTLOCK_TABLES=names)
    project.manage("migrate", "--verbosity=0")
    if kind == "postgresql":
        # All that serve the tables go, and not what serves fenced rows.
        ask(using, ENFORCES)
        # Another deployment's are not ours.
        ask(using, "CREATE SCHEMA other")
        ask(using, f"CREATE FUNCTION other.{OTHERS}() RETURNS int AS 'SELECT 1' LANGUAGE sql")
        listed = there(re.search(r"SELECT format\(.*?(?=;\n)", page, re.DOTALL))
        for (statement,) in ask(using, listed[0]):
            ask(using, statement)
        left = ask(using, r"SELECT proname FROM pg_proc WHERE proname LIKE 'django\_distlock\_%'")
        assert {*left} == {("django_distlock_enforce_fence_v1",), (OTHERS,)}
    assert project.run(f"{__name__}:found", "default") == {}
    where = " ON acme_events" if kind == "mysql" else ""
    ask(using, f"DROP INDEX {index_name('events', 'kind')}{where}")
    assert "distlock_events_kind" in project.run(f"{__name__}:found", "default")["distlock.W111"]
