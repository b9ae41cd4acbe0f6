"""The faults that `./dev mutants` tries are faults of this package."""

from __future__ import annotations

import re

from tests.mutants import MUTANTS, ROOT, Mutant


def has_its_place(mutant: Mutant) -> bool:
    """Say whether the line that a fault changes, and the test that catches it, exist."""
    path, _, name = mutant.test.partition("::")
    kind, _, name = name.rpartition("::")
    line = re.search(mutant.old, (ROOT / mutant.file).read_text(encoding="utf-8"))
    # A class of ours inherits its tests from the exported contract.
    path = "django_distlock/testing/contract.py" if kind else path
    return bool(line) and f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_faults_have_their_places() -> None:
    """What a fault changes, and what catches it, is there."""
    assert [each for each in MUTANTS if not has_its_place(each)] == []
