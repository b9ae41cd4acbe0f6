"""`manage.py distlock_run` on a database that has no lock tables yet."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from django.db import connections
from django.test import override_settings

from django_distlock import BackendUnavailable, LockError, LockNotAcquired
from django_distlock.management.bootstrap import _ALONE, ensure_tables
from tests.contract.aliases import alias_like
from tests.contract.helpers import Later, at_once, prompt

from .databases import APP, Routed, all_tables, ask, lock_and_release, migrate, tables
from .projects import Project
from .runs import Run


@pytest.mark.parametrize(("kind", "number"), [("postgresql", 3), ("sqlite", 2), ("mysql", 2)])
def test_deployments_migrate_an_empty_database_at_once(
    request: pytest.FixtureRequest, kind: str, number: int
) -> None:
    """One migrates, the others wait for it and find nothing to do, and all end well."""
    using = request.getfixturevalue(kind)
    # Its own migrations are all that the project's `migrate` has to do: few, and not ours.
    project = Project(using, INSTALLED_APPS=["django.contrib.contenttypes", APP])
    command = ["migrate", "--wait", "300", "--", sys.executable, "-m", "django", "migrate"]
    with ExitStack() as stack:
        runs = [stack.enter_context(Run(project, *command)) for _ in range(number)]
        assert [run.status() for run in runs] == [0] * number
        said = [run.said for run in runs]
    assert sum("Applying contenttypes.0001_initial... OK" in each for each in said) == 1
    assert sum("No migrations to apply." in each for each in said) == number - 1
    assert not any(f"{APP}.0001" in each for each in said)
    # Each had its turn.
    assert lock_and_release(using, "migrate") == number + 1


def test_makes_our_tables_alone_and_up_to_date(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of many at once one does; `migrate` knows that ours are applied. So it is of an upgrade."""
    caplog.set_level(logging.WARNING, "django_distlock")
    at_once([partial(ensure_tables, empty, 60)] * 6)
    # Whoever came in as well would have met with tables that are there already.
    assert caplog.text == ""
    assert tables(empty) == all_tables(empty)
    applied = ask(empty, "SELECT app, name FROM django_migrations")
    assert {app for app, _ in applied} == {APP}
    assert len(applied) == len({*applied})
    migrate(empty, check_unapplied=True)
    assert lock_and_release(empty) == 1
    # A release to come, which alters a table of this one.
    folder = tmp_path / "migrations_to_come"
    folder.mkdir()
    for file in Path(import_module(f"{APP}.migrations").__file__ or "").parent.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "9999_more.py").write_text(
        "from django.db import migrations, models\n"
        "class Migration(migrations.Migration):\n"
        f"    dependencies = [({APP!r}, {max(name for _, name in applied)!r})]\n"
        "    field = models.IntegerField(default=7)\n"
        "    operations = [migrations.AddField('fencecounter', 'more', field)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with override_settings(MIGRATION_MODULES={APP: folder.name}):
        at_once([partial(ensure_tables, empty, 60)] * 2)
        migrate(empty, check_unapplied=True)
    assert ask(empty, "SELECT more FROM django_distlock_fencecounter") == [(7,)]


def test_waits_for_who_makes_them(empty: str) -> None:
    """Until they are made; for as long as it may, and then that is what it says."""
    with _ALONE[connections[empty].vendor](empty):
        with prompt(0.2), pytest.raises(LockNotAcquired, match="creating the lock tables"):
            Later(ensure_tables, empty, 0.2).result()
        waiting = Later(ensure_tables, empty, 60)
        time.sleep(0.05)
    waiting.result()
    assert tables(empty) == all_tables(empty)
    # With tables, nobody asks for the database's lock, which somebody may hold.
    with _ALONE[connections[empty].vendor](empty):
        Later(ensure_tables, empty, 0).result()


def test_migrations_that_fail_are_an_error(empty: str) -> None:
    """Without lock tables there is no lock, and the reason is said."""
    ask(empty, "CREATE TABLE django_distlock_fencecounter (id integer)")
    with pytest.raises(LockError, match=r"cannot be created in .*fencecounter") as caught:
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


@pytest.mark.parametrize(
    "settings",
    [{"DATABASE_ROUTERS": [Routed(None, made=())]}, {"MIGRATION_MODULES": {APP: None}}],
    ids=["router", "module"],
)
def test_where_migrate_would_make_no_tables(sqlite: str, settings: dict[str, object]) -> None:
    """This does not either."""
    with override_settings(**settings):
        ensure_tables(sqlite, 0)
    assert tables(sqlite) == set()


def test_database_that_comes_up_late_is_waited_for(tmp_path: Path) -> None:
    """Until `wait` is over it is asked again."""
    folder = tmp_path / "mounted late"
    with alias_like("sqlite", NAME=str(folder / "db.sqlite3")) as using:
        with pytest.raises(BackendUnavailable, match="is unavailable: "):
            ensure_tables(using, 0)
        waiting = Later(ensure_tables, using, 60)
        time.sleep(0.05)
        folder.mkdir()
        waiting.result()
        assert tables(using) == all_tables(using)
