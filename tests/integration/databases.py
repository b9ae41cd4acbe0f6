"""Databases to make and drop, and what is in them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.core.management import call_command
from django.db import connections

from django_distlock import distlock
from tests.contract.aliases import locks_on

APP = "django_distlock"
FUNCTIONS = {
    "django_distlock_heldlock_acquire_v1",
    "django_distlock_heldlock_extend_v1",
    "django_distlock_heldlock_extend_many_v1",
    "django_distlock_heldlock_release_v1",
    "django_distlock_fencecounter_guard_v1",
}
TRIGGER = "distlock_fence_guard"
TABLES = {
    "django_distlock_heldlock",
    "django_distlock_fencecounter",
    "django_distlock_lockevent",
}


def server(database: str = "postgres", **more: Any) -> psycopg.Connection:
    """Connect to a database of the tests' PostgreSQL server, in autocommit."""
    url = os.environ["DISTLOCK_TEST_POSTGRES_URL"]
    return psycopg.connect(url, dbname=database, autocommit=True, **more)


@contextmanager
def new_database() -> Iterator[str]:
    """Make an empty PostgreSQL database, and drop it."""
    name = f"distlock_{secrets.token_hex(6)}"
    with server() as raw:
        raw.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    try:
        yield name
    finally:
        with server() as raw:
            raw.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def ask(using: str, statement: str, *arguments: Any) -> list[Any]:
    """Run a statement on this thread's connection; give its rows."""
    with connections[using].cursor() as cursor:
        cursor.execute(statement, arguments or None)
        return list(cursor.fetchall()) if cursor.description else []


def migrate(using: str, target: str | None = None, **options: Any) -> None:
    """Apply the migrations of the app, or go to one of them."""
    targets = (APP,) if target is None else (APP, target)
    call_command("migrate", *targets, database=using, verbosity=0, **options)


def objects(using: str) -> dict[str, set[str]]:
    """Return the names of all that is in the database, but for Django's own table."""
    queries = {
        "sqlite": {"relations": "SELECT name FROM sqlite_master"},
        "postgresql": {
            "relations": "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace",
            "functions": "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
            "triggers": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal",
            "types": "SELECT typname FROM pg_type WHERE typnamespace = 'public'::regnamespace",
        },
    }[connections[using].vendor]
    found = {kind: {name for (name,) in ask(using, query)} for kind, query in queries.items()}
    return {
        kind: {
            name
            for name in names
            if "django_migrations" not in name and not name.startswith("sqlite_sequence")
        }
        for kind, names in found.items()
    }


def tables(using: str) -> set[str]:
    """Return the names of the tables."""
    return set(connections[using].introspection.table_names()) - {"django_migrations"}


def lock_and_release(using: str, key: str = "invoice:42", **options: Any) -> int:
    """Take a lock in a database, extend it and give it back; return its fence."""
    with locks_on(using, OPTIONS={"using": using, **options}) as backend:
        lock = distlock(key, backend=backend, wait=0)
        with lock as lease:
            lease.extend()
            assert lock.try_acquire() is None
        assert not lock.locked()
        return lease.fence
