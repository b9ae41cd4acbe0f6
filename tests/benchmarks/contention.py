"""How long a few processes wait for a key that all of them want, all the time; and who gives up."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction

from django_distlock import LockNotAcquired, distlock
from tests.poolers import pgbouncer

from .candidates import HOT, TTL
from .clients import Tally, Work, hire
from .options import Options
from .report import Result, Sheet, without

PROCESSES = 3
#: Seconds that the key is held for.
WORK_SECONDS = 0.01
#: Seconds after which a process gives up.
WAIT_SECONDS = 3.0
#: A turn that was not granted in time.
GAVE_UP = "gave up"
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}

#: Holds the key for a block.
Hold = Callable[[], AbstractContextManager[Any]]


def ours(alias: str) -> Hold:
    """Return a lock of this package."""
    lock = distlock(HOT, wait=WAIT_SECONDS, ttl=TTL, backend=alias)
    return lambda: lock


def advisory(using: str) -> Hold:
    """Return a lock that PostgreSQL holds to the end of a transaction, without a fence."""

    @contextmanager
    def hold() -> Iterator[None]:
        with transaction.atomic(using), connections[using].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [42])
            yield

    return hold


#: By name. Through PgBouncer in transaction mode nobody can listen, nor hold the lock of a session.
SIDES: Mapping[str, Callable[[], Hold]] = {
    "PostgreSQL": partial(ours, "functions"),
    "PostgreSQL, PgBouncer": partial(ours, "pooled"),
    "MariaDB": partial(ours, "mariadb"),
    "SQLite": partial(ours, "sqlite"),
    "Redis": partial(ours, "redis"),
    "pg_advisory_xact_lock, PgBouncer": partial(advisory, "pooled"),
}


def run(options: Options) -> Result:
    """Let three processes compete on each store, turn by turn."""
    rounds, seconds = max(2, options.rounds // 10), options.contest_seconds
    missing: dict[str, str] = {}
    if "mariadb" not in connections.settings:
        missing["MariaDB"] = "apt-get install mariadb-server-core mariadb-client-core"
    with ExitStack() as stack:
        try:
            pooler = stack.enter_context(pgbouncer())
            os.environ["DISTLOCK_BENCH_POOLER"] = pooler["PORT"]
        except pytest.skip.Exception as error:
            missing.update(dict.fromkeys((each for each in SIDES if "Bouncer" in each), str(error)))
        names = [each for each in SIDES if each not in missing]
        found: dict[str, list[str]] = {name: [] for name in names}
        team = stack.enter_context(hire(PROCESSES))
        for _ in range(rounds):
            random.shuffle(names)
            for name in names:
                found[name] += outcomes(team.turn(PROCESSES, seconds, contender, name))
    figures = {name: figure(found[name]) for name in SIDES if name in found}
    title = (
        f"Contention: ms that a process waits ({PROCESSES} processes, {seconds:g} s, {rounds}"
        f" rounds; {WORK_SECONDS * 1000:g} ms of work, wait={WAIT_SECONDS:g})"
    )
    table = sheet(title + without(missing), "waits", "turns", figures)
    return Result({"figures": figures, "left_out": missing}, [table])


def outcomes(tallies: Sequence[Tally]) -> list[str]:
    """Return what came of each turn."""
    return [each for tally in tallies for each in tally.outcomes.elements()]


def figure(said: Sequence[str]) -> dict[str, float]:
    """Return how many turns there were, and how long they took."""
    waits = sorted(float(each) for each in said if each != GAVE_UP)
    last = len(waits) - 1
    return {
        "turns": len(waits),
        "gave_up": len(said) - len(waits),
        **{name: waits[round(part * last)] if waits else 0.0 for name, part in QUANTILES.items()},
    }


def sheet(
    title: str, what: str, turns: str, figures: Mapping[str, Mapping[str, float]], places: int = 0
) -> Sheet:
    """Return a table of what `figure` returned; `places` are those behind the decimal point."""
    rows = [
        [name, f"{each['turns']:,}", f"{each['gave_up']:,}",
         *(f"{each[one]:,.{places}f}" for one in QUANTILES)]
        for name, each in figures.items()
    ]  # fmt: skip
    return Sheet(title, [what, turns, "gave up", *QUANTILES], rows)


@contextmanager
def contender(_number: int, name: str) -> Iterator[Work]:
    """Take the key that all want, again and again; say how long that took, in milliseconds."""
    hold = SIDES[name]()

    def turn() -> str:
        began = time.monotonic()
        try:
            with hold():
                waited = time.monotonic() - began
                time.sleep(WORK_SECONDS)
        except LockNotAcquired:
            return GAVE_UP
        return f"{waited * 1000:.1f}"

    yield turn
