"""The keys that the open transactions of this process have locked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..database.connections import in_transaction


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys that one call has locked in a transaction: a hook that Django drops at the rollback."""

    backend: str
    keys: Mapping[str, bool]
    site: str

    def __call__(self) -> None:
        """Do nothing at the commit: the database unlocks the keys."""


def keep(connection: BaseDatabaseWrapper, kept: Kept, *, with_savepoints: bool) -> None:
    """Note which keys the transaction of a connection has locked, until it ends.

    Args:
        with_savepoints: Whether a rollback to an earlier savepoint unlocks them, too.

    Not in the transaction of a `TestCase`, whose tests may count the hooks.
    """
    if in_transaction(connection):
        # Like `on_commit`: Django drops the hooks of a savepoint that is rolled back.
        hooks: list[Any] = connection.run_on_commit
        hooks.append((set(connection.savepoint_ids) if with_savepoints else set(), kept, False))


def keeps(connection: BaseDatabaseWrapper, backend: str, key: str) -> bool:
    """Whether the transaction of a connection has locked a key."""
    return any(key in each.keys and each.backend == backend for each in kept_by(connection))


def kept_by(connection: BaseDatabaseWrapper) -> Iterator[Kept]:
    """Return the keys that the transaction of a connection has locked, in the calls' order."""
    for _savepoints, hook, *_ in list(connection.run_on_commit):
        if isinstance(hook, Kept):
            yield hook
