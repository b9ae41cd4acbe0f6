"""The subscription on which a process hears that keys became free.

The scripts publish a key's name, on one channel for each key prefix, where somebody has marked the
grant. A channel is no key: on a cluster, every server passes on what one of them was told.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from redis import exceptions

from ..listening import NoWakeUps
from .clients import ERRORS
from .cluster import ClusterLines
from .lines import ThreadLines, packed, shut

#: Seconds that a server gets to answer whether it is still there.
PONG_SECONDS = 5.0


class Subscription:
    """A connection that hears one channel: a `listening.Line`.

    Args:
        connection: Has subscribed, in RESP2: there, an answer is a message, a pong, or an error.
        serves: Whether the connection leads to the store, as far as is known by now.
    """

    def __init__(self, connection: Any, serves: Callable[[Any], bool]):
        self._connection = connection
        self._serves = serves
        self._is_over = False
        # Held while the connection is in use: a closed one would open again, without subscription.
        self._using = threading.Lock()

    def hear(self, seconds: float) -> list[str]:
        with self._using:
            try:
                return self._heard(seconds)
            except BaseException:
                self._is_over = True
                raise

    def close(self) -> None:
        self._is_over = True
        # It ends what another thread hears.
        shut(self._connection._sock)
        # Whoever hears closes it after that: a number that is free may be another connection's.
        if self._using.acquire(blocking=False):
            try:
                self._connection.disconnect()
            finally:
                self._using.release()

    def _heard(self, seconds: float) -> list[str]:
        connection = self._connection
        if self._is_over:
            raise exceptions.ConnectionError("The subscription has ended.")
        if not self._serves(connection):
            raise exceptions.ConnectionError("The locks are now on another server.")
        if not connection.can_read(seconds):
            # redis-py's own check of a connection would take a message for its pong.
            connection.send_packed_command([packed(["PING"])], check_health=False)
            if not connection.can_read(PONG_SECONDS):
                raise exceptions.TimeoutError(f"No answer to PING for {PONG_SECONDS:g} s.")
        kind, *_channel, said = connection.read_response()
        return [str(said, "utf-8", "replace")] if kind == b"message" else []


def subscribed(lines: ThreadLines | ClusterLines, channel: str) -> Subscription:
    """Subscribe to a channel, on whichever server answers; `NoWakeUps`: the user may not."""
    servers = lines.servers()
    # Not every process to the same server of a cluster.
    random.shuffle(servers)
    for number, server in enumerate(servers, 1):
        try:
            return Subscription(_subscribed(server, channel), lines.serves)
        except ERRORS:
            if number == len(servers):
                raise
    raise exceptions.ConnectionError("No server of the cluster is known.")


def _subscribed(server: ThreadLines, channel: str) -> Any:
    connection = server.own_connection(protocol=2)
    try:
        connection.connect()
        questions = [packed(["PING"]), packed(["SUBSCRIBE", channel])]
        connection.send_packed_command(questions, check_health=False)
        for _ in questions:
            connection.read_response()
    except BaseException as error:
        connection.disconnect()
        if isinstance(error, exceptions.NoPermissionError):
            raise NoWakeUps(
                f"The user of the locks may not subscribe to the channel {channel!r}, which"
                f" ACL SETUSER … &{channel} +subscribe +ping would allow. {error}"
            ) from error
        raise
    return connection
