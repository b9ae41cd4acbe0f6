"""Brokers that Celery's messages go through: folders, Redis, RabbitMQ."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amqp import Connection
from amqp.exceptions import AMQPError

from tests.keeper import folder, free_port, kept, server_user
from tests.poolers import without
from tests.redis_servers import private_redis

#: Where Debian keeps the server itself; the one on the path starts it as another user only.
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
#: What lets Redis deliver again, soon, what a worker has not acknowledged in time.
SECONDS_UNTIL_REDELIVERY = 3


@dataclass(frozen=True, kw_only=True)
class Broker:
    """What Celery has to know of a broker.

    Attributes:
        url: Its address.
        results: The address of a store for results.
        options: What its transport is told.
        queues: Celery's settings of the queues there.
    """

    url: str
    results: str
    options: dict[str, Any] = field(default_factory=dict)
    queues: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Give the settings of Celery that say so; values that JSON can carry."""
        return {
            "broker_url": self.url,
            "broker_transport_options": self.options,
            "result_backend": self.results,
            **self.queues,
        }


@contextmanager
def redis_broker(*, visibility_timeout: int = 3600) -> Iterator[Broker]:
    """Run a Redis server that keeps messages and results.

    Args:
        visibility_timeout: Seconds until a message that nobody has acknowledged is delivered again.
    """
    with private_redis(stop="KILL") as server:
        options = {
            "visibility_timeout": visibility_timeout,
            # Looked for each second, instead of every hundred.
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
        yield Broker(url=server.url, results=server.url, options=options)


def folders_broker(home: Path, results: str) -> Broker:
    """Keep messages as files below a folder."""
    options = {
        name: str(home / part)
        for name, part in (
            # What one side sends is what the other one finds.
            ("data_folder_in", "queue"),
            ("data_folder_out", "queue"),
            ("processed_folder", "processed"),
            ("control_folder", "control"),
        )
    }
    for path in options.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    return Broker(url="filesystem://", results=results, options=options)


@contextmanager
def rabbitmq_broker(results: str) -> Iterator[Broker]:
    """Run a RabbitMQ server, as an ordinary child process that keeps nothing."""
    epmd = shutil.which("epmd")
    if not RABBITMQ.exists() or epmd is None:
        without("rabbitmq", "apt-get install rabbitmq-server")
    names, port = free_port(), free_port()
    with folder(owner=server_user()) as names_home, folder(owner=server_user()) as home:
        # Not started here, Erlang would start one that stays.
        daemon: list[str | Path] = [epmd, "-port", str(names), "-address", "127.0.0.1"]
        with (
            kept(daemon, names_home, lambda: _listens(names), stop="KILL"),
            kept(_rabbitmq(home, port, names), home, lambda: _answers(port), stop="KILL"),
        ):
            yield Broker(url=f"amqp://guest:guest@127.0.0.1:{port}//", results=results)


def _rabbitmq(home: Path, port: int, names: int) -> list[str | Path]:
    for name in ("conf", "env"):
        (home / name).touch(mode=0o644)
    (home / "plugins").write_text("[].")
    (home / "plugins").chmod(0o644)
    environment = {
        "HOME": home,
        "ERL_EPMD_PORT": names,
        "RABBITMQ_NODENAME": f"distlock{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": port,
        "RABBITMQ_DIST_PORT": free_port(),
        "RABBITMQ_MNESIA_BASE": home / "data",
        "RABBITMQ_LOG_BASE": home / "logs",
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_PID_FILE": home / "pid",
        "RABBITMQ_CONF_ENV_FILE": home / "env",
        "RABBITMQ_CONFIG_FILE": home / "conf",
        "RABBITMQ_ENABLED_PLUGINS_FILE": home / "plugins",
        # Told so, the script becomes the server, instead of a parent that outlives a signal.
        "RABBITMQ_ALLOW_INPUT": 1,
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput +S 1:1 +sbwt none",
    }
    given = [f"{name}={value}" for name, value in environment.items()]
    return ["/usr/bin/env", *given, RABBITMQ]


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _answers(port: int) -> bool:
    """Say whether the server lets a client in."""
    if not _listens(port):
        return False
    try:
        with Connection(f"127.0.0.1:{port}", connect_timeout=2, read_timeout=2):
            return True
    except (OSError, AMQPError):
        return False
