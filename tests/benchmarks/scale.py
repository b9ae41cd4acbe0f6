"""What an operation costs among many counters and live locks.

Each number of keys has a database of its own, all on one server and asked in turn. In each, so many
keys are held, each with its counter, and a tenth as many have a counter alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from django_distlock import lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.host import current_holder

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
            subjects += Among(name_of(keys), lock_backends[name_of(keys)], keys, free).subjects()
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
    found = []
    for operation in OPERATIONS:
        for keys in more:
            flat = Comparison(
                what=f"{operation}: {keys:,} keys / {fewest:,}",
                of=f"{name_of(keys)}/{operation}", to=f"{name_of(fewest)}/{operation}", at_most=1.2,
            )  # fmt: skip
            found.append(flat.ratio(samples.medians(flat.of), samples.medians(flat.to)))
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


class Among:
    """Operations on keys taken at random among many.

    Args:
        name: What figures start with.
        keys: How many are held.
        free: How many have a counter alone.
    """

    def __init__(self, name: str, backend: BaseLockBackend, keys: int, free: int):
        self._name = name
        self._backend = backend
        self._keys, self._free = keys, free
        self._new = count()
        self._holder = current_holder()
        self._grant = take(backend, "template")

    def subjects(self) -> list[Subject]:
        """Return what is measured."""
        return [
            Subject(self._name, {"acquire": self._acquire, "release": self._release}, "pair"),
            Subject(
                self._name,
                {"new-acquire": self._acquire_new, "new-release": self._release},
                "new-pair",
            ),
            Subject(self._name, {"extend": self._extend}),
            Subject(self._name, {"lose": self._lose}),
            Subject(self._name, {"read": self._read}),
        ]

    def _live(self) -> int:
        return random.randint(1, self._keys)

    def _acquire(self) -> None:
        self._take(f"{FREE}:{random.randint(1, self._free)}")

    def _acquire_new(self) -> None:
        self._take(f"new:{next(self._new)}:{random.getrandbits(32)}")

    def _take(self, key: str) -> None:
        answer = self._backend.acquire(key, new_token(), 30, self._holder)
        if not isinstance(answer, Grant):
            raise RuntimeError(f"{key!r} was not granted: {answer}")
        self._grant = answer

    def _release(self) -> None:
        if self._backend.release(self._grant) is not True:
            raise RuntimeError(f"{self._grant.key!r} was not released")

    def _extend(self) -> None:
        grant = filled_grant(self._grant, self._live())
        if not isinstance(self._backend.extend(grant), Grant):
            raise RuntimeError(f"{grant.key!r} was not extended")

    def _lose(self) -> None:
        key = f"{LIVE}:{self._live()}"
        answer = self._backend.acquire(key, new_token(), 30, self._holder)
        if not isinstance(answer, Contended):
            raise RuntimeError(f"{key!r} was not contended")

    def _read(self) -> None:
        key = f"{LIVE}:{self._live()}"
        if self._backend.read(key) is None:
            raise RuntimeError(f"{key!r} was not found")
