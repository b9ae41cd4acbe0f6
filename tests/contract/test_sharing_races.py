"""Processes that share a key, some of which are killed, or stand still: never too many at once."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from django_distlock import Lease, LockNotAcquired
from tests.backends import Registered
from tests.processes import Process, spawn

from .helpers import PATIENCE
from .locking import lock_of
from .sharing_workers import SECONDS_OF_A_HOLDING, TTL

PERMITS = 5
Size = tuple[int, int, int]
#: Seconds in which a lease is over, and its key free.
PAST = TTL + 1.2
#: How many processes hold the key, how often, and how many of them are killed and stand still.
SIZES = [
    pytest.param((8, 12, 3), id="quick"),
    pytest.param((16, 625, 100), id="full", marks=pytest.mark.nightly),
]


@pytest.mark.aliases("postgres", "mariadb", "sqlite", "redis")
@pytest.mark.parametrize("size", SIZES)
def test_never_more_than_the_permits(
    registered: Registered, key: str, tmp_path: Path, size: Size
) -> None:
    """Within their deadlines; and all permits are there again behind the crashes."""
    held = held_by_many(registered, key, tmp_path / "held", PERMITS, size)
    assert most_at_once(held) <= PERMITS
    assert most_at_once(held) > 1, "they did not hold it together"
    lock = lock_of(registered, key, permits=PERMITS, wait=TTL + 20)
    leases = [lock.acquire() for _ in range(PERMITS)]
    with pytest.raises(LockNotAcquired):
        lock_of(registered, key, permits=PERMITS, wait=0).acquire()
    assert all(map(Lease.release, leases))


@pytest.mark.aliases("postgres", "redis")
@pytest.mark.parametrize("size", SIZES)
def test_readers_and_writers(registered: Registered, key: str, tmp_path: Path, size: Size) -> None:
    """A writer is alone, and its fence is above that of every reader before."""
    many, times, faults = size
    size = (many, min(times // 2, 60), faults)
    held = held_by_many(registered, key, tmp_path / "held", None, size)
    readers = [each for each in held if not each[1]]
    for fence, alone, began, ended in held:
        if not alone:
            continue
        others = [each for each in held if each[0] != fence]
        assert not [each for each in others if each[2] < ended and began < each[3]]
        assert all(each[0] < fence for each in readers if each[3] <= began)
    assert 0 < len(readers) < len(held)


Held = tuple[int, bool, float, float]


def held_by_many(
    registered: Registered, key: str, path: Path, permits: int | None, size: Size
) -> list[Held]:
    """Let processes hold a key; return each holding: its fence, whether alone, from when to when.

    What was killed held it until its deadline.
    """
    chance, stopped = random.Random(), list[Process]()
    many, times, faults = size
    with ExitStack() as stack:

        def start() -> Process:
            target = "tests.contract.sharing_workers:hold"
            worker = spawn(target, registered.alias, key, str(path), permits, times)
            return stack.enter_context(worker)

        workers = [start() for _ in range(many)]
        for each in workers:
            each.wait_for("ready", PATIENCE)
        for each in workers:
            each.send("go")
        for number in range(faults):
            if not went_on(path):
                # One may stand still amid a transaction, in the way of all others.
                for each in stopped:
                    each.go_on()
            victim = chance.choice(workers)
            if number % 2:
                victim.stop()
                stopped.append(victim)
                continue
            victim.kill()
            workers.remove(victim)
            stopped = [each for each in stopped if each is not victim]
            fresh = start()
            fresh.wait_for("ready", PATIENCE)
            fresh.send("go")
            workers.append(fresh)
        time.sleep(PAST)
        for each in stopped:
            each.go_on()
        patience = 900 + times * SECONDS_OF_A_HOLDING
        assert sum(each.result(patience) for each in workers) == times * many
    found: dict[int, Held] = {}
    for line in path.read_text().splitlines():
        fence, alone, began, ended = json.loads(line)
        found[fence] = (fence, alone, began, ended)
    return sorted(found.values(), key=lambda each: each[2])


def went_on(path: Path) -> bool:
    """Wait until some have held the key; say whether they have in time."""
    before, give_up = lines_of(path), time.monotonic() + PAST
    while lines_of(path) < before + 2:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True


def lines_of(path: Path) -> int:
    """Return how many lines a file has."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def most_at_once(held: list[Held]) -> int:
    """Return how many of these overlap at most."""
    ends = [(each[3], -1) for each in held]
    steps = sorted([*ends, *((each[2], 1) for each in held)])
    most = now = 0
    for _at, step in steps:
        now += step
        most = max(most, now)
    return most
