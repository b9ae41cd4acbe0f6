"""The `Lock` of redis-py and `cache.lock()`, as their documentation describes them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis.lock
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.db import transaction
from django.test import override_settings
from django_redis.client import DefaultClient
from redis.exceptions import LockError, LockNotOwnedError

from django_distlock import BackendUnavailable, InvalidArgument, LockUsageError, distlock
from django_distlock.compat.redis import Lock, LockMixin
from django_distlock.inspection import force_release
from django_distlock.testing import lose_connection
from tests.contract.helpers import Later
from tests.contract.locking import eventually

pytestmark = pytest.mark.servers("PostgreSQL", "Redis", "Redis Cluster")


class Cache(LockMixin, LocMemCache):
    """A cache of a project."""

    lock_backend = "memory"


@pytest.fixture
def made(key: str) -> Iterator[Any]:
    """Give what makes locks on one key."""
    locks: list[Lock] = []

    def make(**how: Any) -> Lock:
        locks.append(Lock(None, key, backend="memory", **how))
        return locks[-1]

    yield make
    for each in locks:
        if each.owned():
            each.release()


def in_a_thread(work: Any) -> Any:
    """Return what a call gives, or raises, in another thread."""
    try:
        return Later(work).result()
    except LockError as error:
        return error


def test_signatures_are_those_of_redis_py() -> None:
    """Each argument is there, in its place and with its default."""
    for name in ("__init__", "acquire", "release", "extend", "reacquire", "locked", "owned"):
        theirs = inspect.signature(getattr(redis.lock.Lock, name)).parameters.values()
        ours = inspect.signature(getattr(Lock, name)).parameters.values()
        same = [each for each in ours if each.name != "backend"]
        assert [(each.name, each.default, each.kind) for each in same] == [
            (each.name, each.default, each.kind) for each in theirs
        ]


def test_one_holder_at_a_time(made: Any) -> None:
    """`acquire` answers a bool, `locked` whoever holds it, `owned` whether it is this one."""
    first, second = made(timeout=30), made(timeout=30, blocking=False)
    assert not first.locked()
    assert first.acquire() is True
    assert (first.locked(), second.locked()) == (True, True)
    assert (first.owned(), second.owned()) == (True, False)
    assert second.acquire() is False
    assert first.release() is None
    assert not first.owned()
    assert second.acquire() is True


@pytest.mark.parametrize("alias", ["postgres", "redis", "redis_cluster", "advisory"])
def test_other_stores_have_it_too(key: str, alias: str) -> None:
    """Also those that find no record by its token."""
    lock, other = (Lock(None, key, timeout=30, backend=alias) for _ in range(2))
    with lock:
        assert (lock.owned(), other.owned()) == (True, False)
        assert other.acquire(blocking=False) is False
        # Call sites may be ported one after the other.
        assert distlock(key, backend=alias).try_acquire() is None
        assert lock.reacquire() is True
        force_release(key, backend=alias, actor="a test", reason="a test")
        assert not lock.owned()
        assert other.acquire()
        assert not lock.owned()
        with pytest.raises(LockNotOwnedError):
            lock.release()
        other.release()
        assert lock.acquire()
    assert not lock.owned()


def test_wait_is_bounded(made: Any) -> None:
    """By the lock's own arguments, or by those of the call, which go first."""
    assert made(timeout=30).acquire()
    for made_with, called_with in (
        ({"blocking": False}, {}),
        ({}, {"blocking": False}),
        ({"blocking_timeout": 0}, {}),
        ({}, {"blocking_timeout": 0.05, "sleep": 0.01}),
        ({"blocking": False, "blocking_timeout": 60}, {}),
    ):
        assert made(timeout=30, **made_with).acquire(**called_with) is False


def test_blocked_acquire_gets_it_behind_a_release(made: Any) -> None:
    """Without a bound it waits."""
    first, second = made(timeout=30, thread_local=False), made(timeout=30)
    assert first.acquire()
    releasing = threading.Timer(0.05, in_a_thread, [first.release])
    releasing.start()
    assert second.acquire() is True
    releasing.join()


def test_lock_ends_with_its_timeout(made: Any) -> None:
    """And its holder's release says so, as its extend does."""
    first = made(timeout=0.1)
    assert first.acquire()
    assert eventually(lambda: not first.owned())
    with pytest.raises(LockNotOwnedError):
        first.extend(10)
    with pytest.raises(LockNotOwnedError):
        first.reacquire()
    assert made(timeout=30).acquire(blocking_timeout=20)
    with pytest.raises(LockNotOwnedError):
        first.release()
    assert first.locked()  # The other one's was left alone.


def test_lock_without_timeout_stays(made: Any) -> None:
    """It has none to extend."""
    lock = made()
    assert lock.acquire()
    with pytest.raises(LockError, match="no timeout"):
        lock.extend(10)
    with pytest.raises(LockError, match="no timeout"):
        lock.reacquire()
    assert lock.owned()


