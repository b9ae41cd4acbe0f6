"""Distributed locks for Django: leases with fences, on the store that you already run."""

from .core.errors import (
    BackendUnavailable,
    FenceRejected,
    InvalidArgument,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from .core.holders import Holder
from .core.retry import Retry
from .exceptions import InvalidLockBackend
from .handler import default_lock_backend, lock_backends
from .inspection import LockInfo, held_keys
from .locks.context import current_lease
from .locks.lease import Lease
from .locks.lock import Lock, distlock
from .locks.several import distlock_all
from .locks.transactions import atransaction_lock, transaction_lock, transaction_locked
from .scheduling import RunScope

__all__ = [
    "BackendUnavailable",
    "FenceRejected",
    "Holder",
    "InvalidArgument",
    "InvalidLockBackend",
    "Lease",
    "Lock",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotAcquired",
    "LockUsageError",
    "Retry",
    "RunScope",
    "atransaction_lock",
    "current_lease",
    "default_lock_backend",
    "distlock",
    "distlock_all",
    "held_keys",
    "lock_backends",
    "transaction_lock",
    "transaction_locked",
]
