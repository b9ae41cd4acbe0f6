"""Triggers on fences in an app of a project: commands, and Django's own test cases."""

from __future__ import annotations

import io
import shutil
import subprocess
import unittest
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.db import IntegrityError, connections, models
from django.db.migrations.operations import AlterField, CreateModel
from django.test import TestCase, TransactionTestCase, override_settings

from django_distlock.fencing.operations import EnforceFence
from tests.conftest import DECLARED
from tests.integration.projects import ROOT

from .databases import ask
from .enforcing import set_fence, triggers, written
from .projects import importable

MODELS = """
from django.db import models

class Payment(models.Model):
    note = models.CharField(max_length=20, default="")
    fence = models.PositiveBigIntegerField(default=0, editable=False)
"""
TABLE = "till_payment"


@pytest.fixture
def till(tmp_path: Path) -> Iterator[Path]:
    """Give the folder of an app that is installed; its payments keep their fences."""
    fields: list[tuple[str, models.Field[Any, Any]]] = [
        ("id", models.BigAutoField("ID", primary_key=True, auto_created=True, serialize=False)),
        ("note", models.CharField(max_length=9, default="")),
        ("fence", models.PositiveBigIntegerField(default=0, editable=False)),
    ]
    longer = AlterField("payment", "note", models.CharField(max_length=20, default=""))
    files = {
        "till/__init__": "",
        "till/models": MODELS,
        "till/migrations/__init__": "",
        "till/migrations/0001_initial": written(CreateModel("Payment", fields)),
        "till/migrations/0002_enforce": written(
            EnforceFence("payment"), after=("till", "0001_initial")
        ),
        "till/migrations/0003_alter": written(longer, after=("till", "0002_enforce")),
    }
    installed = [*settings.INSTALLED_APPS, "till"]
    with importable(tmp_path, files), override_settings(INSTALLED_APPS=installed):
        yield tmp_path / "till"
        apps.all_models.pop("till")
    apps.clear_cache()


def command(name: str, *arguments: Any, **options: Any) -> str:
    """Run a command; return what it printed."""
    printed = io.StringIO()
    call_command(name, *arguments, stdout=printed, **options)
    return printed.getvalue()


def model() -> Any:
    """Return the app's real model."""
    return apps.all_models["till"]["payment"]


def payments(using: str) -> Any:
    """Return its rows."""
    return model().objects.using(using)


def assert_enforced(using: str) -> None:
    """See a lower fence refused."""
    payments(using).create(fence=7)
    with pytest.raises(IntegrityError):
        set_fence(using, "6", TABLE)


def test_migrates_forth_and_back(till: Path, empty: str) -> None:
    """The trigger comes with its migration, outlives the next one and goes with its own."""
    plan = command("migrate", "till", database=empty, plan=True)
    assert "Refuse to lower fence on payment" in plan
    command("makemigrations", "till", check_changes=True, dry_run=True, verbosity=0)
    assert model()._meta.constraints == []
    command("migrate", "till", database=empty, verbosity=0)
    assert_enforced(empty)
    command("migrate", "till", "0002", database=empty, verbosity=0)
    assert_enforced(empty)
    command("migrate", "till", "0001", database=empty, verbosity=0)
    assert triggers(empty) == {}
    set_fence(empty, "6", TABLE)
    command("migrate", "till", database=empty, verbosity=0)
    assert_enforced(empty)
    command("migrate", "till", "zero", database=empty, verbosity=0)
    assert triggers(empty) == {}


def test_squashmigrations_keeps_it(till: Path, empty: str) -> None:
    """A squashed migration has the operation, and makes the same trigger."""
    command("migrate", "till", database=empty, verbosity=0)
    was = triggers(empty)
    command("migrate", "till", "zero", database=empty, verbosity=0)
    command("squashmigrations", "till", "0003", interactive=False, verbosity=0, no_header=True)
    squashed = next((till / "migrations").glob("0001_*squashed*.py"))
    assert "EnforceFence(" in squashed.read_text()
    invalidate_caches()
    command("migrate", "till", database=empty, verbosity=0)
    assert "squashed" in str(ask(empty, "SELECT name FROM django_migrations WHERE app = 'till'"))
    assert triggers(empty) == was
    assert_enforced(empty)


