"""What the page of guarantees promises still has its tests, on each backend that it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest

from tests.backends import BACKENDS
from tests.tiers import ALL, OF_FAULTS, OF_QUICK_FAULTS, Tier, case_of, taken, value_in_turn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/guarantees.md"
HAS_NO_TTL = {"advisory"}
IS_OF_ONE_PROCESS = {"memory"}

#: Promises on every backend whose file runs on fewer: those for which they mean nothing, and those
#: that share the code in question with one of the others.
FEWER = {
    "tests/contract/test_expiry.py": HAS_NO_TTL,
    "tests/contract/test_failures.py": IS_OF_ONE_PROCESS,
    "tests/contract/test_heartbeat_processes.py": IS_OF_ONE_PROCESS,
    "tests/contract/test_interrupted_blocks.py": {
        "postgres_orm", "redis_cluster", "sqlite", "sqlite_orm", "mariadb",
        "mariadb_orm",
    },
    "tests/contract/test_late_questions.py": HAS_NO_TTL,
    "tests/contract/test_lock_processes.py": IS_OF_ONE_PROCESS,
    "tests/contract/test_sharing.py": HAS_NO_TTL,
    "tests/contract/test_sharing_races.py": {
        *HAS_NO_TTL, *IS_OF_ONE_PROCESS, "postgres_orm", "redis_cluster", "sqlite_orm",
        "mariadb_orm",
    },
    "tests/contract/test_takeover.py": HAS_NO_TTL,
    # These go over the backends by themselves.
    "tests/contract/test_transaction_test_cases.py": {*BACKENDS},
}  # fmt: skip


#: The backends of each test; "": it names none.
Tests = dict[str, set[str]]


#: Of each tier, its tests, and whether their backends take turns.
Listed = dict[str, list[tuple[str, bool]]]


def listed(items: list[pytest.Item]) -> Listed:
    """List what each tier takes of one collection."""
    return {
        tier: [
            (each.nodeid, bool(value_in_turn(each)))
            for each in taken(items, tier)
            if not each.get_closest_marker("nightly")
        ]
        for tier in get_args(Tier)
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Print the list, where this is a plugin of a run that collects for nothing else."""
    print("TIERS " + json.dumps(listed(items)))


def collected() -> Listed:
    """List the tests by a process of its own: this one has collected less."""
    options = ["--collect-only", "-q", "-n", "0", "-p", "no:randomly", "-p", __name__, "tests"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: Listed = json.loads(done.stdout.partition("TIERS ")[2].partition("\n")[0])
    return found


@pytest.fixture(scope="module")
def cases(pytestconfig: pytest.Config) -> Listed:
    """Give what each tier takes, without nightly tests."""
    everything = pytestconfig.stash.get(ALL, None)
    return collected() if everything is None else listed(everything)


@pytest.fixture(scope="module")
def tiers(cases: Listed) -> dict[str, Tests]:
    """Give the tests of each tier with their backends."""
    found: dict[str, Tests] = {}
    for tier, tests in cases.items():
        backends = defaultdict[str, set[str]](set)
        for name, in_turn in tests:
            test, _, case = name.rstrip("]").partition("[")
            backends[test] |= (not in_turn and BACKENDS.keys() & set(case.split("-"))) or {""}
        found[tier] = dict(backends)
    return found


def by_file(tests: Tests) -> Tests:
    """Join the tests of a file."""
    files: defaultdict[str, set[str]] = defaultdict(set)
    for test, backends in tests.items():
        files[test.partition("::")[0]] |= backends - {""}
    return files


def test_each_promise_has_tests(tiers: dict[str, Tests]) -> None:
    """Each file that the page names runs, and "on every backend" is on every backend."""
    files = by_file(tiers["all"])
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {
        part.partition("\n")[0]: set(re.findall(r"`(tests/[\w/]+\.py)`", part)) for part in sections
    }
    assert set().union(*named.values()) - files.keys() == set()
    contract = [each for each in named["On every backend"] if each.startswith("tests/contract/")]
    fewer = {each: BACKENDS.keys() - files[each] for each in contract}
    assert {each: missing for each, missing in fewer.items() if missing} == FEWER


def test_all_tests_run_and_no_file_loses_a_backend(tiers: dict[str, Tests]) -> None:
    """What `--all` leaves out are further cases, and turns of backends that others have."""
    assert tiers["chosen"].keys() == tiers["all"].keys()
    assert by_file(tiers["chosen"]) == by_file(tiers["all"])


def test_quick_run_has_each_promise_about_backends(tiers: dict[str, Tests]) -> None:
    """And no test that `--all` does not have."""
    assert {test for test in tiers["quick"] if test not in tiers["all"]} == set()
    files = by_file(tiers["all"])
    of_backends = {each for each in files if each.startswith(("tests/contract/", "tests/core/"))}
    assert of_backends - by_file(tiers["quick"]).keys() == set()


def test_faults_are_caught_without_the_mutants(cases: Listed) -> None:
    """By a run of all tests each of them, and most of them by a quick one."""
    quick, every = ({case_of(name) for name, _ in cases[tier]} for tier in ("quick", "all"))
    assert OF_FAULTS - every == set()
    assert OF_QUICK_FAULTS - quick == set()
    assert len(OF_FAULTS & quick) > len(OF_FAULTS) * 3 / 4
