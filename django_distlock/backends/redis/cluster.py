"""Connections to a Redis Cluster, which keeps each lock on one of its servers.

redis-py's client knows which server has which keys. Requests are sent on connections of this
package's own, as to a single server. After an interruption, a connection of the client could pass
the answer to the next request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis import exceptions
from redis.cluster import ClusterNode

from ...core import durations, threads
from ...core.threads import begun
from .clients import ERRORS, own_pool
from .lines import Call, ThreadLines

#: How many redirections a request follows.
MOVES = 5
#: Seconds between two looks at the map of the cluster while servers do not answer.
LOOK_SECONDS = 1.0

_AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError)


class ClusterLines:
    """The connections of threads to a cluster: `ThreadLines` for each of its servers."""

    def __init__(self, client: Any, limit: int):
        self._client = client
        self._limit = limit
        self._lines: dict[str, ThreadLines] = {}
        self._looked_at = 0.0

    def ask(self, call: Call) -> Any:
        call = call._replace(indexes=())
        return self._followed(call.keys[0], lambda server, asking: server.ask(call, asking=asking))

    def _followed(self, key: str, question: Callable[[ThreadLines, bool], Any]) -> Any:
        """Ask the server that has a key, and follow redirections."""
        node, asking = self.node_of(key), False
        for _ in range(MOVES):
            try:
                return question(self.server(node), asking)
            except exceptions.AskError as error:
                # Use the node in the answer, because the map may not have it yet.
                asking = not isinstance(error, exceptions.MovedError)
                if not asking:
                    self.look_again()
                node = self._told(error, node)
            except _AWAY:
                self.look_again()
                raise
        raise exceptions.ClusterError(f"The keys moved {MOVES} times.")

    def _told(self, error: Any, by: Any) -> Any:
        """Return the node of a redirection. Without a host, it is on the host that answered."""
        place = self._client.nodes_manager.remap_host_port(error.host or by.host, error.port)
        known = self._client.get_node(*place)
        # A node without slots is not in the client's map.
        return known or ClusterNode(*place)  # type: ignore[no-untyped-call]

    def ask_all(self, calls: Sequence[Call]) -> list[Any]:
        """Call scripts in one round trip to each server; return answers or errors, in order.

        If a server does not answer, only its own calls fail, and no other one is delayed.
        """
        answers: list[Any] = [None] * len(calls)
        places: dict[str, list[int]] = {}
        nodes: dict[str, Any] = {}
        for place, call in enumerate(calls):
            try:
                node = self.node_of(call.keys[0])
            except ERRORS as error:
                answers[place] = error
                continue
            nodes[node.name] = node
            places.setdefault(node.name, []).append(place)

        def ask(name: str) -> list[Any]:
            part = [calls[place]._replace(indexes=()) for place in places[name]]
            try:
                return self.server(nodes[name]).ask_all(part)
            except ERRORS as error:
                return [error] * len(part)

        for name, found in zip(places, _side_by_side(ask, list(places)), strict=True):
            for place, answer in zip(places[name], found, strict=True):
                # The keys have moved meanwhile, and the answer says where.
                moved = isinstance(answer, exceptions.AskError)
                answers[place] = self._asked(calls[place]) if moved else answer
        if any(isinstance(answer, _AWAY) for answer in answers):
            self.look_again()
        return answers

    def command(self, *words: str) -> Any:
        """Run a command about the key that is its second word, and raise its error."""
        return self._followed(
            words[1], lambda server, asking: server.command(*words, asking=asking)
        )

    def servers(self) -> list[ThreadLines]:
        """Return the connections to each server that has keys, in a stable order."""
        self.look_again()
        found = map(self.server, self._client.get_primaries())
        return sorted(found, key=lambda lines: lines.name)

    def keep_none(self) -> None:
        self._limit = 0
        for lines in list(self._lines.values()):
            lines.keep_none()

    def serves(self, connection: Any) -> bool:
        """Whether a connection leads to a known server of the cluster."""
        return self._client.get_node(connection.host, connection.port) is not None

    def node_of(self, key: str) -> Any:
        """Return the server of a key, according to the map."""
        return self._client.get_node_from_key(key)

    def server(self, node: Any) -> ThreadLines:
        """Return the connections to one server."""
        lines = self._lines.get(node.name)
        if lines is None:
            pool = own_pool(self._client.get_redis_connection(node).connection_pool)
            lines = self._lines.setdefault(node.name, ThreadLines(pool, self._limit))
        return lines

    def look_again(self) -> None:
        """Update the map of the cluster, from any server that answers."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        with suppress(*ERRORS, durations.Over):
            self._look()  # If none answers, the next request will report it.

    def _look(self) -> None:
        threads.apart(self._client.nodes_manager.initialize, "distlock-cluster")

    def _asked(self, call: Call) -> Any:
        try:
            return self.ask(call)
        except ERRORS as error:
            return error


def _side_by_side(ask: Any, names: Sequence[str]) -> list[Any]:
    if len(names) < 2:
        return [ask(name) for name in names]
    # Not a pool: after the end of the main thread, it accepts no work, but leases are renewed.
    asked = [begun(partial(ask, name), "distlock-cluster") for name in names]
    return [each.result() for each in asked]
