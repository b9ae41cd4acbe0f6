"""The frequent operations on MariaDB, in one round trip each.

An anonymous block in the server's own language runs the transaction of `HeldLockManager`, step by
step. Nothing has to be installed. Each session prepares the block, because parsing it takes as long
as running it. MySQL has no such blocks, so the ORM code runs there.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple, cast
from zlib import crc32

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.durations import GRACE
from ..core.records import FENCE_MAX, Attempt, Contended, Freed, Grant, from_microseconds, instant
from ..database import sql
from ..database.server_functions import acquired
from ..database.vendors.mysql import INTERRUPTED, MAX_STATEMENT_TIME, MySQL
from .lock import HeldLockManager

#: Errors: the session has not prepared this statement; the server allows no more of them.
_NOT_PREPARED, _TOO_MANY = 1243, 1461
#: The attribute of a connection with the session and the statements that it has prepared.
_PREPARED = "_django_distlock_prepared"


class _Block(NamedTuple):
    """A block with placeholders, and the names of their values in order."""

    text: str
    values: list[str]


class CompoundLockManager(HeldLockManager):
    """Operations on held locks, the frequent ones as one statement each. For MariaDB.

    In a transaction, such as that of a `TestCase`, the ORM code runs, because the block has a
    transaction of its own.
    """

    @classmethod
    def of(cls, locks: HeldLockManager) -> CompoundLockManager:
        """Return one that replaces another manager of the same rows."""
        compound = locks.replaced_by(cls)
        table, fences = locks._tables
        put_in = {
            "{begin}": _text("begin"),
            "{owned}": _text("owned"),
            "{locks}": table,
            "{fences}": fences,
            # Read in a statement of its own, because a statement reads the clock before it waits.
            "{now}": str(MySQL.clock),
            "{grace}": str(_microseconds(GRACE)),
            "{fence_max}": str(FENCE_MAX),
        }
        compound._acquire, compound._extending, compound._release = (
            _block(each, put_in) for each in ("acquire", "extend", "release")
        )
        return compound

    _acquire: _Block
    _extending: _Block
    _release: _Block

    def acquire(self, attempt: Attempt) -> Grant | Contended | None:
        if not self._can:
            return super().acquire(attempt)
        holder = attempt.holder
        values = {
            "name": attempt.name, "key": attempt.key, "token": attempt.token, "ttl": attempt.ttl,
            "lasts": _microseconds(attempt.ttl), "replace": attempt.replace,
            "again": attempt.replace == attempt.token, "wanted": attempt.wanted,
            "floor": self.follows_clock, "holder": json.dumps(holder.as_json()),
            "host": holder.host, "task": holder.task_id,
        }  # fmt: skip
        outcome = "again"
        while outcome == "again":
            outcome, *facts, told = self._run(self._acquire, values, attempt.bound)
        if outcome == "shared":
            return None
        return acquired(attempt, outcome, *facts, None if told is None else json.loads(told))

    def extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        if not self._can:
            return super().extend(name, grant, ttl, bound=bound)
        values = {"name": name, "token": grant.token, "ttl": ttl, "lasts": _microseconds(ttl)}
        outcome, fence, acquired_at, expires_at, stop = self._run(self._extending, values, bound)
        if outcome == "gone":
            return None
        granted_at = from_microseconds(acquired_at)
        return grant.renewed(ttl, fence, granted_at, instant(expires_at), bool(stop))

    def release(self, name: str, grant: Grant, *, held: float | None = None, bound: float) -> Freed:
        if not self._can:
            return super().release(name, grant, held=held, bound=bound)
        values = {"name": name, "token": grant.token, "held": _microseconds(held)}
        outcome: Freed = self._run(self._release, values, bound)[0]
        return outcome

    @property
    def _can(self) -> bool:
        connection: Any = connections[self.db]
        return not connection.in_atomic_block and connection.mysql_is_mariadb

    def _run(self, block: _Block, values: dict[str, Any], bound: float) -> Any:
        # Time limits are whole seconds, so with less than one second left there is no wait.
        text = block.text.replace("{bound}", str(int(bound)))
        name = f"distlock_{crc32(text.encode()):x}"
        using = ", ".join(["%s"] * len(block.values))
        given = [values[each] for each in block.values]
        connection = connections[self.db]
        with connection.cursor() as cursor:
            known = prepared_by(connection)
            try:
                if name not in known and _went(
                    cursor, f"PREPARE {name} FROM %s", [text], unless=_TOO_MANY
                ):
                    known.add(name)
                if name not in known or not _went(
                    cursor, f"EXECUTE {name} USING {using}", given, unless=_NOT_PREPARED
                ):
                    # A proxy has switched to another session.
                    known.discard(name)
                    cursor.execute(f"EXECUTE IMMEDIATE %s USING {using}", [text, *given])
            except OperationalError as error:
                if error.args[0] == MAX_STATEMENT_TIME:
                    # The block may have committed: the outcome is unknown, and not busy.
                    cause = OperationalError(INTERRUPTED, *error.args[1:])
                    raise OperationalError(*error.args) from cause
                raise
            return cursor.fetchone()


def prepared_by(connection: BaseDatabaseWrapper) -> set[str]:
    """Return the set of names of the statements that a session has prepared, to be added to."""
    raw = connection.connection
    session, names = vars(connection).get(_PREPARED, (None, set()))
    if session is None or session() is not raw:
        names = set()
        vars(connection)[_PREPARED] = (weakref.ref(raw), names)
    return cast("set[str]", names)


def _went(cursor: Any, statement: str, values: list[Any], *, unless: int) -> bool:
    """Run a statement; return False if the server refuses it with the error `unless`."""
    try:
        cursor.execute(statement, values)
    except OperationalError as error:
        if error.args[0] != unless:
            raise
        return False
    return True


def _block(name: str, put_in: Mapping[str, str]) -> _Block:
    text = _text(name)
    for stands_for, expression in put_in.items():
        text = text.replace(stands_for, expression)
    value = re.compile(r"%\((\w+)\)s")
    return _Block(value.sub("?", text), value.findall(text))


def _text(name: str) -> str:
    """Return the text of an SQL file without comments."""
    lines = (
        (files(sql.__name__) / "mariadb" / f"{name}.sql").read_text(encoding="utf-8").split("\n")
    )
    return "\n".join(each for each in lines if not each.lstrip().startswith("--"))


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000_000)
