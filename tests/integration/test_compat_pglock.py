"""`advisory` and `advisory_lock`, as the documentation of their packages describes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, transaction

from django_distlock import LockNotAcquired, LockUsageError, distlock
from django_distlock.compat import pglock
from django_distlock.compat.pglock import advisory, advisory_lock, async_advisory_lock
from tests.contract.helpers import Later, at_once
from tests.contract.locking import eventually

pytestmark = pytest.mark.servers("PostgreSQL")


@contextmanager
def elsewhere(work: Callable[[], Any]) -> Iterator[None]:
    """Hold a lock in another thread, as another session does."""
    held, done = threading.Event(), threading.Event()

    def run() -> None:
        with work():
            held.set()
            done.wait(60)

    holding = Later(run)
    assert held.wait(60)
    try:
        yield
    finally:
        done.set()
        holding.result()


@pytest.fixture
def taken(key: str) -> Iterator[str]:
    """Give a lock id that somebody else holds."""
    with elsewhere(lambda: advisory(key)):
        yield key


def test_block_is_told_whether_it_was_acquired(key: str) -> None:
    """True at once where nobody has it, also inside of its own; nobody else has it meanwhile."""
    with advisory(key) as acquired:
        assert acquired is True
        with advisory(key, timeout=0) as inner:
            assert inner is True
        assert distlock(key).locked()
    assert not distlock(key).locked()


def test_timeout_gives_false(taken: str) -> None:
    """The default side effect of a block: it runs, and looks."""
    for timeout in (0, 0.05, timedelta(milliseconds=50), timedelta(microseconds=1)):
        for effect in (None, pglock.Return):
            with advisory(taken, timeout=timeout, side_effect=effect) as acquired:
                assert acquired is False


@pytest.mark.parametrize("form", [advisory, advisory_lock])
def test_without_timeout_it_waits(key: str, form: Any) -> None:
    """For as long as somebody else has it."""
    order: list[str] = []

    def wait() -> None:
        with form(key) as acquired:
            assert acquired is True
            order.append("waiter")

    with elsewhere(lambda: advisory(key)):
        waiter = Later(wait)
        time.sleep(0.05)
        order.append("holder")
    waiter.result()
    assert order == ["holder", "waiter"]


def test_raise_raises_what_call_sites_catch(taken: str) -> None:
    """An `OperationalError` of Django, which `LockNotAcquired` is as well."""
    for effect, error in ((pglock.Raise, OperationalError), (pglock.Raise(), LockNotAcquired)):
        with pytest.raises(error), advisory(taken, timeout=0, side_effect=effect):
            pass


def test_decorator_raises_or_skips(taken: str, key: str) -> None:
    """A function is called under the lock, or not at all."""
    called: list[str] = []

    @advisory(taken, timeout=0, side_effect=pglock.Skip)
    def skipped() -> str:
        called.append("skipped")
        return "done"

    @advisory(taken, timeout=0)
    def raising() -> None:
        called.append("raising")

    @advisory(f"{key}-free", timeout=0, side_effect=pglock.Skip)
    def free(number: int) -> int:
        assert distlock(f"{key}-free").locked()
        return number

    assert skipped() is None
    with pytest.raises(OperationalError):
        raising()
    assert called == []
    assert free(7) == 7


def nightly() -> bool:
    """Say whether the name of this function is held."""
    return distlock(f"{__name__}.nightly").locked()


def test_decorator_has_the_name_of_its_function() -> None:
    """Where it has no id of its own."""
    assert advisory()(nightly)() is True
    assert advisory(timeout=0)(nightly)() is True


def test_decorated_function_is_called_by_many_threads(key: str) -> None:
    """What one call has entered is not another one's."""
    inside, most = [0], [0]

    @advisory(key)
    def work() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        inside[0] -= 1

    def run() -> None:
        for _ in range(5):
            work()

    at_once([run] * 4)
    assert most == [1]
    assert not distlock(key).locked()


def test_calls_acquire_and_release(key: str, taken: str) -> None:
    """The functional form; also twice by one session."""
    lock = advisory(f"{key}-2", timeout=0)
    assert lock.acquire() is True
    assert lock.acquire() is True
    lock.release()
    assert distlock(f"{key}-2").locked()
    lock.release()
    assert not distlock(f"{key}-2").locked()
    with pytest.raises(LockUsageError, match="not acquired here"):
        lock.release()
    assert advisory(taken, timeout=0).acquire() is False


def test_object_may_be_shared_by_threads(key: str) -> None:
    """Each ends what it has entered itself, also where another one was refused meanwhile."""
    lock = advisory(key, timeout=0)
    with ExitStack() as refused:
        with lock as acquired:
            assert acquired
            refused.enter_context(elsewhere(lambda: lock))
        assert not distlock(key).locked()


