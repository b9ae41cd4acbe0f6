"""A lease belongs to the process that took it, and ends with it where that can be promised."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from django_distlock import BackendUnavailable, Lease, Lock
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.conftest import DECLARED
from tests.processes import WHOLE_END, Process, spawn

from .helpers import HAS_TTL, SHARED, Later
from .locking import eventually, grantable, lock_of, taken

pytestmark = SHARED

WORKERS = "tests.contract.lock_workers"


@pytest.mark.parametrize(
    "how", ["main thread", "exit", "ended thread", "asyncio", "multiprocessing"]
)
def test_normal_exit_gives_back_what_is_held(
    lock: Lock, registered: Registered, key: str, how: str
) -> None:
    """The end of the interpreter releases, be it by return or by `sys.exit`, of any thread."""
    with spawn(f"{WORKERS}:hold_to_the_end", registered.alias, key, how, **WHOLE_END) as worker:
        worker.wait_for("held")
        assert worker.popen.wait(timeout=20) == (3 if how == "exit" else 0)
    assert not taken(lock)
    assert grantable(lock)


@HAS_TTL
def test_thread_that_still_works_at_the_exit_keeps_its_key(
    lock: Lock, registered: Registered, key: str
) -> None:
    """A daemon thread works until the process is gone: its key is left to the ttl."""
    with spawn(
        f"{WORKERS}:hold_to_the_end", registered.alias, key, "working thread", **WHOLE_END
    ) as worker:
        worker.wait_for("held")
        assert worker.popen.wait(timeout=20) == 0
    assert taken(lock)


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason=f"{DECLARED}this Python starts no thread behind the end of the main one",
)
def test_thread_that_outlives_the_main_one_locks(registered: Registered, key: str) -> None:
    """Leases are renewed, and awaited, although pools of threads take no more work by then."""
    with spawn(f"{WORKERS}:outlive_the_main_thread", registered.alias, key, **WHOLE_END) as worker:
        assert worker.result() == {"lost": False, "awaited": True}


def end_with(worker: Process, sent: signal.Signals) -> int:
    """Send a signal; give the exit status."""
    os.kill(worker.popen.pid, sent)
    return worker.popen.wait(timeout=20)


@pytest.mark.parametrize("how", ["turned into an exit", "in a block"])
def test_termination_that_a_program_turns_into_an_exit_gives_back(
    lock: Lock, registered: Registered, key: str, how: str
) -> None:
    """Where SIGTERM raises `SystemExit`, blocks and the interpreter's end release as always."""
    with spawn(f"{WORKERS}:hold_until_told", registered.alias, key, 60, how, **WHOLE_END) as worker:
        worker.wait_for("held")
        assert taken(lock)
        assert end_with(worker, signal.SIGTERM) == 0
    assert not taken(lock)
    assert grantable(lock)


@HAS_TTL
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_termination_without_a_handler_is_ended_by_the_ttl(
    lock: Lock, registered: Registered, key: str, sent: signal.Signals
) -> None:
    """The library installs no handler: the key stays taken until the lease and its grace end."""
    with spawn(f"{WORKERS}:hold_until_told", registered.alias, key, 2, "") as worker:
        worker.wait_for("held")
        assert end_with(worker, sent) == -sent
        assert taken(lock)
    assert eventually(lambda: grantable(lock), timeout=10)


def test_holder_that_was_paused_finds_its_lease_lost(registered: Registered, key: str) -> None:
    """A process that stood still for longer than its ttl stops when it goes on.

    Where leases end in the store, a successor has a higher fence, and the late release changes
    nothing. Where sessions hold locks, nobody else was granted the key.
    """
    ends_in_the_store = lock_backends[registered.alias].supports_ttl
    lock = lock_of(registered, key, ttl=30, wait=0)
    successor: Lease | None = None
    with spawn(f"{WORKERS}:hold_through_a_pause", registered.alias, key, 0.5) as worker:
        worker.wait_for("held")
        worker.stop()
        stopped = time.monotonic()
        if ends_in_the_store:
            assert eventually(lambda: grantable(lock), timeout=10)
            successor = Later(lock.acquire).result()
        else:
            time.sleep(max(0.0, stopped + 2 - time.monotonic()))
            assert taken(lock)
        worker.go_on()
        worker.send("go on")
        said = worker.result()
    assert (said["is_lost"], said["check"], said["extend"]) == (True, "lost", "lost")
    assert said["released"] is False
    if successor is not None:
        assert successor.fence > said["fence"]
        assert taken(lock)
        assert Later(successor.release).result() is True


def test_fork_neither_extends_nor_releases(registered: Registered, key: str) -> None:
    """A child contends for the key, also where its parent may enter again, and has own locks."""
    with spawn(f"{WORKERS}:fork", registered.alias, key) as worker:
        result = worker.result()
    child = result["child"]
    assert "trouble" not in child, child
    assert child == {
        "release": "False",
        "unbound": "False",
        "arelease": "False",
        "check": "foreign_context",
        "extend": "foreign_context",
        "aextend": "foreign_context",
        "held": "False",
        "is_lost": "False",
        "remaining": "0.0",
        "current": "False",
        "enters": "acquisition_timeout",
        "acquires": "acquisition_timeout",
        "dumps": "foreign_context",
        "is told": "foreign_context",
        "is warned": "foreign_context",
        "locked": "True",
        "own": "True",
    }
    assert result["parent"] == {
        "status": 0,
        "held": True,
        "locked": True,
        "unbound": True,
        "unchanged": True,
    }
    assert result["released"] == [True, True]
    assert grantable(lock_of(registered, key))


@pytest.mark.aliases("postgres_orm", "mariadb_orm")
def test_process_that_stands_still_amid_its_transaction_keeps_no_key(
    registered: Registered, key: str
) -> None:
    """The server ends what a stopped process has begun, and the process learns it."""
    with spawn(f"{WORKERS}:stand_still_amid_a_transaction", registered.alias, key) as worker:
        worker.wait_for("amid")
        worker.stop()
        with pytest.raises(BackendUnavailable):
            lock_of(registered, key, wait=0).acquire()  # Or this would prove nothing.
        lock_of(registered, key, wait=20).acquire().release()
        worker.go_on()
        worker.send("go on")
        assert worker.result() in ("network_timeout", "service_unavailable")
