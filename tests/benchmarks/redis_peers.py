"""What else locks in Redis, and the least that a server can be asked.

A peer's lock object takes a key, says whether it did, and gives it back or fails. Those of redis-py
and python-redis-lock are made beforehand, which costs them nothing in a pair; a cache makes one for
each use, as its users do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from typing import Any

from redis import Redis

from .candidates import HOT, KEYS, TTL, NoLock, Operations
from .databases import LONG_TTL
from .race import Unavailable
from .timing import Subject

EXPIRE = int(TTL)
PROOF = "proof"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A peer's kind of lock.

    Attributes:
        name: What its figures are called.
        make: Makes the lock object of a key, for so many seconds.
        extend: Renews what such an object holds.
        once: Whether an object serves one pair.
        block: Makes what a `with` statement takes; None: the object itself.
    """

    name: str
    make: Callable[[str, int], Any]
    extend: Callable[[Any], object]
    once: bool = False
    block: Callable[[str], Any] | None = None


def redis_py(client: Redis) -> Kind:
    """Return redis-py's own locks."""
    return Kind(
        name="redis-py",
        make=lambda key, seconds: client.lock(f"redis-py:{key}", timeout=seconds),
        extend=lambda lock: lock.extend(EXPIRE, replace_ttl=True),
        block=lambda key: client.lock(f"redis-py:{key}", timeout=EXPIRE, blocking=False),
    )


def django_redis(_client: Redis) -> Kind:
    """Return those of a cache, which has a client of its own."""
    try:
        import_module("django_redis")
    except ImportError:
        raise Unavailable("pip install django-redis") from None
    # Typed as Django's own caches, which have no locks.
    cache: Any = import_module("django.core.cache").cache
    return Kind(
        name="django-redis",
        make=lambda key, seconds: cache.lock(key, timeout=seconds),
        extend=lambda lock: lock.extend(EXPIRE, replace_ttl=True),
        once=True,
        block=lambda key: cache.lock(key, timeout=EXPIRE, blocking=False),
    )


def python_redis_lock(client: Redis) -> Kind:
    """Return those of python-redis-lock."""
    try:
        module: Any = import_module("redis_lock")
    except ImportError:
        raise Unavailable("pip install python-redis-lock") from None
    return Kind(
        name="python-redis-lock",
        make=lambda key, seconds: module.Lock(client, key, expire=seconds),
        extend=lambda lock: lock.extend(EXPIRE),
        block=lambda key: module.Lock(client, key, expire=EXPIRE, blocking=False),
    )


KINDS: Mapping[str, Callable[[Redis], Kind]] = {
    "redis-py": redis_py,
    "django-redis": django_redis,
    "python-redis-lock": python_redis_lock,
}


def of_kind(kind: Kind, keys: Sequence[str]) -> Operations:
    """Return the operations of a peer."""
    kept = {} if kind.once else {key: kind.make(key, EXPIRE) for key in (*keys, HOT)}

    def attempt(key: str) -> Any:
        lock = kept.get(key) or kind.make(key, EXPIRE)
        return lock if lock.acquire(blocking=False) else None

    return Operations(
        kind.name,
        attempt=attempt,
        release=lambda lock: lock.release(),
        extend=kind.extend,
        keys=keys,
    )


def prove(kind: Kind, server: Redis) -> None:
    """See that a kind of lock locks, in the server, for a time, and lets go.

    Raises:
        NoLock: It does not.
    """
    holder, rival = kind.make(PROOF, EXPIRE), kind.make(PROOF, EXPIRE)
    before = set(server.scan_iter(f"*{PROOF}*"))
    granted = holder.acquire(blocking=False)
    kept = set(server.scan_iter(f"*{PROOF}*")) - before
    if not granted or not any(0 < server.pttl(key) <= EXPIRE * 1000 for key in kept):
        raise NoLock(f"{kind.name}: the server knows of no lock that ends by itself")
    if rival.acquire(blocking=False):
        raise NoLock(f"{kind.name}: a second one was granted the same key")
    kind.extend(holder)
    holder.release()
    if not rival.acquire(blocking=False):
        raise NoLock(f"{kind.name}: it was not given back")
    rival.release()


@contextmanager
def hot_of(kind: Kind) -> Iterator[None]:
    """Let somebody hold the hot key."""
    holder = kind.make(HOT, int(LONG_TTL))
    if not holder.acquire(blocking=False):
        raise NoLock(f"{kind.name}: {HOT!r} is not free")
    try:
        yield
    finally:
        holder.release()


def peer(url: str, name: str) -> Iterator[list[Subject]]:
    """Give the subjects of a peer, on a client of its own with redis-py's defaults."""
    with Redis.from_url(url) as client:
        kind = KINDS[name](client)
        prove(kind, client)
        with hot_of(kind):
            turns, make_block = cycle(KEYS), kind.block

            def block() -> None:
                assert make_block
                with make_block(next(turns)):
                    pass

            held = of_kind(kind, ["invoice:held-1"])
            held.acquire()
            yield [
                *of_kind(kind, KEYS).pairs(f"{name}/lock"),
                Subject(f"{name}/lock", {"extend": held.extend}),
                Subject(f"{name}/block", {"pair": block}),
            ]
            held.release()


def floor(url: str) -> Iterator[list[Subject]]:
    """Give one trivial round trip, and the two that a pair needs at least."""
    with Redis.from_url(url) as client:
        connection = client.connection_pool.make_connection()
        connection.connect()
        ping = connection.pack_command("PING")

        def by_connection() -> None:
            connection.send_packed_command(ping)
            if connection.read_response() != b"PONG":
                raise RuntimeError("no answer to PING")

        yield [
            Subject(f"redis-floor/{way}", {"trip": trip, "second-trip": trip}, "pair")
            for way, trip in (("client", client.ping), ("connection", by_connection))
        ]
        connection.disconnect()
