"""Backends whose store cannot be reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.db import connections
from redis import RedisCluster

from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.redis import RedisBackend
from django_distlock.conf import backend_config
from tests.backends import Registered

#: An alias for databases that are not there.
ALIAS = "unreachable"
#: Options of a Redis where nobody listens.
NOWHERE: dict[str, dict[str, str | Callable[[], object]]] = {
    "redis": {"url": "redis://127.0.0.1:1/0"},
    "redis_cluster": {"client_factory": lambda: RedisCluster(host="127.0.0.1", port=1)},
}


def unreachable(registered: Registered, **settings: Any) -> BaseLockBackend | None:
    """Make the same backend on a store that is not there; None: its store cannot fail.

    Args:
        settings: What else is different: of the database's settings, or of the backend's options.
    """
    if registered.store == "memory":
        return None
    if registered.store in NOWHERE:
        config = replace(backend_config(registered.alias), alias=ALIAS)
        return RedisBackend(config, **(settings or NOWHERE[registered.store]))
    broken = {
        "postgresql": {"HOST": "127.0.0.1", "PORT": "1"},
        "session": {"HOST": "127.0.0.1", "PORT": "1"},
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
    made = AdvisoryBackend if registered.store == "session" else DatabaseBackend
    return made(replace(config, alias=ALIAS), **{**config.options, "using": ALIAS})


def forget() -> None:
    """Drop the alias, and this thread's connection to what is not there."""
    if ALIAS in connections.databases:
        connections[ALIAS].close()
        del connections[ALIAS]
        del connections.databases[ALIAS]
