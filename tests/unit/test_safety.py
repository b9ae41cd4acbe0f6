"""What must never be is found once: neither pytest nor continuous integration asks again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TIMED
from tests.safety import Unsafe, never

ROOT = Path(__file__).parents[2]
#: Tests of a file that is asked again. Each notes that it ran.
TESTS = """
from pathlib import Path

import pytest

from tests.safety import Unsafe, never


@pytest.fixture(autouse=True)
def _noted(request):
    with Path(__file__).with_name(request.node.name).open("a") as notes:
        notes.write(".")


def test_slow():
    assert False, "took too long"


def test_unsafe():
    never([3, 3], "a fence came again")


def test_unsafe_by_name():
    never(True, "AssertionError: TimeoutError: took 9.9 s instead of 0 s")


def test_unsafe_behind_something_slow():
    try:
        assert False, "took too long"
    except AssertionError:
        never(True, "two held a key at once")


def test_unsafe_before_something_slow(request):
    request.addfinalizer(test_slow)
    never(True, "two held a key at once")


@pytest.mark.flaky(reruns=2, only_rerun=["AssertionError"])
def test_unsafe_with_a_mark_of_its_own():
    never(True, "an update was lost")
"""


def test_only_what_is_broken_is_unsafe() -> None:
    """Nothing found is well; what is found is in the message."""
    nothing: tuple[object, ...] = (False, [], 0, None, "")
    for well in nothing:
        never(well, "a task ran twice")
    with pytest.raises(Unsafe, match=r"^a task ran twice: \['7'\]$"):
        never(["7"], "a task ran twice")
    with pytest.raises(Unsafe, match=r"^a task ran twice$"):
        never(True, "a task ran twice")
    assert not issubclass(Unsafe, AssertionError)


def test_unsafe_test_is_run_once(tmp_path: Path) -> None:
    """In a file whose other tests may fail twice, whatever the error says or comes behind."""
    file = tmp_path / TIMED[0]
    file.parent.mkdir()
    file.write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = ("-p", "tests.conftest", "-p", "no:xdist", "-p", "no:randomly", "-p", "no:asyncio")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", tmp_path / "pytest.ini", *plugins, file],
        cwd=ROOT,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    notes = [each for each in file.parent.glob("test_*") if not each.suffix]
    ran = {each.name: len(each.read_text()) for each in notes}
    names = [line[4:].partition("(")[0] for line in TESTS.splitlines() if line[:8] == "def test"]
    assert ran == {**dict.fromkeys(names, 1), "test_slow": 3}, run.stdout + run.stderr
    assert "tests.safety.Unsafe: a fence came again: [3, 3]" in run.stdout


@pytest.mark.parametrize(
    ("said", "times"),
    [
        ("AssertionError: took 9.9 s instead of 0 s", 2),
        ("tests.safety.Unsafe: a fence came again: [3, 3]", 1),
    ],
    ids=["slow", "unsafe"],
)
def test_unsafe_run_is_not_repeated(tmp_path: Path, said: str, times: int) -> None:
    """Continuous integration asks again after what failed, unless it must never be."""
    ci = (ROOT / ".ci" / "run").read_text()
    twice = ci[ci.index("twice() {") :]
    twice = twice[: twice.index("\n}\n") + 3]
    suite = tmp_path / "suite"
    suite.write_text(f"echo . >> {shlex.quote(str(tmp_path / 'ran'))}\necho 'E  {said}'\nexit 1\n")
    program = f"set -euo pipefail\n{twice}\ntwice bash {shlex.quote(str(suite))}"
    run = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert len((tmp_path / "ran").read_text().splitlines()) == times
