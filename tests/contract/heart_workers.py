"""What blocks and processes do that lose their leases. See `tests.processes`."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import connections

from django_distlock import Lease, Lock, LockError, LockLost, distlock, signals
from django_distlock.core.clock import monotonic
from django_distlock.handler import lock_backends
from django_distlock.process.heartbeat import heartbeat_of

from .aliases import in_a_fork, outcome

T = TypeVar("T")


@contextmanager
def loses(lock: Lock) -> Iterator[Lease]:
    """Enter a block whose body succeeds, and whose end must say that the lease is lost."""
    try:
        with lock as lease:
            yield lease
    except LockLost:
        return
    raise AssertionError("The end of the block did not say that the lease is lost.")


def hold_in_a_block(alias: str, key: str, ttl: float) -> bool:
    """Work in a block until told to stop; say whether the lease was kept."""
    with distlock(key, backend=alias, ttl=ttl, wait=20) as lease:
        print(f"held {lease.fence}")
        input()
        return lease.held


def hold_by_a_call(alias: str, key: str, ttl: float) -> dict[str, bool]:
    """Acquire a lease that is renewed, until told to stop; let another thread release it."""
    lease = distlock(key, backend=alias, ttl=ttl, wait=20).acquire(heartbeat=True)
    print(f"held {lease.fence}")
    input()
    held = lease.held
    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(_apart, lease.release).result()
    return {"held": held, "released": released}


def _be_stopped(ttl: float) -> None:
    """Go on when time has jumped: nobody tells a process that it stood still.

    It does so while others wait for its lease, which may have been renewed some time before.
    """
    # Looked at before it is said: the stop may come just behind that.
    before = last = monotonic()
    print("held")
    while last - before < 0.75 * ttl:
        before, last = last, monotonic()
        time.sleep(0.001)


def stand_still_by_a_call(alias: str, key: str, ttl: float) -> dict[str, Any]:
    """Be stopped with a lease that is renewed, and say what its release answers behind that."""
    lease = distlock(key, backend=alias, ttl=ttl).acquire(heartbeat=True)
    _be_stopped(ttl)
    # Looked at before, so that it is not the release that takes too long.
    is_over = monotonic() > lease.deadline
    return {"is_over": is_over, "released": lease.release(), "is_lost": lease.is_lost}


def drop(alias: str, key: str, ttl: float) -> dict[str, Any]:
    """Drop a lease that is renewed, and live on until told to stop; give what warned of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lease = distlock(key, backend=alias, ttl=ttl, wait=20).acquire(heartbeat=True)
        print(f"held {lease.fence}")
        input()
        del lease
        until = monotonic() + 60
        while not _about(key, caught) and monotonic() < until:
            time.sleep(0.01)
        print("dropped")
        input()
        return {"warned": _about(key, caught)}


def _about(key: str, caught: list[warnings.WarningMessage]) -> list[str]:
    return [each.category.__name__ for each in caught if key in str(each.message)]


def _apart(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        connections.close_all()


def stand_still(alias: str, key: str, ttl: float) -> dict[str, Any]:
    """Work in a block, be stopped, and say when the loss was noticed behind it."""
    told: list[float] = []
    heard: list[str] = []
    signals.lock_lost.connect(lambda **facts: heard.append(facts["cause"]), weak=False)
    said: dict[str, Any] = {}
    with suppress(LockLost), distlock(key, backend=alias, ttl=ttl) as lease:
        lease.on_lost(lambda _: told.append(monotonic()))
        said["fence"] = lease.fence
        _be_stopped(ttl)
        said["seen_at"] = monotonic() if lease.is_lost else None
        until = monotonic() + 10
        while not told and monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.3)
    return {**said, "told_at": told, "heard": heard, "is_lost": lease.is_lost}


#: What a fork may not do with a lease of its parent.
FOREIGN = ("check", "extend", "downgrade", "dump")


def fork_in_a_block(alias: str, key: str, ttl: float, how: str) -> dict[str, Any]:
    """Fork inside of a block that goes on; say what became of the lease in both processes."""
    lock = distlock(key, backend=alias, ttl=ttl, wait=0)
    with lock as lease:

        def be_the_child() -> dict[str, str]:
            """Live for longer than the parent's lease, with locks of our own."""

            def own() -> bool:
                with distlock(f"{key}:child", backend=alias, ttl=ttl, wait=0) as mine:
                    time.sleep(1.5 * ttl)
                    return mine.held

            return {
                "parents": str(len(heartbeat_of(lock_backends[alias])._leases)),
                **{each: outcome(getattr(lease, each)) for each in FOREIGN},
                "own": outcome(own),
                "is_lost": str(lease.is_lost),
            }

        if how == "amid a beat":
            _wait_for_a_beat(alias)
        # Through the block's end and the exit handlers, or not.
        said, status = in_a_fork(be_the_child, at_once=how == "_exit")
        # Long enough that it would be lost if the child had stopped its heartbeat.
        time.sleep(1.5 * ttl)
        # In this order: a lease that is held behind the question was held at it.
        parent = {"status": status, "locked": lock.locked(), "held": lease.held}
    return {"child": said, "parent": {**parent, "released": lease.is_released}}


def _wait_for_a_beat(alias: str) -> None:
    """Return while the heartbeat's thread asks the store."""
    backend = lock_backends[alias]
    asked = threading.Event()
    extend_many = backend.extend_many

    def slow(grants: Any) -> Any:
        asked.set()
        answers = extend_many(grants)
        time.sleep(0.2)
        return answers

    backend.extend_many = slow  # type: ignore[method-assign]
    assert asked.wait(20)
    time.sleep(0.05)


def leave_inner_block_in_a_fork(key: str, ttl: float) -> list[str]:
    """Leave, in a forked child, a block that the parent entered again; give what it noticed."""
    reads, writes = os.pipe()
    said: list[str] = []
    lock = distlock(key, backend="memory", ttl=ttl, reentrant=True)
    signals.lock_lost.connect(lambda **_: said.append("told of a loss"), weak=False)
    child = -1
    with lock:
        try:
            with lock:
                child = os.fork()
                if child == 0:
                    time.sleep(1.5 * ttl)
        except LockError as error:
            said.append(f"raised {type(error).__name__}")
        if child == 0:
            os.write(writes, "\n".join(said).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as pipe:
            noticed = pipe.read().split("\n")
        os.waitpid(child, 0)
    return [*noticed, *said]


def keep_a_cycle(using: str, alias: str, key: str, ttl: float) -> dict[str, Any]:
    """Roll a transaction back whose error lives on in a cycle, and see its lock released."""
    from django.db import transaction

    gc.disable()
    lock = distlock(key, backend=alias, ttl=ttl, wait=0)
    kept: list[Any] = []
    try:
        with transaction.atomic(using=using):
            with lock:
                pass
            raise ZeroDivisionError
    except ZeroDivisionError as error:
        # As frameworks do that keep the last error: its frames hold on to what they had.
        kept.append(error)
        kept.append(kept)
    began = monotonic()
    while lock.locked() and monotonic() - began < 10:
        time.sleep(0.02)
    return {"took": monotonic() - began, "locked": lock.locked()}
