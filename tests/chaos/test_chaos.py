"""The drill finds what must never be, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from .crew import ROOT
from .history import Line, examined


def grant(lease: int, at: float, fence: int, until: float, **more: Any) -> Line:
    """Describe a grant, each to another process."""
    facts = {"form": "block", "key": "key", "token": f"{lease}", "asked": at}
    return {"event": "grant", "t": at, "who": f"{lease}", "lease": lease, "fence": fence,
            "until": until, **facts, **more}  # fmt: skip


def line(lease: int, event: str, at: float, **more: Any) -> Line:
    """Describe what became of it."""
    return {"event": event, "t": at, "who": f"{lease}", "lease": lease, **more}


def broken(*lines: Line) -> list[str]:
    """Return what is found, in a history in any order."""
    return sorted(examined(sorted(lines, key=lambda each: float(each["t"]))).broken)


def test_overlap_is_found() -> None:
    """Two hold a key at one moment, each before its own deadline."""
    first = [grant(1, 10, 1, 12), line(1, "check", 11.5, until=14), line(1, "end", 13)]
    assert broken(*first, grant(2, 12.9, 2, 16), line(2, "end", 15)) == ["overlap"]
    assert broken(*first, grant(2, 13, 2, 16), line(2, "end", 15)) == []


def test_holder_that_stood_still_has_no_overlap() -> None:
    """Behind its deadline it holds nothing, whenever it says so."""
    first = [grant(1, 10, 1, 12), line(1, "lost", 20, why="its deadline has passed")]
    assert broken(*first, grant(2, 12.1, 2, 16), line(2, "end", 15)) == []


def test_what_an_operator_took_is_told_apart() -> None:
    """The old holder may not know yet; without the operator, it is an overlap."""
    lines = [grant(1, 10, 1, 20), line(1, "end", 14)]
    lines += [grant(2, 12, 3, 20), line(2, "end", 13)]
    order = {"event": "operator", "t": 11, "who": "chaos", "form": "force_release", "key": "key"}
    found = examined(sorted([*lines, {**order, "before": 1, "after": 2}], key=lambda x: x["t"]))
    assert not found.broken
    assert found.counted["overlap with what an operator took"] == 1
    assert broken(*lines, {**order, "before": 1, "after": 1}) == ["overlap"]


def test_repeated_and_falling_fences_are_found() -> None:
    """Each grant has a higher one than all that were granted before it was asked for."""
    first = [grant(1, 10, 5, 12), line(1, "end", 11)]
    assert broken(*first, grant(2, 12, 5, 14), line(2, "end", 13)) == ["repeated fence"]
    assert broken(*first, grant(2, 12, 4, 14), line(2, "end", 13)) == ["falling fence"]
    assert broken(*first, grant(2, 12, 4, 14, asked=9), line(2, "end", 13)) == []
    # A block that is entered again is no grant, also where an operator has taken the key meanwhile.
    again = grant(3, 13, 5, 14, form="reentered", token="1", asked=13)
    other = [grant(2, 12, 7, 14), line(2, "end", 12.5)]
    assert broken(*first, *other, again) == []


def test_lease_that_is_gone_before_its_deadline_is_found() -> None:
    """Unless it was given up because nobody answered."""
    first = grant(1, 10, 1, 14)
    assert broken(first, line(1, "lost", 13, why="the store no longer has it")) == ["gone early"]
    assert broken(first, line(1, "lost", 13, why="3 renewals in a row had no answer")) == []
    assert broken(first, line(1, "lost", 15, why="its deadline has passed")) == []
    # A block that entered it again has made it shorter.
    again = [
        grant(2, 11, 1, 14, form="reentered", token="1"),
        line(2, "extended", 11.5, until=12.5),
    ]
    assert broken(first, *again, line(1, "lost", 13, why="its deadline has passed")) == []
    # Who is told to end sooner learns it by his next renewal.
    order = {"event": "operator", "t": 11, "who": "chaos", "form": "expire_soon", "key": "key"}
    order |= {"before": 1, "after": 1}
    assert broken(first, order, line(1, "lost", 13, why="the store no longer has it")) == []


def test_unexpected_error_is_found() -> None:
    """What nothing that goes wrong explains."""
    error = {"event": "error", "t": 1, "who": "1", "why": ""}
    assert broken({**error, "form": "LockUsageError"}) == ["unexpected error"]
    assert broken({**error, "form": "BackendUnavailable"}) == []


def test_drill_runs_and_ends() -> None:
    """Workers are interrupted, stopped and killed, and leave nothing."""
    command = [sys.executable, "-m", "tests.chaos", "--store", "memory", "--seed", "1",
               "--seconds", "4", "--workers", "2"]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=ROOT,
        # Workers that are killed close nothing.
        env={**os.environ, "PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing that must never be" in done.stdout
