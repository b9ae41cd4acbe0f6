"""Backends whose leases hold an old lock as well, so that old and new code exclude each other.

For a deployment in which both run. The old lock is acquired first and released last. It lives a
second longer than the lease, is renewed with it, and its loss is that of the lease.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

from ..backends import database
from ..backends.base import BaseLockBackend
from ..conf import BackendConfig
from ..core.durations import GRACE
from ..core.errors import LockError, shown
from ..core.records import Attempt, Contended, Grant, Record, Unknown
from ..exceptions import InvalidLockBackend
from .old import OldLock

try:
    from ..backends import redis
except ImportError:  # The extra is not installed.
    redis = None  # type: ignore[assignment]


class _Bridged(BaseLockBackend):
    """What is before a backend's class among the bases.

    Args:
        bridge: What old code locks: one of `compat.old`.
    """

    supports_sharing: ClassVar[bool] = False
    supports_wakeups: ClassVar[bool] = False
    supports_transactions = False
    acquires_together = False

    def __init__(self, config: BackendConfig, *, bridge: OldLock[Any], **options: Any):
        if not isinstance(bridge, OldLock):
            raise InvalidLockBackend(
                f"DISTLOCK[{config.alias!r}]: bridge must be an old lock of"
                f" django_distlock.compat.old, not {shown(bridge)}."
            )
        super().__init__(config, **options)
        self._bridge = bridge

    @property
    def is_listening(self) -> bool:
        """Nobody tells when old code gives its lock back: waiters poll."""
        return False

    def listen(self, bound: float = 0.0) -> bool:
        """See `is_listening`."""
        return False

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        key, owner = attempt.key, _owner(attempt.token)
        if not self._bridge.acquire(key, owner, _lifetime(attempt.ttl)):
            return Contended(observed_at=self._time())
        try:
            answer = super()._acquire(attempt)
        except LockError:
            # If it was granted nevertheless, nobody works under that lease.
            self._bridge.release(key, owner)
            raise
        if not isinstance(answer, Grant):
            self._bridge.release(key, owner)
        return answer

    def _extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        return self._both(grant, ttl, super()._extend(name, grant, ttl, bound=bound))

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        answers = super()._extend_many(named)
        return [
            self._both(grant, grant.ttl, answer)
            for (_, grant), answer in zip(named, answers, strict=True)
        ]

    def _release(
        self, name: str, grant: Grant, held: float | None, *, bound: float
    ) -> bool | Unknown:
        answer = super()._release(name, grant, held, bound=bound)
        if answer is True and held is not None:
            # The key is kept, and old code has to wait for its end as well.
            until = grant.acquired_at + timedelta(seconds=held)
            left = (until - self._time()).total_seconds()
            if left > 0 and self._bridge.extend(grant.key, _owner(grant.token), left):
                return answer
        if isinstance(answer, bool):
            self._bridge.release(grant.key, _owner(grant.token))
        return answer

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        found = super()._force_release(name, key, fence, bound=bound)
        if isinstance(found, Record):
            self._bridge.release(key, _owner(found.token))
        return found

    def _both(
        self, grant: Grant, ttl: float | None, answer: Grant | Unknown | None
    ) -> Grant | Unknown | None:
        """Return an answer about a lease, or that it is lost because its old lock is."""
        if not isinstance(answer, Grant):
            return answer
        kept = self._bridge.extend(grant.key, _owner(grant.token), _lifetime(ttl))
        return answer if kept else None


def _owner(token: str) -> str:
    """Return what tells a lease from others: whoever reads it there learns no token."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def _lifetime(ttl: float | None) -> float | None:
    """Return how long an old lock lives: never shorter than the key is kept from others."""
    return None if ttl is None else ttl + GRACE


class DatabaseBackend(_Bridged, database.DatabaseBackend):
    """The backend in a database, with a bridge."""

    def __init__(self, config: BackendConfig, **options: Any):
        super().__init__(config, **options)
        # Its base sets them.
        self.supports_transactions = self.acquires_together = False


if redis is not None:

    class RedisBackend(_Bridged, redis.RedisBackend):  # type: ignore[misc]  # It answers less.
        """The backend in Redis, with a bridge."""
