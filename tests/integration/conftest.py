"""Databases that a test has for itself, beside those that all tests share."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client, override_settings
from pytest_django import DjangoDbBlocker

from django_distlock.fencing.operations import EnforceFence
from django_distlock.inspection import Operation
from django_distlock.models import SeenFence
from tests.contract.aliases import alias_like
from tests.settings import DISTLOCK

from .admin_site import admin_project, browser_of, user_who_may
from .databases import here, new_database, new_mysql_database
from .enforcing import Bank, payment
from .fenced_rows import without_rows


# As in the contract suite: what locks do is committed, so nothing runs inside of a transaction.
@pytest.fixture(autouse=True)
def _databases(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        for connection in connections.all(initialized_only=True):
            assert not connection.in_atomic_block
            connection.close()


@pytest.fixture
def unknown_redis() -> None:
    """Let nobody remember what data the servers of other tests had."""
    SeenFence.objects.filter(key__startswith="\u2329data-mark:").delete()


# To install the apps of the admin, and to compile its templates, takes longer than a test.
@pytest.fixture(scope="module")
def admin(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[type[Any]]:
    """Serve the admin; give the model of its log."""
    with django_db_blocker.unblock(), admin_project() as log:
        yield log


@pytest.fixture
def log(admin: type[Any]) -> Iterator[type[Any]]:
    """Do the same. Its pages ask all backends that there are, and most tests are about one."""
    asked = ("memory", "postgres", "redis", "sqlite")
    with override_settings(DISTLOCK={each: DISTLOCK[each] for each in asked}):
        yield admin


@pytest.fixture
def every_backend(log: type[Any]) -> Iterator[None]:
    """Let the pages of the admin ask all backends."""
    with override_settings(DISTLOCK=DISTLOCK):
        yield


@pytest.fixture
def operator(log: type[Any]) -> Iterator[User]:
    """Give somebody who may do everything that is done to keys."""
    with user_who_may(*Operation) as user:
        yield user


@pytest.fixture
def browser(operator: User) -> Client:
    """Give their browser."""
    return browser_of(operator)


@pytest.fixture
def reader(log: type[Any], key: str) -> Iterator[Client]:
    """Give the browser of somebody who sees every page."""
    root = User.objects.create_superuser(f"{key}-root")
    yield browser_of(root)
    root.delete()


@pytest.fixture
def postgresql() -> Iterator[str]:
    """Give the alias of an empty PostgreSQL database."""
    with new_database() as name, alias_like("default", NAME=name) as alias:
        yield alias


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[str]:
    """Give the alias of an empty SQLite file."""
    file = str(tmp_path / "empty.sqlite3")
    # The file remembers this. Of threads that change it at once, one may find the file locked, and
    # Django then drops the connection without closing it.
    with closing(sqlite3.connect(file)) as raw:
        raw.execute("PRAGMA journal_mode=WAL")
    # No test pulls the plug.
    quick = {"init_command": "PRAGMA synchronous=OFF"}
    with alias_like("sqlite", NAME=file, OPTIONS=quick) as alias:
        yield alias


@pytest.fixture
def mysql() -> Iterator[str]:
    """Give the alias of an empty MariaDB database."""
    here("mariadb")
    with new_mysql_database() as name, alias_like("mariadb", NAME=name) as alias:
        yield alias


@pytest.fixture(params=["postgresql", "sqlite", "mysql"])
def empty(request: pytest.FixtureRequest) -> str:
    """Give the alias of an empty database, of each kind in turn."""
    alias: str = request.getfixturevalue(request.param)
    return alias


@pytest.fixture(params=[True, False], ids=["functions", "orm"])
def server_functions(request: pytest.FixtureRequest) -> bool:
    """Say which of PostgreSQL's two paths the backend takes."""
    chosen: bool = request.param
    return chosen


@pytest.fixture(params=["default", "sqlite", "mariadb"])
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give each kind of database, without the rows of others."""
    yield from without_rows(request.param)


@pytest.fixture(params=[False, True], ids=["autocommit", "transaction"])
def atomic(request: pytest.FixtureRequest) -> bool:
    """Say whether the caller has a transaction open."""
    chosen: bool = request.param
    return chosen


@pytest.fixture
def bank(empty: str) -> Bank:
    """Give an app whose payments keep their fences, on each database in turn."""
    return Bank(empty).migrate(payment()).migrate(EnforceFence("Payment"))
