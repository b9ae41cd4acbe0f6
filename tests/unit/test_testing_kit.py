"""What `django_distlock.testing` does to locks in memory, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import threading
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.test.utils import override_settings

from django_distlock import (
    BackendUnavailable,
    Holder,
    InvalidArgument,
    InvalidLockBackend,
    Lease,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    Retry,
    current_lease,
    distlock,
    distlock_all,
    held_keys,
    lock_backends,
)
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.locks import acquire
from django_distlock.process.heartbeat import alarms, heartbeat_of, held_here
from django_distlock.process.host import current_holder
from django_distlock.signals import lock_acquired, lock_extended, lock_lost, lock_released
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
from django_distlock.testing.outages import OPERATIONS
from tests.contract.helpers import Later
from tests.contract.locking import Heard, eventually

from .test_package import run

KEY = "invoice:42"
#: A lease that nobody renews.
ALONE: dict[str, Any] = {"ttl": 30, "heartbeat": False}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Check behind each test that the kit has left nothing."""
    assert isinstance(lock_backends["memory"], MemoryBackend)
    before = set(held_here._by_token), dict(lock_backends._backends)
    # Other tests of this process may have left some that have yet to end.
    earlier = timers(), set(alarms._leases)
    yield
    assert (set(held_here._by_token), dict(lock_backends._backends)) == before
    assert timers() <= earlier[0]
    assert set(alarms._leases) <= earlier[1]


#: The threads that keep leases of the alias that these tests use.
TIMERS = ("distlock-heartbeat-default", "distlock-alarms", "distlock-lost")


def timers() -> set[threading.Thread]:
    """Return the threads that keep leases."""
    return {each for each in threading.enumerate() if each.name in TIMERS}


@pytest.fixture
def locks() -> Iterator[Locks]:
    """Keep locks in memory; who asks for a key that is held is told at once."""
    with memory_locks(WAIT=0) as locks:
        yield locks


@contextmanager
def lost_block(key: str = KEY, **more: Any) -> Iterator[Lease]:
    """Hold a key in a block that loses it, and see its end tell of that."""
    told = pytest.raises(LockLost, match="before the block did")
    with told, distlock(key, ttl=30, **more) as lease:
        yield lease


def fence_of(key: str) -> int:
    """Return the fence of whoever holds a key."""
    record = lock_backends["default"].read(key)
    assert record is not None
    return record.fence


# Where locks are


def test_every_alias_is_in_memory_and_says_what_it_said() -> None:
    """Keys and times are those of the project, but for what the test says."""
    said: dict[str, dict[str, Any]] = {
        "default": {"BACKEND": "nowhere.Backend", "KEY_PREFIX": "shop", "OPTIONS": {"url": "x"}},
        "slow": {"BACKEND": "nowhere.Backend", "TTL": 600, "WAIT": 60},
    }
    saved = lock_backends._backends.copy()
    with override_settings(DISTLOCK=said), memory_locks(WAIT=0):
        assert {type(lock_backends[each]) for each in lock_backends} == {MemoryBackend}
        configs = {alias: lock_backends[alias].config for alias in lock_backends}
        assert {
            alias: (each.key_prefix, each.ttl, each.wait) for alias, each in configs.items()
        } == {"default": ("shop", 30, 0), "slow": ("distlock", 600, 0)}
        assert said["slow"]["WAIT"] == 60
    lock_backends._backends.update(saved)


def test_project_without_a_setting_has_the_default_alias() -> None:
    """As Django's databases, the alias that nobody configured is there."""
    with override_settings():
        del settings.DISTLOCK
        with memory_locks():
            assert list(lock_backends) == ["default"]
            assert distlock(KEY).acquire().fence == 1


def test_backends_from_before_come_back() -> None:
    """The same objects, which have connections and know what they hold, also behind an error."""
    before, setting = lock_backends["memory"], settings.DISTLOCK
    failed = pytest.raises(ZeroDivisionError)
    with failed, memory_locks() as locks:
        assert lock_backends["memory"] is not before
        distlock(KEY).acquire()
        locks.advance(100)
        raise ZeroDivisionError
    assert lock_backends["memory"] is before
    assert settings.DISTLOCK is setting


def test_function_that_would_run_behind_the_block_is_refused() -> None:
    """Its locks would be those of the project."""

    @memory_locks()
    def returning() -> Any:
        return asyncio.sleep(0)

    def generating() -> Iterator[int]:
        yield 1

    with pytest.raises(LockUsageError, match="returning returns a coroutine"):
        returning()
    with pytest.raises(LockUsageError, match="generating returns a generator"):
        memory_locks()(generating)


