"""Pairs per second of several processes: each on keys of its own, and all on one.

Every client keeps one connection. On keys of their own all succeed; on the hot key whoever finds it
taken tries again at once, and both the grants and the attempts are counted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from typing import Any

from django_distlock import lock_backends

from .candidates import BareFunctions, Operations, calls, waist
from .clients import Prepare, Tally, Work, hire
from .floor import Floor, as_django_opens, make_table, pair_steps
from .options import Options
from .report import Result, Sheet, ratios
from .timing import Comparison

DONE, LOST = "done", "lost"
OWN, HOT = "own keys", "hot key"
KEYS_EACH = 16


def run(options: Options) -> Result:
    """Measure what locks in a database."""
    make_table("default")
    return compete("Throughput", options, candidates(), _comparisons)


def compete(
    title: str,
    options: Options,
    candidates: Mapping[str, Prepare],
    comparisons: Callable[[int], Iterable[Comparison]],
) -> Result:
    """Let every number of clients do the work of every candidate, turn by turn.

    Args:
        comparisons: What to compare, for a number of clients.
    """
    rounds = max(2, options.rounds // 6)
    found: dict[str, list[dict[str, float]]] = {}
    with hire(max(options.clients)) as team:
        for clients in options.clients:
            for number in range(-1, rounds):
                turns = [(name, mode) for name in candidates for mode in (OWN, HOT)]
                random.shuffle(turns)
                for name, mode in turns:
                    # The first round warms up, and need not be long.
                    seconds = options.seconds if number >= 0 else options.seconds / 4
                    said = _rates(team.turn(clients, seconds, candidates[name], name, mode))
                    if number >= 0:
                        found.setdefault(f"{name}/{mode}/{clients}", []).append(said)
    figures = {
        each: _figure(found[each])
        for clients in options.clients
        for mode in (OWN, HOT)
        for name in candidates
        if (each := f"{name}/{mode}/{clients}")
    }
    ratios_found = [
        each.ratio(figures[each.of]["rounds_per_second"], figures[each.to]["rounds_per_second"])
        for clients in options.clients
        for each in comparisons(clients)
        if each.of in figures and each.to in figures
    ]
    return Result(
        {"figures": figures, "ratios": ratios_found},
        [_sheet(title, figures), ratios(f"{title}: medians of the rounds' ratios", ratios_found)],
    )


def candidates() -> dict[str, Prepare]:
    """Return the work of each candidate that is there."""
    peers: dict[str, Prepare] = {"pglock": pglock} if find_spec("pglock") else {}
    return {
        "floor": floor, "functions, driver": functions, "functions": lock,
        "orm": lock, **peers,
    }  # fmt: skip


def _comparisons(clients: int) -> Iterator[Comparison]:
    own = f"{OWN}/{clients}"
    # Only for this number was one agreed upon.
    target = 0.8 if clients == 8 else None
    # The same driver on both sides; and with all that Django and this package do around it.
    yield Comparison(
        what=f"{clients_of(clients)}, own keys: functions, driver / floor",
        of=f"functions, driver/{own}", to=f"floor/{own}", at_least=target,
    )  # fmt: skip
    yield Comparison(
        what=f"{clients_of(clients)}, own keys: functions / floor", of=f"functions/{own}",
        to=f"floor/{own}",
    )  # fmt: skip
    for peer in ("orm", "pglock"):
        yield Comparison(
            what=f"{clients_of(clients)}, own keys: functions / {peer}", of=f"functions/{own}",
            to=f"{peer}/{own}",
        )  # fmt: skip
    for peer in ("orm", "pglock"):
        yield Comparison(
            what=f"{clients_of(clients)}, hot key: functions / {peer}",
            of=f"functions/{HOT}/{clients}", to=f"{peer}/{HOT}/{clients}",
        )  # fmt: skip


def clients_of(number: int) -> str:
    """Say how many clients there are."""
    return "1 client" if number == 1 else f"{number} clients"


def _rates(tallies: list[Tally]) -> dict[str, float]:
    return {
        outcome: sum(each.outcomes[outcome] / each.seconds for each in tallies)
        for outcome in (DONE, LOST)
    }


def _figure(rounds: list[dict[str, float]]) -> dict[str, Any]:
    done = [each[DONE] for each in rounds]
    return {
        "per_second": statistics.median(done),
        "least": min(done),
        "most": max(done),
        "lost_per_second": statistics.median(each[LOST] for each in rounds),
        "rounds_per_second": done,
    }


def _sheet(title: str, figures: Mapping[str, Mapping[str, Any]]) -> Sheet:
    names = ("per_second", "least", "most", "lost_per_second")
    rows = [[name, *(f"{each[one]:,.0f}" for one in names)] for name, each in figures.items()]
    header = ["pairs per second, by clients", "median", "least", "most", "losing attempts"]
    return Sheet(f"{title}: all clients together", header, rows)


# What the clients do


def keys_of(number: int, mode: str) -> list[str]:
    """Return the keys that a client takes in turn."""
    return ["hot"] if mode == HOT else [f"client-{number}:{each}" for each in range(KEYS_EACH)]


def in_turn(made: Operations) -> Work:
    """Return what takes the next key and gives it back, or loses it."""

    def work() -> str:
        if not made.attempt():
            return LOST
        made.release()
        return DONE

    return work


@contextmanager
def lock(number: int, alias: str, mode: str) -> Iterator[Work]:
    """Take and give back through a lock backend."""
    yield in_turn(waist(lock_backends[alias], keys_of(number, mode)))


@contextmanager
def functions(number: int, _name: str, mode: str) -> Iterator[Work]:
    """Call the server functions over the floor's own connection."""
    prefix = lock_backends["functions"].key_prefix
    with as_django_opens("default") as execute:
        yield in_turn(calls(BareFunctions("default", execute), prefix, keys_of(number, mode)))


@contextmanager
def floor(number: int, _name: str, mode: str) -> Iterator[Work]:
    """Write a row and go to the server once more."""
    made = Floor("default", "functions", f"floor:template-{number}")
    with as_django_opens("default") as execute:
        steps = pair_steps(made, execute, keys_of(number, mode))
        upsert, trip = steps["upsert"], steps["trip"]

        def work() -> str:
            upsert()
            trip()
            return DONE

        yield work


@contextmanager
def pglock(number: int, _name: str, mode: str) -> Iterator[Work]:
    """Take and give back an advisory lock."""
    module: Any = import_module("pglock")
    keys = cycle(keys_of(number, mode))

    def work() -> str:
        with module.advisory(next(keys), using="default", timeout=0) as acquired:
            return DONE if acquired else LOST

    yield work
