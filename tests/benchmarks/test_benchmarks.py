"""The benchmarks run, and their figures are what they say. None is judged by its time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.__main__ import BENCHMARKS
from tests.services import has_mariadb

ROOT = Path(__file__).parent.parent.parent
#: What is run at once. The tests share the work, and each sees that its part needs no other.
TOGETHER = (
    ("latency", "roundtrips", "sizes", "scale", "throughput"),
    ("redis", "advisory"),
    ("handoff", "fairness", "contention", "load", "beats", "fencing"),
    ("operators",),
)
#: With a thousand locks, or with many processes, or many of them: these run by night.
LONG = {"handoff", "operators", "latency"}
#: Peers that the tests' own environment need not have.
PEERS = {"pglock", "python-redis-lock"}
OPERATIONS = ("acquire", "extend", "lose", "release")
#: Of a figure: what is measured in each round.
EACH_ROUND = ("round_medians_us", "rounds_per_second")


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of the benchmarks; return its JSON."""
    path = folder / "found.json"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-m", "tests.benchmarks", *arguments, "--json", path],
        cwd=ROOT,
        # Development mode takes twice as long; of it, the warnings matter here.
        env={**os.environ, "PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    # A connection that was left open says so.
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    made: dict[str, Any] = json.loads(path.read_text())
    return made


@pytest.mark.parametrize(
    "names",
    [pytest.param(each, marks=pytest.mark.nightly if LONG & {*each} else ()) for each in TOGETHER],
    ids=",".join,
)
def test_smallest_run_is_whole(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Every figure is there and positive, and ratios are those of the same rounds."""
    found = run(tmp_path, "--quick", "--fsync", "off", "--only", *names)
    assert found["facts"]["postgresql"]["fsync"] == "off"
    assert set(found["benchmarks"]) == set(found["seconds"]) == set(names) <= {*BENCHMARKS}
    may_miss = PEERS if has_mariadb() else {*PEERS, "mariadb", "mariadb-floor", "MariaDB"}
    made = parts(found["benchmarks"])
    for data in made.values():
        assert set(data.get("left_out", {})) <= may_miss
        assert_positive(data)
        for ratio in data.get("ratios", ()):
            assert_ratio(data["figures"], ratio)
    if "roundtrips" in made:
        # Its transaction alone takes a BEGIN and a COMMIT.
        assert set(sent(made["roundtrips"], "functions")) == {(1, 1)}
        assert all(each == trips > 3 for each, trips in sent(made["roundtrips"], "orm"))
    if "redis/roundtrips" in made:
        assert set(sent(made["redis/roundtrips"], "redis")) == {(1, 1)}
        assert made["redis/roundtrips"]["target"]["met"]


def parts(found: dict[str, Any]) -> dict[str, Any]:
    """Return what was found by the names of single benchmarks: Redis has several."""
    more = {f"redis/{name}": data for name, data in found.get("redis", {}).items()}
    return {name: data for name, data in found.items() if name != "redis"} | more


def assert_positive(data: dict[str, Any]) -> None:
    """There are figures, each was measured in every round, and none is negative."""
    assert data["figures"]
    for name, figure in data["figures"].items():
        values = figure if isinstance(figure, dict) else {"figure": figure}
        for what, value in values.items():
            if what in EACH_ROUND:
                assert min(value) > 0, name
            else:
                assert isinstance(value, list) or value >= 0, name


def assert_ratio(figures: dict[str, Any], ratio: dict[str, Any]) -> None:
    """It is the median of what each round says, of figures of this very run."""
    of = each_round(figures[ratio["of"]])
    to = [15.0] * len(of) if ratio["to"] == "15 us" else each_round(figures[ratio["to"]])
    expected = statistics.median(above / below for above, below in zip(of, to, strict=True))
    assert ratio["ratio"] == pytest.approx(expected), ratio["what"]


def each_round(figure: dict[str, Any]) -> list[float]:
    """Return what was measured in each round."""
    (name,) = {*EACH_ROUND} & {*figure}
    rounds: list[float] = figure[name]
    return rounds


def sent(data: dict[str, Any], name: str) -> list[tuple[int, int]]:
    """Return the statements and the round trips of each operation of a backend."""
    counted = [data["figures"][f"{name}/backend/{each}"] for each in OPERATIONS]
    return [(each["statements"], each["round_trips"]) for each in counted]


@pytest.mark.nightly
def test_churn_counts_operations_and_bytes(tmp_path: Path) -> None:
    """Churn says how many operations there were, what they wrote, and which updates were HOT."""
    found = run(tmp_path, "churn", "--quick", "--fsync", "off", "--compare")["benchmarks"]["churn"]
    variants = {each["name"]: each for each in found["variants"]}
    for variant in variants.values():
        assert set(variant["operations"]) == {"acquire", "extend", "release"}
        assert variant["summary"]["wal_bytes_per_operation"] > 0
    # An index on a column that each extend changes.
    assert variants["index on free_at"]["summary"]["lock_hot_percent"] == 0
