"""A wire to a server, which a test can cut or let hang."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections

READ_BYTES = 65_536


class Wire:
    """A proxy on loopback, before the server of a database.

    Args:
        using: The alias of the database.
        server: Another server: its host and port.

    Attributes:
        address: What Django's settings of a database have to say to go through it.
        delay: Seconds by which each answer of the server comes later.
        answers: How many have come.
        fate: What becomes of the next answer: "passed" on, "lost" with all that follow on its
            connection, or the connection is "cut". Whoever asks again gets through.
    """

    delay = 0.0
    answers = 0
    fate = "passed"

    def __init__(self, using: str = "default", server: tuple[str, int] | None = None):
        given = connections[using].settings_dict
        self._server = server or (given["HOST"] or "127.0.0.1", int(given["PORT"] or 5432))
        self._begin()

    def _begin(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: dict[str, Any] = {
            "HOST": "127.0.0.1",
            "PORT": str(self._listener.getsockname()[1]),
        }
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hang(self) -> None:
        """Let nothing through, in either direction, and keep all connections open."""
        self._flows.clear()

    def flow(self) -> None:
        """Let through what has come meanwhile, and what comes."""
        self._flows.set()

    def close(self) -> None:
        """Cut all connections."""
        self.flow()
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._welcome(self._listener.accept()[0])

    def _welcome(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()  # As a server that is away does: who connects is told.
            return
        self._sockets.extend((client, server))
        thread = threading.Thread(target=self._carry, args=(client, server), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        try:
            self._pass_on(client, server, other)
        finally:
            # A server that was killed resets its end: who waits at the other one is told.
            for each in other:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _pass_on(
        self, client: socket.socket, server: socket.socket, other: Mapping[Any, socket.socket]
    ) -> None:
        fates = dict.fromkeys(other, "passed")
        with suppress(OSError, ValueError), selectors.DefaultSelector() as ready:
            for each in other:
                ready.register(each, selectors.EVENT_READ)
            while True:
                for key, _events in ready.select():
                    sender: Any = key.fileobj
                    data = sender.recv(READ_BYTES)
                    if sender is server and data:
                        self.answers += 1
                        time.sleep(self.delay)
                    if data and fates[sender] == "passed":
                        fates[sender] = self._next_fate(is_answer=sender is server)
                    self._flows.wait()
                    if not data or fates[sender] == "cut":
                        return
                    if fates[sender] == "passed":
                        other[sender].sendall(data)

    def _next_fate(self, *, is_answer: bool) -> str:
        """Return what becomes of what a connection brings now, and of all behind it."""
        if not is_answer:
            return "passed"
        fate, self.fate = self.fate, "passed"
        return fate


@contextmanager
def wire(using: str = "default", server: tuple[str, int] | None = None) -> Iterator[Wire]:
    """Give a wire to the server of a database, or to another one: see `Wire`."""
    made = Wire(using, server)
    try:
        yield made
    finally:
        made.close()
