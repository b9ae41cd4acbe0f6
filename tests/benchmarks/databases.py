"""The private servers, their databases, and what is in them."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, TypeVar

import django
import psycopg
from django.apps import apps
from django.core.management import call_command
from django.db import connections

from django_distlock import lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.conf import table
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.process.host import current_holder
from tests.services import (
    Server,
    folder,
    has_mariadb,
    private_mariadb,
    private_postgres,
    private_redis,
)

T = TypeVar("T")

#: Seconds that nothing here outlives: what is held for a whole benchmark.
LONG_TTL = 604_800.0


@contextmanager
def serve(extra: Iterable[str], *, fsync: bool, mysql: bool = False) -> Iterator[Server]:
    """Run servers, of PostgreSQL with migrated databases, and set Django up over them.

    Args:
        extra: Names of databases to have beside the default one; `create` makes them.
        fsync: Whether a commit waits for the disk.
        mysql: Whether MariaDB is needed, where there is one.
    """
    with ExitStack() as stack:
        scratch = stack.enter_context(folder())
        server = stack.enter_context(private_postgres(durable=fsync))
        if mysql and has_mariadb():
            flush = 1 if fsync else 0
            made = private_mariadb(innodb_flush_log_at_trx_commit=flush)
            os.environ["DISTLOCK_BENCH_MYSQL_URL"] = stack.enter_context(made).url
        # Nothing of it is written to a disk.
        os.environ["DISTLOCK_BENCH_REDIS_URL"] = stack.enter_context(private_redis()).url
        # Clients are processes of their own, and read the same settings.
        os.environ["DISTLOCK_BENCH_URL"] = server.url
        os.environ["DISTLOCK_BENCH_SCRATCH"] = str(scratch)
        os.environ["DISTLOCK_BENCH_DATABASES"] = " ".join(extra)
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
        django.setup()
        _administer("CREATE DATABASE bench_template")
        for alias in ("template", *({"sqlite", "mariadb"} & {*connections})):
            call_command("migrate", "django_distlock", database=alias, verbosity=0)
        connections["template"].close()
        create("default")
        try:
            yield server
        finally:
            connections.close_all()


def create(alias: str) -> None:
    """Make an empty, migrated database."""
    _administer(f"CREATE DATABASE bench_{alias} TEMPLATE bench_template")


def drop(alias: str) -> None:
    """Remove a database, with whoever is connected to it."""
    connections[alias].close()
    _administer(f"DROP DATABASE IF EXISTS bench_{alias} WITH (FORCE)")


def _administer(statement: str) -> None:
    with psycopg.connect(os.environ["DISTLOCK_BENCH_URL"], autocommit=True) as server:
        server.execute(statement.encode())


def ask(alias: str, statement: str, *arguments: Any) -> list[Any]:
    """Run a statement on this thread's connection; give its rows."""
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, arguments or None)
        return list(cursor.fetchall()) if cursor.description else []


def columns(model: str = "HeldLock") -> list[str]:
    """Return the names of a model's columns, the primary key first."""
    meta = apps.get_model("django_distlock", model)._meta
    return [meta.pk.column, *(each.column for each in meta.concrete_fields if each != meta.pk)]


def hold(alias: str, key: str, ttl: float = LONG_TTL) -> Grant:
    """Take a key for longer than any benchmark runs."""
    return take(lock_backends[alias], key, ttl)


def take(backend: BaseLockBackend, key: str, ttl: float = LONG_TTL) -> Grant:
    """Take a key from a backend, for longer than any benchmark runs."""
    grant = backend.acquire(key, new_token(), ttl, current_holder())
    if not isinstance(grant, Grant):
        raise RuntimeError(f"{key!r} is not free: {grant}")
    return grant


def parts(whole: Iterable[T], size: int) -> Iterator[list[T]]:
    """Cut what is iterated over into lists of so many."""
    left = iter(whole)
    while part := list(islice(left, size)):
        yield part


# Many rows at once, as the package itself would have written them one by one.

LIVE, FREE = "order", "invoice"


def fill(alias: str, *, locks: int, free: int = 0) -> None:
    """Hold `locks` keys, and have counters of `free` more that nobody holds.

    The rows are copies of one that the package wrote, but for what tells keys apart. They go in
    in no order, as they would come.
    """
    grant = hold(alias, f"{LIVE}:0")
    lock_backends[alias].release(hold(alias, f"{FREE}:0"))
    token = "left(translate(encode(decode(md5(n::text), 'hex'), 'base64'), '+/', '-_'), 22)"
    _multiply(alias, "locks", "HeldLock", LIVE, locks, {"token": token})
    _multiply(alias, "fences", "FenceCounter", LIVE, locks, {})
    _multiply(alias, "fences", "FenceCounter", FREE, free, {})
    lock_backends[alias].release(grant)
    for name in ("locks", "fences"):
        ask(alias, f"VACUUM (ANALYZE) {table(name)}")


def filled_grant(grant: Grant, number: int) -> Grant:
    """Return what the holder of the live key with this number has.

    Args:
        grant: Any grant, for what they have in common.
    """
    digest = hashlib.md5(str(number).encode()).digest()
    token = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return Grant(f"{LIVE}:{number}", token, 1, LONG_TTL, grant.acquired_at, grant.expires_at)


def _multiply(
    alias: str, name: str, model: str, kind: str, count: int, other: dict[str, str]
) -> None:
    prefix = lock_backends[alias].key_prefix
    values = {
        "storage_key": f"'{prefix}:{kind}:' || n", "key": f"'{kind}:' || n", **other
    }  # fmt: skip
    every = columns(model)
    ask(
        alias,
        f"INSERT INTO {table(name)} ({', '.join(every)})"
        f" SELECT {', '.join(values.get(each, each) for each in every)}"
        f" FROM (SELECT * FROM {table(name)} WHERE storage_key = %s) made,"
        " generate_series(1, %s) n ORDER BY md5(n::text)",
        f"{prefix}:{kind}:0",
        count,
    )
