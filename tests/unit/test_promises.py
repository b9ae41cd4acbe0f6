"""What the page of guarantees promises still has its tests, on each backend that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.backends import BACKENDS

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
        "postgres_orm", "redis_cluster", "sqlite", "mariadb",
    },
    "tests/contract/test_lock_processes.py": IS_OF_ONE_PROCESS,
    "tests/contract/test_takeover.py": HAS_NO_TTL,
    # These go over the backends by themselves.
    "tests/contract/test_transaction_test_cases.py": {*BACKENDS},
}  # fmt: skip


def collected(*options: str) -> dict[str, set[str]]:
    """Return the backends of each test that a run takes; "": it names none."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in done.stdout.splitlines():
        # The stores of the example take turns over its tests.
        if line.startswith("tests/") and not line.startswith("tests/e2e/"):
            test, _, case = line.rstrip("]").partition("[")
            found[test].update(BACKENDS.keys() & set(case.split("-")) or {""})
    return found


@pytest.fixture(scope="module")
def all_tests() -> dict[str, set[str]]:
    """Give what `./dev test --all` takes."""
    return collected("--all")


def by_file(tests: dict[str, set[str]]) -> dict[str, set[str]]:
    """Join the tests of a file."""
    files: defaultdict[str, set[str]] = defaultdict(set)
    for test, backends in tests.items():
        files[test.partition("::")[0]] |= backends - {""}
    return files


def test_each_promise_has_tests(all_tests: dict[str, set[str]]) -> None:
    """Each file that the page names runs, and "on every backend" is on every backend."""
    files = by_file(all_tests)
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {
        part.partition("\n")[0]: set(re.findall(r"`(tests/[\w/]+\.py)`", part)) for part in sections
    }
    assert set().union(*named.values()) - files.keys() == set()
    contract = [each for each in named["On every backend"] if each.startswith("tests/contract/")]
    fewer = {each: BACKENDS.keys() - files[each] for each in contract}
    assert {each: missing for each, missing in fewer.items() if missing} == FEWER


def test_no_test_loses_a_backend(all_tests: dict[str, set[str]]) -> None:
    """What `--all` leaves out are further cases: each test runs on each backend that it is for."""
    assert all_tests == collected("tests")


def test_quick_run_has_each_promise_about_backends(all_tests: dict[str, set[str]]) -> None:
    """And no test that `--all` does not have."""
    quick = collected()
    for test, backends in quick.items():
        assert backends <= all_tests[test]
    left = {
        file for file in by_file(all_tests) if file.startswith(("tests/contract/", "tests/core/"))
    }
    assert left - by_file(quick).keys() == set()
