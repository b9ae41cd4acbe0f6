"""From the release of a key to its grant to who waits for it in another process.

The clock is the machine's monotonic one, which all of its processes share: whoever releases notes
the time just before, and whoever waited just behind its grant.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from itertools import cycle
from typing import Any

from django.db import connections

from . import waiting
from .candidates import KEYS
from .clients import PATIENCE_SECONDS, Partner, hired
from .options import Options
from .race import Unavailable
from .report import Result, Sheet, ratios, target, without
from .sides import POLLING_SECONDS, SIDES, Side
from .timing import Comparison, Samples

#: Hands a key over once; returns the nanoseconds that it took.
HandOff = Callable[[str], int]

#: Seconds from when somebody is seen to wait to the release. As different as an interval of polling
#: is long, or who polls would be met at the same place of it each time.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.03, 0.03 + POLLING_SECONDS
#: Seconds between two looks whether somebody waits.
LOOK_SECONDS = 0.002
OURS = ("functions", "orm", "redis")

#: What the median of ours shall not exceed.
MEDIAN_MS = 5.0
COMPARISONS = (
    *(
        Comparison(
            what=f"{name} / pg_advisory_lock", of=f"{name}/processes",
            to="pg_advisory_lock/processes", at_most=3.0 if name == "functions" else None,
        )
        for name in ("functions", "orm", "pg-polling")
    ),
    # No grant that outlives a crash can do without the write.
    Comparison(
        what="functions / pg_advisory_lock and a durable write", of="functions/processes",
        to="pg_advisory_lock, durable/processes",
    ),
    Comparison(
        what="redis / python-redis-lock", of="redis/processes", to="python-redis-lock/processes",
        at_most=1.5,
    ),
    Comparison(what="redis / redis-py's Lock", of="redis/processes", to="redis-py/processes"),
)  # fmt: skip


def run(options: Options) -> Result:
    """Let every candidate hand over, turn by turn; then count what those who wait send."""
    with ExitStack() as stack:
        (partner,) = stack.enter_context(hired())
        candidates, missing = _candidates(partner, stack)
        samples = _measure(candidates, options)
        partner.begin(leave)
        partner.result()
    figures = samples.figures()
    found = samples.ratios(COMPARISONS)
    targets = [
        target(
            f"{name}: milliseconds between processes, median",
            figures[f"{name}/processes"]["median_us"] / 1000, at_most=MEDIAN_MS,
        )
        for name in OURS
    ]  # fmt: skip
    result = Result(
        {"figures": figures, "ratios": found, "targets": targets, "left_out": missing},
        [_sheet(figures, missing), ratios("Hand-off: medians of the rounds' ratios", found)],
    )
    sent = waiting.run(options)
    result.data["waiting"] = sent.data
    result.sheets += sent.sheets
    return result


def _candidates(partner: Partner, stack: ExitStack) -> tuple[dict[str, HandOff], dict[str, str]]:
    candidates: dict[str, HandOff] = {}
    missing: dict[str, str] = {}
    for name, opened in SIDES.items():
        try:
            side = stack.enter_context(opened())
        except Unavailable as error:
            missing[name] = str(error)
        else:
            candidates[f"{name}/processes"] = partial(_between_processes, side, partner, name)
    return candidates, missing


def _measure(candidates: Mapping[str, HandOff], options: Options) -> Samples:
    """Give everybody a turn in each round, behind one that does not count."""
    samples, keys = Samples(), cycle(KEYS)
    order = list(candidates)
    for number in range(-1, options.rounds):
        random.shuffle(order)
        for name in order:
            taken = [candidates[name](next(keys)) for _ in range(options.handoffs)]
            if number >= 0:
                samples.add(name, taken)
    return samples


# This process holds, the other one waits


def _between_processes(holder: Side, partner: Partner, name: str, key: str) -> int:
    holder.take(key)
    partner.begin(wait_once, name, key)
    _until(holder.has_waiter)
    time.sleep(_pause())
    released_at = time.monotonic_ns()
    holder.release()
    granted_at: int = partner.result()
    return granted_at - released_at


def wait_once(name: str, key: str) -> int:
    """Wait for a key in this process; return when it was granted."""
    side = _side(name)
    side.wait(key)
    granted_at = time.monotonic_ns()
    side.release()
    return granted_at


_open = ExitStack()


@cache
def _side(name: str) -> Side:
    """Return this process's own, which is there for as long as the process."""
    opened: AbstractContextManager[Side] = SIDES[name]()
    return _open.enter_context(opened)


def leave() -> None:
    """Close what this process has opened."""
    _open.close()
    connections.close_all()


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > give_up:
            raise RuntimeError(f"nobody waits within {PATIENCE_SECONDS} s")
        time.sleep(LOOK_SECONDS)


def _pause() -> float:
    return random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE)


# What people see


def _sheet(figures: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str]) -> Sheet:
    rows = [
        [name, *(f"{figure[each] / 1000:,.2f}" for each in ("median_us", "p90_us", "p99_us")),
         f"{figure['operations']:,}"]
        for name, figure in figures.items()
    ]  # fmt: skip
    title = f"Hand-off: from the release to the grant (<= {MEDIAN_MS:g} ms is aimed at)"
    return Sheet(
        f"{title}{without(missing)}",
        ["in milliseconds", "median", "p90", "p99", "operations"],
        rows,
    )
