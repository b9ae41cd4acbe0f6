"""Backends whose store cannot be reached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from django.db import connections

from django_distlock.backends.database import DatabaseBackend
from django_distlock.conf import backend_config
from tests.backends import Registered

#: An alias for databases that are not there.
ALIAS = "unreachable"


def unreachable(registered: Registered, **settings: Any) -> DatabaseBackend | None:
    """Make the same backend on a database that is not there; None: its store cannot fail.

    Args:
        settings: What else of the database's settings is different.
    """
    if registered.store == "memory":
        return None
    broken = {
        "postgresql": {"HOST": "127.0.0.1", "PORT": "1"},
        "mysql": {"HOST": "127.0.0.1", "PORT": "1"},
        # A file instead of the folder: also root cannot open what is in it.
        "sqlite": {"NAME": str(Path(__file__) / "locks.sqlite3")},
    }[registered.store]
    forget()
    connections.databases[ALIAS] = {
        **connections.databases[registered.using],
        **(settings or broken),
    }
    config = backend_config(registered.alias)
    return DatabaseBackend(replace(config, alias=ALIAS), **{**config.options, "using": ALIAS})


def forget() -> None:
    """Drop the alias, and this thread's connection to what is not there."""
    if ALIAS in connections.databases:
        connections[ALIAS].close()
        del connections[ALIAS]
        del connections.databases[ALIAS]
