"""A counter that nothing but a lock protects: what goes wrong with the lock, it shows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from django.db import transaction

from django_distlock import Lock, Retry, transaction_lock
from tests.contract.helpers import Later
from tests.shop.models import Row

T = TypeVar("T")

#: For a machine with much else to do.
PATIENCE = 60.0

#: For many who want one key on a small machine.
EAGER = Retry(delay=0.005, cap=0.02)


def count_once(lock: Lock, name: str, using: str = "default") -> tuple[int, int]:
    """Read, add and write under a lock; give the new value and the fence."""
    with lock as lease:
        return _add(name, using), lease.fence


def count_inside(lock: Lock, name: str, using: str = "default") -> tuple[int, int]:
    """Do so in a transaction, whose end frees the key."""
    with transaction.atomic(using=using), lock as lease:
        return _add(name, using), lease.fence


def count_by_transaction(
    key: str, using: str, backend: str, wait: float = PATIENCE
) -> tuple[int, int]:
    """Do so under a lock of the transaction, which has no fence."""
    with transaction.atomic(using=using):
        transaction_lock(key, using=using, backend=backend, wait=wait)
        return _add(key, using), 0


async def acount_once(lock: Lock, name: str, using: str = "default") -> tuple[int, int]:
    """Do so in asynchronous code."""
    async with lock as lease:
        row = await Row.objects.using(using).aget(name=name)
        # Whoever else runs now has the chance to read the same.
        await asyncio.sleep(0)
        row.value += 1
        await row.asave()
        return row.value, lease.fence


def _add(name: str, using: str) -> int:
    row = Row.objects.using(using).get(name=name)
    row.value += 1
    row.save()
    return row.value


def together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make calls in threads that start together, with a patience for much work."""
    todo = list(calls)
    barrier = threading.Barrier(len(todo))

    def run(call: Callable[[], T]) -> T:
        barrier.wait(PATIENCE)
        return call()

    return [each.result(PATIENCE) for each in [Later(run, call) for call in todo]]


def new_counter(name: str) -> None:
    """Make a counter, at 0."""
    Row.objects.create(name=name)


def assert_none_lost(counted: Iterable[Iterable[int]]) -> None:
    """Check that every count went on from the one before, under a higher fence."""
    ordered = sorted(tuple(each) for each in counted)
    assert [value for value, _fence in ordered] == list(range(1, len(ordered) + 1))
    fences = [fence for _value, fence in ordered]
    assert fences == sorted(set(fences))
