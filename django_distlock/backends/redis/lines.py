"""Connections to one Redis server, each used by one caller at a time.

These are redis-py's connections without its client. The client costs more time than the server and
the network together (docs/explanation/performance.md), and repeats commands on a new connection.
"""

from __future__ import annotations

import math
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from redis import exceptions

from ...core import durations
from ...database.borrowing import Opening, is_readable
from ..lua import Script
from .clients import address_of

#: Errors of a cluster by their first word, for the parsers of redis-py before 6.
_CLUSTER: Final[Mapping[str, Callable[[str], Exception]]] = {
    "ASK": exceptions.AskError,
    "CLUSTERDOWN": exceptions.ClusterDownError,
    "CROSSSLOT": exceptions.ClusterCrossSlotError,
    "MOVED": exceptions.MovedError,
    "TRYAGAIN": exceptions.TryAgainError,
}


class Call(NamedTuple):
    """A script with its arguments.

    Attributes:
        indexes: The listing and the keys of the token index. They come last, and are left out on a
            cluster, where they would be on other servers.
    """

    script: Script
    keys: Sequence[str]
    arguments: Sequence[str]
    indexes: Sequence[str] = ()

    def command(self, *, whole: bool = False) -> tuple[str, ...]:
        """Return the command that calls the script; `whole`: with its text, to load it."""
        keys = (*self.keys, *self.indexes)
        what = ("EVAL", self.script.text) if whole else ("EVALSHA", self.script.digest)
        return (*what, str(len(keys)), *keys, *self.arguments)


def answered(answer: Any) -> Any:
    """Return an answer, or raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def packed(words: Sequence[str]) -> bytes:
    """Return a command in the Redis protocol: an array of texts, each with its length in bytes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word.encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


class ThreadLines:
    """Connections for threads, as many as are used at the same time.

    There is no limit and so no counter, because a signal's handler may raise in the midst of
    counting up or down.

    Args:
        limit: How many idle connections are kept.
    """

    def __init__(self, pool: Any, limit: int):
        self._pool = pool
        self._limit = limit
        self._idle: deque[Any] = deque()
        # Not by `__del__`: in a cycle, a socket may come first, and warn that it is still open.
        weakref.finalize(self, _close, self._idle).atexit = False

    def ask(self, call: Call, *, asking: bool = False) -> Any:
        """Call a script, loading it if necessary, and raise its error.

        Args:
            asking: Whether the server, in a cluster, is still importing the slot of the keys.
        """
        first = [("ASKING",)] if asking else []
        answer = self._exchange([*first, call.command()])[-1]
        if isinstance(answer, exceptions.NoScriptError):
            answer = self._exchange([*first, call.command(whole=True)])[-1]
        return answered(answer)

    def ask_all(self, calls: Sequence[Call]) -> list[Any]:
        """Call scripts in one round trip; return answers or errors, in order."""
        answers = self._exchange([call.command() for call in calls])
        unknown = [
            place
            for place, answer in enumerate(answers)
            if isinstance(answer, exceptions.NoScriptError)
        ]
        if unknown:
            again = self._exchange([calls[place].command(whole=True) for place in unknown])
            for place, answer in zip(unknown, again, strict=True):
                answers[place] = answer
        return answers

    def command(self, *words: str, asking: bool = False) -> Any:
        """Run a command, and raise its error; see `ask`."""
        return answered(self._exchange([*([("ASKING",)] if asking else []), words])[-1])

    def commands(self, commands: Sequence[Sequence[str]]) -> list[Any]:
        """Run commands in one round trip; return answers or errors, in order."""
        return self._exchange(commands)

    def servers(self) -> list[ThreadLines]:
        """Return the connections to each server that has keys: these."""
        return [self]

    def keep_none(self) -> None:
        """Close connections as soon as they are not in use."""
        self._limit = 0
        _close(self._idle)
        # With Sentinel, also the connections to the sentinels.
        manager = getattr(self._pool, "sentinel_manager", None)
        for sentinel in manager.sentinels if manager else ():
            sentinel.connection_pool.disconnect(inuse_connections=False)

    def own_connection(self, **settings: Any) -> Any:
        """Return a new connection with other settings, which is not open yet."""
        given = self._pool.connection_kwargs
        # With Sentinel, these find the primary.
        kept = {name: given[name] for name in ("retry", "connection_pool") if name in given}
        return self._pool.connection_class(**(address_of(given) | kept | settings))

    def serves(self, connection: Any) -> bool:
        """Whether a connection leads to the same server as these, as far as is known."""
        return not _is_elsewhere(self._pool, connection)

    @property
    def name(self) -> str:
        """The name of the server for messages, without any secret."""
        given = self._pool.connection_kwargs
        # With Sentinel, the name of the service.
        named = given.get("path") or getattr(self._pool, "service_name", None)
        return named or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"

    def _exchange(self, commands: Sequence[Sequence[str]]) -> list[Any]:
        connection = _taken(self._pool, self._idle)
        # After an interruption, the next answer on this connection would be that of this request.
        clean = False
        try:
            if _is_elsewhere(self._pool, connection) or _has_ended(connection._sock):
                connection.disconnect()
            _open(connection)
            bound = _bound(connection)
            # As one text, because redis-py makes a system call for each item of a list.
            connection.send_packed_command([b"".join(map(packed, commands))])
            answers = [_answer(connection) for _ in commands]
            if bound:
                connection._sock.settimeout(connection.socket_timeout)
            clean = not any(map(_is_of_replica, answers))
            return answers
        finally:
            if clean and len(self._idle) < self._limit:
                self._idle.append(connection)
            else:
                connection.disconnect()


