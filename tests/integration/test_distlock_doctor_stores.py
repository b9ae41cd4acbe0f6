"""What the doctor finds about stores and the way to them, and what system checks tell it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.core.checks.registry import registry
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings
from redis import Redis

from django_distlock import LockError, lock_backends
from django_distlock.conf import table
from django_distlock.core.pages import page
from django_distlock.inspection import diagnosis
from django_distlock.inspection.diagnosis import (
    Mark,
    diagnose,
    has_lost,
    look_for_loss,
    responses,
)
from django_distlock.inspection.diagnosis.findings import Notes, told
from django_distlock.process.host import current_holder
from tests.backends import ADVISORY, MEMORY
from tests.contract.aliases import DATABASE, alias_like
from tests.contract.helpers import at_once, prompt
from tests.poolers import pgbouncer
from tests.redis_servers import private_redis
from tests.settings import REDIS_BACKEND

from .databases import APP, Routed, ask, forget_migration, migrate, server
from .operating import run
from .wires import wire

pytestmark = pytest.mark.usefixtures("unknown_redis")

NOWHERE = "redis://:secret@127.0.0.1:1/0"


def database(using: str, **options: Any) -> Any:
    """Configure one backend, on a database."""
    given = {"BACKEND": DATABASE, "OPTIONS": {"using": using, **options}}
    return override_settings(DISTLOCK={"locks": given})


def redis(url: str, **config: Any) -> Any:
    """Configure one backend, on a Redis."""
    return override_settings(
        DISTLOCK={"locks": {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": url}, **config}}
    )


def asked() -> Notes:
    """Ask the store, and nothing else."""
    notes = Notes("locks")
    responses.ask(lock_backends["locks"], notes, writes=True)
    return notes


def compared(*, writes: bool = True) -> Notes:
    """Look whether the store has lost its data."""
    notes = Notes("locks")
    look_for_loss(lock_backends["locks"], notes, writes=writes)
    return notes


def of(found: Any) -> dict[str, dict[str, Any]]:
    """Return findings by the end of their ids."""
    every = [told(each) for each in found.findings]
    assert {each["backend"] for each in every} <= {"locks", None}
    return {each["id"].removeprefix("distlock."): each for each in every}


def look(notes: Notes, what: str) -> tuple[Mark, str]:
    """Return what came of a look at something."""
    (seen,) = [each for each in notes.looks if each.what == what]
    return seen.mark, seen.text


def wait_for_doctors() -> None:
    """Wait for what a diagnosis had no patience for: it still uses the stores."""
    for thread in threading.enumerate():
        if thread.name.startswith("distlock-doctor-"):
            thread.join(20)


# Clocks


def test_clock_of_the_server_is_off(postgresql: str) -> None:
    """D001: a server whose clock is an hour ahead is found by what it tells, with figures."""
    migrate(postgresql)
    name = connections[postgresql].settings_dict["NAME"]
    with server(name) as raw:
        # What the functions of this package ask for the time.
        raw.execute("CREATE SCHEMA skewed")
        raw.execute(
            "CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS"
            " $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$"
        )
        raw.execute(f"ALTER DATABASE {name} SET search_path = skewed, public, pg_catalog".encode())
    connections[postgresql].close()
    with database(postgresql):
        finding = of(asked())["D001"]
    seconds = re.search(r" by \+([0-9.]+) s ± ", finding["message"])
    assert seconds
    assert float(seconds[1]) == pytest.approx(3600, abs=5)


@pytest.mark.parametrize("alias", ["postgres", "redis", "redis_cluster"])
def test_clock_of_this_host_is_off(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D001 as well: nobody can tell which of two clocks is wrong. A second apart is none."""
    now = responses.host_clock
    with override_settings(DISTLOCK={"locks": settings.DISTLOCK[alias]}):
        monkeypatch.setattr(responses, "host_clock", lambda: now() + timedelta(seconds=90))
        message = of(asked())["D001"]["message"]
        assert "-90.0" in message or "-89.9" in message
        monkeypatch.setattr(responses, "host_clock", lambda: now() + timedelta(seconds=0.2))
        mark, text = look(asked(), "clock")
    assert mark is Mark.OK
    assert "-0.2" in text or "-0.1" in text


# Wake-ups, speed, connections


