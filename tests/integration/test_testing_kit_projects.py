"""The testing kit in projects: Django's test cases, pytest, and what the how-to says about it."""

from __future__ import annotations

import re
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase

from django_distlock import BackendUnavailable, Lease, LockLost, LockNotAcquired, distlock
from django_distlock.models import HeldLock, LockEvent
from django_distlock.testing import (
    Locks,
    advance,
    assert_locked,
    assert_not_locked,
    expire,
    hold,
    lose_connection,
    memory_locks,
    simulate_pause,
    steal,
)
from tests.contract.aliases import ALL, for_each, run_cases
from tests.contract.locking import rolled_back
from tests.processes import BE_PYTHON, manage, spawn
from tests.shop.models import Row

from .newcomers import outer
from .projects import PATIENCE, ROOT, run_python

#: The backends that a project keeps in its database, and the database.
STORES = {
    alias: options["OPTIONS"]["using"]
    for alias, options in settings.DISTLOCK.items()
    if options["BACKEND"] == settings.DATABASE_BACKEND
}


class InMemory(SimpleTestCase):
    """What `memory_locks` is where no database may be used."""

    __test__ = False

    @memory_locks(WAIT=0, kwarg_name="locks")
    def test_loss_asks_no_database(self, locks: Locks) -> None:
        """Django would forbid it."""
        told: list[Lease] = []
        lease = distlock("key", backend="sqlite").acquire()
        lease.on_lost(told.append)
        locks.simulate_pause(lease)
        assert told == [lease]
        with hold("key"):
            locks.advance(3600)
            assert distlock("key").try_acquire() is None

    @memory_locks()
    async def test_coroutine(self) -> None:
        """It runs in an event loop that Django makes."""
        lease = await distlock("key").aacquire()
        advance(29)
        lease.check()
        advance(1)
        assert lease.is_lost


@memory_locks(attr_name="locks", WAIT=0)
class InMemoryInTestCase(TestCase):
    """What `memory_locks` is beside a transaction that is rolled back."""

    __test__ = False
    databases = set(ALL)
    locks: Locks

    def test_callbacks_share_the_transaction(self) -> None:
        """What they write is seen by the test, and rolled back with it."""
        lease = distlock("key").acquire()
        lease.on_lost(lambda lost: Row.objects.create(name=f"lost {lost.key}"))
        self.locks.advance(31)
        assert Row.objects.get().name == "lost key"
        assert not LockEvent.objects.exists()

    def test_block_inside_atomic(self) -> None:
        """Its end frees the key, as in each `TestCase`."""
        with transaction.atomic():
            with distlock("key"):
                self.locks.advance(100)
                assert_locked("key")
            assert_not_locked("key")

    test_block_inside_atomic_again = test_block_inside_atomic


@memory_locks()
class InMemoryInTransactionTestCase(TransactionTestCase):
    """What `memory_locks` is beside transactions that commit."""

    __test__ = False
    databases = {"default"}

    def test_key_waits_for_the_commit(self) -> None:
        """As in production; and it is kept alive until then, however long that takes."""
        with transaction.atomic():
            with distlock("key", ttl=30):
                Row.objects.create(name="in a test")
            advance(300)
            assert_locked("key")
        assert_not_locked("key")

    def test_key_is_free_behind_a_rollback(self) -> None:
        """At once, although a thread of the package releases it."""
        for _ in range(20):
            with rolled_back(), distlock("key"):
                pass
            assert_not_locked("key")

    def test_transaction_may_outlive_the_locks(self) -> None:
        """A release that still waits when all is forgotten finds nothing to release."""
        with transaction.atomic(), memory_locks():
            distlock("key").acquire().release()
            assert_locked("key")
        assert_not_locked("key")


