"""System checks: mistakes are told by `manage.py check`, before anybody locks."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.db.backends.signals import connection_created
from django.test import override_settings

from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import Later

from .databases import APP, TABLES, migrate
from .projects import Project

MEMORY = "django_distlock.backends.memory.MemoryBackend"
DATABASE = "django_distlock.backends.database.DatabaseBackend"


def found(*databases: str) -> list[checks.CheckMessage]:
    """Run every check of the project, with those of these databases; give ours."""
    messages = checks.run_checks(databases=list(databases) or None)
    return [each for each in messages if str(each.id).startswith("distlock.")]


def ids(*databases: str) -> list[str]:
    """Run every check; give the ids of ours."""
    return [str(each.id) for each in found(*databases)]


# Settings


BAD: dict[str, tuple[Any, str]] = {
    "a list": ([], "DISTLOCK"),
    "nothing": (None, "DISTLOCK"),
    "an alias that is a path": ({"x": MEMORY}, "'x'"),
    "an empty alias": ({"x": {}}, "BACKEND"),
    "an unknown setting": ({"x": {"BACKEND": MEMORY, "TIMEOUT": 5}}, "TIMEOUT"),
    "a setting in lower case": ({"x": {"BACKEND": MEMORY, "ttl": 5}}, "ttl"),
    "a setting that is no text": ({"x": {"BACKEND": MEMORY, 5: 5}}, "5"),
    "no backend": ({"x": {"TTL": 5}}, "BACKEND"),
    "a backend that is a class": ({"x": {"BACKEND": object}}, "BACKEND"),
    "a backend without a module": ({"x": {"BACKEND": "MemoryBackend"}}, "MemoryBackend"),
    "an empty path": ({"x": {"BACKEND": ""}}, "BACKEND"),
    "a path that begins with a dot": ({"x": {"BACKEND": ".MemoryBackend"}}, "BACKEND"),
    "a relative path": ({"x": {"BACKEND": "..backends.MemoryBackend"}}, "BACKEND"),
    "a backend that is not there": ({"x": {"BACKEND": f"{MEMORY}s"}}, "MemoryBackends"),
    "a module that is not there": ({"x": {"BACKEND": "no_such.Backend"}}, "no_such"),
    "a backend of another kind": ({"x": {"BACKEND": "pathlib.Path"}}, "Path"),
    "a prefix that is no text": ({"x": {"BACKEND": MEMORY, "KEY_PREFIX": 1}}, "KEY_PREFIX"),
    "a prefix with a brace": ({"x": {"BACKEND": MEMORY, "KEY_PREFIX": "a{"}}, "KEY_PREFIX"),
    "a prefix with NUL": ({"x": {"BACKEND": MEMORY, "KEY_PREFIX": "a\0"}}, "KEY_PREFIX"),
    "half a character": ({"x": {"BACKEND": MEMORY, "KEY_PREFIX": "\ud800"}}, "KEY_PREFIX"),
    "a long prefix": ({"x": {"BACKEND": DATABASE, "KEY_PREFIX": "a" * 128}}, "KEY_PREFIX"),
    "a short ttl": ({"x": {"BACKEND": MEMORY, "TTL": 0.01}}, "TTL"),
    "no ttl": ({"x": {"BACKEND": MEMORY, "TTL": None}}, "TTL"),
    "a ttl that is text": ({"x": {"BACKEND": MEMORY, "TTL": "30"}}, "TTL"),
    "a ttl that is no number": ({"x": {"BACKEND": MEMORY, "TTL": float("nan")}}, "TTL"),
    "a ttl above the longest": ({"x": {"BACKEND": MEMORY, "TTL": 60, "MAX_TTL": 30}}, "MAX_TTL"),
    "a negative wait": ({"x": {"BACKEND": MEMORY, "WAIT": -1}}, "WAIT"),
    "a wait that is a bool": ({"x": {"BACKEND": MEMORY, "WAIT": True}}, "WAIT"),
    "an endless longest ttl": ({"x": {"BACKEND": MEMORY, "MAX_TTL": float("inf")}}, "MAX_TTL"),
    "no connections": ({"x": {"BACKEND": MEMORY, "LOCK_CONNECTIONS": 0}}, "LOCK_CONNECTIONS"),
    "a bool of connections": (
        {"x": {"BACKEND": MEMORY, "LOCK_CONNECTIONS": True}}, "LOCK_CONNECTIONS"
    ),
    "a retry that is a number": ({"x": {"BACKEND": MEMORY, "RETRY": 3}}, "RETRY"),
    "an unknown retry": ({"x": {"BACKEND": MEMORY, "RETRY": {"tries": 3}}}, "RETRY"),
    "a bad delay": ({"x": {"BACKEND": MEMORY, "RETRY": {"delay": "x"}}}, "RETRY"),
    "a bad factor": ({"x": {"BACKEND": MEMORY, "RETRY": {"factor": -1}}}, "RETRY"),
    "a bad cap": ({"x": {"BACKEND": MEMORY, "RETRY": {"cap": None}}}, "RETRY"),
    "bad retries": ({"x": {"BACKEND": MEMORY, "RETRY": {"max_retries": 1.5}}}, "RETRY"),
    "options that are a list": ({"x": {"BACKEND": MEMORY, "OPTIONS": []}}, "OPTIONS"),
    "an unknown option": ({"x": {"BACKEND": MEMORY, "OPTIONS": {"size": 5}}}, "size"),
    "an option of another backend": (
        {"x": {"BACKEND": MEMORY, "OPTIONS": {"using": "default"}}}, "using"
    ),
    "an option that is no text": ({"x": {"BACKEND": MEMORY, "OPTIONS": {5: 5}}}, "OPTIONS"),
    "an unknown database": ({"x": {"BACKEND": DATABASE, "OPTIONS": {"using": "y"}}}, "'y'"),
    "a database that is no text": ({"x": {"BACKEND": DATABASE, "OPTIONS": {"using": 5}}}, "using"),
    "an empty database": ({"x": {"BACKEND": DATABASE, "OPTIONS": {"using": ""}}}, "using"),
    "functions that are no bool": (
        {"x": {"BACKEND": DATABASE, "OPTIONS": {"server_functions": "no"}}}, "server_functions"
    ),
    "a cleanup that is no bool": (
        {"x": {"BACKEND": DATABASE, "OPTIONS": {"cleanup_on_read": 1}}}, "cleanup_on_read"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_setting_is_reported(kind: str) -> None:
    """Each kind of mistake in `DISTLOCK` is one E001 that names it; the check itself goes on."""
    setting, named = BAD[kind]
    with override_settings(DISTLOCK=setting):
        messages = found("default")
    assert [each.id for each in messages] == ["distlock.E001"]
    assert named in messages[0].msg
    assert messages[0].is_serious()


@pytest.mark.parametrize(
    "setting",
    [
        [],
        "web",
        {"name": "web"},
        {"prefix": 5},
        {"prefix": None},
        {"prefix": "a\n"},
        {"process": "x" * 101},
    ],
)
def test_bad_holder_is_reported(setting: Any) -> None:
    """Each kind of mistake in `DISTLOCK_HOLDER` is an E001."""
    with override_settings(DISTLOCK_HOLDER=setting):
        messages = found()
    assert [each.id for each in messages] == ["distlock.E001"]
    assert "DISTLOCK_HOLDER" in messages[0].msg


def test_every_mistake_is_reported() -> None:
    """One bad alias does not hide another one, nor a good one's warnings."""
    aliases = {
        "one": {"BACKEND": MEMORY, "TTL": 0},
        "two": {"BACKEND": "no_such.Backend"},
        "good": {"BACKEND": DATABASE, "OPTIONS": {"using": "serializable"}},
    }
    with override_settings(DISTLOCK=aliases, DISTLOCK_HOLDER=[]):
        assert sorted(ids()) == ["distlock.E001"] * 3 + ["distlock.E102"]


