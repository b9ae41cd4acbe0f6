"""Connections of our own: few, closed when nobody needs them, and nobody else's."""

from __future__ import annotations

import asyncio
import gc
import socket
import sqlite3
import sys
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

from django_distlock import Lock, Retry, distlock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.database import connections as distlock_connections
from django_distlock.database.borrowing import LockConnections, is_readable
from django_distlock.handler import lock_backends
from django_distlock.models import FenceCounter, HeldLock
from tests.contract.aliases import (
    alias_like,
    counted_alias,
    cut,
    in_a_fork,
    locks_on,
    session_of,
    sessions,
)
from tests.contract.helpers import Later, at_once, there
from tests.contract.locking import eventually
from tests.interrupting import Interrupted
from tests.processes import spawn
from tests.shop.models import Row

from .databases import ask, here, migrate, new_database, server

#: Patient, because 20 threads on a small machine take turns at a few connections.
PATIENT: dict[str, Any] = {"wait": 60, "retry": Retry(delay=0.01, cap=0.05)}


#: By what they are called here: an alias, and whether functions are called.
PATHS = {
    "functions": ("default", True), "orm": ("default", False),
    "mariadb": ("mariadb", False), "blocks": ("mariadb", True),
}  # fmt: skip


@pytest.fixture(params=["functions", "mariadb"])
def path(request: pytest.FixtureRequest) -> str:
    """Give each driver: a pool is the same whatever statements it carries."""
    chosen: str = request.param
    here(PATHS[chosen][0])
    return chosen


@contextmanager
def counted(path: str = "functions", **configured: Any) -> Iterator[tuple[str, str]]:
    """Give an alias whose sessions the server can tell from others, and locks on it."""
    like, server_functions = PATHS[path]
    with counted_alias(like) as using:
        options: dict[str, Any] = {"using": using, "server_functions": server_functions}
        if like == "default":
            # Who waits listens, and for half a minute longer: that session is not counted here.
            options["listen_using"] = like
        with locks_on(using, OPTIONS=options, **configured) as backend:
            yield using, backend


def lock_inside(using: str, lock: Lock) -> int:
    """Take a lock in a transaction of the caller; return its fence."""
    with transaction.atomic(using=using):
        Row.objects.using(using).exists()
        with lock as lease:
            lease.extend()
    return lease.fence


def exclude_each_other(using: str, backend: str, key: str, where: str) -> None:
    """Let four threads lock a key five times each, and count, or lock inside of transactions."""
    lock = distlock(key, backend=backend, **PATIENT)
    Row.objects.using(using).create(name=key)
    threads = defaultdict[int, set[int]](set)

    def add() -> None:
        for _ in range(5):
            with lock as lease:
                threads[lease.fence].add(threading.get_ident())
                lease.extend()
                row = Row.objects.using(using).get(name=key)
                row.value += 1
                row.save()

    def lock_in_a_transaction() -> None:
        for _ in range(5):
            with transaction.atomic(using=using):
                Row.objects.using(using).exists()
                with lock as lease:
                    threads[lease.fence].add(threading.get_ident())
                    lease.extend()

    with warnings.catch_warnings():
        # They may say that the caller's snapshot is older than the lock.
        warnings.simplefilter("ignore", RuntimeWarning)
        at_once([add if where == "outside" else lock_in_a_transaction] * 4)
    assert Row.objects.using(using).get(name=key).value == 20 * (where == "outside")
    # A lease that the commit could not release goes on in its thread, under the same fence.
    assert FenceCounter.objects.using(using).get(key=key).fence == len(threads)
    assert {len(each) for each in threads.values()} == {1}
    assert len(threads) == 20 or where == "inside"
    assert not HeldLock.objects.using(using).filter(key=key).exists()


# How many


@pytest.mark.parametrize("theirs", [20, 0], ids=["in transactions", "without connections"])
def test_twenty_threads_share_four_connections(key: str, theirs: int) -> None:
    """However many threads lock, ours are never more than `LOCK_CONNECTIONS`."""
    seen: list[int] = []
    over = threading.Event()
    with counted() as (using, backend):
        ready = threading.Barrier(20)

        def work(number: int) -> None:
            lock = distlock(f"{key}:{number}", backend=backend, **PATIENT)
            if theirs:
                connections[using].ensure_connection()
            ready.wait(60)
            for _ in range(3):
                if theirs:
                    lock_inside(using, lock)
                else:
                    lock.acquire().release()
            # None closes its own connection while another one works.
            ready.wait(60)

        def watch() -> None:
            while not over.is_set():
                seen.append(len(sessions(using)))
                time.sleep(0.005)

        watching = Later(watch)
        try:
            at_once(partial(work, number) for number in range(20))
        finally:
            over.set()
            watching.result()
        assert lock_backends[backend].config.lock_connections == 4
        assert theirs < max(seen) <= theirs + 4
        if theirs:
            # Ours end with those of their threads.
            assert eventually(lambda: not sessions(using), timeout=5)


