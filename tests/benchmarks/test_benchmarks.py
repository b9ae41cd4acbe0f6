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

from tests.benchmarks.__main__ import BENCHMARKS, main
from tests.benchmarks.timing import Comparison, Samples, Subject, measure

ROOT = Path(__file__).parent.parent.parent
BACKEND_STEPS = ("acquire", "release", "pair", "extend", "lose")
LEVELS = {"backend": BACKEND_STEPS, "lock": BACKEND_STEPS, "block": ("pair",)}
FIGURES = {
    "latency": [
        *(
            f"{name}/{level}/{step}"
            for name in ("functions", "orm", "sqlite", "memory")
            for level, steps in LEVELS.items()
            for step in steps
        ),
        *(
            f"floor/{way}/{step}"
            for way in ("driver", "prepared", "django")
            for step in ("upsert", "trip", "pair", "read")
        ),
        *(f"sqlite-floor/driver/{step}" for step in ("upsert", "trip", "pair", "read")),
    ],
    "roundtrips": [
        f"{name}/backend/{operation}"
        for name in ("functions", "orm")
        for operation in ("acquire", "extend", "lose", "release")
    ],
    "sizes": [
        f"{what}/{part}" for what in ("lock", "counter") for part in ("heap", "pkey", "total")
    ],
    "scale": [
        f"keys_{keys}/{operation}"
        for keys in (50, 200)
        for operation in ("pair", "acquire", "new-pair", "extend", "lose", "read")
    ],
    "throughput": [
        f"{name}/{mode}/{clients}"
        for name in ("floor", "floor, prepared", "functions", "orm")
        for mode in ("own keys", "hot key")
        for clients in (2,)
    ],
}
#: Of a figure, what is measured, once in all and once a round.
MEASURED = {
    "latency": ("median_us", "round_medians_us"),
    "scale": ("median_us", "round_medians_us"),
    "throughput": ("per_second", "rounds_per_second"),
}


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
        timeout=100,
        check=False,
    )
    # A connection that was left open says so.
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def test_smallest_run_is_whole(tmp_path: Path) -> None:
    """Every figure is there and positive, and ratios are those of the same rounds.

    One test, because workers would each run the benchmarks for their share.
    """
    found = run(tmp_path, "--quick", "--fsync", "off")
    assert_facts(found["facts"])
    assert set(found["benchmarks"]) == set(BENCHMARKS)
    for name in BENCHMARKS:
        assert_positive(name, found["benchmarks"][name])
    for name, (once, each_round) in MEASURED.items():
        assert_measured(found["benchmarks"][name], once, each_round, found["options"]["rounds"])
        assert_ratios(found["benchmarks"][name], each_round)
    assert_counted(found["benchmarks"]["roundtrips"]["figures"])


def assert_facts(facts: dict[str, Any]) -> None:
    """Who compares two runs can see whether they may be compared."""
    assert {"cpu", "cpus", "memory_bytes", "python", "django", "psycopg"} <= set(facts)
    assert facts["postgresql"]["fsync"] == "off"
    assert facts["postgresql"]["synchronous_commit"] == "on"


def assert_positive(name: str, found: dict[str, Any]) -> None:
    """No candidate, level or operation is lost, and nothing is negative."""
    assert set(FIGURES[name]) <= set(found["figures"])
    for figure, values in found["figures"].items():
        for value in values.values() if isinstance(values, dict) else [values]:
            assert isinstance(value, list) or value >= 0, figure


def assert_measured(found: dict[str, Any], once: str, each_round: str, rounds: int) -> None:
    """Something was measured in every round of every candidate."""
    for name, figure in found["figures"].items():
        assert figure[once] > 0, name
        assert len(figure[each_round]) == rounds, name
        assert min(figure[each_round]) > 0, name


def assert_ratios(found: dict[str, Any], each_round: str) -> None:
    """A ratio is the median of what each round says, of figures of this very run."""
    assert found["ratios"]
    for ratio in found["ratios"]:
        of = found["figures"][ratio["of"]][each_round]
        constant = ratio["to"] == "15 us"
        to = [15.0] * len(of) if constant else found["figures"][ratio["to"]][each_round]
        expected = statistics.median(above / below for above, below in zip(of, to, strict=True))
        assert ratio["ratio"] == pytest.approx(expected), ratio["what"]


