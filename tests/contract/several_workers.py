"""What other processes do that hold several keys at once. See `tests.processes`."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from django_distlock import LockNotAcquired, distlock_all
from django_distlock.core.clock import monotonic


def hold(alias: str, key: str, path: str, times: int) -> int:
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
        with Path(path).open("ab", buffering=0) as file:
            lines = [json.dumps([*each, began, ended]) for each in _facts(fences, shared)]
            file.write("".join(f"{each}\n" for each in lines).encode())
        granted += 1
        leases.release()
    return granted


def _facts(fences: dict[int, int], shared: bool) -> list[tuple[int, bool, int]]:
    return [(number, shared, fence) for number, fence in fences.items()]
