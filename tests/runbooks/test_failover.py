"""`docs/runbooks/failover.md`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from django.db import connections

from django_distlock import distlock, inspection
from tests.contract.locking import eventually
from tests.services import private_redis

from .incidents import PATIENCE, counter, grantable, holder, port_of, record_fence, redis_of
from .sites import Site
from .walks import Walk, incident

KEY = "invoice:42"
GRANTS = 4


def restored(walk: Walk) -> int:
    """Let a database be as it was before some grants; return the highest fence of these."""
    site = walk.site
    with holder(site, KEY, ttl=7200) as process:
        walk.stands_for("4711", process.popen.pid)
        process.kill()
    copies = {"postgresql": postgresql_copy, "mysql": mysql_copy, "sqlite": sqlite_copy}
    connections[site.using].close()
    with copies[site.store](site):
        with site.locks() as alias:
            inspection.force_release(KEY, backend=alias, actor="Ada", reason="it was killed")
            for _ in range(GRANTS):
                with distlock(KEY, backend=alias, ttl=60) as lease:
                    highest = lease.fence
        connections[site.using].close()
    assert counter(site, KEY) < highest
    return highest


@contextmanager
def sqlite_copy(site: Site) -> Iterator[None]:
    """Put the file back at the end as it is at the beginning."""
    with (
        closing(sqlite3.connect(f"{site.database}.backup")) as backup,
        closing(sqlite3.connect(site.database)) as raw,
    ):
        raw.backup(backup)
        yield
        backup.backup(raw)


@contextmanager
def postgresql_copy(site: Site) -> Iterator[None]:
    """Put a copy in the place of the database at the end."""
    name = site.database
    with site.session("postgres") as ask:
        ask(f"CREATE DATABASE {name}_copy TEMPLATE {name}")
        yield
        ask(f"DROP DATABASE {name} WITH (FORCE)")
        ask(f"ALTER DATABASE {name}_copy RENAME TO {name}")


@contextmanager
def mysql_copy(site: Site) -> Iterator[None]:
    """Put the rows back at the end as they are at the beginning."""
    tables = ("django_distlock_heldlock", "django_distlock_fencecounter")
    with site.session() as ask:
        for each in tables:
            ask(f"CREATE TABLE {each}_copy AS SELECT * FROM {each}")
        yield
        for each in tables:
            ask(f"DELETE FROM {each}")
            ask(f"INSERT INTO {each} SELECT * FROM {each}_copy")


@incident("failover", "The database is older", "postgresql", "mysql", "sqlite")
def test_fences_rise_over_a_restore(walk: Walk) -> None:
    """The page sees what the copy believes, and raises its counters above what was handed out."""
    handed_out = restored(walk)
    walk.stands_for("48213", handed_out)
    answers = walk.confirm()
    assert answers[-1].rows[0][0] < handed_out
    walk.act()
    with walk.site.locks() as alias, distlock(KEY, backend=alias, ttl=60) as lease:
        assert lease.fence > handed_out


@incident("failover", "The application is down", "postgresql", "mysql", "sqlite")
def test_fences_are_raised_without_the_application(walk: Walk) -> None:
    """What is pasted raises each counter that is behind."""
    handed_out = restored(walk)
    walk.stands_for("48213", handed_out)
    walk.act()
    assert counter(walk.site, KEY) == handed_out


@incident("failover", "Redis came back empty", "redis")
def test_redis_that_came_back_empty_is_noticed(walk: Walk) -> None:
    """The page says that its data is gone; once that is accepted, all is well."""
    site, port = walk.site, port_of(walk.site.redis)
    assert site.command("python manage.py distlock_doctor").status == 0
    walk.servers.close()
    walk.servers.enter_context(private_redis(port=port))
    walk.step(status=1)
    walk.confirm()
    walk.act()
    assert "D022" not in site.command("python manage.py distlock_doctor --no-write").text


@incident("failover", "Redis promoted a replica", "redis")
def test_the_old_primary_of_redis_grants_no_more(walk: Walk) -> None:
    """The page sees two servers that grant the same key, and leaves one of them."""
    new = walk.site
    with private_redis() as server:
        old = Site("redis", new.using, server.url)
        with redis_of(new) as replica, redis_of(old) as primary:
            replica.replicaof("127.0.0.1", port_of(old.redis))
            assert eventually(
                lambda: replica.info("replication")["master_link_status"] == "up", PATIENCE
            )
            # What comes now is lost with the primary.
            replica.replicaof("NO", "ONE")
            with (
                old.start("tests.runbooks.workers:hold_and_go_on", KEY, 3) as overtaken,
                holder(new, KEY, ttl=60),
            ):
                overtaken.wait_for("held", PATIENCE)
                assert record_fence(new, KEY) > 0
                walk.stands_for("10.0.0.5 -p 6379", f"127.0.0.1 -p {port_of(old.redis)}")
                walk.stands_for("10.0.0.6 6379", f"127.0.0.1 {port_of(new.redis)}")
                walk.confirm()
                walk.act()
                assert eventually(lambda: primary.role()[3] == "connected", PATIENCE)
                overtaken.send("go on")
                overtaken.wait_for("lost", PATIENCE)
                assert not grantable(new, KEY)