def test_shared_locks_are_held_by_many(key: str) -> None:
    """And by nobody who wants it alone."""
    with elsewhere(lambda: advisory(key, shared=True)):
        with advisory(key, shared=True, timeout=0) as acquired:
            assert acquired is True
        with advisory(key, timeout=0) as acquired:
            assert acquired is False


def test_xact_lasts_until_the_transaction_ends(key: str) -> None:
    """By a call in a transaction, and by a block, which opens one."""
    with transaction.atomic():
        assert advisory(key, xact=True).acquire() is True
        with pytest.raises(RuntimeError, match="cannot be manually released"):
            advisory(key, xact=True).release()
    with advisory(key, xact=True) as acquired:
        assert acquired is True
        assert transaction.get_connection().in_atomic_block
    assert not transaction.get_connection().in_atomic_block


def test_xact_is_in_the_way_of_others(key: str) -> None:
    """And they in its way."""

    @contextmanager
    def held() -> Iterator[None]:
        with advisory(key, xact=True):
            yield

    with elsewhere(held):
        with advisory(key, timeout=0) as acquired:
            assert acquired is False
        with transaction.atomic():
            assert advisory(key, xact=True, timeout=0).acquire() is False
            with pytest.raises(OperationalError):
                advisory(key, xact=True, timeout=0, side_effect=pglock.Raise).acquire()
        with advisory(key, xact=True, timeout=0) as acquired:
            assert acquired is False


def test_misuse_is_refused(key: str) -> None:
    """With the errors of django-pglock, or because it cannot be promised."""
    with pytest.raises(ValueError, match="lock ID"):
        advisory().acquire()
    with pytest.raises(TypeError, match="not a string or int"):
        advisory(1.5).acquire()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"without parentheses\? Write @advisory\(\)"):
        advisory(test_misuse_is_refused)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="side_effect is"):
        advisory(key, side_effect=int).acquire()
    with pytest.raises(ValueError, match="Skip is for decorators"):
        advisory(key, side_effect=pglock.Skip).acquire()
    with pytest.raises(ValueError, match="Return is for blocks"):
        advisory(key, side_effect=pglock.Return)(nightly)()
    with pytest.raises(RuntimeError, match="in a transaction"):
        advisory(key, xact=True).acquire()
    with transaction.atomic(), pytest.raises(RuntimeError, match="inside a transaction"):
        advisory(key, xact=True).__enter__()
    with pytest.raises(LockUsageError, match="backend="):
        advisory(key, using="serializable")
    with pytest.raises(LockUsageError, match="distlock_release"):
        pglock.prioritize()
    with pytest.raises(LockUsageError, match="locks tables"):
        pglock.model("shop.Payment")


def test_transaction_keeps_it_until_the_commit(key: str) -> None:
    """What differs on purpose: it is not free before the data is committed."""
    with transaction.atomic():
        with advisory(key):
            pass
        assert distlock(key).locked()
    assert eventually(lambda: not distlock(key).locked())


def test_pglocks_form(key: str) -> None:
    """Texts, numbers and pairs; with `wait=False` a bool; shared by many; a decorator."""
    ids: tuple[Any, ...] = (f"{key}-name", 5, (5, 9))
    for lock_id in ids:
        with elsewhere(partial(advisory_lock, lock_id)):
            with advisory_lock(lock_id, wait=False) as acquired:
                assert acquired is False
            with advisory_lock(lock_id, True, False) as acquired:
                assert acquired is False
        with (
            elsewhere(partial(advisory_lock, lock_id, shared=True)),
            advisory_lock(lock_id, shared=True, wait=False, using="default") as acquired,
        ):
            assert acquired is True

    @advisory_lock(key)
    def work() -> bool:
        return distlock(key).locked()

    assert [work(), work()] == [True, True]


async def test_pgware_form_is_awaited(key: str) -> None:
    """Its asynchronous twin."""
    async with async_advisory_lock(key) as acquired:
        assert acquired is True
        assert await distlock(key).alocked()
    assert not await distlock(key).alocked()


def test_pglocks_misuse_is_refused(key: str) -> None:
    """With a `ValueError`, or because it cannot be promised."""
    for wrong in ((1,), (1, 2, 3), (1, "2")):
        with pytest.raises(ValueError, match="pair"), advisory_lock(wrong):  # type: ignore[arg-type]
            pass
    with pytest.raises(LockUsageError, match="comment"), advisory_lock(key, comment=True):
        pass
    with pytest.raises(LockUsageError, match="backend="), advisory_lock(key, using="serializable"):
        pass