@pytest.mark.parametrize(
    ("name", "error"),
    [("WEIGHT", InvalidLockBackend), ("BACKEND", InvalidArgument), ("OPTIONS", InvalidArgument)],
)
def test_illegal_setting_changes_nothing(name: str, error: type[Exception]) -> None:
    """It is told at once; and locks in memory are what this is about, so no backend is chosen."""
    before = lock_backends["memory"]
    with pytest.raises(error, match=name), memory_locks(**{name: None}):
        pytest.fail("must not begin")
    assert lock_backends["memory"] is before


def test_alias_that_is_no_dictionary_is_refused_as_without_the_kit() -> None:
    """By the message that names it."""
    refused = pytest.raises(InvalidLockBackend, match=r"DISTLOCK\['other'\] must be a dictionary")
    saved = lock_backends._backends.copy()
    with override_settings(DISTLOCK={**settings.DISTLOCK, "other": None}), refused, memory_locks():
        pytest.fail("must not begin")
    lock_backends._backends.update(saved)


def test_settings_that_change_inside_keep_the_time(locks: Locks) -> None:
    """Settings that backends are made of make new ones: they have the same clock."""
    with override_settings(DISTLOCK_HOLDER={"process": "worker"}):
        lease = distlock(KEY, ttl=30).acquire()
        locks.advance(31)
        assert lease.is_lost
        assert_not_locked(KEY)


def test_lease_that_is_kept_is_released(locks: Locks) -> None:
    """Whoever has a lease of a kit that is over holds nothing, and may leave its block in peace."""
    lock = distlock(KEY)
    with memory_locks():
        lease = lock.__enter__()
    assert current_lease() is None
    assert not lease.held
    assert lease.is_released
    with pytest.raises(LockUsageError):
        lease.check()
    lock.__exit__(None, None, None)


def test_inner_one_knows_nothing_of_the_outer(locks: Locks) -> None:
    """And the outer one goes on behind it, with its leases, at its own time."""
    lease, outer = distlock(KEY, ttl=30).acquire(), lock_backends["default"]
    with memory_locks(WAIT=0) as inner:
        assert_not_locked(KEY)
        inner.advance(3600)
        assert outer.read(KEY) is not None
        with pytest.raises(LockUsageError, match="another one cannot be"):
            locks.advance(1)
    assert lease.held
    assert lease.remaining() <= 30
    assert fence_of(KEY) == lease.fence
    locks.advance(29)
    lease.check()
    locks.advance(1)
    assert lease.is_lost
    with pytest.raises(LockUsageError, match="has ended"):
        inner.advance(1)


# As a decorator


def test_function_has_its_own_locks_in_each_call() -> None:
    """Also where it calls itself."""

    @memory_locks(kwarg_name="locks", WAIT=0)
    def fences(depth: int, locks: Locks | None = None) -> list[int]:
        assert locks is not None
        lease = distlock(KEY).acquire()
        locks.advance(1)
        return [lease.fence, *(fences(depth - 1) if depth else [])]

    assert fences(2) == [1, 1, 1]
    assert fences.__name__ == "fences"


@memory_locks(kwarg_name="given", WAIT=0)
def test_argument_that_is_given_is_no_fixture(given: Locks) -> None:
    """As pytest would take it for one, the decorated function does not show it."""
    with hold(KEY):
        given.assert_locked(KEY)


async def test_coroutine_has_locks_while_it_runs() -> None:
    """They are there behind its first await, too."""

    @memory_locks()
    async def fence() -> int:
        await asyncio.sleep(0)
        async with distlock(KEY) as lease:
            return lease.fence

    assert [await fence(), await fence()] == [1, 1]


class Decorated(unittest.TestCase):
    """Tests to be run by a test."""

    __test__ = False
    locks: Locks

    def setUp(self) -> None:
        """Hold a key: locks are in memory by now."""
        self.lease = distlock(KEY).acquire()

    def test_one(self) -> None:
        """Fences begin at 1, in each test."""
        assert self.lease.fence == 1
        self.locks.advance(100)
        assert self.lease.is_lost

    def test_other(self) -> None:
        """See `test_one`."""
        self.test_one()


