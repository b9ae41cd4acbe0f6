"""What other processes do that share a key, or hold several. See `tests.processes`."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

from django_distlock import LockLost, LockNotAcquired, distlock, distlock_all
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
        _note(path, (lease.fence, alone, began, lease.deadline))
        time.sleep(chance.choice([0.0, 0.01, 0.05]))
        _note(path, (lease.fence, alone, began, min(monotonic(), lease.deadline)))
        held += 1
        try:
            lease.release()
            if chance.random() < 0.3:
                lease.release()  # Once more, which must not free the place of another.
        except LockLost:
            continue
    return held


def hold_several(alias: str, key: str, path: str, times: int) -> int:
    """Hold some of four keys at once, shared or alone, and write down from when to when.

    Args:
        times: How often to hold some at the least.

    Returns:
        How often some were held.
    """
    chance, granted = random.Random(), 0
    print("ready")
    input()
    while granted < times:
        numbers = chance.sample(range(4), chance.choice([2, 3, 4]))
        shared = chance.random() < 0.3
        locks = distlock_all(
            *(f"{key}-{number}" for number in numbers),
            backend=alias,
            ttl=60,
            wait=chance.choice([0, 120, 120]),
            heartbeat=False,
            shared=shared,
        )
        try:
            leases = locks.acquire()
        except LockNotAcquired:
            time.sleep(0.02)
            continue
        began = monotonic()
        fences = {number: leases[f"{key}-{number}"].fence for number in numbers}
        time.sleep(chance.choice([0.0, 0.005, 0.02]))
        ended = monotonic()
        _note(path, *((number, shared, fence, began, ended) for number, fence in fences.items()))
        granted += 1
        leases.release()
    return granted


def _note(path: str, *lines: tuple[object, ...]) -> None:
    """Append lines in one piece."""
    with Path(path).open("ab", buffering=0) as file:
        file.write("".join(f"{json.dumps(each)}\n" for each in lines).encode())
