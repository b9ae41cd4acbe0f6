"""Locks of other packages, for the `bridge` of a backend: see `compat.bridge`.

Settings make these locks, so this module imports no models.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from django.core.cache import caches
from django.db import DatabaseError, InterfaceError, connections

from ..core.clock import monotonic
from ..core.errors import BackendUnavailable, InvalidArgument, shown
from ..core.threads import TimerThread, in_child
from ..database.borrowing import Opening, cut
from ..database.connections import (
    CONNECT_SECONDS,
    KEEPALIVES,
    bound_opening,
    close_before_drop,
    own_connection,
)

N = TypeVar("N")

#: Seconds that a server may take to answer.
_BOUND = 1.0

#: The server keeps an idle session, and ends one soon whose client is gone.
_STAYS = ", ".join(
    f"set_config('{name}', '{value}', false)"
    for name, value in {
        "idle_session_timeout": 0,
        "tcp_keepalives_idle": KEEPALIVES["keepalives_idle"],
        "tcp_keepalives_interval": KEEPALIVES["keepalives_interval"],
        "tcp_keepalives_count": KEEPALIVES["keepalives_count"],
        "tcp_user_timeout": KEEPALIVES["tcp_user_timeout"],
    }.items()
)

#: A retried acquire succeeds on its own lock.
_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] and held ~= ARGV[3] then return 0 end
if ARGV[2] == '' then redis.call('SET', KEYS[1], ARGV[1])
else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return 1
"""
_EXTEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('PERSIST', KEYS[1])
else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class OldLock(Generic[N]):
    """The lock that old code acquires for a key.

    Each operation is one attempt, and raises `BackendUnavailable` if the store is unavailable. The
    text `owner` identifies a lease: an owner may acquire again.

    Args:
        name: The lock's name in the old code: a text in which the key replaces `{key}`, or a
            function of the key.

    Raises:
        InvalidArgument: `name` is neither.
    """

    def __init__(self, name: str | Callable[[str], N]):
        if not (callable(name) or (isinstance(name, str) and "{key}" in name)):
            raise InvalidArgument(
                f"An old lock's name must be a text with {{key}}, or a function, not {shown(name)}."
            )
        self._name = name

    def named(self, key: str) -> Any:
        """Return the name of a key's lock in the old code."""
        # No template: a key may have braces.
        return self._name(key) if callable(self._name) else self._name.replace("{key}", key)

    def acquire(
        self, key: str, owner: str, seconds: float | None, instead_of: str | None = None
    ) -> bool:
        """Acquire the lock for some seconds, if no other owner holds it; None: until released.

        Args:
            instead_of: An owner that gives up the lock: the lock changes hands in one step.
        """
        raise NotImplementedError

    def extend(self, key: str, owner: str, seconds: float | None) -> bool:
        """Renew the lock for these seconds from now; False: this owner does not hold it."""
        raise NotImplementedError

    def release(self, key: str, owner: str) -> None:
        """Release the lock, if this owner still holds it."""
        raise NotImplementedError


class OldRedisLock(OldLock[str]):
    """The `Lock` of redis-py, and `cache.lock()` of django-redis.

    Args:
        url: The address of the server with the old locks.
        name: See `OldLock`. django-redis puts a prefix before the names of a cache: `":1:{key}"`.
    """

    def __init__(self, url: str, name: str | Callable[[str], str]):
        super().__init__(name)
        self._url = url
        self._client: Any = None

    def acquire(
        self, key: str, owner: str, seconds: float | None, instead_of: str | None = None
    ) -> bool:
        """See `OldLock`."""
        return self._run(_ACQUIRE, key, owner, _milliseconds(seconds), instead_of or owner)

    def extend(self, key: str, owner: str, seconds: float | None) -> bool:
        """See `OldLock`."""
        return self._run(_EXTEND, key, owner, _milliseconds(seconds))

    def release(self, key: str, owner: str) -> None:
        """See `OldLock`."""
        self._run(_RELEASE, key, owner)

    def _run(self, script: str, key: str, *arguments: str) -> bool:
        import redis

        if self._client is None:
            # Two threads at the same time make two clients, and one is dropped unused.
            self._client = redis.Redis.from_url(
                self._url, socket_timeout=_BOUND, socket_connect_timeout=_BOUND
            )
        name = self.named(key)
        try:
            return bool(self._client.eval(script, 1, name, *arguments))
        except redis.RedisError as error:
            raise _unavailable(key, f"the lock {name!r} in Redis", error) from error


class OldCacheAdd(OldLock[str]):
    """A lock made by `cache.add()`, which old code releases by `cache.delete()`.

    That delete checks no owner. If it removes a lock of ours, the next renewal loses the lease.

    Args:
        name: See `OldLock`; the key in the cache, without prefix and version.
        cache: The alias of a cache that all processes share. A cache in a database takes part in
            transactions: acquire outside of `atomic()` then.
    """

    def __init__(self, name: str | Callable[[str], str], cache: str = "default"):
        super().__init__(name)
        self._cache = cache

    def acquire(
        self, key: str, owner: str, seconds: float | None, instead_of: str | None = None
    ) -> bool:
        """See `OldLock`."""
        name = self.named(key)

        def ask(cache: Any) -> bool:
            if cache.add(name, owner, _whole(seconds)):
                return True
            if (held := cache.get(name)) is not None and held == instead_of:
                cache.set(name, owner, _whole(seconds))
                return True
            return bool(held == owner and cache.touch(name, _whole(seconds)))

        return bool(self._ask(key, ask))

    def extend(self, key: str, owner: str, seconds: float | None) -> bool:
        """See `OldLock`."""
        name = self.named(key)
        return bool(
            self._ask(
                key, lambda cache: cache.get(name) == owner and cache.touch(name, _whole(seconds))
            )
        )

    def release(self, key: str, owner: str) -> None:
        """See `OldLock`."""
        name = self.named(key)
        self._ask(key, lambda cache: cache.get(name) == owner and cache.delete(name))

    def _ask(self, key: str, question: Callable[[Any], object]) -> object:
        try:
            return question(caches[self._cache])
        except Exception as error:
            # Each kind of cache raises errors of its own.
            raise _unavailable(key, f"the cache {self._cache!r}", error) from error