@pytest.mark.parametrize("distlock", [{}, {"x": {"BACKEND": MEMORY}}, {"x": {"BACKEND": DATABASE}}])
def test_good_settings_are_quiet(distlock: Any) -> None:
    """Nothing is reported where there is nothing to correct."""
    with override_settings(DISTLOCK=distlock):
        assert found("default") == []


def test_settings_of_the_tests_are_quiet() -> None:
    """The databases of the tests have what the checks look for."""
    assert found("default", "sqlite") == []


def test_check_command_fails_on_a_bad_setting() -> None:
    """`manage.py check` ends with an error that says what is wrong and where to read on."""
    with (
        override_settings(DISTLOCK={"x": {"BACKEND": MEMORY, "TTL": 0}}),
        pytest.raises(SystemCheckError) as caught,
    ):
        call_command("check")
    assert "distlock.E001" in str(caught.value)
    assert "docs/reference/checks.md" in str(caught.value)


def test_checks_have_a_tag() -> None:
    """`check --tag distlock` runs those that need no database."""
    with override_settings(DISTLOCK=[]):
        assert [each.id for each in checks.run_checks(tags=["distlock"])] == ["distlock.E001"]


@pytest.mark.parametrize(
    "names",
    [{"locks": "a b"}, {"locks": "same", "fences": "SAME"}, {"other": "x"}, ["x"], {"locks": 5}],
)
def test_bad_tables_stop_the_start(sqlite: str, names: Any) -> None:
    """Models take their names from `DISTLOCK_TABLES`, so a mistake there ends every command."""
    said = Project(sqlite, DISTLOCK_TABLES=names).manage("check", status=1)
    assert "InvalidLockBackend: DISTLOCK_TABLES" in said


# Databases


def test_mirror_is_an_error() -> None:
    """Locks on an alias that mirrors another one are refused: E102 names both."""
    with locks_on("serializable") as backend:
        messages = found()
    assert [each.id for each in messages] == ["distlock.E102"]
    assert backend in messages[0].msg
    assert "'serializable'" in messages[0].msg
    assert messages[0].is_serious()


