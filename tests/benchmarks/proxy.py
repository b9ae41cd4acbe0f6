"""A proxy on loopback that reads a server's protocol and counts what goes by."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

READ_BYTES = 65_536


@dataclass
class Counts:
    """What one operation sent and got.

    Attributes:
        round_trips: How often the client sent something after the server had answered.
        statements: How many queries or commands it sent, BEGIN and COMMIT included.
    """

    round_trips: int = 0
    statements: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def as_json(self) -> dict[str, int]:
        """Return the numbers by name."""
        return asdict(self)


class Reader(Protocol):
    """Reads what one client sends: simple queries, executions of parsed ones, commands."""

    def statements(self, data: bytes) -> int:
        """Take what came; return how many statements are whole now."""
        ...


class PostgresReader:
    """Reads messages, each with its type and its length. The first one has no type.

    Args:
        into: Where to put the texts of statements.
    """

    def __init__(self, into: list[str] | None = None):
        self._into: list[str] = [] if into is None else into
        self._pending = bytearray()
        self._started = False
        self._parsed = ""

    def statements(self, data: bytes) -> int:
        """See `Reader`."""
        self._pending += data
        before = len(self._into)
        for kind, body in self._messages():
            if kind == b"P":
                self._parsed = body.split(b"\0")[1].decode()
            elif kind == b"Q":
                self._into.append(body.rstrip(b"\0").decode())
            elif kind == b"E":
                self._into.append(self._parsed)
        return len(self._into) - before

    def _messages(self) -> Iterator[tuple[bytes, bytes]]:
        while True:
            head = 1 if self._started else 0
            if len(self._pending) < head + 4:
                return
            length = head + int.from_bytes(self._pending[head : head + 4], "big")
            if len(self._pending) < length:
                return
            message = bytes(self._pending[:head]), bytes(self._pending[head + 4 : length])
            del self._pending[:length]
            self._started = True
            yield message


class RedisReader:
    """Reads commands: arrays of texts, each with its length before it.

    Args:
        into: Where to put the words of commands.
    """

    def __init__(self, into: list[list[bytes]] | None = None):
        self._into: list[list[bytes]] = [] if into is None else into
        self._pending = bytearray()
        self._words: list[bytes] = []
        self._missing = 0

    def statements(self, data: bytes) -> int:
        """See `Reader`."""
        self._pending += data
        before = len(self._into)
        while (end := self._pending.find(b"\r\n")) >= 0:
            is_array, number = self._pending[:1] == b"*", int(self._pending[1:end])
            taken = end + 2 if is_array else end + 2 + number + 2
            if len(self._pending) < taken:
                break
            if is_array:
                self._words, self._missing = [], number
            else:
                self._words.append(bytes(self._pending[end + 2 : taken - 2]))
                self._missing -= 1
            del self._pending[:taken]
            if self._missing == 0:
                self._into.append(self._words)
        return len(self._into) - before


@dataclass
class Line:
    """One connection through the proxy."""

    client: socket.socket
    server: socket.socket
    reader: Reader
    answered: bool = True


class Proxy:
    """Passes on what comes, and counts it. Sessions must be neither encrypted nor compressed.

    Args:
        reader: Makes what reads a connection.
    """

    def __init__(self, host: str, port: int, reader: Callable[[], Reader] = PostgresReader):
        self._upstream = (host, port)
        self._reader = reader
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = socket.socketpair()
        self._lock = threading.Lock()
        self._counts = Counts()

    def take(self) -> Counts:
        """Return what was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counts()
        return counts

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        """Pass on until the block ends."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.send(b"x")
            thread.join()
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._stop.close()
            self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _events in self._selector.select():
                if key.fileobj is self._stopped:
                    return
                if key.fileobj is self._listener:
                    self._connect()
                else:
                    self._pass_on(key.data, key.fileobj is key.data.client)

    def _connect(self) -> None:
        client, _address = self._listener.accept()
        line = Line(client, socket.create_connection(self._upstream), self._reader())
        for each in (line.client, line.server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ, line)

    def _pass_on(self, line: Line, from_client: bool) -> None:
        source, target = (line.client, line.server) if from_client else (line.server, line.client)
        if source.fileno() < 0:
            return  # The other end has closed it, a moment ago.
        data = source.recv(READ_BYTES)
        if not data:
            for each in (line.client, line.server):
                self._selector.unregister(each)
                each.close()
            return
        # Counted before it is passed on: whoever has the answer finds it counted.
        with self._lock:
            self._count(line, data, from_client)
        target.sendall(data)

    def _count(self, line: Line, data: bytes, from_client: bool) -> None:
        if not from_client:
            self._counts.bytes_received += len(data)
            line.answered = True
            return
        self._counts.bytes_sent += len(data)
        self._counts.round_trips += line.answered
        self._counts.statements += line.reader.statements(data)
        line.answered = False
