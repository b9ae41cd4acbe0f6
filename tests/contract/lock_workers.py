"""What other processes do with locks. See `tests.processes`."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from django.db import connections

from django_distlock import BackendUnavailable, current_lease, distlock, lock_backends
from django_distlock.database import vendors
from django_distlock.database.connections import releases
from django_distlock.locks import blocks
from django_distlock.locks.attempts import Attempts
from django_distlock.process import deferred_release
from tests.processes import RESULT

from .aliases import abandon_connections, alias_like, in_a_fork, locks_on, outcome
from .locking import eventually


def hold_to_the_end(
    alias: str, key: str, how: str, window: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Take a lock, and end this process without giving it back."""
    lock = distlock(key, backend=alias, ttl=60, **(window or {}))
    if how == "ended thread":
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
    elif how == "working thread":
        entered = threading.Event()

        def work() -> None:
            with lock:
                entered.set()
                time.sleep(60)

        threading.Thread(target=work, daemon=True).start()
        entered.wait()
    elif how == "asyncio":
        asyncio.run(_take(lock))
    elif how == "multiprocessing":
        # The parent has had a lease, and releases at its own end.
        distlock(f"{key}:parent", backend=alias, ttl=60).acquire().release()
        child = multiprocessing.get_context("fork").Process(target=lock.acquire)
        child.start()
        child.join()
    elif how == "block":
        with lock:
            print("held")
            sys.exit(3)
    elif how == "exit":
        lock.acquire()
        print("held")
        sys.exit(3)
    else:
        lock.acquire()
    print("held")
    return {"pid": os.getpid()}


def outlive_the_main_thread(alias: str, key: str) -> None:
    """Lock in a thread that goes on when the main one has ended, and tell what came of it."""
    # Several: a cluster keeps them on several servers.
    locks = [distlock(f"{key}:{number}", backend=alias, ttl=3) for number in range(8)]

    async def extend(lock: Any) -> bool:
        async with lock as lease:
            await lease.aextend()
        return bool(lease.is_released)

    def work() -> None:
        with suppress(RuntimeError):
            while True:
                ThreadPoolExecutor(1).submit(time.sleep, 0.01).result()
        with ExitStack() as stack:
            leases = [stack.enter_context(lock) for lock in locks]
            first = leases[0].deadline
            while leases[0].deadline == first and not leases[0].is_lost:
                time.sleep(0.02)
            said = {"lost": leases[0].is_lost}
        said["awaited"] = asyncio.run(extend(distlock(f"{key}:awaited", backend=alias)))
        connections.close_all()
        print(RESULT + json.dumps(said))

    threading.Thread(target=work).start()


async def _take(lock: Any) -> None:
    await lock.aacquire()


def wait_for_line() -> None:
    """Wait for a line, or for a signal that raises.

    A signal that comes just before a read begins does not end that, and its handler never runs.
    """
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
    input()


def hold_until_told(alias: str, key: str, ttl: float, how: str) -> bool:
    """Take a lock, and wait for a signal, or for a line."""
    if how == "turned into an exit":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lock = distlock(key, backend=alias, ttl=ttl)
    if how == "in a block":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with lock:
            print("held")
            wait_for_line()
    lease = lock.acquire()
    print("held")
    wait_for_line()
    return lease.release()


def hold_through_a_pause(alias: str, key: str, ttl: float) -> dict[str, Any]:
    """Take a lock, wait for a line, and say what became of the lease meanwhile."""
    lease = distlock(key, backend=alias, ttl=ttl).acquire()
    print("held")
    input()
    said: dict[str, Any] = {"fence": lease.fence, "is_lost": lease.is_lost}
    for name, call in {"check": lease.check, "extend": lease.extend}.items():
        said[name] = outcome(call)
    return {**said, "released": lease.release()}


def fork(alias: str, key: str) -> dict[str, Any]:
    """Hold a lock over a fork, and let the child try what it may not do."""
    lock = distlock(key, backend=alias, ttl=60, wait=0, reentrant=True)
    unbound = distlock(f"{key}:unbound", backend=alias, ttl=60).acquire()
    with lock as lease:
        before = lease.expires_at

        def be_the_child() -> dict[str, str]:
            calls: dict[str, Callable[[], object]] = {
                "release": lease.release,
                "unbound": unbound.release,
                "check": lease.check,
                "extend": lease.extend,
                "aextend": lambda: asyncio.run(lease.aextend()),
                "arelease": lambda: asyncio.run(lease.arelease()),
                "held": lambda: lease.held,
                "is_lost": lambda: lease.is_lost,
                "remaining": lease.remaining,
                "current": lambda: current_lease() is not None,
                "enters": lock.__enter__,
                "acquires": lock.acquire,
                "dumps": lease.dump,
                "is told": lambda: lease.on_lost(print),
                "is warned": lambda: lease.on_danger(print),
                "locked": lock.locked,
                "own": distlock(f"{key}:child", backend=alias)(lambda: True),
            }
            return {name: outcome(call) for name, call in calls.items()}

        # Through the block's end and the exit handlers, which must not release the parent's.
        said, status = in_a_fork(be_the_child, at_once=False)
        after = {
            "status": status,
            "held": lease.held,
            "locked": lock.locked(),
            "unbound": distlock(unbound.key, backend=alias).locked(),
            "unchanged": lease.expires_at == before,
        }
    return {"child": said, "parent": after, "released": [lease.is_released, unbound.release()]}


