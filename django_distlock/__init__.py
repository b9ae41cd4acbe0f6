"""Distributed locks for Django: leases with fences, on the store that you already run.

A name is imported at its first use, so that `python -m django_distlock.audit` needs no Django.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.errors import (
        BackendUnavailable,
        FenceRejected,
        InvalidArgument,
        LockError,
        LockLost,
        LockNotAcquired,
        LockUsageError,
    )
    from .core.keys import hashed_key
    from .core.records import Holder
    from .core.retry import Retry
    from .exceptions import InvalidLockBackend
    from .flights import asingle_flight, single_flight
    from .handler import default_lock_backend, lock_backends
    from .inspection import LockInfo, held_keys
    from .leading import leader, leader_of
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
    "asingle_flight",
    "atransaction_lock",
    "current_lease",
    "default_lock_backend",
    "distlock",
    "distlock_all",
    "hashed_key",
    "held_keys",
    "leader",
    "leader_of",
    "lock_backends",
    "single_flight",
    "transaction_lock",
    "transaction_locked",
]

#: The modules from which the names are imported at run time.
_NAMES = {
    "core.errors": """
        BackendUnavailable FenceRejected InvalidArgument LockError LockLost LockNotAcquired
        LockUsageError
    """,
    "core.keys": "hashed_key",
    "core.records": "Holder",
    "core.retry": "Retry",
    "exceptions": "InvalidLockBackend",
    "flights": "asingle_flight single_flight",
    "handler": "default_lock_backend lock_backends",
    "inspection": "LockInfo held_keys",
    "leading": "leader leader_of",
    "locks.context": "current_lease",
    "locks.lease": "Lease",
    "locks.lock": "Lock distlock",
    "locks.several": "distlock_all",
    "locks.transactions": "atransaction_lock transaction_lock transaction_locked",
    "scheduling": "RunScope",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # or type checkers would accept names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        value: object = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
