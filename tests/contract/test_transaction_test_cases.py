"""Locks in Django's test cases: `TestCase` rolls everything back, `TransactionTestCase` commits.

Run by Django's runner and not by pytest, in a process with databases of its own: pytest would
run them among tests that share their tables.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test import TestCase, TransactionTestCase
from django.test.utils import CaptureQueriesContext

from django_distlock import Lock, LockUsageError, Retry, current_lease, distlock
from tests.backends import BACKENDS
from tests.processes import spawn
from tests.services_plugin import KINDS
from tests.shop.models import Row

from .aliases import ALL, for_each, run_cases
from .helpers import PATIENCE, Later
from .locking import rolled_back

HERE = {
    each.alias: each.using or "default"
    for each in BACKENDS.values()
    if each.alias in settings.DISTLOCK
}


def lock_for(alias: str, key: str, **more: Any) -> Lock:
    """Describe a lock of this run alone: other runs may use the same server of Redis."""
    return distlock(f"{key}:{os.getpid()}", backend=alias, wait=0, **more)


class InTestCase(TestCase):
    """What works in a `TestCase`, where everything is one transaction that is rolled back."""

    __test__ = False
    databases = set(ALL)
    alias = ""

    def test_block_takes_and_frees_the_key(self) -> None:
        """The end of the block frees the key, though nothing is ever committed."""
        lock = lock_for(self.alias, "block")
        fence = 0
        for _ in range(3):
            with lock as lease:
                assert BACKENDS[self.alias].is_next(lease.fence, fence)
                fence = lease.fence
                assert lock.locked()
                assert current_lease() is lease
                lease.extend(60)
            assert not lock.locked()

    def test_contention_is_seen(self) -> None:
        """A second lease is refused."""
        lock = lock_for(self.alias, "contended")
        lease = lock.acquire()
        assert lock.try_acquire() is None
        assert lease.release() is True
        assert lock.try_acquire() is not None

    def test_block_inside_atomic_frees_at_its_end(self) -> None:
        """An `atomic()` in a test commits nothing: the block's end frees the key."""
        lock = lock_for(self.alias, "atomic")
        with transaction.atomic():
            Row.objects.create(name="in a test")
            with lock as lease:
                assert lease.held
            assert not lock.locked()
            with lock as again:
                assert BACKENDS[self.alias].is_next(again.fence, lease.fence)

    def test_block_that_fails_inside_atomic_frees_the_key(self) -> None:
        """A savepoint that is rolled back leaves no key behind."""
        lock = lock_for(self.alias, "failing")
        with pytest.raises(ZeroDivisionError), transaction.atomic(), lock:
            raise ZeroDivisionError
        assert not lock.locked()
        with lock:
            pass

    def test_statements_are_seen(self) -> None:
        """Who counts or logs what a test asks its database finds the lock's statements, too."""
        with CaptureQueriesContext(connections["sqlite"]) as seen, lock_for(self.alias, "seen"):
            pass
        is_seen = any("fencecounter" in each["sql"] for each in seen.captured_queries)
        assert is_seen is (BACKENDS[self.alias].using == "sqlite")

    def test_lock_is_rolled_back_with_the_test(self) -> None:
        """Whatever a test leaves held is gone in the next one: see the twin of this test."""
        assert lock_for(self.alias, "left").try_acquire() is not None

    def test_lock_is_rolled_back_with_the_test_again(self) -> None:
        """The twin."""
        # No rollback reaches what is kept elsewhere than in the databases of the test.
        if BACKENDS[self.alias].store in ("sqlite", "postgresql", "mysql"):
            assert lock_for(self.alias, "left").try_acquire() is not None

    def test_hooks_run_as_django_runs_them(self) -> None:
        """No hook of ours appears among those that a test captures."""
        lock = lock_for(self.alias, "hooks")
        with self.captureOnCommitCallbacks() as hooks, transaction.atomic(), lock:
            pass
        assert hooks == []


class InTransactionTestCase(TransactionTestCase):
    """What works in a `TransactionTestCase`, where transactions are real."""

    __test__ = False
    alias = ""

    def test_key_waits_for_the_commit(self) -> None:
        """As in a program, the key is free behind the transaction."""
        lock = lock_for(self.alias, "commit")
        with transaction.atomic():
            with lock:
                Row.objects.create(name="in a test")
            assert lock.locked()
        assert not lock.locked()

    def test_key_waits_for_the_rollback(self) -> None:
        """The same for a rollback; the next attempt gets it."""
        lock = lock_for(self.alias, "rollback")
        with rolled_back(), lock:
            pass
        with lock:
            pass

    def test_lock_on_the_file_of_the_transaction(self) -> None:
        """SQLite refuses to block itself here as well."""
        lock = lock_for(self.alias, "self", retry=Retry(max_retries=0))
        if self.alias.startswith("sqlite"):
            with transaction.atomic(using="sqlite"), pytest.raises(LockUsageError):
                lock.acquire()
        with lock:
            pass

    def test_threads_leave_no_session(self) -> None:
        """Locks of threads inside of transactions: the end of the run drops the databases."""

        def work(number: int) -> None:
            lock = distlock(f"thread:{number}:{os.getpid()}", backend=self.alias, wait=20)
            with transaction.atomic():
                Row.objects.exists()
                with lock as lease:
                    lease.extend()

        for each in [Later(work, number) for number in range(4)]:
            each.result()
        work(4)


def run_test_cases() -> dict[str, Any]:
    """Be a test run."""
    return run_cases("cases", for_each(HERE, InTestCase, InTransactionTestCase))


# Django's runner makes test databases in all of them.
@pytest.mark.servers(*KINDS)
def test_locks_work_in_django_test_cases() -> None:
    """`TestCase` and `TransactionTestCase` run as in a project, and drop their databases."""
    with spawn("tests.contract.test_transaction_test_cases:run_test_cases") as run:
        # It makes a database in each of them, which takes long on a busy machine.
        assert run.result(4 * PATIENCE) == {"ran": 12 * len(HERE), "fine": True}
