"""`distlock.E1xx` and `W1xx`: the databases of locks and fences."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.db import DatabaseError, Error, connections, models
from django.db.migrations.exceptions import (
    BadMigrationError,
    CircularDependencyError,
    NodeNotFoundError,
)
from django.db.migrations.loader import MigrationLoader

from ..backends.tables import FenceTable
from ..core.pages import page
from ..database.connections import rows_of
from ..database.vendors import VENDORS
from ..models import (
    FailedTask,
    FenceCounter,
    HeldLock,
    LockEvent,
    RunNote,
    SeenFence,
    StoredResponse,
    Waiter,
)
from .configured import DOCS, Subject, about, check_each, configured, where
from .fence_triggers import fence_triggers
from .fencing import fenced_models_in
from .routers import aliases_of, is_made, written_to
from .schema import APP, creators, functions, indexes, readers, several, unapplied

_MODELS: tuple[type[models.Model], ...] = (
    FailedTask, HeldLock, FenceCounter, LockEvent, Waiter, SeenFence, RunNote, StoredResponse,
)  # fmt: skip
#: Models that are written to the database that routers choose, which may be another one.
_ROUTED = (FailedTask, LockEvent, SeenFence, StoredResponse)

_PRIMARY = f"Set OPTIONS['using'] to an alias of the primary. {DOCS}"
_DURABLE = f"For the effects of a crash, see {page('howto/production')}."

#: Whether the server is a standby, and whether its transactions are read-only by default.
_READ_ONLY = {
    "postgresql": "SELECT pg_is_in_recovery(),"
    " current_setting('default_transaction_read_only')::boolean",
    # The session's variable has another name on MariaDB.
    "mysql": "SELECT @@global.read_only, @@session.{session}",
}


@check_each(FenceTable)
def check_aliases(backend: FenceTable) -> Iterator[checks.CheckMessage]:
    """W101 and W115: the locks' database is no mirror; in SQLite, it is a file of its own.

    A warning: an alias that leads to the primary around a pooler is a mirror in tests as well.
    """
    connection = connections[backend.using]
    if (connection.settings_dict.get("TEST") or {}).get("MIRROR"):
        yield checks.Warning(
            f"{where(backend)} keeps its locks in {backend.using!r}, which is a mirror of another"
            " database in tests, as a replica is. On a replica, no lock can be acquired.",
            hint="Set OPTIONS['using'] to the primary database. If this alias leads to it, around a"
            f" pooler for example, silence this check. {DOCS}",
            id="distlock.W115",
        )
    if connection.vendor == "sqlite" and _shares_file(backend.using):
        # A new project starts with one file, and one line is enough.
        yield (
            checks.Info(
                f"{where(backend)} shares a SQLite file with other models: acquire no lock inside"
                f" atomic(). See {page('howto/choose-a-database')}.",
                id="distlock.W101",
            )
            if settings.DEBUG
            else checks.Warning(
                f"{where(backend)} keeps its locks in the same SQLite file as other models"
                f" ({backend.using!r}). SQLite allows one writer per file, so acquire is refused"
                " inside atomic() on this database.",
                hint="Give the locks a database alias with its own file, and a router: see"
                f" {page('howto/choose-a-database')}.",
                id="distlock.W101",
            )
        )


@checks.register("distlock")
def check_tenants(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E106: django-tenants makes no lock tables for each tenant, because no lock would use them."""
    types = getattr(settings, "TENANT_TYPES", {})
    shared = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    of_tenants = [getattr(settings, "TENANT_APPS", ())] + [
        each.get("APPS", ()) for name, each in types.items() if name != shared
    ]
    config = apps.get_app_config(APP)
    ours = {config.name, f"{type(config).__module__}.{type(config).__qualname__}"}
    if not any(ours.intersection(listed) for listed in of_tenants):
        return []
    for backend in configured(FenceTable):
        if connections[backend.using].vendor == "postgresql":
            told = checks.Error(
                f"{where(backend)} keeps the locks of all tenants in one schema, but"
                " django_distlock is in TENANT_APPS. Each tenant would get lock tables that are"
                " never used.",
                hint="List django_distlock in SHARED_APPS only. Include the tenant in the keys of"
                f" locks that belong to one tenant. {DOCS}",
                obj=Subject((backend.alias,)),
                id="distlock.E106",
            )
            return [told]  # One mistake, whatever the number of backends.
    return []


