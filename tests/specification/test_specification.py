"""The protocol keeps its promises in every state, and needs each of its safeguards."""

from __future__ import annotations

from pathlib import Path

import pytest

from .checking import SAFEGUARDS, SCOPES, Safeguard, check, report
from .protocol import Rules

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "specification.md"


@pytest.mark.parametrize("scope", SCOPES)
def test_no_state_breaks_a_promise(scope: str) -> None:
    """Of a model that is large enough to have something to break."""
    found = check(Rules(), SCOPES[scope])
    assert found.broken == "", "\n".join(found.trace)
    assert found.states > 5000


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda each: "-".join(each.without))
def test_each_safeguard_is_needed(safeguard: Safeguard) -> None:
    """Left out, it leads to a broken promise."""
    found = check(safeguard.rules, SCOPES[safeguard.scope])
    assert found.broken
    assert len(found.trace) >= 5


def test_page_shows_what_is_found() -> None:
    """Word for word: the search visits the nearest states first, in one order."""
    assert f"```text\n{report()}\n```" in PAGE.read_text(encoding="utf-8")
