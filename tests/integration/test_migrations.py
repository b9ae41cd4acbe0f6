"""Tables, functions and trigger: how they come into a database, and go."""

from __future__ import annotations

import io
import re
from contextlib import ExitStack
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection, connections
from django.test import override_settings

from django_distlock import LockError, LockUsageError, distlock
from django_distlock.conf import DEFAULT_TABLES, table
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Holder
from django_distlock.handler import lock_backends
from django_distlock.models import FenceCounter
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import there

from .databases import (
    APP,
    FUNCTIONS,
    SIDE_TABLES,
    TABLES,
    TRIGGER,
    ask,
    lock_and_release,
    migrate,
    objects,
    role,
    tables,
)
from .projects import Project

NAMES = pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            {
                "locks": "order",
                "fences": "user",
                "events": "table",
                "waiters": "group",
                "seen": "select",
                "notes": "where",
                "failed": "from",
                "responses": "grant",
            },
            id="reserved",
        ),
        pytest.param(
            {"locks": f"AcmeLocks_{'x' * 33}", "fences": f"AcmeFences_{'x' * 37}"},
            id="longest, mixed case",
        ),
    ],
)


def bodies(using: str) -> dict[str, str]:
    """Return the functions of a PostgreSQL database and what they do."""
    return dict(
        ask(
            using, "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        )
    )


def run_script(using: str, printed: str) -> None:
    """Run what `sqlmigrate` has printed."""
    connection = connections[using]
    connection.ensure_connection()
    if connection.vendor == "sqlite":
        connection.connection.executescript(printed)
    elif connection.vendor == "mysql":
        # Statement by statement, as its client does.
        for statement in re.split(r";$", printed, flags=re.MULTILINE):
            lines = [line for line in statement.splitlines() if not line.startswith("--")]
            if "".join(lines).strip():
                ask(using, "\n".join(lines))
    else:
        connection.connection.execute(printed)


# From zero and back


def test_migrates_forth_and_back_and_forth(empty: str) -> None:
    """Behind a migration to zero nothing of ours is left, and the next one starts anew."""
    before = objects(empty)
    migrate(empty)
    assert tables(empty) >= TABLES
    if connections[empty].vendor == "postgresql":
        assert set(bodies(empty)) == FUNCTIONS
        assert {name[-3:] for name in FUNCTIONS} == {"_v1", "_v3"}
        assert objects(empty)["triggers"] == {TRIGGER}
    assert lock_and_release(empty) == 1
    migrate(empty, "zero")
    assert objects(empty) == before
    migrate(empty)
    assert lock_and_release(empty) == 1


def test_missing_tables_are_told_with_what_to_do(empty: str) -> None:
    """The remedy comes last, behind one line of the driver's and without its hints."""
    rule = rf"lock tables are missing: [^\n]+\. Run manage.py migrate --database {empty}\.$"
    with pytest.raises(LockError, match=rule) as caught:
        lock_and_release(empty)
    assert "\n" not in str(caught.value)


def test_functions_are_the_ones_that_are_called(postgresql: str) -> None:
    """Without its functions PostgreSQL's fast path fails, so it is they that the tests run."""
    migrate(postgresql)
    ask(postgresql, "DROP FUNCTION django_distlock_heldlock_acquire_v3")
    with pytest.raises(LockError, match="migrate"):
        lock_and_release(postgresql)
    assert lock_and_release(postgresql, server_functions=False) == 1


@pytest.mark.parametrize(
    ("kind", "obstacle", "name"),
    [
        ("sqlite", "CREATE TABLE {} (id integer)", "django_distlock_lockevent"),
        ("postgresql", "CREATE VIEW {} AS SELECT 1 AS x", "django_distlock_fencecounter"),
        (
            "postgresql",
            "CREATE FUNCTION {} RETURNS integer LANGUAGE sql AS 'SELECT 1'",
            "django_distlock_heldlock_release_v3(text, text, double precision, text)",
        ),
    ],
)
def test_migration_that_fails_leaves_nothing(
    request: pytest.FixtureRequest, kind: str, obstacle: str, name: str
) -> None:
    """What stands in the way of the last table or function keeps the first ones away too.

    MariaDB commits each table by itself.
    """
    empty = request.getfixturevalue(kind)
    ask(empty, obstacle.format(name))
    before = objects(empty)
    with pytest.raises(DatabaseError):
        migrate(empty)
    assert objects(empty) == before
    ask(empty, f"DROP {obstacle.split()[1]} {name}")
    migrate(empty)
    assert lock_and_release(empty) == 1


# What the commands print


def test_sqlmigrate_prints_the_whole_schema(postgresql: str) -> None:
    """Tables, functions, trigger and storage parameters: the script alone makes a lock store."""
    printed = sqlmigrate(postgresql)
    for name in TABLES:
        assert f'CREATE TABLE "{name}"' in printed
    for name in FUNCTIONS:
        assert f'CREATE OR REPLACE FUNCTION "public"."{name}"(' in printed
    assert f"CREATE TRIGGER {TRIGGER}" in printed
    assert "fillfactor" in printed
    run_script(postgresql, printed)
    assert set(bodies(postgresql)) == FUNCTIONS
    assert lock_and_release(postgresql) == 1


def test_sqlmigrate_prints_only_tables_elsewhere(sqlite: str) -> None:
    """On SQLite there is nothing but tables and their indexes, and the script makes them."""
    printed = sqlmigrate(sqlite)
    statements = [line for line in printed.splitlines() if line and not line.startswith("--")]
    starts = {" ".join(line.split()[:2]) for line in statements}
    assert starts == {"BEGIN;", "CREATE TABLE", "CREATE INDEX", "COMMIT;"}
    run_script(sqlite, printed)
    assert lock_and_release(sqlite) == 1


def test_sqlmigrate_prints_the_way_back(empty: str) -> None:
    """Printing changes nothing, and the script of the way back leaves nothing."""
    before = objects(empty)
    there, back = sqlmigrate(empty), sqlmigrate(empty, backwards=True)
    assert objects(empty) == before
    run_script(empty, there)
    run_script(empty, back)
    assert objects(empty) == before


def sqlmigrate(using: str, **options: Any) -> str:
    """Return what `sqlmigrate` prints."""
    printed = io.StringIO()
    call_command("sqlmigrate", APP, "0001", database=using, stdout=printed, **options)
    return printed.getvalue()


def test_makemigrations_has_nothing_to_do() -> None:
    """Models and migrations agree under the default names."""
    call_command("makemigrations", APP, check_changes=True, dry_run=True, verbosity=0)


# Names of one's own


@NAMES
def test_locks_work_under_other_names(empty: str, names: dict[str, str]) -> None:
    """Migrations agree, every operation finds the tables, and zero takes all of it away."""
    before = objects(empty)
    project = Project(empty, DISTLOCK_TABLES=names)
    assert "No changes" in project.manage("makemigrations", APP, "--check", "--dry-run")
    said = project.run("tests.integration.test_migrations:use_all_operations")
    assert said["refused"] == []
    assert set(names.values()) <= set(said["tables"])
    kept = {"locks": "heldlock", "fences": "fencecounter"}
    assert not {f"django_distlock_{kept[each]}" for each in kept} & set(said["tables"])
    assert objects(empty) == before


def use_all_operations() -> dict[str, Any]:
    """Be a project: migrate, ask everything of the locks, and go back to zero."""
    migrate("default")
    made = sorted(tables("default"))
    for server_functions in (True, False):
        options = {"using": "default", "server_functions": server_functions}
        with locks_on("default", KEY_PREFIX=f"p{server_functions}", OPTIONS=options) as alias:
            _ask_everything(alias)
    refused = _not_refused()
    migrate("default", "zero")
    return {"tables": made, "refused": refused}


def _ask_everything(alias: str) -> None:
    """Call each operation of a backend once."""
    backend = lock_backends[alias]
    key, token = "invoice:42", new_token()
    grant = backend.acquire(key, token, 30)
    assert isinstance(grant, Grant)
    assert grant.fence == 1
    assert backend.acquire(key, new_token(), 30, wanted=True).fence == 1
    assert backend.extend(grant, 40) is not None
    assert backend.extend_many([grant])[0] is not None
    assert backend.read(key) is not None
    assert backend.read_token(token) is not None
    assert [record.key for record in backend.list("invoice").records] == [key]
    assert backend.request_stop(key) is not None
    assert backend.request_stop(key, 20) is not None
    note = there(backend.waiters.note(key, Holder(host="somewhere"), 30))
    assert [each.holder.host for each in backend.waiters.of(key)] == ["somewhere"]
    backend.waiters.drop(key, note)
    assert backend.release(grant, 10) is True
    assert backend.force_release(key) is not None
    grant = backend.acquire(key, token, 30)
    assert isinstance(grant, Grant)
    assert grant.fence == 3
    assert backend.release(grant) is True


def _not_refused() -> list[str]:
    """Return what could take a fence back, and was not refused."""
    counter = FenceCounter.objects.all()[0]
    found = []
    try:
        counter.delete()
        found.append("delete")
    except LockUsageError:
        pass
    if connection.vendor == "postgresql":
        for statement in ('DELETE FROM "{}"', 'UPDATE "{}" SET fence = fence - 1'):
            try:
                ask("default", statement.format(table("fences")))
                found.append(statement)
            except DatabaseError:
                pass
    return found


@pytest.mark.parametrize(
    "names",
    [
        {each: f"acme_{each}" for each in DEFAULT_TABLES},
        {
            "locks": "Django_Distlock_HeldLock",
            "fences": "Django_Distlock_FenceCounter",
            "events": "Django_Distlock_LockEvent",
            "waiters": "Django_Distlock_Waiter",
            "seen": "Django_Distlock_SeenFence",
            "notes": "Django_Distlock_RunNote",
            "failed": "Django_Distlock_FailedTask",
            "responses": "Django_Distlock_StoredResponse",
        },
    ],
    ids=["other names", "other case"],
)
def test_projects_share_a_schema(postgresql: str, names: dict[str, str]) -> None:
    """Two projects with tables of different names in one schema do not touch each other."""
    migrate(postgresql)
    ours = bodies(postgresql)
    with locks_on(postgresql) as backend:
        lease = distlock("invoice:42", backend=backend).acquire()
        # The other project has a history of its own, as in a schema that it had first.
        ask(postgresql, "DELETE FROM django_migrations")
        project = Project(postgresql, DISTLOCK_TABLES=names)
        said = project.run("tests.integration.test_migrations:be_the_other_project")
        assert said == {"fences": [1, 2], "locked": False}
        lease.extend()
        assert lease.release() is True
        # It went back to zero, and ours is what it was.
        assert bodies(postgresql) == ours
        assert objects(postgresql)["triggers"] == {TRIGGER}
        with distlock("invoice:42", backend=backend) as lease:
            assert lease.fence == 2


def be_the_other_project() -> dict[str, Any]:
    """Lock the same key in tables of other names."""
    migrate("default")
    lock = distlock("invoice:42", wait=0)
    fences = []
    for _ in range(2):
        with lock as lease:
            lease.extend()
            fences.append(lease.fence)
    locked = lock.locked()
    migrate("default", "zero")
    return {"fences": fences, "locked": locked}


# Without migrations


def test_tables_without_migrations_are_the_same(empty: str) -> None:
    """What `--nomigrations` makes, on which tests lock, is what migrations make."""
    migrate(empty)
    migrated, parameters = objects(empty), storage(empty)
    migrate(empty, "zero")
    _without_migrations(empty)
    # The other apps of the tests came along.
    assert {
        kind: {name for name in names if "distlock" in name}
        for kind, names in objects(empty).items()
    } == migrated
    assert storage(empty) == parameters
    assert lock_and_release(empty) == 1
    assert lock_and_release(empty, server_functions=False) == 2
    if connections[empty].vendor == "postgresql":
        # A fence table that was made anew gets its trigger, though the function is still there.
        ask(empty, "DROP TABLE django_distlock_fencecounter")
        assert objects(empty)["triggers"] == set()
        _without_migrations(empty)
        assert objects(empty)["triggers"] == {TRIGGER}


def storage(using: str) -> list[Any]:
    """Return the storage parameters of the table of locks, which PostgreSQL alone has."""
    if connections[using].vendor != "postgresql":
        return []
    ((options,),) = ask(
        using, "SELECT reloptions FROM pg_class WHERE relname = 'django_distlock_heldlock'"
    )
    return list(options)


def _without_migrations(using: str) -> None:
    with override_settings(MIGRATION_MODULES={APP: None}):
        call_command("migrate", database=using, run_syncdb=True, verbosity=0)


# Repairs behind `migrate`


class EventsElsewhere:
    """Lets one database have the events, and nothing else of the app."""

    def __init__(self, using: str):
        self._using = using

    def allow_migrate(
        self, db: str, app_label: str, model_name: str | None = None, **_: Any
    ) -> bool | None:
        """Refuse the other models there; what is about none may go anywhere."""
        if (db, app_label) != (self._using, APP) or model_name is None:
            return None
        return model_name == "lockevent"


def test_database_of_the_events_alone_gets_no_functions(postgresql: str) -> None:
    """They would name tables that are not there, and `migrate` would stop at them."""
    with override_settings(DATABASE_ROUTERS=[EventsElsewhere(postgresql)]):
        migrate(postgresql)
        assert tables(postgresql) & TABLES == {table("events")}
        assert not bodies(postgresql)


def test_functions_that_were_dropped_are_put_back(postgresql: str) -> None:
    """`migrate` with nothing to apply installs each that is missing."""
    migrate(postgresql)
    was = bodies(postgresql)
    for name in sorted(FUNCTIONS):
        ask(postgresql, f"DROP FUNCTION {name} CASCADE")
        migrate(postgresql)
        assert bodies(postgresql) == was, name
        assert objects(postgresql)["triggers"] == {TRIGGER}, name
    assert lock_and_release(postgresql) == 1


def test_functions_that_name_other_tables_are_replaced(postgresql: str) -> None:
    """Each that is left from before a renaming, under a name in use, is brought up to date."""
    migrate(postgresql)
    was = bodies(postgresql)
    ask(postgresql, "CREATE TABLE elsewhere AS TABLE django_distlock_heldlock")
    for name in sorted(FUNCTIONS - {"django_distlock_fencecounter_guard_v1"}):
        ((definition,),) = ask(
            postgresql, "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = %s", name
        )
        head, separator, body = definition.partition("AS $")
        replaced = head + separator + body.replace('"django_distlock_heldlock"', '"elsewhere"')
        ask(postgresql, replaced.replace("%", "%%"))
        assert bodies(postgresql) != was, name
        migrate(postgresql)
        assert bodies(postgresql) == was, name


def test_functions_of_other_versions_are_left_alone(postgresql: str) -> None:
    """A worker of another release keeps the functions that it knows."""
    migrate(postgresql)
    for version in (0, 4):
        ask(
            postgresql,
            f"CREATE FUNCTION django_distlock_heldlock_acquire_v{version}(text) RETURNS integer"
            f" LANGUAGE sql AS 'SELECT {version}'",
        )
    migrate(postgresql)
    assert set(bodies(postgresql)) - FUNCTIONS == {
        "django_distlock_heldlock_acquire_v0",
        "django_distlock_heldlock_acquire_v4",
    }
    assert lock_and_release(postgresql) == 1


@pytest.mark.parametrize("schema", ["tenant", "50%"])
def test_functions_follow_the_schema_of_the_tables(postgresql: str, schema: str) -> None:
    """Where the search path names a schema, all is made there, beside the same in another."""
    migrate(postgresql)
    ask(postgresql, f'CREATE SCHEMA "{schema}"')
    options = {"options": f'-c search_path="{schema}"'}
    with alias_like(postgresql, OPTIONS=options) as tenant:
        migrate(tenant)
        assert lock_and_release(tenant) == 1
        assert lock_and_release(postgresql) == 1
        assert lock_and_release(tenant) == 2
        migrate(tenant, "zero")
    assert set(bodies(postgresql)) == FUNCTIONS
    assert lock_and_release(postgresql) == 2


def test_migrate_binds_its_arguments_on_the_server(postgresql: str) -> None:
    """With `server_side_binding`, too, what is there is found, and what is missing is installed."""
    with alias_like(postgresql, OPTIONS={"server_side_binding": True}) as bound:
        migrate(bound)
        ask(bound, "DROP FUNCTION django_distlock_heldlock_acquire_v3")
        migrate(bound)
        assert set(bodies(bound)) == FUNCTIONS
        assert lock_and_release(bound) == 1


def test_processes_that_migrate_at_once_do_not_disturb_each_other(postgresql: str) -> None:
    """A deployment starts several; each gets through, and the functions are repaired."""
    migrate(postgresql)
    project = Project(postgresql)
    was = bodies(postgresql)
    target = "tests.integration.test_migrations:migrate_when_told"
    with ExitStack() as stack:
        workers = [stack.enter_context(project.start(target, 6)) for _ in range(3)]
        for _ in range(6):
            for worker in workers:
                worker.wait_for("ready", timeout=60)
            for name in was:
                # As it is after the names of the tables were changed: there, and wrong.
                ask(
                    postgresql,
                    "DO $do$ BEGIN EXECUTE regexp_replace(pg_get_functiondef(%s::regproc),"
                    " 'BEGIN', 'BEGIN '); END $do$".replace("%s", f"'{name}'"),
                )
            assert bodies(postgresql) != was
            for worker in workers:
                worker.send("go")
        assert [worker.result(60) for worker in workers] == [6, 6, 6]
    assert bodies(postgresql) == was


def migrate_when_told(times: int) -> int:
    """Be a process of a deployment."""
    for _ in range(times):
        connections["default"].ensure_connection()
        print("ready")
        input()
        migrate("default")
    return times


# Rights


def test_role_without_plpgsql_can_migrate_and_lock(postgresql: str) -> None:
    """Tables come without functions and trigger, which `migrate` adds once they are allowed."""
    may_make_tables = "GRANT ALL ON SCHEMA public TO shop_app"
    without_plpgsql = "REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC"
    with role(postgresql, f"{may_make_tables}; {without_plpgsql}") as limited:
        migrate(limited)
        assert tables(limited) == TABLES | SIDE_TABLES
        assert bodies(limited) == {}
        assert objects(limited)["triggers"] == set()
        assert lock_and_release(limited, server_functions=False) == 1
        with pytest.raises(LockError, match="migrate"):
            lock_and_release(limited)
        migrate(limited, "zero")
        assert tables(limited) == set()
        migrate(limited)
        ask(postgresql, "GRANT USAGE ON LANGUAGE plpgsql TO PUBLIC")
        migrate(limited)
        assert set(bodies(limited)) == FUNCTIONS
        assert lock_and_release(limited) == 1
