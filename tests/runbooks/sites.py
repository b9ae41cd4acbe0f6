"""Projects whose locks are in a store of their own, and how people reach that store."""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from django.db import connections
from django.test import override_settings

from tests.integration.databases import migrate, server
from tests.integration.projects import PATIENCE, ROOT, Project
from tests.processes import manage
from tests.services import mysql_connect
from tests.settings import DATABASE_BACKEND, REDIS_BACKEND
from tests.shop.models import Account

ADVISORY = "django_distlock.backends.advisory.AdvisoryBackend"
Ask = Callable[[str], list[tuple[Any, ...]]]


class Ran(NamedTuple):
    """What came of a command."""

    text: str
    status: int


class Site(Project):
    """A project with `invoice:42` and the like in a store that nobody else uses.

    Args:
        store: `postgresql`, `mysql`, `sqlite`, `redis`, or `session`.
        using: The alias of this process for its database.
        redis: The address of its Redis.
        configured: What else the settings of its lock backend say.
    """

    def __init__(self, store: str, using: str, redis: str = "", **configured: Any):
        backends: dict[str, dict[str, Any]] = {
            "redis": {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": redis}},
            "session": {"BACKEND": ADVISORY},
        }
        backend = backends.get(store, {"BACKEND": DATABASE_BACKEND})
        apps = ["django.contrib.contenttypes", "django.contrib.auth", "django_distlock"]
        super().__init__(
            using,
            DISTLOCK={"default": {**backend, **configured}},
            INSTALLED_APPS=[*apps, "tests.shop"],
            SILENCED_SYSTEM_CHECKS=["distlock.W002"],
        )
        self.store = store
        self.using = using
        self.redis = redis

    def command(self, line: str, *more: str) -> Ran:
        """Run a line of a console, with `python manage.py` and `redis-cli` of this site."""
        words = [*shlex.split(line), *more]
        environment = {**os.environ, **self._environment()}
        if words[:2] == ["python", "manage.py"]:
            return Ran(*manage(words[2:], environment, PATIENCE))
        if words[0] == "redis-cli":
            words[:1] = self._redis_cli(words)
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return Ran(done.stdout, done.returncode)

    def _redis_cli(self, words: list[str]) -> list[str]:
        program = shutil.which("redis-cli") or shutil.which("valkey-cli")
        if program is None:
            raise pytest.UsageError("The runbooks need redis-cli: `apt-get install redis-tools`")
        return [program] if "-p" in words else [program, "-p", str(urlsplit(self.redis).port)]

    @property
    def database(self) -> str:
        """The name of its database."""
        return str(connections.settings[self.using]["NAME"])

    @contextmanager
    def session(self, database: str = "") -> Iterator[Ask]:
        """Connect to the database as people do who paste SQL; in autocommit."""
        name = database or self.database
        raw: Any
        if self.store in ("postgresql", "session"):
            raw = server(name)
        elif self.store == "mysql":
            raw = mysql_connect(os.environ["DISTLOCK_TEST_MYSQL_URL"], database=name)
        else:
            raw = sqlite3.connect(name, isolation_level=None)

        def ask(statement: str) -> list[tuple[Any, ...]]:
            cursor = raw.cursor()
            cursor.execute(statement)
            rows = cursor.fetchall() if cursor.description else []
            cursor.close()
            return [tuple(each) for each in rows]

        try:
            yield ask
        finally:
            raw.close()

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement in a session of its own; give its rows."""
        with self.session() as ask:
            return ask(statement)

    @contextmanager
    def locks(self) -> Iterator[str]:
        """Configure this process as the project is; give the alias of the lock backend."""
        backend = dict(self.settings["DISTLOCK"]["default"])
        if self.store != "redis":
            backend["OPTIONS"] = {**backend.get("OPTIONS", {}), "using": self.using}
        with override_settings(DISTLOCK={"default": backend}):
            yield "default"

    def run_worker(self, function: str, *arguments: Any) -> Any:
        """Run a function of `workers` in the project; return what it returns."""
        return self.run(f"tests.runbooks.workers:{function}", *arguments)

    def make_tables(self) -> None:
        """Make the tables of the locks, and those of the shop."""
        migrate(self.using)
        with connections[self.using].schema_editor() as editor:
            editor.create_model(Account)
