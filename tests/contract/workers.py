"""What other processes do in these tests. See `tests.processes`."""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from typing import Any

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.handler import lock_backends

from .helpers import extend

#: Bytes of a counter in a file. All of them are written at once, so that no reader sees half.
WIDTH = 12


def attempt(alias: str, key: str) -> dict[str, Any]:
    """Try once to acquire a key, when told."""
    backend = lock_backends[alias]
    # What is only done once in a process is done before the race.
    backend.read(key)
    print("ready")
    input()
    answer = backend.acquire(key, new_token(), 30)
    # Who waited for too long has not been told whether the key is free.
    while not isinstance(answer, Grant) and answer.busy:
        answer = backend.acquire(key, new_token(), 30)
    return {"fence": answer.fence if isinstance(answer, Grant) else None}


def grant(alias: str, key: str) -> int:
    """Acquire a key and give it back, as a program that has just been started."""
    backend = lock_backends[alias]
    answer = backend.acquire(key, new_token(), 30)
    assert isinstance(answer, Grant)
    assert backend.release(answer) is True
    return answer.fence


def count(alias: str, key: str, path: str, times: int) -> int:
    """Add to a counter in a file, once for each grant of the key; no key: without any lock."""
    backend = lock_backends[alias]
    print("ready")
    input()
    return count_up(backend, key, path, times)


def count_up(backend: BaseLockBackend | None, key: str, path: str, times: int) -> int:
    """Do what `count` does, in this process; return how many attempts it took."""
    attempts = 0
    for _ in range(times):
        answer: Grant | Contended | None = None
        while key and not isinstance(answer, Grant):
            attempts += 1
            assert backend is not None
            answer = backend.acquire(key, new_token(), 30)
            if not isinstance(answer, Grant):
                time.sleep(random.uniform(0.001, 0.02))
        add_one(path)
        if isinstance(answer, Grant):
            assert backend is not None
            assert backend.release(answer) is True
    return attempts


def add_one(path: str) -> int:
    """Read, think, write; return what was written."""
    file = os.open(path, os.O_RDWR)
    try:
        value = int(os.pread(file, WIDTH, 0) or b"0")
        time.sleep(0.001)
        os.pwrite(file, str(value + 1).zfill(WIDTH).encode(), 0)
    finally:
        os.close(file)
    return value + 1


def ask_with_clock_off(alias: str, key: str, held_key: str, seconds: float) -> dict[str, Any]:
    """Acquire one key and contend for another where the clock of the host is wrong."""
    _put_clocks(seconds)
    backend = lock_backends[alias]
    granted = backend.acquire(key, new_token(), 1500)
    assert isinstance(granted, Grant)
    assert granted.expires_at is not None
    extended = extend(backend, granted, 1800)
    assert extended.expires_at is not None
    contended = backend.acquire(held_key, new_token(), 5)
    assert isinstance(contended, Contended)
    shown = backend.read(held_key)
    return {
        "clock": time.time(),
        "granted": granted.expires_at.timestamp(),
        "extended": extended.expires_at.timestamp(),
        "expires_in": contended.expires_in,
        "reads": shown is not None,
        "cleaned": backend.cleanup(datetime.datetime.now(datetime.UTC), limit=100_000),
    }


def _put_clocks(seconds: float) -> None:
    """Put every clock forward that tells the time of day."""
    right_time, right_time_ns, right_datetime = time.time, time.time_ns, datetime.datetime

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, right_datetime)

    class Wrong(datetime.datetime, metaclass=Meta):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Wrong:
            return cls.fromtimestamp(right_time() + seconds, tz)

        @classmethod
        def utcnow(cls) -> Wrong:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    time.time = lambda: right_time() + seconds
    time.time_ns = lambda: right_time_ns() + int(seconds * 1e9)
    for module in list(sys.modules.values()):
        if getattr(module, "datetime", None) is right_datetime:
            module.datetime = Wrong  # type: ignore[attr-defined]
