"""What goes to a server by its words, and stores that are led through the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from django.db import connections

from django_distlock.backends.redis import RedisBackend

from .proxy import Proxy, Reader
from .redis_data import at


class StatementReader:
    """Reads what one client sends to PostgreSQL: the texts of statements, in their order.

    Args:
        into: Where to put them.
    """

    def __init__(self, into: list[str]):
        self._into = into
        self._pending = bytearray()
        self._started = False
        self._parsed = ""

    def statements(self, data: bytes) -> int:
        """See `Reader`."""
        self._pending += data
        before = len(self._into)
        while (message := self._message()) is not None:
            kind, body = message
            if kind == b"P":
                self._parsed = body.split(b"\0")[1].decode()
            elif kind == b"Q":
                self._into.append(body.rstrip(b"\0").decode())
            elif kind == b"E":
                self._into.append(self._parsed)
        return len(self._into) - before

    def _message(self) -> tuple[bytes, bytes] | None:
        head = 1 if self._started else 0
        if len(self._pending) < head + 4:
            return None
        length = head + int.from_bytes(self._pending[head : head + 4], "big")
        if len(self._pending) < length:
            return None
        message = bytes(self._pending[:head]), bytes(self._pending[head + 4 : length])
        del self._pending[:length]
        self._started = True
        return message


class CommandReader:
    """Reads what one client sends to Redis: the words of commands, in their order.

    Args:
        into: Where to put them.
    """

    def __init__(self, into: list[list[bytes]]):
        self._into = into
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


@contextmanager
def led(alias: str, reader: Callable[[], Reader]) -> Iterator[Proxy]:
    """Lead a database of Django's through a proxy for the block."""
    settings = connections[alias].settings_dict
    before = {name: settings[name] for name in ("HOST", "PORT", "OPTIONS")}
    connections[alias].close()
    with Proxy(settings["HOST"], int(settings["PORT"]), reader).running() as proxy:
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        settings.update(
            HOST="127.0.0.1", PORT=str(proxy.port), OPTIONS={**before["OPTIONS"], **plain}
        )
        try:
            yield proxy
        finally:
            connections[alias].close()
            settings.update(before)


@contextmanager
def redis_led(url: str, reader: Callable[[], Reader]) -> Iterator[tuple[RedisBackend, Proxy]]:
    """Give a backend that asks a server of Redis through a proxy."""
    where = urlsplit(url)
    with Proxy(where.hostname or "", where.port or 0, reader).running() as proxy:
        backend = at(where._replace(netloc=f"127.0.0.1:{proxy.port}").geturl())
        try:
            yield backend, proxy
        finally:
            backend._listener.close_all()
            lines: Any = backend.store._lines
            for connection in lines._idle:
                connection.disconnect()
