"""Servers that tests stop, spoil and cut off, and backends on them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import Redis

from django_distlock.backends.redis import RedisBackend
from django_distlock.conf import BackendConfig
from tests.integration.wires import Wire, wire
from tests.keeper import Server, folder, free_port, server_user
from tests.redis_servers import private_redis

#: Seconds that a server on this machine gets to do something.
PATIENCE = 20
#: For so long a Sentinel does nothing after it stood still for two seconds.
TILTED = 30
#: Seconds after which a backend of these tests gives up on a server that does not answer.
SILENCE = 1.5
#: What connections are called that tests count.
NAME = "distlock-tests"


def backend_on(url: str = "", *, options: dict[str, Any] | None = None, **config: Any) -> Any:
    """Make a lock backend with connections of its own.

    Args:
        url: The address of its server; "": the options say where it is.
        options: Its `OPTIONS`, but for the address.
        config: What else `DISTLOCK` says about it.
    """
    given = {"url": url, **(options or {})} if url else options or {}
    return RedisBackend(BackendConfig(**{"alias": "redis", **config}), **given)


def client_of(url: str) -> Any:
    """Connect beside the backend."""
    return Redis.from_url(url, decode_responses=True)


def renew(url: str, settings: dict[str, str]) -> None:
    """Let a server be as it was when it had these settings and nothing else.

    Raises:
        RedisError: A test has spoiled it for good.
    """
    with client_of(url) as client:
        for kind in ("normal", "pubsub"):
            client.client_kill_filter(_type=kind, skipme=True)
        client.replicaof("NO", "ONE")
        for name, value in client.config_get().items():
            if settings[name] != value:
                client.config_set(name, settings[name])
        for user in client.acl_users():
            if user != "default":
                client.acl_deluser(user)
        client.acl_log_reset()
        client.flushall()
        client.script_flush()
        client.config_resetstat()


def connections(client: Any) -> int:
    """Return how many connections with the name the server has."""
    return sum(each["name"] == NAME for each in client.client_list())


def with_query(url: str, **query: Any) -> str:
    """Return an address with settings of the connection."""
    return f"{url}?{'&'.join(f'{name}={value}' for name, value in query.items())}"


def eventually(holds: Callable[[], object], what: str) -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + TILTED + PATIENCE
    while not holds():
        assert time.monotonic() < give_up, f"not in {TILTED + PATIENCE} s: {what}"
        time.sleep(0.005)


class Restartable:
    """A Redis server that is killed, and started again in the same place.

    Args:
        home: Where its data are kept, if it keeps any.
        durable: Whether it keeps each answer before it is given; otherwise it keeps nothing.
        settings: As `private_redis` takes them.
    """

    def __init__(self, home: Path, *, durable: bool = False, **settings: Any):
        self.durable = durable
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._settings = {"port": self.port, "data": home / "data", "durable": durable, **settings}
        self._running: AbstractContextManager[Server] | None = None

    def start(self) -> None:
        """Start, and read what was kept."""
        running = private_redis(stop="KILL", **self._settings)
        running.__enter__()
        self._running = running

    def kill(self) -> None:
        """End at once, whatever it is doing."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)


@contextmanager
def restartable(**settings: Any) -> Iterator[Restartable]:
    """Run a server that the test kills and starts."""
    with folder(owner=server_user()) as home:
        server = Restartable(home, **settings)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def stopped(client: Any) -> Iterator[None]:
    """Keep a server from doing anything: it neither answers nor closes a connection."""
    server = client.info("server")["process_id"]
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)


@contextmanager
def line_to(url: str) -> Iterator[Wire]:
    """Give a way to a server on which its words may get lost."""
    parts = urlsplit(url)
    with wire(server=(parts.hostname or "127.0.0.1", parts.port or 6379)) as line:
        yield line


def through(line: Wire, **query: Any) -> str:
    """Return the address of the server at the other end, with settings of the connection."""
    return with_query(f"redis://127.0.0.1:{line.address['PORT']}/0", **query)
