"""PgBouncer in transaction mode: the next statement may run on any of its few sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from psycopg import IsolationLevel

from django_distlock import BackendUnavailable, LockError, LockNotAcquired, distlock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant, Unknown
from django_distlock.handler import lock_backends
from django_distlock.models import HeldLock
from tests.contract.aliases import alias_like, locks_on, session_of
from tests.contract.helpers import Later
from tests.integration.databases import ask, server
from tests.poolers import pgbouncer
from tests.processes import spawn
from tests.shop.models import Row

from .counting import (
    EAGER,
    PATIENCE,
    acount_once,
    assert_none_lost,
    count_by_transaction,
    count_inside,
    count_once,
    new_counter,
    together,
)
from .sessions import close_ours, named

#: Sessions that PgBouncer has for all of its clients.
POOL = 3
#: How often each client counts.
TIMES = 5


@contextmanager
def bounced(
    *,
    size: int = POOL,
    server_functions: bool = True,
    bouncer: dict[str, Any] | None = None,
    **changes: Any,
) -> Iterator[tuple[str, str]]:
    """Give an alias that goes through a PgBouncer, and locks on it."""
    with (
        pgbouncer(default_pool_size=size, **(bouncer or {})) as address,
        through(address, server_functions=server_functions, **changes) as names,
    ):
        yield names


@contextmanager
def through(
    address: dict[str, Any], *, server_functions: bool, **changes: Any
) -> Iterator[tuple[str, str]]:
    """Give an alias that goes through this PgBouncer, and locks on it."""
    with alias_like("default", **address, **changes) as using:
        options = {"using": using, "server_functions": server_functions}
        with locks_on(using, OPTIONS=options) as backend:
            try:
                yield using, backend
            finally:
                close_ours(backend)


@pytest.fixture(params=[True, False], ids=["functions", "orm"])
def server_functions(request: pytest.FixtureRequest) -> bool:
    """Say which of PostgreSQL's two paths the backend takes."""
    chosen: bool = request.param
    return chosen


def test_clients_exclude_each_other(key: str, server_functions: bool) -> None:
    """Threads, transactions, tasks and processes count through few sessions without a loss."""
    new_counter(key)
    with pgbouncer(default_pool_size=POOL) as address, ExitStack() as stack:
        elsewhere = [
            stack.enter_context(
                spawn(f"{__name__}:count_elsewhere", address, key, server_functions)
            )
            for _ in range(2)
        ]
        using, backend = stack.enter_context(through(address, server_functions=server_functions))
        lock = distlock(key, backend=backend, wait=PATIENCE, retry=EAGER)

        def awaited() -> list[Any]:
            async def one_after_the_other() -> list[Any]:
                try:
                    return [await acount_once(lock, key, using) for _ in range(TIMES)]
                finally:
                    # Of the thread that asynchronous code asks Django in, and that nobody ends.
                    await sync_to_async(connections.close_all)()

            return asyncio.run(one_after_the_other())

        def threaded(count: Any) -> list[Any]:
            return [count(lock, key, using) for _ in range(TIMES)]

        for process in elsewhere:
            process.wait_for("ready", PATIENCE)
        for process in elsewhere:
            process.send("go")
        # Fewer transactions at once than there are sessions: they lock on another one.
        here: list[Callable[[], list[Any]]] = [partial(threaded, count_once)] * 6
        here += [partial(threaded, count_inside), awaited]
        counted = together(here) + [process.result(PATIENCE) for process in elsewhere]
        assert_none_lost(each for answers in counted for each in answers)
        assert len(counted) * TIMES == Row.objects.get(name=key).value
        assert not Later(lock.locked).result()


def count_elsewhere(
    address: dict[str, Any], key: str, server_functions: bool
) -> list[tuple[int, int]]:
    """Count in a process of its own."""
    with through(address, server_functions=server_functions) as (using, backend):
        lock = distlock(key, backend=backend, wait=PATIENCE, retry=EAGER)
        print("ready")
        input()
        return [count_once(lock, key, using) for _ in range(TIMES)]


#: Where arguments are bound: by the client, and on the server, where all the same nothing is
#: prepared for a session.
BINDING: list[dict[str, Any]] = [{}, {"OPTIONS": {"server_side_binding": True}}]


def test_every_operation_works(key: str, server_functions: bool) -> None:
    """Each operation of a backend answers as without PgBouncer, again and again."""
    with pgbouncer(default_pool_size=POOL) as address:
        for more in BINDING:
            with through(address, server_functions=server_functions, **more) as (using, alias):
                use_every_operation(lock_backends[alias], using, f"{key}:{len(more)}")


def test_transactions_lock_keys(key: str) -> None:
    """Each client has its session for a transaction, and so what it locks there."""

    def work() -> list[int]:
        return [count_by_transaction(name, using, alias)[0] for _ in range(TIMES)]

    with pgbouncer(default_pool_size=POOL) as address:
        for more in BINDING:
            name = f"{key}:{len(more)}"
            new_counter(name)
            with through(address, server_functions=True, **more) as (using, alias):
                # A process that asks for the first time asks for the schema, by another session.
                counted = work() + [each for some in together([work] * 4) for each in some]
            assert sorted(counted) == list(range(1, 5 * TIMES + 1))


