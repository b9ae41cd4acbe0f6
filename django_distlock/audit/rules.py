"""The rules of the audit: why the code that they find is wrong, and what to write instead."""

from __future__ import annotations

import ast
from typing import NamedTuple

#: The condition of a finding that counts only if requests are not transactions.
REQUEST = "ATOMIC_REQUESTS"


class Found(NamedTuple):
    """What a rule found in a file."""

    rule: str
    node: ast.expr
    message: str
    #: When it counts. "": always; REQUEST; an alias: if settings put that database behind a pooler.
    condition: str = ""


class Finding(NamedTuple):
    """What a rule found, as it is reported."""

    path: str
    line: int
    rule: str
    message: str


#: The reason and the remedy of each rule.
RULES = {
    "acquire-ignored": (
        "A process that does not get the lock continues anyway, at the same time as the holder.",
        "`with distlock(key, wait=0):` raises LockNotAcquired if the key is held.",
    ),
    "delete-without-token": (
        "If the work takes longer than the timeout, the deleted lock is that of the next holder.",
        "`with distlock(key, ttl=…):` only releases its own grant.",
    ),
    "work-outlasts-timeout": (
        "The lock expires during the work, and another process starts the same work.",
        "`with distlock(key, ttl=…) as lease:` is renewed; `lease.check()` before what matters.",
    ),
    "loop-outlasts-timeout": (
        "The lock expires during the loop, and another process starts the same work.",
        "`with distlock(key, ttl=…) as lease:` is renewed; `lease.check()` in each pass.",
    ),
    "setnx-then-expire": (
        "A process that dies between the two commands leaves a lock that never ends.",
        "`with distlock(key, ttl=…):`, or `set(key, token, nx=True, ex=…)`.",
    ),
    "get-then-set": (
        "Two processes that read at the same time both find the guard free, and both continue.",
        "`with distlock(key, wait=0):` checks and acquires in one step; `hold=True`: once per ttl.",
    ),
    "lock-ends-before-commit": (
        "The next holder reads what was there before the commit, and overwrites it.",
        "`distlock(key)` in `atomic()` ends after the commit; so does `transaction_lock(key)`.",
    ),
    "session-lock-behind-pooler": (
        "In transaction mode, the pooler gives the session and its lock to other clients.",
        "`transaction_lock(key)` and `distlock(key)` on the database backend work behind a pooler.",
    ),
    "select-for-update-outside-atomic": (
        "Outside `atomic()`, Django refuses the query, and after its end the rows are free.",
        "`with transaction.atomic():` around query and writes, or `@transaction_locked(key)`.",
    ),
    "message-before-commit": (
        "A fast worker reads the state before the commit; after a rollback, its work is wrong.",
        "`transaction.on_commit(lambda: task.delay(…))`, and `@locked_task(key)` on the task.",
    ),
}
