"""Stores that are led through the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from django.db import connections

from django_distlock.backends.redis import RedisBackend

from .proxy import Proxy, Reader
from .redis_data import at


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