def outcome_of(case: type[unittest.TestCase]) -> unittest.TestResult:
    """Run the tests of a class."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_each_test_of_a_class_has_its_own_locks() -> None:
    """From `setUp` on, and to the end of its cleanups."""
    left: list[str] = []

    @memory_locks(attr_name="locks", WAIT=0)
    class Case(Decorated):
        def setUp(self) -> None:
            super().setUp()
            self.addCleanup(lambda: left.append(type(lock_backends["default"]).__name__))

    class Subclass(Case):
        def setUp(self) -> None:
            super().setUp()
            assert_locked(KEY)

    for case in (Case, Subclass):
        result = outcome_of(case)
        assert (result.testsRun, result.errors, result.failures) == (2, [], [])
    assert left == ["MemoryBackend"] * 4


def test_error_in_set_up_leaves_nothing() -> None:
    """The test fails, and the next one finds the backends from before."""
    before = lock_backends["memory"]

    @memory_locks()
    class Case(Decorated):
        def setUp(self) -> None:
            raise ZeroDivisionError

    assert len(outcome_of(Case).errors) == 2
    assert lock_backends["memory"] is before


def test_other_classes_are_refused() -> None:
    """Whoever writes pytest's classes is told of the fixture."""
    with pytest.raises(TypeError, match="use the fixture memory_locks"):

        @memory_locks()
        class _TestCapture:
            pass


def test_fixture_of_the_plugin_is_import_light() -> None:
    """A run that has nothing to do with locks pays for no models and no test tools of Django."""
    program = """
import sys
import django_distlock.testing.plugin
heavy = {"django.test", "django.contrib", "django_distlock.models", "unittest.mock"}
print(sorted(heavy & sys.modules.keys()))
"""
    assert run(program) == "[]\n"


# Time


def test_block_lives_through_the_time(locks: Locks) -> None:
    """Its lease is renewed every ttl/3, at those times, and never in between."""
    with Heard(lock_extended, KEY) as heard, distlock(KEY, ttl=30) as lease:
        locks.advance(95)
        assert lease.held
        assert len(heard.facts) == 9
        record = lock_backends["default"].read(KEY)
        assert record is not None
        after = (record.renewed_at - record.acquired_at).total_seconds()
        assert after == pytest.approx(90, abs=5)
        assert lease.remaining() == pytest.approx(25, abs=5)
        assert fence_of(KEY) == lease.fence == 1
    assert_not_locked(KEY)


def test_lease_that_nobody_renews_ends_with_its_ttl(locks: Locks) -> None:
    """Its holder stops at the deadline; the key is free a second later."""
    lease = distlock(KEY, ttl=30).acquire()
    locks.advance(29)
    lease.check()
    locks.advance(timedelta(seconds=1))
    assert lease.is_lost
    assert_locked(KEY)
    locks.advance(1)
    assert_not_locked(KEY)
    assert distlock(KEY).acquire().fence == 2


def test_callbacks_have_been_called_in_order(locks: Locks) -> None:
    """The warning, the signal, the loss: in the thread of the test, before it goes on."""
    told: list[tuple[str, str]] = []

    def note(what: str) -> Callable[[Any], None]:
        return lambda lease: told.append((what, threading.current_thread().name))

    lease = distlock(KEY, ttl=30).acquire()
    lease.on_lost(note("lost"))
    lease.on_danger(note("danger"), before=5)
    with Heard(lock_lost, KEY) as heard:
        locks.advance(24)
        assert told == []
        locks.advance(1)
        assert [what for what, _thread in told] == ["danger"]
        assert heard.facts == []
        locks.advance(100)
        assert heard.once["cause"] == "its deadline has passed"
        assert heard.once["held_for"] == pytest.approx(30, abs=5)
    here = threading.current_thread().name
    assert told == [("danger", here), ("lost", here)]


def test_loss_is_told_at_its_own_time(locks: Locks) -> None:
    """Not when the time has come to its end: what else happened is seen from there."""
    seen: list[tuple[float, bool]] = []
    first = distlock("first", ttl=10).acquire()
    second = distlock("second", ttl=20).acquire()
    clock = lock_backends["default"].monotonic
    began = clock()
    for lease in (second, first):
        lease.on_lost(lambda lost: seen.append((clock() - began, second.held)))
    locks.advance(60)
    assert [held for _at, held in seen] == [True, False]
    assert [at for at, _held in seen] == pytest.approx([10, 20], abs=5)
    assert first.is_lost


def test_callback_may_put_time_ahead(locks: Locks) -> None:
    """Whoever is told in the middle is told in the order in which it happens."""
    first, second = (distlock(name, ttl=ttl).acquire() for name, ttl in (("a", 10), ("b", 20)))
    told: list[str] = []
    second.on_lost(lambda lost: told.append("second"))

    def lose_the_second(lost: Lease) -> None:
        told.append("first")
        advance(11)
        told.append("went on")

    first.on_lost(lose_the_second)
    locks.advance(10)
    assert told == ["first", "second", "went on"]


