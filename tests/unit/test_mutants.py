"""The faults that `./dev mutants` tries are faults of this package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.__main__ import STORES
from tests.chaos.mutants import EXPRESSED, chosen
from tests.chaos.summary import FAULTS as BESIDE
from tests.mutants import MUTANTS, PROTOCOL, ROOT, Mutant, Slot, catches
from tests.simulation.mutants import FAULTS


def has_its_place(mutant: Mutant) -> bool:
    """Say whether the line that a fault changes, and the tests that catch it, exist."""
    line = re.search(mutant.old, (ROOT / mutant.file).read_text(encoding="utf-8"))
    return bool(line) and all(map(exists, filter(None, (mutant.test, mutant.also))))


def exists(test: str) -> bool:
    """Say whether there is such a test, whatever its case."""
    path, _, name = test.partition("[")[0].partition("::")
    kind, _, name = name.rpartition("::")
    # A class of ours inherits its tests from the exported contract.
    path = "django_distlock/testing/contract.py" if kind else path
    return f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_faults_have_their_places() -> None:
    """What a fault changes, and what catches it, is there."""
    assert [each for each in (*MUTANTS, *FAULTS) if not has_its_place(each)] == []


def test_faults_outside_the_protocol_have_a_second_test() -> None:
    """Random operations do not get there: another test stands for them."""
    others = [each for each in MUTANTS if each.file.split("/")[1] not in PROTOCOL]
    assert [each.fault for each in others if each.also.partition("[")[0] in ("", each.test)] == []


def test_faults_of_the_simulation_are_found_by_named_tests() -> None:
    """Whatever histories find: each fault is found by two of the three."""
    named = {each.test for each in MUTANTS}
    others = [each for each in FAULTS if each.test not in named]
    assert [each for each in others if not each.test.startswith("tests/contract/")] == []


def test_faults_of_the_histories_have_their_stores() -> None:
    """Each runs on a store of the histories, beside what goes wrong there."""
    assert {store for _fault, store, _beside in chosen()} <= STORES.keys()
    assert EXPRESSED.keys() - {""} <= BESIDE.keys()


@pytest.mark.servers
@pytest.mark.parametrize(
    ("line", "is_caught"),
    [("assert right", True), ("assert True", False), ("import os; os._exit(1)", None)],
    ids=["fails", "passes", "breaks down"],
)
def test_verdicts(tmp_path: Path, line: str, is_caught: bool | None) -> None:
    """A test that fails catches a fault; a process that ends before its test does is no verdict."""
    (tmp_path / "code.txt").write_text("right = 1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_code.py").write_text(f"right = 0\n\n\ndef test():\n    {line}\n")
    mutant = Mutant(
        "a fault", "memory", "code.txt", old="1", new="0", test="test_code.py::test", case=""
    )
    slot = Slot(tmp_path, {})
    if is_caught is None:
        with pytest.raises(RuntimeError, match="ended with 1 on test_code.py::test"):
            catches(mutant, slot)
    else:
        assert catches(mutant, slot) is is_caught
