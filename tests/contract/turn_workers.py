"""What other processes do when they wait for their turn. See `tests.processes`."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import threading
import time
from typing import Any

from django_distlock import Lock, Retry, distlock
from django_distlock.handler import lock_backends
from tests.fork_server import LIFETIME_SECONDS

from .workers import add_one

#: After its first attempts this one tries again at the deadline only, unless it is woken.
LAZY = Retry(delay=60, factor=1, cap=60)


def wait_for_turn(alias: str, key: str, how: str) -> float:
    """Wait for a key that somebody holds; return when it was granted.

    Says "asks" behind the start, and waits for a line; says "waits" when it is woken from now on.
    """
    lock = distlock(key, backend=alias, ttl=60, wait=30, retry=LAZY)
    _warm_up(alias, key)
    print("asks")
    input()
    threading.Thread(target=_tell_when_waiting, args=(lock,), daemon=True).start()
    return granted_at(lock, how)


def granted_at(lock: Lock, how: str) -> float:
    """Acquire and release; return when it was granted."""

    async def work() -> float:
        async with lock:
            return time.monotonic()

    if how == "aacquire":
        return asyncio.run(work())
    with lock:
        return time.monotonic()


def waits(lock: Lock) -> bool:
    """Say whether somebody in this process waits for a lock, and is woken."""
    backend = lock_backends[lock.backend]
    return backend.queues.name_of(lock.key) in backend.queues and backend.is_listening


def _tell_when_waiting(lock: Lock) -> None:
    while not waits(lock):
        time.sleep(0.01)
    print("waits")


def take_turns(alias: str, key: str, path: str, turns: int) -> dict[str, Any]:
    """Add to a counter in a file, so many times, and say how long that was waited for."""
    lock = distlock(key, backend=alias, ttl=60, wait=30, retry=LAZY)
    _warm_up(alias, key)
    signal.alarm(LIFETIME_SECONDS + turns)
    print("asks")
    input()
    took = []
    for _ in range(turns):
        started = time.monotonic()
        with lock:
            took.append(time.monotonic() - started)
            add_one(path)
    return {
        "turns": len(took),
        "slow": [[turn, round(each, 2)] for turn, each in enumerate(took) if each > 1],
        "median_ms": round(1000 * statistics.median(took), 2),
        "longest_ms": round(1000 * max(took), 2),
    }


def compete(alias: str, key: str, path: str, together: int) -> int:
    """Take turns until all processes have taken so many together, and say how many one got."""
    lock = distlock(key, backend=alias, ttl=60, wait=30)
    _warm_up(alias, key)
    signal.alarm(2 * LIFETIME_SECONDS)
    print("asks")
    input()
    turns = 0
    while True:
        with lock:
            if add_one(path) > together:
                return turns
            turns += 1
            time.sleep(0.002)


def _warm_up(alias: str, key: str) -> None:
    """Do before the race what is only done once in a process."""
    with distlock(f"{key}:{os.getpid()}", backend=alias, ttl=60):
        pass