class _Attempts:
    """What asks for a key, and counts how often it is given up."""

    backend = lock_backends["memory"]
    given_up = 0

    def fail(self, error: BaseException) -> None:
        self.given_up += 1


def _leave(**what: Any) -> _Attempts:
    """Leave a block without its end."""
    block, attempts = blocks.Block(None), _Attempts()
    vars(block).update({"name": ("memory", "key"), "attempts": attempts, **what})
    block.watched()
    return attempts


def leave_a_child_amid_an_acquire(alias: str, key: str) -> None:
    """Let a child of `multiprocessing` exit as by a signal, right behind the grant."""

    def leave() -> None:
        def exit_at_once(*_: object) -> None:
            sys.exit(0)

        Attempts.conclude = exit_at_once  # type: ignore[method-assign,assignment]
        distlock(key, backend=alias, basic=True).acquire()

    with distlock(f"{key}:before", backend=alias):
        pass
    child = multiprocessing.get_context("fork").Process(target=leave)
    child.start()
    child.join()


def leave_while_no_thread_starts() -> dict[str, Any]:
    """Let an acquire be interrupted where no thread can be started."""
    _leave(inner=True)  # So that what ends blocks runs.
    assert eventually(lambda: not blocks.every)
    usual = threading.stack_size(1 << 46)
    attempts = _leave()
    is_ended = eventually(lambda: not blocks.every)
    threading.stack_size(usual)
    # Behind whatever was left to this thread, too.
    runs = threading.Event()
    _Attempts.backend.threads.submit(runs.set)
    return {"is_ended": is_ended, "runs": runs.wait(10), "given_up": attempts.given_up}


class _AtTheEnd(_Attempts):
    """Is given up by a thread that needs a while, and that can start no other one any more."""

    @property
    def backend(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(threads=self)

    def submit(self, _operation: object) -> None:
        time.sleep(0.3)
        raise RuntimeError

    def fail(self, error: BaseException) -> None:
        print("given up")


class _Late(SimpleQueue[Any]):
    """Takes a while between its last entry and who asked for it."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        entry = super().get(block, timeout)
        time.sleep(0.3)
        return entry


def leave_at_the_very_end() -> None:
    """Let an acquire be interrupted, and end this process."""
    releases.queue = _Late()
    _leave(attempts=_AtTheEnd())


def take_until_interrupted(alias: str, key: str) -> None:
    """Take a lock again and again, until Ctrl-C, and end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lock = distlock(key, backend=alias, ttl=60, wait=5)
    with lock:
        print("at work")
    with suppress(KeyboardInterrupt):
        while True:
            with lock:
                pass


class _Unanswered(_Attempts):
    """Leaves the release of what it may have been granted to another thread."""

    def fail(self, error: BaseException) -> None:
        def release() -> None:
            time.sleep(0.3)
            print("released")

        deferred_release.later(release)


def leave_what_had_no_answer_at_the_very_end() -> None:
    """Let an acquire be interrupted amid an attempt, and end this process."""
    _leave(attempts=_Unanswered())


def ask_first_behind_a_fork(address: dict[str, str], key: str) -> str:
    """Acquire in a forked child, on a connection that it has already."""
    reads, writes = os.pipe()
    with alias_like("default", **address) as using, locks_on(using) as alias:
        lock = distlock(key, backend=alias, wait=0, heartbeat=False)
        lock.acquire().release()
        if (pid := os.fork()) == 0:
            abandon_connections()
            connections[using].ensure_connection()
            print("connected")
            input()
            signal.alarm(15)
            try:
                lock.acquire()
                os.write(writes, b"granted")
            except BackendUnavailable as error:
                os.write(writes, error.code.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return os.read(reads, 100).decode()


def stand_still_amid_a_transaction(alias: str, key: str) -> str:
    """Acquire, and wait for a line with the rows of the key locked."""
    lock = distlock(key, backend=alias, wait=0, heartbeat=False)
    lock.acquire().release()
    store: Any = lock_backends[alias]
    vendor: Any = vendors.VENDORS[connections[store.using].vendor]
    make_durable = vendor.make_durable

    def late(self: Any) -> None:
        print("amid")
        input()
        make_durable(self)

    vendor.make_durable = late
    try:
        lock.acquire()
    except BackendUnavailable as error:
        return error.code
    return "granted"
