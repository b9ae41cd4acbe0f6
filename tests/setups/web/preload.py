"""What a master does with locks before it forks its workers."""

from __future__ import annotations

import os

from django.db import connections, transaction

from django_distlock import Lease, distlock

#: What the master holds; its workers have a copy of it.
leases: list[Lease] = []


def prepare() -> None:
    """Lock if the test says so: outside of a transaction, inside of one, and to keep it."""
    key, _, close = os.environ.get("DISTLOCK_TEST_PRELOAD", "").partition(" ")
    if not key:
        return
    with distlock(f"{key}:before"):
        pass
    with transaction.atomic(), distlock(f"{key}:inside"):
        pass
    leases.append(distlock(f"{key}:master", ttl=60).acquire())
    if close:
        # What Django recommends before a fork, and what a preloaded project should do.
        connections.close_all()
