"""Candidates that are there, measured turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from .options import Options
from .report import Result, ratios, times, without
from .timing import Samples, Subject, measure

#: Gives its subjects for as long as it lives.
Candidate = Callable[[], Iterator[list[Subject]]]


class Unavailable(Exception):
    """This candidate cannot be measured here; the text says what is missing."""


@dataclass(frozen=True)
class Race:
    """What was measured.

    Args:
        missing: Who could not be, and why.
    """

    samples: Samples
    missing: Mapping[str, str]

    def result(self, title: str, options: Options, found: list[dict[str, Any]]) -> Result:
        """Lay out the figures and these ratios."""
        figures = self.samples.figures()
        return Result(
            {"figures": figures, "ratios": found, "left_out": dict(self.missing)},
            [
                times(
                    f"{title}: one client, {options.rounds} rounds{without(self.missing)}", figures
                ),
                ratios(f"{title}: medians of the rounds' ratios", found),
            ],
        )


def race(candidates: Mapping[str, Candidate], options: Options) -> Race:
    """Measure all candidates that are there, turn by turn."""
    subjects: list[Subject] = []
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for name, candidate in candidates.items():
            try:
                subjects += stack.enter_context(contextmanager(candidate)())
            except Unavailable as error:
                missing[name] = str(error)
        samples = measure(subjects, rounds=options.rounds, slice_ms=options.slice_ms)
    return Race(samples, missing)
