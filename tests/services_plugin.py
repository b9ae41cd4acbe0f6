"""Start the servers before Django reads its settings: a `conftest.py` is loaded too late."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version

import pytest

from tests import services

REPORT: list[str] = []
#: What brings MariaDB's drivers.
DRIVERS = {"MySQLdb": "mysqlclient", "pymysql": "PyMySQL"}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Start what is missing, once a run: the workers of xdist inherit the addresses."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        stack = ExitStack()
        early_config.add_cleanup(stack.close)
        scratch = stack.enter_context(services.folder())
        # Side by side: each run waits for the slowest of them.
        with ThreadPoolExecutor() as pool:
            postgres_starts = pool.submit(stack.enter_context, services.postgres())
            mariadb_starts = pool.submit(stack.enter_context, services.mariadb())
            redis_starts = pool.submit(stack.enter_context, services.redis())
            cluster_starts = pool.submit(stack.enter_context, services.redis_cluster())
        postgres, mariadb = postgres_starts.result(), mariadb_starts.result()
        redis, cluster = redis_starts.result(), cluster_starts.result()
        os.environ["DISTLOCK_TEST_SCRATCH"] = str(scratch)
        os.environ["DISTLOCK_TEST_POSTGRES_URL"] = postgres.url
        os.environ["DISTLOCK_TEST_REDIS_URL"] = redis.url
        os.environ["DISTLOCK_TEST_REDIS_CLUSTER_URL"] = cluster.url
        REPORT.append(f"PostgreSQL {postgres.version} ({postgres.source})")
        by = f"redis-py {version('redis')}"
        REPORT.append(f"{redis.version} ({redis.source}), by {by}")
        REPORT.append(f"{cluster.version}, a cluster ({cluster.source}), by {by}")
        if mariadb is None:
            REPORT.append(services.NO_MARIADB)
        else:
            os.environ["DISTLOCK_TEST_MYSQL_URL"] = mariadb.url
            driver = DRIVERS[services.mysql_driver().__name__]
            by = f"{driver} {version(driver)}"
            REPORT.append(f"MariaDB {mariadb.version} ({mariadb.source}), by {by}")
    return (yield)


def pytest_report_header() -> list[str]:
    """Say what the tests run against."""
    return REPORT
