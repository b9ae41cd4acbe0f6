"""What a block gets that runs without its lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import NoReturn

from django.dispatch import Signal

from ..core.durations import Duration
from ..core.errors import LockError, LockUsageError
from ..core.holders import Holder
from ..handler import lock_backends
from ..signals import lock_bypassed, tell, work_requeued, work_skipped
from .callbacks import Callback
from .lease import Lease


def tell_bypassed(backend: str, key: str | None, waited: float, cause: LockError) -> None:
    """Say that something runs without its lock.

    Args:
        backend: The alias of the lock backend.
        waited: For how many seconds it was tried.
        cause: Why it was not granted.
    """
    tell(
        lock_bypassed,
        type(lock_backends[backend]),
        alias=backend,
        key=key,
        fence=None,
        holder=getattr(cause, "holder", None),
        waited=waited,
        cause=cause,
    )


def tell_skipped(backend: str, key: str, cause: LockError) -> None:
    """Say that something does not run, or is not queued, because of its lock.

    Args:
        backend: The alias of the lock backend.
        cause: Why it was not granted.
    """
    _tell(work_skipped, backend, key, cause)


def tell_requeued(backend: str, key: str, cause: LockError) -> None:
    """Say that something went back to its queue because of its lock; see `tell_skipped`."""
    _tell(work_requeued, backend, key, cause)


def _tell(signal: Signal, backend: str, key: str, cause: LockError) -> None:
    tell(
        signal,
        type(lock_backends[backend]),
        alias=backend,
        key=key,
        fence=None,
        holder=getattr(cause, "holder", None),
        cause=cause,
    )


class NoLease(Lease):
    """Stands for a lease where `on_conflict` let a block run without: it is false."""

    def __init__(self, backend: str, key: str, on_conflict: str):
        self._on_conflict = on_conflict
        self.key = key
        self.backend = backend
        self.token = ""
        self.fence = 0

    def __repr__(self) -> str:
        return f"<Lease {self.key!r} not held>"

    @property
    def deadline(self) -> float:
        """Long ago."""
        return 0.0

    @property
    def ttl(self) -> float | None:
        """Raise: there is nothing to expire."""
        self._refuse("has a ttl")

    @property
    def shared(self) -> bool:
        """Never: nothing is held."""
        return False

    @property
    def held(self) -> bool:
        """Never."""
        return False

    @property
    def is_lost(self) -> bool:
        """Never: what was not held cannot be lost."""
        return False

    @property
    def is_released(self) -> bool:
        """Never."""
        return False

    @property
    def stop_requested(self) -> bool:
        """Never: nobody knows that this block runs."""
        return False

    @property
    def holder(self) -> Holder:
        """Nobody."""
        return Holder()

    @property
    def acquired_at(self) -> datetime:
        """Raise: it was not."""
        self._refuse("was acquired")

    @property
    def expires_at(self) -> datetime | None:
        """Raise: there is nothing to expire."""
        self._refuse("expires")

    def check(self) -> NoReturn:
        """Raise: the lease is not held."""
        self._refuse("can be checked")

    def extend(self, ttl: Duration | None = None) -> NoReturn:
        """Raise: there is nothing to extend."""
        self._refuse("can be extended")

    async def aextend(self, ttl: Duration | None = None) -> NoReturn:
        """See `extend`."""
        self._refuse("can be extended")

    def downgrade(self) -> NoReturn:
        """Raise: there is nothing to share."""
        self._refuse("can be shared")

    async def adowngrade(self) -> NoReturn:
        """See `downgrade`."""
        self._refuse("can be shared")

    def release(self, *, strict: bool = False) -> bool:
        """Return False: there is nothing to release, and nothing was lost."""
        return False

    async def arelease(self, *, strict: bool = False) -> bool:
        """See `release`."""
        return False

    def on_lost(self, callback: Callback) -> None:
        """Do nothing: it will not be called."""

    def on_danger(self, callback: Callback, before: Duration | None = None) -> None:
        """Do nothing: it will not be called."""

    def guard(self, using: str | None = None) -> NoReturn:
        """Raise: there is nothing to guard by."""
        self._refuse("can guard a transaction")

    @contextmanager
    def atomic(self, using: str | None = None) -> Iterator[None]:
        """Raise: there is nothing to guard by."""
        self.guard(using)
        yield

    def dump(self) -> NoReturn:
        """Raise: there is nothing to give away."""
        self._refuse("can be handed over")

    def _refuse(self, what: str) -> NoReturn:
        raise LockUsageError(
            f'No lease on {self.key!r} {what}: on_conflict="{self._on_conflict}" lets this block'
            " run without the lock. Check lease.held first.",
            key=self.key,
        )
