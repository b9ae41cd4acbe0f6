"""Functions in processes of their own."""

from __future__ import annotations

import atexit
import os
import sys
import time

import pytest

from tests.processes import WHOLE_END, spawn
from tests.shop.models import Row


def add(name: str, amount: int) -> dict[str, int]:
    """Add to a row once the test says so."""
    print("ready")
    row = Row.objects.get(name=name)
    row.value += amount * int(input())
    row.save()
    return {"value": row.value, "pid": os.getpid()}


def fail() -> None:
    """Fail."""
    raise ZeroDivisionError


def sleep() -> None:
    """Never end by itself."""
    print("asleep")
    time.sleep(60)


@pytest.mark.django_db(transaction=True)
def test_process_works_on_the_test_database() -> None:
    """A process reads and writes the rows of the test that started it, and can be talked to."""
    Row.objects.create(name="stock", value=1)
    with spawn("tests.unit.test_processes:add", "stock", 10) as worker:
        worker.wait_for("ready")
        worker.send("4")
        result = worker.result()
    assert result == {"value": 41, "pid": worker.popen.pid}
    assert Row.objects.get(name="stock").value == 41


@pytest.mark.django_db(transaction=True, databases=["sqlite"])
def test_process_works_on_the_sqlite_test_database() -> None:
    """It is a file that another process can open; keyword arguments are environment variables."""
    Row.objects.using("sqlite").create(name="stock")
    with spawn("tests.unit.test_processes:names", "sqlite", ANSWER="42") as worker:
        assert worker.result() == ["stock", "42"]


def names(using: str) -> list[str]:
    """List the row of the test in a database, and what the environment says."""
    # Races in transactions of other tests leave rows of their own there.
    rows = Row.objects.using(using).filter(name="stock").values_list("name", flat=True)
    return [*rows, os.environ["ANSWER"]]


def test_failure_carries_the_traceback() -> None:
    """A function that raises fails the test, with the process's own words."""
    with (
        spawn("tests.unit.test_processes:fail") as worker,
        pytest.raises(AssertionError, match="ZeroDivisionError"),
    ):
        worker.result()


def test_leaving_the_block_ends_the_process() -> None:
    """No process outlives its block."""
    with spawn("tests.unit.test_processes:sleep") as worker:
        worker.wait_for("asleep")
    assert worker.popen.returncode == -9


def test_silence_is_bounded() -> None:
    """Waiting for a line that never comes ends."""
    with (
        spawn("tests.unit.test_processes:sleep") as worker,
        pytest.raises(AssertionError, match="nothing more in time"),
    ):
        worker.wait_for("awake", timeout=0.05)


class _ToTheLast:
    """Says that Python frees it."""

    def __del__(self) -> None:
        os.write(1, b"freed\n")


def leave_something() -> None:
    """Have `atexit` say something, and leave what Python frees behind that, before all modules."""
    atexit.register(print, "registered")
    print("left", end="")
    sys.ps1 = _ToTheLast()


@pytest.mark.parametrize(("how", "last"), [({}, []), (WHOLE_END, ["freed"])])
def test_end_comes_behind_atexit_and_its_rest_is_optional(
    how: dict[str, str], last: list[str]
) -> None:
    """To free each object takes a tenth of a second, which few tests are about."""
    with spawn("tests.unit.test_processes:leave_something", **how) as worker:
        assert worker.popen.wait(20) == 0
        worker._reader.join()
    assert worker._output == ["leftresult: null", "registered", *last]