def use_every_operation(backend: BaseLockBackend, using: str, key: str) -> None:
    """Call each operation more often than psycopg executes a statement before it prepares it."""
    for _ in range(7):
        token = new_token()
        grant = backend.acquire(key, token, 30)
        assert isinstance(grant, Grant)
        with transaction.atomic(using=using):
            ask(using, "SELECT 1")
            assert isinstance(backend.acquire(key, new_token(), 30, wanted=True), Contended)
            assert isinstance(backend.extend(grant, 60), Grant)
            assert isinstance(backend.extend_many([grant])[0], Grant)
        record = backend.read(key)
        assert record is not None
        assert record.token == token
        assert backend.read_token(token) == record
        assert [each.key for each in backend.list(key).records] == [key]
        assert backend.request_stop(key, 20) is not None
        assert backend.request_stop(key) is not None
        assert backend.release(grant) is True
        taken_away = backend.acquire(key, new_token(), 30)
        assert isinstance(taken_away, Grant)
        assert taken_away.fence == grant.fence + 1
        assert backend.force_release(key) is not None
        backend.pause(key, taken_away.acquired_at + timedelta(seconds=60), "a test")
        assert isinstance(backend.acquire(key, new_token(), 30), Contended)
        assert backend.pause(key, None) is True
        assert asyncio.run(_awaited(backend, key)) is True


async def _awaited(backend: BaseLockBackend, key: str) -> bool | Unknown:
    grant = await backend.threads.run(backend.acquire, key, new_token(), 30)
    assert isinstance(grant, Grant)
    return await backend.threads.run(backend.release, grant)


def test_session_is_given_on_as_it_was(key: str, server_functions: bool) -> None:
    """The next client of a session finds no setting, no lock and no statement of ours on it."""
    settings = ("lock_timeout", "synchronous_commit", "transaction_isolation", "statement_timeout")
    question = "SELECT " + ", ".join(f"current_setting('{name}')" for name in settings)
    with server() as raw:
        expected = raw.execute(question).fetchone()
    new_counter(key)
    # One session for all, so that the next client gets the one that was used.
    with bounced(size=1, server_functions=server_functions, **named(key)) as (using, alias):
        backend = lock_backends[alias]
        lock = distlock(key, backend=alias)

        def use() -> None:
            with lock as lease:
                lease.extend()
                assert lock.try_acquire() is None
            if server_functions:
                with lock, pytest.raises(LockNotAcquired):
                    Later(count_by_transaction, key, using, alias, wait=0).result(PATIENCE)
                count_by_transaction(key, using, alias)
            lease = lock.acquire()
            assert backend.force_release(key) is not None
            assert lease.release() is False

        Later(use).result(PATIENCE)
        Later(asyncio.run, _use_async(lock)).result(PATIENCE)
        used = session_of(using)
        settings_dict = connections[using].settings_dict
        with psycopg.connect(
            host=settings_dict["HOST"], port=settings_dict["PORT"], user=settings_dict["USER"],
            dbname=settings_dict["NAME"], autocommit=True,
        ) as client:  # fmt: skip
            assert client.execute("SELECT pg_backend_pid()").fetchone() == (used,)
            assert client.execute(question).fetchone() == expected
            assert client.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
            held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
            assert client.execute(held, [used]).fetchone() == (0,)


async def _use_async(lock: Any) -> None:
    async with lock as lease:
        await lease.aextend()


def test_client_left_a_transaction_open(key: str) -> None:
    """Where a client holds its session in a transaction, its locks come from another session."""
    with bounced(size=2) as (using, backend):
        lock = distlock(key, backend=backend)
        with transaction.atomic(using=using):
            ask(using, "SELECT 1")
            with lock:
                assert _recorded(key)
            # Its release waits for the end of the transaction.
            assert _recorded(key)
        assert not _recorded(key)


def _recorded(key: str) -> bool:
    """Ask around PgBouncer."""
    return HeldLock.objects.using("default").filter(key=key).exists()


def test_too_few_sessions_grant_nothing(key: str) -> None:
    """All sessions are taken by transactions that want locks: PgBouncer's timeout ends it."""
    limit = {"query_wait_timeout": 1}
    with bounced(size=1, bouncer=limit) as (using, backend):
        lock = distlock(key, backend=backend, wait=0)
        with transaction.atomic(using=using):
            ask(using, "SELECT 1")
            with pytest.raises(BackendUnavailable):
                lock.acquire()
            assert not _recorded(key)
        # The session is free again, and the key with it.
        with lock as lease:
            assert lease.fence == 1


def test_isolation_of_the_alias_is_no_obstacle(key: str, server_functions: bool) -> None:
    """Where the alias asks for SERIALIZABLE, locks of the same session do not."""
    serializable = {"isolation_level": IsolationLevel.SERIALIZABLE}
    with bounced(server_functions=server_functions, OPTIONS=serializable) as (using, backend):
        new_counter(key)
        lock = distlock(key, backend=backend, wait=PATIENCE, retry=EAGER)
        counted = together([lambda: [count_once(lock, key, using) for _ in range(5)]] * 6)
        assert_none_lost(each for answers in counted for each in answers)


def test_statement_that_the_driver_has_prepared_is_no_missing_table(key: str) -> None:
    """Who asks psycopg to prepare statements is told which one the session has from another."""
    prepares = {"server_side_binding": True, "prepare_threshold": 0}
    with bounced(size=1, OPTIONS=prepares) as (using, backend):
        lock = distlock(key, backend=backend, wait=0)

        def use() -> None:
            try:
                with lock:
                    pass
            finally:
                connections[using].close()

        def use_twice() -> None:
            for _ in range(2):
                Later(use).result(PATIENCE)

        with pytest.raises(LockError, match="failed: prepared statement"):
            use_twice()
