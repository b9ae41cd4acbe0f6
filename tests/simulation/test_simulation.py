"""The histories of many seeds: nothing happens in them that must never happen.

In processes of their own: what the package keeps for a process is the histories' there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.mutants import ROOT, mutated

from .mutants import FAULTS, copied, simulate
from .plans import plan_of

#: How many histories; "": those of every day, which find each fault that the first 2,000 find.
SEEDS = os.environ.get("DISTLOCK_TEST_SEEDS", "")
#: How many in one run, and where runs begin: several go on side by side.
AT_ONCE = min(5000, int(SEEDS) // 4) if SEEDS else 200
FIRST = range(0, int(SEEDS), AT_ONCE) if SEEDS else (0, 270, 1210)


@pytest.mark.parametrize("first", FIRST)
def test_nothing_happens_that_must_never_happen(first: int) -> None:
    """In any history; and enough happens in them to be a test."""
    run = simulate(ROOT, "--first", str(first), "--seeds", str(AT_ONCE))
    assert run.returncode == 0, run.stdout + run.stderr
    counts = {name: int(number) for name, number in re.findall(r"'(\w+)': (\d+)", run.stdout)}
    # Histories in which nothing goes wrong, or nobody gets anything, prove nothing.
    assert counts["acquisitions"] >= 3 * AT_ONCE
    for name in ("losses", "refusals", "outages", "late", "faults"):
        assert counts[name] >= AT_ONCE / 2, counts


def test_seed_is_one_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, in another process with another order of sets."""
    said = set()
    for number in ("1", "2"):
        monkeypatch.setitem(os.environ, "PYTHONHASHSEED", number)
        run = simulate(ROOT, "--seed", "17", "1133")
        assert run.returncode == 0, run.stdout + run.stderr
        said.add(run.stdout)
    assert len(said) == 1
    assert said.pop().count("\n") > 40


def test_history_of_a_fault_is_found_shrunk_and_repeated(tmp_path: Path) -> None:
    """With a fault in the package: within few seeds, in fewer steps, and each time the same."""
    copied(tmp_path)
    fault = next(each for each in FAULTS if each.fault.startswith("a shorter extend that counts"))
    with mutated(tmp_path / fault.file, fault):
        found = simulate(tmp_path, "--until-first", "--seeds", "200")
        assert found.returncode == 1, found.stdout + found.stderr
        seed = re.findall(r"^seed (\d+): .* is not kept for its holder", found.stdout, re.MULTILINE)
        once, again = (simulate(tmp_path, "--seed", *seed) for _ in range(2))
    assert once.returncode == 1
    assert "VIOLATION" in once.stdout
    assert once.stdout == again.stdout
    plan = plan_of(int(*seed))
    assert once.stdout.count("Actor(") == 1 <= len(plan.actors)
    assert once.stdout.count("sleep") < sum(str(each.steps).count("sleep") for each in plan.actors)
    assert simulate(ROOT, "--seed", *seed).returncode == 0
