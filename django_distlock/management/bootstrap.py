"""Lock tables for a database that has none yet: our own migrations, one process at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.utils import Error, OperationalError

from .. import vendors
from ..conf import table
from ..connections import own_connection
from ..core.errors import BackendUnavailable, LockError, LockNotAcquired
from ..core.keys import advisory_id, key_hash
from ..core.logs import log_fields
from ..models import HeldLock

logger = logging.getLogger("django_distlock")

APP = "django_distlock"
#: Seconds between two attempts to be the one who migrates. It takes about one.
PAUSE = 0.1
#: Seconds to wait on SQLite for readers, behind the migrations.
_FOR_READERS = 20


class _Taken(Exception):
    """Somebody else is migrating."""


def ensure_tables(using: str, wait: float | None) -> None:
    """Apply those of our own migrations that a database lacks, and no others.

    Whoever wants to do so at the same time waits for the database's own lock, and finds it done.
    No signals are sent, and nothing is asked of other apps: their `migrate` comes later.

    Args:
        using: The alias of the database.
        wait: Seconds to wait for others, and for the database; None: for ever.

    Raises:
        LockNotAcquired: Others were at it all the time.
        BackendUnavailable: The database did not answer.
        LockError: The migrations failed, and there are no lock tables.
    """
    give_up = None if wait is None else time.monotonic() + wait
    while True:
        try:
            if _is_ours(using) and _pending(using):
                _migrate_alone(using)
            return
        except _Taken as error:
            failure: LockError = LockNotAcquired(
                f"Another process has been making the lock tables in {using!r} all the time."
            )
            failure.__cause__ = error
        except Error as error:
            code = _passing(using, error)
            if code is None:
                _refuse_unless_made(using, error)
                return
            failure = BackendUnavailable(
                f"The lock store {using!r} did not answer: {error}", code=code
            )
            failure.__cause__ = error
            connections[using].close()
        if give_up is not None and time.monotonic() >= give_up:
            raise failure
        time.sleep(PAUSE)


class _OwnLoader(MigrationLoader):
    """Knows our migrations alone: those of a project may be many, or broken."""

    @classmethod
    def migrations_module(cls, app_label: str) -> tuple[str | None, bool]:
        """Return where the migrations of an app are; other apps have none."""
        return super().migrations_module(app_label) if app_label == APP else (None, True)

    def load_disk(self) -> None:
        """Load ours, and let no model of other apps be built for them."""
        super().load_disk()
        self.unmigrated_apps = set()


class _OwnExecutor(MigrationExecutor):
    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        # Without the loader of the one above, which reads the migrations of all apps.
        self.connection = connection
        self.loader = _OwnLoader(connection)
        self.recorder = MigrationRecorder(connection)
        self.progress_callback = None


def _is_ours(using: str) -> bool:
    """Whether there may be tables of ours, and a way to make them alone."""
    return connections[using].vendor in _ALONE and router.allow_migrate_model(using, HeldLock)


def _pending(using: str) -> bool:
    executor = _OwnExecutor(connections[using])
    return bool(executor.migration_plan(executor.loader.graph.leaf_nodes(APP)))


def _migrate_alone(using: str) -> None:
    with _ALONE[connections[using].vendor](using):
        # Looked at anew: whoever was at it before us may have done it.
        executor = _OwnExecutor(connections[using])
        targets = executor.loader.graph.leaf_nodes(APP)
        if plan := executor.migration_plan(targets):
            executor.migrate(targets, plan)


def _passing(using: str, error: Error) -> str | None:
    """Return the code of an error that may pass; None: it will not."""
    vendor = vendors.of(using)
    return "network_timeout" if vendor.is_busy(error) else vendor.unavailable_code(error)


def _refuse_unless_made(using: str, error: Error) -> None:
    """Go on where somebody else made the tables, and Django has not been told.

    Raises:
        LockError: There are none.
    """
    needed = {table(name) for name in ("locks", "fences", "events")}
    if not needed <= {*connections[using].introspection.table_names()}:
        raise LockError(f"The lock tables cannot be made in {using!r}: {error}") from error
    extra = log_fields("migration_failed")
    logger.warning(
        "The migrations of %s cannot be applied to %r: %s", APP, using, error, extra=extra
    )


@contextmanager
def _alone_on_postgresql(using: str) -> Iterator[None]:
    # For a transaction and not for a session: behind a pooler the next statement of a session may
    # reach another one.
    with _session(using) as own:
        own.set_autocommit(False)
        with own.cursor() as cursor:
            # It idles while the migrations run on the thread's connection.
            cursor.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', '0', true),"
                " pg_try_advisory_xact_lock(%s)",
                [advisory_id("django_distlock:migrations", table("locks"))],
            )
            if not cursor.fetchone()[1]:
                raise _Taken
        yield


@contextmanager
def _alone_on_mysql(using: str) -> Iterator[None]:
    with _session(using) as own, own.cursor() as cursor:
        # Such names are the server's, not the database's.
        name = f"{own.settings_dict['NAME']}.{table('locks')}"
        cursor.execute("SELECT GET_LOCK(%s, 0)", [f"django_distlock:{key_hash(name)}"])
        if cursor.fetchone()[0] != 1:
            raise _Taken
        yield


@contextmanager
def _alone_on_sqlite(using: str) -> Iterator[None]:
    before = connections[using]
    with _session(using) as own:
        # Inside of a transaction it is too late, and the schema editor insists.
        own.disable_constraint_checking()
        _set_busy_timeout(own, PAUSE)
        # The one writer is who migrates, in one transaction that began with BEGIN IMMEDIATE.
        connections[using] = own
        try:
            with ExitStack() as stack:
                try:
                    stack.enter_context(transaction.atomic(using=using))
                except OperationalError as error:
                    if vendors.of(using).is_busy(error):
                        raise _Taken from error
                    raise
                _set_busy_timeout(own, _FOR_READERS)
                yield
        finally:
            connections[using] = before


_ALONE: Mapping[str, Callable[[str], AbstractContextManager[None]]] = {
    "postgresql": _alone_on_postgresql,
    "mysql": _alone_on_mysql,
    "sqlite": _alone_on_sqlite,
}


@contextmanager
def _session(using: str) -> Iterator[BaseDatabaseWrapper]:
    """Open a connection beside the thread's; what it holds ends with it."""
    own = own_connection(connections[using])
    try:
        own.ensure_connection()
        yield own
    finally:
        own.close()


def _set_busy_timeout(connection: BaseDatabaseWrapper, seconds: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
