"""Sites for incidents."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack

import pytest

from tests.integration.conftest import _databases, mysql, postgresql, sqlite
from tests.services import private_redis

from .sites import Site
from .walks import Plan, Walk

__all__ = ["_databases", "mysql", "postgresql", "sqlite"]


@pytest.fixture
def walk(request: pytest.FixtureRequest) -> Iterator[Walk]:
    """Give a case of a runbook, on a site of its own; afterwards, none of its blocks is left."""
    plan: Plan = request.param
    kind = {"session": "postgresql", "redis": "sqlite"}.get(plan.store, plan.store)
    using: str = request.getfixturevalue(kind)
    with ExitStack() as stack:
        url = stack.enter_context(private_redis()).url if plan.store == "redis" else ""
        site = Site(plan.store, using, url)
        site.make_tables()
        walk = Walk(plan, site, stack)
        yield walk
    if not request.node.stash.get(FAILED, False):
        assert [str(each) for each in walk.left] == [], "nobody has run this"


#: Whether the test itself has failed: then it need not have run all blocks.
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep whether a test has failed, for its fixtures to see."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report