class Router:
    """Send the models of locks to one alias and all others to another one."""

    def __init__(self, locks: str, others: str):
        self.locks, self.others = locks, others

    def db_for_write(self, model: Any, **_: Any) -> str:
        """Name the alias of a model."""
        return self.locks if model._meta.app_label == APP else self.others

    db_for_read = db_for_write


@contextmanager
def routed(locks: str, others: str, **options: Any) -> Iterator[None]:
    """Keep locks and other models where a router says."""
    configured = {"x": {"BACKEND": DATABASE, "OPTIONS": options}}
    with override_settings(DATABASE_ROUTERS=[Router(locks, others)], DISTLOCK=configured):
        yield


@pytest.mark.parametrize("using", [{}, {"using": "sqlite"}], ids=["by router", "by option"])
def test_shared_file_is_a_warning(using: dict[str, str]) -> None:
    """SQLite has one writer per file: W101 where others write to the file of the locks."""
    with routed("sqlite", "sqlite", **using):
        messages = found()
    assert [each.id for each in messages] == ["distlock.W101"]
    assert "'sqlite'" in messages[0].msg
    assert "choose-a-database" in str(messages[0].hint)
    assert not messages[0].is_serious()


def test_shared_file_is_found_behind_another_alias(tmp_path: Path) -> None:
    """What counts is the file, by whatever path."""
    file = tmp_path / "one.sqlite3"
    link = tmp_path / "other.sqlite3"
    link.symlink_to(file)
    with (
        alias_like("sqlite", NAME=str(file)) as one,
        alias_like("sqlite", NAME=str(link)) as other,
        routed(one, other),
    ):
        assert ids() == ["distlock.W101"]


def test_file_of_its_own_is_quiet(sqlite: str) -> None:
    """With an alias and a router of their own, locks share nothing."""
    with routed(sqlite, "sqlite"):
        assert found() == []


def test_file_of_its_own_by_option_is_quiet(sqlite: str) -> None:
    """`using` is enough where the router sends the models of others elsewhere."""
    with routed("default", "default", using=sqlite):
        assert found() == []


def test_shared_server_is_quiet() -> None:
    """PostgreSQL has many writers: locks may live beside everything else."""
    with routed("default", "default"):
        assert found() == []


# Tables


def test_missing_tables_are_a_warning(empty: str) -> None:
    """`check --database` says what to run before the migration, and nothing behind it."""
    project = Project(empty)
    said = project.manage("check", "--database", "default")
    assert "(distlock.W103)" in said
    for name in TABLES:
        assert name in said
    assert "migrate --database default" in said
    migrate(empty)
    assert "W103" not in project.manage("check", "--database", "default")
    renamed = Project(empty, DISTLOCK_TABLES={"locks": "AcmeLocks"})
    said = renamed.manage("check", "--database", "default")
    assert "(distlock.W103)" in said
    assert "has no table AcmeLocks." in said
    assert "rename-tables" in said
    assert "W103" not in renamed.manage("check")


def test_missing_tables_do_not_stop_the_migration(empty: str) -> None:
    """`migrate` runs the checks of its database, and goes on to make the tables."""
    project = Project(empty)
    said = project.manage("migrate")
    assert "Applying django_distlock.0001_initial... OK" in said
    assert "W103" not in project.manage("check", "--database", "default")


def test_only_the_databases_that_are_asked_for_are_looked_into(empty: str) -> None:
    """Without `--database`, or with another one, nobody looks for tables."""
    with locks_on(empty):
        assert "distlock.W103" in ids(empty)
        assert ids("default") == []
        assert ids() == []


def test_some_tables_missing_are_named(empty: str) -> None:
    """What is there is not reported."""
    migrate(empty)
    with connections[empty].cursor() as cursor:
        cursor.execute("DROP TABLE django_distlock_lockevent")
    with locks_on(empty):
        (message,) = [each for each in found(empty) if each.id == "distlock.W103"]
    assert message.msg.endswith("has no table django_distlock_lockevent.")


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


def test_plain_check_asks_no_store() -> None:
    """Without `--database` our checks connect nowhere, whatever is configured."""
    connected: list[str] = []
    here = threading.local()

    def note(connection: Any, **_: Any) -> None:
        # Threads of other tests may go on connecting.
        if getattr(here, "checks", False):
            connected.append(connection.alias)

    def check(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        here.checks = True
        call(*args, **kwargs)

    connection_created.connect(note)
    try:
        # In a thread that has no connections yet.
        # Ours alone: Django's own may ask SQLite what it can do.
        Later(check, checks.run_checks, tags=["distlock"]).result()
        Later(check, call_command, "check", tags=["distlock"], stdout=io.StringIO()).result()
        assert connected == []
        Later(check, checks.run_checks, tags=["database"], databases=["default"]).result()
        assert connected == ["default"]
    finally:
        connection_created.disconnect(note)
