"""Who hears that keys are free on PostgreSQL, and what happens where nobody can."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from psycopg import sql

from django_distlock import InvalidLockBackend, distlock
from django_distlock.backends import listening, notify
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.listening import NoWakeUps
from django_distlock.backends.notify import NotifyLine
from django_distlock.backends.queues import Queues
from django_distlock.conf import backend_config
from django_distlock.handler import lock_backends
from tests.contract.aliases import (
    abandon_connections,
    alias_like,
    counted_alias,
    locks_on,
    sessions,
)
from tests.contract.helpers import Later, contend, prompt, take, there
from tests.contract.locking import eventually
from tests.poolers import pgbouncer
from tests.processes import spawn
from tests.salted import SALT
from tests.services import folder, server_user
from tests.setups.servers import Restartable

from .databases import ask, migrate, new_database
from .wakeups import Rung, database_locks, listener_of
from .wires import wire


@pytest.fixture
def backend(server_functions: bool) -> Iterator[DatabaseBackend]:
    """Give a backend of its own to the test, on each path in turn."""
    with database_locks(server_functions=server_functions) as made:
        yield made


@pytest.fixture
def listener() -> Iterator[DatabaseBackend]:
    """Give a backend of its own to a test for which the path does not matter."""
    with database_locks() as made:
        yield made


def line_of(backend: DatabaseBackend) -> NotifyLine:
    """Return what listens."""
    watch = there(listener_of(backend)._watch)
    assert isinstance(watch.line, NotifyLine)
    return watch.line


def session_of(backend: DatabaseBackend) -> int:
    """Return the server's number for the session that listens."""
    return line_of(backend)._raw.info.backend_pid


