"""Connections to one Redis server, each used by one caller at a time.

redis-py's connections, without its client around them: that costs more than the server and the way
to it together (docs/explanation/performance.md), and sends commands again when a connection breaks.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from redis import exceptions

from ...core import budgets
from ...database.borrowing import Opening, is_readable
from ..lua import Script
from .clients import address_of

#: A cluster's errors, by their first word. The parsers of redis-py before 6 do not know them.
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
        indexes: The listing and keys of the index of tokens, which come last and are left out on a
            cluster: there they lie on other servers.
    """

    script: Script
    keys: Sequence[str]
    arguments: Sequence[str]
    indexes: Sequence[str] = ()

    def command(self, *, whole: bool = False) -> tuple[str, ...]:
        """Return the command that calls the script; `whole`: for a server that does not know it."""
        keys = (*self.keys, *self.indexes)
        what = ("EVAL", self.script.text) if whole else ("EVALSHA", self.script.digest)
        return (*what, str(len(keys)), *keys, *self.arguments)


def answered(answer: Any) -> Any:
    """Return an answer, or raise the error that it is."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def packed(words: Sequence[str]) -> bytes:
    """Return a command as it is sent: an array of texts, each with its length in bytes."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word.encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


class ThreadLines:
    """Connections for threads: as many as ask at the same time.

    Nobody waits for one, and so none has to be counted: what counts in Python can be left in the
    middle by a signal's handler that raises, such as that of a time limit.

    Args:
        limit: How many are kept while nobody needs them.
    """

    def __init__(self, pool: Any, limit: int):
        self._pool = pool
        self._limit = limit
        self._idle: deque[Any] = deque()

    def ask(self, call: Call, *, asking: bool = False) -> Any:
        """Call a script, whether the server knows it or not. Raise its error.

        Args:
            asking: Of a server of a cluster that is being given the slot of the keys.
        """
        first = [("ASKING",)] if asking else []
        answer = self._exchange([*first, call.command()])[-1]
        if isinstance(answer, exceptions.NoScriptError):
            answer = self._exchange([*first, call.command(whole=True)])[-1]
        return answered(answer)

    def ask_all(self, calls: Sequence[Call]) -> list[Any]:
        """Call scripts in one round trip; give answers, and errors in their places."""
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
        """Run commands in one round trip; give answers, and errors in their places."""
        return self._exchange(commands)

    def servers(self) -> list[ThreadLines]:
        """Return the connections to each server that has keys: this one."""
        return [self]

    def keep_none(self) -> None:
        """Close each connection from now on when it is not in use."""
        self._limit = 0
        with suppress(IndexError):
            while True:
                self._idle.pop().disconnect()
        # Behind Sentinel, also those that it was asked on where the primary is.
        manager = getattr(self._pool, "sentinel_manager", None)
        for sentinel in manager.sentinels if manager else ():
            sentinel.connection_pool.disconnect(inuse_connections=False)

    def own_connection(self, **settings: Any) -> Any:
        """Return a connection for one user alone, not open yet, with other settings."""
        given = self._pool.connection_kwargs
        # Behind Sentinel, who asks it where the primary is.
        kept = {name: given[name] for name in ("retry", "connection_pool") if name in given}
        return self._pool.connection_class(**(address_of(given) | kept | settings))

    def serves(self, connection: Any) -> bool:
        """Whether a connection leads to where these do, as far as is known by now."""
        return not _is_elsewhere(self._pool, connection)

    @property
    def name(self) -> str:
        """What messages call the server; no part of it is a secret."""
        given = self._pool.connection_kwargs
        # Behind Sentinel, whichever serves it.
        named = given.get("path") or getattr(self._pool, "service_name", None)
        return named or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"

    def _exchange(self, commands: Sequence[Sequence[str]]) -> list[Any]:
        connection = _taken(self._pool, self._idle)
        # Where this is cut short, nobody knows what the next answer would be.
        clean = False
        try:
            if _is_elsewhere(self._pool, connection) or _has_ended(connection._sock):
                connection.disconnect()
            _open(connection)
            bound = _bound(connection)
            # As one text: each item of a list is a call of the system.
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


def _taken(pool: Any, idle: deque[Any]) -> Any:
    """Return a connection that nobody uses, or a new one, which is not open."""
    try:
        return idle.pop()
    except IndexError:
        return pool.make_connection()


def _open(connection: Any) -> None:
    """Open a connection, unless it is, in the time that the call has."""
    if connection._sock is not None or (left := budgets.left()) == math.inf:
        connection.connect()
        return
    if not left:
        raise budgets.Over
    connecting, answering = connection.socket_connect_timeout, connection.socket_timeout
    # Not put back where this fails: nobody uses such a connection again.
    connection.socket_connect_timeout = min(left, connecting)
    # Amid the handshake of TLS, there is no socket yet that could be shut.
    connection.socket_timeout = min(left, answering)
    with Opening(lambda: shut(connection._sock)):
        connection.connect()
    connection.socket_connect_timeout, connection.socket_timeout = connecting, answering
    connection._sock.settimeout(answering)


def shut(wire: Any) -> None:
    """End what another thread does with a socket; None: there is none."""
    if wire is not None:
        # An SSL socket's own method would change what that thread uses.
        with suppress(OSError):
            socket.socket.shutdown(wire, socket.SHUT_RDWR)


def _bound(connection: Any) -> bool:
    """Let an answer come in the time that the call has; return whether that is a shorter one."""
    left = budgets.left(usual := connection.socket_timeout)
    if not left:
        raise budgets.Over
    if left < usual:
        connection._sock.settimeout(left)
    return bool(left < usual)


def _is_elsewhere(pool: Any, connection: Any) -> bool:
    """Whether, behind Sentinel, another connection has learnt that the primary is another one."""
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
    """Whether a read-only replica answered: the address may lead to its primary by now."""
    return isinstance(answer, exceptions.ResponseError) and "read only replica" in str(answer)


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        word, _, said = str(error).partition(" ")
        # Without its frames, which would live until the garbage collector finds the circle.
        return _CLUSTER[word](said) if word in _CLUSTER else error.with_traceback(None)
