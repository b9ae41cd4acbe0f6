"""The `Lock` of redis-py and `cache.lock()` of django-redis, built on the locks of this package.

Call sites change only their import. As in redis-py, a lock expires after its timeout, and a later
release raises `LockNotOwnedError`; `with distlock(…)` is renewed instead. What is not supported
raises `LockUsageError`. An outage raises `BackendUnavailable`, not an error of redis-py.
"""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any, Literal, Self

from redis.exceptions import LockError, LockNotOwnedError

from ..core.errors import BackendUnavailable, LockLost, LockNotAcquired, LockUsageError
from ..core.logs import log_fields
from ..core.retry import Retry
from ..handler import lock_backends
from ..locks.lease import Lease
from ..locks.lock import Lock as _Lock
from ..locks.lock import distlock

logger = logging.getLogger("django_distlock")


class Lock:
    """A lock with the signature of redis-py's.

    Args:
        redis: Not used, and may be None: `backend` keeps the locks.
        name: The key.
        timeout: Seconds until the lock expires, from 0.1 to `MAX_TTL`; None: it does not.
        sleep: Seconds between attempts, unless a wake-up comes sooner.
        blocking: Whether `acquire` waits.
        blocking_timeout: Seconds that `acquire` waits at most; None: for ever.
        thread_local: Whether only the thread that acquired the lock may release it.
        raise_on_release_error: Whether a block raises if its lock ended before the block did.
        backend: An alias in `DISTLOCK`.
    """

    def __init__(  # noqa: PLR0913 - they are those of redis-py
        self,
        redis: object,
        name: str,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        backend: str = "default",
    ):
        self.redis, self.name, self.timeout, self.sleep = redis, name, timeout, sleep
        self.blocking, self.blocking_timeout = blocking, blocking_timeout
        self.thread_local, self.raise_on_release_error = thread_local, raise_on_release_error
        self.backend = backend
        self.local: Any = threading.local() if thread_local else SimpleNamespace()
        # Bad arguments raise here, and not at the acquire.
        self._lock(blocking_timeout, sleep)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: object = None,
    ) -> bool:
        """Acquire the lock, and return whether that succeeded.

        Raises:
            LockUsageError: A token was given. Fences and hand-overs rely on tokens made here.
        """
        if token is not None:
            raise LockUsageError(
                f"{self.name!r} takes no token=: each acquire makes one. To hand a lock over to"
                " another process use Lease.dump() and Lease.load().",
                key=self.name,
            )
        waits = self.blocking if blocking is None else blocking
        most = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        lock = self._lock(most if waits else 0, self.sleep if sleep is None else sleep)
        try:
            self.local.lease = lock.acquire()
        except LockNotAcquired:
            return False
        return True

    def release(self) -> None:
        """Release the lock; inside of `atomic()`, when the transaction has ended.

        Raises:
            redis.exceptions.LockError: The lock was not acquired here, or is already released.
            redis.exceptions.LockNotOwnedError: The lock had ended before.
        """
        lease = self._owned_lease("release")
        self.local.lease = None
        if not lease.release():
            raise LockNotOwnedError(f"Cannot release {self.name!r}: it is no longer owned.")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Add seconds to the time left, or replace it by them; see `release` for errors."""
        left = 0.0 if replace_ttl else self._owned_lease("extend").remaining()
        return self._extend("extend", left + additional_time)

    def reacquire(self) -> Literal[True]:
        """Renew the lock for its whole timeout; see `release` for errors."""
        return self._extend("reacquire", self.timeout)

    def locked(self) -> bool:
        """Return whether the lock is held, by any holder."""
        return self._lock(0, self.sleep).locked()

    def owned(self) -> bool:
        """Return whether this object holds the lock; if it is thread-local, in this thread."""
        lease: Lease | None = getattr(self.local, "lease", None)
        if lease is None or not lease.held:
            return False
        # By the fence, because not every store finds a record by its token.
        record = lock_backends[self.backend].read(self.name)
        return record is not None and record.fence == lease.fence

    def __enter__(self) -> Self:
        if not self.acquire():
            raise LockError(f"Unable to acquire {self.name!r} within the time specified.")
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            self.release()
        except LockError as error:
            if self.raise_on_release_error and exc_type is None:
                raise
            # An error of the block is never hidden.
            extra = log_fields("lost", key=self.name, error=error)
            logger.warning("A block lost its lock before its end: %s", error, extra=extra)
        except BackendUnavailable as error:
            if exc_type is None:
                raise
            extra = log_fields("release_failed", key=self.name, error=error)
            logger.warning("The lock of a block could not be released: %s", error, extra=extra)

    def _lock(self, wait: float | None, sleep: float) -> _Lock:
        return distlock(
            self.name,
            ttl=self.timeout,
            basic=self.timeout is None,
            wait=wait,
            heartbeat=False,
            retry=Retry(delay=sleep, factor=1, cap=sleep),
            backend=self.backend,
        )

    def _owned_lease(self, what: str) -> Lease:
        lease: Lease | None = getattr(self.local, "lease", None)
        if lease is None:
            raise LockError(f"Cannot {what} {self.name!r}: it is not owned, or already unlocked.")
        return lease

    def _extend(self, what: str, seconds: float | None) -> Literal[True]:
        lease = self._owned_lease(what)
        if self.timeout is None:
            raise LockError(f"Cannot {what} {self.name!r}: it has no timeout.")
        try:
            lease.extend(seconds)
        except LockLost as error:
            raise LockNotOwnedError(
                f"Cannot {what} {self.name!r}: it is no longer owned."
            ) from error
        return True


class LockMixin:
    """A mixin that gives any cache the `lock()` of django-redis, which returns a `Lock`.

    class Cache(LockMixin, RedisCache):
        pass
    """

    #: The alias in `DISTLOCK` of the backend that keeps the locks.
    lock_backend = "default"

    def lock(
        self,
        key: str,
        version: int | None = None,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        client: object = None,
        thread_local: bool = True,
    ) -> Lock:
        """Return a lock on a key of this cache, with its prefix and version.

        Raises:
            LockUsageError: A client was given, but the lock backend keeps the locks.
        """
        if client is not None:
            raise LockUsageError(
                f"The lock on {key!r} takes no client=: it is in the lock backend"
                f" {self.lock_backend!r}.",
                key=key,
            )
        return Lock(
            None,
            str(self.make_key(key, version=version)),  # type: ignore[attr-defined]
            timeout,
            sleep,
            blocking,
            blocking_timeout,
            thread_local,
            backend=self.lock_backend,
        )