@checks.register(checks.Tags.database)
def check_databases(
    app_configs: Any, databases: Sequence[str] | None, **_: Any
) -> list[checks.CheckMessage]:
    """E103, E105 and W102 to W114 except W110: query the named databases.

    One check, so that it waits only once for a database that is down. What `migrate` repairs is a
    warning, because `migrate` runs these checks too and stops at errors.
    """
    locks: dict[str, list[str]] = {}
    for backend in configured(FenceTable):
        locks.setdefault(backend.using, []).append(backend.alias)
    found: list[checks.CheckMessage] = []
    for using in sorted({*(databases or ())}):
        aliases = locks.get(using, [])
        try:
            # One by one, to keep what was found before the database became unavailable.
            for each in about(aliases, _of_locks(using) if aliases else _of_others(using)):
                found.append(each)  # noqa: PERF402
        except Error as error:
            # Other databases are not ours to report.
            if aliases:
                said = f"The lock tables in {using!r} cannot be checked: {error}"
                found += about(aliases, [checks.Warning(said, hint=DOCS, id="distlock.W102")])
    return found


def _of_locks(using: str) -> Iterator[checks.CheckMessage]:
    connection = connections[using]
    wanted = [each for each in _MODELS if each not in _ROUTED or is_made(each, using)]
    missing = _missing(using, wanted)
    loader = _loader(using)
    pending = [] if loader is None else list(unapplied(using, loader))
    # Report no tables that pending migrations explain, or that `migrate` is about to make.
    has_some, is_migrating = len(missing) < len(wanted), _is_migrating()
    if missing and not (pending and (has_some or is_migrating)):
        yield _lacks_tables(using, missing)
    yield from _read_only(using)
    if connection.vendor == "postgresql":
        yield from _forgetful(using)
    if connection.vendor == "mysql":
        yield from _mysql_findings(using)
    if has_some:
        yield from () if is_migrating else pending
        if not pending:
            if connection.vendor == "postgresql":
                yield from several(using)
                yield from creators(using)
                yield from functions(using)
                yield from readers(using)
            yield from indexes(using, [each for each in wanted if each not in missing])
    yield from _of_rows(using, loader)


def _of_others(using: str) -> Iterator[checks.CheckMessage]:
    # Not of an unknown vendor: a project without a database has an alias, too.
    if connections[using].vendor in VENDORS:
        loader = _loader(using)
        routed = [each for each in _ROUTED if written_to(each) == using and is_made(each, using)]
        missing = _missing(using, routed)
        is_coming = loader is not None and any(unapplied(using, loader)) and _is_migrating()
        if missing and not is_coming:
            yield _lacks_tables(using, missing)
        yield from _of_rows(using, loader)


def _of_rows(using: str, loader: MigrationLoader | None) -> Iterator[checks.CheckMessage]:
    if connections[using].vendor == "postgresql":
        yield from _forgetful_rows(using)
    if loader is not None:
        yield from fence_triggers(using, loader)


def _missing(using: str, wanted: Sequence[type[models.Model]]) -> list[type[models.Model]]:
    existing = set(connections[using].introspection.table_names())
    return [each for each in wanted if each._meta.db_table not in existing]


def _is_migrating() -> bool:
    return sys.argv[1:2] == ["migrate"]


def _lacks_tables(using: str, missing: list[type[models.Model]]) -> checks.CheckMessage:
    return checks.Warning(
        f"The database {using!r} has no table"
        f" {', '.join(each._meta.db_table for each in missing)}.",
        hint=f"Run manage.py migrate --database {using}. If DISTLOCK_TABLES was changed after a"
        f" migration, rename the tables: see {page('howto/rename-tables')}.",
        id="distlock.W103",
    )


def _loader(using: str) -> MigrationLoader | None:
    """Return the migrations of the project, and which were applied here; None: not readable."""
    try:
        return MigrationLoader(connections[using], ignore_no_migrations=True)
    except (BadMigrationError, CircularDependencyError, ImportError, NodeNotFoundError):
        return None  # `migrate` reports the error.
    except DatabaseError:
        return None  # The account of the locks may have no right to read the applied migrations.


