"""A project on psycopg2, with no psycopg 3: `python -m tests.integration.psycopg2_program`.

It prints what it sees as JSON. Arguments: the settings of the database, as JSON, and a key.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

# Django takes psycopg2 where the other one cannot be imported.
sys.modules["psycopg"] = None  # type: ignore[assignment]

import django  # noqa: E402
from django.conf import settings  # noqa: E402

DATABASE = "django_distlock.backends.database.DatabaseBackend"


def configure(database: dict[str, Any]) -> None:
    """Set a project up."""
    settings.configure(
        DATABASES={"default": database},
        INSTALLED_APPS=["django_distlock"],
        SECRET_KEY="psycopg2",
        USE_TZ=True,
        DISTLOCK={
            "functions": {"BACKEND": DATABASE},
            "orm": {"BACKEND": DATABASE, "OPTIONS": {"server_functions": False}},
            "session": {"BACKEND": "django_distlock.backends.advisory.AdvisoryBackend"},
        },
    )
    django.setup()


def use(alias: str, key: str) -> dict[str, Any]:
    """Do with a lock what locks are for; return what was seen."""
    from django.db import transaction

    from django_distlock import distlock, lock_backends

    lock = distlock(key, backend=alias, ttl=30, wait=0)
    seen: dict[str, Any] = {}
    with lock as lease:
        lease.extend()
        seen["refused"] = lock.try_acquire() is None
        with lease.atomic():
            lease.check()
    with transaction.atomic():
        with lock:
            pass
        seen["kept"] = lock.locked()
    seen["released"] = not lock.locked()

    async def work() -> bool:
        async with lock as lease:
            return lease.held

    seen["awaited"] = asyncio.run(work())
    renewed = distlock(key, backend=alias, ttl=3).acquire(heartbeat=True)
    before = renewed.deadline
    while renewed.held and renewed.deadline == before:
        asyncio.run(asyncio.sleep(0.05))
    seen["renewed"] = renewed.release()
    seen["wakes"] = lock_backends[alias].supports_wakeups
    return seen


def refusal(alias: str) -> str:
    """Return why a backend cannot be used."""
    from django_distlock import InvalidLockBackend, lock_backends

    try:
        lock_backends[alias]
    except InvalidLockBackend as error:
        return str(error)
    return ""


def in_a_transaction(key: str) -> bool:
    """Lock a key until a transaction ends."""
    from django.db import transaction

    from django_distlock import distlock, transaction_lock

    with transaction.atomic():
        transaction_lock(key, backend="functions")
        return distlock(key, backend="functions").locked() is False


def main(database: str, key: str) -> None:
    """Print what is seen."""
    configure(json.loads(database))
    from django.db import connection

    said = {
        "driver": connection.Database.__name__,  # type: ignore[attr-defined]
        "functions": use("functions", key),
        "orm": use("orm", key),
        "transaction": in_a_transaction(key),
        "session": refusal("session"),
    }
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
