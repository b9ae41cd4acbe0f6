"""How many connections the servers of a store have, and how many they take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from django.db import connections

from ...backends.base import BaseLockBackend
from ...backends.tables import FenceTable
from ...core.errors import LockError
from .kinds import redis_servers

# A limit of -1 is none.
_POSTGRESQL = """
SELECT 'the server', count(*), current_setting('max_connections')::bigint
    - current_setting('superuser_reserved_connections')::bigint
FROM pg_stat_activity WHERE backend_type = 'client backend'
UNION ALL
SELECT 'the database ' || d.datname, count(a.pid), d.datconnlimit
FROM pg_database d LEFT JOIN pg_stat_activity a
    ON a.datid = d.oid AND a.backend_type = 'client backend'
WHERE d.datname = current_database() AND d.datconnlimit > 0 GROUP BY d.datname, d.datconnlimit
UNION ALL
SELECT 'the user ' || r.rolname, count(a.pid), r.rolconnlimit
FROM pg_roles r LEFT JOIN pg_stat_activity a
    ON a.usesysid = r.oid AND a.backend_type = 'client backend'
WHERE r.rolname = current_user AND r.rolconnlimit > 0 GROUP BY r.rolname, r.rolconnlimit
"""
_MYSQL = """
SELECT 'the server', VARIABLE_VALUE + 0, @@max_connections
FROM {schema}.GLOBAL_STATUS WHERE VARIABLE_NAME = 'Threads_connected'
"""


class Used(NamedTuple):
    """Connections that are open, of those that may be."""

    of: str
    number: int
    most: int

    def __str__(self) -> str:
        return f"{self.of} has {self.number} of {self.most}"


def used_connections(store: BaseLockBackend) -> list[Used]:
    """Return how many connections are open; []: the store has none, or does not tell."""
    servers = redis_servers(store)
    with suppress(LockError):
        if servers is not None:
            return list(_of_redis(servers))
        if isinstance(store, FenceTable):
            return store._ask(_of_database, writes=False, long=True)
    return []


def _of_redis(servers: Callable[..., Mapping[str, Any]]) -> Iterator[Used]:
    for name, told in servers("INFO", "clients").items():
        text = told if isinstance(told, str) else str(told, "utf-8")
        found = dict(re.findall(r"^(connected_clients|maxclients):(\d+)", text, re.MULTILINE))
        if len(found) == 2:
            most = int(found["maxclients"])
            yield Used(f"the server {name}", int(found["connected_clients"]), most)


def _of_database(using: str) -> list[Used]:
    connection = connections[using]
    if connection.vendor == "postgresql":
        question = _POSTGRESQL
    elif connection.vendor == "mysql":
        mariadb = getattr(connection, "mysql_is_mariadb", False)
        schema = "information_schema" if mariadb else "performance_schema"
        question = _MYSQL.format(schema=schema.lower())
    else:
        return []
    with connection.cursor() as cursor:
        cursor.execute(question)
        return [Used(of, int(number), int(most)) for of, number, most in cursor.fetchall()]
