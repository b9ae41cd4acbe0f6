"""Prove that code which locks is safe, without waiting for anything.

`memory_locks()` keeps the locks of a test in memory, and its time can be put ahead: `advance()`,
`simulate_pause()`. The other helpers work on every backend.
"""

from .assertions import assert_locked, assert_not_locked
from .memory import Locks, MemoryLocks, memory_locks
from .others import expire, hold, steal
from .outages import lose_connection
from .pauses import simulate_pause
from .timeline import advance

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