def _client(using: str) -> list[str | None]:
    """Return the command line of the database's own client."""
    given = connections[using].settings_dict
    kind = connections[using].vendor
    if kind == "mysql":
        return [
            shutil.which("mariadb") or shutil.which("mysql"), "--protocol=TCP",
            f"--host={given['HOST']}", f"--port={given['PORT']}", f"--user={given['USER']}",
            f"--password={given['PASSWORD']}", given["NAME"],
        ]  # fmt: skip
    if kind == "sqlite":
        return [shutil.which("sqlite3"), "-bail", str(given["NAME"])]
    return [
        shutil.which("psql"), "--set=ON_ERROR_STOP=1", "--quiet", f"--host={given['HOST']}",
        f"--port={given['PORT']}", f"--username={given['USER']}", given["NAME"],
    ]  # fmt: skip


def test_printed_sql_makes_the_trigger(till: Path, empty: str) -> None:
    """What `sqlmigrate` prints is for the database's client, which makes the same of it."""
    line = _client(empty)
    if line[0] is None:
        pytest.skip(f"{DECLARED}no client of this database is installed")
    command("migrate", "till", database=empty, verbosity=0)
    was = triggers(empty)
    command("migrate", "till", "0001", database=empty, verbosity=0)
    connections[empty].close()
    for backwards, expected in ((False, was), (True, {})):
        script = command("sqlmigrate", "till", "0002", database=empty, backwards=backwards)
        assert "TRIGGER" in script
        connections[empty].close()
        subprocess.run(line, input=script, text=True, check=True, cwd=ROOT, timeout=60)  # type: ignore[arg-type]
        assert triggers(empty) == expected


def test_flush_passes_and_fixtures_do_not_lower_a_fence(
    till: Path, empty: str, tmp_path: Path
) -> None:
    """Neither is in the other's way; `loaddata` over newer rows is refused, over older ones not."""
    command("migrate", "till", database=empty, verbosity=0)
    assert_enforced(empty)
    with override_settings(INSTALLED_APPS=["till"]):
        command("flush", database=empty, interactive=False, verbosity=0)
    assert payments(empty).count() == 0
    assert_enforced(empty)
    payments(empty).all().delete()
    row = payments(empty).create(fence=7)
    file = tmp_path / "payments.json"
    command("dumpdata", "till", database=empty, output=str(file))
    command("loaddata", str(file), database=empty, verbosity=0)
    payments(empty).update(fence=8)
    with pytest.raises(IntegrityError, match="never goes back"):
        command("loaddata", str(file), database=empty, verbosity=0)
    assert payments(empty).get().pk == row.pk


def test_test_cases_begin_anew(till: Path, empty: str) -> None:
    """Tests of a project find an empty table each, and the trigger in force."""
    command("migrate", "till", database=empty, verbosity=0)

    class Tests:
        """Two tests that would disturb each other."""

        databases = {empty}
        available_apps = ["till"]

        def test_one(self) -> None:
            """Write."""
            assert payments(empty).count() == 0
            payments(empty).create(pk=1, fence=7)
            payments(empty).update(fence=8)

        def test_two(self) -> None:
            """Write less."""
            assert payments(empty).count() == 0
            payments(empty).create(pk=1, fence=3)
            with pytest.raises(IntegrityError), connections[empty].cursor() as cursor:
                cursor.execute(f"UPDATE {TABLE} SET fence = 2")
            connections[empty].needs_rollback = False

    for kind in (TestCase, TransactionTestCase):
        case = type("Case", (Tests, kind), {})
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        assert (result.testsRun, result.errors, result.failures) == (2, [], [])
