"""What other processes do that share a key. See `tests.processes`."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

from django_distlock import LockLost, LockNotAcquired, distlock
from django_distlock.core.clock import monotonic
from tests.fork_server import LIFETIME_SECONDS

#: Seconds of a lease, which nobody renews.
TTL = 1.5
#: Seconds that a holding may take with all of the waiting before it, on a slow machine.
SECONDS_OF_A_HOLDING = 3


def hold(alias: str, key: str, path: str, permits: int | None, times: int) -> int:
    """Hold a key with others, or alone, and write down from when to when.

    Args:
        permits: How many may hold it; None: readers, and in one of four turns a writer.
        times: How often.

    Returns:
        How often it was held.
    """
    # A drill at full size takes longer than other processes live.
    signal.alarm(int(LIFETIME_SECONDS + times * SECONDS_OF_A_HOLDING))
    chance, held = random.Random(), 0
    print("ready")
    input()
    while held < times:
        alone = permits is None and chance.random() < 0.25
        kind = {"permits": permits} if permits else {"shared": not alone}
        lock = distlock(key, backend=alias, ttl=TTL, wait=60, heartbeat=False, **kind)
        try:
            lease = lock.acquire()
        except LockNotAcquired:
            continue
        began = monotonic()
        _note(path, lease.fence, alone, began, lease.deadline)
        time.sleep(chance.choice([0.0, 0.01, 0.05]))
        _note(path, lease.fence, alone, began, min(monotonic(), lease.deadline))
        held += 1
        try:
            lease.release()
            if chance.random() < 0.3:
                lease.release()  # Once more, which must not free the place of another.
        except LockLost:
            continue
    return held


def _note(path: str, *facts: object) -> None:
    """Append a line in one piece."""
    with Path(path).open("ab", buffering=0) as file:
        file.write(json.dumps(facts).encode() + b"\n")
