"""`manage.py distlock_doctor`: what it finds about stores, and about the way to them."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.core.checks.registry import registry
from django.db import connections
from django.test import override_settings
from redis import Redis

from django_distlock import LockError, lock_backends
from django_distlock.conf import table
from django_distlock.host import current_holder
from django_distlock.inspection import diagnosis
from django_distlock.inspection.diagnosis import Finding, Mark, answers, diagnose
from tests.backends import ADVISORY
from tests.contract.aliases import DATABASE, alias_like
from tests.contract.helpers import PROMPT, at_once
from tests.redis_servers import private_redis
from tests.settings import REDIS_BACKEND
from tests.setups.servers import pgbouncer

from .databases import ask, forget_migration, migrate, server
from .operating import run
from .wires import READ_BYTES, wire

pytestmark = pytest.mark.usefixtures("unknown_redis")

NOWHERE = "redis://:secret@127.0.0.1:1/0"


@contextmanager
def database(using: str, **options: Any) -> Iterator[None]:
    """Configure one backend, on a database."""
    given = {"BACKEND": DATABASE, "OPTIONS": {"using": using, **options}}
    with override_settings(DISTLOCK={"locks": given}):
        yield


@contextmanager
def redis(url: str) -> Iterator[None]:
    """Configure one backend, on a Redis."""
    given = {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": url}}
    with override_settings(DISTLOCK={"locks": given}):
        yield


def findings() -> dict[str, Finding]:
    """Examine all that is configured; give what was found, by id."""
    found = diagnose().findings
    assert {each.backend for each in found} <= {"locks", None}
    return {each.id.removeprefix("distlock."): each for each in found}


def look(what: str) -> tuple[Mark, str]:
    """Examine, and return what came of a look at something."""
    (seen,) = [
        each for each in diagnose().looked_at if each.what == what and each.backend == "locks"
    ]
    return seen.mark, seen.text


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
        finding = findings()["D001"]
    told = re.search(r" by \+([0-9.]+) s ± ", finding.message)
    assert told
    assert float(told[1]) == pytest.approx(3600, abs=5)
    assert finding.address == "docs/runbooks/clock-jump.md"


@pytest.mark.parametrize("alias", ["postgres", "redis", "redis_cluster"])
def test_clock_of_this_host_is_off(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D001 as well: nobody can tell which of two clocks is wrong. A second apart is none."""
    now = answers.host_clock
    with override_settings(DISTLOCK={"locks": settings.DISTLOCK[alias]}):
        monkeypatch.setattr(answers, "host_clock", lambda: now() + timedelta(seconds=90))
        message = findings()["D001"].message
        assert "-90.0" in message or "-89.9" in message
        monkeypatch.setattr(answers, "host_clock", lambda: now() + timedelta(seconds=0.2))
        assert "D001" not in findings()
        mark, text = look("clock")
    assert mark is Mark.OK
    assert "-0.2" in text or "-0.1" in text


# Wake-ups and poolers


def test_wake_ups_behind_a_pooler(key: str) -> None:
    """D008: none arrive through it. An alias that goes around it is what helps."""
    with pgbouncer() as address, alias_like("default", **address) as using:
        with database(using):
            finding = findings()["D008"]
        assert "connection pooler" in finding.message
        assert "listen_using" in finding.message
        with database(using, listen_using="default"):
            lock_backends["locks"].note_waiter(key, current_holder(), 60)
            # Other tests left leases here, which the doctor tells of, too.
            assert "D008" not in findings()
        connections[using].close()


def test_wake_ups_that_a_user_may_not_hear() -> None:
    """D008 on Redis: a user without the channel."""
    with private_redis(durable=True) as running, Redis.from_url(running.url) as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~*", "+@all")
        with redis(running.url.replace("redis://", "redis://shop:secret@")):
            assert "may not subscribe" in findings()["D008"].message


