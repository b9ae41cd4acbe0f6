"""A value in Redis that refuses the writes of stale holders."""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from ..backends.lua import Script
from ..core.durations import Duration, seconds
from ..core.errors import InvalidArgument, LockUsageError, shown
from .rejecting import Fenced, reject, require_fence

#: Seconds of the longest ttl: ten years.
_MAX_TTL = 315_360_000


class FencedValue:
    """A value and the highest fence that it was read or written with, in one hash of Redis.

    A lower fence is refused; an equal one is not. Each operation is one script, so nothing runs
    between the comparison and the write.

    The fence is removed only by the `ttl` of a `set`. It is as durable as the server: a crash or a
    failover of Redis may lose it.

    Args:
        client: A `redis.Redis` or a `redis.RedisCluster`; for the asynchronous operations, one of
            `redis.asyncio`. If it decodes answers, values must be text in UTF-8.
        name: The key in Redis, which nothing else may use.
    """

    def __init__(self, client: Any, name: str):
        self.client = client
        self.name = name

    def get(self, by: Fenced) -> bytes | None:
        """Return the value; None: there is none. From then on, lower fences are refused.

        Args:
            by: The lease, or the fence, under which the value is read to be changed.

        Raises:
            FenceRejected: The value has a higher fence.
            LockUsageError: `by` has no fence, or the key holds something else.
        """
        return _as_bytes(self._judged(by, self._run(self._words("get", by))))

    def set(self, value: bytes | str, by: Fenced, ttl: Duration | None = None) -> None:
        """Write the value.

        Args:
            value: Text is written as UTF-8.
            by: The lease, or the fence, to write with.
            ttl: Seconds, or a `timedelta`, from a millisecond to ten years, after which Redis
                removes the value *and the fence*: then any fence passes. It must be longer than any
                writer may be late. None: for ever, even if the previous value had a ttl.

        Raises:
            FenceRejected: The value has a higher fence. Nothing was written.
            InvalidArgument: The value is neither bytes nor text, or the ttl out of bounds.
            LockUsageError: `by` has no fence, or the key holds something else.
        """
        self._judged(by, self._run(self._words("set", by, value, ttl)))

    def delete(self, by: Fenced) -> bool:
        """Remove the value, and keep the fence; return whether there was a value.

        Raises:
            FenceRejected: The value has a higher fence. Nothing was removed.
            LockUsageError: `by` has no fence, or the key holds something else.
        """
        return self._judged(by, self._run(self._words("delete", by))) is not None

    def read(self) -> bytes | None:
        """Return the value for people to see: no fence is compared or raised.

        Raises:
            LockUsageError: The key holds something else.
        """
        try:
            return _as_bytes(self.client.hget(self.name, "value"))
        except ResponseError as error:
            raise self._explained(error) from error

    async def aget(self, by: Fenced) -> bytes | None:
        """See `get`."""
        return _as_bytes(self._judged(by, await self._arun(self._words("get", by))))

    async def aset(self, value: bytes | str, by: Fenced, ttl: Duration | None = None) -> None:
        """See `set`."""
        self._judged(by, await self._arun(self._words("set", by, value, ttl)))

    async def adelete(self, by: Fenced) -> bool:
        """See `delete`."""
        return self._judged(by, await self._arun(self._words("delete", by))) is not None

    async def aread(self) -> bytes | None:
        """See `read`."""
        try:
            return _as_bytes(await self.client.hget(self.name, "value"))
        except ResponseError as error:
            raise self._explained(error) from error

    def _words(
        self, operation: str, by: Fenced, value: bytes | str = b"", ttl: Duration | None = None
    ) -> tuple[Any, ...]:
        if not isinstance(value, bytes | str):
            raise InvalidArgument(f"A value must be bytes or str, not {shown(value)}.")
        milliseconds = "" if ttl is None else str(_milliseconds(ttl))
        return (1, self.name, operation, str(require_fence(by)), value, milliseconds)

    def _run(self, words: tuple[Any, ...]) -> Any:
        try:
            return self.client.evalsha(_script().digest, *words)
        except NoScriptError:
            return self.client.eval(_script().text, *words)

    async def _arun(self, words: tuple[Any, ...]) -> Any:
        try:
            return await self.client.evalsha(_script().digest, *words)
        except NoScriptError:
            return await self.client.eval(_script().text, *words)

    def _judged(self, by: Fenced, answer: Any) -> Any:
        outcome, said = answer
        match _text(outcome):
            case "refused":
                reject(by, f"The value {self.name!r} in Redis", int(said))
            case "other":
                raise self._other(f"a {_text(said)}")
        return said

    def _explained(self, error: ResponseError) -> Exception:
        return self._other("something else") if str(error).startswith("WRONGTYPE") else error

    def _other(self, what: str) -> LockUsageError:
        return LockUsageError(
            f"The key {self.name!r} in Redis is {what}, and no fenced value: a hash with a field"
            f" 'fence'. Give the fenced value a key of its own."
        )


@cache
def _script() -> Script:
    return Script.of((files(__package__) / "value.lua").read_text(encoding="utf-8"))


def _milliseconds(ttl: Duration) -> int:
    return math.ceil(seconds(ttl, "ttl", minimum=0.001, maximum=_MAX_TTL) * 1000)


def _text(said: Any) -> str:
    # A client may decode answers.
    return said if isinstance(said, str) else str(said, "utf-8")


def _as_bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
