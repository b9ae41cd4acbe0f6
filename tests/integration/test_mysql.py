"""What is peculiar to MariaDB and MySQL: engines, character sets, gap locks, timeouts, sessions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import pytest
from django.apps import apps
from django.core import checks
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import override_settings

from django_distlock import BackendUnavailable, LockError, distlock, transaction_lock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import FENCE_MAX, UNKNOWN, Contended, Grant, Holder
from django_distlock.database.vendors.mysql import MySQL, _WithBound
from django_distlock.handler import lock_backends
from django_distlock.locks.attempts import BUSY_SECONDS
from django_distlock.managers.compound import CompoundLockManager, prepared_by
from django_distlock.models import FenceCounter, HeldLock, LockEvent
from tests import services
from tests.backends import DATABASE, Registered
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import Later, held, prompt, take, there
from tests.contract.locking import eventually
from tests.contract.stores import DatabaseStore, MariaDB
from tests.settings import database
from tests.shop.models import Row

from .databases import (
    APP,
    TABLES,
    ask,
    ask_mysql,
    errors_on,
    every_statement,
    here,
    is_mariadb,
    lock_and_release,
    migrate,
    only_mariadb,
    role,
)
from .projects import Project
from .test_connections import PATIENT, exclude_each_other
from .test_migrations import run_script, sqlmigrate

LOCKS, FENCES = "django_distlock_heldlock", "django_distlock_fencecounter"
REPEATABLE_READ = {"isolation_level": "repeatable read"}
ISOLATIONS: list[dict[str, str | None]] = [
    {"isolation_level": "repeatable read"},
    {"isolation_level": "serializable"},
    {"isolation_level": None},  # the server's own
    {
        "isolation_level": None,
        "init_command": "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    },
]
# The server's numbers for what ends a wait.
LOCK_WAIT_TIMEOUT, DEADLOCK, MAX_STATEMENT_TIME, MAX_EXECUTION_TIME = 1205, 1213, 1969, 3024
NOT_PREPARED, TOO_MANY_PREPARED = 1243, 1461
# MySQL's own, where a row is locked for which nobody wants to wait.
NOWAIT = 3572
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
TEXT = "żółć 🔒 日本語"


@pytest.fixture
def using(mysql: str) -> str:
    """Give the alias of a MariaDB database of one's own with the tables."""
    migrate(mysql)
    return mysql


@pytest.fixture
def shared() -> str:
    """Give the alias of the MariaDB database that all tests share."""
    here("mariadb")
    return "mariadb"


@contextmanager
def store_on(using: str, key: str, **options: Any) -> Iterator[DatabaseStore]:
    """Give what keeps the records of a backend on an alias."""
    with locks_on(using, OPTIONS={"using": using, **options}) as alias:
        registered = Registered(alias=alias, path=DATABASE, store="mysql", using=using)
        store = DatabaseStore(registered, key)
        yield store
        store.close()


@pytest.fixture
def store(shared: str, key: str) -> Iterator[DatabaseStore]:
    """Give what keeps the records of a backend on the shared database."""
    with store_on(shared, key) as store:
        yield store


@pytest.fixture
def orm_store(shared: str, key: str) -> Iterator[DatabaseStore]:
    """Give the same without blocks of the server's language, which MySQL has not."""
    with store_on(shared, key, server_functions=False) as store:
        yield store


@pytest.fixture
def stranger(store: DatabaseStore) -> MariaDB:
    """Give another client of the database."""
    made = store.stranger()
    assert isinstance(made, MariaDB)
    return made


# Tables


@contextmanager
def default_engine(using: str, engine: str) -> Iterator[str]:
    """Give an alias of the same database where tables get another engine by default."""
    if engine == "Aria":
        only_mariadb(using, engine)
    chosen = {"init_command": f"SET default_storage_engine = '{engine}'"}
    with alias_like(using, OPTIONS=chosen) as alias:
        ask(alias, "CREATE TABLE other (id integer)")
        assert engines(alias)["other"] == engine
        yield alias


def engines(using: str) -> dict[str, str]:
    """Return the engine of each table."""
    return dict(
        ask(
            using,
            "SELECT table_name, engine FROM information_schema.tables"
            " WHERE table_schema = DATABASE()",
        )
    )


@pytest.mark.parametrize("engine", ["MyISAM", "Aria"])
def test_tables_are_transactional_whatever_the_default(mysql: str, engine: str) -> None:
    """Row locks need InnoDB: our tables ask for it, and the tables of others keep what they had."""
    with default_engine(mysql, engine) as alias:
        for make in (migrate, lambda using: run_script(using, sqlmigrate(using))):
            make(alias)
            assert {engines(alias)[table] for table in TABLES} == {"InnoDB"}
            assert ask(alias, "SELECT @@default_storage_engine") == [(engine,)]
            assert lock_and_release(alias) == 1
            migrate(alias, "zero")


