"""`distlock.E105` and `W108`: what the servers of locks and of fenced rows do with a write."""

from __future__ import annotations

from collections.abc import Iterator

from django.core import checks
from django.db import connections

from ..core.pages import page
from ..models import FenceCounter, HeldLock, RunNote, SeenFence, StoredResponse
from .configured import DOCS, ask
from .fencing import fenced_models_in

_PRIMARY = f"Set OPTIONS['using'] to an alias of the primary. {DOCS}"
_DURABLE = f"For the effects of a crash, see {page('howto/production')}."

#: Whether it is a standby, and whether its transactions only read unless they say otherwise.
_READ_ONLY = {
    "postgresql": "SELECT pg_is_in_recovery(),"
    " current_setting('default_transaction_read_only')::boolean",
    # The name of the session's own differs between the two.
    "mysql": "SELECT @@global.read_only, @@session.{session}",
}


def read_only(using: str) -> Iterator[checks.CheckMessage]:
    """E105: locks can be taken. No error that `migrate` could repair: it writes as well."""
    vendor = connections[using].vendor
    if vendor not in _READ_ONLY:
        return
    mariadb = getattr(connections[using], "mysql_is_mariadb", False)
    session = "tx_read_only" if mariadb else "transaction_read_only"
    ((standby, reads),) = ask(using, _READ_ONLY[vendor].format(session=session))
    # From MariaDB 12 on, it is a word.
    if standby not in (False, 0, "OFF"):
        said = f"The database {using!r} is read-only, like a replica. No lock can be acquired."
        yield checks.Error(said, hint=_PRIMARY, id="distlock.E105")
    elif reads:
        said = f"The sessions of {using!r} are read-only. No lock can be acquired."
        yield checks.Error(said, hint=_PRIMARY, id="distlock.E105")


def forgetful(using: str) -> Iterator[checks.CheckMessage]:
    """W108: PostgreSQL keeps, over a crash, the grants that it has told.

    Its `synchronous_commit` does not matter here: each grant and each extend raises it for itself.
    """
    if ask(using, "SHOW fsync") != [("on",)]:
        yield checks.Warning(
            f"The server of {using!r} does not wait for its disk (fsync is off). A crash may undo"
            " grants, reissue their fences, or corrupt the database.",
            hint=f"Set fsync to on. {_DURABLE}",
            id="distlock.W108",
        )
    kept = (HeldLock, FenceCounter, SeenFence, RunNote, StoredResponse)
    tables = [model._meta.db_table for model in kept]
    unlogged = ask(
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


def forgetful_rows(using: str) -> Iterator[checks.CheckMessage]:
    """W108: PostgreSQL keeps, over a crash, the fences that rows of the project have seen."""
    fenced = fenced_models_in(using)
    if fenced and ask(using, "SHOW synchronous_commit") == [("off",)]:
        yield checks.Warning(
            f"The database {using!r} confirms a commit before it is on disk (synchronous_commit)."
            " Lock operations override this. Writes of fenced models, such as"
            f" {fenced[0]._meta.label}, do not: a crash may undo such a write and let a stale one"
            " pass.",
            hint=f"Keep synchronous_commit on for transactions that write fenced rows. {_DURABLE}",
            id="distlock.W108",
        )