def test_stuck_waiters_hold_up_no_other_lease(key: str, path: str) -> None:
    """Whatever holds all of `LOCK_CONNECTIONS` up, renewals wait for none of them.

    Nor does a thread of ours, which notices a rollback, with the release behind it.
    """
    with counted(path, LOCK_CONNECTIONS=1) as (using, alias):
        backend: Any = lock_backends[alias]
        rolled_back = distlock(f"{key}-b", backend=alias).acquire()
        # The only one is in use for as long as the block lasts.
        with distlock(key, backend=alias, ttl=3) as lease, backend._connections.use() as taken:
            first = lease.expires_at
            with suppress(Interrupted), transaction.atomic(using=using):
                rolled_back.release()
                raise Interrupted
            held = HeldLock.objects.using(using).filter(key=rolled_back.key)
            assert taken != using
            assert eventually(lambda: not held.exists(), timeout=5)
            assert eventually(lambda: lease.expires_at != first, timeout=6)


# How long


def test_unused_connection_is_closed(key: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that nobody has used for a while is closed, and opened again when needed."""
    monkeypatch.setattr(distlock_connections, "IDLE_SECONDS", 0.3)
    with counted(path) as (using, backend):
        lock = distlock(key, backend=backend)
        for fence in (1, 2):
            began = time.monotonic()
            assert lock_inside(using, lock) == fence
            # Both have to be seen in time, for which a busy machine may be too slow.
            assert len(sessions(using)) == 2 or time.monotonic() - began > 0.3
            assert eventually(lambda: sessions(using) == {session_of(using)}, timeout=5)


def test_asynchronous_locks_share_four_connections(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks have no connections: all of them work on ours, which time alone closes."""
    monkeypatch.setattr(distlock_connections, "IDLE_SECONDS", 1.0)

    async def work() -> None:
        async def one(number: int) -> None:
            async with distlock(f"{key}:{number}", backend=backend, **PATIENT) as lease:
                await lease.aextend()

        await asyncio.gather(*(one(number) for number in range(20)))

    with counted() as (using, backend):
        asyncio.run(work())
        assert 1 <= len(sessions(using)) <= 4
        assert eventually(lambda: not sessions(using), timeout=10)


def test_connection_in_use_outlives_the_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts from the last use: who locks again and again keeps the connection."""
    monkeypatch.setattr(distlock_connections, "IDLE_SECONDS", 1.0)
    with counted() as (using, backend):
        lock = distlock(key, backend=backend)
        lock_inside(using, lock)
        ours = sessions(using)
        now = time.monotonic()
        until, longest = now + 2.5, 0.0
        while now < until:
            time.sleep(0.05)
            lock_inside(using, lock)
            now, before = time.monotonic(), now
            longest = max(longest, now - before)
        # On a busy machine two locks may be further apart than that.
        assert sessions(using) == ours or longest > 0.9


def test_closing_connections_leaves_nothing(key: str, path: str) -> None:
    """`connections.close_all()` in the thread that used them leaves no session.

    Nor is anything left to the garbage collector, in whose midst a signal is lost: Django's objects
    have finalisers.
    """
    with counted(path) as (using, backend):
        lock = distlock(key, backend=backend)
        lock_inside(using, lock)
        assert len(sessions(using)) == 2
        connections[using].close()
        gc.collect()
        assert eventually(lambda: not sessions(using), timeout=5)
        lock_inside(using, lock)
        pool = lock_backends[backend]._connections  # type: ignore[attr-defined]
        gone = [weakref.ref(own.connection) for own in pool._every]
        assert gone
        pool.close_all()
        assert eventually(lambda: all(each() is None for each in gone))


def test_connections_of_frozen_time_are_closed(
    key: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that freeze time in tests let `time.monotonic` give the seconds since 1970.

    The database of such a test could not be dropped.
    """
    with counted(path) as (using, backend):
        lock = distlock(key, backend=backend)
        with monkeypatch.context() as frozen:
            frozen.setattr(time, "monotonic", time.time)
            lock_inside(using, lock)
            lock_backends[backend].queues.note_wanted(key)
        assert len(sessions(using)) == 2
        assert lock_backends[backend].queues.rest(key, 1.0) <= 1
        lock_backends[backend]._connections.close_all()  # type: ignore[attr-defined]
        assert eventually(lambda: sessions(using) == {session_of(using)}, timeout=5)


def test_connections_are_closed_from_an_event_loop_too(
    key: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the end of Django's connection is noticed in an event loop, ours go with it quietly."""
    unraisable: list[str] = []
    # What other tests have left is not told here.
    gc.collect()
    # As text, because the error would keep alive what it is about.
    monkeypatch.setattr(
        sys, "unraisablehook", lambda said: unraisable.append(f"{said.exc_value!r}")
    )
    kept: list[Any] = []

    def work() -> None:
        lock_inside(using, distlock(key, backend=backend))
        kept.append(connections[using].connection)

    async def let_go() -> None:
        kept.clear()
        gc.collect()

    with counted(path) as (using, backend):
        # It ends with its connections closed, and with one object of the driver's left.
        Later(work).result()
        assert eventually(lambda: len(sessions(using)) == 1)
        asyncio.run(let_go())
        assert eventually(lambda: not sessions(using), timeout=5)
        gc.collect()
    assert unraisable == []


# Sessions that the server ends


@pytest.mark.parametrize("where", ["thread", "own", "async"])
@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_session_cut_while_idle_is_replaced_unseen(key: str, path: str, where: str) -> None:
    """Between two operations the server ends the session: nothing was sent, so nobody is told."""
    with counted(path) as (using, alias):
        backend = lock_backends[alias]
        ask_store = _asker(where, backend, using)

        def behind_a_cut(operation: Callable[..., Any], *args: Any) -> Any:
            spared = {session_of(using)} if where == "own" else set()
            cut(using, sessions(using) - spared)
            return ask_store(operation, *args)

        grant = ask_store(backend.acquire, key, new_token(), 60)
        assert isinstance(grant, Grant)
        other = behind_a_cut(backend.acquire, f"{key}-b", new_token(), 60)
        assert isinstance(other, Grant)
        assert other.fence == 1
        assert there(behind_a_cut(backend.extend, grant)).token == grant.token
        assert there(behind_a_cut(backend.read, key)).token == grant.token
        assert behind_a_cut(backend.release, grant) is True


def test_session_with_a_notification_is_kept(key: str) -> None:
    """What the server says on the thread's idle session does not end it: the caller listens."""
    with counted() as (using, alias):
        ask(using, f"LISTEN {key}")
        session = session_of(using)
        ask("default", f"NOTIFY {key}, 'hello'")
        raw = connections[using].connection
        assert eventually(lambda: is_readable(raw.fileno()))
        with distlock(key, backend=alias, wait=0):
            assert session_of(using) == session
        assert [each.payload for each in raw.notifies(timeout=5, stop_after=1)] == ["hello"]


def test_pool_of_ended_sessions_is_passed_over(key: str) -> None:
    """Each session of the project's pool is over, and none of them is told to who tries once."""
    with counted_alias() as using:
        connections.settings[using]["OPTIONS"]["pool"] = {"min_size": 3, "max_size": 3}
        try:
            with locks_on(using) as backend:
                distlock(key, backend=backend, wait=0).acquire().release()
                assert eventually(lambda: len(sessions(using)) >= 3)
                connections[using].close()
                cut(using, sessions(using))
                distlock(key, backend=backend, wait=0).acquire().release()
        finally:
            pooled: Any = connections[using]
            pooled.close_pool()


def _asker(where: str, backend: BaseLockBackend, using: str) -> Callable[..., Any]:
    """Return what calls an operation on the thread's connection, or on one of ours."""

    def inside(operation: Callable[..., Any], *args: Any) -> Any:
        with transaction.atomic(using=using):
            return operation(*args)

    def awaited(operation: Callable[..., Any], *args: Any) -> Any:
        return asyncio.run(backend.threads.run(operation, *args))

    def plain(operation: Callable[..., Any], *args: Any) -> Any:
        return operation(*args)

    return {"thread": plain, "own": inside, "async": awaited}[where]


def test_default_timeout_of_sockets_holds_up_nothing(key: str, path: str) -> None:
    """A program may set one, as `celery beat` does. Who looks at an idle session does not wait."""
    with spawn(
        "tests.integration.test_connections:lock_under_a_default_timeout", key, path
    ) as worker:
        assert worker.result(60) == [1, 2, 3]


def lock_under_a_default_timeout(key: str, path: str) -> list[int]:
    """Lock on one of our connections again and again."""
    socket.setdefaulttimeout(100)
    with counted(path) as (using, backend):
        lock = distlock(key, backend=backend, wait=0)
        return [lock_inside(using, lock) for _ in range(3)]


# Forks


def test_child_leaves_the_parents_connections_alone(key: str, path: str) -> None:
    """A forked child locks on connections of its own, and its end closes none of the parent's."""
    with spawn("tests.integration.test_connections:fork_and_lock", key, path) as worker:
        said = worker.result(60)
    assert said["child"] == {"fence": 1, "own": True, "status": 0}
    assert said["before"] == said["after"]
    assert said["fences"] == [1, 2]


def fork_and_lock(key: str, path: str) -> dict[str, Any]:
    """Lock, fork a child that locks, and lock again."""
    with counted(path) as (using, backend):
        lock = distlock(f"{key}:parent", backend=backend, wait=0)
        fences = [lock_inside(using, lock)]
        before = sessions(using)
        connections[PATHS[path][0]].close()

        def be_the_child() -> dict[str, Any]:
            gc.collect()
            fence = lock_inside(using, distlock(f"{key}:child", backend=backend, wait=0))
            said = {"fence": fence, "own": len(sessions(using) - before) == 2}
            connections.close_all()
            return said

        # It ends as an interpreter does.
        child, status = in_a_fork(be_the_child, at_once=False)
        after = sessions(using)
        fences.append(lock_inside(using, lock))
    return {
        "before": sorted(before),
        "after": sorted(after),
        "fences": fences,
        "child": {**child, "status": status},
    }


# Isolation


@pytest.mark.parametrize(
    ("server_functions", "level"), [(True, "serializable"), (False, "repeatable read")]
)
def test_servers_own_isolation_is_no_obstacle(
    postgresql: str, server_functions: bool, level: str
) -> None:
    """Where the database's default is another isolation, locks protect as everywhere."""
    name = connections[postgresql].settings_dict["NAME"]
    migrate(postgresql)
    with connections[postgresql].schema_editor() as editor:
        editor.create_model(Row)
    connections[postgresql].close()
    with server() as raw:
        raw.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
    assert ask(postgresql, "SHOW transaction_isolation") == [(level,)]
    options = {"using": postgresql, "server_functions": server_functions}
    with locks_on(postgresql, OPTIONS=options) as backend:
        for where in ("outside", "inside"):
            exclude_each_other(postgresql, backend, where, where)
    assert ask(postgresql, "SHOW transaction_isolation") == [(level,)]


def test_session_that_may_do_less_is_no_obstacle(key: str) -> None:
    """What the caller's session may not, a connection of ours may: acquire, extend, release."""
    for change in ("ROLE pg_monitor", "default_transaction_read_only = on"):
        with alias_like("default") as using, locks_on(using) as backend:
            with distlock(key, backend=backend):
                ask(using, f"SET {change}")
            with distlock(key, backend=backend, wait=0) as lease:
                lease.extend()
            assert not distlock(key, backend=backend).locked()


def test_file_that_was_replaced_has_no_locks_any_more(sqlite: str, key: str) -> None:
    """With WAL, SQLite goes on in the old one, where nobody sees it who has opened the new one."""
    file = Path(connections[sqlite].settings_dict["NAME"])
    with (
        alias_like(sqlite, OPTIONS={"init_command": "PRAGMA journal_mode=WAL"}) as using,
        locks_on(using) as backend,
    ):
        migrate(using)
        lock = distlock(key, backend=backend, wait=0)
        assert lock.acquire().release()
        ask(using, "PRAGMA wal_checkpoint(TRUNCATE)")
        copy = file.with_suffix(".copy")
        copy.write_bytes(file.read_bytes())
        copy.replace(file)
        with closing(sqlite3.connect(file)) as restored, restored:
            restored.execute("DELETE FROM django_distlock_heldlock")
        lease = lock.acquire()
        with closing(sqlite3.connect(file)) as restored:
            (held,) = restored.execute("SELECT count(*) FROM django_distlock_heldlock").fetchone()
        assert held == 1
        assert lease.release()


def test_transaction_that_took_too_long_for_the_server_is_tried_again(postgresql: str) -> None:
    """`transaction_timeout` of PostgreSQL 17 ends the session, also one that waits for others."""
    migrate(postgresql)
    ask(postgresql, "CREATE FUNCTION ended() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'ended' USING ERRCODE = '25P04'; END $$")  # fmt: skip
    ask(postgresql, "CREATE TRIGGER ended BEFORE INSERT ON django_distlock_heldlock"
        " FOR EACH ROW EXECUTE FUNCTION ended()")  # fmt: skip
    with locks_on(postgresql) as backend:
        waiter = Later(distlock("key", backend=backend, wait=60).acquire)
        assert not eventually(lambda: waiter.is_done, timeout=1)
        ask(postgresql, "DROP TRIGGER ended ON django_distlock_heldlock")
        assert waiter.result().release()


# Ends


def test_database_can_be_dropped_behind_asynchronous_locks(key: str) -> None:
    """A test run drops its database as Django does, though ours are idle in it."""

    async def work() -> None:
        async with distlock(key, backend=backend) as lease:
            await lease.aextend()

    with new_database() as name, alias_like("default", NAME=name) as using:
        migrate(using)
        with locks_on(using) as backend:
            asyncio.run(work())
            connections[using].close()
            assert _sessions_in(name) > 0
            # What `destroy_test_db` does, without its printing and its going back to another name.
            creation: Any = connections[using].creation
            creation._destroy_test_db(name, verbosity=0)
        with server() as raw:
            assert not raw.execute(
                "SELECT 1 FROM pg_database WHERE datname = %s", [name]
            ).fetchall()


def _sessions_in(database: str) -> int:
    with server() as raw:
        row = raw.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [database]
        ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("kind", ["functions", "mariadb", "sqlite"])
def test_many_locks_leave_nothing(
    request: pytest.FixtureRequest, key: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Behind 300 locks from 20 threads there is no session, no thread, no file and no record."""
    monkeypatch.setattr(distlock_connections, "IDLE_SECONDS", 0.3)
    with _store(request, kind) as (using, backend):
        threads = set(threading.enumerate())

        def work(number: int) -> int:
            lock, last = distlock(f"{key}:{number}", backend=backend, **PATIENT), 0
            for count in range(15):
                if count % 5 or kind == "sqlite":
                    with lock as lease:
                        fence = lease.fence
                else:
                    fence = lock_inside(using, lock)
                # A release that still waits for a connection is not made: the lease goes on.
                assert fence in (last, last + 1)
                last = fence
            return last

        threads_of_locks = [Later(work, number) for number in range(20)]
        fences = [thread.result(120) for thread in threads_of_locks]
        connections[using].close()
        assert eventually(lambda: _open(using) == 0, timeout=10), _open(using)
        # The timer and the heartbeat stay for ten seconds behind the last lease.
        expected = threads | _workers()
        assert eventually(lambda: set(threading.enumerate()) <= threads | _workers(), timeout=60), [
            each.name for each in threading.enumerate() if each not in expected
        ]
        counters = FenceCounter.objects.using(using).filter(key__startswith=key)
        assert sorted(counter.fence for counter in counters) == sorted(fences)
        assert max(fences) > 7
        assert not HeldLock.objects.using(using).filter(key__startswith=key).exists()


@contextmanager
def _store(request: pytest.FixtureRequest, kind: str) -> Iterator[tuple[str, str]]:
    if kind == "sqlite":
        using = request.getfixturevalue("sqlite")
        migrate(using)
        with locks_on(using) as backend:
            yield using, backend
    else:
        here(PATHS[kind][0])
        with counted(kind) as made:
            yield made


def _workers() -> set[threading.Thread]:
    """Return the threads that a process keeps: for connections, releases and signals."""
    kept = ("distlock-connections", "distlock-releases", "distlock-signals")
    return {each for each in threading.enumerate() if each.name.startswith(kept)}


def _open(using: str) -> int:
    """Count what this process has open: sessions, or files."""
    if connections[using].vendor != "sqlite":
        return len(sessions(using))
    # SQLite keeps a file open for statements that only the garbage collector finds.
    gc.collect()
    file = str(connections[using].settings_dict["NAME"])
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += str(each.readlink()).startswith(file)
        except OSError:
            continue
    return found


def test_aliases_that_another_thread_adds_disturb_nobody() -> None:
    """A project with a database for each tenant adds them while it runs."""
    over = threading.Event()

    def add() -> None:
        while not over.is_set():
            for number in range(50):
                connections.settings[f"tenant{number}"] = connections.settings["default"]
            for number in range(50):
                del connections.settings[f"tenant{number}"]

    adding = Later(add)
    try:
        connection = connections["default"]
        assert all(connection in distlock_connections.opened_here() for _ in range(20_000))
    finally:
        over.set()
        adding.result()


class _Prepared(Exception):
    """Raised where a pool would find out what it needs."""


def test_pool_prepares_for_a_database_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is a legal NAME on PostgreSQL, and not the mark of a pool that has not prepared."""

    class Pool(LockConnections):
        def prepare(self) -> None:
            raise _Prepared

    monkeypatch.setitem(connections["default"].settings_dict, "NAME", None)
    with pytest.raises(_Prepared), Pool("default", 1).use():
        pass