@pytest.mark.parametrize("engine", ["MyISAM", "Aria"])
def test_tables_that_are_not_transactional_are_refused(mysql: str, engine: str) -> None:
    """Without migrations nobody asks for InnoDB: the server refuses, and makes no unsafe table."""
    with (
        default_engine(mysql, engine) as alias,
        override_settings(MIGRATION_MODULES={APP: None}),
        pytest.raises(DatabaseError, match="too long"),
    ):
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)


def test_tables_that_were_converted_are_reported(using: str) -> None:
    """W104 names the tables that somebody has given another engine."""
    with locks_on(using):
        ids = [each.id for each in checks.run_checks(databases=[using])]
        assert "distlock.W104" not in ids
        ask(using, f"ALTER TABLE {FENCES} MODIFY storage_key varchar(200)")
        ask(using, f"ALTER TABLE {FENCES} ENGINE = MyISAM")
        found = checks.run_checks(databases=[using])
        (message,) = [each for each in found if each.id == "distlock.W104"]
        assert FENCES in message.msg
        assert LOCKS not in message.msg


def test_key_columns_compare_bytes_and_have_one_index(using: str) -> None:
    """Keys are utf8mb4 without padding; no index is on a column that every extend writes."""
    tables = "table_schema = DATABASE() AND table_name IN (%s, %s)"
    found = ask(
        using,
        "SELECT table_name, column_name, collation_name FROM information_schema.columns"
        f" WHERE {tables}"
        " AND column_name IN ('storage_key', 'key', 'token', 'task_id', 'holder_host')",
        LOCKS,
        FENCES,
    )
    assert len(found) == 7
    collation = "utf8mb4_nopad_bin" if is_mariadb(using) else "utf8mb4_0900_bin"
    assert {row[2] for row in found} == {collation}
    indexed = ask(
        using,
        "SELECT table_name, column_name FROM information_schema.statistics"
        f" WHERE {tables} ORDER BY 1, 2",
        LOCKS,
        FENCES,
    )
    assert [(table, column) for table, column in indexed] == [
        (FENCES, "storage_key"), (LOCKS, "storage_key"), (LOCKS, "task_id"), (LOCKS, "token"),
    ]  # fmt: skip


ALIKE = ["a", "A", "á", "ä", "a ", " a", "a  ", "a\t", "\uff41", "ß", "ss"]


def test_texts_that_look_alike_are_different_rows(using: str) -> None:
    """The server tells case, accents and trailing spaces apart, in rows and in questions."""
    rows = HeldLock.objects.using(using)
    about = {"fence": 1, "acquired_at": LONG_AGO, "renewed_at": LONG_AGO, "holder_host": "host"}
    for text in ALIKE:
        rows.create(storage_key=text, token=text, key=text, **about)
    for text in ALIKE:
        for column in ("storage_key", "token"):
            assert rows.get(**{column: text}).key == text
            query = f"SELECT {column} FROM {LOCKS} WHERE {column} = %s"
            assert ask(using, query, text) == [(text,)]


def test_database_of_another_character_set_takes_any_text(store: DatabaseStore, key: str) -> None:
    """In a database of latin1, keys, holders and what operators write keep their characters."""
    backend, text, using = store.backend, f"{key} {TEXT}", store.registered.using
    assert store.ask("SELECT @@character_set_database") == [("latin1",)]
    holder = Holder(host=f"🖥 {key}", task_id=text, metadata={"user": TEXT})
    grant = take(backend, text, holder=holder)
    assert grant.key == text
    record = held(backend, text)
    assert (record.key, record.holder) == (text, holder)
    for found in (
        backend.list(text[:-1]),
        backend.list(host=holder.host),
        backend.list(task_id=holder.task_id),
    ):
        assert [each.key for each in found.records] == [text]
    assert backend.release(grant) is True
    assert backend.pause(key, store.now() + timedelta(minutes=1), by=TEXT) is True
    assert FenceCounter.objects.using(using).get(key=key).paused_by == TEXT
    event = LockEvent(
        backend="default", key=TEXT, kind="forced", holder={"user": TEXT}, actor=TEXT,
        reason=TEXT, details={"why": TEXT},
    )  # fmt: skip
    event.save(using=using)
    event.refresh_from_db(using=using)
    assert {event.actor, event.reason, event.holder["user"], event.details["why"]} == {TEXT}