def assert_counted(counted: dict[str, Any]) -> None:
    """A function is one statement in one round trip; the counter knows more where there is more."""
    for operation in ("acquire", "extend", "lose", "release"):
        functions, orm = (counted[f"{name}/backend/{operation}"] for name in ("functions", "orm"))
        assert (functions["statements"], functions["round_trips"]) == (1, 1)
        # Its transaction alone takes a BEGIN and a COMMIT.
        assert orm["statements"] == orm["round_trips"] > 3


def test_churn_counts_operations_and_bytes(tmp_path: Path) -> None:
    """Churn says how many operations there were, what they wrote, and which updates were HOT."""
    found = run(tmp_path, "churn", "--quick", "--fsync", "off", "--with-expiry-index")
    (variant,) = found["benchmarks"]["churn"]["variants"]
    assert set(variant["operations"]) == {"acquire", "extend", "release"}
    assert variant["summary"]["wal_bytes_per_operation"] > 0
    # An index on a column that each extend changes.
    assert variant["summary"]["lock_hot_percent"] == 0
    first, last = variant["samples"][0], variant["samples"][-1]
    assert "distlock_churn" in last["lock"]["sizes"]
    updated = last["lock"]["n_tup_upd"] - first["lock"]["n_tup_upd"]
    # A client's first operation warms up, and is not counted.
    assert (
        abs(updated - variant["operations"]["extend"])
        <= found["benchmarks"]["churn"]["load"]["clients"]
    )


def test_rounds_give_everybody_a_turn() -> None:
    """Steps run in order, each round has all subjects, and the first round does not count."""
    said: list[str] = []
    subjects = [
        Subject(name, {"in": lambda: said.append("in"), "out": lambda: said.append("out")}, "both")
        for name in ("a", "b")
    ]
    samples = measure(subjects, rounds=2, slice_ms=0)
    assert said == ["in", "out"] * 3 * len(subjects) * 3
    assert {name: len(rounds) for name, rounds in samples.rounds.items()} == {
        f"{name}/{step}": 2 for name in ("a", "b") for step in ("in", "out", "both")
    }
    for first, second, total in zip(
        *(samples.rounds[f"a/{step}"][0] for step in ("in", "out", "both")), strict=True
    ):
        assert first + second == total


def test_figures_are_of_single_operations_in_microseconds() -> None:
    """Percentiles are over all operations of all rounds; medians are also kept by round."""
    samples = Samples()
    samples.add("a", [1_000 * each for each in range(51)])
    samples.add("a", [1_000 * each for each in range(51, 101)])
    assert samples.figure("a") == {
        "median_us": 50,
        "p95_us": 95,
        "p99_us": 99,
        "operations": 101,
        "round_medians_us": [25, 75.5],
    }


@pytest.mark.parametrize(
    ("target", "met"),
    [
        ({"at_most": 2.0}, True),
        ({"at_most": 1.9}, False),
        ({"at_least": 2.0}, True),
        ({"at_least": 2.1}, False),
        ({}, None),
    ],
)
def test_target_is_compared_with_the_median_of_the_rounds(
    target: dict[str, float], met: bool | None
) -> None:
    """One disturbed round changes nothing."""
    made = Comparison(what="", of="a", to="b", **target).ratio([2.0, 90.0, 4.0], [1.0, 1.0, 2.0])
    assert (made["ratio"], made["met"]) == (2.0, met)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "latency", "nonsense"], "invalid choice: 'nonsense'"),
        (["--keys", "1000,many"], "must be a number from 10 to 10,000,000, not 'many'"),
        (["--rounds", "1"], "must be a number from 2 to 1,000, not '1'"),
        (["--json", "/"], "cannot be written: '/'"),
        (["--seconds", "nan"], "not 'nan'"),
        (["churn", "--compare", "--fillfactor", "90"], "--compare chooses its variants itself"),
        (["churn", "--keys", "10", "--clients", "11"], "more than there are keys (10)"),
    ],
)
def test_bad_input_is_refused_before_a_server_starts(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """The message says what is wrong with which argument."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