def test_store_behind_a_pooler(key: str) -> None:
    """D008: no wake-up arrives through it. An alias that goes around it is what helps.

    E301: nor can a session lock be taken. The locking that was tried says so as well.
    """
    with pgbouncer() as address, alias_like("default", **address) as using:
        with database(using):
            message = of(asked())["D008"]["message"]
        assert "a pooler" in message
        assert "listen_using" in message
        with database(using, listen_using="default"):
            lock_backends["locks"].waiters.note(key, current_holder(), 60)
            assert "D008" not in of(asked())
        given = {"BACKEND": ADVISORY, "OPTIONS": {"using": using}}
        with override_settings(DISTLOCK={"locks": given}):
            found = of(diagnose())
        connections[using].close()
    assert found["E301"]["address"] == page("howto/use-session-locks")
    assert (found["D011"]["level"], found["D011"]["backend"]) == ("error", "locks")


def test_database_without_tables_says_what_to_run(postgresql: str) -> None:
    """D008, where the secret of the channel is missing: no limit of connections is in the way."""
    with database(postgresql):
        assert "migrations" in of(asked())["D008"]["hint"]


def test_user_of_redis_who_may_less_or_is_unknown() -> None:
    """D008: one without the channel of wake-ups. D011 of a wrong password says what to look at."""
    with private_redis(durable=True) as running, Redis.from_url(running.url) as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~*", "+@all")
        with redis(running.url.replace("redis://", "redis://shop:secret@")):
            assert "may not subscribe" in of(asked())["D008"]["message"]
        with redis(running.url.replace("redis://", "redis://shop:wrong@")):
            found = of(diagnose())
    assert set(found) == {"D011"}
    assert "password" in found["D011"]["hint"]


def test_slow_way_to_the_server() -> None:
    """D009: the median of several round trips is above a tenth of a second."""
    with wire() as way, alias_like("default", **way.address) as using, database(using):
        way.delay = 0.11
        message = of(asked())["D009"]["message"]
        way.delay = 0.0
        connections[using].close()
    assert float(message.split(" ms ")[0].rsplit(" ", 1)[1]) > 110
    assert "median of 5" in message


def test_connections_of_postgresql_are_nearly_used(postgresql: str) -> None:
    """D010: of the server, of the database or of the user, with figures."""
    migrate(postgresql)
    name = str(connections[postgresql].settings_dict["NAME"])
    with server() as raw, database(postgresql):
        raw.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 50".encode())
        assert f"the database {name} has" in look(asked(), "connections")[1]
        raw.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 10".encode())
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(server(name))
            message = of(asked())["D010"]["message"]
        raw.execute(f"ALTER DATABASE {name} CONNECTION LIMIT -1".encode())
    assert f"the database {name} has" in message
    assert "of 10" in message


def test_connections_of_redis_are_nearly_used() -> None:
    """D010: as its server tells."""
    with private_redis(durable=True, maxclients=20) as running, redis(running.url):
        assert "D010" not in of(asked())
        with ExitStack() as stack:
            for _ in range(16):
                client = stack.enter_context(Redis.from_url(running.url))
                client.ping()
            assert "of 20" in of(asked())["D010"]["message"]


def test_leases_of_the_project_are_short() -> None:
    """The lock of the doctor is no longer than `MAX_TTL`."""
    with override_settings(DISTLOCK={"locks": {"BACKEND": MEMORY, "TTL": 5, "MAX_TTL": 5}}):
        assert look(asked(), "locking")[0] is Mark.OK


def test_what_other_databases_tell(mysql: str, sqlite: str) -> None:
    """MariaDB how many connections there are, of how many; SQLite has this host's clock."""
    migrate(mysql)
    with database(mysql):
        mark, text = look(asked(), "connections")
    assert (mark, text.split()[-1]) == (Mark.OK, "200")
    migrate(sqlite)
    with database(sqlite):
        assert look(asked(), "clock")[0] is Mark.SKIPPED


# Stores that do not answer, or not as they should