def test_losses_touch_no_database(locks: Locks, caplog: pytest.LogCaptureFixture) -> None:
    """No event is kept: this test may use no database. A callback that fails is logged."""
    lease = distlock(KEY, ttl=10).acquire()
    lease.on_lost(lambda lost: 1 / 0)
    locks.advance(10)
    assert [each.getMessage() for each in caplog.records if "event" in each.getMessage()] == []
    assert "is lost" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_events_are_kept_again_behind_it() -> None:
    """Only what happens in memory is nobody's business."""
    keepers = lock_lost.receivers.copy()
    with memory_locks(), memory_locks():
        assert len(lock_lost.receivers) == len(keepers) - 1
    assert [each[0] for each in lock_lost.receivers] == [each[0] for each in keepers]


def test_max_lifetime_ends_the_renewals(locks: Locks) -> None:
    """A block that takes too long loses its lease, whatever else is well."""
    with lost_block(max_lifetime=60) as lease:
        locks.advance(59)
        lease.check()
        locks.advance(2)
        assert lease.is_lost


@pytest.mark.parametrize("heartbeat", [True, False])
def test_time_is_one_for_the_process(locks: Locks, *, heartbeat: bool) -> None:
    """Who holds a key in another thread lives through it, or loses it."""
    entered, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with distlock(KEY, ttl=30, heartbeat=heartbeat):
            entered.set()
            assert go_on.wait(20)

    worker = Later(work)
    assert entered.wait(20)
    locks.advance(300)
    go_on.set()
    with nullcontext() if heartbeat else pytest.raises(LockLost):
        worker.result()


@pytest.fixture
def sound_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let those who wait sleep for as long as they can: nothing but a ring wakes them in time."""
    monkeypatch.setattr(acquire, "NOTE_AFTER", 0.0)


def waiters() -> int:
    """Return how many wait for the key."""
    backend = lock_backends["default"]
    return len(backend.queues.get(backend.queues.name_of(KEY), []))


@contextmanager
def waiting_caller(wait: float) -> Iterator[Later[Lease]]:
    """Let somebody wait for the key in another thread, and be told soon in the block."""
    before = waiters()
    caller = Later(distlock(KEY, wait=wait).acquire)
    assert eventually(lambda: waiters() == before + 1)
    record = lock_backends["default"].read(KEY)
    # Whoever is first asks once more before it sleeps, and says that it wants to be woken.
    assert record is not None
    assert before or eventually(is_wanted)
    yield caller


def is_wanted() -> bool:
    """Say whether the holder of the key wakes those who wait."""
    record = lock_backends["default"].read(KEY)
    return record is not None and record.wanted


@pytest.mark.usefixtures("sound_sleep")
@pytest.mark.parametrize("how", ["advance", "pause", "expire"])
def test_waiting_caller_gets_what_becomes_free(locks: Locks, how: str) -> None:
    """It sleeps in another thread until the holder's lease is over, however that came."""
    lease = distlock("mine", ttl=60).acquire()
    with hold(KEY, ttl=3000, heartbeat=False) as other, waiting_caller(9000) as caller:
        match how:
            case "advance":
                locks.advance(3002)
            case "pause":
                simulate_pause(lease, 3002)
            case _:
                expire(KEY)
        assert caller.result().fence == other.fence + 1


@pytest.mark.usefixtures("sound_sleep")
def test_waiting_callers_give_up_at_their_times(locks: Locks) -> None:
    """Also one that has somebody in front, who waits for longer."""
    with hold(KEY), waiting_caller(500) as patient, waiting_caller(60) as caller:
        for each, seconds in ((caller, 61), (patient, 500)):
            locks.advance(seconds)
            with pytest.raises(LockNotAcquired):
                each.result()


def test_time_goes_on_by_itself(locks: Locks) -> None:
    """It is real time, and what was put ahead."""
    locks.advance(3600)
    lease = distlock(KEY, ttl=0.2).acquire()
    assert eventually(lambda: lease.is_lost)


def test_timers_follow(locks: Locks) -> None:
    """Behind a leap, a heartbeat that was idle does not sleep until its old time."""
    with distlock("other"):
        pass
    locks.advance(60)
    backend = lock_backends["default"]
    with distlock(KEY, ttl=3):
        before = backend.read(KEY)
        assert before is not None

        def renewed() -> bool:
            record = backend.read(KEY)
            return record is not None and record.renewed_at > before.renewed_at

        assert eventually(renewed)


