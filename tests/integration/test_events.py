"""What an operator needs afterwards is a row, whatever the caller is in the middle of."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction
from django.test import TestCase, override_settings

from django_distlock import Holder, LockLost, distlock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.handler import lock_backends
from django_distlock.models import LockEvent
from django_distlock.process import event_log
from django_distlock.process.heartbeat import held_here
from django_distlock.process.host import current_holder
from django_distlock.signals import fence_rejected, lock_lost, lock_taken_over
from tests.contract.aliases import (
    abandon_connections,
    alias_like,
    counted_alias,
    locks_on,
    sessions,
)
from tests.contract.helpers import Later
from tests.contract.locking import eventually, grantable, rolled_back, take_away
from tests.processes import spawn

from .databases import Routed, ask, migrate, server

PATIENCE = 60
WHO = Holder(host="web-1", process="beat", pid=4242, started_at=12.5, metadata={"user": "Ada"})


@pytest.fixture
def key(key: str) -> Iterator[str]:
    """Give a text that only this test uses, and remove what was written about it."""
    # A write that works, so that trouble of other tests is over.
    lose(f"{key}:first")
    assert eventually(lambda: written(f"{key}:first") == 1, PATIENCE)
    yield key
    event_log.finish()
    LockEvent.objects.filter(key__startswith=key).delete()


def lose(key: str, sender: type[BaseLockBackend] = DatabaseBackend, **changes: Any) -> None:
    """Tell of a loss, as a lease does; an error of who listens would be raised here."""
    facts = {"alias": "memory", "key": key, "fence": 7, "holder": WHO}
    lock_lost.send(sender, **{**facts, "held_for": 1.5, "cause": "a test", **changes})


def written(key: str, using: str = "default") -> int:
    """Count the rows about a key."""
    return LockEvent.objects.using(using).filter(key=key).count()


def row(key: str, using: str = "default") -> LockEvent:
    """Give the one row about a key, when it is written."""
    assert eventually(lambda: written(key, using) > 0, PATIENCE)
    return LockEvent.objects.using(using).get(key=key)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Give what was logged about events, as far as anybody is to see it."""
    return [
        each.getMessage()
        for each in caplog.records
        if each.levelno >= logging.WARNING and "ock events" in each.getMessage()
    ]


@contextmanager
def kept_in(using: str) -> Iterator[None]:
    """Let the router send events to an alias."""
    with override_settings(DATABASE_ROUTERS=[Routed(using, LockEvent)]):
        try:
            yield
        finally:
            event_log.finish()


@contextmanager
def table_locked() -> Iterator[psycopg.Connection]:
    """Keep everybody from writing events, until the block ends or the session is committed."""
    with server(str(connections["default"].settings_dict["NAME"])) as raw:
        raw.execute("BEGIN; LOCK TABLE django_distlock_lockevent IN SHARE MODE")
        yield raw
        raw.execute("COMMIT")


def somebody_waits() -> bool:
    """Say whether somebody waits to write events."""
    return bool(
        ask(
            "default",
            "SELECT 1 FROM pg_locks WHERE NOT granted"
            " AND relation = 'django_distlock_lockevent'::regclass",
        )
    )


# What is written


def test_loss_of_a_lease_is_a_row(key: str) -> None:
    """What was lost, whose it was, and why."""
    lock = distlock(key, metadata={"user": "Ada"})
    with pytest.raises(LockLost), lock as lease:
        take_away(lease)
    event = row(key)
    assert event.kind == LockEvent.Kind.LOST
    assert (event.backend, event.key, event.fence) == ("default", key, lease.fence)
    assert event.holder["pid"] == os.getpid()
    assert event.holder["metadata"] == {"user": "Ada"}
    assert event.reason != ""
    assert 0 <= event.details["held_for"] < PATIENCE
    assert lease.token not in repr(vars(event))


def test_takeover_is_a_row_with_both_holders(key: str) -> None:
    """Who has the key now, and who had it before."""
    lock_taken_over.send(
        DatabaseBackend, alias="memory", key=key, fence=8, holder=current_holder(), previous=WHO,
        cause="its holder has died",
    )  # fmt: skip
    event = row(key)
    assert event.kind == LockEvent.Kind.TAKEN_OVER
    assert (event.backend, event.fence, event.reason) == ("memory", 8, "its holder has died")
    assert event.holder["pid"] == os.getpid()
    assert Holder.from_json(event.details["previous"]) == WHO


