"""Who calls keys out on PostgreSQL, and who is rung."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from psycopg import sql

from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.listening import Listener
from django_distlock.backends.queues import Turn
from django_distlock.handler import lock_backends
from tests.contract.aliases import locks_on
from tests.salted import call_of, channel_of

from .databases import ask, server

LOCKS = "django_distlock_heldlock"


@contextmanager
def database_locks(using: str = "default", **options: Any) -> Iterator[DatabaseBackend]:
    """Configure a backend of this kind, and close what it has opened."""
    with locks_on(using, OPTIONS={"using": using, **options}) as alias:
        backend = lock_backends[alias]
        assert isinstance(backend, DatabaseBackend)
        try:
            yield backend
        finally:
            listener_of(backend).close_all()
            backend._connections.close_all()


def listener_of(backend: DatabaseBackend) -> Listener:
    """Return what listens for a backend."""
    assert backend._listener is not None
    return backend._listener


class Ear:
    """A session that hears what is called out, and tells which keys of one test are meant."""

    def __init__(self, key: str):
        using = "default"
        self._key = key
        self._channel = channel = channel_of(using)
        self._raw = server(str(connections[using].settings_dict["NAME"]))
        self._raw.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def __enter__(self) -> Ear:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def heard(self) -> list[str]:
        """Return the storage keys that were called out since the last time."""
        # Notifications come in the order of their commits.
        last = secrets.token_hex(8)
        self._raw.execute("SELECT pg_notify(%s, %s)", [self._channel, last])
        known = {call_of("default", name): name for name in self._names()}
        names: list[str] = []
        for notice in self._raw.notifies(timeout=20):
            if notice.payload == last:
                return names
            if notice.payload in known:
                names.append(known[notice.payload])
        raise AssertionError("the last notification did not come")

    def _names(self) -> list[str]:
        counted = "SELECT storage_key FROM django_distlock_fencecounter WHERE strpos(key, %s) > 0"
        return [f"distlock:{self._key}", *(name for (name,) in ask("default", counted, self._key))]


class Rung:
    """A waiter in the queue of a key."""

    def __init__(self, backend: DatabaseBackend, key: str):
        self._backend = backend
        self._rung = threading.Event()
        self._turn = Turn(backend.queues.name_of(key), self._ring)
        backend.queues.join(self._turn)

    def __enter__(self) -> Rung:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.queues.leave(self._turn)

    def forget(self) -> None:
        """Forget that it was rung."""
        self._rung.clear()

    def comes(self, seconds: float = 10) -> bool:
        """Wait until it is rung; return whether it was in time."""
        return self._rung.wait(seconds)

    def _ring(self) -> bool:
        self._rung.set()
        return True
