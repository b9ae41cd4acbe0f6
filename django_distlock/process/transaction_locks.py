"""Which keys the open transactions of this process have locked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..database.connections import in_transaction


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys that a transaction has locked in a place of the code. Django drops it with the locks."""

    backend: str
    keys: Mapping[str, bool]
    site: str

    def __call__(self) -> None:
        """Do nothing at the commit: the database frees the keys."""


def keep(connection: BaseDatabaseWrapper, kept: Kept, *, with_savepoints: bool) -> None:
    """Note what the transaction of a connection has locked, until its end.

    Args:
        with_savepoints: Or until a savepoint is rolled back that is open now: that frees the keys,
            too.

    A `TestCase`'s transaction is never told of as one: its tests count the hooks of commits.
    """
    if in_transaction(connection):
        # As `on_commit` does it: Django takes away what belongs to a savepoint that is rolled back.
        hooks: list[Any] = connection.run_on_commit
        hooks.append((set(connection.savepoint_ids) if with_savepoints else set(), kept, False))


def keeps(connection: BaseDatabaseWrapper, backend: str, key: str) -> bool:
    """Whether the transaction of a connection has locked a key."""
    return any(key in each.keys and each.backend == backend for each in kept_by(connection))


def kept_by(connection: BaseDatabaseWrapper) -> Iterator[Kept]:
    """Return what the transaction of a connection has locked, in the order of the calls."""
    for _savepoints, hook, *_ in list(connection.run_on_commit):
        if isinstance(hook, Kept):
            yield hook
