"""`manage.py distlock_run` on a database that has no lock tables yet."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings

from django_distlock import BackendUnavailable, LockError, LockNotAcquired
from django_distlock.management import bootstrap
from django_distlock.management.bootstrap import ensure_tables
from tests.contract.aliases import alias_like
from tests.contract.helpers import Later, at_once, prompt

from .databases import APP, all_tables, ask, lock_and_release, migrate, tables
from .projects import Project
from .runs import Run

#: One of the tables that only the project's own `migrate` makes.
THEIRS = "auth_user"


def applied(using: str) -> set[str]:
    """Return the apps whose migrations are applied."""
    return {app for (app,) in ask(using, "SELECT DISTINCT app FROM django_migrations")}


def test_three_deployments_migrate_an_empty_database_at_once(postgresql: str) -> None:
    """One migrates, two wait for it and find nothing to do, and all end well."""
    project = Project(postgresql)
    command = ["migrate", "--wait", "300", "--", sys.executable, "-m", "django", "migrate"]
    with ExitStack() as stack:
        runs = [stack.enter_context(Run(project, *command)) for _ in range(3)]
        assert [run.status() for run in runs] == [0, 0, 0]
        said = [run.said for run in runs]
    assert sum("Applying auth.0001_initial... OK" in each for each in said) == 1
    assert sum("No migrations to apply." in each for each in said) == 2
    assert not any("django_distlock.0001" in each for each in said)
    assert THEIRS in tables(postgresql)
    # Each had its turn.
    assert lock_and_release(postgresql, "migrate") == 4


@pytest.mark.parametrize("kind", ["sqlite", "mysql"])
def test_empty_database_elsewhere(request: pytest.FixtureRequest, kind: str) -> None:
    """Also where tables cannot be made in one transaction, and where one may write."""
    using = request.getfixturevalue(kind)
    command = ["migrate", "--wait", "300", "--", sys.executable, "-m", "django", "migrate"]
    with Run(Project(using), *command) as one, Run(Project(using), *command) as other:
        assert (one.status(), other.status()) == (0, 0)
        said = [one.said, other.said]
    assert sorted("No migrations to apply." in each for each in said) == [False, True]
    assert THEIRS in tables(using)
    assert lock_and_release(using, "migrate") == 3


def test_of_many_at_once_one_makes_the_tables(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database's own lock lets one in at a time; the others find it done."""
    made: list[int] = []
    migrate_it = bootstrap._OwnExecutor.migrate

    def count(self: bootstrap._OwnExecutor, *arguments: Any) -> object:
        made.append(len(made))
        # So that the others would come in here, if they could.
        time.sleep(0.05)
        return migrate_it(self, *arguments)

    monkeypatch.setattr(bootstrap._OwnExecutor, "migrate", count)
    at_once([partial(ensure_tables, empty, 60)] * 6)
    assert made == [0]
    assert tables(empty) >= all_tables(empty)
    assert lock_and_release(empty) == 1


def test_makes_our_tables_alone_and_up_to_date(empty: str) -> None:
    """`migrate` knows that ours are applied, and makes those of others; so it is of an upgrade."""
    ensure_tables(empty, 0)
    assert tables(empty) == all_tables(empty)
    assert applied(empty) == {APP}
    migrate(empty, check_unapplied=True)
    migrate(empty, "zero")
    migrate(empty, "0001")
    assert tables(empty) < all_tables(empty)
    # Models of other apps are not built: a project may have hundreds.
    loader = bootstrap._OwnExecutor(connections[empty]).loader
    assert {app for app, _ in loader.project_state().models} == {APP}
    assert not loader.unmigrated_apps
    ensure_tables(empty, 0)
    assert tables(empty) == all_tables(empty)
    assert lock_and_release(empty) == 1


def test_does_nothing_where_all_is_there(postgresql: str) -> None:
    """With tables, nobody asks for the database's lock, which somebody may hold."""
    migrate(postgresql)
    with bootstrap._alone_on_postgresql(postgresql):
        ensure_tables(postgresql, 0)


def test_waits_for_who_makes_them(empty: str) -> None:
    """Until they are made; for as long as it may, and then that is what it says."""
    with bootstrap._ALONE[connections[empty].vendor](empty):
        with prompt(0.2), pytest.raises(LockNotAcquired, match="making the lock tables"):
            Later(ensure_tables, empty, 0.2).result()
        waiting = Later(ensure_tables, empty, 60)
        time.sleep(0.05)
    waiting.result()
    assert tables(empty) == all_tables(empty)


def test_migrations_that_fail_are_an_error(empty: str) -> None:
    """Without lock tables there is no lock, and the reason is said."""
    ask(empty, "CREATE TABLE django_distlock_fencecounter (id integer)")
    with pytest.raises(LockError, match=r"cannot be made in .*fencecounter") as caught:
        ensure_tables(empty, 0)
    assert not isinstance(caught.value, BackendUnavailable | LockNotAcquired)


def test_tables_that_somebody_else_made_will_do(
    empty: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Django has not been told of them, that is logged, and the lock is taken."""
    migrate(empty)
    ask(empty, "DELETE FROM django_migrations")
    caplog.set_level(logging.WARNING, "django_distlock")
    ensure_tables(empty, 0)
    assert "cannot be applied" in caplog.text
    assert lock_and_release(empty) == 1


def test_other_apps_may_be_broken(postgresql: str) -> None:
    """Neither their migrations nor the checks of the project are looked at."""
    broken = {"MIGRATION_MODULES": {"auth": "no.such.module"}, "CACHES": {}}
    with Run(Project(postgresql, **broken), "migrate", "--", "true") as run:
        assert run.status() == 0
        assert run.said == ""
    Project(postgresql, CACHES={}).manage("check", status=1)


def test_router_keeps_our_tables_away(sqlite: str) -> None:
    """Where `migrate` would make none, this does not either."""
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.Nowhere"]):
        ensure_tables(sqlite, 0)
    assert tables(sqlite) == set()


class Nowhere:
    """A router that lets nobody migrate."""

    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool:
        """Return False."""
        return False


def test_database_that_comes_up_late_is_waited_for(tmp_path: Path) -> None:
    """Until `wait` is over it is asked again."""
    folder = tmp_path / "mounted late"
    with alias_like("sqlite", NAME=str(folder / "db.sqlite3")) as using:
        with pytest.raises(BackendUnavailable, match="did not answer"):
            ensure_tables(using, 0)
        waiting = Later(ensure_tables, using, 60)
        time.sleep(0.05)
        folder.mkdir()
        waiting.result()
        assert tables(using) == all_tables(using)
