"""Requests to Redis: one script, many at once, or a walk through its keys."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import redis

from ...core import durations, threads
from ...core.errors import BackendUnavailable, InvalidArgument, LockError
from ...core.records import SPOILED, Holder, Record, Unreadable
from ...database.connections import keep_inherited
from ...exceptions import InvalidLockBackend
from .answers import FIELDS, live_record, unreadable
from .clients import ERRORS, own_client, translated
from .cluster import ClusterLines
from .lines import Call, ThreadLines, answered
from .wakeups import Subscription, subscribed

#: How many keys one step of a walk reads: the server needs well below a millisecond.
STEP = 1000

#: How bytes that are not UTF-8 are decoded in a script's answer, so that it stays valid JSON.
_IN_JSON = "replace"

#: A cursor of `SCAN` has 64 bits.
_MOST = 2**64 - 1
_PLACE = re.compile(r"([^/]+)/(\d+)\.(\d+)\.(.*)", re.DOTALL)


class Place(NamedTuple):
    """The place where a walk has stopped: a server, a step of its `SCAN`, and a key."""

    server: str = ""
    scan: int = 0
    following: int = -1
    last: str = ""

    def __str__(self) -> str:
        return f"{quote(self.server, safe=':')}/{self.scan}.{self.following}.{self.last}"

    @classmethod
    def parsed(cls, place: str) -> Place:
        """Parse the text that `str` returns."""
        found = _PLACE.fullmatch(place)
        if found is None or int(found[2]) > _MOST:
            raise InvalidArgument(f"{place!r} is not a cursor of this store.")
        return cls(unquote(found[1]), int(found[2]), int(found[3]), found[4])


class RedisStore:
    """The connections of one process to one store.

    Args:
        make: Creates a client; called once, and for a cluster once more in each forked child.
        limit: How many idle connections are kept.
    """

    def __init__(self, alias: str, make: Callable[[], Any], limit: int):
        self._alias = alias
        self._make = make
        self._limit = limit
        self._client: Any = None
        self._lines: ThreadLines | ClusterLines | None
        self._begin()

    @property
    def client(self) -> Any:
        """A client with the store's address: a `redis.Redis`, or a `redis.RedisCluster`."""
        if self._client is None:
            # The client of a cluster connects at once, and may take as long as its settings allow.
            threads.apart(self._make_client, f"distlock-{self._alias}-client")
        return self._client

    @property
    def is_cluster(self) -> bool:
        """Whether this is a cluster, which spreads keys over several servers."""
        with self._asking():
            return isinstance(self.client, redis.RedisCluster)

    def ask(self, call: Call, key: str | None = None) -> str:
        """Call a script; raises `BackendUnavailable`, or another `LockError` if it is refused."""
        with self._asking(key) as lines:
            return text(lines.ask(call), _IN_JSON)

    def ask_all(self, calls: Sequence[Call]) -> list[str | LockError]:
        """Call scripts in one round trip to each server; return answers or errors, in order."""
        if not calls:
            return []
        with self._asking() as lines:
            answers = lines.ask_all(calls)
        return [
            translated(answer, self._alias, None)
            if isinstance(answer, Exception)
            else text(answer, _IN_JSON)
            for answer in answers
        ]

    def command(self, *words: str) -> Any:
        """Run a command."""
        with self._asking() as lines:
            return lines.command(*words)

    def of_each_server(self, *words: str) -> dict[str, Any]:
        """Run a command on each server that has keys; return the answers by the server's name."""
        with self._asking() as lines:
            return {each.name: each.command(*words) for each in lines.servers()}

    def live_records(
        self, line: ThreadLines, names: Sequence[str], again: Callable[[str], Record | None]
    ) -> list[Record | Unreadable | None]:
        """Return the records of some keys on one server, in order; None: nobody holds the key.

        This uses plain commands, because a script for each record takes far longer.

        Args:
            again: Reads a single record that could not be read here: it has moved, or is spoiled.
        """
        with self._asking():
            questions = [("TIME",), *(("HMGET", name, *FIELDS) for name in names)]
            time, *answers = line.commands(questions)
            now = _microseconds(answered(time))

            def read(name: str, answer: Any) -> Record | Unreadable | None:
                try:
                    failed = isinstance(answer, Exception)
                    return again(name) if failed else live_record(answer, now)
                except BackendUnavailable:
                    raise
                except (LockError, *SPOILED) as error:
                    return unreadable(name, error)

            return list(map(read, names, answers))

    def held_by(
        self, line: ThreadLines, names: Sequence[str], host: str | None, task_id: str | None
    ) -> list[bool]:
        """Return for each record whether this holder may hold it; None: any holder."""
        with self._asking():
            answers = line.commands([("HGET", name, "holder") for name in names])
        return [_is_of(answer, host, task_id) for answer in answers]

    def waiting(self, line: ThreadLines, names: Sequence[str]) -> list[int]:
        """Return how many waiters each of these notes contains; 0 if it is spoiled."""
        if not names:
            return []
        with self._asking():
            after = f"({_microseconds(line.command('TIME'))}"
            answers = line.commands([("ZCOUNT", name, after, "+inf") for name in names])
        return [each if isinstance(each, int) else 0 for each in answers]

    def values(self, line: ThreadLines, names: Sequence[str]) -> list[str]:
        """Return the values of these names on one server; "": there is none, or no text."""
        with self._asking():
            answers = line.commands([("GET", name) for name in names]) if names else []
        return [
            "" if each is None or isinstance(each, Exception) else text(each) for each in answers
        ]

    def sample(self, number: int, listing: str) -> Iterator[tuple[ThreadLines, list[str], float]]:
        """Yield a sample of names by server, and how many keys each name stands for.

        A scan walks a hash table, so its first part is a random sample.
        """
        with self._asking() as lines:
            servers = lines.servers()
            size = ("DBSIZE",) if self.is_cluster else ("ZCARD", listing)
            for line in servers:
                names: dict[str, None] = {}
                cursor = 0
                while len(names) * len(servers) < number:
                    cursor, found = self._step(line, cursor, "*", listing, STEP)
                    names.update(dict.fromkeys(found))
                    if cursor == 0:
                        break
                whole = int(line.command(*size)) if cursor else len(names)
                yield line, list(names), max(1.0, whole / max(1, len(names)))

    def _step(
        self, line: ThreadLines, cursor: int, pattern: str, listing: str | None, size: int
    ) -> tuple[int, list[str]]:
        """Make one step of a scan; return the next cursor, and names; see `walk`."""
        how = (str(cursor), "MATCH", pattern, "COUNT", str(size))
        if listing is None or self.is_cluster:
            following, found = line.command("SCAN", *how)
            return int(following), [text(each) for each in found]
        following, found = line.command("ZSCAN", listing, *how)
        return int(following), [text(each) for each in found[::2]]

    def subscribed(self, channel: str) -> Subscription:
        """Subscribe to a channel, on a connection of its own; see `wakeups.subscribed`."""
        with self._asking() as lines:
            return subscribed(lines, channel)

    def walk(
        self,
        start: str,
        pattern: str,
        place: str | None = None,
        room: Callable[[], int] = lambda: 2 * STEP,
        listing: str | None = None,
    ) -> Iterator[tuple[ThreadLines, list[tuple[str, str]]]]:
        """Go through the keys that match a pattern, without keeping the server from its work.

        A key that is there all the time comes at least once; one that is made or removed
        meanwhile may.

        Args:
            start: What all the keys start with.
            pattern: What comes after it, as `SCAN` takes it.
            place: Where to go on; None: from the start.
            room: Tells how many keys are taken at most before the caller goes on from a place.
            listing: The sorted set with the names, to go through where there is one: of a server,
                and not of a cluster. It may name keys that are gone.

        Yields:
            The connections to the server that has the keys, and what comes after the start, each
            with the place before it.
        """
        pattern = escaped(start) + pattern
        begin = Place() if place is None else Place.parsed(place)
        with self._asking() as lines:
            servers = lines.servers()
        if all(line.name != begin.server for line in servers):
            begin = Place()  # That server is gone: its keys may be on any other.
        for line in servers:
            if line.name < begin.server:
                continue
            step = begin if line.name == begin.server else Place(line.name)
            size = 1 if step.last else _fitting(room)
            while True:
                with self._asking():
                    following, found = self._step(line, step.scan, pattern, listing, size)
                # A step that is asked for again goes as far as it did, unless keys have come or
                # gone meanwhile: then what it gives may be new, also where its name is not.
                last = step.last if following == step.following else ""
                ends = {name[len(start) :] for name in found}
                names = sorted(name for name in ends if name > last)
                if len(names) > room() and size > 1:
                    # No place in a long step lasts: where keys come and go, it would begin anew
                    # each time. The shortest has but a few.
                    size = max(1, min(size // 2, room() // 2))
                    continue
                step = step._replace(following=following, last="")
                placed = [
                    (name, str(step._replace(last=before)))
                    for before, name in zip([last, *names], names, strict=False)
                ]
                while placed:
                    part = max(1, min(STEP, room()))
                    yield line, placed[:part]
                    placed = placed[part:]
                if following == 0:
                    break
                # Few of them match, or those that are wanted still fit.
                size = min(STEP, 2 * size) if 4 * len(names) < size else _fitting(room)
                step = Place(line.name, following)

    @contextmanager
    def _asking(self, key: str | None = None) -> Iterator[ThreadLines | ClusterLines]:
        try:
            yield self._made()
        except (*ERRORS, durations.Over) as error:
            raise translated(error, self._alias, key) from error

    def _made(self) -> ThreadLines | ClusterLines:
        if self._lines is not None:
            return self._lines
        client = self.client
        with self._making:
            if self._lines is None:
                self._lines = (
                    ClusterLines(client, self._limit)
                    if isinstance(client, redis.RedisCluster)
                    else ThreadLines(client.connection_pool, self._limit)
                )
            return self._lines

    def _make_client(self) -> None:
        with self._making:
            if self._client is not None:
                return
            try:
                made = self._make()
            except OSError as error:
                trouble = redis.exceptions.ConnectionError(str(error))
                raise translated(trouble, self._alias, None) from error
            except (LookupError, TypeError, ValueError) as error:
                raise InvalidLockBackend(
                    f"DISTLOCK[{self._alias!r}]: its client cannot be made: {type(error).__name__}."
                ) from error
            self._client = own_client(made)

    def keep_none(self) -> None:
        """Close each connection from now on when it is not in use."""
        with self._making:
            self._limit = 0
            lines = self._lines
        if lines is not None:
            lines.keep_none()

    # Processes

    def _begin(self) -> None:
        """Use nothing of a parent's."""
        self._making = threading.Lock()
        self._lines = None

    def begin_in_child(self) -> None:
        """Let go of what a fork copied. The pool of a single server sees to itself."""
        keep_inherited((self._lines, self._client))
        if isinstance(self._client, redis.RedisCluster):
            # A thread of the parent may have the mutex of the client's map of servers.
            self._client = None
        self._begin()


def _fitting(room: Callable[[], int]) -> int:
    """Return the size of a step whose keys are surely taken: it may give a few more."""
    return max(1, min(STEP, room() // 2))


def escaped(text: str) -> str:
    """Return a text that stands for itself in a pattern of `SCAN`."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def text(answer: Any, errors: str = "backslashreplace") -> str:
    """Return an answer as text; bytes that are none are escaped, for others may have keys here."""
    # A client of the project's own making may decode.
    return answer if isinstance(answer, str) else str(answer, "utf-8", errors)


def _microseconds(time: Sequence[Any]) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])


def _is_of(answer: object, host: str | None, task_id: str | None) -> bool:
    if answer is None:
        return False
    if not isinstance(answer, str | bytes):
        return True  # An error: let it be read by itself.
    try:
        holder = Holder.from_json(json.loads(answer))
    except SPOILED:
        return True  # The same.
    return holder.is_one(host, task_id)
