"""Which tests a plain run takes, and which servers they need."""

from __future__ import annotations

import pytest

from .services_plugin import KINDS, ask_for


def servers(item: pytest.Item) -> set[str]:
    """Return the servers that a test needs."""
    return set(KINDS)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not (session.config.option.collectonly or session.testsfailed):
        ask_for(set().union(*map(servers, session.items)))