def test_leases_of_other_stores_do_not_notice() -> None:
    """For what is held outside no time passes: it is renewed, and told of nothing."""
    told: list[Lease] = []
    # Another process would be asked, in earnest: here, memory with the clock of the machine.
    lock = distlock(KEY, backend="memory", ttl=30)
    with lock as lease:
        lease.on_lost(told.append)
        lease.on_danger(told.append)
        with memory_locks() as locks, distlock(KEY):
            locks.advance(3600)
            assert lease.held
            assert lease.remaining() == pytest.approx(30, abs=5)
            locks.advance(3600)
            assert alarms._thread is None or alarms._thread.is_alive()
        assert lease.held
        assert 20 < lease.remaining() <= 30
        lease.extend()
        assert 20 < lease.remaining() <= 30
    assert told == []
    # The test that follows counts the threads.
    for timer in (alarms, heartbeat_of(lock_backends["memory"])):
        timer.end_idle()


def test_time_can_only_go_ahead(locks: Locks) -> None:
    """And by a number of seconds that makes sense."""
    for seconds in (-1, float("nan"), True):
        with pytest.raises(InvalidArgument):
            advance(seconds)


# What is so


def test_messages_name_key_holder_and_time(locks: Locks) -> None:
    """Whoever reads a failed test knows where to look."""
    assert_not_locked(KEY)
    with pytest.raises(AssertionError, match=f"'{KEY}' is not locked on 'default'"):
        assert_locked(KEY)
    holder = Holder(host="web7", process="gunicorn:3", pid=77)
    with hold(KEY, holder=holder) as lease:
        assert_locked(KEY)
        since = lease.acquired_at.strftime("%Y-%m-%d %H:%M:%S")
        told = rf"'{KEY}' is locked on 'default': gunicorn:3 \(pid 77\) on web7 .* since {since}"
        with pytest.raises(AssertionError, match=told) as raised:
            assert_not_locked(KEY)
        assert "fence 1" in str(raised.value)
        assert lease.token not in str(raised.value)


def test_key_that_is_kept_behind_its_holder_is_locked(locks: Locks) -> None:
    """For its window, although nobody works under it any more."""
    with distlock(KEY, ttl=60, hold=True):
        pass
    with pytest.raises(AssertionError, match="has kept it since"):
        assert_not_locked(KEY)
    locks.advance(60)
    assert_not_locked(KEY)


def test_backend_can_be_named(locks: Locks) -> None:
    """Each helper takes an alias, and a key of another one is another key."""
    with hold(KEY, backend="memory"):
        assert_locked(KEY, backend="memory")
        assert_not_locked(KEY)
        expire(KEY, backend="memory")
        assert_not_locked(KEY, backend="memory")
        with lose_connection("memory"):
            distlock(KEY).acquire()
            with pytest.raises(BackendUnavailable):
                distlock(KEY, backend="memory").acquire()


# Others


def test_somebody_else_holds_the_key(locks: Locks) -> None:
    """Who asks for it is told who that is; behind the block it is free, also behind an error."""
    failed = pytest.raises(ZeroDivisionError)
    with failed, hold(KEY) as other:
        with pytest.raises(LockNotAcquired) as raised:
            distlock(KEY).acquire()
        assert raised.value.holder == other.holder
        assert raised.value.expires_in == pytest.approx(30, abs=5)
        # It is no block of this context, so nothing is entered again.
        assert current_lease() is None
        assert distlock(KEY).try_acquire() is None
        raise ZeroDivisionError
    with distlock(KEY) as lease:
        assert lease.fence == other.fence + 1
        told = pytest.raises(LockNotAcquired, match="cannot be held by another holder")
        with told, hold(KEY):
            pytest.fail("must not begin")


def test_somebody_else_is_not_heard_here(locks: Locks) -> None:
    """Signals tell what this process does."""
    with Heard(lock_acquired, KEY) as acquired, Heard(lock_released, KEY) as released:
        with hold(KEY):
            locks.advance(60)
        assert acquired.facts == released.facts == []
        with distlock(KEY):
            pass
        assert len(acquired.facts) == len(released.facts) == 1


def test_somebody_else_lives_or_dies(locks: Locks) -> None:
    """One that lives keeps its lock; one that died loses it with its ttl."""
    with hold("alive", ttl=30), hold("dead", ttl=30, heartbeat=False):
        locks.advance(300)
        assert_locked("alive")
        assert_not_locked("dead")


def test_dead_process_of_this_host_can_be_taken_over_from(locks: Locks) -> None:
    """The holder is whoever the test says, so `steal_if_dead` has somebody to judge."""
    here = current_holder()
    gone = Holder(host=here.host, boot_id=here.boot_id, process="worker", pid=2**30)
    with hold(KEY, holder=gone):
        assert distlock(KEY).try_acquire() is None
        if here.boot_id:
            assert distlock(KEY, steal_if_dead=True).acquire().fence == 2


