"""Numbers as shapes of an SVG, which the templates draw without a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..inspection.history import History, Minute

#: Units of the drawing: a bar of a minute is ten wide.
STEP: Final = 10
HEIGHT: Final = 60
#: What is drawn first, from below: the kinds that somebody should look at.
GRAVE: Final = ("lost", "rejected", "forced")


@dataclass(frozen=True, slots=True)
class Bar:
    """A minute: what is grave of it below, the rest above."""

    minute: Minute
    x: int
    top: float
    height: float
    grave_top: float
    grave_height: float


@dataclass(frozen=True, slots=True)
class MinuteChart:
    """Events per minute."""

    bars: tuple[Bar, ...]
    most: int
    total: int
    width: int
    height: int = HEIGHT

    @classmethod
    def of(cls, history: History) -> MinuteChart:
        """Draw the last hour."""
        most = max((each.number for each in history.minutes), default=0)
        scale = HEIGHT / max(most, 1)
        bars = []
        for position, minute in enumerate(history.minutes):
            grave = sum(minute.kinds.get(kind, 0) for kind in GRAVE) * scale
            height = minute.number * scale
            bars.append(
                Bar(
                    minute=minute,
                    x=position * STEP,
                    top=round(HEIGHT - height, 2),
                    height=round(height - grave, 2),
                    grave_top=round(HEIGHT - grave, 2),
                    grave_height=round(grave, 2),
                )
            )
        total = sum(each.number for each in history.minutes)
        return cls(tuple(bars), most, total, STEP * len(history.minutes))
