"""Locks of PostgreSQL sessions, beside django-pglock, which takes the same kind of lock.

A lock has a session of its own. Pairs use one that is kept as a spare, so no connection is opened
for them; what the first lock of a process pays, or one beside others, is measured apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import cycle
from typing import Any

from django.db import connections

from django_distlock import lock_backends

from .candidates import HOT, KEYS, Waist, held_elsewhere, locks_on
from .databases import ask
from .floor import TRIP, as_django_opens, by_django
from .options import Options
from .race import Candidate, Unavailable, race
from .report import Result
from .timing import Comparison, Step, Subject

COMPARISONS = (
    # The same session again and again on both sides; one of them counts a fence.
    Comparison(
        what="pair: backend / django-pglock", of="advisory/backend/pair", to="pglock/lock/pair",
        at_most=1.3,
    ),
    Comparison(
        what="pair: block / django-pglock, block", of="advisory/block/pair",
        to="pglock/block/pair", at_most=1.3,
    ),
    *(
        Comparison(
            what=f"{step}: backend / django-pglock", of=f"advisory/backend/{step}",
            to=f"pglock/lock/{step}",
        )
        for step in ("acquire", "release", "lose")
    ),
    *(
        Comparison(
            what=f"pair: backend / two round trips, {way}", of="advisory/backend/pair",
            to=f"floor/{way}/pair",
        )
        for way in ("driver", "django")
    ),
    Comparison(
        what="acquire: with a fresh connection / with a spare", of="advisory/fresh/acquire",
        to="advisory/backend/acquire",
    ),
    Comparison(
        what="acquire: with a fresh connection / Django's connect", of="advisory/fresh/acquire",
        to="floor/connect/open",
    ),
)  # fmt: skip


def run(options: Options) -> Result:
    """Measure one client, on an idle server."""
    candidates: dict[str, Candidate] = {
        "advisory": lambda: locks_on("advisory", "advisory"),
        "advisory-fresh": fresh,
        "pglock": pglock,
        "floor": floor,
    }
    done = race(candidates, options)
    return done.result("Advisory", options, done.ratios(COMPARISONS))


def fresh() -> Iterator[list[Subject]]:
    """Give an acquire that has to open a session: a process's first, or one without a spare."""
    # Of a backend of its own, or the others' spares would be closed as well.
    backend: Any = lock_backends["advisory-fresh"]
    waist = Waist(backend, KEYS)
    yield [
        Subject(
            "advisory/fresh",
            {
                "acquire": waist.acquire,
                "release": waist.release,
                "close": backend._sessions.close_all,
            },
        )
    ]


def pglock() -> Iterator[list[Subject]]:
    """Give django-pglock's locks as its documentation takes them: at once, or not."""
    try:
        module: Any = import_module("pglock")
    except ImportError:
        raise Unavailable("pip install django-pglock") from None

    def of(key: str) -> Any:
        return module.advisory(key, using="default", timeout=0)

    turns, made = cycle(KEYS), cycle([of(key) for key in KEYS])
    held: list[Any] = []

    def acquire() -> None:
        held[:] = [next(made)]
        if not held[0].acquire():
            raise RuntimeError("pglock: not granted")

    def release() -> None:
        held[0].release()

    def lose() -> None:
        if of(HOT).acquire():
            raise RuntimeError(f"pglock: {HOT!r} was not contended")

    def block() -> None:
        with of(next(turns)) as granted:
            if not granted:
                raise RuntimeError("pglock: not granted")

    prove(acquire, release)
    with held_elsewhere(module.advisory(HOT).int_lock_id):
        yield [
            Subject("pglock/lock", {"acquire": acquire, "release": release}, "pair"),
            Subject("pglock/lock", {"lose": lose}),
            Subject("pglock/block", {"pair": block}),
        ]


def prove(acquire: Step, release: Step) -> None:
    """See that a pair takes an advisory lock of the session, and gives it back."""
    before = _locks()
    acquire()
    if _locks() != before + 1:
        raise RuntimeError("the server knows of no lock")
    release()
    if _locks() != before:
        raise RuntimeError("it was not given back")


def _locks() -> int:
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    return int(ask("default", held)[0][0])


def floor() -> Iterator[list[Subject]]:
    """Give the two round trips that a pair needs at least, and a connection of Django's."""
    opened: list[Any] = []

    def connect() -> None:
        opened.append(connections["default"].copy())
        opened[-1].ensure_connection()

    def close() -> None:
        opened.pop().close()

    with as_django_opens("default") as driver, by_django("default") as django:
        yield [
            *(
                Subject(f"floor/{way}", {"trip": step, "second-trip": step}, "pair")
                for way, step in (
                    ("driver", lambda: driver(TRIP, ())),
                    ("django", lambda: django(TRIP, ())),
                )
            ),
            Subject("floor/connect", {"open": connect, "close": close}),
        ]
