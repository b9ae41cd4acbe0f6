"""What an operation costs among many counters and live locks.

Each number of keys has a database of its own, all on one server and asked in turn. In each, so many
keys are held, each with its counter, and a tenth as many have a counter alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from django_distlock import lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.records import Grant

from .candidates import NoLock, waist
from .databases import FREE, LIVE, ask, create, drop, fill, filled_grant, take
from .options import Options
from .report import Result, ratios, times
from .timing import Comparison, Samples, Subject, measure

FEWEST_FREE = 1000
OPERATIONS = ("pair", "acquire", "new-pair", "extend", "lose", "read")


def databases(options: Options) -> list[str]:
    """Return the databases that this takes for itself."""
    return [name_of(keys) for keys in options.keys]


def run(options: Options) -> Result:
    """Fill the databases, then measure in all of them turn by turn."""
    try:
        subjects: list[Subject] = []
        for keys in options.keys:
            create(name_of(keys))
            free = free_beside(keys)
            fill(name_of(keys), locks=keys, free=free)
            subjects += among(name_of(keys), lock_backends[name_of(keys)], keys, free)
        # Or the largest would be measured while its own pages are still written.
        ask("default", "CHECKPOINT")
        samples = measure(subjects, rounds=options.rounds, slice_ms=options.slice_ms)
    finally:
        for keys in options.keys:
            drop(name_of(keys))
    return compared("Scale", samples, options.keys)


def compared(title: str, samples: Samples, numbers: Sequence[int]) -> Result:
    """Lay out what operations cost among so many keys each, and among the fewest."""
    figures = samples.figures()
    fewest, *more = numbers
    found = samples.ratios(
        Comparison(
            what=f"{operation}: {keys:,} keys / {fewest:,}",
            of=f"{name_of(keys)}/{operation}", to=f"{name_of(fewest)}/{operation}", at_most=1.2,
        )
        for operation in OPERATIONS
        for keys in more
    )  # fmt: skip
    return Result(
        {"figures": figures, "ratios": found},
        [
            times(f"{title}: counters and live locks", figures),
            ratios(f"{title}: medians of the rounds' ratios", found),
        ],
    )


def name_of(keys: int) -> str:
    """Return what the figures among so many keys are called."""
    return f"keys_{keys}"


def free_beside(keys: int) -> int:
    """Return how many keys have a counter alone, beside so many that are held."""
    return max(FEWEST_FREE, keys // 10)


def among(name: str, backend: BaseLockBackend, keys: int, free: int) -> list[Subject]:
    """Return operations on keys taken at random among many.

    Args:
        name: What figures start with.
        keys: How many are held.
        free: How many have a counter alone.
    """
    template, new = take(backend, "template"), count()
    live = _by(lambda: f"{LIVE}:{random.randint(1, keys)}")
    old = waist(backend, _by(lambda: f"{FREE}:{random.randint(1, free)}"), live)
    fresh = waist(backend, _by(lambda: f"new:{next(new)}:{random.getrandbits(32)}"))

    def extend() -> None:
        grant = filled_grant(template, random.randint(1, keys))
        if not isinstance(backend.extend(grant), Grant):
            raise NoLock(f"{grant.key!r} was not extended")

    def read() -> None:
        key = next(live)
        if backend.read(key) is None:
            raise NoLock(f"{key!r} was not found")

    news = {"new-acquire": fresh.acquire, "new-release": fresh.release}
    return [
        *old.pairs(name),
        Subject(name, news, "new-pair"),
        Subject(name, {"extend": extend}),
        Subject(name, {"read": read}),
    ]


def _by(make: Callable[[], str]) -> Iterator[str]:
    while True:
        yield make()