class InDatabase:
    """What the helpers are for locks that a database keeps."""

    alias = ""

    def lock(self, key: str = "key", **more: Any) -> Any:
        """Describe a lock on the backend of this class."""
        return distlock(key, backend=self.alias, **{"wait": 0, **more})

    def test_somebody_else_holds_it(self) -> None:
        """And lets go at the end of the block."""
        with hold("key", backend=self.alias):
            assert_locked("key", backend=self.alias)
            with pytest.raises(LockNotAcquired):
                self.lock().acquire()
        with self.lock():
            pass

    def test_expired_and_stolen(self) -> None:
        """The holder is told when it asks the store."""
        lease = self.lock().acquire()
        expire("key", backend=self.alias)
        assert_not_locked("key", backend=self.alias)
        with pytest.raises(LockLost):
            lease.extend()
        lease = self.lock().acquire()
        other = steal(lease)
        assert other.fence > lease.fence
        with pytest.raises(LockLost):
            lease.extend()
        assert other.release() is True

    def test_paused_in_a_block(self) -> None:
        """The block is told at its end, and who listens before that, in this thread."""
        told: list[int] = []

        def work() -> None:
            with self.lock(ttl=30) as lease:
                lease.on_lost(lambda lost: told.append(threading.get_ident()))
                simulate_pause(lease)

        with pytest.raises(LockLost):
            work()
        assert told == [threading.get_ident()]
        assert_not_locked("key", backend=self.alias)
        lease = self.lock().acquire()
        other = simulate_pause(lease, taken_by_other=True)
        assert lease.is_lost
        assert other is not None
        other.release()

    def test_store_is_away(self) -> None:
        """And there again."""
        with lose_connection(self.alias), pytest.raises(BackendUnavailable):
            self.lock().acquire()
        with self.lock():
            pass


class InDatabaseInTestCase(InDatabase, TestCase):
    """The same on the connection of the test."""

    __test__ = False
    databases = set(ALL)

    def test_callbacks_share_the_transaction(self) -> None:
        """The event of a loss, too, is seen by the test, and rolled back with it."""
        lease = self.lock().acquire()
        lease.on_lost(lambda lost: Row.objects.create(name=f"lost {lost.key}"))
        simulate_pause(lease)
        assert Row.objects.get().name == "lost key"
        assert LockEvent.objects.get().kind == LockEvent.Kind.LOST


class InDatabaseInTransactionTestCase(InDatabase, TransactionTestCase):
    """The same where others see what is committed."""

    __test__ = False

    def test_others_do_not_wait_for_the_transaction(self) -> None:
        """It is not theirs."""
        if STORES[self.alias] == "sqlite":
            self.skipTest("SQLite has one writer")
        with transaction.atomic(using=STORES[self.alias]):
            with hold("key", backend=self.alias):
                assert_locked("key", backend=self.alias)
            assert_not_locked("key", backend=self.alias)


def run_test_cases() -> dict[str, Any]:
    """Be a test run."""
    made_for = for_each(STORES, InDatabaseInTestCase, InDatabaseInTransactionTestCase)
    plain = (InMemory, InMemoryInTestCase, InMemoryInTransactionTestCase)
    return run_cases("kit", (*plain, *made_for), left)


def left() -> dict[str, Any]:
    """Say what is left in the databases."""
    rows = {
        f"{model.__name__} in {name}": model.objects.using(name).count()
        for model in (HeldLock, LockEvent)
        for name in ALL
    }
    return {"left": {what: number for what, number in rows.items() if number}}


def test_kit_works_in_django_test_cases() -> None:
    """`TestCase` and `TransactionTestCase`, in memory and in databases; nothing is left."""
    with spawn("tests.integration.test_testing_kit_projects:run_test_cases") as run:
        told = run.result(PATIENCE)
    assert told == {"ran": 8 + 10 * len(STORES), "fine": True, "left": {}}


# A project of somebody's own

SETTINGS = """
DATABASES = {
    name: {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": f"{name}.sqlite3",
        "TEST": {"NAME": f"test-{name}.sqlite3"},
    }
    for name in ("default", "locks")
}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_distlock"]
SECRET_KEY = "only for tests"
USE_TZ = True
"""
#: Each warning is an error, but that the package is in this process already.
WARNINGS = ("-W", "error", "-W", "ignore:Module already:pytest.PytestAssertRewriteWarning")
WITHOUT = [f"-pno:{name}" for name in ("asyncio", "cacheprovider", "randomly", "xdist")]
PYTEST = ("pytest", "-q", *WARNINGS, "--strict-markers", *WITHOUT)
HOW_TO = ROOT / "docs/howto/test-code-that-locks.md"
#: The kit on the database backend, where the locks have their own alias.
IN_A_DATABASE = """
from django.test import TestCase
from django_distlock import LockLost, distlock
from django_distlock.testing import assert_not_locked, simulate_pause


class CaptureTests(TestCase):
    databases = {"default", "locks"}

    def test_end_of_a_block_tells_of_the_loss(self):
        with self.assertRaises(LockLost), distlock("payment:1") as lease:
            simulate_pause(lease)
        assert_not_locked("payment:1")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Give the folder of a project in which this version of the package is installed."""
    (tmp_path / "project_settings.py").write_text(SETTINGS)
    # Whatever is installed where these tests run: what the package declares by now counts.
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, target),) = declared["pytest11"].items()
    installed = tmp_path / "site" / "declared-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{name} = {target}\n")
    return tmp_path


