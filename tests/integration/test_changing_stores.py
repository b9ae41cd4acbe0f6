"""A project moves its locks to another store: the fences of a key keep rising."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_distlock import distlock
from tests.backends import REDIS
from tests.contract.aliases import DATABASE
from tests.contract.redis_clients import single_url

from .databases import migrate

#: How far above the last one a counter is after somebody has raised it so.
AHEAD = 200_000_000_000_000


@contextmanager
def locks_in(store: str, using: str, **configured: Any) -> Iterator[None]:
    """Let the settings of the project say, in one place, where its locks are."""
    backend = (
        {"BACKEND": REDIS, "OPTIONS": {"url": single_url()}}
        if store == "redis"
        else {"BACKEND": DATABASE, "OPTIONS": {"using": using}}
    )
    with override_settings(DISTLOCK={"default": {**backend, **configured}}):
        yield


def fences(key: str, times: int = 3) -> list[int]:
    """Return the fences of so many locks in a row."""
    found = []
    for _ in range(times):
        with distlock(key, wait=0) as lease:
            found.append(lease.fence)
    return found


def raise_fences(*arguments: str) -> None:
    """Run `distlock_fence raise`."""
    call_command("distlock_fence", "raise", *arguments, stdout=StringIO())


def rise(numbers: list[int]) -> bool:
    """Say whether each number is above the one before."""
    return all(before < after for before, after in pairwise(numbers))


def test_floor_is_all_that_a_change_needs(empty: str, key: str) -> None:
    """With `FENCE_FLOOR` the way to a database and back takes no command."""
    migrate(empty)
    found: list[int] = []
    for store in ("redis", "database", "redis", "database"):
        with locks_in(store, empty, FENCE_FLOOR="clock"):
            found += fences(key)
    assert rise(found)


def test_database_without_a_floor_starts_below_redis(sqlite: str, key: str) -> None:
    """Without it the database counts from 1, which the command is for: `--clock`, or `--to`."""
    migrate(sqlite)
    with locks_in("redis", sqlite):
        before = fences(key)
    with locks_in("database", sqlite):
        assert fences(key, 1) == [1]
        raise_fences(key, "--to", str(before[-1]))
        before += fences(key)
        assert before[3:] == [before[2] + 1, before[2] + 2, before[2] + 3]
    with locks_in("redis", sqlite):
        before += fences(key)
    assert rise(before)


@pytest.mark.parametrize(
    ("empty", "far"), [("postgresql", "clock"), ("mysql", "to")], indirect=["empty"]
)
def test_command_raises_all_that_the_database_knows(empty: str, key: str, far: str) -> None:
    """After database → Redis → database, `raise --all` puts each counter above Redis's."""
    migrate(empty)
    keys = [f"{key}-{number}" for number in range(3)]
    with locks_in("database", empty):
        found = {name: fences(name) for name in keys}
        assert list(found.values()) == [[1, 2, 3]] * 3
    with locks_in("redis", empty):
        for name in keys:
            found[name] += fences(name)
    highest = str(max(map(max, found.values())))
    with locks_in("database", empty):
        raise_fences("--all", *(["--clock"] if far == "clock" else ["--to", highest]))
        for name in keys:
            found[name] += fences(name)
    assert all(rise(each) for each in found.values())


def test_command_raises_redis_above_the_clock(sqlite: str, key: str) -> None:
    """Where the database's counters are ahead of the clock, those of Redis are to be raised too."""
    migrate(sqlite)
    prefix = {"KEY_PREFIX": key}
    for raised in (key, "--all"):
        with locks_in("redis", sqlite, **prefix):
            found = fences(key)
        with locks_in("database", sqlite, **prefix):
            ahead = found[-1] + AHEAD
            raise_fences(key, "--to", str(ahead))
            found += fences(key)
            assert found[-1] == ahead + 3
        with locks_in("redis", sqlite, **prefix):
            raise_fences(raised, "--to", str(found[-1]))
            found += fences(key)
        assert found[-3:] == [ahead + 4, ahead + 5, ahead + 6]
        assert rise(found)
