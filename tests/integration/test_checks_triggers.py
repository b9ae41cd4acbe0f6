"""The system check of triggers that `EnforceFence` has made on tables of a project."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.db import OperationalError, connections, models
from django.db.migrations.operations import CreateModel
from django.test import override_settings

from django_distlock.fencing.operations import EnforceFence
from tests.contract.aliases import alias_like

from .databases import Routed, ask, role
from .enforcing import assert_enforced, triggers, written
from .projects import importable

TABLE = "shop_payment"


@pytest.fixture
def table() -> str:
    """Give the name of the table."""
    return TABLE


@pytest.fixture
def shop(tmp_path: Path, table: str) -> Iterator[Path]:
    """Give the folder of the shop's migrations; its payments keep their fences."""
    options = {} if table == TABLE else {"db_table": table}
    fields: list[tuple[str, models.Field[Any, Any]]] = [
        ("id", models.BigAutoField(primary_key=True)),
        ("fence", models.PositiveBigIntegerField(default=0)),
    ]
    files = {
        "till/__init__": "",
        "till/0001_initial": written(CreateModel("Payment", fields, options)),
        "till/0002_enforce": enforced_behind("0001_initial"),
    }
    with importable(tmp_path, files), override_settings(MIGRATION_MODULES={"shop": "till"}):
        yield tmp_path / "till"


def enforced_behind(name: str) -> str:
    """Return a migration that lets the payments keep their fences."""
    return written(EnforceFence("payment"), after=("shop", name))


def migrate(using: str, *target: str) -> None:
    """Apply the migrations of the shop."""
    call_command("migrate", "shop", *target, database=using, verbosity=0)


def found(*usings: str) -> list[checks.CheckMessage]:
    """Look into databases; give what is said about triggers."""
    messages = checks.run_checks(tags=[checks.Tags.database], databases=usings)
    return [each for each in messages if each.id == "distlock.W109"]


def assert_fenced(using: str) -> None:
    """See a lower fence refused."""
    ask(using, f"INSERT INTO {TABLE} (id, fence) VALUES (1, 7)")
    assert_enforced(using, TABLE)


def drop(using: str, table: str = TABLE) -> None:
    """Take the only trigger away."""
    ((name, _table),) = triggers(using).items()
    quote = connections[using].ops.quote_name
    where = f" ON {quote(table)}" if connections[using].vendor == "postgresql" else ""
    ask(using, f"DROP TRIGGER {quote(name)}{where}")


def test_missing_trigger(shop: Path, empty: str) -> None:
    """W109 names table and model; a migration as its hint says brings it back."""
    # What the next `migrate` makes is not missed.
    migrate(empty, "0001")
    assert triggers(empty) == {}
    assert found(empty) == []
    # No locks need to be in the database: the rows of the project are.
    migrate(empty)
    assert_fenced(empty)
    assert found(empty) == []
    drop(empty)
    (message,) = found(empty)
    assert f"table {TABLE} of {empty!r}" in message.msg
    assert "'fence' of shop.Payment" in message.msg
    assert "EnforceFence('payment', field='fence')" in str(message.hint)
    (shop / "0003_again.py").write_text(enforced_behind("0002_enforce"))
    invalidate_caches()
    ask(empty, f"DELETE FROM {TABLE}")
    migrate(empty)
    assert_fenced(empty)
    assert found(empty) == []


def test_trigger_that_refuses_nothing(shop: Path, postgresql: str) -> None:
    """W109 where it is disabled, or on another schema's table, as with a schema for each tenant."""
    migrate(postgresql)
    ask(postgresql, f"ALTER TABLE {TABLE} DISABLE TRIGGER ALL")
    assert len(found(postgresql)) == 1
    ask(postgresql, f"ALTER TABLE {TABLE} ENABLE TRIGGER ALL")
    assert found(postgresql) == []
    ask(postgresql, "CREATE SCHEMA tenant")
    ask(postgresql, f"ALTER TABLE {TABLE} SET SCHEMA tenant")
    ask(postgresql, f"CREATE TABLE {TABLE} (id bigint, fence bigint)")
    assert len(found(postgresql)) == 1


@pytest.mark.parametrize(
    ("empty", "table"),
    [("postgresql", "It's 100 Größen"), ("mysql", "It's 100 Größen"), ("sqlite", "t" * 62)],
    indirect=["empty"],
)
def test_odd_names_of_tables(shop: Path, empty: str, table: str) -> None:
    """They are found under any name, and so is what they lack."""
    migrate(empty)
    assert found(empty) == []
    drop(empty, table)
    assert len(found(empty)) == 1


def test_account_that_may_not_see_triggers(shop: Path, mysql: str) -> None:
    """Refused a look at it, the check does not say that it is missing; but that it has gone."""
    migrate(mysql)
    with role(mysql, "GRANT SELECT, UPDATE ON shop.* TO shop_app") as limited:
        with pytest.raises(OperationalError, match="denied"):
            ask(limited, f"SHOW CREATE TRIGGER {next(iter(triggers(mysql)))}")
        assert found(limited) == []
        drop(mysql)
        assert len(found(limited)) == 1


def test_table_that_is_not_made_there(shop: Path, sqlite: str) -> None:
    """Its migrations are recorded in every database, and its trigger is in its own alone."""
    with override_settings(DATABASE_ROUTERS=[Routed(None, "shop", made=())]):
        migrate(sqlite)
        assert triggers(sqlite) == {}
        assert found(sqlite) == []


def test_other_database_that_is_down_is_left_to_django(shop: Path) -> None:
    """Only a database of locks is ours to say so of."""
    with (
        alias_like("default", HOST="127.0.0.1", PORT="1") as away,
        override_settings(DATABASE_ROUTERS=[Routed(away, "shop")]),
    ):
        messages = checks.run_checks(tags=[checks.Tags.database], databases=[away])
    assert [each for each in messages if str(each.id).startswith("distlock.")] == []


def test_project_without_a_database() -> None:
    """Django's placeholder for one is asked nothing."""
    with (
        alias_like("sqlite", ENGINE="django.db.backends.dummy") as none,
        override_settings(DISTLOCK={}),
    ):
        messages = checks.run_checks(tags=[checks.Tags.database], databases=[none])
    assert messages == []
