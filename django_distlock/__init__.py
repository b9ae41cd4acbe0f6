"""Distributed locks for Django: leases with fences, on the store that you already run."""

from .core.errors import (
    BackendUnavailable,
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
from .holding import current_lease
from .inspection import LockInfo
from .leases import Lease
from .locks import Lock, distlock

__all__ = [
    "BackendUnavailable",
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
    "current_lease",
    "default_lock_backend",
    "distlock",
    "lock_backends",
]