def test_pooler_before_session_locks() -> None:
    """E301: no lock can be taken through it. The locking that was tried says so as well."""
    with pgbouncer() as address, alias_like("default", **address) as using:
        given = {"BACKEND": ADVISORY, "OPTIONS": {"using": using}}
        with override_settings(DISTLOCK={"locks": given}):
            found = findings()
        connections[using].close()
    assert found["E301"].address == "docs/howto/use-session-locks.md"
    assert found["D011"].level == "error"


# Speed and connections


class Slow:
    """A way to a server on which each word takes its time.

    Args:
        using: The alias of its database.
        seconds: How long.
    """

    def __init__(self, using: str, seconds: float):
        self.seconds = seconds
        self._wire = wire(using)

    def __enter__(self) -> dict[str, Any]:
        made = self._wire.__enter__()
        made._carry = self._carry  # type: ignore[method-assign]
        return made.address

    def __exit__(self, *_: object) -> None:
        self._wire.__exit__(None, None, None)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
        back.start()
        self._pass_on(client, server)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(READ_BYTES):
                time.sleep(self.seconds)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def test_slow_way_to_the_server() -> None:
    """D009: the median of several round trips is above a tenth of a second."""
    with Slow("default", 0.1) as address, alias_like("default", **address) as using:
        with database(using):
            finding = findings()["D009"]
        connections[using].close()
    milliseconds = float(finding.message.split(" ms ")[0].rsplit(" ", 1)[1])
    assert milliseconds >= 200
    assert "median of 5" in finding.message
    assert finding.address == "docs/runbooks/store-unreachable.md"


def test_connections_of_postgresql_are_nearly_used(postgresql: str) -> None:
    """D010: of the server, of the database or of the user, with figures."""
    migrate(postgresql)
    name = str(connections[postgresql].settings_dict["NAME"])
    with server() as raw, database(postgresql):
        raw.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 50".encode())
        assert "D010" not in findings()
        assert f"the database {name} has" in look("connections")[1]
        raw.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 10".encode())
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(server(name))
            finding = findings()["D010"]
        raw.execute(f"ALTER DATABASE {name} CONNECTION LIMIT -1".encode())
    assert f"the database {name} has" in finding.message
    assert "of 10" in finding.message


def test_connections_of_redis_are_nearly_used() -> None:
    """D010: as its server tells."""
    with private_redis(durable=True, maxclients=20) as running, redis(running.url):
        assert "D010" not in findings()
        with ExitStack() as stack:
            for _ in range(16):
                client = stack.enter_context(Redis.from_url(running.url))
                client.ping()
            assert "of 20" in findings()["D010"].message


def test_what_other_databases_tell(mysql: str, sqlite: str) -> None:
    """MariaDB how many connections there are, of how many; SQLite has this host's clock."""
    migrate(mysql)
    with database(mysql):
        mark, text = look("connections")
    assert (mark, text.split()[-1]) == (Mark.OK, "200")
    migrate(sqlite)
    with database(sqlite):
        assert look("clock")[0] is Mark.SKIPPED


# Stores that do not answer


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
        with override_settings(DISTLOCK={"locks": {"BACKEND": kind, "OPTIONS": {"using": using}}}):
            ran = run("distlock_doctor", "--backend=locks", "--json")
        assert ran.status == 69
        about = {each["id"] for each in ran.json["findings"] if each["backend"] == "locks"}
        assert about - {"distlock.W002"} == {"distlock.D011"}


