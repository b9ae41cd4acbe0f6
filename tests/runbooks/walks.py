"""Do what a runbook says, block by block."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from .pages import Block, Command, blocks, commands, statements
from .sites import Ask, Ran, Site


class Plan(NamedTuple):
    """A case of a runbook, on a store."""

    page: str
    way: str
    store: str


#: All that tests stage: what is missing here is run by nobody.
PLANNED: set[Plan] = set()


def incident(page: str, way: str, *stores: str) -> Callable[[Any], Any]:
    """Run a test for a case of a runbook on each of these stores; it gets a `walk`.

    A case whose own blocks are for any store needs one of each kind; each operation that it calls
    is tried on every store by `tests/contract/test_operators.py`.
    """
    plans = [Plan(page, way, store) for store in stores]
    PLANNED.update(plans)
    return pytest.mark.parametrize("walk", plans, indirect=True, ids=stores)


def planned_blocks(plan: Plan) -> list[Block]:
    """Return what somebody runs in this case."""
    return [each for each in blocks(plan.page) if each.is_for(plan.way, plan.store)]


@dataclass(frozen=True)
class Answer:
    """What a block came to.

    Attributes:
        text: What commands printed.
        rows: What the last statement of SQL that gives rows gave.
        status: The exit status of the last command.
    """

    text: str = ""
    rows: tuple[tuple[Any, ...], ...] = ()
    status: int = 0


class Walk:
    """A case of a runbook on a site of its own: what is left of it, and how to do it."""

    def __init__(self, plan: Plan, site: Site, servers: ExitStack):
        self.site = site
        #: What keeps the servers of this site alone running.
        self.servers = servers
        self.left = planned_blocks(plan)
        self._plan = plan
        self._sessions: dict[str, Ask] = {}
        self._values: dict[str, str] = {}

    def stands_for(self, made_up: str, value: object) -> None:
        """Say what a made-up value of the page is here."""
        self._values[made_up] = str(value)

    def skip_to(self, section: str) -> None:
        """Leave out what stands before a section: for tests beside the one that runs all."""
        self.left = [each for each in self.left if each.section == section]

    def again(self, section: str) -> None:
        """Do a section once more."""
        self.left += [each for each in planned_blocks(self._plan) if each.section == section]

    def confirm(self, *, status: int = 0) -> list[Answer]:
        """Run all that is left of `Confirm`; each command ends with this status."""
        return list(self._run_all("Confirm", status))

    def act(self, *, status: int = 0) -> list[Answer]:
        """Run all that is left of `Act`."""
        assert not self.left or self.left[0].section == "Act"
        return list(self._run_all("Act", status))

    def step(self, *, status: int = 0) -> Answer:
        """Run the next block."""
        block = self.left.pop(0)
        try:
            return self._run(block, status)
        except AssertionError as error:
            error.add_note(f"in {block}")
            raise

    def _run_all(self, section: str, status: int) -> Iterator[Answer]:
        assert any(each.section == section for each in self.left)
        # One session for all of it, as in a window that stays open.
        with ExitStack() as opened:
            while self.left and self.left[0].section == section:
                database = self.left[0].database
                if self.left[0].language == "sql" and database not in self._sessions:
                    self._sessions[database] = opened.enter_context(self.site.session(database))
                yield self.step(status=status)
        self._sessions.clear()

    def _run(self, block: Block, status: int) -> Answer:
        if block.language == "sql":
            rows: list[tuple[Any, ...]] = []
            with ExitStack() as opened:
                ask = self._sessions.get(block.database) or opened.enter_context(
                    self.site.session(block.database)
                )
                for each in statements(block):
                    rows = ask(self.read(each)) or rows
            return Answer(rows=tuple(rows))
        if block.language == "python":
            ran = self.site.command("python manage.py shell -v 0 -c", self.read(block.text))
            assert ran.status == status, ran.text
            return Answer(ran.text, status=ran.status)
        assert block.language == "console", block.language
        done = [self._command(each, status) for each in commands(block)]
        return Answer("".join(each.text for each in done), status=done[-1].status)

    def _command(self, command: Command, status: int) -> Ran:
        ran = self.site.command(self.read(command.line))
        assert ran.status == status, f"{command.line}: {ran.status}\n{ran.text}"
        assert_prints(ran.text, [self.read(each) for each in command.prints])
        return ran

    def read(self, text: str) -> str:
        """Return a text of the page with what it means here."""
        for made_up, value in self._values.items():
            pattern = rf"(?<![\w:]){re.escape(made_up)}(?!\w)"
            text = re.sub(pattern, value.replace("\\", r"\\"), text)
        return text


def assert_prints(text: str, expected: list[str]) -> None:
    """Check that these lines are printed, in this order, among others."""
    lines = [" ".join(each.split()) for each in text.splitlines()]
    rest = iter(lines)
    for each in expected:
        if each.strip() == "…":
            continue
        wanted = ".*".join(map(re.escape, " ".join(each.split()).split("…")))
        assert any(re.fullmatch(wanted, line) for line in rest), f"no {each!r} in\n{text}"