def _close(idle: deque[Any]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().disconnect()


def _taken(pool: Any, idle: deque[Any]) -> Any:
    """Return an idle connection, or a new one, which is not open yet."""
    try:
        return idle.pop()
    except IndexError:
        return pool.make_connection()


def _open(connection: Any) -> None:
    """Open a connection if necessary, in the time that the call has left."""
    if connection._sock is not None or (left := durations.left()) == math.inf:
        connection.connect()
        return
    if not left:
        raise durations.Over
    connecting, answering = connection.socket_connect_timeout, connection.socket_timeout
    # Not restored after a failure, because such a connection is not used again.
    connection.socket_connect_timeout = min(left, connecting)
    # During the TLS handshake, there is no socket yet that could be shut.
    connection.socket_timeout = min(left, answering)
    with Opening(lambda: shut(connection._sock)):
        connection.connect()
    connection.socket_connect_timeout, connection.socket_timeout = connecting, answering
    opened: Any = connection._sock
    opened.settimeout(answering)


def shut(wire: Any) -> None:
    """Shut a socket down that another thread uses; None: there is none."""
    if wire is not None:
        # The method of an SSL socket would change an attribute that the other thread uses.
        with suppress(OSError):
            socket.socket.shutdown(wire, socket.SHUT_RDWR)


def _bound(connection: Any) -> bool:
    """Limit the wait for an answer to what the call has left; return whether that is shorter."""
    left = durations.left(usual := connection.socket_timeout)
    if not left:
        raise durations.Over
    if left < usual:
        connection._sock.settimeout(left)
    return bool(left < usual)


def _is_elsewhere(pool: Any, connection: Any) -> bool:
    """Whether, with Sentinel, another connection has found a new primary meanwhile."""
    primary = getattr(pool, "master_address", None)
    return primary is not None and (connection.host, connection.port) != tuple(primary)


def _has_ended(wire: Any) -> bool:
    """Whether the server has closed a connection, which has nothing to say otherwise.

    Looked at each time, because it costs little: a question that was sent in vain may have been
    heard, so it is not asked again, and whoever tries once would be told of trouble.
    """
    try:
        return wire is not None and is_readable(wire.fileno())
    except (OSError, ValueError):
        return True


def _is_of_replica(answer: Any) -> bool:
    """Whether a read-only replica answered; by now, the address may lead to the primary."""
    return isinstance(answer, exceptions.ResponseError) and "read only replica" in str(answer)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        word, _, said = str(error).partition(" ")
        # Without the traceback, whose frames would form a circle with the error.
        return _CLUSTER[word](said) if word in _CLUSTER else error.with_traceback(None)
