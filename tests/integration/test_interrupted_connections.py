"""A signal that strikes while a lock is taken changes nothing of the caller's connection."""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core import durations
from django_distlock.core.errors import LockError
from django_distlock.database import borrowing
from django_distlock.handler import lock_backends
from tests.contract.aliases import counted_alias, sessions
from tests.contract.helpers import Later, take
from tests.contract.interrupting import TimeIsUp, alarms
from tests.contract.locking import eventually
from tests.interrupting import interrupt_after, interrupt_at
from tests.shop.models import Row

from .databases import here
from .test_connections import PATHS, counted

#: Which connection a statement runs on.
MODULES = (
    "django_distlock.backends.tables",
    "django_distlock.database.borrowing",
    "django_distlock.database.connections",
)


@contextmanager
def store(path: str) -> Iterator[tuple[str, BaseLockBackend]]:
    """Give the alias of a database whose sessions can be counted, and locks with two places."""
    here(PATHS[path][0])
    with counted(path, LOCK_CONNECTIONS=2) as (using, alias):
        yield using, lock_backends[alias]


def attempt(backend: BaseLockBackend, key: str) -> None:
    """Acquire a key and give it back, by one attempt each."""
    grant = take(backend, key)
    backend.release(grant)


def attempt_often(backend: BaseLockBackend, key: str) -> None:
    """Acquire keys and give them back, for longer than a signal takes to come."""
    for number in range(200):
        attempt(backend, f"{key}:{number}")


def seen_elsewhere(using: str, name: str) -> set[int]:
    """Return what others see of rows that were written."""

    def look() -> set[int]:
        rows = Row.objects.using(using).filter(name=name)
        return set(rows.values_list("value", flat=True))

    return Later(look).result()


@pytest.mark.parametrize(
    ("where", "path"),
    [
        ("inside", "functions"),
        ("outside", "functions"),
        pytest.param("inside", "orm", marks=pytest.mark.nightly),
        pytest.param("outside", "mariadb", marks=pytest.mark.nightly),
        ("inside", "blocks"),
    ],
)
def test_line_that_is_interrupted_changes_no_connection(key: str, path: str, where: str) -> None:
    """Wherever it strikes: what the caller has written stays in its transaction, and is saved."""
    with store(path) as (using, backend):
        written: set[int] = set()

        def write(number: int) -> None:
            Row.objects.using(using).create(name=key, value=number)
            written.add(number)

        connection = connections[using]
        number, struck = 0, True
        while struck:
            number += 1
            inside = transaction.atomic(using=using) if where == "inside" else nullcontext()
            with inside:
                write(2 * number)
                asked = partial(attempt, backend, f"{key}:{number}")
                struck = interrupt_at(number, asked, *MODULES)
                assert connections[using] is connection
                assert connection.in_atomic_block == (where == "inside")
                write(2 * number + 1)
                # No place is lost: the next one waits for nobody.
                attempt(backend, f"{key}:{number}:next")
            assert connection.get_autocommit()
        assert number > 50
        assert seen_elsewhere(using, key) == written
        assert eventually(lambda: len(sessions(using)) <= 1 + 2), sessions(using)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_signals_change_no_connection(
    key: str, path: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ones, at times that nobody chose."""
    # Finalisers of Django's and of drivers lose what a signal raises in them: none of ours does. As
    # text, because the error would keep alive what it is about.
    lost: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: lost.append(f"{said.object!r}"))
    with store(path) as (using, backend):
        chosen = random.Random(7)
        written: set[int] = set()
        connection = connections[using]
        for number in range(40):
            inside = transaction.atomic(using=using) if where == "inside" else nullcontext()
            with inside:
                Row.objects.using(using).create(name=key, value=number)
                written.add(number)
                asked = partial(attempt_often, backend, f"{key}:{number}")
                interrupt_after(chosen.uniform(1e-5, 0.004), asked)
                assert connections[using] is connection
            assert connection.get_autocommit()
        with transaction.atomic(using=using):
            attempt(backend, f"{key}:last")
        assert seen_elsewhere(using, key) == written
        assert eventually(lambda: len(sessions(using)) <= 1 + 2), sessions(using)
    # What was broken off while it was opened warns here, and not in another test.
    gc.collect()
    assert not [each for each in lost if "weakref" in each or "distlock" in each]


def test_ctrl_c_in_a_commit_is_no_failure_of_the_store(key: str) -> None:
    """Django fails to end a transaction that is broken off so, and raises its own error instead."""
    # As Python's own handler, which is not in place where the tests run in the background.
    press = partial(signal.default_int_handler, signal.SIGINT, None)
    with store("orm") as (_using, backend):
        number, struck = 0, True
        while struck:
            number += 1
            backend.read(key)  # opens the session that is broken off
            asked = partial(backend.read, key)
            struck = interrupt_at(
                number, asked, "psycopg.connection", strike=press, ends=KeyboardInterrupt
            )
    assert number > 20


def test_signal_amid_the_look_behind_an_error_ends_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it lives is asked of it: its next statement would get the answer, or none."""
    with counted_alias("default") as using:
        connection = connections[using]
        pool = borrowing.LockConnections(using, 1)

        def fail() -> None:
            with pool.use(single=True) as on, connections[on].cursor() as cursor:
                cursor.execute("SELECT nothing")

        def ask() -> bool:
            connection.connection.pgconn.send_query(b"SELECT pg_sleep(0.1)")
            raise TimeIsUp

        monkeypatch.setattr(connection, "is_usable", ask)
        with pytest.raises(TimeIsUp):
            fail()
        assert connection.connection is None
        assert eventually(lambda: not sessions(using), 10)


def test_interrupted_opening_is_not_watched_for_ever() -> None:
    """A signal behind the first step of the block, or at its end, calls no end of it."""

    def leave() -> set[Any]:
        opening = borrowing.Opening(lambda: None)
        opening.__enter__()
        return {*borrowing._sweeping().watched} - before

    before: set[Any] = set(borrowing._sweeping().watched)
    assert not leave()  # Without an end there is nothing to be cut.
    (watched,) = durations.spend(time.monotonic() + 60, leave)
    assert eventually(lambda: watched not in borrowing._sweeping().watched)


@contextmanager
def reading_the_timeout(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[object], float]
) -> Iterator[None]:
    """Let psycopg read `connect_timeout` so, and make an error of its own of what that raises."""
    with monkeypatch.context() as patch:
        patch.setattr(psycopg.conninfo, "float", read, raising=False)
        yield


def strike(_value: object) -> float:
    """Let a signal come."""
    signal.raise_signal(signal.SIGALRM)
    raise AssertionError


def fail(_value: object) -> float:
    """Find no number."""
    raise ValueError


@pytest.mark.parametrize("path", ["functions", "orm"])
def test_signal_that_the_driver_makes_an_error_of_reaches_the_caller(
    key: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for a failing store, a time limit would not end its task."""
    with store(path) as (_using, backend), alarms():
        with pytest.raises(TimeIsUp), reading_the_timeout(monkeypatch, strike):
            attempt(backend, key)
        attempt(backend, key)


def test_signal_that_is_handled_already_is_not_raised_again(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever cleans up behind a time limit hears what the store says of that."""
    with store("functions") as (_using, backend), alarms():
        try:
            strike(None)
        except TimeIsUp:
            with (
                pytest.raises(LockError, match="connect_timeout"),
                reading_the_timeout(monkeypatch, fail),
            ):
                attempt(backend, key)
