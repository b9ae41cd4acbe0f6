"""Clients of the Redis servers that the tests run on."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from redis import Redis, RedisCluster

#: Type checkers read the settings where no server runs.
DEFAULT = "redis://127.0.0.1:6379/0"


def single_url() -> str:
    """Return the address of the single server."""
    return os.environ.get("DISTLOCK_TEST_REDIS_URL", DEFAULT)


def cluster_url() -> str:
    """Return the address of one of the cluster's nodes."""
    return os.environ.get("DISTLOCK_TEST_REDIS_CLUSTER_URL", DEFAULT)


def logged_in(url: str, user: str) -> str:
    """Return an address for a user, who has a password that nobody set."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}:secret@{parts.netloc.rpartition('@')[2]}").geturl()


def cluster() -> RedisCluster:
    """Connect to the cluster, as the settings of the tests say."""
    return RedisCluster.from_url(cluster_url())


def close(client: Any) -> None:
    """Close the connections of a client: that of a cluster leaves them to the garbage collector."""
    if not isinstance(client, Redis):
        for node in client.get_nodes():
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect()
    client.close()
