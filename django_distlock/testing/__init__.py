"""Prove that code which locks is safe, without waiting for anything.

`memory_locks()` keeps the locks of a test in memory, and its time can be put ahead: `advance()`,
`simulate_pause()`. The other helpers work on every backend.
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