def test_killed_holder_is_a_row_at_once(key: str) -> None:
    """From the kill to the row: the key is taken over long before its ttl is over."""
    hold = "tests.contract.lock_workers:hold_until_told"
    with spawn(hold, "postgres", key, 600, "killed") as holder:
        holder.wait_for("held", PATIENCE)
        holder.popen.send_signal(signal.SIGKILL)
        lock = distlock(key, backend="postgres", wait=PATIENCE, steal_if_dead=True)
        with lock as lease:
            event = row(key)
        assert event.kind == LockEvent.Kind.TAKEN_OVER
        assert event.fence == lease.fence
        assert event.details["previous"]["pid"] == holder.popen.pid


def test_time_of_an_event_is_when_it_happened(key: str) -> None:
    """Not when its row could be written at last."""
    with table_locked():
        lose(f"{key}:1")
        assert eventually(somebody_waits, PATIENCE)
        lose(f"{key}:2")
        time.sleep(1)
        ((now,),) = ask("default", "SELECT clock_timestamp()")
    assert (now - row(f"{key}:2").at).total_seconds() > 0.7


def test_odd_facts_are_written_too(key: str) -> None:
    """What a database would refuse costs no row."""
    odd: list[dict[str, Any]] = [
        {"cause": ValueError("\0 and \ud800")},
        {"cause": "long " * 10_000},
        {"alias": "a" * 200},
        {"holder": None, "fence": None},
        {"holder": Holder(host="there", metadata={"spoiled": "\0"})},
        {"held_for": None},
    ]
    for number, facts in enumerate(odd):
        lose(f"{key}:{number}", **facts)
    assert {row(f"{key}:{number}").kind for number in range(len(odd))} == {LockEvent.Kind.LOST}


def test_odd_primary_key_costs_no_row(key: str) -> None:
    """SQLite takes a text that PostgreSQL refuses, and with it all rows of the statement."""
    lose(key)
    facts = {"alias": "memory", "key": key, "fence": 7, "holder": WHO, "cause": "a test"}
    row_of = {"current": 8, "model": "shop.Payment", "pk": "\0 and \ud800"}
    fence_rejected.send(DatabaseBackend, **facts, **row_of)
    assert eventually(lambda: written(key) == 2, PATIENCE)


@pytest.mark.parametrize("using", ["default", "sqlite"])
def test_row_that_is_refused_costs_no_other(key: str, using: str) -> None:
    """A record that somebody has spoiled may have a fence that no table takes."""
    writer = event_log._Writer()
    with pytest.MonkeyPatch.context() as before:
        before.setattr(writer, "_start", lambda: None)
        for number in (1, -1, 2, 10**30, 3):
            writer.put(using, LockEvent(key=key, kind=LockEvent.Kind.LOST, fence=number))
    Later(writer._run).result(PATIENCE)
    rows = LockEvent.objects.using(using).filter(key=key)
    assert set(rows.values_list("fence", flat=True)) == {1, 2, 3}
    rows.delete()


# Where and when


@pytest.mark.parametrize("using", ["default", "sqlite", "mariadb"])
def test_rollback_of_the_caller_takes_no_event_back(key: str, using: str) -> None:
    """The row is not written in the transaction in which a lease was lost."""
    if using not in connections.settings:
        pytest.skip("declared: no MariaDB here")
    with kept_in(using):
        with rolled_back(using):
            # In its transaction the caller may also have written.
            LockEvent.objects.using(using).create(backend="x", key=f"{key}:caller", kind="lost")
            lose(key)
        assert row(key, using).fence == 7
        assert written(f"{key}:caller", using) == 0
        LockEvent.objects.using(using).filter(key=key).delete()


async def test_event_loop_does_not_wait(key: str) -> None:
    """In asynchronous code nothing refuses the row, and nothing blocks for it."""
    with table_locked():
        lose(key)
        assert await lock_backends["default"].threads.run(eventually, somebody_waits, PATIENCE)
    event = await lock_backends["default"].threads.run(row, key)
    assert event.fence == 7


