"""What all tests share: the test databases, and skips that are declared and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from django.apps import apps
from django.conf import settings
from django.db import connections
from django.test.utils import setup_databases, teardown_databases
from pytest_django import DjangoDbBlocker

from django_distlock.connections import _every, before_drop

from .safety import Unsafe

#: The reason of a skip that a marker declares starts with this, and the summary counts it.
DECLARED = "declared: "

#: Files whose tests let processes and threads act at certain times: a machine that stands still at
#: one of them can fail any of them, and none of them twice more. What no machine may fail, however
#: long it stands still, they say by `safety.never`, and that is not asked again.
TIMED = (
    "celery/test_beat.py",
    "celery/test_beat_database.py",
    "celery/test_endings.py",
    "celery/test_redelivery.py",
    "celery/test_traps_deaths.py",
    "celery/test_traps_pools.py",
    "contract/test_async_behind_sync.py",
    "contract/test_cleanup.py",
    "contract/test_fencing_drill.py",
    "contract/test_heartbeat.py",
    "contract/test_heartbeat_processes.py",
    "contract/test_leader_loop.py",
    "contract/test_lost_async.py",
    "contract/test_lost_leases.py",
    "contract/test_races.py",
    "contract/test_waiting_in_turn.py",
    "e2e/test_dashboard_browser.py",
    "e2e/test_dashboard_forgery.py",
    "e2e/test_dashboard_keyboard.py",
    "e2e/test_dashboard_live.py",
    "integration/test_distlock_bench.py",
    "integration/test_distlock_run.py",
    "integration/test_distlock_run_bootstrap.py",
    "integration/test_events.py",
    "integration/test_listening_postgresql.py",
    "redis/test_listening.py",
    "redis/test_listening_cluster.py",
    "redis/test_listening_faults.py",
    "redis/test_silence.py",
    "runbooks/test_clock_jump.py",
    "runbooks/test_failover.py",
    "runbooks/test_lost_lease.py",
    "runbooks/test_rejected_fence.py",
    "setups/test_gevent.py",
    "unit/test_alarms.py",
    "unit/test_heartbeat_thread.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ask again where only a machine that stood still may have failed a test."""
    again = pytest.mark.flaky(
        reruns=2,
        only_rerun=["AssertionError", "TimeoutError", "BackendUnavailable"],
        # Its message, and what it was raised behind, may name any of those.
        rerun_except=[Unsafe],
    )
    for item in items:
        if item.path.as_posix().endswith(TIMED):
            item.add_marker(again)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for line in (
        "requires(*capabilities, **values): skip backends that lack one or have another value",
        "stores(*names, why): skip backends whose records another store keeps, and say why",
        "faults: starts a server of its own, to stop it or to spoil it",
    ):
        config.addinivalue_line("markers", line)


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
    with django_db_blocker.unblock():
        made = setup_databases(
            verbosity=0, interactive=False, keepdb=keep and not request.config.getvalue("create_db")
        )
    yield
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