def _read_only(using: str) -> Iterator[checks.CheckMessage]:
    """E105: locks can be acquired. An error, because `migrate` cannot repair it: it writes, too."""
    vendor = connections[using].vendor
    if vendor not in _READ_ONLY:
        return
    mariadb = getattr(connections[using], "mysql_is_mariadb", False)
    session = "tx_read_only" if mariadb else "transaction_read_only"
    ((standby, reads),) = rows_of(using, _READ_ONLY[vendor].format(session=session))
    # From MariaDB 12 on, the value is a word.
    if standby not in (False, 0, "OFF"):
        said = f"The database {using!r} is read-only, like a replica. No lock can be acquired."
        yield checks.Error(said, hint=_PRIMARY, id="distlock.E105")
    elif reads:
        said = f"The sessions of {using!r} are read-only. No lock can be acquired."
        yield checks.Error(said, hint=_PRIMARY, id="distlock.E105")


def _forgetful(using: str) -> Iterator[checks.CheckMessage]:
    """W108: after a crash, PostgreSQL still has the grants that it has reported.

    Its `synchronous_commit` does not matter here: each grant and each extend raises it for itself.
    """
    if rows_of(using, "SHOW fsync") != [("on",)]:
        yield checks.Warning(
            f"The server of {using!r} does not wait for its disk (fsync is off). A crash may undo"
            " grants, reissue their fences, or corrupt the database.",
            hint=f"Set fsync to on. {_DURABLE}",
            id="distlock.W108",
        )
    kept = (HeldLock, FenceCounter, SeenFence, RunNote, StoredResponse)
    tables = [model._meta.db_table for model in kept]
    unlogged = rows_of(
        using,
        "SELECT relname FROM pg_class WHERE relname = ANY(%s) AND relpersistence = 'u'"
        " AND relkind = 'r' AND pg_table_is_visible(oid) ORDER BY relname",
        tables,
    )
    for (name,) in unlogged:
        yield checks.Warning(
            f"The table {name} of {using!r} is unlogged, so it is empty after a crash. Held keys"
            " and used fences would be granted again, and finished tasks would run again.",
            hint=f'ALTER TABLE "{name}" SET LOGGED. {_DURABLE}',
            id="distlock.W108",
        )


def _forgetful_rows(using: str) -> Iterator[checks.CheckMessage]:
    """W108: after a crash, PostgreSQL still has the fences that rows of the project have seen."""
    fenced = fenced_models_in(using)
    if fenced and rows_of(using, "SHOW synchronous_commit") == [("off",)]:
        yield checks.Warning(
            f"The database {using!r} confirms a commit before it is on disk (synchronous_commit)."
            " Lock operations override this. Writes of fenced models, such as"
            f" {fenced[0]._meta.label}, do not: a crash may undo such a write and let a stale one"
            " pass.",
            hint=f"Keep synchronous_commit on for transactions that write fenced rows. {_DURABLE}",
            id="distlock.W108",
        )


def _mysql_findings(using: str) -> Iterator[checks.CheckMessage]:
    if not connections[using].features.has_select_for_update_skip_locked:
        yield checks.Error(
            f"The database {using!r} does not support SKIP LOCKED, which is needed to renew"
            " several leases at once.",
            hint=f"Use MariaDB 10.6 or later, or MySQL 8.0.17 or later. {DOCS}",
            id="distlock.E103",
        )
    for name, engine in rows_of(
        using,
        "SELECT table_name, engine FROM information_schema.tables WHERE table_schema ="
        " DATABASE() AND table_name IN (%s, %s) AND engine <> 'InnoDB'",
        HeldLock._meta.db_table,
        FenceCounter._meta.db_table,
    ):
        yield checks.Warning(
            f"The table {name} of {using!r} is kept by {engine}, which cannot lock rows. Two"
            " processes could hold the same lock.",
            hint=f"ALTER TABLE `{name}` ENGINE = InnoDB. {DOCS}",
            id="distlock.W104",
        )
    if rows_of(using, "SELECT @@innodb_flush_log_at_trx_commit") != [(1,)]:
        yield checks.Warning(
            f"The database {using!r} does not write its log at each commit. A crash may undo"
            " grants and reissue their fences.",
            hint=f"Set innodb_flush_log_at_trx_commit to 1. {DOCS}",
            id="distlock.W105",
        )


def _shares_file(using: str) -> bool:
    """Whether models of other apps are written to the file of this alias."""
    same = aliases_of(using)
    return any(
        model._meta.app_label != APP and model._meta.managed and written_to(model) in same
        for model in apps.get_models(include_auto_created=True)
    )
