"""Helpers for tests of code that locks, without real waiting.

`memory_locks()` keeps the locks of a test in memory, with a clock that `advance()` and
`simulate_pause()` move forward. The other helpers work on every backend.
"""

from .memory import Locks, MemoryLocks, memory_locks
from .others import assert_locked, assert_not_locked, expire, hold, steal
from .outages import lose_connection
from .timeline import advance, simulate_pause

__all__ = [
    "Locks",
    "MemoryLocks",
    "advance",
    "assert_locked",
    "assert_not_locked",
    "expire",
    "hold",
    "lose_connection",
    "memory_locks",
    "simulate_pause",
    "steal",
]