class InTestCase(TestCase):
    """What a project's own tests see."""

    __test__ = False
    databases = {"default"}
    key = ""

    def test_row_is_there_at_once(self) -> None:
        """No test has to wait for a thread."""
        lose(self.key)
        assert written(self.key) == 1

    def test_row_is_there_at_once_again(self) -> None:
        """The twin, which would see what the other one left behind."""
        self.test_row_is_there_at_once()

    def test_refused_write_is_no_trouble_of_events(self) -> None:
        """It has ended the transaction, in which nothing can be written any more."""
        event_log._writer._told = False
        with transaction.atomic(), self.assertNoLogs("django_distlock"):
            transaction.set_rollback(True)
            lose(self.key)


def test_row_is_rolled_back_with_a_test_case(key: str) -> None:
    """In the transaction of a `TestCase` the row is written at once, and goes with the test."""
    InTestCase.key = key
    report = io.StringIO()
    cases = unittest.defaultTestLoader.loadTestsFromTestCase(InTestCase)
    result = unittest.TextTestRunner(report).run(cases)
    assert result.wasSuccessful(), report.getvalue()
    assert result.testsRun == 3
    event_log.finish()
    assert written(key) == 0


def test_no_connection_is_left(key: str) -> None:
    """When all is written, the session that wrote it is ended."""
    with counted_alias() as using, kept_in(using):
        for number in range(20):
            lose(f"{key}:{number}")
        assert eventually(lambda: written(f"{key}:19") == 1, PATIENCE)
        assert eventually(lambda: not sessions(using), PATIENCE)


# Bounds


