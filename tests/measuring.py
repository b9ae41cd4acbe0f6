"""Where the time of a run goes: `./dev test -p tests.measuring`.

Prints the seconds of all tests, by folder and by what they are spent on, as a table of Markdown.
The workers of a run go side by side: it takes about a sum divided by their number. A test counts as
one thing, the first that holds:

* server: it starts a server of its own;
* process: it starts other processes, or has them forked;
* waiting: it does nothing for more than half of its time, except for the answers of servers;
* computing: all others.

Making the databases of a worker is counted by itself.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from .fork_server import FORKED

CAUSES = ("databases", "server", "process", "waiting", "computing")
#: What `tests.keeper` starts a server by.
KEEPER = "keeper"


class Measuring:
    """Measures in the process that runs a test, and adds up in the one that reports."""

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        self._making = self._begun = self._computed = 0.0
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._tests: Counter[tuple[str, str]] = Counter()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", FORKED):
            is_server = event == "subprocess.Popen" and KEEPER in list(arguments[1])
            self._started["server" if is_server else "process"] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Begin to measure."""
        self._started.clear()
        self._making = 0.0
        self._begun, self._computed = time.perf_counter(), time.process_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Time the making of databases."""
        begun = time.perf_counter()
        made = yield
        if fixturedef.argname == "django_db_setup":
            self._making += time.perf_counter() - begun
        return made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Let the last report of a test say what it took."""
        report = yield
        if call.when == "teardown":
            seconds = time.perf_counter() - self._begun - self._making
            computed = time.process_time() - self._computed
            idles = "waiting" if computed < seconds / 2 else "computing"
            cause = next((each for each in ("server", "process") if self._started[each]), idles)
            report.user_properties.append(("measured", (cause, seconds, self._making)))
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add it up, where the reports of all workers arrive."""
        measured = dict(report.user_properties).get("measured")
        if report.when == "teardown" and measured:
            cause, seconds, making = measured
            folder = report.nodeid.split("::")[0].rpartition("/")[0]
            self._seconds[folder, cause] += seconds
            self._tests[folder, cause] += 1
            self._seconds[folder, "databases"] += making

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        terminalreporter.section("seconds")
        write = terminalreporter.write_line
        write(f"| folder | tests | seconds | {' | '.join(CAUSES)} |")
        write(f"|---|{'---:|' * (len(CAUSES) + 2)}")
        folders = sorted({folder for folder, _ in self._seconds})
        for name, these in [*((each, [each]) for each in folders), ("all", folders)]:
            by_cause = [self._told(these, cause) for cause in CAUSES]
            tests = sum(self._tests[each] for each in self._tests if each[0] in these)
            seconds = sum(self._seconds[each] for each in self._seconds if each[0] in these)
            write(f"| {name} | {tests} | {seconds:.0f} | {' | '.join(by_cause)} |")

    def _told(self, folders: list[str], cause: str) -> str:
        seconds = sum(self._seconds[folder, cause] for folder in folders)
        tests = sum(self._tests[folder, cause] for folder in folders)
        return f"{seconds:.0f}" + (f" ({tests})" if tests else "")


def pytest_configure(config: pytest.Config) -> None:
    """Measure."""
    config.pluginmanager.register(Measuring(), "measuring")
