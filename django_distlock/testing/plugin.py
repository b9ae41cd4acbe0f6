"""The plugin that pytest loads with this package: a fixture, and a mark that requests it.

@pytest.mark.memory_locks(WAIT=0)
def test_second_is_refused(memory_locks): ...
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .memory import Locks
from .memory import memory_locks as in_memory

MARK = "memory_locks"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line(
        "markers", f"{MARK}(**settings): use the fixture {MARK}, with these settings of DISTLOCK"
    )
    config.addinivalue_line(
        "markers", "distlock_needs(*attributes): of `testing.contract`: only where a backend has it"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the fixture to tests with the mark, which would acquire real locks without it."""
    if (
        isinstance(item, pytest.Function)
        and item.get_closest_marker(MARK)
        and MARK not in item.fixturenames
    ):
        item.fixturenames.insert(0, MARK)


@pytest.fixture
def memory_locks(request: pytest.FixtureRequest) -> Iterator[Locks]:
    """Keep the locks of a test in memory: see `django_distlock.testing`."""
    mark = request.node.get_closest_marker(MARK)
    with in_memory(**(mark.kwargs if mark else {})) as locks:
        yield locks
