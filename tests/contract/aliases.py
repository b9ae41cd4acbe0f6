"""Databases that only some tests need, under aliases of their own."""

from __future__ import annotations

import copy
import io
import json
import os
import secrets
import sys
import time
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connections
from django.test import TestCase, override_settings
from django.test.runner import DiscoverRunner

from django_distlock import LockError
from django_distlock.database.connections import releases

DATABASE = "django_distlock.backends.database.DatabaseBackend"
#: The databases of test runs of Django's own.
ALL = tuple(name for name in ("default", "sqlite", "mariadb") if name in settings.DATABASES)


Cases = Iterable[type[unittest.TestCase]]


def for_each(databases: Mapping[str, str], *bases: type[unittest.TestCase]) -> Cases:
    """Make each class for each alias of a store, which is kept in this database."""
    for alias, using in databases.items():
        for each in bases:
            own: dict[str, Any] = {"alias": alias}
            if not issubclass(each, TestCase):
                # Behind each test, Django empties every database that its class has.
                own["databases"] = {"default", using}
            yield type(f"{each.__name__}_{alias}", (each,), own)


def run_cases(mark: str, cases: Cases, look: Callable[[], dict[str, Any]] = dict) -> dict[str, Any]:
    """Be a test run: make databases, run the classes, drop the databases.

    Args:
        look: Gives what else is to be said, before they are dropped.
    """
    suite, report = unittest.TestSuite(), io.StringIO()
    for case in cases:
        suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    for name in ALL:
        options = connections.settings[name]
        options["NAME"] = settings.DATABASES[name]["NAME"]
        options["TEST"]["NAME"] = f"{options['NAME']}_{mark}_{os.getpid()}"
    runner = DiscoverRunner(verbosity=0, interactive=False)
    # Django's own apps need no migrations here.
    with override_settings(MIGRATION_MODULES={"auth": None, "contenttypes": None}):
        made = runner.setup_databases(aliases=set(ALL))
    try:
        result = unittest.TextTestRunner(report, warnings="error").run(suite)
        more = look()
    finally:
        # Fails if a session of ours is left in a database.
        runner.teardown_databases(made)
    # What failed is worth more than that something did.
    return {"ran": result.testsRun, "fine": result.wasSuccessful() or report.getvalue(), **more}


@contextmanager
def alias_like(using: str, **changes: Any) -> Iterator[str]:
    """Add another way to a test database: an alias with some settings changed.

    `OPTIONS` are merged into those of the original. The test closes what its threads opened.
    """
    alias = f"{using}_{secrets.token_hex(3)}"
    given = copy.deepcopy(connections.settings[using])
    options = {**given["OPTIONS"], **changes.pop("OPTIONS", {})}
    connections.settings[alias] = {**given, **changes, "OPTIONS": options}
    try:
        yield alias
    finally:
        _do_what_was_put_off()
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def _do_what_was_put_off() -> None:
    """Have delayed releases done now, while the alias is there that they use."""

    def do() -> None:
        while releases.late:
            releases.late.pop().work()

    releases.put(do)
    releases.finish()


@contextmanager
def counted_alias(using: str = "default") -> Iterator[str]:
    """Add an alias whose sessions the server can tell from others."""
    with alias_like(using) as alias:
        if connections[using].vendor == "postgresql":
            connections.settings[alias]["OPTIONS"]["application_name"] = alias
            yield alias
            return
        given = connections.settings[alias]
        given["USER"], given["PASSWORD"] = alias, "only for tests"
        with connections[using].cursor() as cursor:
            cursor.execute(f"CREATE USER {alias} IDENTIFIED BY 'only for tests'")
            cursor.execute(f"GRANT ALL ON `{given['NAME']}`.* TO {alias}")
        made_by = os.getpid()
        try:
            yield alias
        finally:
            # A forked child leaves the block too.
            if os.getpid() == made_by:
                with connections[using].cursor() as cursor:
                    cursor.execute(f"DROP USER {alias}")


def sessions(alias: str) -> set[int]:
    """Return the server's numbers for the sessions of a counted alias, idle ones included."""
    using, query = {
        "postgresql": ("default", "SELECT pid FROM pg_stat_activity WHERE application_name = %s"),
        "mysql": ("mariadb", "SELECT id FROM information_schema.processlist WHERE user = %s"),
    }[connections[alias].vendor]
    with connections[using].cursor() as cursor:
        cursor.execute(query, [alias])
        return {session for (session,) in cursor.fetchall()}


def session_of(alias: str) -> int:
    """Return the server's number for this thread's own session."""
    function = "pg_backend_pid" if connections[alias].vendor == "postgresql" else "connection_id"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT {function}()")
        return int(cursor.fetchone()[0])


def cut(alias: str, doomed: set[int]) -> None:
    """Let the server end sessions of a counted alias, and wait until they have ended."""
    on_postgresql = connections[alias].vendor == "postgresql"
    with connections["default" if on_postgresql else "mariadb"].cursor() as cursor:
        for session in doomed:
            if on_postgresql:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [session])
            else:
                cursor.execute(f"KILL CONNECTION {session}")
    give_up = time.monotonic() + 10
    while sessions(alias) & doomed and time.monotonic() < give_up:
        time.sleep(0.01)


def abandon_connections() -> None:
    """Leave the connections alone that a fork has copied, as servers and task queues do."""
    for connection in connections.all(initialized_only=True):
        raw, connection.connection = connection.connection, None
        if raw is not None and connection.vendor == "mysql" and hasattr(raw, "fileno"):
            # Destroyed, mysqlclient's says good-bye on the socket of the parent. Not on this one.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), raw.fileno())


def in_a_fork(
    work: Callable[[], dict[str, Any]], *, at_once: bool = True
) -> tuple[dict[str, Any], int]:
    """Give what a forked child says, and its exit status; not at once, its blocks end as well."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        abandon_connections()
        os.write(writes, json.dumps(work()).encode())
        os.close(writes)
        if at_once:
            os._exit(0)
        sys.exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = json.loads(pipe.read())
    return said, os.waitpid(child, 0)[1]


def outcome(call: Callable[[], object]) -> str:
    """Say what a call answers, or how it is refused."""
    try:
        return str(call())
    except LockError as error:
        return error.code


@contextmanager
def locks_on(using: str, **configured: Any) -> Iterator[str]:
    """Configure a lock backend on a database; give its alias."""
    alias = f"locks_{using}"
    configuration = {"BACKEND": DATABASE, "OPTIONS": {"using": using}, **configured}
    with override_settings(DISTLOCK={alias: configuration}):
        yield alias
