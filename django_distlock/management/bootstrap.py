"""Creates missing lock tables in a database: by our own migrations, one process at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from django.db import connections, router, transaction
from django.db.migrations import Migration
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState
from django.db.utils import Error, OperationalError

from ..conf import table
from ..core.errors import BackendUnavailable, LockError, LockNotAcquired
from ..core.keys import advisory_id, key_hash
from ..core.logs import log_fields
from ..database import vendors
from ..database.connections import rows_of
from ..models import HeldLock

logger = logging.getLogger("django_distlock")

APP = "django_distlock"
#: Seconds between two attempts to become the process that migrates. Migrations take about one.
PAUSE = 0.1
#: Seconds to wait on SQLite for readers, after the migrations.
_FOR_READERS = 20


class _Taken(Exception):
    """Another process is migrating."""


def ensure_tables(using: str, wait: float | None) -> None:
    """Apply those of our own migrations that a database lacks, and no others.

    Other processes that want the same wait for the database's own lock, and find the tables made.
    No signals are sent, and other apps are not touched: their `migrate` comes later.

    Args:
        wait: Seconds to wait for other processes, and for the database; None: for ever.

    Raises:
        LockNotAcquired: Other processes were migrating all the time.
        BackendUnavailable: The database is unavailable.
        LockError: The migrations failed, and there are no lock tables.
    """
    give_up = None if wait is None else time.monotonic() + wait
    while True:
        try:
            alone = _ALONE.get(connections[using].vendor)
            if alone and router.allow_migrate_model(using, HeldLock) and _pending(using):
                with alone(using):
                    _migrate(using)
            return
        except _Taken as error:
            failure: LockError = LockNotAcquired(
                f"Another process is still creating the lock tables in {using!r}: gave up waiting"
                " for it."
            )
            failure.__cause__ = error
        except Error as error:
            code = _passing(using, error)
            if code is None:
                _refuse_unless_made(using, error)
                return
            answered = vendors.of(using).has_answered(error)
            about = f"The lock store {using!r}"
            failure = BackendUnavailable.of(about, error, code, answered=answered)
            failure.__cause__ = error
            connections[using].close()
        if give_up is not None and time.monotonic() >= give_up:
            raise failure
        time.sleep(PAUSE)


def _migrations() -> list[Migration]:
    """Return our own migrations in order. Those of the project may be many, or broken."""
    package, _is_explicit = MigrationLoader.migrations_module(APP)
    if package is None:
        return []
    names = sorted(each.name for each in iter_modules(import_module(package).__path__))
    return [import_module(f"{package}.{name}").Migration(name, APP) for name in names]


def _pending(using: str) -> bool:
    applied = MigrationRecorder(connections[using]).applied_migrations()
    return any((APP, each.name) not in applied for each in _migrations())


def _migrate(using: str) -> None:
    """Apply pending migrations. Look again which: another process may have applied some."""
    connection = connections[using]
    recorder = MigrationRecorder(connection)
    applied = recorder.applied_migrations()
    state = ProjectState()
    for migration in _migrations():
        if (APP, migration.name) in applied:
            state = migration.mutate_state(state, preserve=False)
            continue
        with connection.schema_editor(atomic=migration.atomic) as editor:
            state = migration.apply(state, editor)
        recorder.record_applied(APP, migration.name)


def _passing(using: str, error: Error) -> str | None:
    """Return the code of an error that may pass; None: the error will not."""
    vendor = vendors.of(using)
    code = "network_timeout" if vendor.is_busy(error) else vendor.unavailable_code(error)
    if code == "auth_failed":
        # To wait grants no rights. But a login may be created while the server starts.
        with suppress(Error):
            connections[using].ensure_connection()
            return None
    return code


def _refuse_unless_made(using: str, error: Error) -> None:
    """Continue if the tables exist without Django's record of the migrations; or else refuse."""
    needed = {table(name) for name in ("locks", "fences", "events")}
    if not needed <= {*connections[using].introspection.table_names()}:
        raise LockError(f"The lock tables cannot be created in {using!r}: {error}") from error
    extra = log_fields("migration_failed")
    logger.warning(
        "The migrations of %s cannot be applied to %r: %s", APP, using, error, extra=extra
    )


@contextmanager
def _alone_on_postgresql(using: str) -> Iterator[None]:
    # A lock of the transaction and not of the session: behind a pooler, the next statement of a
    # session may reach another session.
    with transaction.atomic(using=using):
        lock = advisory_id("django_distlock:migrations", table("locks"))
        if rows_of(using, "SELECT pg_try_advisory_xact_lock(%s)", lock) != [(True,)]:
            raise _Taken
        yield


@contextmanager
def _alone_on_mysql(using: str) -> Iterator[None]:
    # These names are unique to the server, not to the database.
    name = f"{connections[using].settings_dict['NAME']}.{table('locks')}"
    if rows_of(using, "SELECT GET_LOCK(%s, 0)", f"django_distlock:{key_hash(name)}") != [(1,)]:
        raise _Taken
    try:
        yield
    finally:
        # The lock ends with the session.
        connections[using].close()


@contextmanager
def _alone_on_sqlite(using: str) -> Iterator[None]:
    connection: Any = connections[using]
    # The schema editor requires it, and inside of a transaction it has no effect.
    connection.disable_constraint_checking()
    rows_of(using, f"PRAGMA busy_timeout = {int(PAUSE * 1000)}")
    # SQLite has one writer: that process migrates, in one transaction.
    connection.transaction_mode = "IMMEDIATE"
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(transaction.atomic(using=using))
            except OperationalError as error:
                if vendors.of(using).is_busy(error):
                    raise _Taken from error
                raise
            rows_of(using, f"PRAGMA busy_timeout = {_FOR_READERS * 1000}")
            yield
    finally:
        # The next connection has its settings again.
        connection.close()


_ALONE: Mapping[str, Callable[[str], AbstractContextManager[None]]] = {
    "postgresql": _alone_on_postgresql,
    "mysql": _alone_on_mysql,
    "sqlite": _alone_on_sqlite,
}
