"""What a bench has found: figures, their floors, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

#: Below so many operations, the slowest one in twenty or in a hundred says nothing.
_FOR_P95, _FOR_P99 = 20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long an operation took, in seconds.

    Attributes:
        count: How often it was done.
        p95: What 95 of 100 did not exceed; None: it was done too seldom to tell.
        p99: The same of 99.
    """

    count: int
    median: float
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, taken: Sequence[int]) -> Self:
        """Return the figures of single operations.

        Args:
            taken: Nanoseconds of each, at least one.
        """
        seconds = [each / 1e9 for each in taken]
        cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(taken) > 1 else []
        return cls(
            count=len(seconds),
            median=statistics.median(seconds),
            p95=cuts[94] if len(seconds) >= _FOR_P95 else None,
            p99=cuts[98] if len(seconds) >= _FOR_P99 else None,
        )

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {"count": self.count, "median": self.median, "p95": self.p95, "p99": self.p99}


@dataclass(slots=True, kw_only=True)
class Timed:
    """Something that was timed, beside its floor.

    Attributes:
        taken: The nanoseconds of each time.
        floor: The same of the floor; empty: none is known.
        parts: The nanoseconds of its parts, by name.
    """

    taken: list[int] = field(default_factory=list)
    floor: list[int] = field(default_factory=list)
    parts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many floors it takes, by the medians."""
        if not self.floor:
            return None
        below = statistics.median(self.floor)
        return statistics.median(self.taken) / below if below else None

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            **Times.of(self.taken).as_json(),
            **{name: Times.of(taken).as_json() for name, taken in self.parts.items()},
            "floor": Times.of(self.floor).as_json() if self.floor else None,
            "ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How often something was done in a second by all clients together.

    Attributes:
        floor: The same of the floor; None: none is known.
    """

    per_second: float
    floor: float | None

    @property
    def ratio(self) -> float | None:
        """Which part of the floor's rate it reaches."""
        return self.per_second / self.floor if self.floor else None

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "per_second": self.per_second,
            "floor_per_second": self.floor,
            "ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found about a backend. None: that was not asked for.

    Attributes:
        backend: Its alias.
        store: What keeps its locks, for people.
        floor: What its floor is, for people; "": none is known.
        apart: What the clients are: "processes" or "threads".
        clients: How many compete in `own_keys` and `hot_key`.
        woken: Whether the store wakes who waits.
    """

    backend: str
    store: str
    floor: str
    apart: str
    clients: int
    woken: bool
    pair: Timed | None = None
    hand_off: Timed | None = None
    own_keys: Rate | None = None
    hot_key: Rate | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry. Durations are seconds."""
        throughput = None
        if self.own_keys is not None and self.hot_key is not None:
            throughput = {"own_keys": self.own_keys.as_json(), "hot_key": self.hot_key.as_json()}
        return {
            "backend": self.backend,
            "store": self.store,
            "floor": self.floor,
            "apart": self.apart,
            "clients": self.clients,
            "woken": self.woken,
            "pair": None if self.pair is None else self.pair.as_json(),
            "handoff": None if self.hand_off is None else self.hand_off.as_json(),
            "throughput": throughput,
        }
