"""The figures of a bench as a picture. What draws it comes with the extra `bench`."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InvalidArgument, LockUsageError
from .bench_figures import Measured, Rate, Timed, Times

SUFFIXES = (".svg", ".png")

#: By Okabe and Ito: told apart by everybody.
_FIRST, _SECOND, _FLOOR = "#0072B2", "#E69F00", "#000000"
#: The largest figure is so many times the smallest one, from where an axis grows by tens.
_FAR = 20


def refuse_unplottable(path: Path) -> None:
    """Refuse, before anything is measured, what could not be drawn behind it.

    Raises:
        InvalidArgument: The path ends with no known suffix, or is in no folder.
        LockUsageError: There is nothing to draw with.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(f"--plot writes {' or '.join(SUFFIXES)}, by the suffix: {path}")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise InvalidArgument(f"--plot cannot write {path}: no folder has such a file.")
    if importlib.util.find_spec("matplotlib") is None:
        raise LockUsageError(
            "--plot needs matplotlib, which is the extra 'bench':"
            " pip install 'django-distlock[bench]'."
        )


def draw(found: Sequence[Measured], path: Path) -> None:
    """Write a picture: a row for each backend, and a column for each thing that was measured.

    Args:
        found: At least one backend.
        path: Where to; the suffix says what.
    """
    from matplotlib.figure import Figure

    panels = [panel for name, panel in _PANELS.items() if any(getattr(e, name) for e in found)]
    height = 1.9 + 0.7 * len(found)
    figure = Figure(figsize=(1.4 + 4.2 * len(panels), height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        axis.set_title(panel(axis, found), fontsize=10, loc="left", fontweight="bold")
        _tidy(axis, below=0.55 / (height - 1))
    names = [f"{each.backend}\n{each.store}" for each in found]
    axes[0].set_yticks(range(len(found)), names, fontsize=9)
    axes[0].set_ylim(len(found) - 0.5, -0.5)
    figure.savefig(path, dpi=144)


def _pairs(axis: Any, found: Sequence[Measured]) -> str:
    ends: list[float] = []
    for row, each in enumerate(found):
        if each.pair is not None:
            times = Times.of(each.pair.taken)
            middle, slow = times.median * 1000, (times.p95 or times.median) * 1000
            axis.barh(row, middle, height=0.5, color=_FIRST, label="median")
            axis.plot([middle, slow], [row, row], color=_SECOND, linewidth=3, label="to p95")
            _write(axis, row, slow, _figure(middle, each.pair.ratio))
            ends += [middle, slow, *_floor_of(axis, row, each.pair)]
    _scale(axis, ends, "milliseconds")
    return "Pair: acquire and release"


def _hand_offs(axis: Any, found: Sequence[Measured]) -> str:
    ends: list[float] = []
    for row, each in enumerate(found):
        if each.hand_off is not None:
            taken = [nanoseconds / 1e6 for nanoseconds in each.hand_off.taken]
            middle = statistics.median(taken)
            # In the order of their coming, so that none hides another one.
            places = [row - 0.22 + 0.44 * number / len(taken) for number in range(len(taken))]
            axis.plot(
                taken, places, ".", color=_FIRST, alpha=0.45, markersize=4, label="a hand-off"
            )
            axis.vlines(middle, row - 0.3, row + 0.3, color=_SECOND, linewidth=3, label="median")
            _write(axis, row, max(taken), _figure(middle, each.hand_off.ratio))
            ends += [*taken, *_floor_of(axis, row, each.hand_off)]
    _scale(axis, ends, "milliseconds")
    return "Hand-off: from release to grant"


def _throughput(axis: Any, found: Sequence[Measured]) -> str:
    ends: list[float] = []
    for row, each in enumerate(found):
        for place, rate, colour, label in (
            (row - 0.17, each.own_keys, _FIRST, "a key for each"),
            (row + 0.17, each.hot_key, _SECOND, "one key for all"),
        ):
            if rate is not None:
                axis.barh(place, rate.per_second, height=0.3, color=colour, label=label)
                ends.append(rate.per_second)
                if rate.floor:
                    _mark(axis, place, rate.floor, 0.16)
                    ends.append(rate.floor)
                behind = max(rate.per_second, rate.floor or 0.0)
                _write(axis, place, behind, _compared(rate), size=7)
    _scale(axis, ends, "pairs per second")
    return f"Throughput: {found[0].clients} clients"


_LEGEND = ("a hand-off", "a key for each", "one key for all", "median", "to p95", "floor")
_PANELS = {"pair": _pairs, "hand_off": _hand_offs, "own_keys": _throughput}


def _figure(milliseconds: float, ratio: float | None) -> str:
    beside = "" if ratio is None else f", {ratio:.3g} floors"
    return f"{milliseconds:.3g} ms{beside}"


def _compared(rate: Rate) -> str:
    part = "" if rate.ratio is None else f"{rate.ratio:.0%}" if rate.ratio >= 0.01 else "< 1%"
    beside = part and f", {part} of the floor"
    return f"{rate.per_second:,.0f}{beside}"


def _write(axis: Any, place: float, end: float, text: str, size: int = 8) -> None:
    axis.annotate(
        text, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=size,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip


def _floor_of(axis: Any, row: int, timed: Timed) -> list[float]:
    if not timed.floor:
        return []
    floor = statistics.median(timed.floor) / 1e6
    _mark(axis, row, floor, 0.3)
    return [floor]


def _mark(axis: Any, place: float, floor: float, half: float) -> None:
    axis.vlines(
        floor, place - half, place + half, color=_FLOOR, linewidth=1.6, zorder=4, label="floor"
    )


def _scale(axis: Any, ends: Sequence[float], unit: str) -> None:
    from matplotlib.ticker import FuncFormatter

    # A client that did nothing in its time has no place on an axis that grows by tens.
    lowest, highest = min((each for each in ends if each > 0), default=0.0), max(ends)
    grows_by_tens = lowest > 0 and highest / lowest > _FAR
    axis.set_xlabel(f"{unit}, logarithmic" if grows_by_tens else unit, fontsize=8)
    if grows_by_tens:
        # Room for the figures behind the bars, which end at each place of the axis.
        axis.set_xscale("log")
        axis.set_xlim(lowest / 2, highest * (highest / lowest) ** 0.5)
    else:
        axis.set_xlim(0, highest * 1.6 or 1)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _tidy(axis: Any, below: float) -> None:
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8)
    handles, labels = axis.get_legend_handles_labels()
    made = dict(zip(labels, handles, strict=True))
    named = {label: made[label] for label in _LEGEND if label in made}
    axis.legend(
        named.values(), named, loc="upper left", bbox_to_anchor=(0, -below), ncols=len(named),
        bbox_transform=axis.transAxes, fontsize=8, frameon=False, handlelength=1.4,
    )  # fmt: skip
