"""Many threads and many locks: connections are bounded while they work, and gone behind them."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial

import pytest
from django.db import transaction

from django_distlock import Lock, distlock
from django_distlock.backends import listening
from django_distlock.database import connections as distlock_connections
from django_distlock.handler import lock_backends
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import Later
from tests.contract.locking import eventually

from .counting import EAGER, together
from .sessions import named, sessions

THREADS = 50
CYCLES = int(os.environ.get("DISTLOCK_TEST_CYCLES", "500"))


def outside(lock: Lock, using: str, times: int) -> None:
    """Lock on the thread's own connection."""
    for _ in range(times):
        with lock:
            pass


def inside(lock: Lock, using: str, times: int) -> None:
    """Lock in transactions, and so on connections of ours."""
    for _ in range(times):
        with transaction.atomic(using=using), lock:
            pass


def awaited(lock: Lock, using: str, times: int) -> None:
    """Lock in an event loop."""

    async def cycles() -> None:
        for _ in range(times):
            async with lock:
                pass

    asyncio.run(cycles())


def test_thousands_of_locks_leave_no_connection(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more sessions than threads and `LOCK_CONNECTIONS`; none when all is idle."""
    # Shorter than in life, but longer than any pause between two locks.
    monkeypatch.setattr(distlock_connections, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(listening, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(listening, "LOOK_SECONDS", 1.0)
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.append(len(sessions(key)))

    with alias_like("default", **named(key)) as using, locks_on(using) as backend:
        allowed = lock_backends[backend].config.lock_connections
        # Half as many keys as threads: some wait for each other, and some do not.
        kinds = [outside] * 30 + [inside] * 15 + [awaited] * 5

        def work(number: int) -> None:
            lock = distlock(f"{key}:{number // 2}", backend=backend, wait=60, retry=EAGER)
            kinds[number](lock, using, CYCLES // THREADS)

        watching = Later(watch)
        try:
            together(partial(work, number) for number in range(THREADS))
        finally:
            over.set()
            watching.result()
        # One more hears wake-ups.
        assert allowed < max(seen) <= THREADS + allowed + 1
        # Django's own ended with their threads.
        assert eventually(lambda: len(sessions(key)) <= allowed + 1)
        assert eventually(lambda: not sessions(key), timeout=20)
