"""What differs between databases in a lock's transaction: one module for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from django.db import DatabaseError, InterfaceError, connections

from ...core.errors import BackendUnavailable, LockError
from .base import Vendor as Vendor
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite

#: By Django's names.
VENDORS: Mapping[str, type[Vendor]] = {"mysql": MySQL, "postgresql": PostgreSQL, "sqlite": SQLite}


def of(using: str) -> Vendor:
    """Return what there is to know about the present connection of an alias."""
    connection = connections[using]
    return VENDORS[connection.vendor](connection, using)


@contextmanager
def translated(using: str) -> Iterator[None]:
    """Raise what a database of the project says of itself as errors of this package."""
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        about, vendor = f"The database {using!r}", of(using)
        code, answered = vendor.unavailable_code(error), vendor.has_answered(error)
        if code is None:
            raise LockError(f"{about} failed: {error}") from error
        raise BackendUnavailable.of(about, error, code, answered=answered) from error