def test_expired_key_is_free_and_its_holder_does_not_know(locks: Locks) -> None:
    """Its next renewal tells it; a block that has none learns it at its end."""
    with lost_block() as lease:
        expire(KEY)
        assert_not_locked(KEY)
        lease.check()
        locks.advance(11)
        assert lease.is_lost
        with pytest.raises(LockLost, match="no longer has it"):
            lease.extend()


def test_expired_key_goes_to_the_next(locks: Locks) -> None:
    """With the next fence; a window can expire as well, and what nobody holds cannot."""
    lease = distlock(KEY).acquire()
    expire(KEY)
    with distlock(KEY, ttl=60, hold=True) as other:
        assert other.fence == lease.fence + 1
    assert lease.release() is False
    assert_locked(KEY)
    expire(KEY)
    assert_not_locked(KEY)
    with pytest.raises(LockUsageError, match="Nobody holds"):
        expire(KEY)


def test_expired_key_of_several_is_free(locks: Locks) -> None:
    """None of them is left."""
    leases = [distlock(KEY, shared=True).acquire() for _ in range(2)]
    expire(KEY)
    assert_not_locked(KEY)
    assert [each.release() for each in leases] == [False, False]


@pytest.mark.parametrize("permits", [None, 2])
@pytest.mark.parametrize("paused", [False, True])
def test_stolen_place_is_somebody_elses(locks: Locks, paused: bool, permits: int | None) -> None:
    """Who shares the key with the old holder keeps it, and has the new one beside."""
    terms: dict[str, Any] = {"shared": True} if permits is None else {"permits": permits}
    lease, beside = (distlock(KEY, ttl=ttl, **terms).acquire() for ttl in (10, 100))
    other = simulate_pause(lease, taken_by_other=True) if paused else steal(lease)
    assert other is not None
    assert other.shared
    assert other.fence > lease.fence
    with pytest.raises(LockLost):
        lease.extend()
    assert [each.release() for each in (beside, other)] == [True, True]
    assert_not_locked(KEY)


@pytest.mark.usefixtures("locks")
def test_store_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer of SQLite, such as that of events, is nobody who holds the key."""
    lease, store = distlock(KEY).acquire(), lock_backends["default"]
    acquire, busy = store.acquire, iter([Contended(busy=True)])
    monkeypatch.setattr(store, "acquire", lambda *a, **kw: next(busy, None) or acquire(*a, **kw))
    assert steal(lease).fence > lease.fence


def test_stolen_key_is_somebody_elses(locks: Locks) -> None:
    """The store knows the new holder; the old one finds out by its next renewal."""
    told: list[Lease] = []
    with lost_block() as lease:
        lease.on_lost(told.append)
        other = steal(lease, ttl=300, holder=Holder(host="web7"))
        assert other.fence > lease.fence
        assert fence_of(KEY) == other.fence
        assert lease.held
        lease.check()
        assert told == []
        locks.advance(11)
        assert lease.is_lost
        assert told == [lease]
        other.check()
    # Leaving the block has not touched what is not its own.
    assert fence_of(KEY) == other.fence
    assert other.release() is True
    assert_not_locked(KEY)


def test_key_is_stolen_once(locks: Locks) -> None:
    """Behind that it is not the victim's, so nobody can take it from there."""
    lease = distlock(KEY).acquire()
    steal(lease)
    with pytest.raises(LockNotAcquired):
        steal(lease)
    assert lease.release() is False
    with pytest.raises(LockLost):
        steal(lease)


# Pauses


@pytest.mark.parametrize("taken_by_other", [False, True])
def test_pause_ends_when_the_key_was_free(locks: Locks, *, taken_by_other: bool) -> None:
    """Nothing was renewed, and time has gone past the lease and its grace, not for ever."""
    began = lock_backends["default"].monotonic()
    with lost_block() as lease:
        with Heard(lock_lost, KEY) as heard:
            other = simulate_pause(lease, taken_by_other=taken_by_other)
        assert heard.once["fence"] == lease.fence
        assert lease.is_lost
    assert lock_backends["default"].monotonic() - began == pytest.approx(31, abs=5)
    if taken_by_other:
        assert other is not None
        assert other.held
        assert fence_of(KEY) == other.fence > lease.fence
    else:
        assert_not_locked(KEY)


