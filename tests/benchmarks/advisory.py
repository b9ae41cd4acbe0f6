"""Locks of PostgreSQL sessions, beside django-pglock, which takes the same kind of lock.

A lock has a session of its own. Pairs use one that is kept as a spare, so no connection is opened
for them; what the first lock of a process pays, or one beside others, is measured apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import connections

from django_distlock import lock_backends

from .candidates import KEYS, locks_on, pglock, waist
from .floor import TRIP, as_django_opens, by_django
from .options import Options
from .race import Candidate, race
from .report import Result
from .timing import Comparison, Subject

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
    return done.result("Advisory", options, done.samples.ratios(COMPARISONS))


def fresh() -> Iterator[list[Subject]]:
    """Give an acquire that has to open a session: a process's first, or one without a spare."""
    # Of a backend of its own, or the others' spares would be closed as well.
    backend: Any = lock_backends["advisory-fresh"]
    pairs = waist(backend, KEYS)
    yield [
        Subject(
            "advisory/fresh",
            {
                "acquire": pairs.acquire,
                "release": pairs.release,
                "close": backend._sessions.close_all,
            },
        )
    ]


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