def test_store_that_is_down_stops_no_other(key: str) -> None:
    """D011 once, and 69 behind all that the others told. No password is shown."""
    both = {
        "dead": {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": NOWHERE}},
        "alive": {"BACKEND": DATABASE, "KEY_PREFIX": key, "OPTIONS": {"using": "default"}},
    }
    with override_settings(DISTLOCK=both):
        ran = run("distlock_doctor", "--json")
        assert ran.status == 69
        about = [each["id"] for each in ran.json["findings"] if each["backend"] == "dead"]
        assert about == ["distlock.D011"]
        assert ran.json["silent"] == ["dead"]
        looks = {(each["backend"], each["what"]): each["mark"] for each in ran.json["looked_at"]}
        assert looks["alive", "locking"] == "ok"
        assert looks["alive", "migrations"] == "ok"
        assert ("dead", "persistence") not in looks
        assert "secret" not in ran.out + ran.err
        assert run("distlock_doctor", "--backend=alive").status == 0


@pytest.mark.parametrize("kind", [DATABASE, ADVISORY])
def test_database_that_is_down(kind: str) -> None:
    """D011, and not what the checks would say of it once more."""
    with alias_like("default", HOST="127.0.0.1", PORT="1") as using:
        given = {"BACKEND": kind, "FENCE_FLOOR": "clock", "OPTIONS": {"using": using}}
        with override_settings(DISTLOCK={"locks": given}):
            found = diagnose(["locks"])
    assert found.silent == ("locks",)
    assert [each["id"] for each in of(found).values() if each["backend"]] == ["distlock.D011"]


def test_slow_stores_have_one_time_together(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D011 of each: what it was asked until then stays, and what it was not asked is said."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 6.0)
    with ExitStack() as stack:
        given, ways = {}, []
        for name in ("slow0", "slow1", "hangs"):
            ways.append(way := stack.enter_context(wire()))
            using = stack.enter_context(alias_like("default", **way.address))
            way.delay = 0.2
            options = {"BACKEND": DATABASE, "KEY_PREFIX": f"{key}{name}"}
            given[name] = {**options, "OPTIONS": {"using": using}}
        way.hang()
        with override_settings(DISTLOCK=given):
            with prompt(6):
                found = diagnose()
            for way in ways:
                way.delay = 0.0
                way.flow()
            wait_for_doctors()
    assert found.silent == tuple(given)
    for alias in given:
        looks = {each.what: each for each in found.looked_at if each.backend == alias}
        late = "did not answer" if alias == "hangs" else "did not answer all"
        assert f"{late}: 4 s have passed" in looks["store"].text
        assert looks["not asked"].text.endswith("pauses")
        if alias == "hangs":
            assert looks["not asked"].text.startswith("store, clock, locking")
        else:
            assert looks["clock"].mark is Mark.OK
            assert "clock" not in looks["not asked"].text


def test_database_on_which_no_lock_can_be_taken(postgresql: str) -> None:
    """D011, beside W103 where tables lack, or E105 as on a standby. The exit status is no 69."""
    with database(postgresql):
        assert {"D011", "W103"} <= set(of(diagnose()))
        assert run("distlock_doctor", "--backend=locks").status == 1
    migrate(postgresql)
    name = str(connections[postgresql].settings_dict["NAME"])
    connections[postgresql].close()
    with server() as raw, database(postgresql):
        raw.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
        found = of(diagnose())
    assert {"D011", "E105"} <= set(found)
    assert found["E105"]["address"] == page("runbooks/failover")


@pytest.mark.parametrize("table", ["heldlock", "fencecounter"])
def test_locked_table_is_no_doctor(postgresql: str, table: str) -> None:
    """D011, where every lock of the project is refused and all can be read, as in `REINDEX`."""
    migrate(postgresql)
    with server(connections[postgresql].settings_dict["NAME"]) as raw, raw.transaction():
        raw.execute(f"LOCK TABLE django_distlock_{table} IN SHARE MODE".encode())
        with database(postgresql):
            notes = asked()
    assert look(notes, "locking")[0] is Mark.ERROR
    finding = of(notes)["D011"]
    assert "table lock" in finding["message"]
    assert "locked the lock tables" in finding["hint"]


# What system checks find


def test_schema_that_is_not_whole(postgresql: str) -> None:
    """W106, and nothing is said of indexes; migrated, W111 of one that somebody has dropped."""
    migrate(postgresql)
    forget_migration(postgresql)
    with database(postgresql):
        early = diagnose()
        marks = {each.what: each.mark for each in early.looked_at if each.backend}
        assert (marks["migrations"], marks["indexes"]) == (Mark.WARNING, Mark.SKIPPED)
        assert "0001_initial" in of(early)["W106"]["message"]
        call_command("migrate", "django_distlock", database=postgresql, fake=True, verbosity=0)
        ask(
            postgresql,
            "ALTER TABLE django_distlock_heldlock DROP CONSTRAINT"
            " django_distlock_heldlock_token_key",
        )
        late = of(diagnose())
    assert "W106" not in late
    assert late["W111"]["backend"] == "locks"


def test_finding_of_several_backends(postgresql: str) -> None:
    """It is the project's; where only one of them is asked about, it is that one's."""
    two = {
        alias: {"BACKEND": DATABASE, "KEY_PREFIX": alias, "OPTIONS": {"using": postgresql}}
        for alias in ("locks", "more")
    }
    with override_settings(DISTLOCK=two):
        both, one = diagnose(), diagnose(["locks"])
    assert of_w103(both) == [None]
    assert of_w103(one) == ["locks"]
    tables = {each.backend: each.mark for each in both.looked_at if each.what == "tables"}
    assert tables == {"locks": Mark.WARNING, "more": Mark.WARNING}


def test_note_is_marked_as_one(sqlite: str) -> None:
    """W101 is no warning under `DEBUG`, neither among the findings nor in the list above them."""
    migrate(sqlite)
    with (
        override_settings(DEBUG=True, DATABASE_ROUTERS=[Routed(sqlite)]),
        database(sqlite),
    ):
        found = diagnose()
        ran = run("distlock_doctor", "--fail-level=WARNING")
    assert of(found)["W101"]["level"] == "info"
    assert [each.mark for each in found.looked_at if each.what == "database"] == [Mark.INFO]
    assert "  info     database                distlock.W101\n" in ran.out


def of_w103(found: diagnosis.Diagnosis) -> list[str | None]:
    """Return what W103 is about."""
    every = found.as_json()["findings"]
    return [each["backend"] for each in every if each["id"] == "distlock.W103"]


@contextmanager
def registered(name: str, check: Any) -> Iterator[None]:
    """Register a check as if it were ours."""
    check.__name__, check.__module__ = name, f"django_distlock.checks.{name}"
    registry.register(check, "distlock")
    try:
        yield
    finally:
        registry.registered_checks.remove(check)


def test_check_that_fails_or_hangs_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """D013 of each: the error is told, or that it has not ended. The store was asked."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 3.0)
    over = threading.Event()

    def fail(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
        raise ZeroDivisionError("by zero")

    def hang(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
        over.wait(60)
        return []

    with private_redis() as running, redis(running.url), registered("broken", fail):
        broken = diagnose()
        with registered("hanging", hang):
            hanging = diagnose()
            over.set()
            wait_for_doctors()
    assert set(of(broken)) == {"D013", "W203"}
    assert "ZeroDivisionError: by zero" in of(broken)["D013"]["message"]
    assert any(each.what == "locking" and each.mark is Mark.OK for each in hanging.looked_at)
    message = str([each.msg for each in hanging.findings])
    assert "not ended within 3 s. No answer from:" in message
    assert "hanging" in message


def test_backend_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """D013: an error that no backend should raise is told, and the others are examined."""
    with private_redis(durable=True) as running:
        both = {
            name: {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": running.url}}
            for name in ("broken", "locks")
        }
        with override_settings(DISTLOCK=both):
            monkeypatch.setattr(lock_backends["broken"], "clock", lambda: 1 / 0)
            found = diagnose()
    (finding,) = map(told, found.findings)
    assert (finding["id"], finding["backend"]) == ("distlock.D013", "broken")
    assert any(each.backend == "locks" and each.what == "locking" for each in found.looked_at)


# Data that is lost


@pytest.fixture
def flushable(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give a client of a Redis of this test, on which the backend is, with a `KEY_PREFIX`."""
    with (
        private_redis() as server,
        redis(server.url, KEY_PREFIX=getattr(request, "param", "distlock")),
        Redis.from_url(server.url) as client,
    ):
        yield client


@pytest.mark.parametrize("flushable", ["distlock", "x" * 600], ids=["short", "long"], indirect=True)
def test_redis_that_was_emptied_is_found_until_it_is_accepted(flushable: Any) -> None:
    """D022: it says since when, as often as it is asked, also where nothing is written.

    A first look that may not write leaves no mark, and says that it can compare nothing yet.
    """
    store: Any = lock_backends["locks"]
    before = store.clock()
    mark, text = look(compared(writes=False), "data")
    assert mark is Mark.SKIPPED
    assert "not marked yet" in text
    assert store.data_mark() is None
    mark, text = look(compared(), "data")
    assert (mark, text[:6]) == (Mark.OK, "marked")
    mark, text = look(compared(), "data")
    assert (mark, text[:14]) == (Mark.OK, "all data since")
    flushable.flushall()
    for writes in (True, False, True):
        finding = of(compared(writes=writes))["D022"]
        assert finding["level"] == "error"
        assert "Redis has lost its data, between" in finding["message"]
        assert f"{before:%Y-%m-%d %H}" in finding["message"]
        assert "distlock_doctor --accept-loss locks" in finding["hint"]
    assert "ERROR distlock.D022 [locks]" in run("distlock_doctor").out
    assert "D022" not in run("distlock_doctor", "--accept-loss", "locks").out
    assert of(compared()) == {}


def test_redis_that_was_emptied_and_marked_anew_is_found(flushable: Any) -> None:
    """By another project, say, which keeps its locks there too."""
    compared()
    flushable.flushall()
    assert lock_backends["locks"].mark_data()  # type: ignore[attr-defined]
    assert "D022" in of(compared())


def test_address_of_another_redis_is_found_by_the_command() -> None:
    """One that has data and a mark of its own, until the address is that of the first again."""
    with private_redis() as server:
        other = f"{server.url.rstrip('/')}/1"
        with redis(other):
            assert lock_backends["locks"].mark_data()  # type: ignore[attr-defined]
        for url, is_lost in ((server.url, False), (other, True), (server.url, False)):
            with redis(url):
                assert ("distlock.D022" in run("distlock_doctor", "--backend=locks").out) == is_lost


def test_loss_is_told_inside_of_a_transaction(flushable: Any, sqlite: str) -> None:
    """The dashboard asks in that of a request, which is SQLite's one writer."""
    migrate(sqlite)
    with override_settings(DATABASE_ROUTERS=[Routed(sqlite)]):
        compared()
        flushable.flushall()
        with transaction.atomic(using=sqlite):
            assert has_lost(lock_backends["locks"])


@pytest.mark.parametrize("alias", ["redis", "redis_cluster"])
def test_mark_is_made_once(key: str, alias: str) -> None:
    """By whoever comes first, also on a cluster; a text of somebody else's is an error."""
    with override_settings(DISTLOCK={alias: {**settings.DISTLOCK[alias], "KEY_PREFIX": key}}):
        store: Any = lock_backends[alias]
        assert len(set(at_once([store.mark_data] * 6))) == 1
        assert store.data_mark() == store.mark_data()
        store.store.command("SET", store._data_mark_at, "spoiled")
        with pytest.raises(LockError, match="cannot be read"):
            store.mark_data()
        store.store.command("DEL", store._data_mark_at)


def test_loss_cannot_be_told_without_a_database(flushable: Any, key: str) -> None:
    """It says so, and to accept one is refused; without a table as without any database."""
    with connections["default"].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table('seen')} RENAME TO elsewhere")
        try:
            mark, text = look(compared(), "data")
            accepted = run("distlock_doctor", "--accept-loss", "locks")
        finally:
            cursor.execute(f"ALTER TABLE elsewhere RENAME TO {table('seen')}")
    assert mark is Mark.SKIPPED
    assert "data loss cannot be detected" in text
    assert accepted.status == 69
    with (
        alias_like("sqlite", ENGINE="django.db.backends.dummy") as nothing,
        override_settings(DATABASE_ROUTERS=[Routed(nothing, APP, others="default")]),
    ):
        mark, text = look(compared(), "data")
        ran = run("distlock_fence", "seen", key)
    assert mark is Mark.SKIPPED
    assert "No database stores the table SeenFence" in text
    assert ran.status == 1
    assert "No database stores the table SeenFence" in ran.err


def test_only_redis_loses_data_that_way() -> None:
    """And to accept a loss is to write."""
    with database("default"):
        assert "is not a Redis backend" in run("distlock_doctor", "--accept-loss", "locks").err
        assert run("distlock_doctor", "--accept-loss", "locks", "--no-write").status == 2
