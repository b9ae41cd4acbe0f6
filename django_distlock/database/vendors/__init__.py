"""What differs between databases in a lock's transaction: one module for each."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import connections

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
