"""A PostgreSQL that stops, starts again, or ends our sessions: nothing is granted twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from django.db import connections, transaction

from django_distlock import BackendUnavailable, Lock, distlock
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import Later
from tests.contract.locking import eventually
from tests.integration.databases import ask, migrate

from .counting import EAGER, PATIENCE
from .servers import Restartable, restartable_postgres
from .sessions import close_ours, named


@pytest.fixture(scope="module")
def postgres() -> Iterator[Restartable]:
    """Give a server that the tests of this module stop and start."""
    with restartable_postgres() as server:
        yield server


@pytest.fixture
def restarted(postgres: Restartable, key: str) -> Iterator[tuple[Restartable, str, str]]:
    """Give a server of our own, an alias of it, and locks on it."""
    there = {
        "HOST": "127.0.0.1",
        "PORT": str(postgres.port),
        "NAME": "postgres",
        "USER": "postgres",
        "PASSWORD": "",
    }
    with alias_like("default", **there) as using, locks_on(using) as backend:
        migrate(using)
        try:
            yield postgres, using, backend
        finally:
            if not postgres.is_running:
                postgres.start()
            close_ours(backend)


def test_restart_between_two_locks(key: str, restarted: tuple[Restartable, str, str]) -> None:
    """Idle sessions have gone with the server; the next lock makes new ones, and fences rise."""
    server, using, backend = restarted
    # A release does not wait for the disk: the plug, pulled a moment later, may undo it.
    locks = {
        where: distlock(f"{key}:{where}", backend=backend, ttl=1, wait=PATIENCE, retry=EAGER)
        for where in ("thread", "loop", "transaction")
    }
    fences = {where: [_fence(lock, using, where)] for where, lock in locks.items()}
    server.stop()
    server.start()
    for where, lock in locks.items():
        if where == "transaction":
            # That of the thread itself is Django's to replace.
            connections[using].close()
        fences[where] += [_fence(lock, using, where) for _ in range(2)]
        assert not Later(lock.locked).result()
    assert fences == {where: [1, 2, 3] for where in locks}


def _fence(lock: Lock, using: str, where: str) -> int:
    if where == "loop":
        return asyncio.run(_awaited(lock))
    if where == "transaction":
        with transaction.atomic(using=using), lock as lease:
            return lease.fence
    with lock as lease:
        return lease.fence


async def _awaited(lock: Lock) -> int:
    async with lock as lease:
        return lease.fence


def test_lease_outlives_the_server(key: str, restarted: tuple[Restartable, str, str]) -> None:
    """A grant was on the disk before it was told: behind a restart it is still the holder's."""
    server, _using, backend = restarted
    locks = [
        distlock(f"{key}:{each}", backend=backend, ttl=60, wait=0) for each in ("extend", "release")
    ]
    leases = [lock.acquire() for lock in locks]
    server.stop()
    for lease in leases:
        with pytest.raises(BackendUnavailable):
            lease.extend()
        # What the store cannot say is not known; by its deadline the lease is held.
        assert lease.held
    server.start()
    for lock in locks:
        assert Later(_refused, lock).result(PATIENCE)
    leases[0].extend()
    assert Later(_refused, locks[0]).result(PATIENCE)
    for lock, lease in zip(locks, leases, strict=True):
        assert lease.release() is True
        assert lock.acquire().fence == lease.fence + 1


def _refused(lock: Lock) -> bool:
    """Try once, over a connection that the restart may have ended."""
    try:
        return lock.try_acquire() is None
    except BackendUnavailable:
        return lock.try_acquire() is None


def test_release_behind_a_restart_is_told(
    key: str, restarted: tuple[Restartable, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A block whose end meets no server keeps its result; the key is taken until its ttl."""
    server, _using, backend = restarted
    lock = distlock(key, backend=backend, ttl=4, wait=30, retry=EAGER)
    with lock as lease:
        server.stop()
    assert "could not be released" in caplog.text
    server.start()
    assert Later(lock.acquire).result(PATIENCE).fence == lease.fence + 1


def test_waiter_gets_the_key_behind_a_restart(
    key: str, restarted: tuple[Restartable, str, str]
) -> None:
    """A restart while somebody waits is waited for as well."""
    server, using, backend = restarted
    lock = distlock(key, backend=backend, ttl=60, wait=PATIENCE, retry=EAGER)
    holder = lock.acquire()
    waiting = Later(lock.acquire)
    assert eventually(lambda: _attempts(using) > 0, timeout=10)
    server.stop()
    server.start()
    assert holder.release() is True
    lease = waiting.result(PATIENCE)
    assert lease.fence == holder.fence + 1
    assert lease.release() is True


def _attempts(using: str) -> int:
    """Count the sessions beside ours: those of who waits."""
    others = "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = %s"
    ((count,),) = ask(using, others, "postgres")
    return int(count)


def test_waiter_is_told_at_its_deadline(key: str, restarted: tuple[Restartable, str, str]) -> None:
    """Where the server stays away, waiting ends with an error, and not with a grant."""
    server, using, backend = restarted
    lock = distlock(key, backend=backend, ttl=60, wait=4, retry=EAGER)
    with lock as lease:
        waiting = Later(lock.acquire)
        assert eventually(lambda: _attempts(using) > 0, timeout=10)
        server.stop()
        with pytest.raises(BackendUnavailable):
            waiting.result(PATIENCE)
        server.start()
        lease.extend()


def test_restart_amid_locks_grants_nothing_twice(
    key: str, restarted: tuple[Restartable, str, str]
) -> None:
    """Threads that lock all the time meet errors; never a second holder, never an old fence."""
    server, _using, backend = restarted
    lock = distlock(key, backend=backend, ttl=1, wait=PATIENCE, retry=EAGER)
    with lock_all_the_time(lock) as fences:
        for _ in range(2):
            wait_for_more(fences, 10)
            server.stop()
            server.start()
        wait_for_more(fences, 10)
    assert fences == sorted(set(fences))


def wait_for_more(fences: list[int], count: int) -> None:
    """Wait until the threads have held the lock so many times more."""
    enough = len(fences) + count
    assert eventually(lambda: len(fences) >= enough, PATIENCE)


@contextmanager
def lock_all_the_time(lock: Lock) -> Iterator[list[int]]:
    """Let threads take a lock again and again; give the fences as they come.

    Whoever holds it checks that nobody else does, by what no store has a part in.
    """
    holding: list[int] = []
    fences: list[int] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            with suppress(BackendUnavailable):
                lease = lock.acquire()
                holding.append(lease.fence)
                time.sleep(0.002)
                fences.append(lease.fence)
                # A machine that stood still for longer than the lease proves nothing.
                assert holding == [lease.fence] or not lease.held
                holding.remove(lease.fence)
                lease.release()

    working = [Later(work) for _ in range(4)]
    try:
        yield fences
    finally:
        over.set()
        for each in working:
            each.result(PATIENCE)


@pytest.mark.parametrize("server_functions", [True, False], ids=["functions", "orm"])
def test_ended_sessions_amid_calls_grant_nothing_twice(key: str, server_functions: bool) -> None:
    """An administrator ends our sessions again and again, in the middle of calls too."""
    with alias_like("default", **named(key)) as using:
        options = {"using": using, "server_functions": server_functions}
        with locks_on(using, OPTIONS=options) as backend:
            lock = distlock(key, backend=backend, ttl=1, wait=PATIENCE, retry=EAGER)
            with lock_all_the_time(lock) as fences:
                for _ in range(15):
                    ask("default", CUT, key)
                    wait_for_more(fences, 1)
            assert fences == sorted(set(fences))
            close_ours(backend)


CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
