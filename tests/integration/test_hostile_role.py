"""A role that may connect to the database, and no more, is in nobody's way and learns no keys."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections
from psycopg import sql

from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.notify import NotifyLine
from django_distlock.core.errors import LockError
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.contract.aliases import alias_like
from tests.contract.helpers import contend, extend, take
from tests.salted import SALT, SESSIONS, call_of, channel_of, number_of, turn_of

from .databases import ask, migrate, server
from .test_advisory_sessions import advisory, session_of
from .test_checks_schema import found
from .wakeups import LOCKS, Rung, database_locks

KEY = "invoice:42"
NAME = f"distlock:{KEY}"


@pytest.fixture
def using(postgresql: str) -> str:
    """Give a database with the tables of locks."""
    migrate(postgresql)
    return postgresql


@pytest.fixture
def stranger(using: str) -> Iterator[psycopg.Connection]:
    """Give a session of a role that was granted nothing."""
    name = f"stranger_{secrets.token_hex(4)}"
    with server() as raw:
        raw.execute(f"CREATE ROLE {name} LOGIN")
    database = connections[using].settings_dict["NAME"]
    try:
        with server(database, user=name) as raw:
            yield raw
    finally:
        with server() as raw:
            raw.execute(f"DROP ROLE {name}")


@contextmanager
def every_backend(using: str) -> Iterator[list[BaseLockBackend]]:
    """Give locks by functions, by the ORM and by sessions."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(database_locks(using)),
            stack.enter_context(database_locks(using, server_functions=False)),
            stack.enter_context(advisory(using)),
        ]


def plain(salt: str) -> int:
    """Return the number that a key has without a secret."""
    digest = hashlib.sha256(f"{salt}\0{NAME}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def test_number_of_a_key_cannot_be_told(using: str, stranger: psycopg.Connection) -> None:
    """Whoever knows the key and all but the secret blocks nobody."""
    salts = [f"django_distlock:{LOCKS}", f"django_distlock:{LOCKS}:look"]
    fences = '"public"."django_distlock_fencecounter"'
    salts += [f"django_distlock:session:{fences}", f"django_distlock:session:{fences}:force"]
    for salt in salts:
        stranger.execute("SELECT pg_advisory_lock(%s)", [plain(salt)])
    with every_backend(using) as backends:
        for backend in backends:
            take(backend, KEY, bound=0.05)
            assert backend.force_release(KEY) is not None


def test_what_is_called_out_is_not_heard(using: str, stranger: psycopg.Connection) -> None:
    """Neither on the channel of before, nor as a name by whoever knows the channel."""
    stranger.execute(f'LISTEN "{LOCKS}"')
    with server(connections[using].settings_dict["NAME"]) as ear, every_backend(using) as backends:
        ear.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel_of(using))))
        for backend in backends[:2]:
            grant = take(backend, KEY)
            contend(backend, KEY, wanted=True)
            assert backend.release(grant) is True
        stranger.execute(f"NOTIFY \"{LOCKS}\", 'the last'")
        theirs = [each.payload for each in stranger.notifies(timeout=10, stop_after=1)]
        assert theirs == ["the last"]
        heard = [each.payload for each in ear.notifies(timeout=10, stop_after=2)]
    assert heard == [call_of(using, NAME)] * 2
    assert len(heard[0]) == 32
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        stranger.execute(f"SELECT seed FROM {SALT}")


def test_no_view_of_the_server_shows_a_key(using: str, stranger: psycopg.Connection) -> None:
    """While it is held, waited for and listened to."""
    with every_backend(using) as backends, ExitStack() as stack:
        for number, backend in enumerate(backends):
            take(backend, f"{KEY}-{number}")
            contend(backend, f"{KEY}-{number}", wanted=True)
            if isinstance(backend, DatabaseBackend):
                stack.enter_context(Rung(backend, KEY))
                assert backend.listen(10)
        for view in ("pg_stat_activity", "pg_locks", "pg_prepared_statements", "pg_stats"):
            rows = stranger.execute(f"SELECT v::text FROM {view} v").fetchall()
            assert not [row for (row,) in rows if "invoice" in row]


def test_request_to_stop_cannot_be_forged(using: str, stranger: psycopg.Connection) -> None:
    """Not even by whoever has guessed the fence; an operator's is heard."""
    with advisory(using) as backend, advisory(using) as operator:
        grant = take(backend, KEY)
        pid = session_of(backend, grant).pid
        seen = "SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks WHERE pid = %s"
        for (number,) in stranger.execute(seen + " AND locktype = 'advisory'", [pid]).fetchall():
            stop = f"stop {number} {grant.fence}"
            stranger.execute("SELECT pg_notify(%s, %s)", [f"distlock_{pid}", stop])
        extended = extend(backend, grant)
        assert not extended.stop_requested
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stranger.execute(f"UPDATE {SESSIONS} SET stop_requested_at = 1")
        assert operator.request_stop(KEY) is not None
        asked = backend.extend_many([grant])[0]
        assert isinstance(asked, Grant)
        assert asked.stop_requested


