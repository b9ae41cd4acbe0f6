"""All errors of this package.

::

    LockError                      code "internal", "aborted"
     ├── LockNotAcquired           "acquisition_timeout", "deadlock", "superseded",
     │                             "backlog_full", "aborted"
     ├── LockLost                  "lost"
     ├── FenceRejected             "fence_rejected"
     ├── BackendUnavailable        "service_unavailable", "network_timeout",
     │                             "auth_failed", "rate_limited"
     ├── InvalidArgument           "invalid_argument", "bad_fence", "fence_jump"
     │                             (also a ValueError)
     └── LockUsageError            "reentrant", "foreign_context", "unsupported", "self_blocked"

    InvalidLockBackend             a mistake in settings       (an ImproperlyConfigured)
"""

from django.core.exceptions import ImproperlyConfigured

from .core.errors import (
    BackendUnavailable,
    FenceRejected,
    InvalidArgument,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from .core.secrets import without_credentials

__all__ = [
    "BackendUnavailable",
    "FenceRejected",
    "InvalidArgument",
    "InvalidLockBackend",
    "LockError",
    "LockLost",
    "LockNotAcquired",
    "LockUsageError",
]


class InvalidLockBackend(ImproperlyConfigured):
    """`DISTLOCK` names a backend that does not exist, or an option that breaks a rule.

    The message contains no user and no password of an address in the settings.
    """

    def __init__(self, message: str = ""):
        super().__init__(without_credentials(message))
