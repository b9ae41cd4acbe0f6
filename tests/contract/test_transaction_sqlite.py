"""SQLite has one writer per file: a lock that would wait for its own transaction says so."""

from __future__ import annotations

import gc
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from django.db import transaction

from django_distlock import BackendUnavailable, Lock, LockUsageError, distlock
from django_distlock.handler import lock_backends
from django_distlock.locks.attempts import BUSY_SECONDS
from django_distlock.managers.compact import OwnTransaction
from tests.backends import Registered
from tests.integration.databases import migrate
from tests.shop.models import Row

from .aliases import alias_like, locks_on
from .helpers import prompt
from .locking import eventually, grantable, held_elsewhere, lock_of, taken

pytestmark = pytest.mark.stores("sqlite", why="its store takes many writers")


def check_refused(lock: Lock) -> None:
    """Check that every way to take the lock is refused at once."""
    for attempt in (lock.acquire, lock.try_acquire, lock.__enter__):
        with prompt(), pytest.raises(LockUsageError) as caught:
            attempt()
        assert caught.value.code == "self_blocked"
        assert "outside of atomic()" in str(caught.value)
        assert "a file of its own" in str(caught.value)


def test_acquire_inside_a_transaction_on_the_file_is_refused_at_once(
    registered: Registered, key: str
) -> None:
    """Before any wait, and the transaction stays usable: what counts is the file, not the alias."""
    lock = lock_of(registered, key, wait=5)
    with alias_like("sqlite") as other:
        for alias in ("sqlite", other):
            with transaction.atomic(using=alias):
                check_refused(lock)
                Row.objects.using(alias).create(name=key)
                check_refused(lock)
    assert Row.objects.using("sqlite").filter(name=key).count() == 2
    assert grantable(lock)


def test_reading_inside_a_transaction_on_the_file_is_possible(lock: Lock, key: str) -> None:
    """Whether a key is held can be asked at any time."""
    with held_elsewhere(lock), transaction.atomic(using="sqlite"):
        assert lock.locked() is True
        assert lock_backends[lock.backend].read(key) is not None
    assert lock.locked() is False


def test_lock_around_a_transaction_on_the_file_works(lock: Lock, key: str) -> None:
    """The order that the refusal asks for; given up inside, it is freed behind the commit."""
    with lock:
        with transaction.atomic(using="sqlite"):
            Row.objects.using("sqlite").create(name=key)
        assert taken(lock)
    assert grantable(lock)
    for roll_back in (False, True):
        lease = lock.acquire()
        with transaction.atomic(using="sqlite"):
            Row.objects.using("sqlite").create(name=key)
            assert lease.release() is True
            transaction.set_rollback(roll_back, using="sqlite")
        assert eventually(lambda: grantable(lock))


def test_extend_inside_a_transaction_on_the_file_says_why_not(
    registered: Registered, key: str
) -> None:
    """Writing for the lease is as impossible as taking it, and the lease stands."""
    lease = lock_of(registered, key).acquire()
    with transaction.atomic(using="sqlite"):
        with prompt(), pytest.raises(LockUsageError) as caught:
            lease.extend()
        assert caught.value.code == "self_blocked"
    assert lease.held
    lease.extend()
    assert lease.release()


@pytest.mark.aliases("sqlite")
@pytest.mark.parametrize("mode", ["IMMEDIATE", "EXCLUSIVE"])
def test_reading_inside_a_transaction_that_has_the_file_is_possible(
    key: str, tmp_path: Path, mode: str
) -> None:
    """Without WAL, an exclusive one keeps every other connection out."""
    options = {"transaction_mode": mode, "init_command": "PRAGMA synchronous=OFF"}
    file = str(tmp_path / "locks.sqlite3")
    with alias_like("sqlite", NAME=file, OPTIONS=options) as using, locks_on(using) as locks:
        migrate(using)
        lock = distlock(key, backend=locks)
        with held_elsewhere(lock), transaction.atomic(using=using), prompt():
            assert lock.locked() is True


def reachable() -> set[int]:
    """Collect garbage, and return which connections to files are left."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) is sqlite3.Connection}


def test_commit_that_fails_leaves_the_file_to_others(tmp_path: Path) -> None:
    """Without WAL, whoever reads keeps it from being written; then nobody waits for who gave up."""
    ours, reader, other = (
        sqlite3.connect(tmp_path / "file", isolation_level=None, timeout=0) for _ in range(3)
    )
    with closing(ours), closing(reader), closing(other):
        ours.execute("CREATE TABLE diary (entry)")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM diary").fetchall()
        with pytest.raises(sqlite3.OperationalError), OwnTransaction(ours):
            ours.execute("INSERT INTO diary VALUES (1)")
        reader.execute("COMMIT")
        other.execute("INSERT INTO diary VALUES (2)")
        assert other.execute("SELECT * FROM diary").fetchall() == [(2,)]


@pytest.mark.aliases("sqlite")
@pytest.mark.filterwarnings(
    # The second one from Python 3.14 on.
    "ignore:Exception ignored in. <sqlite3:pytest.PytestUnraisableExceptionWarning",
    "ignore:Exception ignored while finalizing database:pytest.PytestUnraisableExceptionWarning",
)
def test_opening_the_file_takes_no_longer_than_the_call(key: str, tmp_path: Path) -> None:
    """What the project does first may wait for whoever has the file, longer than the lock does."""
    file = str(tmp_path / "busy.sqlite3")
    stranger = sqlite3.connect(file, isolation_level=None)
    stranger.execute("BEGIN EXCLUSIVE")
    before = reachable()
    first = {"timeout": 20, "init_command": "PRAGMA journal_mode=WAL"}
    with (
        alias_like("sqlite", NAME=file, OPTIONS=first) as using,
        locks_on(using) as locks,
        prompt(BUSY_SECONDS),
        pytest.raises(BackendUnavailable),
    ):
        distlock(key, backend=locks, wait=0).acquire()
    # Django closes no connection whose first command fails, and another thread may still have the
    # error, with its traceback. Collected in a later test, it would be that one's failure.
    assert eventually(lambda: reachable() <= before)
    stranger.close()
