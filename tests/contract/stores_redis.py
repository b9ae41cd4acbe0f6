"""What a test can do to the records in Redis behind the backend's back."""

# ruff: noqa: D102 - the base class describes the methods

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from redis import Redis, RedisCluster

from django_distlock.backends.redis import RedisBackend
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .redis_clients import close, cluster_url, single_url
from .stores import Store, Stranger

#: The times in a record, and in a pause.
TIMES = (
    "acquired_at",
    "renewed_at",
    "expires_at",
    "free_at",
    "stop_requested_at",
    "renewed_until",
    "until",
    "closed",
)

# One step, as for everything that the backend does. Where a key is over, Redis removes it.
AGE = """
for place = 2, #ARGV do
    local at = redis.call('HGET', KEYS[1], ARGV[place])
    if at and at ~= '' then
        redis.call('HSET', KEYS[1], ARGV[place], string.format('%.0f', at - ARGV[1]))
    end
end
"""
AGE_EXPIRY = """
local left = redis.call('PTTL', KEYS[1])
if left >= 0 then
    redis.call('PEXPIRE', KEYS[1], string.format('%.0f', left - ARGV[1] / 1000))
end
"""


@functools.cache
def _cluster() -> RedisCluster:
    """Return the client that all tests share: a new one asks for the table of all commands."""
    client = RedisCluster.from_url(cluster_url(), decode_responses=True)
    atexit.register(close, client)
    return client


class RedisStore(Store):
    """The keys of a server, or of a cluster, that all tests of this run share."""

    def __init__(self, registered: Registered, mark: str):
        super().__init__(registered, mark)
        backend = lock_backends[registered.alias]
        assert isinstance(backend, RedisBackend)
        self.backend = self.redis = backend
        self.client: Any = (
            Redis.from_url(single_url(), decode_responses=True) if self.is_single else _cluster()
        )

    @property
    def is_single(self) -> bool:
        """Whether the store is one server."""
        return self.registered.store == "redis"

    def elapse(self, seconds: float) -> None:
        self._age(seconds, AGE + AGE_EXPIRY)

    def outlast(self, seconds: float) -> None:
        """Let seconds pass for the records of this test, and Redis be late to remove them."""
        self._age(seconds, AGE)

    def now(self) -> datetime:
        anywhere = {} if self.is_single else {"target_nodes": self.client.get_primaries()[0]}
        seconds, microseconds = self.client.time(**anywhere)
        return datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=microseconds)

    def fence(self, key: str) -> int:
        return int(self.client.get(self.at("fence", key)) or 0)

    def set_fence(self, key: str, fence: int) -> None:
        self.client.set(self.at("fence", key), fence)

    def lose_fence(self, key: str) -> None:
        """Lose a fence counter, as with the data of the server."""
        assert self.client.delete(self.at("fence", key))

    def has_record(self, key: str) -> bool:
        return bool(self.client.exists(self.at("lock", key)))

    def with_prefix(self, prefix: str) -> RedisBackend:
        return self.variant(key_prefix=prefix)

    def variant(self, options: dict[str, Any] | None = None, **config: Any) -> RedisBackend:
        """Make a backend on the same server with other settings and more options."""
        changed = replace(self.redis.config, **config)
        return RedisBackend(changed, **{**changed.options, **(options or {})})

    def stranger(self) -> Stranger:
        raise NotImplementedError("Tests with a stranger are marked with the stores that have one.")

    def close(self) -> None:
        if self.is_single:
            close(self.client)

    def at(self, role: str, key: str) -> str:
        """Return the name of the Redis key that has a role for a user's key."""
        prefix = f"{self.backend.key_prefix}:" if self.backend.key_prefix else ""
        return f"{prefix}{role}:{self.name(key)}"

    def fields(self, key: str) -> dict[str, str]:
        """Return the record of a key as it is kept."""
        return cast(dict[str, str], self.client.hgetall(self.at("lock", key)))

    def tokens(self, key: str) -> set[str]:
        """Return the names of what finds the key's record by a token, under any key prefix."""
        lock = self.at("lock", key)
        return {name for name in self._found("*token:*") if self.client.get(name) == lock}

    def _age(self, seconds: float, script: str) -> None:
        past = f"{seconds * 1_000_000:.0f}"
        for name in self._found(f"*{self.mark}*"):
            # No prefix has braces: the first one begins the tag, behind the role.
            start, role = name.partition(":{")[0].rpartition(":")[::2]
            if role in ("lock", "pause", "shared"):
                # Before its record, which Redis may remove on the way.
                token = self.client.hget(name, "token")
                self.client.eval(script, 1, name, past, *TIMES)
                if token and self.backend.supports_token_lookup:
                    index = f"{start}:token:{token}" if start else f"token:{token}"
                    self.client.eval(script, 1, index, past)
        for listing in self._found("*listing:{*}:listing"):
            for name, _at in self.client.zscan_iter(listing, match=f"*{self.mark}*", count=1000):
                self.client.zincrby(listing, f"-{past}", name)

    def _found(self, pattern: str) -> Iterator[str]:
        return cast(Iterator[str], self.client.scan_iter(match=pattern, count=1000))
