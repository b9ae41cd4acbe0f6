"""Backends whose leases hold an old lock as well, so that old and new code exclude each other.

For a deployment in which both run. The old lock is acquired first and released last. It lives a
second longer than the lease and is renewed with it. If the old lock is lost, so is the lease.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, Final

from ..backends import database
from ..backends.base import BaseLockBackend
from ..conf import BackendConfig
from ..core.durations import GRACE
from ..core.errors import LockError, shown
from ..core.keys import OWN_MARKER
from ..core.records import Attempt, Contended, Grant, InTheWay, Record, Unknown
from ..exceptions import InvalidLockBackend
from .old import OldLock

try:
    from ..backends import redis
except ImportError:  # The extra is not installed.
    redis = None  # type: ignore[assignment]


class _Bridged(BaseLockBackend):
    """A mixin that adds the old lock; it precedes a backend's class among the bases.

    Args:
        bridge: The old lock, of a class in `compat.old`.
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
        """Always False: old code sends no wake-up when it releases its lock, so waiters poll."""
        return False

    def listen(self, bound: float = 0.0) -> bool:
        """See `is_listening`."""
        return False

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        if attempt.replace not in (None, attempt.token):
            return self._take_over(attempt)
        key, owner, old = attempt.key, _owner(attempt.token), self._old(attempt.key)
        if not old.acquire(key, owner, _lifetime(attempt.ttl)):
            # If a lease has the old lock, its record names the holder. Old code names none.
            record, now = self._read(attempt.name), self._time()
            counter = self._counter(attempt.name)
            paused = counter is not None and counter.paused_until is not None
            if record is None:
                return Contended(observed_at=now, paused=paused)
            return record.contended(now, paused=paused)
        try:
            answer = super()._acquire(attempt)
        except LockError:
            # If the lease was granted nevertheless, no work runs under it.
            old.release(key, owner)
            raise
        if not isinstance(answer, Grant):
            old.release(key, owner)
        return answer

    def _acquire_many(self, attempts: Sequence[Attempt]) -> Sequence[Grant] | InTheWay:
        # One by one, each with its old lock: the backend's own request would leave those out.
        return BaseLockBackend._acquire_many(self, attempts)

    def _take_over(self, attempt: Attempt) -> Grant | Contended:
        """Replace a lease. Its old lock changes hands before, without being free in between."""
        key, old = attempt.key, self._old(attempt.key)
        ours, theirs = (_owner(each) for each in (attempt.token, attempt.replace or ""))
        if not old.acquire(key, ours, _lifetime(attempt.ttl), theirs):
            return Contended(observed_at=self._time())
        # If this fails, a retry or a release finds the old lock by the new token.
        answer = super()._acquire(attempt)
        if not isinstance(answer, Grant):
            record = self._read(attempt.name)
            if record is not None and record.token == attempt.replace:
                old.acquire(key, theirs, _lifetime(record.ttl), ours)
            elif record is None or record.token != attempt.token:
                old.release(key, ours)
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
        is_kept = answer is True and held is not None
        if answer is False and held is not None:
            # An earlier request may have settled it, whose answer or whose old lock's was lost.
            record = self._read(name)
            is_kept = record is not None and record.is_settled and record.token == grant.token
        if is_kept and held is not None:
            # The key stays held for a while, and old code has to wait as long.
            until = grant.acquired_at + timedelta(seconds=held)
            left = (until - self._time()).total_seconds()
            if left > 0 and self._old(grant.key).extend(grant.key, _owner(grant.token), left):
                return answer
        if isinstance(answer, bool):
            self._old(grant.key).release(grant.key, _owner(grant.token))
        return answer

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        old, record = self._old(key), None
        with suppress(LockError):  # Something else has written to the record.
            record = self._read(name)
        if record is not None:
            # If the old lock cannot be asked, nothing is changed: without the record, nobody would
            # know its owner any more.
            old.extend(key, _owner(record.token), _lifetime(record.ttl))
        found = super()._force_release(name, key, fence, bound=bound)
        if isinstance(found, Record):
            old.release(key, _owner(found.token))
        return found

    def _both(
        self, grant: Grant, ttl: float | None, answer: Grant | Unknown | None
    ) -> Grant | Unknown | None:
        """Return an answer about a lease, or None (lost) if its old lock is lost."""
        if not isinstance(answer, Grant):
            return answer
        kept = self._old(grant.key).extend(grant.key, _owner(grant.token), _lifetime(ttl))
        return answer if kept else None

    def _old(self, key: str) -> OldLock[Any]:
        """Return the old lock of a key. Old code does not know the package's own keys."""
        return _UNKNOWN if key.startswith(OWN_MARKER) else self._bridge


class _NoLock(OldLock[str]):
    """The lock of a key that old code does not know: each acquire succeeds."""

    def acquire(
        self, key: str, owner: str, seconds: float | None, instead_of: str | None = None
    ) -> bool:
        return True

    def extend(self, key: str, owner: str, seconds: float | None) -> bool:
        return True

    def release(self, key: str, owner: str) -> None:
        pass


_UNKNOWN: Final = _NoLock("{key}")


def _owner(token: str) -> str:
    """Return a text that identifies a lease, and does not reveal its token to readers."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def _lifetime(ttl: float | None) -> float | None:
    """Return the seconds of an old lock: never fewer than the key is kept from others."""
    return None if ttl is None else ttl + GRACE


class DatabaseBackend(_Bridged, database.DatabaseBackend):
    """The database backend with a bridge."""

    def __init__(self, config: BackendConfig, **options: Any):
        super().__init__(config, **options)
        # The base class sets them.
        self.supports_transactions = self.acquires_together = False


if redis is not None:

    class RedisBackend(_Bridged, redis.RedisBackend):  # type: ignore[misc]  # It answers less.
        """The Redis backend with a bridge."""
