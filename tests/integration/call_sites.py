"""Shapes in which projects lock by other means, before and after they are replaced.

The pages of the documentation tell of them in tables; `test_call_sites` runs each in two processes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.contrib.auth.models import Group
from django.core.cache import caches
from django.db import connection, transaction
from redis.lock import Lock as RedisLock

from django_distlock import LockNotAcquired, distlock, transaction_lock
from django_distlock.compat.pglock import advisory
from django_distlock.compat.redis import Lock as ShimLock

Work = Callable[[], None]
Site = Callable[[str, Work], None]
#: A lease that a loaded machine does not lose.
TTL = 30


def client() -> Any:
    """Return the Redis client of a project."""
    return caches["redis"].client.get_client()  # type: ignore[attr-defined]


@contextmanager
def advisory_lock(name: str, *, wait: bool) -> Iterator[bool]:
    """Hold an advisory lock of the session, as packages for them do."""
    number = hash_of(name)
    function = "pg_advisory_lock" if wait else "pg_try_advisory_lock"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}(%s)", [number])
        acquired = wait or bool(cursor.fetchone()[0])
        try:
            yield acquired
        finally:
            if acquired:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [number])


def hash_of(name: str) -> int:
    """Return a number of a name, of the project's own making."""
    return int.from_bytes(name.encode()[-7:])


# A block on a lock of the cache


def cache_lock_before(name: str, work: Work) -> None:
    """Wait for `cache.lock()`."""
    with caches["redis"].lock(name, timeout=TTL):  # type: ignore[attr-defined]
        work()


def cache_lock_after(name: str, work: Work) -> None:
    """Wait for the key, for ever as before."""
    with distlock(name, ttl=TTL, wait=None):
        work()


# Acquire, try, finally, release


def try_finally_before(name: str, work: Work) -> None:
    """Work only if nobody else does."""
    lock = RedisLock(client(), name, timeout=TTL)
    if not lock.acquire(blocking=False):
        return
    try:
        work()
    finally:
        lock.release()


def try_finally_after(name: str, work: Work) -> None:
    """The same, in a block that is renewed."""
    with distlock(name, ttl=TTL, wait=0, on_conflict="yield") as lease:
        if not lease:
            return
        work()


# The same call site with another import


def import_before(name: str, work: Work) -> None:
    """Wait for redis-py's lock."""
    with RedisLock(client(), name, timeout=TTL, sleep=0.005):
        work()


def import_after(name: str, work: Work) -> None:
    """Wait for the shim's."""
    with ShimLock(client(), name, timeout=TTL, sleep=0.005):
        work()


# An advisory lock that is waited for


def advisory_before(name: str, work: Work) -> None:
    """Wait for the session's lock."""
    with advisory_lock(name, wait=True):
        work()


def advisory_after(name: str, work: Work) -> None:
    """Wait for the shim's, as for a decorated function."""
    advisory(name, timeout=None)(work)()


# `if not acquired: return`


def not_acquired_before(name: str, work: Work) -> None:
    """Leave it to the one who has the session's lock."""
    with advisory_lock(name, wait=False) as acquired:
        if not acquired:
            return
        work()


def not_acquired_after(name: str, work: Work) -> None:
    """Leave it to the holder."""
    try:
        with distlock(name, ttl=TTL, wait=0):
            work()
    except LockNotAcquired:
        return


# `cache.add()`


def cache_add_before(name: str, work: Work) -> None:
    """Work if the key was not there."""
    if caches["redis"].add(name, 1, timeout=TTL):
        try:
            work()
        finally:
            caches["redis"].delete(name)


def cache_add_after(name: str, work: Work) -> None:
    """Work if the lease is held."""
    with distlock(name, ttl=TTL, wait=0, on_conflict="yield") as lease:
        if lease:
            work()


# SET with NX by hand


def set_nx_before(name: str, work: Work) -> None:
    """Ask again until the key was not there."""
    while not client().set(name, 1, nx=True, ex=TTL):
        time.sleep(0.005)
    try:
        work()
    finally:
        client().delete(name)


def set_nx_after(name: str, work: Work) -> None:
    """Wait for the key."""
    distlock("{name}", ttl=TTL, wait=None)(lambda name: work())(name)


# A file


def file_before(name: str, work: Work) -> None:
    """Lock a file of this host."""
    path = Path(os.environ["DISTLOCK_TEST_SCRATCH"], name)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        work()


