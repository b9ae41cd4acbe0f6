"""What coroutines lock with in Redis: this package, and redis-py's asynchronous locks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any

from redis.asyncio import Redis

from django_distlock import lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.process.host import current_holder

from .candidates import HOT, KEYS, TTL, NoLock
from .databases import LONG_TTL, hold
from .redis_peers import EXPIRE
from .timing import AwaitedSubject, Subject


class AwaitedOperations:
    """As `Operations`, awaited."""

    def __init__(
        self,
        *,
        attempt: Callable[[str], Awaitable[Any]],
        release: Callable[[Any], Awaitable[object]],
        extend: Callable[[Any], Awaitable[object]],
        keys: Iterable[str],
    ):
        self._attempt, self._release, self._extend = attempt, release, extend
        self._keys = cycle(keys)
        self._held: Any = None

    async def acquire(self) -> None:
        """Take the next key."""
        self._held = await self._attempt(next(self._keys))
        if self._held is None:
            raise NoLock("not granted")

    async def extend(self) -> None:
        """Renew what is held."""
        if await self._extend(self._held) in (False, None):
            raise NoLock("not extended")

    async def lose(self) -> None:
        """Try for the key that somebody else holds."""
        if await self._attempt(HOT) is not None:
            raise NoLock("not contended")

    async def release(self) -> None:
        """Give back what is held."""
        if await self._release(self._held) is False:
            raise NoLock("not released")

    def subjects(self, name: str, runner: asyncio.Runner, held: AwaitedOperations) -> list[Subject]:
        """Return what is measured.

        Args:
            held: What holds a key of its own, to be extended.
        """
        pair = {"acquire": self.acquire, "release": self.release}
        return [
            AwaitedSubject(name, steps=pair, total="pair", runner=runner),
            AwaitedSubject(name, steps={"extend": held.extend}, runner=runner),
            AwaitedSubject(name, steps={"lose": self.lose}, runner=runner),
        ]


def _waist(backend: BaseLockBackend, keys: Sequence[str]) -> AwaitedOperations:
    holder = current_holder()

    async def attempt(key: str) -> Grant | None:
        answer = await backend.threads.run(backend.acquire, key, new_token(), TTL, holder)
        return answer if isinstance(answer, Grant) else None

    async def extend(grant: Grant) -> bool:
        return isinstance(await backend.threads.run(backend.extend, grant, TTL), Grant)

    async def release(grant: Grant) -> bool:
        return await backend.threads.run(backend.release, grant) is True

    return AwaitedOperations(attempt=attempt, release=release, extend=extend, keys=keys)


def _peer(client: Redis, keys: Sequence[str]) -> AwaitedOperations:
    locks: dict[str, Any] = {
        key: client.lock(f"redis.asyncio:{key}", timeout=EXPIRE) for key in (*keys, HOT)
    }

    async def attempt(key: str) -> Any:
        lock = locks[key]
        return lock if await lock.acquire(blocking=False) else None

    return AwaitedOperations(
        attempt=attempt,
        release=lambda lock: lock.release(),
        extend=lambda lock: lock.extend(EXPIRE, replace_ttl=True),
        keys=keys,
    )


def ours(alias: str) -> Iterator[list[Subject]]:
    """Give this package's subjects."""
    hot, backend = hold(alias, HOT), lock_backends[alias]
    with asyncio.Runner() as runner:
        held = _waist(backend, ["invoice:held-1"])
        runner.run(held.acquire())
        yield _waist(backend, KEYS).subjects(f"{alias}/backend", runner, held)
        runner.run(held.release())
    backend.release(hot)


def redis_py(url: str) -> Iterator[list[Subject]]:
    """Give redis-py's subjects."""
    with asyncio.Runner() as runner:
        client = Redis.from_url(url)
        held = _peer(client, ["invoice:held-1"])
        hot = client.lock(f"redis.asyncio:{HOT}", timeout=LONG_TTL)
        runner.run(hot.acquire(blocking=False))
        runner.run(held.acquire())
        yield _peer(client, KEYS).subjects("redis.asyncio/lock", runner, held)
        runner.run(held.release())
        runner.run(hot.release())
        runner.run(client.aclose())