def test_short_pause_loses_nothing(locks: Locks) -> None:
    """The heartbeat goes on where it was, late; and nobody can have taken the key."""
    with Heard(lock_extended, KEY) as heard, distlock(KEY, ttl=30) as lease:
        assert simulate_pause(lease, 29) is None
        lease.check()
        assert len(heard.facts) == 1
        assert lease.remaining() == pytest.approx(30, abs=5)
        with pytest.raises(LockNotAcquired):
            simulate_pause(lease, 5, taken_by_other=True)
        lease.check()
        locks.advance(300)
        lease.check()


def test_long_pause_is_as_long_as_it_is_said(locks: Locks) -> None:
    """A machine that was suspended overnight has lost what it held in the evening."""
    lease = distlock(KEY, ttl=30).acquire()
    simulate_pause(lease, timedelta(hours=8), taken_by_other=True)
    assert lease.is_lost
    record = lock_backends["default"].read(KEY)
    assert record is not None
    slept = (record.acquired_at - lease.acquired_at).total_seconds()
    assert slept == pytest.approx(8 * 3600, abs=5)


def test_process_stands_still_as_a_whole(locks: Locks) -> None:
    """All that it holds is lost, and others who live go on; a holder elsewhere can stand still."""
    with hold("theirs", ttl=3) as theirs:
        with lost_block() as lease, lost_block("two") as other:
            simulate_pause(lease, 60)
            assert other.is_lost
            assert_locked("theirs")
            assert_not_locked("two")
        simulate_pause(theirs)
        assert theirs.is_lost
        assert_not_locked("theirs")


def test_pause_of_what_is_not_held_is_an_error(locks: Locks) -> None:
    """Released, lost, without expiry: there is nothing that a pause could do."""
    lease = distlock(KEY).acquire()
    lease.release()
    with pytest.raises(LockUsageError, match="was released"):
        simulate_pause(lease)
    for_ever = distlock(KEY, basic=True).acquire()
    with pytest.raises(LockUsageError, match="no expiry"):
        simulate_pause(for_ever)
    for_ever.release()
    lost = distlock(KEY, ttl=10).acquire()
    locks.advance(10)
    with pytest.raises(LockLost):
        simulate_pause(lost)


# The store is away


def test_extension_whose_answer_is_lost_was_carried_out(locks: Locks) -> None:
    """The caller does not know, and the store does, of each of several."""
    backend = lock_backends["default"]
    grants = [backend.acquire(key, new_token(), 30) for key in ("one", "two")]
    with lose_connection(answers=False), pytest.raises(BackendUnavailable):
        backend.extend_many([each for each in grants if isinstance(each, Grant)])
    for key in ("one", "two"):
        renewed = backend.read(key)
        assert renewed is not None
        assert renewed.renewed_at > renewed.acquired_at


def test_acquire_whose_answer_is_lost_leaves_nothing_held(locks: Locks) -> None:
    """The promise of the lock API, seen with the kit: it is released behind the outage."""
    with lose_connection(answers=False), pytest.raises(BackendUnavailable):
        distlock(KEY).acquire()
    assert eventually(lambda: isinstance(_attempt(), Grant))


def _attempt() -> Grant | Contended:
    return lock_backends["default"].acquire(KEY, new_token(), 30)


def test_outage_cuts_off_whatever_asks_the_store(locks: Locks) -> None:
    """Several keys at once too, and each hook that a backend may define."""
    ask_nobody = {
        "_alias_in_database", "_attempt_for", "_begin_in_child", "_cannot", "_clearer", "_freed",
        "_give_back", "_is_elsewhere", "_keep_no_connections", "_name", "_of_each_holder",
        "_own_thread", "_place", "_require", "_ttl",
    }  # fmt: skip
    hooks = {name for name in vars(BaseLockBackend) if name[0] == "_" != name[1]}
    assert set(OPERATIONS) == hooks - ask_nobody
    with lose_connection():
        for ask in (distlock_all("a", "b").acquire, lambda: held_keys(["a"])):
            with pytest.raises(BackendUnavailable):
                ask()


def test_outages_can_be_nested(locks: Locks) -> None:
    """The end of the inner one is not that of the outer; an error ends both."""
    failed = pytest.raises(BackendUnavailable)
    with failed, lose_connection():
        with lose_connection(answers=False), pytest.raises(BackendUnavailable):
            distlock(KEY).acquire()
        distlock(KEY).acquire()
    assert_not_locked(KEY)
    assert distlock(KEY).acquire().fence == 1
    assert "_acquire" not in vars(lock_backends["default"])


def test_lease_does_not_outlive_a_long_outage(locks: Locks) -> None:
    """A short one costs a renewal; a long one the lease."""
    with lost_block() as lease:
        with lose_connection():
            locks.advance(15)
            lease.check()
        locks.advance(10)
        lease.check()
        with lose_connection():
            locks.advance(31)
        assert lease.is_lost


