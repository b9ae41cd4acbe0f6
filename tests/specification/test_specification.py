"""The protocol keeps its promises in every state, and needs each of its safeguards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from .checking import SAFEGUARDS, SCOPES, Safeguard, check, told_of_scope
from .protocol import Rules

#: It shows each model and what each safeguard prevents, as printed.
PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "specification.md").read_text(
    encoding="utf-8"
)


@pytest.fixture(autouse=True)
def _nothing_is_collected() -> Iterator[None]:
    """No state refers to itself, and to look through all of them again and again takes long."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("scope", SCOPES)
def test_no_state_breaks_a_promise(scope: str) -> None:
    """Of a model that is large enough to have something to break. The page shows its size."""
    found = check(Rules(), SCOPES[scope])
    assert found.broken == "", "\n".join(found.trace)
    assert found.states > 5000
    assert told_of_scope(scope, found) in PAGE.splitlines()


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda each: "-".join(each.without))
def test_each_safeguard_is_needed(safeguard: Safeguard) -> None:
    """Left out, it leads to the broken promise that the page names."""
    found = check(safeguard.rules, SCOPES[safeguard.scope])
    assert found.broken
    assert len(found.trace) >= 5
    assert f"| {safeguard.says} | {found.broken} |" in PAGE.splitlines()


def test_page_shows_nothing_else() -> None:
    """A model or a safeguard that was taken out is not on the page any more."""
    assert PAGE.count(" states, ") == len(SCOPES)
    named = PAGE.partition("| without |")[2].partition("\n\n")[0]
    assert named.count("\n| ") == len(SAFEGUARDS)