def live(pid: int) -> bool:
    """Return whether the server has a session."""
    return bool(ask("default", "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))


@contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """Check that the block takes so long."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started >= seconds


def test_waiter_is_rung_by_another_process(backend: DatabaseBackend, key: str) -> None:
    """A release elsewhere rings the first waiter here, of this key and of no other."""
    target = "tests.integration.test_listening_postgresql:hold_until_told"
    with (
        spawn(target, key, backend.key_prefix) as worker,
        Rung(backend, key) as first,
        Rung(backend, key) as second,
        Rung(backend, f"{key}-other") as other,
    ):
        worker.wait_for("held")
        assert not first.comes(0)
        assert backend.listen(10) is True
        assert backend.is_listening
        # What was called out before went unheard, so every queue looks once.
        assert first.comes()
        assert other.comes()
        contend(backend, key, wanted=True)
        for each in (first, second, other):
            each.forget()
        worker.send("let go")
        assert first.comes()
        assert worker.result() is True
        assert backend.read(key) is None
        assert not second.comes(0)
        assert not other.comes(0)


def hold_until_told(key: str, prefix: str) -> bool:
    """Hold a lock until told; run in a process of its own."""
    with locks_on("default", KEY_PREFIX=prefix) as alias:
        backend = lock_backends[alias]
        grant = take(backend, key)
        print("held")
        input()
        return bool(backend.release(grant))


class CommentingCursor(psycopg.Cursor[Any]):
    """Puts a comment behind each statement, as OpenTelemetry's instrumentation does."""

    def execute(self, query: Any, *arguments: Any, **more: Any) -> Any:
        """Make a text of whatever it is, which bytes are not."""
        if isinstance(query, sql.Composable):
            query = query.as_string(self.connection)
        return super().execute(f"{query!s} /* traceparent */", *arguments, **more)


def test_instrumented_session_hears(listener: DatabaseBackend) -> None:
    """A tool may take the statements of every connection for texts."""

    def instrument(*, connection: Any, **_: Any) -> None:
        connection.connection.cursor_factory = CommentingCursor

    connection_created.connect(instrument)
    try:
        assert listener.listen(10) is True
        assert listener.is_listening
    finally:
        connection_created.disconnect(instrument)


def test_nothing_is_opened_before_somebody_waits(listener: DatabaseBackend, key: str) -> None:
    """Neither use without contention nor a losing attempt starts a thread or a session."""
    grant = take(listener, key)
    contend(listener, key)
    assert listener.release(grant) is True
    assert not listener.is_listening
    assert listener_of(listener)._watch is None


@pytest.mark.parametrize("own", [{}, {"application_name": "shop", "keepalives_count": 9}])
def test_sessions_are_named_and_watched(own: dict[str, Any], key: str) -> None:
    """Who looks at the server sees what they are for, and a server that vanishes is noticed."""
    count = own.get("keepalives_count", 3)
    with alias_like("default", OPTIONS=own) as using, database_locks(using) as backend:
        assert backend.listen(10) is True
        named = "SELECT application_name FROM pg_stat_activity WHERE pid = %s"
        # What the alias says comes first.
        name = own.get("application_name", "distlock wake-ups")
        assert ask("default", named, session_of(backend)) == [(name,)]
        _assert_watched(line_of(backend)._raw.fileno(), count)
        # So is what a lease is renewed on.
        with transaction.atomic(using=using):
            ask(using, "SELECT 1")
            take(backend, key)
        connection = backend._connections._every[0].connection
        _assert_watched(connection.connection.fileno(), count)


def _assert_watched(fileno: int, count: int = 3) -> None:
    with socket.socket(fileno=os.dup(fileno)) as ours:
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == count
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_idle_session_is_closed(
    listener: DatabaseBackend, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes when nobody has waited for a while, and another one comes with the next waiter."""
    monkeypatch.setattr(listening, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(listening, "LOOK_SECONDS", 0.05)
    with Rung(listener, key):
        assert listener.listen(10) is True
        pid = session_of(listener)
        assert not eventually(lambda: not live(pid), timeout=0.8)
    assert eventually(lambda: not live(pid), timeout=10)
    assert eventually(lambda: not listener.is_listening)
    with Rung(listener, key) as rung:
        assert listener.listen(10) is True
        assert rung.comes()
        assert session_of(listener) != pid


def test_listener_outlives_a_server_that_ends_idle_sessions(key: str) -> None:
    """It idles on purpose, for longer than a server may allow others to."""
    options = {"options": "-c idle_session_timeout=300"}
    with alias_like("default", OPTIONS=options) as using, locks_on(using) as alias:
        backend = lock_backends[alias]
        assert isinstance(backend, DatabaseBackend)
        with Rung(backend, key):
            assert backend.listen(10) is True
            pid = session_of(backend)
            assert not eventually(lambda: not live(pid), timeout=1)
        listener_of(backend).close_all()


def test_quiet_server_is_asked_now_and_then(
    listener: DatabaseBackend, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that finds nothing asks once, so that an idle listener costs next to nothing."""
    pings: list[int] = []
    looks: list[int] = []
    ping, readable = NotifyLine._ping, NotifyLine._readable

    def counted_ping(self: NotifyLine) -> None:
        pings.append(1)
        ping(self)

    def counted_look(self: NotifyLine, seconds: float) -> bool:
        looks.append(1)
        return readable(self, seconds)

    monkeypatch.setattr(NotifyLine, "_ping", counted_ping)
    monkeypatch.setattr(NotifyLine, "_readable", counted_look)
    monkeypatch.setattr(listening, "LOOK_SECONDS", 0.3)
    with Rung(listener, key):
        assert listener.listen(10) is True
        with at_least(3 * 0.3):
            assert eventually(lambda: len(pings) >= 4, timeout=20)
        # One that finds nothing, and one or two for the answer.
        assert len(looks) <= 3 * (len(pings) + 1)
        assert listener.is_listening


# What goes wrong


def test_ended_session_is_replaced(
    listener: DatabaseBackend, key: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One warning, everybody is rung to ask again by himself, and wake-ups come back."""
    monkeypatch.setattr(listening, "FIRST_PAUSE", 1.0)
    with Rung(listener, key) as rung:
        assert listener.listen(10) is True
        assert rung.comes()
        pid = session_of(listener)
        rung.forget()
        with caplog.at_level(logging.INFO, "django_distlock"):
            assert ask("default", "SELECT pg_terminate_backend(%s, 5000)", pid) == [(True,)]
            assert eventually(lambda: not listener.is_listening)
            assert rung.comes()
            with prompt():
                assert listener.listen(10) is False
            assert eventually(lambda: listener.is_listening, timeout=20)
            # Said behind that, by the thread that listens.
            assert eventually(lambda: _levels(caplog) == ["WARNING", "INFO"])
        assert "cannot receive wake-ups" in caplog.records[0].getMessage()
        assert session_of(listener) != pid
        grant = take(listener, key)
        contend(listener, key, wanted=True)
        assert eventually(rung.comes)
        rung.forget()
        Later(listener.release, grant).result()
        assert rung.comes()


def _levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.levelname for each in caplog.records if each.name == "django_distlock"]


def test_server_that_does_not_answer_is_given_up(
    key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ping's wait has an end: where nothing comes through, nobody relies on being woken."""
    monkeypatch.setattr(listening, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(notify, "ANSWER_SECONDS", 2.0)
    with (
        wire() as way,
        alias_like("default", **way.address) as using,
        database_locks(using) as backend,
        Rung(backend, key) as rung,
    ):
        assert backend.listen(10) is True
        assert rung.comes()
        rung.forget()
        way.hang()
        assert eventually(lambda: not backend.is_listening, timeout=20)
        assert rung.comes()
        way.flow()
        assert eventually(lambda: backend.is_listening, timeout=20)
        assert _levels(caplog) == ["WARNING"]
        assert "has not answered for 2 s" in caplog.records[0].getMessage()


def test_server_that_is_away_is_tried_again(
    key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a server nobody waits for a subscription; there is one warning however often."""
    monkeypatch.setattr(listening, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(listening, "LONGEST_PAUSE", 0.05)
    with wire() as way:
        address = way.address
    with (
        alias_like("default", **address) as using,
        database_locks(listen_using=using) as backend,
        Rung(backend, key),
    ):
        tried: list[int] = []
        listener = listener_of(backend)
        subscribe = listener._subscribe
        listener._subscribe = lambda: tried.append(1) or subscribe()  # type: ignore[func-returns-value]
        with prompt(5):
            assert backend.listen(30) is False
        assert eventually(lambda: len(tried) > 3, timeout=20)
        assert backend.listen(0) is False
        assert _levels(caplog) == ["WARNING"]


def test_closing_does_not_wait_for_anything(listener: DatabaseBackend, key: str) -> None:
    """Whoever drops the database ends a session that would hear for seconds more."""
    with Rung(listener, key) as rung:
        assert listener.listen(10) is True
        pid = session_of(listener)
        assert rung.comes()
        rung.forget()
        with prompt():
            listener_of(listener).close_all()
        assert not listener.is_listening
        assert eventually(lambda: not live(pid))
        # Who relied on it asks again, and that begins anew.
        assert rung.comes()
        assert listener.listen(10) is True


def test_dropping_the_database_ends_it(key: str) -> None:
    """The session that listens is no obstacle where a test run drops its database."""
    with (
        new_database() as name,
        alias_like("default", NAME=name) as using,
        database_locks(using) as backend,
    ):
        migrate(using)
        with Rung(backend, key):
            assert backend.listen(10) is True
            pid = session_of(backend)
            with connections[using]._nodb_cursor():
                assert eventually(lambda: not live(pid))


def test_d21_wake_ups_behind_pgbouncer(
    server_functions: bool, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """D21: one warning, and polling; or NOTIFY through the pooler, LISTEN by a direct alias."""
    with pgbouncer(default_pool_size=1) as address, alias_like("default", **address) as using:
        with database_locks(using, server_functions=server_functions) as backend:
            assert backend.supports_wakeups
            with Rung(backend, key):
                for _ in range(3):
                    assert backend.listen(10) is False
                assert not backend.is_listening
            grant = take(backend, key)
            waiting = Later(distlock(key, backend=backend.alias, wait=30).acquire)
            assert backend.release(grant) is True
            assert waiting.result().release() is True
            (warning,) = [each for each in caplog.records if each.name == "django_distlock"]
            assert "through a pooler" in warning.getMessage()
            assert "listen_using" in warning.getMessage()
        direct = {"server_functions": server_functions, "listen_using": "default"}
        with database_locks(using, **direct) as backend, Rung(backend, key) as rung:
            grant = take(backend, key)
            assert backend.listen(10) is True
            contend(backend, key, wanted=True)
            assert rung.comes()
            rung.forget()
            assert Later(backend.release, grant).result() is True
            assert rung.comes()
        # Nothing is left on the pooler's one session.
        assert ask(using, "SELECT * FROM pg_listening_channels()") == []


def test_session_that_cannot_be_set_up_is_closed() -> None:
    """Where a receiver of `connection_created` fails, nothing stays open."""

    def fail(connection: Any, **_: Any) -> None:
        if connection.alias == using:
            raise LookupError("not this one")

    with counted_alias() as using:
        connection_created.connect(fail)
        try:
            with pytest.raises(LookupError):
                NotifyLine(using, lambda: SALT, "default", Queues())
        finally:
            connection_created.disconnect(fail)
        assert eventually(lambda: not sessions(using), timeout=10)


def test_standby_means_asking_again() -> None:
    """A server that is not written to has no wake-ups, and says so."""
    with folder(owner=server_user()) as home:
        standby = Restartable(home)
        (home / "data" / "standby.signal").touch()
        standby.start()
        try:
            place = {"HOST": "127.0.0.1", "PORT": str(standby.port), "NAME": "postgres"}
            with (
                alias_like("default", USER="postgres", PASSWORD="", **place) as using,
                pytest.raises(NoWakeUps, match="standby.*listen_using"),
            ):
                NotifyLine(using, lambda: SALT, "default", Queues())
        finally:
            standby._running.close()


@pytest.mark.parametrize("unseen", [False, True], ids=["os.fork", "as uWSGI forks"])
def test_fork_leaves_the_line_to_the_parent(key: str, unseen: bool) -> None:
    """A child neither hears on its parent's line nor closes it, and opens one of its own."""
    with spawn("tests.integration.test_listening_postgresql:fork", key, unseen) as worker:
        said = worker.result()
    assert said == {
        # Where Python does not see the fork, the queues of the parent are still there.
        "child": {"listened": False, "queued": unseen, "own": True, "rung": True},
        "parent": {"listens": True, "same": True, "rung": True},
    }


def fork(key: str, unseen: bool) -> dict[str, Any]:
    """Listen over a fork; run in a process of its own."""
    backend = lock_backends["postgres"]
    assert isinstance(backend, DatabaseBackend)
    with Rung(backend, key) as rung:
        assert backend.listen(10)
        pid = session_of(backend)
        reads, writes = os.pipe()
        if (ctypes.PyDLL(None).fork if unseen else os.fork)() == 0:
            abandon_connections()
            gc.collect()
            said = {
                "listened": backend.is_listening,
                "queued": backend.queues.name_of(key) in backend.queues,
            }
            with Rung(backend, f"{key}-child") as own:
                listens = backend.listen(10)
                said["own"] = listens and session_of(backend) != pid
                said["rung"] = _rings(backend, f"{key}-child", own)
            listener_of(backend).close_all()
            os.write(writes, json.dumps(said).encode())
            os._exit(0)
        os.wait()
        child = json.loads(os.read(reads, 1000))
        parent = {
            "listens": backend.is_listening,
            "same": session_of(backend) == pid,
            "rung": _rings(backend, key, rung),
        }
    return {"child": child, "parent": parent}


def _rings(backend: DatabaseBackend, key: str, rung: Rung) -> bool:
    """Say whether a release rings a waiter."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    rung.comes()
    rung.forget()
    backend.release(grant)
    return rung.comes()


def test_test_case_does_not_listen(listener: DatabaseBackend, key: str) -> None:
    """In the transaction of a `TestCase` nothing is called out before a commit that never comes."""
    assert Later(listener.listen, 10).result() is True
    with as_test_case():
        assert listener.is_listening is False
        assert listener.listen(10) is False
        grant = take(listener, key)
        with Rung(listener, key) as rung:
            assert listener.release(grant) is True
            # So whoever waits in this process is told by the release itself.
            assert rung.comes(0)
    assert listener.is_listening is True
    listener_of(listener).close_all()
    with as_test_case():
        assert listener.listen(10) is False
        assert listener_of(listener)._watch is None


@contextmanager
def as_test_case() -> Iterator[None]:
    """Be inside of the transaction of a `TestCase`, which is rolled back."""
    with transaction.atomic():
        outermost: Any = connections["default"].atomic_blocks[0]
        # As Django's own marks it.
        outermost._from_testcase = True
        yield
        transaction.set_rollback(True)


# What can be configured


def test_bad_alias_to_listen_on_is_refused() -> None:
    """By the alias of the lock backend and the option's name, before anything is asked."""
    sqlite = "listen_using: 'sqlite' is a sqlite database. Only PostgreSQL has wake-ups"
    wrong: list[tuple[str, Any, str]] = [
        ("default", "nowhere", "listen_using: .*nowhere"),
        ("default", "", "listen_using must be a database alias, not ''"),
        ("default", 5, "listen_using must be a database alias, not 5"),
        ("default", "sqlite", sqlite),
        ("sqlite", "default", sqlite),
    ]
    for using, listen_using, message in wrong:
        options = {"using": using, "listen_using": listen_using}
        with (
            locks_on("default", OPTIONS=options) as alias,
            pytest.raises(InvalidLockBackend, match=rf"DISTLOCK\['{alias}'\]: {message}"),
        ):
            DatabaseBackend(backend_config(alias), **options)


def test_where_nobody_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With psycopg2, and on other databases, one asks again, and nothing is started."""

    class Psycopg2:
        __name__ = "psycopg2"

    with locks_on("default") as alias:
        assert lock_backends[alias].supports_wakeups is True
    monkeypatch.setattr(connections["default"], "Database", Psycopg2())
    for using in ("default", "sqlite", "mariadb"):
        if using in connections.settings:
            with locks_on(using) as alias:
                assert lock_backends[alias].supports_wakeups is False
                assert lock_backends[alias].listen(1) is False
                assert lock_backends[alias].is_listening is False


def test_closed_line_ends_a_hearing_at_once() -> None:
    """Another thread's `close` is heard, whatever the hearing would have waited for."""
    line = NotifyLine("default", lambda: SALT, "default", Queues())
    pid = line._raw.info.backend_pid
    hearing = Later(line.hear, 60)
    with prompt():
        Later(line.close).result()
        with pytest.raises(psycopg.OperationalError):
            hearing.result()
    for _ in range(2):
        line.close()
    assert eventually(lambda: not live(pid))
