"""System checks of databases: what they lack is told by `check --database`, and by `migrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core import checks
from django.test import override_settings

from tests.backends import DATABASE
from tests.contract.aliases import alias_like, locks_on

from .databases import APP, TABLES, Routed, ask, migrate
from .projects import Project
from .test_checks import found, ids


def test_missing_tables_are_a_warning(postgresql: str) -> None:
    """`check --database` says what to run before the migration, which it does not stop."""
    project = Project(postgresql)
    said = project.manage("check", "--database", "default")
    assert "(distlock.W103)" in said
    for name in TABLES:
        assert name in said
    assert "migrate --database default" in said
    migrated = project.manage("migrate")
    assert "Applying django_distlock.0001_initial... OK" in migrated
    # Nobody misses what is about to be made.
    assert "distlock.W103" not in migrated
    assert "W103" not in project.manage("check", "--database", "default")
    renamed = Project(postgresql, DISTLOCK_TABLES={"locks": "AcmeLocks"})
    said = renamed.manage("check", "--database", "default")
    assert "(distlock.W103)" in said
    assert "has no table AcmeLocks." in said
    assert "rename-tables" in said
    # Without `--database`, or with another one, nobody looks for tables.
    assert "W103" not in renamed.manage("check")


def test_some_tables_missing_are_named(empty: str) -> None:
    """What is there is not reported, nor is another database."""
    migrate(empty)
    ask(empty, "DROP TABLE django_distlock_lockevent")
    with locks_on(empty):
        (message,) = [each for each in found(empty) if each.id == "distlock.W103"]
        assert "distlock.W103" not in ids("default")
    assert message.msg.endswith("has no table django_distlock_lockevent.")


def test_database_that_the_events_alone_are_in_lacks_them(empty: str) -> None:
    """What the locks of another store tell is written there, and would be lost."""
    with override_settings(DATABASE_ROUTERS=[Routed(empty, APP)], DISTLOCK={}):
        (message,) = [each for each in found(empty) if each.id == "distlock.W103"]
        assert "django_distlock_lockevent" in message.msg
        assert "django_distlock_heldlock" not in message.msg
        migrate(empty)
        assert "distlock.W103" not in ids(empty)


class EventsElsewhere:
    """Makes the events' table in no database of locks."""

    def allow_migrate(
        self, db: str, app_label: str, model_name: str | None = None, **_: Any
    ) -> bool | None:
        """Refuse it."""
        return False if (app_label, model_name) == (APP, "lockevent") else None


def test_table_that_a_router_keeps_elsewhere_is_not_missing(sqlite: str) -> None:
    """`migrate` would not make it."""
    with override_settings(DATABASE_ROUTERS=[EventsElsewhere()]), locks_on(sqlite):
        migrate(sqlite)
        assert "distlock.W103" not in ids(sqlite)


def test_database_that_is_down_is_a_warning(tmp_path: Path) -> None:
    """A database that does not answer is reported, and does not end the other checks."""
    with (
        alias_like("default", HOST="127.0.0.1", PORT="1") as away,
        alias_like("sqlite", NAME=str(tmp_path / "no" / "folder.sqlite3")) as nowhere,
        override_settings(
            DISTLOCK={
                "x": {"BACKEND": DATABASE, "OPTIONS": {"using": away}},
                "y": {"BACKEND": DATABASE, "OPTIONS": {"using": nowhere}},
            }
        ),
    ):
        # Django's own checks of models give up on a file that cannot be opened.
        messages = checks.run_checks(tags=[checks.Tags.database], databases=[away, nowhere])
    assert [each.id for each in messages] == ["distlock.W102"] * 2
    assert away in messages[0].msg
    assert nowhere in messages[1].msg
