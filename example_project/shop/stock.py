"""Selling: the stock is read, thought about and written back."""

import time
from contextlib import nullcontext
from dataclasses import dataclass

from django_distlock import Retry, distlock
from shop.models import Product

#: Between reading the stock and writing it back: where a real shop asks a warehouse.
THINKING_SECONDS = 0.02

#: The stock is held for moments: ask again soon.
IMPATIENT = Retry(delay=0.01, cap=0.1)


@dataclass(frozen=True)
class Sale:
    """One piece sold: the stock before and after, and under which fence (0: without a lock)."""

    read: int
    wrote: int
    fence: int


def sell_one(pk: int, *, with_lock: bool = True) -> Sale:
    """Take one piece from the stock of a product.

    One `UPDATE … SET stock = stock - 1` would do here, and needs no lock. It stands for work
    that no single statement can do.

    Raises:
        Product.DoesNotExist: There is no such product.
        LockNotAcquired: Others held the stock for half a minute.
    """
    lock = distlock(f"product:{pk}", ttl=10, wait=30, retry=IMPATIENT)
    with lock if with_lock else nullcontext() as lease:
        stock = Product.objects.get(pk=pk).stock
        time.sleep(THINKING_SECONDS)
        Product.objects.filter(pk=pk).update(stock=stock - 1)
        return Sale(read=stock, wrote=stock - 1, fence=0 if lease is None else lease.fence)
