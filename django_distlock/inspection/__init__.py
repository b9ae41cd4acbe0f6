"""The interface for operators: which keys are held, and what may be done about them.

Admin, commands and views all use it, so that they agree. It shows keys and hashes of tokens, never
a token. No operation checks a permission: code that acts for a user calls `may()` first.
"""

from ..core.keys import own_key
from .held import HeldKey, State
from .journal import Operation, may
from .listing import (
    Failure,
    LockPage,
    TransactionLock,
    TransactionLocks,
    list_locks,
    list_transactions,
)
from .operations import (
    Outcome,
    Result,
    cleanup,
    expire_soon,
    force_release,
    pause,
    request_stop,
    resume,
)
from .pruning import Pruned, prune_events, prune_responses
from .showing import KeyView, LockInfo, aowns, get_by_key, get_by_token, held_keys, owns, show
from .summary import Statistics, Summary, statistics, summary

__all__ = [
    "Failure",
    "HeldKey",
    "KeyView",
    "LockInfo",
    "LockPage",
    "Operation",
    "Outcome",
    "Pruned",
    "Result",
    "State",
    "Statistics",
    "Summary",
    "TransactionLock",
    "TransactionLocks",
    "aowns",
    "cleanup",
    "expire_soon",
    "force_release",
    "get_by_key",
    "get_by_token",
    "held_keys",
    "list_locks",
    "list_transactions",
    "may",
    "own_key",
    "owns",
    "pause",
    "prune_events",
    "prune_responses",
    "request_stop",
    "resume",
    "show",
    "statistics",
    "summary",
]
