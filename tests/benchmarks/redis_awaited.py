"""What coroutines lock with in Redis: this package, and redis-py's asynchronous locks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from redis.asyncio import Redis

from django_distlock import distlock, lock_backends
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.host import current_holder
from django_distlock.leases import Lease

from .candidates import HOT, KEYS, TTL
from .databases import LONG_TTL, hold
from .redis_peers import EXPIRE, NoLock
from .timing import AwaitedSubject, Subject


class AwaitedWaist:
    """As `Waist`, awaited."""

    def __init__(self, alias: str, keys: Sequence[str]):
        self._backend = lock_backends[alias]
        self._keys = cycle(keys)
        self._holder = current_holder()
        self._grant: Grant | None = None

    async def acquire(self) -> None:
        """Take the next key."""
        answer = await self._backend.aacquire(next(self._keys), new_token(), TTL, self._holder)
        if not isinstance(answer, Grant):
            raise NoLock(f"{self._backend.alias}: not granted: {answer}")
        self._grant = answer

    async def extend(self) -> None:
        """Renew what is held."""
        assert self._grant
        if not isinstance(await self._backend.aextend(self._grant, TTL), Grant):
            raise NoLock(f"{self._backend.alias}: {self._grant.key!r} was not extended")

    async def lose(self) -> None:
        """Try for the key that somebody else holds."""
        answer = await self._backend.aacquire(HOT, new_token(), TTL, self._holder)
        if not isinstance(answer, Contended) or answer.busy:
            raise NoLock(f"{self._backend.alias}: not contended: {answer}")

    async def release(self) -> None:
        """Give back what is held."""
        assert self._grant
        if await self._backend.arelease(self._grant) is not True:
            raise NoLock(f"{self._backend.alias}: {self._grant.key!r} was not released")


class AwaitedApi:
    """As `PublicApi`, awaited."""

    def __init__(self, alias: str, keys: Sequence[str]):
        self._locks = cycle([distlock(key, wait=0, ttl=TTL, backend=alias) for key in keys])
        self._lease: Lease | None = None

    async def acquire(self) -> None:
        """Take the next key."""
        self._lease = await next(self._locks).aacquire()

    async def release(self) -> None:
        """Give back what is held."""
        assert self._lease
        if not await self._lease.arelease():
            raise NoLock(f"{self._lease.key!r} was not released")

    async def block(self) -> None:
        """Hold the next key around nothing."""
        async with next(self._locks):
            pass


class AwaitedPeer:
    """As `Peer`, of redis-py's asynchronous locks."""

    def __init__(self, client: Redis, keys: Sequence[str]):
        self._client = client
        self._keys = cycle(keys)
        self._locks = cycle([self._make(key) for key in keys])
        self._hot = self._make(HOT)
        self._held: Any = None

    async def acquire(self) -> None:
        """Take the next key."""
        self._held = next(self._locks)
        if not await self._held.acquire(blocking=False):
            raise NoLock(f"redis.asyncio: {self._held.name!r} was not granted")

    async def extend(self) -> None:
        """Renew what is held."""
        await self._held.extend(EXPIRE, replace_ttl=True)

    async def lose(self) -> None:
        """Try for the key that somebody else holds."""
        if await self._hot.acquire(blocking=False):
            raise NoLock(f"redis.asyncio: {HOT!r} was not contended")

    async def release(self) -> None:
        """Give back what is held."""
        await self._held.release()

    async def block(self) -> None:
        """Hold the next key around nothing."""
        async with self._client.lock(
            f"redis.asyncio:{next(self._keys)}", timeout=EXPIRE, blocking=False
        ):
            pass

    def _make(self, key: str) -> Any:
        return self._client.lock(f"redis.asyncio:{key}", timeout=EXPIRE)


def ours(alias: str) -> Iterator[list[Subject]]:
    """Give this package's subjects."""
    hot = hold(alias, HOT)
    with asyncio.Runner() as runner:
        held, pairs = AwaitedWaist(alias, ["invoice:held-1"]), AwaitedWaist(alias, KEYS)
        api = AwaitedApi(alias, KEYS)
        runner.run(held.acquire())
        yield [
            _pair(runner, f"{alias}/backend", pairs),
            AwaitedSubject(f"{alias}/backend", steps={"extend": held.extend}, runner=runner),
            AwaitedSubject(f"{alias}/backend", steps={"lose": held.lose}, runner=runner),
            _pair(runner, f"{alias}/lock", api),
            AwaitedSubject(f"{alias}/block", steps={"pair": api.block}, runner=runner),
        ]
        runner.run(held.release())
    lock_backends[alias].release(hot)


def redis_py(url: str) -> Iterator[list[Subject]]:
    """Give redis-py's subjects."""
    with asyncio.Runner() as runner:
        client = Redis.from_url(url)
        pairs, held = AwaitedPeer(client, KEYS), AwaitedPeer(client, ["invoice:held-1"])
        hot = client.lock(f"redis.asyncio:{HOT}", timeout=LONG_TTL)
        runner.run(hot.acquire(blocking=False))
        runner.run(held.acquire())
        yield [
            _pair(runner, "redis.asyncio/lock", pairs),
            AwaitedSubject("redis.asyncio/lock", steps={"extend": held.extend}, runner=runner),
            AwaitedSubject("redis.asyncio/lock", steps={"lose": held.lose}, runner=runner),
            AwaitedSubject("redis.asyncio/block", steps={"pair": pairs.block}, runner=runner),
        ]
        runner.run(held.release())
        runner.run(hot.release())
        runner.run(client.aclose())


def _pair(
    runner: asyncio.Runner, name: str, of: AwaitedWaist | AwaitedApi | AwaitedPeer
) -> Subject:
    steps = {"acquire": of.acquire, "release": of.release}
    return AwaitedSubject(name, steps=steps, total="pair", runner=runner)
