"""Traps that lock packages for Django have fallen into, one test for each.

Those without a test here are covered by the tests that `TRAPS` names.
"""

# ruff: noqa: D102 - Django describes the methods of routers

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, connections, transaction
from django.test import override_settings

from django_distlock import BackendUnavailable, distlock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.handler import lock_backends
from django_distlock.locks.attempts import BUSY_SECONDS
from django_distlock.models import HeldLock
from tests.backends import DATABASE
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import at_once, crew, prompt, race, take
from tests.salted import SALT, number_of, turn_of
from tests.shop.models import Row

from .databases import APP, TABLES, ask, errors_on, migrate, objects, server, statements_on, tables

ROOT = Path(__file__).parent.parent.parent

TRAPS = {
    # Release before the outer commit.
    "D1": "tests/contract/test_transaction_release.py::test_key_is_free_once_the_data_is_committed",
    # An error that is swallowed between the lock and `atomic()`.
    "D2": "tests/contract/test_transaction_release.py"
    "::test_key_waits_for_the_outermost_transaction",
    # `ATOMIC_REQUESTS` around every decorator.
    "D3": "tests/contract/test_transaction_requests.py::test_decorated_view_keeps_its_key_too",
    # Acquire inside of the caller's transaction.
    "D4": "tests/contract/test_transaction_visibility.py"
    "::test_lock_taken_inside_a_transaction_is_seen_by_other_processes",
    # A rollback hands the same fence out twice.
    "D5": "tests/contract/test_transaction_visibility.py"
    "::test_rollback_never_hands_a_fence_out_twice",
    # A clock that stands while a statement waits.
    "D6": "tests/contract/test_races.py::test_waiter_gets_its_full_ttl",
    # A snapshot from before the wait.
    "D7": "tests/contract/test_transaction_isolation.py"
    "::test_locks_on_an_alias_of_snapshots_exclude_each_other",
    # The transaction of a `TestCase`.
    "D17": "tests/contract/test_transaction_test_cases.py::test_locks_work_in_django_test_cases",
    # The caller's snapshot is older than the lock.
    "D19": "tests/contract/test_transaction_isolation.py"
    "::test_lock_in_a_snapshot_works_and_warns_once",
    # A hot table that grows.
    "D22": "tests/integration/test_schema.py::test_d22_extends_are_updates_in_place",
    # Keys that users make up: length and Unicode.
    "D23": "tests/contract/test_keys.py::test_longest_key_has_512_bytes",
}
#: All that concern a lock in a database of Django's.
NUMBERS = [*range(1, 12), 13, *range(17, 21), 22, 23]


def test_trap_has_its_test() -> None:
    """A trap is tested here, by a test with its number, or where `TRAPS` says."""
    for number in NUMBERS:
        here = [name for name in _tests(Path(__file__)) if name.startswith(f"test_d{number:02}_")]
        named = TRAPS.get(f"D{number}")
        assert bool(here) != bool(named)
        if named:
            path, _, name = named.partition("::")
            assert name in _tests(ROOT / path)


