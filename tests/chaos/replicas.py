"""A replica that lags behind the server of a run, and takes its place."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
from redis import Redis

from tests.contract.locking import eventually
from tests.keeper import free_port
from tests.services import _postgres_binaries, _run, private_postgres, private_redis

from .crew import BadWire
from .servers import Killable

#: Seconds within which a replica follows its primary.
PATIENCE = 30.0


class Replica:
    """Follows a server, lags, and takes its place.

    Args:
        store: The server.
    """

    def __init__(self, store: Killable):
        assert store.data is not None
        self._store, self._data = store, store.data.with_name("replica")
        url = urlsplit(store.facts.url)
        self._link = BadWire(url.hostname or "", url.port or 0)
        self._is_redis = url.scheme == "redis"
        more: dict[str, Any] = {"data": self._data, "port": free_port(), "durable": True}
        if self._is_redis:
            self._server = Killable(partial(private_redis, stop="KILL", **more), self._data)
            self._server.start()
            self._ask("REPLICAOF", "127.0.0.1", str(self._link.port))
        else:
            program = _postgres_binaries(self._data.parent) / "pg_basebackup"
            near = store.facts.url.replace(f":{url.port}/", f":{self._link.port}/")
            _run([program, "-R", "-D", self._data, "-c", "fast", "-d", near], self._data.parent)
            self._server = Killable(partial(private_postgres, **more), self._data)
            self._server.start()
        assert eventually(self._follows, PATIENCE)

    def lag(self) -> None:
        """Receive nothing more from the primary."""
        self._link.hang()

    def take_over(self) -> None:
        """Be promoted, and move to the address and the data folder of the killed server."""
        # The writes that the link holds back are lost.
        self._link.cut()
        self._link.close()
        if self._is_redis:
            self._ask("REPLICAOF", "NO", "ONE")
            # The first copy of the primary's data is written to the disk in the background.
            assert eventually(lambda: not self._info("persistence")["aof_rewrite_in_progress"])
        else:
            assert self._value("SELECT pg_promote()") is True
        self._server.kill()
        self._store.lose()
        self._data.rename(self._store.data or "")

    def _follows(self) -> bool:
        if self._is_redis:
            return bool(self._info("replication")["master_link_status"] == "up")
        return bool(self._value("SELECT count(*) FROM pg_stat_wal_receiver") == 1)

    def _ask(self, *words: str) -> None:
        with Redis.from_url(self._server.facts.url) as client:
            client.execute_command(*words)

    def _info(self, section: str) -> dict[str, Any]:
        with Redis.from_url(self._server.facts.url) as client:
            return dict(client.info(section))

    def _value(self, query: str) -> Any:
        # The copy may have time-outs of statements.
        url, options = self._server.facts.url, "-c statement_timeout=0"
        with psycopg.connect(url, options=options, autocommit=True) as connection:
            return connection.execute(query).fetchone()[0]  # type: ignore[index]
