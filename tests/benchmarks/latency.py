"""Time per operation: of one client, on an idle server, beside peers and the floor."""

from __future__ import annotations

from .candidates import CANDIDATES
from .options import Options
from .race import race
from .report import Result
from .timing import Comparison

COMPARISONS = (
    # The same driver on both sides: what the functions cost.
    *(
        Comparison(
            what=f"pair, {way}: functions / floor", of=f"functions/{way}/pair",
            to=f"floor/{way}/pair", at_most=1.35,
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
        what="20 keys of a transaction: transaction_lock() / pg_advisory_xact_lock in one SELECT",
        of="transaction/django/20 keys", to="advisory/django/20 keys", at_most=1.3,
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
    """Measure what locks in a database, or in memory."""
    done = race(CANDIDATES, options)
    found = done.samples.ratios(COMPARISONS)
    # A ratio to a constant.
    of = Comparison(
        what="memory, backend: pair / 15 µs", of="memory/backend/pair", to="15 us", at_most=1.0
    )
    medians = done.samples.medians(of.of)
    found.append(of.ratio(medians, [MEMORY_PAIR_US] * len(medians)))
    return done.result("Latency", options, found)