def test_burst_is_bounded(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """A thousand events wait for a database; further ones are dropped, and that is said once."""
    with table_locked():
        lose(f"{key}:first of many")
        assert eventually(somebody_waits, PATIENCE)
        for _ in range(1500):
            lose(key)
        assert len(warnings_in(caplog)) == 1
    assert eventually(lambda: written(key) == 1000, PATIENCE)
    # What comes behind the burst is kept again.
    lose(f"{key}:later")
    assert row(f"{key}:later").fence == 7
    assert written(key) == 1000


def test_database_that_hangs_holds_up_no_release(key: str) -> None:
    """What a rollback gives up is released, though nobody answers who would keep an event."""
    lock = distlock(key, wait=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        with alias_like("default", HOST="127.0.0.1", PORT=port) as using, kept_in(using):
            lose(key)
            with rolled_back(), lock:
                pass
            assert eventually(lambda: grantable(lock), 20)
            # Only now does the attempt to connect end.
            silent.close()


# Trouble


@contextmanager
def told_once(using: str, key: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Keep events where they cannot be kept, and check that it is logged once."""
    caplog.clear()
    with kept_in(using):
        for _ in range(3):
            lose(key)
            event_log.finish()
        assert eventually(lambda: len(warnings_in(caplog)) == 1, PATIENCE)
        assert repr(using) in warnings_in(caplog)[0]
        yield


def test_missing_table_is_logged_once(
    key: str, empty: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the migration, or the server, nothing is kept, and nothing fails; behind it it is."""
    with told_once(empty, key, caplog):
        migrate(empty)
        lose(key)
        assert row(key, empty).fence == 7
    with alias_like("default", HOST="127.0.0.1", PORT="1") as away, told_once(away, key, caplog):
        pass
    # What happens to locks of one process is no row.
    lose(key, sender=MemoryBackend)
    event_log.finish()
    assert written(key) == 0
    lose(key)
    assert row(key).fence == 7


def test_end_of_a_test_run_leaves_the_database_of_the_project_alone(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited for the database of the tests is not written to the one in its place."""
    writer = event_log._Writer()
    with monkeypatch.context() as before:
        before.setattr(writer, "_start", lambda: None)
        before.setitem(connections["default"].settings_dict, "NAME", "of_tests")
        writer.put("default", LockEvent(key=key, kind=LockEvent.Kind.LOST))
    Later(writer._run).result(PATIENCE)
    assert written(key) == 0


def test_lease_of_a_test_that_is_over_is_not_told_to_the_project(key: str, tmp_path: Path) -> None:
    """Its record has gone with the database of the tests: that is no loss, and no row."""
    with alias_like("sqlite", NAME=str(tmp_path / "tests")) as using, locks_on(using) as backend:
        migrate(using)
        lease = distlock(key, backend=backend).acquire()
        connections[using].settings_dict["NAME"] = connections["sqlite"].settings_dict["NAME"]
        lease._release.at_exit(1.0)
        event_log.finish()
        assert written(key) == 0
        assert not lease.is_lost
        held_here.discard(lease._holding)


def test_router_that_fails_is_logged_once(
    key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the project's router does wrong costs the row, and no more."""
    # Another test may have had it told already.
    monkeypatch.setattr(event_log._writer, "_told", False)

    class Fails:
        def db_for_write(self, model: Any, **_: Any) -> str:
            raise ZeroDivisionError("from a router")

    with override_settings(DATABASE_ROUTERS=[Fails()]):
        for _ in range(3):
            lose(key)
    (said,) = warnings_in(caplog)
    assert "from a router" in said


WITHOUT_DATABASES = """
import logging
import multiprocessing
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_distlock"],
    SECRET_KEY="x",
    DISTLOCK={"default": {"BACKEND": "__main__.Elsewhere"}},
)
django.setup()
from django_distlock.backends.memory import MemoryBackend
class Elsewhere(MemoryBackend):
    distributed = True
from django_distlock import LockLost, distlock, lock_backends
from django_distlock.process import event_log
logging.basicConfig(level=logging.WARNING, format="%(message)s")
try:
    with distlock("a") as lease:
        lock_backends["default"].force_release("a")
except LockLost:
    event_log.finish()
    print("lost")
"""


def test_project_without_databases_is_not_bothered() -> None:
    """Where locks are elsewhere and there is no database, nothing is said about events."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DATABASES],
        capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert done.stdout == "lost\n"
    assert "ock events" not in done.stderr


# Processes


def lose_at_exit(key: str) -> None:
    """End with a lease that somebody has taken away."""
    lease = distlock(key).acquire()
    take_away(lease)


def test_what_the_end_of_the_interpreter_finds_out_is_written(key: str) -> None:
    """A lease whose loss is noticed by the exit handler that releases it is a row."""
    with spawn("tests.integration.test_events:lose_at_exit", key) as process:
        process.result(PATIENCE)
        pid = process.popen.pid
    assert row(key).holder["pid"] == pid


def lose_in_children(key: str) -> None:
    """Lose a lease in a child that `multiprocessing` forks, and one by the end of another one."""
    connections.close_all()
    for work in (lose, lose_at_exit):
        child = multiprocessing.get_context("fork").Process(target=work, args=[key])
        child.start()
        child.join()


def test_child_of_multiprocessing_writes_what_waits(key: str) -> None:
    """Its end calls nothing that `atexit` knows from its parent."""
    with spawn("tests.integration.test_events:lose_in_children", key) as process:
        process.result(PATIENCE)
    assert written(key) == 2


def test_event_is_written_where_no_thread_starts(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of Python 3.12: whoever waits for the events writes them."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    event_log.finish()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        lose(key)
        assert written(key) == 0
        event_log.finish()
    assert written(key) == 1


def lose_over_a_fork(key: str) -> int:
    """Fork while events wait, and tell of another one in the child."""
    with table_locked() as raw:
        lose(f"{key}:being written")
        assert eventually(somebody_waits, PATIENCE)
        lose(f"{key}:waiting")
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                abandon_connections()
                lose(f"{key}:child")
                for _ in range(PATIENCE):
                    event_log.finish()
            os._exit(0)
        raw.execute("COMMIT")
        os.waitpid(child, 0)
        for _ in range(PATIENCE):
            event_log.finish()
    return child


def test_fork_writes_what_is_its_own(key: str) -> None:
    """Events that wait in the parent are written once, and those of the child by the child."""
    with spawn("tests.integration.test_events:lose_over_a_fork", key) as process:
        process.result(PATIENCE)
    for which in ("being written", "waiting", "child"):
        assert written(f"{key}:{which}") == 1, which
