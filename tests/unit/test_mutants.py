"""The table of faults in CONTRIBUTING is the one that `./dev mutants` tries."""

from __future__ import annotations

import re

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, table


def test_contributing_shows_the_faults() -> None:
    """Whoever adds a fault updates the table."""
    assert table() in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: f"{each.fault}-{each.backend}")
def test_fault_has_its_place(mutant: Mutant) -> None:
    """The line that a fault changes, and the test that catches it, exist."""
    assert re.search(mutant.old, (ROOT / mutant.file).read_text(encoding="utf-8"))
    path, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
