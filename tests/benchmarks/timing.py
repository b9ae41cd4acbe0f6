"""Measure several things turn by turn, so that whatever disturbs one disturbs all.

A round gives every subject a slice of time, in an order of its own. Figures are of single
operations; a ratio is that of two medians of the same round, and of those the median counts.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

#: An operation, or a part of one.
Step = Callable[[], object]
AwaitedStep = Callable[[], Awaitable[object]]

#: No slice has fewer operations, however slow they are, and none has more.
LEAST, MOST = 3, 2000


@dataclass(frozen=True)
class Subject:
    """What is timed: steps that are run one after another, again and again.

    Args:
        name: Whose steps they are.
        steps: By name; a figure is called `name/step`.
        total: The name of the steps' sum; None: none is wanted.
    """

    name: str
    steps: Mapping[str, Step]
    total: str | None = None

    def figures(self) -> list[str]:
        """Return the names of what is measured."""
        return [f"{self.name}/{step}" for step in (*self.steps, *filter(None, [self.total]))]

    def slice(self, slice_ms: float) -> list[list[int]]:
        """Run the steps for so long; return the nanoseconds of each, by step."""
        taken: list[list[int]] = [[] for _ in self.steps]
        for step, into in self._turns(taken, slice_ms):
            began = perf_counter_ns()
            step()
            into.append(perf_counter_ns() - began)
        return taken

    def _turns(
        self, taken: list[list[int]], slice_ms: float
    ) -> Iterator[tuple[Callable[[], Any], list[int]]]:
        """Give each step in turn, and where its time goes, until the slice is over."""
        turns = list(zip(self.steps.values(), taken, strict=True))
        until = perf_counter_ns() + slice_ms * 1e6
        for count in range(MOST):
            if count >= LEAST and perf_counter_ns() >= until:
                break
            yield from turns


@dataclass(frozen=True, kw_only=True)
class AwaitedSubject(Subject):
    """The same, of steps that are awaited. A whole slice is one task, so that steps alone count.

    Args:
        runner: Whose loop it runs on.
    """

    steps: Mapping[str, AwaitedStep]
    runner: asyncio.Runner

    def slice(self, slice_ms: float) -> list[list[int]]:
        """See `Subject.slice`."""
        return self.runner.run(self._awaited(slice_ms))

    async def _awaited(self, slice_ms: float) -> list[list[int]]:
        taken: list[list[int]] = [[] for _ in self.steps]
        for step, into in self._turns(taken, slice_ms):
            began = perf_counter_ns()
            await step()
            into.append(perf_counter_ns() - began)
        return taken


@dataclass
class Samples:
    """The nanoseconds of every operation, by figure and by round."""

    rounds: dict[str, list[list[int]]] = field(default_factory=dict)

    def add(self, name: str, taken: list[int]) -> None:
        """Keep what one round brought."""
        self.rounds.setdefault(name, []).append(taken)

    def medians(self, name: str) -> list[float]:
        """Return the median of each round, in microseconds."""
        return [statistics.median(taken) / 1000 for taken in self.rounds[name]]

    def figure(self, name: str) -> dict[str, Any]:
        """Return what is to be said about one figure."""
        every = [each / 1000 for taken in self.rounds[name] for each in taken]
        cuts = statistics.quantiles(every, n=100, method="inclusive")
        return {
            "median_us": statistics.median(every),
            "p90_us": cuts[89],
            "p95_us": cuts[94],
            "p99_us": cuts[98],
            "operations": len(every),
            "round_medians_us": self.medians(name),
        }

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return all figures by name."""
        return {name: self.figure(name) for name in self.rounds}

    def ratios(self, comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
        """Return the ratios of what was measured."""
        return [
            each.ratio(self.medians(each.of), self.medians(each.to))
            for each in comparisons
            if each.of in self.rounds and each.to in self.rounds
        ]


def measure(subjects: Sequence[Subject], *, rounds: int, slice_ms: float) -> Samples:
    """Run all subjects in `rounds` rounds, behind one that does not count."""
    samples = Samples()
    order = list(subjects)
    for number in range(-1, rounds):
        random.shuffle(order)
        for subject in order:
            taken = _slice(subject, slice_ms)
            if number >= 0:
                for name, nanoseconds in taken.items():
                    samples.add(name, nanoseconds)
    return samples


def _slice(subject: Subject, slice_ms: float) -> dict[str, list[int]]:
    taken = subject.slice(slice_ms)
    if subject.total:
        taken.append([sum(parts) for parts in zip(*taken, strict=True)])
    return dict(zip(subject.figures(), taken, strict=True))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A ratio to show, and the target it has.

    Args:
        what: What it says, for people.
        of: The figure above the line.
        to: The figure below it.
    """

    what: str
    of: str
    to: str
    at_most: float | None = None
    at_least: float | None = None

    def ratio(self, of: Sequence[float], to: Sequence[float]) -> dict[str, Any]:
        """Return the ratio of two figures that were measured in the same rounds."""
        each = [above / below for above, below in zip(of, to, strict=True)]
        first, middle, third = statistics.quantiles(each, n=4, method="inclusive")
        return {
            "what": self.what,
            "of": self.of,
            "to": self.to,
            "ratio": middle,
            "first_quartile": first,
            "third_quartile": third,
            "rounds": len(each),
            "at_most": self.at_most,
            "at_least": self.at_least,
            "met": self._met(middle),
        }

    def _met(self, ratio: float) -> bool | None:
        if self.at_most is not None:
            return ratio <= self.at_most
        if self.at_least is not None:
            return ratio >= self.at_least
        return None
