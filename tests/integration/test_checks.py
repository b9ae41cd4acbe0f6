"""System checks: mistakes are told by `manage.py check`, before anybody locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.test import override_settings

from django_distlock.core.pages import page
from tests.backends import DATABASE, MEMORY
from tests.contract.aliases import alias_like, locks_on

from .databases import APP, Routed
from .projects import Project

#: The servers of the tests do not wait for their disks.
HASTY = {"distlock.W105", "distlock.W108"}


def found(*databases: str) -> list[checks.CheckMessage]:
    """Run every check of the project, with those of these databases; give ours."""
    messages = checks.run_checks(databases=list(databases) or None)
    ours = [each for each in messages if str(each.id).startswith("distlock.")]
    return [each for each in ours if not each.is_silenced() and each.id not in HASTY]


def ids(*databases: str) -> list[str]:
    """Run every check; give the ids of ours."""
    return [str(each.id) for each in found(*databases)]


# Settings


#: One for each place that refuses. What each refuses: `tests/unit/test_conf.py`, `test_handler.py`.
BAD: dict[str, tuple[Any, str]] = {
    "a list": ([], "DISTLOCK"),
    "an alias that is a path": ({"x": MEMORY}, "'x'"),
    "an unknown setting": ({"x": {"BACKEND": MEMORY, "TIMEOUT": 5}}, "TIMEOUT"),
    "a value": ({"x": {"BACKEND": MEMORY, "TTL": 60, "MAX_TTL": 30}}, "MAX_TTL"),
    "a backend that is not there": ({"x": {"BACKEND": f"{MEMORY}s"}}, "MemoryBackends"),
    "a relative path": ({"x": {"BACKEND": "..backends.MemoryBackend"}}, "BACKEND"),
    "a backend of another kind": ({"x": {"BACKEND": "pathlib.Path"}}, "Path"),
    "half a character": ({"x": {"BACKEND": MEMORY, "KEY_PREFIX": "\ud800"}}, "KEY_PREFIX"),
    "a long prefix": ({"x": {"BACKEND": DATABASE, "KEY_PREFIX": "a" * 128}}, "KEY_PREFIX"),
    "an option of another backend": (
        {"x": {"BACKEND": MEMORY, "OPTIONS": {"using": "default"}}}, "using"
    ),
    "an unknown database": ({"x": {"BACKEND": DATABASE, "OPTIONS": {"using": "y"}}}, "'y'"),
}  # fmt: skip


def test_project_without_a_secret_key() -> None:
    """Where images are built, commands need none, and nobody signs a fence."""
    with override_settings(SECRET_KEY=""):
        assert "distlock.E001" not in ids()
        with override_settings(DISTLOCK_FENCE_SECRET="short"):
            assert "distlock.E001" in ids()


def test_bad_setting_is_reported() -> None:
    """Each kind of mistake in `DISTLOCK` is one E001 that names it; the check itself goes on."""
    for kind, (setting, named) in BAD.items():
        with override_settings(DISTLOCK=setting):
            (message,) = found("default")
        assert (message.id, message.is_serious()) == ("distlock.E001", True), kind
        assert named in message.msg
        # Django prints what a message is about.
        assert str(message).startswith("?: " if setting == [] else "x: ")


def test_setting_that_does_not_exist_is_reported() -> None:
    """Each that begins as ours do, with the nearest one."""
    with override_settings(DISTLOCK={}, DISTLOCKS={}, DISTLOCK_HISTROY=1, DISTLOCK_TTL=5):
        (message,) = found("default")
    assert message.id == "distlock.E001"
    assert message.msg.startswith(
        "There is no setting DISTLOCKS. Did you mean 'DISTLOCK'?"
        " There is no setting DISTLOCK_HISTROY. Did you mean 'DISTLOCK_HISTORY'?"
        " There is no setting DISTLOCK_TTL. TTL belongs in DISTLOCK['default']."
        " Known settings: DISTLOCK, "
    )


def test_every_mistake_is_reported() -> None:
    """One bad alias does not hide another one, nor a good one's warnings."""
    aliases = {
        "one": {"BACKEND": MEMORY, "TTL": 0},
        "two": {"BACKEND": "no_such.Backend"},
        "good": {"BACKEND": DATABASE, "OPTIONS": {"using": "serializable"}},
    }
    with override_settings(DISTLOCK=aliases, DISTLOCK_HOLDER=[]):
        assert sorted(ids()) == ["distlock.E001"] * 3 + ["distlock.W115"]


def test_good_settings_are_quiet() -> None:
    """Nothing is reported where there is nothing to correct, as in the tests' own settings."""
    assert found("default", "sqlite") == []
    for distlock in ({}, {"x": {"BACKEND": MEMORY}}, {"x": {"BACKEND": DATABASE}}):
        with override_settings(DISTLOCK=distlock):
            assert found("default") == []


def test_check_command_fails_on_a_bad_setting() -> None:
    """`manage.py check` ends with an error that says what is wrong and where to read on."""
    with (
        override_settings(DISTLOCK={"x": {"BACKEND": MEMORY, "TTL": 0}}),
        pytest.raises(SystemCheckError) as caught,
    ):
        call_command("check")
    assert "distlock.E001" in str(caught.value)
    assert page("reference/checks") in str(caught.value)


def test_bad_tables_stop_the_start(sqlite: str) -> None:
    """Models take their names from `DISTLOCK_TABLES`, so a mistake there ends every command."""
    said = Project(sqlite, DISTLOCK_TABLES={"locks": "a b"}).manage("check", status=1)
    assert "InvalidLockBackend: DISTLOCK_TABLES" in said


# Databases


def test_mirror_is_a_warning() -> None:
    """W115: it may be a replica, or lead around a pooler, for which tests need it as well."""
    with locks_on("serializable") as backend:
        messages = found()
    assert [each.id for each in messages] == ["distlock.W115"]
    assert backend in messages[0].msg
    assert "'serializable'" in messages[0].msg
    assert not messages[0].is_serious()


@contextmanager
def routed(locks: str, others: str, **options: Any) -> Iterator[None]:
    """Keep locks and other models where a router says."""
    configured = {"x": {"BACKEND": DATABASE, "OPTIONS": {"using": locks, **options}}}
    with override_settings(
        DATABASE_ROUTERS=[Routed(locks, APP, others=others)], DISTLOCK=configured
    ):
        yield


def test_shared_file_is_a_warning(sqlite: str, tmp_path: Path) -> None:
    """SQLite has one writer per file: W101 where others write to the file of the locks."""
    with routed("sqlite", "sqlite"):
        messages = found()
    assert [each.id for each in messages] == ["distlock.W101"]
    assert "'sqlite'" in messages[0].msg
    assert "choose-a-database" in str(messages[0].hint)
    assert not messages[0].is_serious()
    with override_settings(DEBUG=True), routed("sqlite", "sqlite"):
        (line,) = found()
    assert (line.id, line.hint, line.level) == ("distlock.W101", None, checks.INFO)
    # What counts is the file, by whatever path.
    file, link = tmp_path / "one.sqlite3", tmp_path / "other.sqlite3"
    link.symlink_to(file)
    with (
        alias_like("sqlite", NAME=str(file)) as one,
        alias_like("sqlite", NAME=str(link)) as other,
        routed(one, other),
    ):
        assert ids() == ["distlock.W101"]
    # A file of its own, by the router or by the option; a server with many writers.
    with routed(sqlite, "sqlite"):
        assert found() == []
    with routed("default", "default", using=sqlite):
        assert "distlock.W101" not in ids()
    with routed("default", "default"):
        assert found() == []
