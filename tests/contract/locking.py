"""Short words for tests of the lock API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from django.db import connections, transaction
from django.dispatch import Signal

from django_distlock import Lease, Lock, current_lease, distlock, signals
from django_distlock.core.clock import monotonic
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .helpers import Later

T = TypeVar("T")

#: A short lease, and how long to wait until it is certainly over. The grace is not.
SHORT = 0.6
PAST = 0.65


def lock_of(registered: Registered, key: str, **more: Any) -> Lock:
    """Describe a lock on the backend under test."""
    return distlock(key, backend=registered.alias, **more)


def taken(lock: Lock) -> bool:
    """Ask from another thread, on a connection of its own, whether anybody holds the lock."""
    return Later(lock.locked).result()


def grantable(lock: Lock) -> bool:
    """Try from another thread, once, to take the lock, and give it back."""

    def attempt() -> bool:
        # Long enough that no slow reply comes behind its end.
        plain = replace(lock, ttl=30.0, max_lifetime=None, hold=False, min_hold=0.0)
        lease = plain.try_acquire()
        return lease is not None and lease.release()

    return Later(attempt).result()


def shuts_out(lease: Lease) -> bool:
    """Say whether nobody else is granted a lease's key; fail for good if both have it.

    A machine that stood still for longer than the lease has lost it: then it does not count.
    """
    granted = grantable(Lock(key=lease.key, backend=lease.backend, wait=0))
    # Asked behind it: a lease that is held now was held all the time.
    assert not (granted and lease.held), "two held a key at once"
    return not granted


@contextmanager
def held_elsewhere(lock: Lock) -> Iterator[Lease]:
    """Hold a lock as another thread does."""
    lease = Later(lock.acquire).result()
    try:
        yield lease
    finally:
        Later(lease.release).result()


def take_away(lease: Lease) -> None:
    """Let an operator force-release the key."""
    assert Later(lock_backends[lease.backend].force_release, lease.key).result() is not None


@contextmanager
def receiving(signal: Signal, receive: Callable[..., object]) -> Iterator[None]:
    """Let a function receive a signal in the block."""
    signal.connect(receive)
    try:
        yield
    finally:
        signal.disconnect(receive)


def in_a_block(lock: Lock, work: Callable[[Lease], T]) -> T:
    """Work in a block."""
    with lock as lease:
        return work(lease)


def in_an_awaited_block(lock: Lock, work: Callable[[Lease], T]) -> T:
    """Work in an asynchronous block, on another thread."""

    async def run() -> T:
        async with lock as lease:
            return await asyncio.to_thread(_apart, work, lease)

    return asyncio.run(run())


def in_a_call(lock: Lock, work: Callable[[Lease], T]) -> T:
    """Work in a decorated function."""
    return lock(lambda: work(_current()))()


def in_an_awaited_call(lock: Lock, work: Callable[[Lease], T]) -> T:
    """Work in a decorated coroutine, on another thread."""

    async def function() -> T:
        return await asyncio.to_thread(_apart, work, _current())

    return asyncio.run(lock(function)())


def _apart(work: Callable[[Lease], T], lease: Lease) -> T:
    """Work in a thread that nobody else clears up behind."""
    try:
        return work(lease)
    finally:
        connections.close_all()


def _current() -> Lease:
    lease = current_lease()
    assert lease is not None
    return lease


def by_hand(lock: Lock) -> Lease:
    """Acquire and release."""
    lease = lock.acquire()
    assert lease.release() is True
    return lease


def outlive(lease: Lease) -> None:
    """Let a lease end by its time."""
    time.sleep(max(0.0, lease.deadline - monotonic()) + 0.05)


def using_of(registered: Registered) -> str:
    """Return the database whose transactions are meant: that of the locks, or PostgreSQL."""
    return registered.using or "default"


#: The ways to hold a lock for as long as a body runs.
HOLDING = (in_a_block, in_an_awaited_block, in_a_call, in_an_awaited_call)


class RollbackError(Exception):
    """Ends a transaction."""


@contextmanager
def rolled_back(using: str | None = None) -> Iterator[None]:
    """Run the block in a transaction that is rolled back."""
    with suppress(RollbackError), transaction.atomic(using=using):
        yield
        raise RollbackError


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> bool:
    """Wait until a condition holds; return whether it did in time."""
    give_up = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


class Heard:
    """What a signal said about one key."""

    def __init__(self, signal: Signal, key: str):
        self.facts: list[dict[str, Any]] = []
        self._signal, self._key = signal, key

    def __enter__(self) -> Heard:
        self._signal.connect(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal.disconnect(self._receive)

    def _receive(self, **facts: Any) -> None:
        if facts["key"] == self._key:
            self.facts.append(facts)

    @property
    def once(self) -> dict[str, Any]:
        """Give the facts of a signal that was sent exactly once."""
        if self._signal is signals.lock_lost:
            # A deadline's is sent by a thread of its own.
            eventually(lambda: bool(self.facts))
            assert len(self.facts) <= 1, "a loss was told twice"
        assert len(self.facts) == 1, self.facts
        return self.facts[0]
