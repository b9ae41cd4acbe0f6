"""What all tests share: the test databases, and skips that are declared and counted."""

from __future__ import annotations

import gc
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from weakref import WeakSet

import pytest
from django.apps import apps
from django.conf import settings
from django.db import connections
from django.test.utils import override_settings, setup_databases, teardown_databases
from pytest_django import DjangoDbBlocker

from django_distlock.backends.base import every
from django_distlock.database.connections import _every, before_drop
from django_distlock.handler import lock_backends
from django_distlock.process.heartbeat import held_here

from .services_plugin import answering

#: The reason of a skip that a marker declares starts with this, and the summary counts it.
DECLARED = "declared: "


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for line in (
        "requires(*capabilities, **values): only on backends that have these",
        "stores(*names, why): only on backends whose records these stores keep, and why",
        "aliases(*names): only on these backends",
        "nightly: a drill that runs long, and neither in quick runs nor in those of all tests",
        "servers(*names): needs these servers, and no others",
        "faults: starts a server of its own, to stop it or to spoil it",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays until the end: the tests themselves, and modules."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _no_connection_is_left() -> Iterator[None]:
    """Close what the backends that a test made by hand keep open.

    Left to the garbage collector, a socket may be told of before the connection that closes it, as
    a warning in whichever test runs then.
    """
    # Weak: one that nobody has any more is not kept for a fork that begins anew with all of them.
    before = WeakSet(every)
    yield
    kept = (before, lock_backends._backends.values())
    for backend in list(every):
        # One whose options were refused is not complete, and has no connections.
        if hasattr(backend, "store") and not any(backend in each for each in kept):
            backend._keep_no_connections()


@pytest.fixture
def key() -> str:
    """Give a text that only this test uses: a key, or the start of several."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def django_db_setup(
    request: pytest.FixtureRequest,
    django_test_environment: None,
    django_db_blocker: DjangoDbBlocker,
    django_db_modify_db_settings: None,
) -> Iterator[None]:
    """Make every test database, whatever was selected.

    The fixture of pytest-django makes those that a marker names, and the marker also empties them
    after each test. The contract suite must not have that: see its conftest.
    """
    if request.config.getvalue("nomigrations"):
        settings.MIGRATION_MODULES = {app.label: None for app in apps.get_app_configs()}
    keep = request.config.getvalue("reuse_db")
    # Django's own apps need no migrations here, and theirs took longer than ours.
    at_once = {**settings.MIGRATION_MODULES, "auth": None, "contenttypes": None}
    with django_db_blocker.unblock(), override_settings(MIGRATION_MODULES=at_once):
        made = setup_databases(
            verbosity=0,
            interactive=False,
            keepdb=keep and not request.config.getvalue("create_db"),
            # For `serialized_rollback`, which no test asks for.
            serialized_aliases=(),
            aliases=dict.fromkeys(
                alias for alias in connections if alias != "mariadb" or "MariaDB" in answering
            ),
        )
    yield
    # What tests have left held has no database to be released in when the interpreter ends.
    held_here._by_token.clear()
    if not keep:
        with django_db_blocker.unblock():
            _wait_for_sessions()
            teardown_databases(made, verbosity=0)


def _wait_for_sessions() -> None:
    """Let the server notice that processes are gone which a test killed a moment ago."""
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    give_up = time.monotonic() + 10
    for finish in before_drop:
        finish()
    for ours in list(_every):
        ours.close_all()
    with connections["default"].cursor() as cursor:
        while time.monotonic() < give_up:
            cursor.execute(others)
            if cursor.fetchone() == (1,):
                return
            time.sleep(0.1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was left out on purpose."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _, declared, what = reason.partition(DECLARED)
        if declared:
            counts[what] += 1
    if counts:
        terminalreporter.section("declared skips")
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:4}  {what}")