def file_after(name: str, work: Work) -> None:
    """Wait for the key, on all hosts."""
    with distlock(name, ttl=TTL, wait=None):
        work()


# A guard row


def guard_row_before(name: str, work: Work) -> None:
    """Lock a row that stands for something else."""
    with transaction.atomic():
        Group.objects.get_or_create(name=name)
        Group.objects.select_for_update().get(name=name)
        work()


def guard_row_after(name: str, work: Work) -> None:
    """Lock the key until the transaction ends."""
    with transaction.atomic():
        transaction_lock(name, wait=None)
        work()


SITES: Mapping[str, tuple[Site, Site]] = {
    "cache.lock": (cache_lock_before, cache_lock_after),
    "try, finally": (try_finally_before, try_finally_after),
    "import": (import_before, import_after),
    "advisory": (advisory_before, advisory_after),
    "if not acquired": (not_acquired_before, not_acquired_after),
    "cache.add": (cache_add_before, cache_add_after),
    "SET NX": (set_nx_before, set_nx_after),
    "file": (file_before, file_after),
    "guard row": (guard_row_before, guard_row_after),
}
#: Those that leave the work to the holder, and do not wait.
SKIPPING = {"try, finally", "if not acquired", "cache.add"}


# Wrong before


def ignored_before(name: str, work: Work) -> None:
    """Take the key, and do not look whether it was there."""
    caches["redis"].add(name, 1, timeout=TTL)
    work()
    caches["redis"].delete(name)


def ignored_after(name: str, work: Work) -> None:
    """Raise where the key is held."""
    with distlock(name, ttl=TTL, wait=0):
        work()


def outlasted_before(name: str, work: Work) -> None:
    """Work for longer than the lock lives."""
    lock = RedisLock(client(), name, timeout=0.5)
    lock.acquire()
    work()


def outlasted_after(name: str, work: Work) -> None:
    """Work for longer than the ttl, which is renewed."""
    with distlock(name, ttl=6, wait=8):
        work()


def looked_before(name: str, work: Work) -> None:
    """Look first, and set then."""
    if caches["redis"].get(name):
        raise LockNotAcquired
    print("looked")
    input()
    caches["redis"].set(name, 1, TTL)
    work()
    caches["redis"].delete(name)


def looked_after(name: str, work: Work) -> None:
    """Look and take in one step."""
    print("looked")
    input()
    with distlock(name, ttl=TTL, wait=0):
        work()


def _make_the_only_one(name: str) -> None:
    if not Group.objects.filter(name__startswith=name).exists():
        Group.objects.create(name=f"{name}-{os.getpid()}")


def uncommitted_before(name: str, work: Work) -> None:
    """Free the key before what was written under it can be seen."""
    with transaction.atomic():
        with advisory_lock(name, wait=True):
            _make_the_only_one(name)
        work()


def uncommitted_after(name: str, work: Work) -> None:
    """Free the key when the transaction has ended."""
    with transaction.atomic():
        with distlock(name, ttl=TTL, wait=0):
            _make_the_only_one(name)
        work()


WRONG: Mapping[str, tuple[Site, Site]] = {
    "False ignored": (ignored_before, ignored_after),
    "longer than its timeout": (outlasted_before, outlasted_after),
    "get, then set": (looked_before, looked_after),
    "free before the commit": (uncommitted_before, uncommitted_after),
}


# What the processes do


def race(site: str, names: list[str], place: str, turns: int) -> list[dict[str, int]]:
    """Visit a call site again and again, as it was and as it is, and count who else was there."""
    said = []
    for visit, name in zip(SITES[site], names, strict=True):
        print("ready")
        input()
        said.append(_race(visit, name, place, turns))
    return said


def _race(visit: Site, name: str, place: str, turns: int) -> dict[str, int]:
    counts = {"runs": 0, "overlaps": 0}

    def work() -> None:
        counts["runs"] += 1
        try:
            os.close(os.open(place, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            counts["overlaps"] += 1
            return
        time.sleep(0.003)
        Path(place).unlink()

    for _ in range(turns):
        visit(name, work)
        time.sleep(0.001)
    return counts


def visit(site: str, is_replaced: bool, name: str) -> str:
    """Visit a call site once, and stay inside until told."""

    def work() -> None:
        print("inside")
        input()

    try:
        WRONG[site][is_replaced](name, work)
    except LockNotAcquired:
        print("refused")
        return "refused"
    return "worked"