class OldAdvisoryLock(OldLock[Any]):
    """An advisory lock of a PostgreSQL session: of django-pglock, django-pglocks, or by hand.

    Each lock has its own connection, to the server itself and not to a pooler. The lock lasts until
    it is released or this process ends: another process that calls `Lease.load()` gets `LockLost`.

    Args:
        number: A function of the key that returns the number that the old code locks, or two of
            them.
        using: The alias of the database.
    """

    def __init__(self, number: Callable[[str], int | tuple[int, int]], using: str = "default"):
        if not callable(number):
            raise InvalidArgument(
                f"An advisory lock's number must be a function of the key, not {shown(number)}."
            )
        super().__init__(number)
        self._using = using
        self._begin()
        close_before_drop(self)
        in_child(self._begin)

    def acquire(
        self, key: str, owner: str, seconds: float | None, instead_of: str | None = None
    ) -> bool:
        """See `OldLock`."""
        with self._turn:
            if instead_of in self._held:
                self._held[owner] = self._held[instead_of]
                del self._held[instead_of]
        if owner in self._held:
            return self.extend(key, owner, seconds)
        number = self.named(key)
        numbers = number if isinstance(number, tuple) else (number,)
        template = connections[self._using]
        # Not from the project's pool, which would keep the session and its lock.
        wrapper = own_connection(template, **KEEPALIVES, connect_timeout=CONNECT_SECONDS)
        bound_opening(wrapper, template.settings_dict["OPTIONS"])
        # Another thread renews on this connection.
        wrapper.inc_thread_sharing()
        try:
            places = ", ".join(["%s"] * len(numbers))
            with Opening(partial(cut, wrapper)):
                wrapper.ensure_connection()
            asked = f"SELECT {_STAYS}, pg_try_advisory_lock({places})"
            if not _answer(wrapper, asked, numbers)[-1]:
                wrapper.close()
                return False
        except (DatabaseError, InterfaceError) as error:
            wrapper.close()
            raise _unavailable(key, f"the database {self._using!r}", error) from error
        except BaseException:
            wrapper.close()
            raise
        self._held[owner] = session = _Session(wrapper, _until(seconds))
        self._timer.add(session)
        return True

    def extend(self, key: str, owner: str, seconds: float | None) -> bool:
        """See `OldLock`. The lock is held as long as its session lives."""
        with self._turn:
            if (session := self._held.get(owner)) is None:
                return False
            try:
                _answer(session.wrapper, "SELECT 1")
            except (DatabaseError, InterfaceError):
                self.release(key, owner)
                return False
            session.until = _until(seconds)
            self._timer.add(session)
            return True

    def release(self, key: str, owner: str) -> None:
        """See `OldLock`."""
        with self._turn:
            if (session := self._held.pop(owner, None)) is not None:
                self._timer.discard(session)
                with suppress(DatabaseError, InterfaceError):
                    session.wrapper.close()

    def close_all(self) -> None:
        """Release all locks."""
        with self._turn:
            for owner in list(self._held):
                self.release("", owner)

    def _end_overdue(self) -> None:
        """Release the locks whose lease has expired or was lost without a release."""
        with self._turn:
            now = monotonic()
            for owner, session in list(self._held.items()):
                if session.until <= now:
                    self.release("", owner)

    def _begin(self) -> None:
        """Start without locks. Keep the copies of a fork: closing them would disturb the parent."""
        self._of_parent = getattr(self, "_held", None)
        self._held: dict[str, _Session] = {}
        self._turn = threading.RLock()
        self._timer = _Timer(self._end_overdue)


@dataclass(slots=True, eq=False)
class _Session:
    """A connection that holds an advisory lock, until a time of the monotonic clock."""

    wrapper: Any
    until: float


class _Timer(TimerThread[_Session]):
    """Releases overdue locks, even if this process acquires no other lock."""

    def __init__(self, end_overdue: Callable[[], None]):
        super().__init__("distlock-old-locks", attrgetter("until"), monotonic)
        self._end_overdue = end_overdue

    def _look(self, now: float, due: float) -> None:
        self._end_overdue()


def _answer(wrapper: Any, statement: str, values: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Run a statement, and return its row. A session that falls silent is cut off."""
    with Opening(partial(cut, wrapper), _BOUND), wrapper.cursor() as cursor:
        cursor.execute(statement, values)
        row: tuple[Any, ...] = cursor.fetchone()
        return row


def _until(seconds: float | None) -> float:
    return math.inf if seconds is None else monotonic() + seconds


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else str(max(1, round(seconds * 1000)))


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else math.ceil(seconds)


def _unavailable(key: str, what: str, error: Exception) -> BackendUnavailable:
    return BackendUnavailable(
        f"The old lock of {key!r}, in {what}, cannot be asked: {error}",
        key=key,
        code="service_unavailable",
    )