@pytest.mark.parametrize("server_functions", [True, False])
def test_sessions_of_another_character_set_lock_any_key(
    shared: str, key: str, server_functions: bool
) -> None:
    """`OPTIONS["charset"]` is about the project's texts, and older ones say utf8 or latin1."""
    with alias_like(shared, OPTIONS={"charset": "latin1"}) as using:
        options = {"using": using, "server_functions": server_functions}
        with locks_on(using, OPTIONS=options) as backend:
            lock = distlock(f"{key} {TEXT}", backend=backend, metadata={"user": TEXT}, wait=0)
            with lock as lease, lease.atomic():
                assert lock.locked()
                lease.extend()
            with replace(lock, shared=True):
                pass
            with transaction.atomic(using=using):
                transaction_lock(lock.key, backend=backend, wait=0)


def test_django_has_nothing_against_the_models(using: str) -> None:
    """`manage.py check` warns neither of long unique columns (mysql.W003) nor of anything else."""
    app = apps.get_app_config(APP)
    found = checks.run_checks(app_configs=[app], databases=[using])
    assert [
        each for each in found if str(each.id).startswith(("mysql.", "fields.", "models."))
    ] == []
    said = Project(using).manage("check", "--database", "default")
    assert "mysql." not in said


# Other transactions in the way


def free(backend: BaseLockBackend, grant: Grant, bound: float) -> object:
    """Acquire a key that is free."""
    return backend.acquire(f"{grant.key}-free", new_token(), 30, bound=bound)


#: Every operation that locks: what it is called, and whether it needs the key to be held.
OPERATIONS: dict[str, Callable[[BaseLockBackend, Grant, float], object]] = {
    "acquire": free,
    "takeover": lambda backend, grant, bound: backend.acquire(
        grant.key, new_token(), 30, replace=grant.token, bound=bound
    ),
    "contend": lambda backend, grant, bound: backend.acquire(
        grant.key, new_token(), 30, wanted=True, bound=bound
    ),
    "extend": lambda backend, grant, bound: backend.extend(grant, bound=bound),
    "extend_many": lambda backend, grant, bound: backend.extend_many([grant]),
    "release": lambda backend, grant, bound: backend.release(grant, bound=bound),
    "settle": lambda backend, grant, bound: backend.release(grant, 60, bound=bound),
    "shorten": lambda backend, grant, bound: backend.request_stop(grant.key, 20, bound=bound),
    "request_stop": lambda backend, grant, bound: backend.request_stop(grant.key, bound=bound),
    "force_release": lambda backend, grant, bound: backend.force_release(grant.key, bound=bound),
    "pause": lambda backend, grant, bound: backend.pause(grant.key, grant.acquired_at, bound=bound),
    "resume": lambda backend, grant, bound: backend.pause(grant.key, None, bound=bound),
    "read": lambda backend, grant, bound: backend.read(grant.key),
    "read_token": lambda backend, grant, bound: backend.read_token(grant.token),
    "list": lambda backend, grant, bound: backend.list(),
    "cleanup": lambda backend, grant, bound: backend.cleanup(grant.acquired_at),
}
#: Those that are one block of the server's language.
BLOCKS = {"acquire", "takeover", "contend", "extend", "release", "settle"}
#: Those that wait for the record of a held key.
WAITING = ["takeover", "contend", "extend", "release", "settle", "shorten", "request_stop"]


def is_busy(answer: object) -> bool:
    """Say whether an operation did not learn what it was asked."""
    return answer is UNKNOWN or (isinstance(answer, Contended) and answer.busy)


@pytest.mark.parametrize(
    ("operation", "what"), [*((each, "row") for each in WAITING), ("acquire", "table")]
)
def test_what_somebody_locks_is_busy(
    store: DatabaseStore, stranger: MariaDB, key: str, operation: str, what: str
) -> None:
    """However the wait ends, for a row or a backup's table, it is busy and nothing was changed."""
    backend = store.backend
    grant = take(backend, key)
    before = held(backend, key)
    if what == "row":
        stranger.hold(key)
    else:
        # For which the server by itself would wait a day.
        stranger.hold_table()
    part, none = MAX_STATEMENT_TIME, LOCK_WAIT_TIMEOUT
    if not is_mariadb(store.registered.using):
        part = none = MAX_EXECUTION_TIME
    elif operation in BLOCKS:
        # A block waits for whole seconds, or not at all.
        part = LOCK_WAIT_TIMEOUT
    for bound, number in ((1, LOCK_WAIT_TIMEOUT), (0.2, part), (0, none)):
        with prompt(bound), errors_on(store.registered.using) as errors:
            assert is_busy(OPERATIONS[operation](backend, grant, bound)), bound
        assert errors == {number}, bound
    stranger.rollback()
    assert held(backend, key) == before
    assert not is_busy(OPERATIONS[operation](backend, grant, 1))


