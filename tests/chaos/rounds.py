"""A round: workers, what goes wrong, and what is left behind it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from django.db import connections

from django_distlock.handler import lock_backends
from tests.backends import BACKENDS
from tests.contract.locking import eventually
from tests.shop.models import Account, Row

from .crew import Crew, Member
from .faults import Chaos, sessions
from .history import Findings, Line, Writer, examined, read, saved_rows
from .servers import Ground

#: Seconds within which a worker has ended what it does, however slow the machine and the store.
HANGS = 60.0
#: Seconds until what nobody holds is free: the longest ttl, the grace, and a little.
FREE = 4.0
#: Sessions that a worker may keep open beside those of its threads: its lock connections, and those
#: of the listener and of rows.
MOST_SESSIONS = 8
#: Seconds until a server knows that a client is gone.
GONE = 5.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is the same in all rounds of a store.

    Attributes:
        alias: The lock backend.
        variable: The environment's name for the address of its server; "": it has none.
        faults: Which of `summary.FAULTS`.
        workers: How many processes work at once, of so many `threads` each.
        keys: How many keys they take.
        rest: Seconds between two faults, on average.
        ground: What they stand on.
        until_first: Whether a round ends with the first thing that must never be.
    """

    alias: str
    variable: str
    faults: set[str]
    workers: int
    threads: int
    keys: int
    rest: float
    ground: Ground
    until_first: bool = False


def run(plan: Plan, seconds: float, chance: random.Random, place: Path) -> Findings:
    """Let workers work for so many seconds, end them, and look at what they leave and wrote."""
    alias, faults = plan.alias, plan.faults
    keys = [f"chaos:{number}" for number in range(plan.keys)]
    # In the file of the locks there are no locks inside of transactions.
    rows = BACKENDS[alias].using or "default" if plan.variable else ""
    spec = {
        "alias": alias, "rows": rows, "keys": keys, "seed": chance.random(),
        "threads": plan.threads, "signals": "signals" in faults, "clocks": "clocks" in faults,
    }  # fmt: skip
    if rows:
        Account.objects.using(rows).bulk_create([Account(name=key) for key in keys])
    pooler = int(plan.ground.pooler.facts["PORT"]) if plan.ground.pooler else 0
    crew, found = Crew(plan.workers, place, spec, plan.variable, pooler), Findings()
    try:
        crew.hear("ready", HANGS)
        write = Writer(place / "chaos.jsonl", "chaos")
        chaos = Chaos(alias, faults, crew, plan.ground, chance, write)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.2, 1.8) * plan.rest)
            chaos.act()
            # All that operators did is written: they are this thread.
            if plan.until_first and (found := examined(read(place))).broken:
                return found
        chaos.settle()
        crew.say("stop")
        _hang(found, crew.hear("idle", HANGS))
        time.sleep(FREE)
        _find_left(found, plan, crew)
        ports = crew.ports
        crew.say("end")
        _hang(found, crew.hear("", HANGS))
    finally:
        crew.close()
    if plan.variable and not eventually(lambda: not sessions(alias, ports), GONE):
        found.never("session left", f"{sessions(alias, ports)} behind the end of all workers")
    lines = read(place)
    for line in lines:
        for what in ("thread left", "lease left"):
            for each in line.get(what, ()):
                found.never(what, f"{line['who']}: {each}")
    for mark in _lost(lines, rows):
        found.never("row lost", mark)
    return examined(lines).with_more(found)


def _find_left(found: Findings, plan: Plan, crew: Crew) -> None:
    if plan.alias != "memory":
        for record in lock_backends[plan.alias].list(limit=1000).records:
            found.never("lease left", f"{record.key}: {record}")
    most = (MOST_SESSIONS + plan.threads) * plan.workers
    if plan.variable and (number := len(sessions(plan.alias, crew.ports))) > most:
        found.never("session left", f"{number} of {plan.workers} workers")


def _hang(found: Findings, members: list[Member]) -> None:
    for member in members:
        found.never("hung", f"{member.name}:\n{member.stacks()}")


def _lost(lines: list[Line], using: str) -> Iterator[str]:
    """Yield the rows that were saved without an error, and are not there."""
    saved = saved_rows(lines)
    if saved:
        there = set(Row.objects.using(using).values_list("name", flat=True))
        Row.objects.using(using).all().delete()
        yield from (mark for mark in saved if mark not in there)
    if using:
        Account.objects.using(using).all().delete()
        connections[using].close()