def test_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """D011 after a while: its server takes words, and never says any."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 3.0)
    with wire() as way, alias_like("default", **way.address) as using, database(using):
        assert "D011" not in findings()
        connections[using].close()
        way.hang()
        began = time.monotonic()
        ran = run("distlock_doctor", "--backend=locks")
        assert (ran.status, time.monotonic() - began < 30) == (69, True)
        assert "did not answer: 2 s have passed" in ran.out
        assert look("not asked")[1].startswith("store, clock, locking")


def test_slow_stores_have_one_time_together(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D011 of each: what it was asked until then stays, and what it was not asked is said."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 6.0)
    with ExitStack() as stack:
        given, ways = {}, []
        for number in range(3):
            ways.append(way := stack.enter_context(wire()))
            using = stack.enter_context(alias_like("default", **way.address))
            way.delay = 0.2
            options = {"BACKEND": DATABASE, "KEY_PREFIX": f"{key}{number}"}
            given[f"slow{number}"] = {**options, "OPTIONS": {"using": using}}
        with override_settings(DISTLOCK=given):
            began = time.monotonic()
            found = diagnose()
            took = time.monotonic() - began
            for way in ways:
                way.delay = 0.0
            for thread in threading.enumerate():
                if thread.name.startswith("distlock-doctor-"):
                    thread.join(20)
    assert took < 6.0 + PROMPT
    assert found.silent == tuple(given)
    for alias in given:
        looks = {each.what: each for each in found.looked_at if each.backend == alias}
        assert "did not answer all: 4 s have passed" in looks["store"].text
        assert looks["clock"].mark is Mark.OK
        assert "clock" not in looks["not asked"].text
        assert looks["not asked"].text.endswith("pauses")


def test_wrong_password() -> None:
    """D011 says what to look at."""
    with private_redis(durable=True) as running, Redis.from_url(running.url) as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">right", "~*", "+@all")
        with redis(running.url.replace("redis://", "redis://shop:wrong@")):
            found = findings()
    assert set(found) == {"D011"}
    assert "password" in found["D011"].hint


def test_database_without_tables(postgresql: str) -> None:
    """D011 and W103: it answers, and no lock can be taken. The exit status is no 69."""
    with database(postgresql):
        assert {"D011", "W103"} <= set(findings())
        assert run("distlock_doctor", "--backend=locks").status == 1


def test_database_that_only_reads(postgresql: str) -> None:
    """E105 and D011: as on a standby."""
    migrate(postgresql)
    name = str(connections[postgresql].settings_dict["NAME"])
    connections[postgresql].close()
    with server() as raw, database(postgresql):
        raw.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
        found = findings()
    assert {"D011", "E105"} <= set(found)
    assert found["E105"].address == "docs/runbooks/failover.md"


# What system checks find


def test_missing_migration(postgresql: str) -> None:
    """W106: named, with what to run."""
    migrate(postgresql)
    forget_migration(postgresql)
    with database(postgresql):
        found = findings()
        looks = {each.what: each.mark for each in diagnose().looked_at if each.backend}
    assert (looks["migrations"], looks["indexes"]) == ("warning", "skipped")
    assert "0001_initial" in found["W106"].message
    assert "migrate" in found["W106"].hint


def test_spoiled_schema(postgresql: str) -> None:
    """What a system check finds is a finding, W111 here, and nothing else is new."""
    migrate(postgresql)
    with database(postgresql):
        before = {each.message for each in diagnose().findings}
        ask(
            postgresql,
            "ALTER TABLE django_distlock_heldlock DROP CONSTRAINT"
            " django_distlock_heldlock_token_key",
        )
        new = [each for each in diagnose().findings if each.message not in before]
    assert [each.id for each in new] == ["distlock.W111"]
    assert new[0].address.startswith("docs/")


def test_check_that_hangs_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """D013 after a while: a database of somebody else's rows that hangs. The store was asked."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 3.0)
    over = threading.Event()

    def hanging(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
        over.wait(60)
        return []

    hanging.__module__ = "django_distlock.checks.hanging"
    registry.register(hanging, "distlock")
    try:
        with private_redis() as running, redis(running.url):
            found = findings()
            assert look("locking")[0] is Mark.OK
    finally:
        over.set()
        registry.registered_checks.remove(hanging)  # type: ignore[arg-type]
    assert set(found) == {"D013"}
    assert "not ended within 3 s; without an answer: hanging" in found["D013"].message


def test_check_that_fails_stops_no_other() -> None:
    """D013: its error is told, and the others are run."""

    def broken(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
        raise ZeroDivisionError("by zero")

    broken.__module__ = "django_distlock.checks.broken"
    registry.register(broken, "distlock")
    try:
        with private_redis() as running, redis(running.url):
            found = findings()
    finally:
        registry.registered_checks.remove(broken)  # type: ignore[arg-type]
    assert set(found) == {"D013", "W203"}
    assert "ZeroDivisionError: by zero" in found["D013"].message


def test_backend_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """D013: an error that no backend should raise is told, and the others are examined."""
    with private_redis(durable=True) as running:
        both = {
            name: {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": running.url}}
            for name in ("broken", "locks")
        }
        with override_settings(DISTLOCK=both):
            monkeypatch.setattr(lock_backends["broken"], "clock", lambda: 1 / 0)
            told = diagnose()
    assert [(each.id, each.backend) for each in told.findings] == [("distlock.D013", "broken")]
    assert any(each.backend == "locks" and each.what == "locking" for each in told.looked_at)


# Data that is lost


@pytest.fixture
def flushable() -> Iterator[Any]:
    """Give a client of a Redis of this test, on which the backend is."""
    with private_redis() as server, redis(server.url), Redis.from_url(server.url) as client:
        yield client


def test_redis_that_was_emptied_is_found_until_it_is_accepted(flushable: Any) -> None:
    """D022: it says since when, as often as it is asked, also where nothing is written."""
    before = lock_backends["locks"].clock()
    mark, text = look("data")
    assert (mark, text[:6]) == (Mark.OK, "marked")
    mark, text = look("data")
    assert (mark, text[:14]) == (Mark.OK, "all that there")
    flushable.flushall()
    for more in ([], ["--no-write"], []):
        ran = run("distlock_doctor", *more)
        assert ran.status == 1
        assert "ERROR distlock.D022 [locks] Redis has lost its data, between" in ran.out
        assert "distlock_doctor --accept-loss locks" in ran.out
        assert "docs/runbooks/failover.md" in ran.out
    assert f"{before:%Y-%m-%d %H}" in ran.out
    assert "D022" not in run("distlock_doctor", "--accept-loss", "locks").out
    assert "D022" not in findings()


def test_redis_that_was_emptied_and_marked_anew_is_found(flushable: Any) -> None:
    """By another project, say, which keeps its locks there too."""
    findings()
    flushable.flushall()
    assert lock_backends["locks"].mark_data()  # type: ignore[attr-defined]
    assert "D022" in findings()


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


def test_first_look_that_may_not_write_leaves_no_mark(flushable: Any) -> None:
    """And says that it can compare nothing yet."""
    assert "not marked yet" in run("distlock_doctor", "--no-write").out
    assert lock_backends["locks"].data_mark() is None  # type: ignore[attr-defined]


def test_loss_cannot_be_told_without_a_database(flushable: Any) -> None:
    """It says so, and the locks are looked at all the same."""
    with connections["default"].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table('seen')} RENAME TO elsewhere")
        try:
            ran = run("distlock_doctor")
            accepted = run("distlock_doctor", "--accept-loss", "locks")
        finally:
            cursor.execute(f"ALTER TABLE elsewhere RENAME TO {table('seen')}")
    assert "whether it was lost cannot be told" in ran.out
    assert "0 locks looked at" in ran.out
    assert "D022" not in ran.out
    assert accepted.status == 69


def test_only_redis_loses_data_that_way(postgresql: str) -> None:
    """And to accept a loss is to write."""
    migrate(postgresql)
    with database(postgresql):
        assert "is no backend of Redis" in run("distlock_doctor", "--accept-loss", "locks").err
        assert run("distlock_doctor", "--accept-loss", "locks", "--no-write").status == 2
