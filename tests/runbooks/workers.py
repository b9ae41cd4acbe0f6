"""What processes do with locks in an incident. See `tests.processes`."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from django.db import connections

from django_distlock import FenceRejected, LockError, LockLost, distlock
from django_distlock.process import event_log
from tests.shop.models import Account

#: Seconds at most until an event is written.
PATIENCE = 30


def hold(key: str, ttl: float) -> None:
    """Take a key, and keep it until a line comes."""
    with distlock(key, ttl=ttl, wait=20):
        print("held")
        input()


def hold_until_asked(key: str, ttl: float) -> str:
    """Work in small steps, and finish when an operator asks."""
    with distlock(key, ttl=ttl, wait=20) as lease:
        print("held")
        while not lease.stop_requested:
            lease.check()
            time.sleep(0.02)
    return "finished"


def hold_with_a_guard(key: str, ttl: float) -> str:
    """Sit in a transaction that nobody may overtake, until a line comes."""
    with distlock(key, ttl=ttl, wait=20) as lease, lease.atomic():
        print("held")
        input()
    return "finished"


def hold_and_go_on(key: str, ttl: float) -> str:
    """Stand still when told, and say what became of the lease."""
    try:
        with distlock(key, ttl=ttl, wait=20) as lease:
            print("held")
            input()
            lease.check()
    except LockError as error:
        print(error.code)
        # As a worker does that does not look: it goes on all the same.
        input()
        return error.code
    return "finished"


def write(key: str, pk: int, value: int) -> dict[str, Any]:
    """Write a row under a lease; say how that went."""
    with distlock(key, ttl=30, wait=20) as lease:
        try:
            row: Any = Account.objects.fenced(lease).get(pk=pk)
            row.value = value
            row.save()
        except FenceRejected as error:
            # This process ends at once, and waits for no event longer than a second.
            for _ in range(PATIENCE):
                event_log.finish()
            return {"refused": error.current, "fence": lease.fence}
    return {"fence": lease.fence}


def write_late(key: str, pk: int, ttl: float) -> None:
    """Read a row under a lease, stand still until a line comes, write, and go on."""
    with suppress(LockLost), distlock(key, ttl=ttl, wait=20) as lease:
        row: Any = Account.objects.fenced(lease).get(pk=pk)
        print("held")
        input()
        row.value += 1
        try:
            row.save()
        except FenceRejected as error:
            print(error.code)
        # As a worker does that takes the refusal for an error of the row.
        input()


def wait_in_threads(key: str, number: int) -> list[int]:
    """Let so many threads wait for a key; return the fences they were granted."""
    fences: list[int] = []

    def work() -> None:
        try:
            with distlock(key, ttl=20, wait=100) as lease:
                fences.append(lease.fence)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(number)]
    for each in threads:
        each.start()
    print("waiting")
    for each in threads:
        each.join()
    return fences