def test_deadlock_is_busy(store: DatabaseStore, stranger: MariaDB, key: str) -> None:
    """Who is chosen to give way has changed nothing, and the next attempt works."""
    backend = store.backend
    old = take(backend, key, 5)
    store.elapse(6.1)
    # The server ends the one that has changed less.
    stranger.execute(
        "INSERT INTO shop_row (name, value) WITH RECURSIVE seq (n) AS"
        " (SELECT 1 UNION ALL SELECT n + 1 FROM seq WHERE n < 100) SELECT 'ballast', n FROM seq"
    )
    stranger.hold(key)
    seen: list[set[int]] = []

    def acquire() -> Grant | Contended:
        with errors_on(store.registered.using) as errors:
            seen.append(errors)
            return backend.acquire(key, new_token(), 30)

    waiter = Later(acquire)
    stranger.wait_until_blocked()
    # Against the order of all others: the record first, then the fence.
    name = store.name(key)
    stranger.execute(f"SELECT 1 FROM {FENCES} WHERE storage_key = %s FOR UPDATE", name)
    assert is_busy(waiter.result())
    # Behind it the look for a guard may find the row taken, too.
    assert DEADLOCK in seen[0]
    stranger.rollback()
    assert store.fence(key) == old.fence
    assert take(backend, key).fence == old.fence + 1


def refusal() -> Exception:
    """Make the error that drivers raise where MySQL answers NOWAIT; MariaDB has another number."""
    said = "Statement aborted because lock(s) could not be acquired immediately and NOWAIT is set."
    error: Exception = services.mysql_driver().OperationalError(NOWAIT, said)
    return error


@contextmanager
def answered_as_by_mysql(using: str) -> Iterator[list[str]]:
    """Let the first NOWAIT of this thread's connection fail as on MySQL; give the statement."""
    refused: list[str] = []

    def answer(execute: Callable[..., Any], sql: str, *more: Any) -> Any:
        if refused or "NOWAIT" not in sql:
            return execute(sql, *more)
        refused.append(sql)
        # The driver's error becomes Django's, as it does inside of `execute`.
        with connections[using].wrap_database_errors:
            raise refusal()

    with every_statement(using, answer):
        yield refused


def test_numbers_that_say_that_others_are_in_the_way() -> None:
    """Those of both servers, wherever Django has put the driver's error."""
    in_the_way = [LOCK_WAIT_TIMEOUT, DEADLOCK, MAX_STATEMENT_TIME, MAX_EXECUTION_TIME, NOWAIT]
    duplicate, gone_away = 1062, 2006
    busy = []
    for number in (*in_the_way, duplicate, gone_away):
        error = OperationalError(number, "as Django says it")
        error.__cause__ = services.mysql_driver().OperationalError(number, "as the driver says it")
        if MySQL(connections["default"], "default").is_busy(error):
            busy.append(number)
    assert busy == in_the_way


def test_server_that_takes_no_work_has_not_refused_a_statement(using: str) -> None:
    """A node of Galera without the others, a full disk, an account that is locked: each its code.

    So waiters try again, and tasks and views do as they are told where the store is away.
    """
    away = {
        1047: "service_unavailable", 1114: "rate_limited", 1130: "auth_failed",
        1862: "auth_failed", 4151: "auth_failed",
    }  # fmt: skip
    codes = {}
    for number in away:
        ask(using, f"CREATE TRIGGER away BEFORE INSERT ON {LOCKS} FOR EACH ROW"
            f" SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}")  # fmt: skip
        with locks_on(using) as alias, pytest.raises(LockError) as refused:
            distlock("key", wait=0, backend=alias).acquire()
        codes[number] = refused.value.code
        ask(using, "DROP TRIGGER away")
    assert codes == away


@pytest.mark.parametrize(
    ("bound", "hint"),
    [
        (0, "MAX_EXECUTION_TIME(100)"),
        (0.25, "MAX_EXECUTION_TIME(250)"),
        (1, "SET_VAR(lock_wait_timeout=1)"),
        (1.5, "MAX_EXECUTION_TIME(1500)"),
    ],
)
def test_hint_bounds_what_reads_or_locks_on_mysql(bound: float, hint: str) -> None:
    """It stands where the server looks for it; what writes or commits has none."""
    sent: list[str] = []
    for statement in (
        "SELECT 1",
        "(SELECT 1) UNION (SELECT 2)",
        "/* SELECT of a wrapper */ select 1",
        "INSERT INTO t SELECT 1",
        "COMMIT",
    ):
        send = _WithBound(bound, is_mariadb=False)
        send(lambda sql, *_more: sent.append(sql), statement, None, False, {})
    assert sent == [
        f"SELECT /*+ {hint} */ 1",
        f"(SELECT /*+ {hint} */ 1) UNION (SELECT 2)",
        f"/* SELECT of a wrapper */ select /*+ {hint} */ 1",
        "INSERT INTO t SELECT 1",
        "COMMIT",
    ]


