"""A database that lets nobody in, one that falls silent, and one whose tables are locked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, transaction

from django_distlock import BackendUnavailable, LockError, distlock
from django_distlock.database import borrowing
from django_distlock.handler import lock_backends
from django_distlock.inspection import statistics, summary
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import Later, prompt
from tests.processes import spawn

from .databases import ask, here, migrate
from .wires import wire

TAKE = """
import django
django.setup()
from django_distlock import BackendUnavailable, distlock
try:
    with distlock("a", backend="postgres", wait=2):
        print("granted")
except BackendUnavailable as error:
    print(error.code)
"""


@pytest.fixture
def silent() -> Iterator[dict[str, str]]:
    """Give an environment whose PostgreSQL accepts connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        port = listener.getsockname()[1]
        yield {
            **os.environ,
            "DISTLOCK_TEST_POSTGRES_URL": f"postgresql://nobody@127.0.0.1:{port}/nothing",
            "DISTLOCK_TEST_DATABASES": "{}",
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python. Without a bound of its own, the driver would wait for longer than this."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_acquire_ends_where_nobody_is_let_in(silent: dict[str, str]) -> None:
    """It is no contention and no grant, and it does not take for ever."""
    done = run(silent, "-c", TAKE)
    assert done.stdout == "service_unavailable\n", done.stderr


def test_command_ends_where_nobody_is_let_in(silent: dict[str, str]) -> None:
    """With the exit code for a store that does not answer, and a document for who reads JSON."""
    done = run(silent, "-m", "django", "distlock_show", "a", "--backend", "postgres", "--json")
    (failure,) = json.loads(done.stdout)["failures"]
    assert (done.returncode, failure["backend"]) == (69, "postgres")
    assert failure["code"] == "service_unavailable"


def test_store_without_tables_is_one_that_refuses(
    postgresql: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same exit code from every command."""
    for command in (["distlock_show", "a"], ["distlock_list"]):
        with locks_on(postgresql) as alias, pytest.raises(CommandError) as caught:
            call_command(*command, "--backend", alias)
        assert caught.value.returncode == 69
        assert "migrate" in f"{caught.value}{capsys.readouterr()}"


def test_counting_does_not_wait_for_locked_tables(postgresql: str) -> None:
    """Whoever migrates a table, or copies it, keeps no operator waiting."""
    migrate(postgresql)
    wanted = ("dbname", "user", "password", "host", "port")
    known: dict[str, Any] = connections[postgresql].get_connection_params()
    same = {name: known[name] for name in wanted if name in known}
    with psycopg.connect(**same) as other, locks_on(postgresql) as alias:
        other.execute("LOCK TABLE django_distlock_heldlock IN ACCESS EXCLUSIVE MODE")
        for ask in (statistics, summary):
            with prompt(2), pytest.raises(BackendUnavailable) as caught:
                ask(alias)
            assert caught.value.code == "network_timeout"


@pytest.mark.parametrize(
    ("like", "server_functions", "where"),
    [
        ("default", True, "outside"),
        ("default", True, "inside"),
        ("default", False, "outside"),
        ("mariadb", False, "inside"),
        ("mariadb", True, "outside"),
    ],
)
def test_acquire_ends_where_a_session_falls_silent(
    key: str, monkeypatch: pytest.MonkeyPatch, like: str, server_functions: bool, where: str
) -> None:
    """No error of the network tells: the connection is cut, and the caller learns that in time."""
    here(like)
    monkeypatch.setattr(borrowing, "ANSWER_SECONDS", 1.5)
    with wire(like) as through, alias_like(like, **through.address) as using:
        options = {"using": using, "server_functions": server_functions}
        with locks_on(using, OPTIONS=options) as alias:

            def lock_once(name: str) -> None:
                distlock(name, backend=alias, wait=0.2, heartbeat=False).acquire().release()

            def work() -> tuple[str, float]:
                inside = transaction.atomic(using=using) if where == "inside" else nullcontext()
                with inside:
                    connections[using].ensure_connection()
                    lock_once(key)
                    through.hang()
                    since = time.monotonic()
                    try:
                        with pytest.raises(BackendUnavailable) as caught:
                            lock_once(f"{key}-b")
                    finally:
                        took = time.monotonic() - since
                        through.flow()
                return caught.value.code, took

            code, took = Later(work).result()
            assert code == "network_timeout"
            # Far from what a network takes to notice, which is half a minute at least.
            assert took < 10
            with suppress(LockError):
                lock_backends[alias]._connections.close_all()  # type: ignore[attr-defined]


def test_first_question_of_a_forked_process_ends_where_its_session_falls_silent(key: str) -> None:
    """Nothing has woken yet the thread that looks at statements."""
    target = "tests.contract.lock_workers:ask_first_behind_a_fork"
    with wire() as through, spawn(target, through.address, key) as worker:
        worker.wait_for("connected")
        through.hang()
        worker.send("ask")
        assert worker.result(20) == "network_timeout"


@pytest.mark.parametrize("like", ["default", "mariadb"])
def test_session_that_is_cut_before_its_commit_has_done_nothing(like: str) -> None:
    """It is an error, and no other session is opened to end the transaction."""
    here(like)
    ours = borrowing.LockConnections(like, 1)
    use, cut = ours.use(), []

    def work(on: str) -> None:
        cut.append(connections[on])
        with transaction.atomic(using=on):
            ask(on, "SELECT 1")
            use.cut()

    with pytest.raises(OperationalError), use as on:
        work(on)
    assert use.was_cut
    assert cut[0].connection is None
    with ours.use() as on:
        assert connections[on] is not cut[0]
    ours.close_all()


def test_statement_that_works_is_not_cut(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many statements may take longer together than one may be silent."""
    monkeypatch.setattr(borrowing, "ANSWER_SECONDS", 1.5)
    ours = borrowing.LockConnections("default", 1)
    with ours.use(0.0) as on:
        for _ in range(6):
            ask(on, "SELECT pg_sleep(0.3)")
    with pytest.raises(OperationalError), ours.use(0.0) as on:
        ask(on, "SELECT pg_sleep(5)")
    ours.close_all()
