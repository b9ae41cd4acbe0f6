"""Bar charts, as shapes of an SVG that the templates draw without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.utils import formats, timezone
from django.utils.translation import gettext as _

from ..core.wording import span
from ..inspection.history import History

#: Units of the drawing: the width of a bar's place, and the height of a chart.
STEP: Final = 10
HEIGHT: Final = 60
#: The kinds of events that need attention, drawn as the lower part of a bar.
GRAVE: Final = ("lost", "rejected", "forced")


@dataclass(frozen=True, slots=True)
class Bar:
    """Two numbers, one above the other; the title appears under the pointer."""

    title: str
    x: int
    top: float
    height: float
    lower_top: float
    lower_height: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars, with the labels of their axes: the highest number, the first bar and the last bar."""

    bars: tuple[Bar, ...]
    most: str
    first: str
    last: str
    width: int
    height: int = HEIGHT

    @classmethod
    def of(
        cls,
        numbers: Sequence[tuple[float, float]],
        titles: Sequence[str],
        most: str,
        ends: tuple[str, str],
    ) -> Chart:
        """Draw pairs of a lower and an upper number."""
        scale = HEIGHT / (max(map(sum, numbers), default=0) or 1)
        bars = [
            Bar(
                title=title,
                x=position * STEP,
                top=round(HEIGHT - (lower + upper) * scale, 2),
                height=round(upper * scale, 2),
                lower_top=round(HEIGHT - lower * scale, 2),
                lower_height=round(lower * scale, 2),
            )
            for position, ((lower, upper), title) in enumerate(zip(numbers, titles, strict=True))
        ]
        return cls(tuple(bars), most, *ends, STEP * len(bars))


def of_minutes(past: History) -> Chart:
    """Draw the events of the last hour, the grave ones below."""
    grave = [sum(each.kinds.get(kind, 0) for kind in GRAVE) for each in past.minutes]
    numbers = [
        (lower, each.number - lower) for lower, each in zip(grave, past.minutes, strict=True)
    ]
    titles = [f"{_time(each.begins)}: {each.number}" for each in past.minutes]
    most = max((each.number for each in past.minutes), default=0)
    first, last = past.minutes[0].begins, past.minutes[-1].begins
    return Chart.of(numbers, titles, str(most), (_time(first), _time(last)))


def of_releases(releases: Sequence[tuple[datetime, float, float]]) -> Chart:
    """Draw hold times, with wait times above them; the latest of `releases` comes first."""
    oldest_first = releases[::-1]
    titles = [
        _("%(time)s: held for %(held)s, waited for %(waited)s")
        % {"time": _date(at), "held": lasted(held), "waited": lasted(waited)}
        for at, held, waited in oldest_first
    ]
    numbers = [(held, waited) for _at, held, waited in oldest_first]
    ends = _date(releases[-1][0]), _date(releases[0][0])
    return Chart.of(numbers, titles, lasted(max(map(sum, numbers))), ends)


def lasted(seconds: float) -> str:
    """Return a duration as text, with the decimal separator of the language."""
    # In German a point separates thousands: "9.900 s" would mean hours.
    return span(seconds, 3).replace(".", formats.get_format("DECIMAL_SEPARATOR"))


def _date(instant: datetime) -> str:
    return f"{timezone.localtime(instant):%Y-%m-%d %H:%M:%S}"


def _time(instant: datetime) -> str:
    return f"{timezone.localtime(instant):%H:%M}"