def test_row_that_mysql_refuses_at_once_is_busy(orm_store: DatabaseStore, key: str) -> None:
    """MySQL's answer to NOWAIT is contention, as MariaDB's is, and no store that is away.

    The lock API tries again, also for who does not wait: nobody is known to have the key.
    """
    backend, alias = orm_store.backend, orm_store.registered.alias
    using = orm_store.registered.using
    for operation in ("acquire", "takeover", "force_release", "pause"):
        grant = take(backend, f"{key}-{operation}")
        before = held(backend, grant.key)
        with errors_on(using) as errors, answered_as_by_mysql(using) as refused:
            assert is_busy(OPERATIONS[operation](backend, grant, 1)), operation
        assert errors == {NOWAIT}, operation
        assert FENCES in refused[0], operation
        assert held(backend, grant.key) == before
        assert not is_busy(OPERATIONS[operation](backend, grant, 1))
    for options in (PATIENT, {"wait": 0}):
        lock = distlock(key, backend=alias, **options)
        with answered_as_by_mysql(using) as refused, lock as lease:
            assert lease.held
        assert len(refused) == 1


def test_slow_server_is_not_contention(using: str, key: str) -> None:
    """Who does not wait for others is granted a free key at once, however slow the server is."""
    for table, event in ((LOCKS, "INSERT"), (FENCES, "INSERT"), (FENCES, "UPDATE")):
        ask(
            using,
            f"CREATE TRIGGER slow_{table}_{event} BEFORE {event} ON {table}"
            " FOR EACH ROW DO SLEEP(0.15)",
        )
    with locks_on(using) as backend:
        lock = distlock(key, backend=backend, wait=0)
        for fence in (1, 2):
            lease = there(lock.try_acquire())
            assert lease.fence == fence
            assert lease.release() is True


@pytest.mark.parametrize("settings", ISOLATIONS, ids=str)
def test_isolation_of_the_alias_is_no_obstacle(
    shared: str, key: str, settings: dict[str, str | None]
) -> None:
    """Whatever isolation the project has chosen, locks protect, and the session keeps it."""
    with alias_like(shared, OPTIONS=settings) as alias, locks_on(alias) as locks:
        isolation = "SHOW SESSION VARIABLES LIKE 't%_isolation'"
        level = ask(alias, isolation)
        assert level[0][1] != "READ-COMMITTED"
        for where in ("outside", "inside"):
            exclude_each_other(alias, locks, f"{key}-{where}", where)
        assert ask(alias, isolation) == level


# The caller's session


@contextmanager
def session_of_its_own(shared: str) -> Iterator[str]:
    """Give an alias whose session has settings of its own for all that locks have to do with."""
    limit = "max_statement_time = 77.5" if is_mariadb(shared) else "max_execution_time = 77500"
    changed = (
        "SET SESSION innodb_lock_wait_timeout = 37, lock_wait_timeout = 4711,"
        f" {limit}, time_zone = '+05:30', sql_mode = 'STRICT_ALL_TABLES'"
    )
    options = {**REPEATABLE_READ, "init_command": changed}
    with alias_like(shared, OPTIONS=options) as alias:
        yield alias


#: What changes by itself.
VOLATILE = {
    "error_count", "identity", "insert_id", "last_gtid", "last_insert_id", "pseudo_slave_mode",
    "rand_seed1", "rand_seed2", "statement_id", "timestamp", "warning_count",
}  # fmt: skip


def variables(using: str) -> dict[str, str]:
    """Return what the session of this thread is set to."""
    found = dict(ask(using, "SHOW SESSION VARIABLES"))
    return {name: value for name, value in found.items() if name not in VOLATILE}


def test_session_keeps_every_variable(shared: str, key: str) -> None:
    """Whether an operation works, waits or fails: variables and isolation stay the caller's."""
    with session_of_its_own(shared) as alias, store_on(alias, key) as store:
        backend, stranger = store.backend, store.stranger()
        before = variables(alias)
        assert before["innodb_lock_wait_timeout"] == "37"

        def assert_unchanged(operation: str) -> None:
            assert variables(alias) == before, operation
            # A snapshot of the caller's stays one.
            rows = Row.objects.using(alias).filter(name=key)
            with transaction.atomic(using=alias):
                number = rows.count()
                Later(Row.objects.using(shared).create, name=key).result()
                assert rows.count() == number, operation
            assert rows.count() == number + 1, operation

        for operation, operate in OPERATIONS.items():
            grant = take(backend, f"{key}-{operation}")
            ways: list[Callable[[str], None]] = [stranger.hold, stranger.guard]
            if operation in ("acquire", "extend", "release", "pause", "force_release"):
                ways.append(lambda _key: stranger.hold_table())
            for stand_in_the_way in ways:
                stand_in_the_way(grant.key)
                for bound in (0, 0.02):
                    operate(backend, grant, bound)
                    assert_unchanged(operation)
                stranger.rollback()
            store.set_fence(f"{grant.key}-free", FENCE_MAX)
            with suppress(LockError):
                operate(backend, grant, 1)
            assert_unchanged(operation)


