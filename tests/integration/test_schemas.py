"""The tables of locks are in one schema, whatever the connection of a caller is set to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_distlock import LockError, LockLost, LockUsageError, distlock
from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.fencing.rejecting import Fence
from django_distlock.fencing.seen import see
from django_distlock.handler import lock_backends
from django_distlock.inspection import force_release, statistics, summary
from tests.backends import ADVISORY
from tests.contract.aliases import alias_like, locks_on
from tests.contract.test_failures import OPERATIONS

from .databases import ask, ask_mysql, lock_and_release, migrate

FENCES = "django_distlock_fencecounter"

Store = DatabaseBackend | AdvisoryBackend

KINDS = {
    "functions": ("postgresql", {}),
    "orm": ("postgresql", {"server_functions": False}),
    "mariadb": ("mysql", {}),
    "session": ("postgresql", {}),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Give a lock backend on a database that has the tables, of each kind in turn."""
    database, options = KINDS[request.param]
    using = request.getfixturevalue(database)
    migrate(using)
    more = {"BACKEND": ADVISORY} if request.param == "session" else {}
    with locks_on(using, OPTIONS={"using": using, **options}, **more) as alias:
        backend = lock_backends[alias]
        assert isinstance(backend, Store)
        try:
            yield backend
        finally:
            if isinstance(backend, AdvisoryBackend):
                backend._sessions.close_all()
            backend._connections.close_all()


@pytest.fixture
def elsewhere(store: Store) -> Iterator[str]:
    """Give the statement that moves a session to another schema, which has the tables as well."""
    using = store.using
    database = connections[using].settings_dict["NAME"]
    if connections[using].vendor == "mysql":
        other = f"{database}_b"
        ask_mysql(f"CREATE DATABASE {other}")
        try:
            with alias_like("mariadb", NAME=other) as alias:
                migrate(alias)
            yield f"USE `{other}`"
        finally:
            ask_mysql(f"DROP DATABASE {other}")
        return
    ask(using, "CREATE SCHEMA tenant")
    path = {"options": "-c search_path=tenant"}
    with alias_like("default", NAME=database, OPTIONS=path) as alias:
        migrate(alias)
    yield "SET search_path = tenant, public"


def test_caller_that_moves_meets_the_same_lock(store: Store, elsewhere: str) -> None:
    """Outside and inside of `atomic()`, moved or not: one holder, and fences that grow.

    Its guard looks at the counter of its lease, and at no other of the same key.
    """
    using, lock = store.using, distlock("invoice:42", backend=store.alias, wait=0)
    fences = []
    for moved in (False, True):
        if moved:
            ask(using, elsewhere)
        lease = lock.acquire()
        with transaction.atomic(using=using):
            ask(using, "SELECT 1")
            assert lock.try_acquire() is None
            lease.extend()
        assert lock.locked()
        assert lease.release()
        fences.append(lease.fence)
        with transaction.atomic(using=using):
            ask(using, "SELECT 1")
            inner = lock.acquire()
            fences.append(inner.fence)
        assert inner.release() or inner.is_released
    assert fences == sorted(set(fences))
    connections[using].close()
    lease = lock.acquire()
    ask(using, elsewhere)
    with lease.atomic(using=using):
        assert store.read("invoice:42") is not None
    force_release("invoice:42", backend=store.alias, actor="test", reason="test")
    with pytest.raises(LockLost), lease.atomic(using=using):
        pass


def test_every_operation_finds_the_tables(store: Store) -> None:
    """Operations, counts and lists work from where there are no tables at all."""
    using = store.using
    aside = "USE mysql" if connections[using].vendor == "mysql" else "SET search_path = pg_catalog"
    for operation in OPERATIONS.values():
        ask(using, aside)
        with suppress(LockUsageError):  # Session locks have no end to move.
            operation(store)
    grant = store.acquire("invoice:42", new_token(), 30)
    assert isinstance(grant, Grant)
    assert [each.key for each in store.list().records] == ["invoice:42"]
    assert store.records.of(["invoice:42"]) == [store.read("invoice:42")]
    for question in (summary, statistics):
        question(backend=store.alias)
    assert see(Fence("invoice:42", grant.fence), using) == grant.fence
    assert store.force_release("invoice:42") is not None
    # A test run gives an alias another database: it is asked for its own schema.
    tables, before = store._connections, connections[using].settings_dict["NAME"]
    mysql = connections[using].vendor == "mysql"
    assert tables.schema == (before if mysql else "public")
    connections[using].close()
    connections[using].settings_dict["NAME"] = "mysql" if mysql else "postgres"
    assert tables.schema == ("mysql" if mysql else "public")
    connections[using].settings_dict["NAME"] = before


def test_tables_of_a_caller_alone_are_not_used(postgresql: str) -> None:
    """Where a new connection finds none, it says what to run, wherever the caller has some."""
    ask(postgresql, "CREATE SCHEMA tenant")
    ask(postgresql, "SET search_path = tenant")
    migrate(postgresql)
    with locks_on(postgresql) as alias:
        lock = distlock("invoice:42", backend=alias, wait=0)
        with pytest.raises(LockError, match="migrate"):
            lock.acquire()
        # It is asked again, and needs no new process.
        connections[postgresql].close()
        migrate(postgresql)
        assert lock.acquire().release()


def test_receiver_that_sets_the_path_is_obeyed(postgresql: str) -> None:
    """What each new connection is set to is where it finds the tables."""
    ask(postgresql, "CREATE SCHEMA app")

    def prepare(connection: BaseDatabaseWrapper, **_: object) -> None:
        if connection.alias == postgresql:
            connection.connection.execute("SET search_path = app")

    connections[postgresql].close()
    connection_created.connect(prepare)
    try:
        migrate(postgresql)
        assert lock_and_release(postgresql) == 1
        assert ask(postgresql, f"SELECT fence FROM app.{FENCES}") == [(1,)]
    finally:
        connection_created.disconnect(prepare)


def test_session_locks_of_two_schemas_are_apart(postgresql: str) -> None:
    """Advisory locks are the database's: a deployment in another schema has its own."""
    ask(postgresql, "CREATE SCHEMA tenant")
    migrate(postgresql)
    database = connections[postgresql].settings_dict["NAME"]
    path = {"options": "-c search_path=tenant"}
    with alias_like("default", NAME=database, OPTIONS=path) as other:
        migrate(other)
        stores = []
        for using in (postgresql, other):
            with locks_on(using, BACKEND=ADVISORY) as alias:
                stores.append(lock_backends[alias])
        try:
            granted = [each.acquire("invoice:42", new_token(), 30) for each in stores]
            assert all(isinstance(each, Grant) for each in granted)
            assert [len(each.list().records) for each in stores] == [1, 1]
        finally:
            for each in stores:
                assert isinstance(each, AdvisoryBackend)
                each._sessions.close_all()
                each._connections.close_all()
