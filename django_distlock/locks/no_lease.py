"""`NoLease`: what a block gets when it runs without its lock."""

from __future__ import annotations

from typing import Any, NoReturn

from django.dispatch import Signal

from ..core.durations import Duration
from ..core.errors import LockError, LockUsageError
from ..core.records import Holder
from ..handler import lock_backends
from ..signals import lock_bypassed, tell, work_requeued, work_skipped
from .callbacks import Callback
from .lease import Lease


def tell_bypassed(backend: str, key: str | None, waited: float, cause: LockError) -> None:
    """Send `lock_bypassed`: something runs without its lock, after `waited` seconds."""
    _tell(lock_bypassed, backend, key, cause, waited=waited)


def tell_skipped(backend: str, key: str, cause: LockError) -> None:
    """Send `work_skipped`: something does not run, or is not queued, because of its lock."""
    _tell(work_skipped, backend, key, cause)


def tell_requeued(backend: str, key: str, cause: LockError) -> None:
    """Send `work_requeued`: something went back to its queue because of its lock."""
    _tell(work_requeued, backend, key, cause)


def _tell(signal: Signal, backend: str, key: str | None, cause: LockError, **more: float) -> None:
    tell(
        signal,
        type(lock_backends[backend]),
        alias=backend,
        key=key,
        fence=None,
        holder=getattr(cause, "holder", None),
        cause=cause,
        **more,
    )


class NoLease(Lease):
    """Stands for the lease in a block that `on_conflict` lets run without one. It is false.

    Whatever needs a lease is refused.
    """

    token = ""
    fence = 0
    deadline = 0.0
    shared = held = is_lost = is_released = stop_requested = False
    holder = Holder()

    def __init__(self, backend: str, key: str, on_conflict: str):
        self._on_conflict = on_conflict
        self.key = key
        self.backend = backend

    def __repr__(self) -> str:
        return f"<Lease {self.key!r} not held>"

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

    def _refuse(self) -> NoReturn:
        raise LockUsageError(
            f'There is no lease on {self.key!r}: on_conflict="{self._on_conflict}" lets this block'
            " run without the lock. Check lease.held first.",
            key=self.key,
        )

    _holding: Any = property(_refuse)
