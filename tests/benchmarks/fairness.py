"""Who gets how many turns where many processes compete for one key, all the time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .candidates import HOT
from .clients import Tally, Work, hire
from .options import Options
from .race import Unavailable
from .report import Result, Sheet, target, without
from .sides import SIDES, Side

#: Seconds that a turn holds the key.
HOLD_SECONDS = 0.001
#: A turn that ended in time, and one that did not.
DONE, LATE = "done", "late"
#: What part of the mean the least lucky shall have.
LEAST_TO_MEAN = 0.5
OURS = ("functions", "redis")
CANDIDATES = (*OURS, "pg_advisory_lock", "python-redis-lock", "redis-py")


def run(options: Options) -> Result:
    """Let all processes compete with every candidate, turn by turn."""
    rounds = max(2, options.rounds // 10)
    names, missing = _available()
    counted: dict[str, list[list[int]]] = {name: [] for name in names}
    seconds = options.contest_seconds
    with hire(options.contestants) as team:
        for _ in range(rounds):
            random.shuffle(names)
            for name in names:
                tallies = team.turn(options.contestants, seconds, contender, name, seconds)
                counted[name].append(_turns(tallies))
    figures = {name: _figure(counted[name]) for name in CANDIDATES if name in counted}
    targets = [
        target(
            f"{name}: turns of the least lucky to the mean", figures[name]["least_to_mean"],
            at_least=LEAST_TO_MEAN,
        )
        for name in OURS
    ]  # fmt: skip
    about = f"{options.contestants} processes, {seconds:g} s, {rounds} rounds"
    return Result(
        {"figures": figures, "targets": targets, "left_out": missing},
        [_sheet(figures, about, missing)],
    )


def _available() -> tuple[list[str], dict[str, str]]:
    names, missing = [], {}
    for name in CANDIDATES:
        try:
            with SIDES[name]():
                names.append(name)
        except Unavailable as error:
            missing[name] = str(error)
    return names, missing


def _turns(tallies: Sequence[Tally]) -> list[int]:
    return sorted(each.outcomes[DONE] for each in tallies)


def _figure(rounds: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return medians of the rounds, each of which has the turns of every process."""
    found = [_of_round(turns) for turns in rounds]
    return {
        **{name: statistics.median(each[name] for each in found) for name in found[0]},
        "rounds_turns": [list(turns) for turns in rounds],
    }


def _of_round(turns: Sequence[int]) -> dict[str, float]:
    mean = statistics.mean(turns)
    return {
        "least": min(turns),
        "median": statistics.median(turns),
        "most": max(turns),
        "mean": mean,
        "least_to_mean": min(turns) / mean if mean else 0.0,
        "total": sum(turns),
    }


def _sheet(
    figures: Mapping[str, Mapping[str, Any]], about: str, missing: Mapping[str, str]
) -> Sheet:
    names = ("least", "median", "most", "mean")
    rows = [
        [name, *(f"{each[one]:,.1f}" for one in names), f"{each['least_to_mean']:.2f}",
         f"{each['total']:,.0f}"]
        for name, each in figures.items()
    ]  # fmt: skip
    title = f"Fairness: turns of a process, medians ({about}; >= {LEAST_TO_MEAN:g} of the mean is"
    header = ["turns", *names, "least / mean", "all together"]
    return Sheet(f"{title} aimed at for the least){without(missing)}", header, rows)


# What the processes do


@contextmanager
def contender(_number: int, name: str, seconds: float) -> Iterator[Work]:
    """Take the key that all want, again and again."""
    with SIDES[name]() as side:
        yield Turns(side, seconds)


class Turns:
    """The turns of one process.

    Args:
        seconds: How long it competes. Its first turn warms up and is not counted in that.
    """

    def __init__(self, side: Side, seconds: float):
        self._side = side
        self._seconds = seconds
        self._is_warm = False
        self._until: float | None = None

    def __call__(self) -> str:
        """Have a turn; say whether it ended in time."""
        if self._is_warm and self._until is None:
            self._until = time.monotonic() + self._seconds
        self._is_warm = True
        self._side.wait(HOT)
        time.sleep(HOLD_SECONDS)
        self._side.release()
        # Whoever is alone at the end, when the others have stopped, was not lucky.
        return DONE if self._until is None or time.monotonic() <= self._until else LATE