def test_limited_selects_hide_no_holder(shared: str, key: str) -> None:
    """Where sessions select few rows, there are still no more holders than permits."""
    name = connections[shared].settings_dict["NAME"]
    options = {"init_command": "SET SESSION sql_select_limit = 1"}
    with alias_like(shared, NAME=name, OPTIONS=options) as alias, locks_on(alias) as locks:
        lock = distlock(key, permits=3, wait=0, backend=locks)
        leases = [lock.acquire() for _ in range(3)]
        assert lock.try_acquire() is None
        assert all(each.release() for each in leases)
        assert ask(alias, "SELECT @@sql_select_limit") == [(1,)]


def test_dialect_of_the_server_is_no_obstacle(shared: str, key: str) -> None:
    """Blocks are written in the usual one; the caller's session keeps its own."""
    dialect = "ORACLE" if is_mariadb(shared) else "ANSI"
    options = {"init_command": f"SET SESSION sql_mode = '{dialect}'"}
    with alias_like(shared, OPTIONS=options) as alias, locks_on(alias) as locks:
        with distlock(key, backend=locks, wait=0) as lease, lease.atomic(using=alias):
            lease.extend()
        assert dialect in ask(alias, "SELECT @@sql_mode")[0][0]


def test_clock_is_the_same_in_every_time_zone(shared: str, key: str) -> None:
    """A session with a time zone of its own sees and sets the same times as all others."""
    with session_of_its_own(shared) as alias, store_on(alias, key) as store:
        ((there, utc),) = ask(alias, "SELECT NOW(), UTC_TIMESTAMP()")
        assert there - utc == timedelta(hours=5, minutes=30)
        grant = take(store.backend, key)
        assert abs(grant.acquired_at - datetime.now(UTC)) < timedelta(minutes=1)
        with locks_on(shared) as other:
            record = held(lock_backends[other], key)
            assert record.acquired_at == grant.acquired_at
            assert record.expires_at == grant.expires_at