def test_caller_waits_for_the_end_of_an_outage(locks: Locks) -> None:
    """An outage that is shorter than its wait is not noticed."""
    quick = Retry(delay=0.01, cap=0.02)
    with lose_connection():
        caller = Later(distlock(KEY, wait=60, retry=quick).acquire)
        name = lock_backends["default"].queues.name_of(KEY)
        assert eventually(lambda: name in lock_backends["default"].queues)
    assert caller.result(10).held


# Asynchronous code


async def test_awaited_block_lives_through_the_time(locks: Locks) -> None:
    """The helpers are called as they are: nothing in memory has to be waited for."""
    async with distlock(KEY, ttl=30) as lease:
        locks.advance(300)
        lease.check()
        assert_locked(KEY)
    assert_not_locked(KEY)
    with hold(KEY):
        assert await distlock(KEY).atry_acquire() is None


async def test_task_is_cancelled_at_its_next_await(locks: Locks) -> None:
    """And what its block raises is the loss."""
    went_on = False

    async def work() -> None:
        nonlocal went_on
        async with distlock(KEY, **ALONE):
            advance(31)
            await asyncio.sleep(5)
            went_on = True

    with pytest.raises(LockLost):
        await work()
    assert not went_on


async def test_callbacks_of_coroutines_have_been_called(locks: Locks) -> None:
    """In a thread apart, as always there: one that uses the ORM may not run in the event loop's."""
    told: list[str] = []
    lease = await distlock(KEY, ttl=30).aacquire()
    lease.on_lost(lambda lost: told.append(threading.current_thread().name))
    other = simulate_pause(lease, taken_by_other=True)
    assert told == ["distlock-lost"]
    assert other is not None
    assert other.fence > lease.fence


def test_awaited_calls_leave_no_thread() -> None:
    """Those that served them end with the locks."""

    async def take() -> None:
        async with distlock(KEY):
            pass

    # Other tests have used the backend that it stands for.
    before = set(threading.enumerate())
    with memory_locks():
        asyncio.run(take())

    def left() -> list[str]:
        threads = set(threading.enumerate()) - before
        return [each.name for each in threads if "distlock-default" in each.name]

    assert eventually(lambda: not left())


# What it is for


class Bank:
    """Makes transfers, and is slow to say how much they are."""

    def __init__(self, meanwhile: Callable[[Lease], object]):
        self.transfers: list[tuple[int, int]] = []
        self._meanwhile = meanwhile

    def amount_of(self, payment: int) -> int:
        """Answer, when something has happened meanwhile."""
        lease = current_lease()
        assert lease is not None
        self._meanwhile(lease)
        return 100

    def transfer(self, payment: int, amount: int) -> None:
        """Do what must not be done twice."""
        self.transfers.append((payment, amount))


def section(payment: int, bank: Bank, *, is_careful: bool) -> None:
    """Do what must not be done twice, and perhaps ask first whether the lease still stands."""
    with distlock(f"payment:{payment}") as lease:
        amount = bank.amount_of(payment)
        if is_careful:
            lease.check()
        bank.transfer(payment, amount)


def taken_in_a_pause(lease: Lease) -> None:
    """Stand still while somebody else takes the key."""
    simulate_pause(lease, taken_by_other=True)


def stolen(lease: Lease) -> None:
    """Lose the key to somebody else, and live for long enough to be told."""
    steal(lease, ttl=300)
    advance(11)


def expired(lease: Lease) -> None:
    """Be forgotten by the store, and live for long enough to be told."""
    expire(lease.key)
    advance(11)


@pytest.mark.parametrize("happening", [simulate_pause, taken_in_a_pause, stolen, expired])
@pytest.mark.parametrize(("is_careful", "transfers"), [(False, [(1, 100)]), (True, [])])
def test_careless_section_is_caught(
    locks: Locks,
    happening: Callable[[Lease], object],
    *,
    is_careful: bool,
    transfers: list[tuple[int, int]],
) -> None:
    """What it did without its lock is there to be seen; one that asks first has done nothing."""
    bank = Bank(happening)
    with pytest.raises(LockLost):
        section(1, bank, is_careful=is_careful)
    assert bank.transfers == transfers


def test_section_that_is_in_time_does_its_work(locks: Locks) -> None:
    """Time that it lives through does not stop it."""
    bank = Bank(lambda lease: advance(3600))
    section(1, bank, is_careful=True)
    assert bank.transfers == [(1, 100)]
