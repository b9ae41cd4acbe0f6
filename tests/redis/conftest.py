"""Servers and backends for the tests of Redis alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from redis.exceptions import RedisError

from django_distlock.backends import listening
from django_distlock.backends.redis import wakeups
from tests.backends import BACKENDS
from tests.contract.stores_redis import RedisStore
from tests.keeper import Server
from tests.redis_servers import private_redis

from .hearing import Warned
from .servers import backend_on, client_of, renew


@pytest.fixture
def store(key: str) -> Iterator[RedisStore]:
    """Give the server that all tests share, and its backend."""
    store = RedisStore(BACKENDS["redis"], key)
    yield store
    store.close()


@pytest.fixture
def on_cluster(key: str) -> Iterator[RedisStore]:
    """Give the cluster that all tests share, and its backend."""
    store = RedisStore(BACKENDS["redis_cluster"], key)
    yield store
    store.close()


@pytest.fixture
def alone_on_cluster(on_cluster: RedisStore, key: str) -> Any:
    """Give a backend on the shared cluster whose keys no other test sees."""
    return on_cluster.variant(key_prefix=key)


@pytest.fixture(scope="session")
def _servers() -> Iterator[Callable[[], Server]]:
    """Give what makes a server, or gives the last one as if it were new."""
    with ExitStack() as stack:
        servers: list[tuple[Server, dict[str, str]]] = []

        def fresh() -> Server:
            if servers:
                server, settings = servers[-1]
                with suppress(RedisError):
                    renew(server.url, settings)
                    return server
            server = stack.enter_context(private_redis(stop="KILL", enable_debug_command="yes"))
            with client_of(server.url) as client:
                servers.append((server, client.config_get()))
            return server

        yield fresh


@pytest.fixture
def private(_servers: Callable[[], Server]) -> Server:
    """Give a server without data, clients and users, whose settings a test may change."""
    return _servers()


@pytest.fixture
def client(private: Server) -> Iterator[Any]:
    """Give a client of the private server, beside the backend."""
    with client_of(private.url) as client:
        yield client


@pytest.fixture
def backend(private: Server) -> Any:
    """Give a backend on the private server."""
    return backend_on(private.url)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Warned:
    """Give the warnings so far."""
    return lambda: [
        each.getMessage() for each in caplog.get_records("call") if each.levelname == "WARNING"
    ]


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a listener soon ask whether the server is there, and soon believe that it is not."""
    monkeypatch.setattr(listening, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(wakeups, "PONG_SECONDS", 2.0)
