"""`docs/runbooks/store-unreachable.md`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connections

from django_distlock import BackendUnavailable, distlock
from tests.contract.helpers import Later
from tests.services import private_redis

from .incidents import PATIENCE, grantable, port_of, redis_of
from .walks import Walk, incident

KEY = "invoice:42"


@incident("store-unreachable", "Redis does not answer", "redis")
def test_redis_is_started_again(walk: Walk) -> None:
    """The page sees that Redis is down, and that locks are there again behind its start."""
    port = port_of(walk.site.redis)
    walk.servers.close()
    walk.step(status=69)
    walk.step(status=1)
    walk.servers.enter_context(private_redis(port=port))
    walk.act()
    assert grantable(walk.site, KEY)


@incident("store-unreachable", "Redis is out of memory", "redis")
def test_redis_gets_room(walk: Walk) -> None:
    """The page sees that no lock can be taken, and why; then there is room."""
    with redis_of(walk.site) as client:
        client.config_set("maxmemory", 524288)
    with walk.site.locks() as alias, pytest.raises(BackendUnavailable):
        distlock(KEY, backend=alias, ttl=60).try_acquire()
    walk.step(status=1)
    walk.confirm()
    walk.act()
    assert grantable(walk.site, KEY)


@incident("store-unreachable", "The database takes no connections", "postgresql")
def test_a_database_takes_connections_again(walk: Walk) -> None:
    """The page finds the database closed to new sessions, and opens it."""
    site = walk.site
    with site.session("postgres") as ask:
        ask(f"ALTER DATABASE {site.database} ALLOW_CONNECTIONS false")
    walk.stands_for("shop", site.database)
    walk.step(status=69)
    ((_, is_open, *_),) = walk.step().rows
    assert not is_open
    walk.act()
    connections[site.using].close()
    assert grantable(site, KEY)


@contextmanager
def tables_locked(walk: Walk) -> Iterator[int]:
    """Let a session keep the tables from changes, as `REINDEX` does, at work; give its number."""
    names = ("heldlock", "fencecounter", "waiter", "lockevent")
    all_of_them = ", ".join(f"django_distlock_{each} WRITE" for each in names)
    lock, who, work = {
        "postgresql": (
            "LOCK TABLE django_distlock_heldlock IN SHARE MODE",
            "SELECT pg_backend_pid()",
            f"SELECT pg_sleep({PATIENCE})",
        ),
        "mysql": (
            f"LOCK TABLES {all_of_them}",
            "SELECT connection_id()",
            f"SELECT sleep({PATIENCE})",
        ),
    }[walk.site.store]
    with walk.site.session() as ask:
        ask("BEGIN")
        ask(lock)
        session = int(ask(who)[0][0])
        Later(ask, work)
        yield session


@incident("store-unreachable", "Something locks its tables", "postgresql", "mysql")
def test_who_locks_the_tables_is_ended(walk: Walk) -> None:
    """The page finds the session that has the tables, and ends it."""
    connections[walk.site.using].close()
    with tables_locked(walk) as session:
        (answer,) = walk.confirm()
        assert [row[0] for row in answer.rows] == [session]
        walk.stands_for("5120", session)
        walk.act()
        assert grantable(walk.site, KEY)
