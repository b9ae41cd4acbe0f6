"""Clusters that tests spoil."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from redis import RedisCluster
from redis.crc import key_slot

from tests.redis_servers import _is_complete, node_port, private_redis, private_redis_cluster

from .servers import backend_on, client_of, eventually, with_query


class Cluster:
    """A cluster of this test alone.

    Args:
        url: The address of one of its nodes.
    """

    def __init__(self, url: str):
        self.url = url
        self.client: Any = RedisCluster.from_url(url, decode_responses=True)
        self.backend = self.another()

    def another(self) -> Any:
        """Make a backend, as another process has one."""
        url = with_query(self.url, socket_timeout=2)
        return backend_on(options={"client_factory": lambda: RedisCluster.from_url(url)})

    def keys_of(self, port: int, key: str, count: int = 3) -> list[str]:
        """Return keys whose locks are on one node."""
        names = (f"{key}-{number}" for number in range(10_000))
        return list(islice((name for name in names if self.node_of(name).port == port), count))

    def node_of(self, key: str) -> Any:
        """Return the node that a key's lock is on."""
        return self.client.get_node_from_key(self.lock(key))

    def lock(self, key: str) -> str:
        """Return the name of a key's record."""
        return f"distlock:lock:{self.backend._name(key)}"

    @property
    def ports(self) -> list[int]:
        """The ports of its nodes."""
        return sorted(node.port for node in self.client.get_primaries())

    @contextmanager
    def joined(self) -> Iterator[int]:
        """Let another node take part, which has no slots yet; give its port."""
        port = node_port()
        ports = [port, *self.ports]
        with private_redis(port=port, cluster_enabled="yes", stop="KILL"), ExitStack() as stack:
            nodes = [stack.enter_context(at(each)) for each in ports]
            nodes[0].cluster("MEET", "127.0.0.1", ports[1])
            eventually(
                lambda: all(_is_complete(each, len(ports)) for each in nodes), "the node takes part"
            )
            yield port

    @contextmanager
    def moving(self, key: str, target: int | None = None) -> Iterator[Callable[[], None]]:
        """Move the slot of a key to another node.

        Args:
            target: The port of that; None: any other one.

        Yields:
            A function that moves one of the keys in it. The others follow at the end.
        """
        slot = key_slot(self.lock(key).encode())
        source = self.node_of(key)
        port = target or next(each for each in self.ports if each != source.port)
        with at(source.port) as there, at(port) as here:
            here_id, there_id = here.cluster("MYID"), there.cluster("MYID")
            here.cluster("SETSLOT", slot, "IMPORTING", there_id)
            there.cluster("SETSLOT", slot, "MIGRATING", here_id)

            def move_one() -> None:
                (name,) = there.cluster("GETKEYSINSLOT", slot, 1)
                there.execute_command("MIGRATE", "127.0.0.1", port, name, 0, 5000)

            yield move_one
            while there.cluster("COUNTKEYSINSLOT", slot):
                move_one()
            for node in (here, there):
                node.cluster("SETSLOT", slot, "NODE", here_id)

    def move(self, key: str, target: int | None = None) -> None:
        """Move the slot of a key to another node, with the records in it; see `moving`."""
        with self.moving(key, target):
            pass


def at(port: int) -> Any:
    """Connect to one node."""
    return client_of(f"redis://127.0.0.1:{port}/0")


@contextmanager
def spoilable() -> Iterator[Cluster]:
    """Run a cluster that goes on without a part of its slots."""
    with private_redis_cluster(cluster_require_full_coverage="no", stop="KILL") as server:
        made = Cluster(server.url)
        yield made
        made.client.close()
