"""A PostgreSQL that is killed under locks that last for a session: no fence comes twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from django.db import connections

from django_distlock import LockLost, distlock
from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.core.records import clock_fence
from django_distlock.models import FenceCounter
from tests.contract.aliases import alias_like
from tests.contract.helpers import PATIENCE, take
from tests.contract.locking import eventually
from tests.keeper import children
from tests.setups.servers import Restartable, restartable_postgres

from .databases import migrate
from .test_advisory_sessions import advisory

pytestmark = pytest.mark.faults

#: What writes commits to the disk that nobody waits for.
WAL_WRITER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"


@contextmanager
def mortal_alias() -> Iterator[tuple[Restartable, str]]:
    """Give a server of our own, which writes late what nobody waits for, and an alias of it."""
    with restartable_postgres() as server:
        there = {
            "HOST": "127.0.0.1",
            "PORT": str(server.port),
            "NAME": "postgres",
            "USER": "postgres",
            "PASSWORD": "",
        }
        with psycopg.connect(server.url, autocommit=True) as raw:
            # It starts behind the server.
            assert eventually(lambda: bool(raw.execute(WAL_WRITER).fetchall()), PATIENCE)
            ((wal_writer,),) = raw.execute(WAL_WRITER).fetchall()
            os.kill(wal_writer, signal.SIGSTOP)
        with alias_like("default", **there) as using:
            migrate(using)
            try:
                yield server, using
            finally:
                with suppress(ProcessLookupError):
                    os.kill(wal_writer, signal.SIGCONT)
                if not server.is_running:
                    server.start()


@pytest.fixture
def mortal() -> Iterator[tuple[Restartable, AdvisoryBackend]]:
    """Give such a server, and locks on it."""
    with mortal_alias() as (server, using), advisory(using) as backend:
        yield server, backend


def kill(server: Restartable) -> None:
    """Kill the server and all of its processes, without a word to any of them."""
    master = int((server._home / "data" / "postmaster.pid").read_text().split()[0])
    doomed = [master, *children(master)]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in doomed), 10)
    server._running.close()
    server._is_running = False


def counter(backend: AdvisoryBackend, key: str) -> int:
    """Read a counter on a new connection; 0: there is none."""
    connections[backend.using].close()
    rows = FenceCounter.objects.using(backend.using).filter(key=key)
    return rows.values_list("fence", flat=True).first() or 0


def test_fences_rise_over_a_lost_counter(
    mortal: tuple[Restartable, AdvisoryBackend], key: str
) -> None:
    """What a crash undoes of a counter is made up for by the clock; every holder loses its lock."""
    server, backend = mortal
    lock = distlock(key, backend=backend.alias, wait=0)
    fences = []
    for _ in range(20):
        with lock as lease:
            fences.append(lease.fence)
    lease, idle = lock.acquire(), take(backend, f"{key}-idle")
    fences.append(lease.fence)
    backend.release(idle)
    kill(server)
    assert eventually(lambda: lease.is_lost)
    with pytest.raises(LockLost):
        lease.check()
    server.start()
    # Or this would prove nothing.
    assert counter(backend, key) < lease.fence
    assert lease.release() is False
    # Sessions that idled or held are gone with the server; the next attempts open new ones.
    take(backend, f"{key}-idle")
    for _ in range(3):
        with lock as after:
            fences.append(after.fence)
    assert fences == sorted(set(fences))


def test_fences_rise_where_the_counter_is_ahead_of_the_clock(
    mortal: tuple[Restartable, AdvisoryBackend], key: str
) -> None:
    """What the clock cannot make up for is on the disk before it is told."""
    server, backend = mortal
    ahead = clock_fence(take(backend, f"{key}-now").acquired_at) + 10**12
    backend.raise_fences(ahead, key=key)
    fences = []
    for _ in range(5):
        grant = take(backend, key)
        fences.append(grant.fence)
        backend.release(grant)
    assert fences == [ahead + number for number in range(1, 6)]
    kill(server)
    server.start()
    assert counter(backend, key) == fences[-1]
    assert take(backend, key).fence == fences[-1] + 1