def _tests(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {each.name for each in found if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


# Trap D8, locking a row that does not exist locks nothing


def test_d08_creators_of_a_missing_row_have_one_winner(key: str) -> None:
    """Of those who make a key's first records at once, on either path, one is granted fence 1."""
    with _both_paths() as backends:
        for number in range(8):
            name = f"{key}:{number}"
            answers = at_once(
                partial(backend.acquire, name, new_token(), 30) for backend in backends * 3
            )
            grants = [answer for answer in answers if isinstance(answer, Grant)]
            assert [grant.fence for grant in grants] == [1]
            others = [answer for answer in answers if isinstance(answer, Contended)]
            assert len(others) == len(answers) - 1
            assert not any(answer.busy for answer in others)


@contextmanager
def _both_paths() -> Iterator[list[BaseLockBackend]]:
    """Give a backend that calls functions and one that runs ORM code, on the same keys."""
    configured = {
        name: {
            "BACKEND": DATABASE,
            "OPTIONS": {"using": "default", "server_functions": name == "functions"},
        }
        for name in ("functions", "orm")
    }
    with override_settings(DISTLOCK=configured):
        yield lock_backends.all()


# Trap D9, SQLite has no row locks, and one writer


def test_d09_sqlite_processes_have_one_winner_a_round(key: str) -> None:
    """Of 8 processes that try at once, one gets the key each time, and none sees an error."""
    rounds = 6
    with crew(8, f"{__name__}:try_when_told", key, rounds, PYTHONDEVMODE="") as workers:
        # Once more than there are rounds: whoever ends gives back what it holds.
        for _ in range(rounds):
            for worker in workers:
                worker.send("go")
            for worker in workers:
                worker.wait_for("ready", timeout=90)
        outcomes = race(workers)
    for number in range(rounds):
        assert sorted(filter(None, (each[number] for each in outcomes))) == [1], outcomes


def try_when_told(key: str, rounds: int) -> list[int | None]:
    """Try once for a new key in each round; return the fences."""
    fences = []
    for number in range(rounds):
        lock = distlock(f"{key}:{number}", backend="sqlite")
        lock.locked()
        print("ready")
        input()
        lease = lock.try_acquire()
        fences.append(None if lease is None else lease.fence)
    print("ready")
    input()
    return fences


def test_d09_sqlite_processes_wait_for_each_other(key: str) -> None:
    """8 processes that lock and release one key as fast as they can all get their turns."""
    with crew(8, f"{__name__}:lock_again_and_again", key, PYTHONDEVMODE="") as workers:
        fences = sorted(fence for each in race(workers) for fence in each)
    assert fences == list(range(1, 8 * 5 + 1))


def lock_again_and_again(key: str) -> list[int]:
    """Lock a key five times; return the fences."""
    lock = distlock(key, backend="sqlite", wait=45)
    print("ready")
    input()
    fences = []
    for _ in range(5):
        with lock as lease:
            lease.extend()
            fences.append(lease.fence)
    return fences


# Trap D10, `select_for_update` needs a transaction, and `count()` and `exists()` drop it


LOCKING: dict[str, Callable[[DatabaseBackend, Grant], object]] = {
    "extend": lambda backend, grant: backend.extend(grant),
    "extend_many": lambda backend, grant: backend.extend_many([grant]),
    "release": lambda backend, grant: backend.release(grant),
    "settle": lambda backend, grant: backend.release(grant, 60),
    "shorten": lambda backend, grant: backend.request_stop(grant.key, 1),
    "force_release": lambda backend, grant: backend.force_release(grant.key),
    "request_stop": lambda backend, grant: backend.request_stop(grant.key),
    "acquire": lambda backend, grant: backend.acquire(
        grant.key, new_token(), 30, replace=grant.token
    ),
}


def test_d10_row_is_locked_before_it_is_judged(key: str) -> None:
    """In one transaction the row is locked, then the clock is read, then the row is written."""
    backend = lock_backends["postgres_orm"]
    assert isinstance(backend, DatabaseBackend)
    table = '"public"."django_distlock_heldlock"'
    writes = f"UPDATE {table}", f"DELETE FROM {table}"
    for operation, operate in LOCKING.items():
        grant = take(backend, f"{key}:{operation}")
        with statements_on("default") as statements:
            assert operate(backend, grant), operation
        every = [*enumerate(statements)]
        locked = [n for n, sql in every if f"FROM {table}" in sql and "FOR UPDATE" in sql]
        clock = [n for n, sql in every if "clock_timestamp()" in sql]
        written = [n for n, sql in every if sql.startswith(writes)]
        # The first statement of each transaction, of which this is the last.
        begun = max(n for n, sql in every if sql.startswith("SET TRANSACTION"))
        assert len(locked) == 1, operation
        assert begun < locked[0] < clock[-1] < min(written), operation


# Trap D11, MariaDB locks the gap where a missing row would be


def test_d11_neighbours_that_are_missing_do_not_collide(mysql: str, key: str) -> None:
    """Those who make neighbouring keys at once, under REPEATABLE READ, get all of them."""
    migrate(mysql)
    # Between the looking and the writing: all have found nothing before the first one writes.
    ask(
        mysql,
        "CREATE TRIGGER slow BEFORE UPDATE ON django_distlock_fencecounter"
        " FOR EACH ROW DO SLEEP(0.05)",
    )
    name = connections[mysql].settings_dict["NAME"]
    options = {"isolation_level": "repeatable read"}
    with alias_like("mariadb", NAME=name, OPTIONS=options) as alias, locks_on(alias) as locks:
        backend = lock_backends[locks]

        def make(start: int) -> set[int]:
            ask(alias, "SELECT 1")
            ready.wait(20)
            with errors_on(alias) as errors:
                for number in range(start, 40, 8):
                    grant = take(backend, f"{key}:{number:03}")
                    assert isinstance(backend.extend(grant), Grant)
                    assert grant.fence == 1
                    if number % 3 == 0:
                        assert backend.release(grant) is True
            return errors

        ready = threading.Barrier(8)
        assert at_once([partial(make, start) for start in range(8)]) == [set()] * 8
        assert HeldLock.objects.using(alias).count() == 26


# Trap D13, Django closes connections between requests


def test_d13_leases_outlive_the_connections_of_a_request(key: str, server_functions: bool) -> None:
    """What is done at the ends of requests and tasks closes the connection, and no lease."""
    with alias_like("default", CONN_MAX_AGE=0, CONN_HEALTH_CHECKS=True) as using:
        options = {"using": using, "server_functions": server_functions}
        with locks_on(using, OPTIONS=options) as backend:
            lock = distlock(key, backend=backend, wait=0)
            for fence, where in (1, nullcontext()), (2, transaction.atomic(using=using)):
                with where:
                    lease = lock.acquire()
                assert lease.fence == fence
                for end_of_request in (
                    close_old_connections,
                    partial(request_started.send, sender=None, environ={}),
                    partial(request_finished.send, sender=None),
                ):
                    # As the request's own queries do.
                    connections[using].ensure_connection()
                    assert lock.locked()
                    end_of_request()
                    assert connections[using].connection is None
                    assert lease.held
                    lease.extend()
                    assert lock.try_acquire() is None
                end_of_request()
                assert lease.release() is True


# Trap D18, routers and replicas


class Router:
    """Write locks to one alias and read them from another, and let them live in the first alone."""

    def __init__(self, locks: str, replica: str):
        self.locks, self.replica = locks, replica

    def db_for_read(self, model: Any, **_: Any) -> str | None:
        return self.replica if model._meta.app_label == APP else None

    def db_for_write(self, model: Any, **_: Any) -> str | None:
        return self.locks if model._meta.app_label == APP else None

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        return db == self.locks if app_label == APP else None


@contextmanager
def routed(locks: str, **options: Any) -> Iterator[DatabaseBackend]:
    """Give a backend where a router sends reads to a replica that does not answer."""
    with (
        alias_like("default", HOST="127.0.0.1", PORT="1") as replica,
        override_settings(
            DATABASE_ROUTERS=[Router(locks, replica)],
            DISTLOCK={"default": {"BACKEND": DATABASE, "OPTIONS": options}},
        ),
    ):
        backend = lock_backends["default"]
        assert isinstance(backend, DatabaseBackend)
        yield backend


def test_d18_locks_are_never_read_from_a_replica(empty: str) -> None:
    """Every operation goes to where locks are written, whatever `db_for_read` says."""
    key = "invoice:42"
    for number in range(4):
        paths = {"server_functions": number < 2, "cleanup_on_read": bool(number % 2)}
        with routed(empty, using=empty, **paths) as backend:
            migrate(empty)
            for operation in LOCKING.values():
                grant = take(backend, key)
                assert operation(backend, grant)
                backend.acquire(key, new_token(), 30, wanted=True)
                backend.read(key)
                backend.read_token(grant.token)
                backend.list("invoice")
                backend.pause(key, grant.acquired_at)
                backend.pause(key, None)
                backend.cleanup(grant.acquired_at)
                backend.force_release(key)
            with distlock(key) as lease:
                lease.extend()
            rows = ask(empty, "SELECT fence FROM django_distlock_fencecounter")
            assert rows == [(lease.fence,)], paths


def test_d18_router_says_where_the_tables_are(postgresql: str, sqlite: str, key: str) -> None:
    """Tables are made where the router sends the models; a lock goes to the alias it names."""
    with routed(sqlite, using=sqlite):
        before = objects(postgresql)
        migrate(postgresql)
        assert objects(postgresql) == before
        migrate(sqlite)
        assert tables(sqlite) == TABLES
    for using in (sqlite, "default"):
        with routed(sqlite, using=using) as backend:
            assert backend.using == using
            with distlock(key) as lease:
                assert HeldLock.objects.using(using).get(key=key).token == lease.token


# Trap D20, all advisory locks of a database share one space of numbers


def test_d20_advisory_numbers_are_wide(key: str) -> None:
    """The number of a key is one of 2^64, so that no two of many keys meet."""
    numbers = [turn_of("default", f"{key}:{number}") for number in range(2000)]
    assert len(set(numbers)) == len(numbers)
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    # Each bit is used: no number was cut to 32 bits and widened again.
    unsigned = [number % 2**64 for number in numbers]
    for bit in range(64):
        ones = sum(number >> bit & 1 for number in unsigned)
        assert 700 < ones < 1300


def test_d20_advisory_numbers_are_salted(key: str) -> None:
    """Another use of the same key has another number, and so has a copy of the secret."""
    ours = turn_of("default", key)
    assert ours == turn_of("default", key) != number_of("default", key)
    ask("default", f'CREATE TEMPORARY TABLE "{SALT}" AS SELECT * FROM "{SALT}"')
    try:
        assert turn_of("default", key) != ours
    finally:
        ask("default", f'DROP TABLE pg_temp."{SALT}"')
    assert turn_of("default", key) == ours


def test_d20_both_paths_take_the_same_number(key: str) -> None:
    """Functions and ORM code queue behind each other: a stranger on the number stops both."""
    with _both_paths() as backends, server(_name()) as stranger:
        for backend in backends:
            name = backend._name(key)
            stranger.execute("SELECT pg_advisory_lock(%s)", [turn_of("default", name)])
            answer = backend.acquire(key, new_token(), 30, bound=0.05)
            assert isinstance(answer, Contended)
            assert answer.busy
            stranger.execute("SELECT pg_advisory_unlock(%s)", [turn_of("default", name)])
            assert backend.release(take(backend, key)) is True


@pytest.mark.parametrize("alias", ["postgres", "postgres_orm"])
def test_d20_foreign_lock_on_the_number_is_no_deadlock(key: str, alias: str) -> None:
    """Somebody else's advisory lock delays an acquire by its wait, and a holder not at all."""
    lock = distlock(key, backend=alias, wait=0.3)
    lease = lock.acquire()
    number = turn_of("default", lock_backends[alias]._name(key))
    with server(_name()) as stranger:
        stranger.execute("SELECT pg_advisory_lock(%s)", [number])
        lease.extend()
        assert lease.release() is True
        with prompt(BUSY_SECONDS), pytest.raises(BackendUnavailable):
            lock.acquire()
        assert not lock.locked()
    with lock as lease:
        assert lease.fence == 2


@pytest.mark.parametrize("alias", ["postgres", "postgres_orm"])
def test_d20_own_lock_on_the_number_is_left_alone(key: str, alias: str) -> None:
    """What the session of the caller has locked for itself, it has afterwards."""
    number = 4242
    ask("default", "SELECT pg_advisory_lock(%s)", number)
    with distlock(key, backend=alias):
        pass
    held = ask(
        "default",
        "SELECT classid, objid FROM pg_locks"
        " WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    )
    assert held == [(0, number)]
    with transaction.atomic():
        Row.objects.exists()
        with distlock(key, backend=alias):
            pass
    assert ask("default", "SELECT pg_advisory_unlock(%s)", number) == [(True,)]


def _name() -> str:
    return str(connections["default"].settings_dict["NAME"])
