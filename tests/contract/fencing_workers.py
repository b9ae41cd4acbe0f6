"""What processes write under leases that others take over meanwhile. See `tests.processes`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import (
    DatabaseError,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    transaction,
)

from django_distlock import (
    BackendUnavailable,
    FenceRejected,
    Lease,
    LockLost,
    LockNotAcquired,
    distlock,
    signals,
)
from django_distlock.handler import lock_backends
from tests.shop.models import Account, Row

#: Seconds of a lease in the drill.
SHORT_TTL = 0.6
#: Seconds of thinking in the drill at most: more than all else that a round takes.
LONGEST_THOUGHT = 0.12
#: Seconds after which a worker of the drill makes room for a fresh one, below its lifetime.
SHIFT = 60


def write_too_late(
    alias: str, using: str, key: str, rows: dict[str, int], ttl: float
) -> dict[str, Any]:
    """Read under a lease, wait for a line, and write in every way what should be by now."""
    heard: list[dict[str, Any]] = []
    signals.fence_rejected.connect(lambda **facts: heard.append(facts), weak=False)
    said: dict[str, Any] = {}
    try:
        with distlock(key, backend=alias, ttl=ttl, wait=20) as lease:
            fenced, plain = _read(using, lease, rows)
            print("read")
            input()
            plain.value += 1
            plain.save()
            said = {"fence": lease.fence, "ways": _write(using, lease, fenced)}
    except LockLost:
        said["lost"] = True
    facts = [[each["alias"], each["key"], each["fence"], each["current"]] for each in heard]
    return {**said, "facts": facts, "pks": [str(each["pk"]) for each in heard]}


def _read(using: str, lease: Lease, rows: dict[str, int]) -> tuple[Any, Row]:
    fenced = Account.objects.using(using).fenced(lease).get(pk=rows["fenced"])
    return fenced, Row.objects.using(using).get(pk=rows["plain"])


def _write(using: str, lease: Lease, account: Any) -> dict[str, str]:
    """Write, read again, and remove; say how each of it was refused."""
    account.value += 1
    mine = Account.objects.using(using).fenced(lease)

    def in_a_transaction() -> None:
        with transaction.atomic(using=using):
            Row.objects.using(using).create(name=f"{lease.key} beside")
            account.save()

    ways: dict[str, Callable[[], object]] = {
        "save": account.save,
        "in a transaction": in_a_transaction,
        "update": lambda: mine.filter(pk=account.pk).update(value=account.value),
        "read": lambda: mine.get(pk=account.pk),
        "fenced": lambda: lease.fenced(account),
        "delete": account.delete,
    }
    said = {}
    for name, way in ways.items():
        try:
            said[name] = str(way())
        except FenceRejected as error:
            said[name] = f"rejected by {error.current}"
    return said


def take_over(alias: str, using: str, key: str, rows: dict[str, int]) -> dict[str, Any]:
    """Wait for a line and for the key, then read and write what the one before is at."""
    lock_backends[alias].read(key)
    print("ready")
    input()
    with distlock(key, backend=alias, ttl=30, wait=60) as lease:
        fenced, plain = _read(using, lease, rows)
        fenced.value += 10
        fenced.save()
        plain.value += 10
        plain.save()
        return {"fence": lease.fence, "granted": lease.acquired_at.isoformat()}


def stop_in_a_transaction(
    alias: str, using: str, key: str, row: int, ttl: float, sleep: float
) -> dict[str, Any]:
    """Read in a guarded transaction, wait for a line, and write; say what became of both.

    Args:
        sleep: Seconds that the server is at work for us, while we wait for it; 0: not at all.
    """
    said = {"transaction": "committed", "lease": "held"}
    try:
        with distlock(key, backend=alias, ttl=ttl, wait=20) as lease:
            try:
                with lease.atomic():
                    mine = Row.objects.using(using).get(pk=row)
                    print("read")
                    if sleep:
                        with connections[using].cursor() as cursor:
                            cursor.execute(f"SELECT pg_sleep(%s) /* {key} */", [sleep])
                    input()
                    mine.value += 1
                    mine.save()
            except DatabaseError as error:
                said["transaction"] = type(error).__name__
    except LockLost:
        said["lease"] = "lost"
    return said


def stop_before_a_transaction(
    alias: str, using: str, key: str, row: int, ttl: float
) -> dict[str, str]:
    """Wait for a line before the guard of one lease, and amid that of another; say what they say.

    The second is behind the look at its own deadline by then: the store alone can refuse it.
    """
    backend = lock_backends[alias]
    guard = backend.guards.hold
    said = {}

    def late(*arguments: Any, **more: Any) -> bool:
        print("read")
        input()
        answer = guard(*arguments, **more)
        said["guarded"] = str(answer)
        return answer

    def write(lease: Lease) -> str:
        try:
            with lease.atomic():
                Row.objects.using(using).filter(pk=row).update(value=1)
        except LockLost:
            return "lost"
        return "written"

    with suppress(LockLost), distlock(f"{key}:before", backend=alias, ttl=ttl, wait=20) as before:
        lock = distlock(f"{key}:amid", backend=alias, ttl=ttl, wait=20)
        with suppress(LockLost), lock as amid:
            backend.guards.hold = late  # type: ignore[method-assign]
            said["amid"] = write(amid)
            backend.guards.hold = guard  # type: ignore[method-assign]
            said["before"] = write(before)
    return said


def hold(alias: str, keys: list[str]) -> bool:
    """Wait for some keys, and hold them until told to stop."""
    leases = [distlock(key, backend=alias, ttl=30, wait=60).acquire() for key in keys]
    print("held")
    input()
    return all(lease.release() for lease in leases)


def work(spec: dict[str, Any], name: str, seed: int, rounds: int) -> None:
    """Read, think and write under short leases, and say what became of each round.

    Args:
        spec: The backend, the database, the key, the rows, and how their writes are kept safe.
        name: What the rows of the log begin with: one for each round that was committed.
        seed: What the choice of rows and the length of thoughts follow.
        rounds: How many rounds at most.
    """
    chance = random.Random(seed)
    until = time.monotonic() + SHIFT
    for number in range(rounds):
        if time.monotonic() > until:
            return
        row, thought = chance.choice(spec["rows"]), chance.uniform(0.01, LONGEST_THOUGHT)
        _say(f"done: {_round(spec, row, f'{name}.{number}', thought)}")


def _round(spec: dict[str, Any], row: int, log: str, thought: float) -> str:
    """Do a round, and return what became of it."""
    lock = distlock(f"{spec['key']}:{row}", backend=spec["alias"], ttl=SHORT_TTL, wait=30)
    said = ""
    try:
        with lock as lease:
            HOW[spec["how"]](spec["using"], lease, row, f"{spec['key']}:{row} {log}", thought)
            # Whatever the end of the block says: it is committed.
            said = f"committed {log}"
    except FenceRejected:
        said = "refused"
    except (LockLost, LockNotAcquired) as error:
        said = said or error.code
    except (BackendUnavailable, InternalError, OperationalError, InterfaceError) as error:
        # PostgreSQL tells the end of a silent transaction as an internal error.
        said = type(error).__name__
        connections[spec["using"]].close()
    return said


def _fenced(using: str, lease: Lease, row: int, log: str, thought: float) -> None:
    account = Account.objects.using(using).fenced(lease).get(pk=row)
    _think(thought)
    account.value += 1
    with transaction.atomic(using=using):
        account.save()
        Row.objects.using(using).create(name=log)


def _guarded(using: str, lease: Lease, row: int, log: str, thought: float) -> None:
    with lease.atomic():
        plain = Row.objects.using(using).get(pk=row)
        _think(thought)
        plain.value += 1
        plain.save()
        Row.objects.using(using).create(name=log)


def _plain(using: str, lease: Lease, row: int, log: str, thought: float) -> None:
    """Rely on the lease alone, as most programs do."""
    plain = Row.objects.using(using).get(pk=row)
    _think(thought)
    plain.value += 1
    with transaction.atomic(using=using):
        plain.save()
        Row.objects.using(using).create(name=log)


def _think(seconds: float) -> None:
    _say("thinks")
    time.sleep(seconds)


def _say(line: str) -> None:
    """Print a line in one piece: what other threads log comes by the same way."""
    sys.stdout.write(f"{line}\n")


HOW: dict[str, Callable[[str, Lease, int, str, float], None]] = {
    "fenced": _fenced,
    "guarded": _guarded,
    "plain": _plain,
}