@pytest.mark.parametrize(("level", "warned"), [("repeatable read", 1), ("read committed", 0)])
def test_lock_inside_a_snapshot_warns(shared: str, key: str, level: str, warned: int) -> None:
    """What the caller reads may be older than the lock, as on PostgreSQL: that is said."""
    options = {"isolation_level": level}
    with (
        alias_like(shared, OPTIONS=options) as alias,
        locks_on(alias) as locks,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with transaction.atomic(using=alias), distlock(key, backend=locks):
            pass
    assert ["snapshot" in str(each.message) for each in caught] == [True] * warned


def test_servers_own_isolation_is_asked_for(shared: str, key: str) -> None:
    """Where Django leaves it to a server that does not read from snapshots, nothing is refused."""
    first = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
    options = {"isolation_level": None, "init_command": first}
    with (
        alias_like(shared, OPTIONS=options) as alias,
        locks_on(alias) as locks,
        transaction.atomic(using=alias),
    ):
        transaction_lock(f"{key}-1", backend=locks)
        with distlock(f"{key}-2", backend=locks) as lease:
            assert lease.held


@pytest.mark.parametrize("name", ["acquire", "release"])
def test_block_that_is_cut_off_behind_its_commit_has_no_answer(
    key: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nobody is told that the key is contended, or lost, and nothing stays held."""
    only_mariadb(here("mariadb"), "blocks")
    run, cuts = CompoundLockManager._run, iter(["SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1969;"])

    def cut(self: CompoundLockManager, block: Any, values: dict[str, Any], bound: float) -> Any:
        if block == getattr(self, f"_{name}"):
            block = block._replace(text=block.text.replace("COMMIT;", f"COMMIT; {next(cuts, '')}"))
        return run(self, block, values, bound)

    monkeypatch.setattr(CompoundLockManager, "_run", cut)
    with locks_on("mariadb") as locks:
        if name == "release":
            with distlock(key, backend=locks, ttl=30):
                pass
        else:
            with pytest.raises(BackendUnavailable):
                distlock(key, backend=locks, ttl=30, wait=0).acquire()
        assert eventually(lambda: lock_backends[locks].read(key) is None)


# Servers of one's own


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., services.Server]]:
    """Give what starts a server with other settings, once for all tests that want these."""
    with ExitStack() as stack:
        yield cache(lambda **settings: stack.enter_context(services.private_mariadb(**settings)))


@pytest.fixture
def own(request: pytest.FixtureRequest, start: Callable[..., services.Server]) -> Iterator[str]:
    """Give the alias of a database with the tables, in a server whose settings may be changed."""
    here("mariadb")
    server = start(**getattr(request, "param", {}))
    connected = {**database(server.url), "TEST": connections.settings["mariadb"]["TEST"]}
    with alias_like("mariadb", **connected) as alias:
        migrate(alias)
        yield alias
        for name in ("max_prepared_stmt_count", "read_only", "innodb_flush_log_at_trx_commit"):
            ask(alias, f"SET GLOBAL {name} = DEFAULT")
        for verb in ("DROP", "CREATE"):
            ask(alias, f"{verb} DATABASE distlock")


ROLLS_BACK = pytest.mark.parametrize(
    "own", [{"innodb_rollback_on_timeout": "ON"}], indirect=True, ids=["rolls back"]
)


@pytest.mark.faults
@ROLLS_BACK
def test_rollback_on_timeout_changes_nothing(own: str, key: str) -> None:
    """Where a wait that ends takes its whole transaction with it, the answers are the same.

    A lock's transaction has written nothing before its last wait, and the caller's is another one.
    """
    with store_on(using := own, key) as store:
        backend, stranger = store.backend, store.stranger()
        assert store.ask("SELECT @@innodb_rollback_on_timeout") == [(1,)]
        ask(using, "CREATE TABLE diary (entry integer)")
        grant = take(backend, key)
        stranger.hold(key)
        with transaction.atomic(using=using):
            ask(using, "INSERT INTO diary VALUES (1)")
            assert backend.extend(grant, bound=1) is UNKNOWN
            assert is_busy(backend.acquire(key, new_token(), 30, replace=grant.token, bound=1))
        stranger.rollback()
        assert ask(using, "SELECT entry FROM diary") == [(1,)]
        assert isinstance(backend.extend(grant), Grant)
        store.elapse(31)
        stranger.hold(key)
        assert is_busy(backend.acquire(key, new_token(), 30, bound=1))
        stranger.rollback()
        assert store.fence(key) == grant.fence
        assert take(backend, key).fence == grant.fence + 1


@pytest.mark.faults
@ROLLS_BACK
@pytest.mark.parametrize("how", ["key", "guard"])
def test_wait_that_rolls_the_callers_transaction_back_ends_it(own: str, key: str, how: str) -> None:
    """Where it ends, nothing of the transaction goes on as if all of it were still there."""
    with store_on(using := own, key) as store:
        alias, stranger = store.registered.alias, store.stranger()
        ask(using, "CREATE TABLE diary (entry integer)")
        with distlock(key, backend=alias) as lease, transaction.atomic(using=using):
            stranger.queue(key)
            ask(using, "INSERT INTO diary VALUES (1)")
            with prompt(1), pytest.raises(BackendUnavailable):
                lease.guard() if how == "guard" else transaction_lock(key, wait=0, backend=alias)
            with pytest.raises(TransactionManagementError):
                ask(using, "INSERT INTO diary VALUES (2)")
            stranger.rollback()
        assert ask(using, "SELECT entry FROM diary") == []


def test_server_that_prepares_no_more_statements_runs_them_at_once(own: str, key: str) -> None:
    """Their number is that of the whole server, and other programs have prepared them."""
    ask(own, "SET GLOBAL max_prepared_stmt_count = 0")
    with store_on(using := own, key) as store:

        def errors() -> set[int]:
            with errors_on(using) as seen:
                grant = take(store.backend, key)
                assert isinstance(store.backend.extend(grant), Grant)
                assert store.backend.release(grant)
            return seen

        assert errors() == {TOO_MANY_PREPARED}
        ask(using, "SET GLOBAL max_prepared_stmt_count = 9")
        assert errors() == set()
        # What a proxy does that gives us another session.
        (session,) = store.backend._connections._every  # type: ignore[attr-defined]
        for name in prepared_by(session.connection):
            session.connection.connection.cursor().execute(f"DEALLOCATE PREPARE {name}")
        assert errors() == {NOT_PREPARED}
        assert errors() == set()


#: What backups do: the first stops whoever writes, the second whoever commits.
BACKUPS = {
    "read lock": (["FLUSH TABLES WITH READ LOCK"], "UNLOCK TABLES"),
    "block commit": (
        [f"BACKUP STAGE {stage}" for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT")],
        "BACKUP STAGE END",
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("kind", BACKUPS)
def test_backup_of_the_whole_server_is_busy(own: str, key: str, kind: str) -> None:
    """While a backup stops the server, nothing is granted and nobody waits beyond the bound."""
    begin, end = BACKUPS[kind]
    with store_on(own, key) as store:
        backend, stranger = store.backend, store.stranger()
        grant = take(backend, key)
        record = held(backend, key)
        for statement in begin:
            stranger.execute(statement)
        for bound in (0, 0.2, 1):
            for operation in ("acquire", "extend", "release", "takeover"):
                # In a thread, because who waits for a backup without a bound waits for a day.
                with prompt(bound):
                    assert is_busy(Later(OPERATIONS[operation], backend, grant, bound).result(10))
        with prompt():
            assert held(backend, key) == record
            assert backend.read(f"{key}-free") is None
        stranger.execute(end)
        assert held(backend, key) == record
        assert take(backend, f"{key}-free").fence == 1
        assert backend.release(grant) is True


@pytest.mark.faults
def test_transaction_locks_no_row_that_a_backup_keeps_from_being_made(own: str, key: str) -> None:
    """While the rows of a new key cannot be committed, no transaction has it."""
    begin, end = BACKUPS["block commit"]
    with store_on(own, key) as store:

        def lock() -> None:
            with transaction.atomic(using=own):
                transaction_lock(key, wait=0, backend=store.registered.alias)

        stranger = store.stranger()
        store.backend.read(key)
        for statement in begin:
            stranger.execute(statement)
        with prompt(BUSY_SECONDS), pytest.raises(BackendUnavailable):
            Later(lock).result()
        stranger.execute(end)
        Later(lock).result()


@pytest.mark.faults
def test_server_that_was_killed_comes_back_with_its_locks(key: str) -> None:
    """A crash takes no grant and no fence back, and costs each session one error at most."""
    here("mariadb")
    port = services.free_port()
    durable: dict[str, Any] = {"port": port, "innodb_flush_log_at_trx_commit": 1, "stop": "KILL"}
    with ExitStack() as stack:
        home = stack.enter_context(services.folder(owner=services.server_user()))
        data = home / "data"
        url = f"mysql://root@127.0.0.1:{port}/distlock"
        using = stack.enter_context(alias_like("mariadb", **database(url)))
        store = stack.enter_context(store_on(using, key))
        backend = store.backend
        with services.private_mariadb(data, **durable):
            migrate(using)
            grants = [take(backend, f"{key}-{number}", 600) for number in range(3)]
            assert backend.release(grants[0]) is True
        with pytest.raises(BackendUnavailable):
            backend.extend(grants[1])
        with services.private_mariadb(data, **durable):
            assert isinstance(backend.extend(grants[1]), Grant)
            assert isinstance(backend.acquire(grants[2].key, new_token(), 30), Contended)
            assert take(backend, grants[0].key).fence == grants[0].fence + 1


@pytest.mark.faults
def test_session_on_a_server_that_may_only_be_read_is_given_up(own: str, key: str) -> None:
    """Behind a switch-over, a new one finds the server that took its place."""
    grant = "GRANT ALL ON shop.* TO shop_app"
    with role(own, grant) as using, store_on(using, key) as store:
        backend: Any = store.backend
        sessions: list[Any] = []
        for read_only in (0, 1, 0):
            ask(own, f"SET GLOBAL read_only = {read_only}")
            with suppress(BackendUnavailable):
                take(backend, f"{key}-{len(sessions)}")
                with backend._connections.use() as on:
                    sessions += ask(on, "SELECT CONNECTION_ID()")
        assert len({*sessions}) == 2


@pytest.mark.faults
def test_check_looks_at_the_durability_of_the_server(own: str) -> None:
    """W105 where a commit does not wait for the disk, and nothing where it does."""
    with locks_on(own):
        for flush, warned in ((1, False), (2, True)):
            ask(own, f"SET GLOBAL innodb_flush_log_at_trx_commit = {flush}")
            found = checks.run_checks(tags=[checks.Tags.database], databases=[own])
            assert ("distlock.W105" in [each.id for each in found]) is warned
            assert not [each for each in found if each.is_serious()]


def test_session_that_is_cut_as_autocommit_comes_back(
    orm_store: DatabaseStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's connection is in autocommit behind it: the thread locks and saves as before."""
    backend, using = orm_store.backend, orm_store.registered.using
    connection = connections[using]
    grant, switched = take(backend, key), list[Any]()
    connection.ensure_connection()
    wrapper: Any = type(connection)
    switch = wrapper._set_autocommit

    def cut_first(self: Any, autocommit: bool) -> None:
        if autocommit and len(switched) == 1:
            ask_mysql(f"KILL CONNECTION {self.connection.thread_id()}")
        switched.append(self)
        switch(self, autocommit)

    monkeypatch.setattr(wrapper, "_set_autocommit", cut_first)
    with suppress(BackendUnavailable):
        backend.release(grant)
    # Off, and on again, on a connection of ours.
    assert len(switched) >= 2
    assert connection not in switched
    assert connection.get_autocommit()
    Row.objects.using(using).create(name=key)
    assert Later(Row.objects.using(using).filter(name=key).exists).result()
    assert backend.release(take(backend, f"{key}-b")) is True