def test_release_of_what_is_not_held_is_an_error(made: Any) -> None:
    """Also a second time, and before an acquire."""
    lock = made(timeout=30)
    for what in (lock.release, lock.reacquire, lambda: lock.extend(1)):
        with pytest.raises(LockError, match="not owned"):
            what()
    lock.acquire()
    lock.release()
    with pytest.raises(LockError, match="already unlocked"):
        lock.release()


def test_extend_adds_and_replaces(made: Any) -> None:
    """`extend` adds to what is left, or replaces it; `reacquire` gives the whole timeout."""
    lock = made(timeout=10)
    lock.acquire()
    lease = lock.local.lease
    assert lock.extend(100) is True
    assert 100 < lease.remaining() <= 110
    assert lock.extend(50, replace_ttl=True) is True
    assert lease.remaining() <= 50
    assert lock.reacquire() is True
    assert lease.remaining() <= 10


def test_block_holds_it(made: Any) -> None:
    """It gives the lock, and raises `LockError` where it is not acquired."""
    first, second = made(timeout=30), made(timeout=30, blocking_timeout=0)
    with first as inside:
        assert inside is first
        assert first.owned()
        with pytest.raises(LockError, match="within the time"), second:
            pass
    assert not first.locked()


def test_block_that_lost_its_lock_tells(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It raises, or logs where `raise_on_release_error` is False."""
    with pytest.raises(LockError, match="not owned"), made(timeout=30) as lock:
        lock.release()
    with made(timeout=30, raise_on_release_error=False) as lock:
        lock.release()
    assert "lost its lock before its end" in caplog.text


def test_error_of_a_block_is_never_hidden(made: Any) -> None:
    """Not by the loss of its lock either, nor by an outage."""
    lock = made(timeout=30)
    with pytest.raises(ZeroDivisionError), lock:
        raise (lock.release(), ZeroDivisionError())[1]
    with ExitStack() as outage, pytest.raises(ZeroDivisionError), lock:
        raise (outage.enter_context(lose_connection(lock.backend)), ZeroDivisionError())[1]
    lock = made(timeout=30)
    with ExitStack() as outage, pytest.raises(BackendUnavailable), lock:
        outage.enter_context(lose_connection(lock.backend))


def test_lock_is_local_to_its_thread_or_not(made: Any) -> None:
    """Another thread may release it if it is not thread-local."""
    lock = made(timeout=30)
    lock.acquire()
    assert isinstance(in_a_thread(lock.release), LockError)
    assert in_a_thread(lock.owned) is False
    assert lock.owned()
    lock.release()
    lock = made(timeout=30, thread_local=False)
    lock.acquire()
    assert in_a_thread(lock.owned) is True
    assert in_a_thread(lock.release) is None
    assert not lock.locked()


def test_what_cannot_be_kept_is_refused(key: str) -> None:
    """It raises and says why, before anything is asked."""
    with pytest.raises(LockUsageError, match="token="):
        Lock(None, key).acquire(token="mine")
    with pytest.raises(InvalidArgument, match="ttl"):
        Lock(None, key, timeout=0)
    with pytest.raises(InvalidArgument):
        Lock(None, b"bytes")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        Lock(None, key, blocking_timeout=-1)


def test_transaction_keeps_it_until_the_commit(key: str) -> None:
    """What differs on purpose: nobody works on data that is not committed."""
    lock = Lock(None, key, timeout=30)
    with transaction.atomic():
        lock.acquire()
        lock.release()
        assert lock.locked()
    assert eventually(lambda: not lock.locked())


@override_settings(CACHES={"default": {"BACKEND": f"{__name__}.Cache", "KEY_PREFIX": "shop"}})
def test_cache_has_locks(key: str) -> None:
    """By its prefix and version, with the arguments of django-redis."""
    cache: Any = caches["default"]
    with cache.lock(key, timeout=30) as lock:
        assert lock.name == f"shop:1:{key}"
        assert distlock(f"shop:1:{key}", backend="memory").locked()
        assert cache.lock(key, blocking_timeout=0).acquire() is False
        other = cache.lock(key, version=2, timeout=30, blocking=False)
        assert other.acquire()
        other.release()
    with pytest.raises(LockUsageError, match="client="):
        cache.lock(key, client=object())


def test_signature_of_cache_lock_is_that_of_django_redis() -> None:
    """Each argument is there, in its place and with its default."""
    theirs = inspect.signature(DefaultClient.lock).parameters.values()
    ours = inspect.signature(LockMixin.lock).parameters.values()
    assert [(each.name, each.default) for each in ours] == [
        (each.name, each.default) for each in theirs
    ]
