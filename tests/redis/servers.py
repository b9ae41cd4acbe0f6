"""Servers that tests stop, spoil and cut off, and backends on them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import Redis

from django_distlock.backends.redis import RedisBackend
from django_distlock.conf import BackendConfig
from tests.keeper import Server, folder, free_port, server_user
from tests.redis_servers import private_redis

#: Seconds that a server on this machine gets to do something.
PATIENCE = 20
#: Seconds after which a backend of these tests gives up on a server that does not answer.
SILENCE = 0.5


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


def with_query(url: str, **query: Any) -> str:
    """Return an address with settings of the connection."""
    return f"{url}?{'&'.join(f'{name}={value}' for name, value in query.items())}"


def eventually(holds: Callable[[], object], what: str) -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < give_up, f"not in {PATIENCE} s: {what}"
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


class Proxy:
    """A way to a server on which its words get lost.

    Args:
        url: The address of the server.
    """

    def __init__(self, url: str):
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        #: What becomes of the next reply: "passed" on, "lost" with all that follow on its
        #: connection, or the connection is "cut". Whoever asks again gets through.
        self.replies = "passed"

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._end([self._listener])
        # Whoever comes last is let in before it, and would be overlooked.
        self._threads[0].join(PATIENCE)
        self._end(self._sockets)
        for each in self._threads[1:]:
            each.join(PATIENCE)

    def _end(self, sockets: list[socket.socket]) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(self._target)
                self._sockets.append(server)
                self._start(self._pump, client, server, False)
                self._start(self._pump, server, client, True)

    def _pump(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        fate = "passed"
        with suppress(OSError):
            while fate != "cut" and (data := source.recv(65536)):
                if replies and fate == "passed":
                    fate, self.replies = self.replies, "passed"
                if fate == "passed":
                    target.sendall(data)
        self._end([target])