def run(project: Path, *arguments: str, status: int = 0) -> str:
    """Run a module of Python in the project; return what it printed."""
    environment = outer() | {"DJANGO_SETTINGS_MODULE": "project_settings"}
    path = f"{project}:{project / 'site'}"
    said, ended = manage([path, "", "-m", *arguments], environment, PATIENCE, BE_PYTHON)
    assert ended == status, f"exit status {ended}:\n{said}"
    return said


def run_pytest(project: Path, *arguments: str, **more: Any) -> str:
    """Run pytest in the project."""
    return run(project, *PYTEST, *arguments, **more)


def block(start: str) -> str:
    """Return the one block of Python in the how-to that has this text in its first lines."""
    blocks = re.findall(r"^```python\n(.*?)^```", HOW_TO.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [each for each in blocks if start in each]
    return str(found)


def test_how_to_is_so(project: Path) -> None:
    """Its tests pass; without the check, that of the section fails as told."""
    shop = project / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    for name, start in {
        "tests.py": "# shop/tests.py\n",
        "test_report.py": "class ReportTests(",
        "test_contention.py": "class ContentionTests(",
    }.items():
        (shop / name).write_text(block(start))
    (shop / "test_payment.py").write_text(IN_A_DATABASE)
    careful = block("# shop/capture.py\n")
    check = "        lease.check()\n"
    assert check in careful
    (shop / "capture.py").write_text(careful.replace(check, ""))
    told = run(project, "django", "test", "shop", status=1)
    assert "AssertionError: Lists differ: [(42, 100)] != []" in told
    assert "Ran 5 tests" in told
    assert "FAILED (failures=1)" in told
    (shop / "capture.py").write_text(careful)
    told = run(project, "django", "test", "shop")
    assert "Ran 5 tests" in told
    assert "\nOK\n" in told
    (project / "test_fixture.py").write_text(block("@pytest.mark.memory_locks(WAIT=0)"))
    assert "1 passed" in run_pytest(project, "test_fixture.py")


FIXTURE = """
from unittest import TestCase

import pytest

from django_distlock import LockLost, distlock, lock_backends
from django_distlock.testing import advance, assert_locked

pytestmark = pytest.mark.memory_locks(TTL=60)


@pytest.mark.parametrize("time", [1, 2])
def test_begins_with_nothing(memory_locks, time):
    assert lock_backends["default"].config.ttl == 60
    assert lock_backends["default"].config.wait == 5
    lease = distlock("key").acquire()
    assert lease.fence == 1
    memory_locks.advance(59)
    lease.check()
    advance(2)
    assert lease.is_lost


@pytest.mark.memory_locks(TTL=10, WAIT=0)
def test_nearest_mark_counts():
    lease = distlock("key").acquire()
    advance(11)
    assert lease.is_lost


class TestCapture(TestCase):
    def test_of_a_class(self):
        distlock("key").acquire()
        assert_locked("key")


@pytest.mark.memory_locks(WEIGHT=1)
def test_illegal_setting(memory_locks):
    pass


def test_lost(memory_locks):
    with distlock("key") as lease:
        memory_locks.simulate_pause(lease)
"""
OTHERS = """
from django_distlock import lock_backends
from django_distlock.backends.database import DatabaseBackend


def test_without():
    assert isinstance(lock_backends["default"], DatabaseBackend)
"""


def test_fixture_and_mark_of_pytest(project: Path) -> None:
    """A test gets locks of its own, with the settings that the nearest mark says."""
    (project / "test_locks.py").write_text(FIXTURE)
    (project / "test_others.py").write_text(OTHERS)
    told = run_pytest(project, "test_locks.py", "test_others.py", status=1)
    assert "5 passed, 1 failed, 1 error" in told.replace("1 failed, 5 passed", "5 passed, 1 failed")
    assert "Unknown settings: 'WEIGHT'" in told
    assert "LockLost: The lease on 'key'" in told
    assert "@pytest.mark.memory_locks(**settings)" in run_pytest(project, "--markers")


def test_run_without_django_is_as_before(project: Path) -> None:
    """Where the package is only installed, pytest needs no settings, and loads no models."""
    (project / "test_other.py").write_text(
        "import sys\n\n\ndef test_other():\n"
        '    assert not {"django_distlock.models", "django.test"} & sys.modules.keys()\n'
    )
    path = f"{project}:{project / 'site'}:{ROOT}"
    told = run_python(project, "-m", *PYTEST, "-pno:django", "test_other.py", PYTHONPATH=path)
    assert "1 passed" in told