def test_flood_reaches_nobody(
    using: str, stranger: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent on channels that can be guessed is not even read; a release is."""
    heard: list[str] = []
    hear = NotifyLine.hear

    def noted(self: NotifyLine, seconds: float) -> list[str]:
        calls = hear(self, seconds)
        heard.extend(calls)
        return calls

    monkeypatch.setattr(NotifyLine, "hear", noted)
    with database_locks(using) as backend, Rung(backend, KEY) as rung:
        assert backend.listen(10)
        grant = take(backend, KEY)
        contend(backend, KEY, wanted=True)
        rung.forget()
        for channel in (LOCKS, "distlock"):
            flood = "SELECT pg_notify(%s, n::text) FROM generate_series(1, 5000) n"
            stranger.execute(flood, [channel])
        assert backend.release(grant) is True
        assert rung.comes()
    assert heard == [call_of(using, NAME)]


def test_call_that_means_nobody_wakes_nobody(using: str) -> None:
    """Also on the channel itself, which only who may read the secret can name."""
    with database_locks(using) as backend, Rung(backend, KEY) as rung:
        assert backend.listen(10)
        rung.forget()
        for payload in ("", KEY, NAME, call_of(using, NAME + "0"), "é" * 2000):
            ask(using, "SELECT pg_notify(%s, %s)", channel_of(using), payload)
        assert not rung.comes(0.2)
        ask(using, "SELECT pg_notify(%s, %s)", channel_of(using), call_of(using, NAME))
        assert rung.comes()


# The secret itself


def test_secret_is_the_databases_own(using: str) -> None:
    """`flush` keeps it, and so does `migrate`."""
    before = turn_of(using, NAME), number_of(using, NAME), channel_of(using)
    quietly = {"interactive": False, "inhibit_post_migrate": True, "verbosity": 0}
    call_command("flush", database=using, **quietly)
    migrate(using)
    assert (turn_of(using, NAME), number_of(using, NAME), channel_of(using)) == before


def test_without_the_secret_nothing_is_granted(using: str) -> None:
    """Nor is it contention; `migrate` makes a new one."""
    ask(using, f"DELETE FROM {SALT}")
    with every_backend(using) as backends:
        for backend in backends:
            with pytest.raises(LockError, match=f"{SALT} is empty"):
                backend.acquire(KEY, new_token(), 30)
            assert backend.read(KEY) is None
    assert [f"{SALT}" in text for text in found(using).values()] == [True]
    migrate(using)
    with every_backend(using) as backends:
        for backend in backends:
            assert backend.release(take(backend, KEY)) is True


def test_secret_that_everybody_reads_is_told(using: str) -> None:
    """By a check, which names the table and whom it was granted to."""
    assert found(using) == {}
    ask(using, f"GRANT SELECT ON {SALT} TO PUBLIC")
    told = found(using)
    assert list(told) == ["distlock.W114"]
    assert SALT in told["distlock.W114"]


# Session locks


def test_rows_of_ended_sessions_go(using: str) -> None:
    """A cleanup removes them, and leaves those of sessions that live."""
    with advisory(using) as backend:
        grants = [take(backend, f"{KEY}-{number}") for number in range(2)]
        gone, kept = (session_of(backend, grant).pid for grant in grants)
        ask(using, "SELECT pg_terminate_backend(%s, 5000)", gone)
        backend.cleanup(grants[0].acquired_at)
        assert ask(using, f"SELECT pid FROM {SESSIONS}") == [(kept,)]
        assert isinstance(backend.extend(grants[1]), Grant)


@pytest.mark.parametrize(
    "extend",
    [
        lambda backend, grant: backend.extend(grant),
        lambda backend, grant: backend.extend_many([grant])[0],
    ],
    ids=["extend", "extend_many"],
)
def test_locked_table_of_sessions_costs_no_lease(
    using: str, extend: Callable[[AdvisoryBackend, Grant], object]
) -> None:
    """Who holds a key needs no table for that: only a request to stop comes later."""
    with advisory(using) as backend, alias_like(using) as beside:
        grant = take(backend, KEY)
        connections[beside].set_autocommit(False)
        ask(beside, f"LOCK TABLE {SESSIONS} IN ACCESS EXCLUSIVE MODE")
        assert isinstance(extend(backend, grant), Grant)
        connections[beside].rollback()
        assert isinstance(contend(backend, KEY), Contended)
