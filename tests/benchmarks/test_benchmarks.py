"""The benchmarks run, and their figures are what they say. None is judged by its time."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.__main__ import BENCHMARKS, chosen, main, parser
from tests.benchmarks.expected import FIGURES, MEASURED, PEERS, TOGETHER
from tests.benchmarks.timing import AwaitedSubject, Comparison, Samples, Subject, measure
from tests.services import has_mariadb

ROOT = Path(__file__).parent.parent.parent


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


#: With a thousand locks, or with many processes: these run for minutes.
LONG = {"handoff", "operators"}


@pytest.mark.parametrize(
    "names",
    [pytest.param(each, marks=pytest.mark.nightly if LONG & {*each} else ()) for each in TOGETHER],
    ids=",".join,
)
def test_smallest_run_is_whole(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Every figure is there and positive, and ratios are those of the same rounds."""
    found = run(tmp_path, "--quick", "--fsync", "off", "--only", *names)
    assert_facts(found["facts"])
    assert set(found["benchmarks"]) == set(found["seconds"]) == set(names)
    made = parts(found["benchmarks"])
    may_miss = PEERS if has_mariadb() else {*PEERS, "mariadb", "mariadb-floor"}
    assert set(made) == {each for each in FIGURES if each.partition("/")[0] in names}
    for name, data in made.items():
        assert_positive(name, data)
        assert set(data.get("left_out", {})) <= may_miss
    for name in set(MEASURED) & set(made):
        once, each_round = MEASURED[name]
        assert_measured(made[name], once, each_round, found["options"]["rounds"])
        assert_ratios(made[name], each_round)
    if "roundtrips" in made:
        assert_counted(made["roundtrips"]["figures"])
    if "redis/roundtrips" in made:
        assert_counted_in_redis(made["redis/roundtrips"])


def parts(found: dict[str, Any]) -> dict[str, Any]:
    """Return what was found by the names of single benchmarks: Redis has several."""
    more = {f"redis/{name}": data for name, data in found.get("redis", {}).items()}
    return {name: data for name, data in found.items() if name != "redis"} | more


def test_all_benchmarks_run_unless_some_are_named() -> None:
    """Together the quick runs are what a run without names is."""
    assert chosen(parser().parse_args([])) == [*BENCHMARKS]
    assert {name for names in TOGETHER for name in names} == set(BENCHMARKS)
    assert chosen(parser().parse_args(["--only", "advisory", "redis"])) == ["redis", "advisory"]


def assert_facts(facts: dict[str, Any]) -> None:
    """Who compares two runs can see whether they may be compared."""
    assert {"cpu", "cpus", "memory_bytes", "python", "django", "psycopg"} <= set(facts)
    assert facts["postgresql"]["fsync"] == "off"
    assert facts["postgresql"]["synchronous_commit"] == "on"
    assert {"redis_py", "hiredis", "django_redis", "django_pglock"} <= set(facts)
    assert (facts["redis"]["save"], facts["redis"]["appendonly"]) == ("", "no")


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


def assert_counted_in_redis(found: dict[str, Any]) -> None:
    """A script is one command in one round trip; a peer that looks first needs two."""
    counted = found["figures"]
    for operation in ("acquire", "extend", "lose", "release"):
        ours = counted[f"redis/backend/{operation}"]
        assert (ours["statements"], ours["round_trips"]) == (1, 1)
    assert found["target"] == {
        "what": "round trips of a losing attempt", "measured": 1, "at_most": 1, "met": True,
    }  # fmt: skip
    if peer := counted.get("python-redis-lock/lock/acquire"):
        assert (peer["statements"], peer["round_trips"]) == (2, 2)


def test_churn_counts_operations_and_bytes(tmp_path: Path) -> None:
    """Churn says how many operations there were, what they wrote, and which updates were HOT."""
    found = run(tmp_path, "churn", "--quick", "--fsync", "off", "--compare")["benchmarks"]["churn"]
    variants = {each["name"]: each for each in found["variants"]}
    for variant in variants.values():
        assert set(variant["operations"]) == {"acquire", "extend", "release"}
        assert variant["summary"]["wal_bytes_per_operation"] > 0
        first, last = variant["samples"][0], variant["samples"][-1]
        updated = last["lock"]["n_tup_upd"] - first["lock"]["n_tup_upd"]
        # A client's first operation warms up, and is not counted.
        assert abs(updated - variant["operations"]["extend"]) <= found["load"]["clients"]
    # An index on a column that each extend changes.
    assert variants["index on free_at"]["summary"]["lock_hot_percent"] == 0
    assert "distlock_churn" in last_of(variants["index on free_at"])
    assert "distlock_churn" not in last_of(variants["as migrated"])


def last_of(variant: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the lock table's parts at the end."""
    sizes: dict[str, Any] = variant["samples"][-1]["lock"]["sizes"]
    return sizes


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


def test_awaited_steps_take_their_turns_too() -> None:
    """They run in order on the loop of their runner, a slice of them as one task."""
    said: list[tuple[str, object, object]] = []

    async def step(name: str) -> None:
        said.append((name, asyncio.get_running_loop(), asyncio.current_task()))

    with asyncio.Runner() as runner:
        steps = {name: partial(step, name) for name in ("in", "out")}
        subject = AwaitedSubject("a", steps=steps, total="both", runner=runner)
        samples = measure([subject], rounds=2, slice_ms=0)
        assert {loop for _name, loop, _task in said} == {runner.get_loop()}
    assert [name for name, _loop, _task in said] == ["in", "out"] * 3 * 3
    assert len({task for _name, _loop, task in said}) == 3
    assert {name: len(rounds) for name, rounds in samples.rounds.items()} == {
        "a/in": 2, "a/out": 2, "a/both": 2,
    }  # fmt: skip


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
