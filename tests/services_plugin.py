"""Start the servers before Django reads its settings: a `conftest.py` is loaded too late."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack

import pytest

from tests import services

REPORT: list[str] = []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Start what is missing, once a run: the workers of xdist inherit the addresses."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        stack = ExitStack()
        early_config.add_cleanup(stack.close)
        scratch = stack.enter_context(services.folder())
        postgres = stack.enter_context(services.postgres())
        os.environ["DISTLOCK_TEST_SCRATCH"] = str(scratch)
        os.environ["DISTLOCK_TEST_POSTGRES_URL"] = postgres.url
        REPORT.append(f"PostgreSQL {postgres.version} ({postgres.source})")
    return (yield)


def pytest_report_header() -> list[str]:
    """Say what the tests run against."""
    return REPORT
