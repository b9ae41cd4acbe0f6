"""What other processes do that lock keys by transactions. See `tests.processes`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

from django.db import transaction

from django_distlock import LockNotAcquired, distlock, distlock_all, transaction_lock
from django_distlock.handler import lock_backends
from tests.shop.models import Row

from .workers import add_one

#: Seconds that nobody waits for who is not stuck.
WAIT = 60
#: How many keys there are for those who lock some of several.
SEVERAL = 6


def sell(alias: str, prefix: str, number: int, transactions: int) -> int:
    """Add to some of many rows in each transaction, or read them twice; return how much was added.

    Each row has a key of its own; who shares it only reads.
    """
    using, chance, added = lock_backends[alias].using, random.Random(), 0
    rows = Row.objects.using(using)
    print("ready")
    input()
    for _ in range(transactions):
        names = [f"{prefix}-{each}" for each in chance.sample(range(number), chance.randint(1, 5))]
        with transaction.atomic(using=using):
            if chance.random() < 0.4:
                transaction_lock(*names, shared=True, wait=WAIT, backend=alias)
                first, second = (
                    list(rows.filter(name__in=names).order_by("pk").values_list("value", flat=True))
                    for _ in range(2)
                )
                assert first == second, "a row changed whose key was shared"
                continue
            transaction_lock(*names, wait=WAIT, backend=alias)
            for name in names:
                row = rows.get(name=name)
                rows.filter(pk=row.pk).update(value=row.value + 1)
                added += 1
    return added


def count(alias: str, key: str, path: str, how: str, turns: int) -> None:
    """Add to a counter in a file, in each turn under a lease of the key, or in a transaction."""
    print("ready")
    input()
    for _ in range(turns):
        if how == "lease":
            with distlock(key, wait=WAIT, backend=alias):
                add_one(path)
        else:
            while not _count_in_transaction(alias, key, path):
                # Whoever has the lease needs the file to give it back.
                time.sleep(random.uniform(0.01, 0.05))


def _count_in_transaction(alias: str, key: str, path: str) -> bool:
    """Count; False: on SQLite a lease was granted while the transaction got hold of the file."""
    try:
        with transaction.atomic(using=lock_backends[alias].using):
            transaction_lock(key, wait=WAIT, backend=alias)
            add_one(path)
    except LockNotAcquired as error:
        if error.code != "deadlock":
            raise
        return False
    return True


def count_several(alias: str, key: str, folder: str, how: str, turns: int) -> int:
    """Add to counters in files, in each turn under leases of some keys, or in a transaction.

    Returns:
        How much was added to all of them.
    """
    chance, added = random.Random(), 0
    print("ready")
    input()
    while turns:
        numbers = chance.sample(range(SEVERAL), chance.randint(2, 4))
        keys = [f"{key}-{each}" for each in numbers]
        try:
            if how == "lease":
                with distlock_all(*keys, wait=WAIT, backend=alias):
                    _add_to(folder, numbers)
            else:
                with transaction.atomic(using=lock_backends[alias].using):
                    transaction_lock(*keys, wait=WAIT, backend=alias)
                    _add_to(folder, numbers)
        except LockNotAcquired as error:
            # On MariaDB: a lease was granted amid the locking. Only a rollback gives keys up.
            if error.code != "deadlock":
                raise
            continue
        turns, added = turns - 1, added + len(numbers)
    return added


def _add_to(folder: str, numbers: Iterable[int]) -> None:
    for each in numbers:
        add_one(f"{folder}/{each}")
