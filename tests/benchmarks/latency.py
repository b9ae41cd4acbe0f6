"""Time per operation: of one client, on an idle server, beside peers and the floor."""

from __future__ import annotations

from contextlib import ExitStack

from .candidates import CANDIDATES, Unavailable, ready
from .options import Options
from .report import Result, ratios, times
from .timing import Comparison, Subject, measure

COMPARISONS = (
    # The same driver on both sides: what the functions cost.
    *(
        Comparison(
            what=f"pair, {way}: functions / floor", of=f"functions/{way}/pair",
            to=f"floor/{way}/pair", at_most=1.4,
        )
        for way in ("driver", "prepared")
    ),
    # And what Django and this package cost around them.
    *(
        Comparison(
            what=f"pair, {level}: functions / floor, {way}", of=f"functions/{level}/pair",
            to=f"floor/{way}/pair",
        )
        for level, way in (
            ("backend", "django"), ("backend", "driver"), ("lock", "driver"), ("block", "driver")
        )
    ),
    *(
        Comparison(
            what=f"pair, {level}: ORM / functions", of=f"orm/{level}/pair",
            to=f"functions/{level}/pair", at_least=6,
        )
        for level in ("backend", "lock", "block")
    ),
    Comparison(
        what="pair, block: functions / django-pglock", of="functions/block/pair",
        to="pglock/block/pair",
    ),
    *(
        Comparison(
            what=f"functions, {level}: acquire / losing attempt", of=f"functions/{level}/acquire",
            to=f"functions/{level}/lose", at_least=5,
        )
        for level in ("driver", "prepared", "backend", "lock")
    ),
    *(
        Comparison(
            what=f"losing attempt, {level}: functions / read, {way}",
            of=f"functions/{level}/lose", to=f"floor/{way}/read", at_most=1.5,
        )
        for level, way in (
            ("driver", "driver"), ("prepared", "prepared"), ("backend", "django"),
            ("lock", "django"),
        )
    ),
    Comparison(
        what="extend, backend: functions / floor's upsert", of="functions/backend/extend",
        to="floor/driver/upsert",
    ),
    Comparison(
        what="pair, backend: SQLite / its floor", of="sqlite/backend/pair",
        to="sqlite-floor/driver/pair",
    ),
    Comparison(
        what="pair, backend: MariaDB / its floor", of="mariadb/backend/pair",
        to="mariadb-floor/driver/pair",
    ),
)  # fmt: skip

#: A target that is no ratio: microseconds of a pair in the memory backend.
MEMORY_PAIR_US = 15.0


def run(options: Options) -> Result:
    """Measure all candidates that are there, turn by turn."""
    subjects: list[Subject] = []
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for name in CANDIDATES:
            try:
                subjects += stack.enter_context(ready(name))
            except Unavailable as error:
                missing[name] = str(error)
        samples = measure(subjects, rounds=options.rounds, slice_ms=options.slice_ms)
    figures = samples.figures()
    found = [
        each.ratio(samples.medians(each.of), samples.medians(each.to))
        for each in COMPARISONS
        if each.of in figures and each.to in figures
    ]
    # A ratio to a constant.
    of = Comparison(
        what="memory, backend: pair / 15 µs", of="memory/backend/pair", to="15 us", at_most=1.0
    )
    medians = samples.medians(of.of)
    found.append(of.ratio(medians, [MEMORY_PAIR_US] * len(medians)))
    left_out = "".join(f"; without {name} ({why})" for name, why in missing.items())
    return Result(
        {"figures": figures, "ratios": found, "left_out": missing},
        [
            times(f"Latency: one client, {options.rounds} rounds{left_out}", figures),
            ratios("Latency: medians of the rounds' ratios", found),
        ],
    )
