"""`single_flight`: of all who ask for a value at once, one computes it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import product
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.core.cache import caches
from django.core.cache.backends.locmem import LocMemCache
from django.test import override_settings

from django_distlock import (
    InvalidArgument,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    asingle_flight,
    current_lease,
    distlock,
    flights,
    lock_backends,
    signals,
    single_flight,
)
from django_distlock.core.declarations import Kind, declarations, declared
from django_distlock.core.keys import OWN_MARKER, own_key
from django_distlock.process import event_log
from django_distlock.testing import lose_connection
from tests.contract.helpers import Later, crew, prompt, there
from tests.contract.locking import Heard, eventually, take_away
from tests.interrupting import interrupt_at
from tests.processes import spawn
from tests.shop.models import Row

from .operating import run

#: Calls a function, or awaits it in a loop of its own.
WAYS = ("called", "awaited")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert flights._flights == {}
    # The checks of other tests are not about what is decorated here.
    declared.clear()


@pytest.fixture(params=WAYS)
def fly(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Give `single_flight`, or its twin, for a function that blocks."""
    if request.param == "called":
        return functools.partial(single_flight, backend="memory")

    def awaited(key: str, compute: Callable[[], Any], **how: Any) -> Any:
        async def work() -> Any:
            return await asyncio.to_thread(compute)

        return asyncio.run(asingle_flight(key, work, **{"backend": "memory", **how}))

    return awaited


class Work:
    """Counts how often it runs, and waits until it is told to end."""

    def __init__(self, *results: Any):
        self.runs = 0
        self.begun = threading.Event()
        self.end = threading.Event()
        self._results = results

    def __call__(self) -> Any:
        """Do what the next result says."""
        result = self._results[min(self.runs, len(self._results) - 1)]
        self.runs += 1
        self.begun.set()
        assert self.end.wait(20)
        if isinstance(result, Exception):
            raise result
        return result

    def started(self, ask: Callable[..., Any], *args: Any, **how: Any) -> Later[Any]:
        """Let somebody ask for it, and return when it has begun."""
        first = Later(ask, *args, **how)
        assert self.begun.wait(10)
        return first

    def shared(self, ask: Callable[[], Any], many: int) -> list[Later[Any]]:
        """Let somebody ask for it, and others follow, until it ends; return all of them."""
        first = self.started(ask)
        those = followers(ask, many)
        self.end.set()
        return [first, *those]

    @classmethod
    def quick(cls, *results: Any) -> Work:
        """Return one that ends at once."""
        made = cls(*results)
        made.end.set()
        return made


def is_followed() -> bool:
    """Whether somebody waits for a flight."""
    return any(each.is_awaited for each in flights._flights.values())


def followers(fly: Callable[[], Any], many: int) -> list[Later[Any]]:
    """Let some ask while somebody computes; return when all of them wait."""
    join, joined = flights._Plan._join, threading.Semaphore(0)

    def noted(*arguments: Any) -> None:
        join(*arguments)
        joined.release()

    with patch.object(flights._Plan, "_join", noted):
        those = [Later(fly) for _ in range(many)]
        assert all(joined.acquire(timeout=20) for _ in those)
    return those


# Once


@pytest.mark.parametrize("backend", ["postgres", "redis"])
def test_many_threads_of_processes_compute_once(key: str, backend: str) -> None:
    """200 threads in 4 processes, and a cold key: one row is written, and all get its value."""
    with crew(4, "tests.integration.flights:ask", key, 50, backend) as askers:
        got = [value for each in askers for value in each.result(60)]
    assert got == [{"rows": 1}] * 200
    assert Row.objects.filter(name=key).count() == 1


def test_others_of_the_process_wait_for_one(fly: Callable[..., Any], key: str) -> None:
    """And ask the store of the locks nothing."""
    work = Work([1])
    first = work.started(fly, key, work, timeout=60)
    with lose_connection("memory"):
        those = followers(lambda: fly(key, work, timeout=60), 20)
        assert not any(each._future.done() for each in those)
    work.end.set()
    values = [first.result(), *(each.result() for each in those)]
    assert values == [[1]] * 21
    assert work.runs == 1
    # None of them can spoil what another one has got.
    assert len({id(each) for each in values}) == 21


def test_end_of_an_iterator_is_an_error_like_others(key: str) -> None:
    """It reaches the caller, and those who wait for it."""
    work = Work(StopIteration("over"))
    for each in work.shared(lambda: single_flight(key, work, timeout=60, backend="memory"), 2):
        with pytest.raises(StopIteration, match="over"):
            each.result()
    assert work.runs == 1


def test_key_that_was_filled_has_no_field(key: str) -> None:
    """It may have text that looks like one. A key that nothing fills warns."""

    @single_flight(f"{key}:{{text}}", timeout=60, backend="memory")
    def named(text: str) -> str:
        return text

    assert named("Hello-{user}") == "Hello-{user}"
    with pytest.warns(RuntimeWarning, match="filled only where"):
        single_flight(f"{key}:{{user}}", lambda: 1, timeout=60, backend="memory")


def test_value_comes_from_the_cache(fly: Callable[..., Any], key: str) -> None:
    """As others put it there, and until somebody takes it away."""
    caches["default"].set(key, "theirs")
    work = Work.quick("ours")
    assert fly(key, work, timeout=60) == "theirs"
    assert work.runs == 0
    caches["default"].delete(key)
    assert fly(key, work, timeout=60) == "ours"
    assert fly(key, work, timeout=60) == "ours"
    assert caches["default"].get(key) == "ours"
    assert work.runs == 1


def test_none_is_a_value(fly: Callable[..., Any], key: str) -> None:
    """So is what else is false."""
    values: list[Any] = [None, False, 0, "", []]
    for cache, stale in product(("default", "shared"), (0, 60)):
        for number, value in enumerate(values):
            work = Work.quick(value)
            name = f"{key}:{stale}:{number}"
            how: dict[str, Any] = {"timeout": 60, "cache": cache, "stale": stale}
            assert [fly(name, work, **how) for _ in range(3)] == [value] * 3
            assert work.runs == 1


@pytest.mark.parametrize("cache", ["default", "shared"])
def test_value_ends_when_its_time_is_over(key: str, cache: str) -> None:
    """In one process, and in all of them."""
    work = Work.quick(1, 2)
    ask = functools.partial(
        single_flight, key, work, timeout=timedelta(seconds=1), cache=cache, backend="memory"
    )
    assert ask() == 1
    assert eventually(lambda: ask() == 2)
    assert work.runs == 2


def test_timeout_none_is_for_ever(key: str) -> None:
    """As in Django's cache."""
    single_flight(key, lambda: 1, timeout=None, backend="memory")
    cache: Any = caches["default"]
    assert cache._expire_info[cache.make_key(key)] is None


def test_key_that_was_waited_for_is_looked_up_again(fly: Callable[..., Any], key: str) -> None:
    """Another process has computed it meanwhile, which the cache tells."""
    work = Work.quick("ours")
    lease = distlock(own_key(f"flight:{key}@default"), backend="memory").acquire()
    asker = Later(fly, key, work, timeout=60)
    assert eventually(lambda: flights._flights != {})
    time.sleep(0.05)
    caches["default"].set(key, "theirs")
    lease.release()
    assert asker.result() == "theirs"
    assert work.runs == 0


def test_keys_and_caches_are_apart(key: str) -> None:
    """A flight of one is none of another."""
    for cache in ("default", "shared"):
        for name in (key, f"{key}:2"):
            value = single_flight(name, lambda: [cache, name], timeout=60, cache=cache)  # noqa: B023
            assert value == [cache, name]


#: What some projects keep the tenant of a request in.
tenant = contextvars.ContextVar("tenant", default="")


def of_tenant(key: str, prefix: str, version: int) -> str:
    """Name an entry of a cache, each tenant's own."""
    return f"{tenant.get()}:{key}"


def test_tenants_of_a_cache_are_apart(fly: Callable[..., Any], key: str) -> None:
    """A project's `KEY_FUNCTION` may tell them by the caller's context."""

    def ask(name: str, compute: Callable[[], Any]) -> Any:
        tenant.set(name)
        return fly(key, compute, timeout=60, cache="tenants")

    locmem = "django.core.cache.backends.locmem.LocMemCache"
    of_tenants = {"BACKEND": locmem, "KEY_FUNCTION": f"{__name__}.{of_tenant.__name__}"}
    with override_settings(CACHES={**settings.CACHES, "tenants": of_tenants}):
        works = {name: Work(name) for name in ("one", "two")}
        first = Later(ask, "one", works["one"])
        assert works["one"].begun.wait(10)
        second = Later(ask, "two", works["two"])
        assert eventually(lambda: len(flights._flights) == 2)
        for each in works.values():
            each.end.set()
        assert [first.result(), second.result()] == ["one", "two"]
        assert Later(ask, "two", Work.quick("anew")).result() == "two"


class OfOneThread(LocMemCache):
    """As clients of memcached are."""

    made: ClassVar[list[OfOneThread]] = []

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.made.append(self)
        self.threads = {threading.get_ident()}

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Say who asks."""
        self.threads.add(threading.get_ident())
        return super().get(*args, **kwargs)


def test_object_of_a_cache_is_asked_by_one_thread(key: str) -> None:
    """And a thread has one for all the calls of a loop."""
    OfOneThread.made.clear()

    async def ask(name: str) -> str:
        async def compute() -> str:
            return name

        return await asingle_flight(name, compute, timeout=60, cache="own", backend="memory")

    async def main() -> list[str]:
        caches["own"].get(key)
        return [await ask(f"{key}:{number}") for number in range(3)]

    own = {"BACKEND": f"{__name__}.{OfOneThread.__name__}", "LOCATION": key}
    with override_settings(CACHES={**settings.CACHES, "own": own}):
        assert asyncio.run(main()) == [f"{key}:{number}" for number in range(3)]
    assert all(len(each.threads) == 1 for each in OfOneThread.made)
    assert len(OfOneThread.made) == len(set.union(*(each.threads for each in OfOneThread.made)))


def test_cache_that_keeps_nothing_costs_one_run_for_all_who_wait(key: str) -> None:
    """A value that is too large for memcached, say: who waits gets it all the same."""
    work = Work("value")
    ask = functools.partial(single_flight, key, work, timeout=60, cache="nothing", backend="memory")
    assert [each.result() for each in work.shared(ask, 10)] == ["value"] * 11
    assert work.runs == 1


def test_value_that_cannot_travel_is_for_who_computed_it(key: str) -> None:
    """Where the cache does not mind. Those who wait compute their own."""
    work = Work(threading.Lock(), "value")
    ask = functools.partial(single_flight, key, work, timeout=60, cache="nothing", backend="memory")
    first, other = work.shared(ask, 1)
    assert first.result() is work._results[0]
    assert other.result() == "value"


# The stale value


def aged(key: str, value: Any) -> None:
    """Put a value into the cache that is stale."""
    caches["default"].set(key, value, 60)
    caches["default"].delete(flights._name("fresh", key))


def test_stale_value_is_given_while_one_computes(fly: Callable[..., Any], key: str) -> None:
    """To others of the process, and to other processes: none of them waits."""
    aged(key, "old")
    work = Work("new")
    first = work.started(fly, key, work, timeout=60, stale=60)
    with prompt():
        assert fly(key, work, timeout=60, stale=60) == "old"
    # As another process, which has no flight of ours.
    mine = dict(flights._flights)
    flights._flights.clear()
    with prompt():
        assert fly(key, work, timeout=60, stale=60) == "old"
    flights._flights.update(mine)
    work.end.set()
    assert first.result() == "new"
    assert fly(key, work, timeout=60, stale=60) == "new"
    assert work.runs == 1


@pytest.mark.parametrize("cache", ["default", "shared"])
def test_value_is_fresh_then_stale_then_gone(key: str, cache: str) -> None:
    """By the clock of the cache."""
    for name, stale in ((key, 60), (f"{key}:gone", 1)):
        single_flight(name, lambda: 1, timeout=1, stale=stale, cache=cache, backend="memory")
    plan = flights._Plan.of(key, timeout=1, stale=60, cache=cache)
    assert plan._look(key) == flights._Found(1)
    assert eventually(lambda: plan._look(key) == flights._Found(1, is_fresh=False))
    assert eventually(lambda: not plan._look(f"{key}:gone").is_there)


def test_value_that_somebody_deleted_is_not_stale_but_gone(
    fly: Callable[..., Any], key: str
) -> None:
    """What marks it as fresh is left, and means nothing."""
    fly(key, Work.quick("wrong"), timeout=60, stale=60)
    caches["default"].delete(key)
    assert fly(key, Work.quick("right"), timeout=60, stale=60) == "right"


# Errors


def test_error_reaches_those_who_wait(fly: Callable[..., Any], key: str) -> None:
    """Each of them gets one of its own, and who comes later computes."""
    work = Work(ConnectionResetError(54, "away"), "value")
    errors = []
    for each in work.shared(lambda: fly(key, work, timeout=60), 5):
        with pytest.raises(ConnectionResetError, match="away") as caught:
            each.result()
        errors.append(caught.value)
    assert len({id(each) for each in errors}) == 6
    assert work.runs == 1
    assert fly(key, work, timeout=60) == "value"


def test_error_that_nobody_minds_is_of_one(fly: Callable[..., Any], key: str) -> None:
    """With "compute", the next one of those who wait computes."""
    work = Work(ConnectionResetError("away"), "value")
    ask = functools.partial(fly, key, work, timeout=60, on_error="compute")
    first, *those = work.shared(ask, 5)
    with pytest.raises(ConnectionResetError):
        first.result()
    assert [each.result() for each in those] == ["value"] * 5
    assert work.runs == 2


def test_stale_value_takes_the_place_of_an_error(
    fly: Callable[..., Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is logged. Where there is none, the error is raised."""
    work = Work.quick(ConnectionResetError("away"))
    ask = functools.partial(fly, key, work, timeout=60, stale=60, on_error="stale")
    with pytest.raises(ConnectionResetError):
        ask()
    assert not [each for each in caplog.records if key in each.message]
    aged(key, "old")
    assert ask() == "old"
    (said,) = [each for each in caplog.records if key in each.message]
    assert said.__dict__["distlock_event"] == "flight_failed"
    assert said.exc_info


def test_stale_value_takes_the_place_of_an_error_of_others(
    fly: Callable[..., Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one who fails while the lock is waited for."""
    answers: list[tuple[str | None, Any]] = [(None, ""), ("number", ConnectionResetError("away"))]
    monkeypatch.setattr(flights._Plan, "_failure", lambda *_: answers.pop(0))
    aged(key, "old")
    work = Work.quick("new")
    assert fly(key, work, timeout=60, stale=60, on_error="stale") == "old"
    assert (work.runs, answers) == (0, [])


class Odd(Exception):
    """Cannot be made anew from its arguments."""

    def __init__(self, one: int, *, two: int):
        super().__init__(f"{one} and {two}")


def test_error_that_cannot_travel_is_told(key: str) -> None:
    """As a `LockError`; who computed gets its own."""
    work = Work(Odd(1, two=2))
    ask = functools.partial(single_flight, key, work, timeout=60, backend="memory")
    first, other = work.shared(ask, 1)
    with pytest.raises(Odd):
        first.result()
    with pytest.raises(LockError, match="was not computed: Odd: 1 and 2"):
        other.result()


@pytest.mark.parametrize(
    ("on_error", "cache", "kind"),
    [
        ("raise", "shared", ConnectionResetError),
        ("raise", "json", LockError),
        ("compute", "shared", None),
    ],
)
def test_error_of_another_process_reaches_this_one(
    key: str, on_error: str, cache: str, kind: type[Exception] | None
) -> None:
    """If it chooses so. An error that was there before is not taken for an answer."""
    how = {"on_error": on_error, "wait": 30, "cache": cache}
    name = own_key(f"flight:{key}@{cache}")
    queues = lock_backends["default"].queues
    for _ in range(2):
        arguments = key, "postgres", "", {"cache": cache}
        with spawn("tests.integration.flights:compute", *arguments) as other:
            other.wait_for("computing")
            work = Work.quick("value")
            asker = Later(functools.partial(single_flight, key, work, timeout=60, **how))
            assert eventually(lambda: distlock(name).locked())
            # It has looked for an error that was there before.
            assert eventually(lambda: queues.name_of(name) in queues)
            other.send("fail")
            if kind is not None:
                with pytest.raises(kind, match="the provider is away"):
                    asker.result()
            else:
                assert asker.result() == "value"
            assert work.runs == (kind is None)
        caches[cache].delete(key)
    assert single_flight(key, lambda: "value", timeout=60, cache=cache) == "value"


def test_error_of_the_cache_is_raised(
    key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But not in the place of the computation's own."""

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("no cache")

    monkeypatch.setattr(caches["default"], "set", away)
    with pytest.raises(ConnectionRefusedError):
        single_flight(key, lambda: 1, timeout=60, backend="memory")
    with pytest.raises(ZeroDivisionError):
        single_flight(key, lambda: 1 // 0, timeout=60, backend="memory")
    assert "did not keep an error" in caplog.text


# Who waits too long, and who is gone


def test_wait_has_an_end(fly: Callable[..., Any], key: str) -> None:
    """For others of the process, and for other processes."""
    work = Work("value")
    first = work.started(fly, key, work, timeout=60)
    with prompt(0.2, least=0.2), pytest.raises(LockNotAcquired, match="in this process"):
        fly(key, work, timeout=60, wait=0.2)
    with prompt(0.2, least=0.2), pytest.raises(LockNotAcquired):
        # The flight is not followed again, and the lock is held.
        fly(key, work, timeout=60, wait=0.2)
    work.end.set()
    assert first.result() == "value"


def test_flight_that_nobody_lands_is_followed_once(fly: Callable[..., Any], key: str) -> None:
    """A signal's exception has broken out of it, say."""
    flight = flights._Flight("memory", "default", key)
    flights._flights[flight.name] = flight
    with pytest.raises(LockNotAcquired):
        fly(key, Work.quick("value"), timeout=60, wait=0.05)
    with prompt():
        assert fly(key, Work.quick("value"), timeout=60) == "value"


def test_conflict_may_be_run(fly: Callable[..., Any], key: str) -> None:
    """Then the value is computed twice, which is told."""
    work = Work("value")
    first = work.started(fly, key, work, timeout=60)
    name = own_key(f"flight:{key}@default")
    quick = Work.quick("quick")
    for told in (1, 2):
        with Heard(signals.lock_bypassed, name) as heard:
            assert fly(f"{key}", quick, timeout=60, wait=0.05, on_conflict="run") == "quick"
        assert len(heard.facts) == 1
        assert quick.runs == told
        caches["default"].delete(key)
    work.end.set()
    assert first.result() == "value"


@pytest.mark.parametrize("backend", ["postgres", "redis"])
def test_next_one_computes_where_the_first_is_killed(key: str, backend: str) -> None:
    """On this machine at once, for it is known to be gone."""
    with spawn("tests.integration.flights:compute", key, backend, "", {}) as other:
        other.wait_for("computing")
        work = Work.quick("value")
        asker = Later(
            single_flight, key, work, timeout=60, cache="shared", backend=backend, wait=20
        )
        assert eventually(lambda: flights._flights != {})
        other.popen.send_signal(signal.SIGKILL)
        other.popen.wait()
        with prompt(5):
            assert asker.result() == "value"
    assert work.runs == 1


def test_transaction_of_who_computed_is_not_waited_for(key: str) -> None:
    """The value is in the cache, and the key is free, before the transaction ends."""
    with spawn("tests.integration.flights:compute", key, "postgres", "atomic", {}) as other:
        other.wait_for("computing")
        asker = Later(single_flight, key, Work.quick(""), timeout=60, cache="shared")
        assert eventually(lambda: flights._flights != {})
        other.send("value")
        other.wait_for("computed")
        with prompt():
            assert asker.result() == "value"
        other.send("")
        assert other.result() == "value"


def late(key: str) -> None:
    """Lose the lock to somebody who computes a later value; find it out."""
    lease = there(current_lease())
    take_away(lease)
    caches["default"].set(key, "later", 60)
    with suppress(LockLost):
        lease.extend()


def test_who_lost_the_lock_keeps_nothing(key: str) -> None:
    """Somebody else has a later value by now. The old one is for its own caller."""

    def compute() -> str:
        late(key)
        return "early"

    assert single_flight(key, compute, timeout=60, backend="memory") == "early"
    assert caches["default"].get(key) == "later"


def test_value_of_a_lock_that_an_operator_released_is_not_kept(key: str) -> None:
    """It is for its own caller. Who asks next computes the value anew, and that one is kept."""
    runs: list[str] = []

    @single_flight("summary:{name}", timeout=60, stale=60, cache="shared", backend="redis")
    def numbered(name: str) -> int:
        runs.append(name)
        if len(runs) == 1:
            lease = there(current_lease())
            options = "--backend=redis", "--force", "--reason", "it hangs"
            assert Later(run, "distlock_release", lease.key, *options).result().status == 0
            with pytest.raises(LockLost):
                lease.extend()
        return len(runs)

    assert [numbered(key) for _ in range(3)] == [1, 2, 2]
    event_log.finish()


def test_task_that_lost_the_lock_is_told(key: str) -> None:
    """As any task in a block of a lock: it is cancelled."""

    async def compute() -> str:
        await asyncio.to_thread(late, key)
        await asyncio.sleep(20)
        return "early"

    with pytest.raises(LockLost):
        asyncio.run(asingle_flight(key, compute, timeout=60, backend="memory"))
    assert caches["default"].get(key) == "later"


def test_cancelled_task_leaves_the_value_to_others(key: str) -> None:
    """One of those who waited for it computes."""

    async def never() -> str:
        begun.set()
        await asyncio.sleep(20)
        return ""

    async def soon() -> str:
        return "value"

    async def ask() -> str:
        first = asyncio.create_task(asingle_flight(key, never, timeout=60, backend="memory"))
        await begun.wait()
        those = [
            asyncio.create_task(asingle_flight(key, soon, timeout=60, backend="memory"))
            for _ in range(5)
        ]
        assert await asyncio.to_thread(eventually, is_followed)
        those[0].cancel()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        assert set(await asyncio.gather(*those[1:])) == {"value"}
        return "done"

    begun = asyncio.Event()
    assert asyncio.run(ask()) == "done"


def test_interrupted_flight_leaves_the_value_to_others(key: str) -> None:
    """What is no `Exception` is a matter of one thread alone."""
    work, begun, stop = Work.quick("value"), threading.Event(), threading.Event()

    def exits() -> None:
        begun.set()
        assert stop.wait(20)
        raise SystemExit

    ask = functools.partial(single_flight, key, timeout=60, backend="memory")
    first = Later(ask, exits)
    assert begun.wait(10)
    those = followers(lambda: ask(work), 3)
    stop.set()
    with pytest.raises(SystemExit):
        first.result()
    assert [each.result() for each in those] == ["value"] * 3
    assert work.runs == 1


@pytest.mark.parametrize("is_old", [False, True], ids=["none", "old"])
def test_time_limit_of_a_flight_is_told_to_nobody_else(key: str, is_old: bool) -> None:
    """Celery raises it in the main thread, as an `Exception`: no old value takes its place."""
    work, those = Work.quick("value"), list[Any]()
    ask = functools.partial(single_flight, key, timeout=60, backend="memory")
    if is_old:
        ask = functools.partial(ask, stale=60, on_error="stale")
        aged(key, "old")

    def computes() -> None:
        if not is_old:
            those.extend(followers(lambda: ask(work), 1))
        signal.raise_signal(signal.SIGUSR2)

    def limit(*_: object) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR2, limit)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            ask(computes)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [each.result() for each in those] == ["value"] * (not is_old)


def test_follower_that_is_interrupted_gets_what_was_raised(key: str) -> None:
    """At any step, also of Python's own modules; and the flight lands."""
    for step in range(1, 60):
        work = Work("value")
        ask = functools.partial(single_flight, f"{key}:{step}", work, timeout=60, backend="memory")
        first = work.started(ask)
        threading.Timer(0.01, work.end.set).start()
        interrupt_at(step, ask, "threading", "concurrent")
        work.end.set()
        assert first.result(10) == "value"


def test_fork_follows_no_flight_of_its_parent(key: str) -> None:
    """Nobody would land it there."""
    work = Work("parent's")
    first = work.started(functools.partial(single_flight, key, work, timeout=60, backend="memory"))
    child = os.fork()
    if child == 0:
        os._exit(7 if flights._flights == {} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    work.end.set()
    first.result()


# Without the store of the locks


def test_store_that_is_away_keeps_nobody_from_computing(
    fly: Callable[..., Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process does so once, and says so."""
    work = Work("value")
    with (
        lose_connection("memory"),
        Heard(signals.lock_bypassed, own_key(f"flight:{key}@default")) as heard,
    ):
        those = work.shared(lambda: fly(key, work, timeout=60), 5)
        assert {each.result() for each in those} == {"value"}
    assert work.runs == 1
    assert heard.once["alias"] == "memory"
    assert heard.once["waited"] < 5
    (said,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert said.__dict__["distlock_event"] == "flight_without_lock"
    assert fly(key, work, timeout=60) == "value"


# As a decorator


class Summaries:
    """Has runs."""

    runs = 0

    @single_flight("summary:{self.name}:{pk}", timeout=60, backend="memory")
    def of(self, pk: int) -> str:
        """Say which one."""
        self.runs += 1
        return f"{self.name} {pk}"

    def __init__(self, name: str):
        self.name = name


def test_decorated_function_is_computed_once(key: str) -> None:
    """Its key is filled from the arguments, however they are given."""
    summaries = Summaries(key)
    assert [summaries.of(1), summaries.of(pk=1), summaries.of(2)] == [
        f"{key} {pk}" for pk in (1, 1, 2)
    ]
    assert summaries.runs == 2
    assert caches["default"].get(f"summary:{key}:1") == f"{key} 1"
    assert summaries.of.__name__ == "of"


def test_decorated_coroutine_is_computed_once(key: str) -> None:
    """Of tasks that await it at once, one runs."""
    runs = []

    @single_flight("summary:{name}", timeout=60, backend="memory")
    async def of(name: str) -> str:
        runs.append(name)
        await asyncio.sleep(0.05)
        return name

    async def all_of() -> list[str]:
        return await asyncio.gather(*(of(key) for _ in range(20)))

    assert asyncio.run(all_of()) == [key] * 20
    assert runs == [key]


def test_declaration_is_listed(key: str) -> None:
    """As a key of this package's own."""
    decorate: Any = single_flight("summary:{pk}", timeout=60, cache="shared")
    decorated = decorate(lambda pk: pk)
    (each,) = [each for made, each in declarations() if made is decorated]
    assert (each.key, each.kind) == (f"{OWN_MARKER}flight:summary:{{pk}}@shared", Kind.FUNCTION)
    assert decorated(7) == 7


def test_call_in_an_event_loop_is_a_call(key: str) -> None:
    """It blocks the loop, as any call does, and needs none."""

    async def main() -> list[int]:
        ask = functools.partial(single_flight, key, timeout=60, backend="memory")
        return [ask(lambda: 5) for _ in range(2)]

    assert asyncio.run(main()) == [5, 5]


# Wrong uses


def test_asking_for_its_own_value_is_refused(fly: Callable[..., Any], key: str) -> None:
    """It would wait for itself, whether the store of the locks answers or is away."""
    for outage in (nullcontext(), lose_connection("memory")):
        with outage, prompt(), pytest.raises(LockUsageError) as caught:
            fly(
                key, lambda: single_flight(key, lambda: 1, timeout=60, backend="memory"), timeout=60
            )
        assert caught.value.code == "reentrant"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"timeout": 0}, "timeout"),
    ({"timeout": 0.5}, "timeout"),
    ({"timeout": True}, "timeout"),
    ({"stale": -1}, "stale"),
    ({"stale": 0.5}, "stale"),
    ({"timeout": None, "stale": 5}, "stale"),
    ({"on_error": "stale"}, "stale"),
    ({"on_error": "skip"}, "on_error"),
    ({"on_conflict": "skip"}, "on_conflict"),
    ({"wait": None}, "wait"),
    ({"wait": -1}, "wait"),
    ({"ttl": 0}, "ttl"),
    ({"ttl": 60, "timeout": float("nan")}, "timeout"),
]


def test_wrong_arguments_are_refused(key: str) -> None:
    """Before the cache is asked, and where a function is decorated."""
    for how, named in WRONG:
        for arguments in ([key, lambda: 1], [key]):
            with pytest.raises(InvalidArgument, match=named):
                single_flight(*arguments, **{"timeout": 60, **how})


def test_body_that_runs_later_is_refused(key: str) -> None:
    """What would be kept is no value."""

    async def later() -> int:
        return 1

    with pytest.raises(LockUsageError, match="coroutine"):
        _ = single_flight(key, later, timeout=60, backend="memory")
    with pytest.raises(LockUsageError, match="coroutine"):
        _ = single_flight(key, functools.partial(later), timeout=60, backend="memory")
    assert key not in caches["default"]


def test_keys_have_rules() -> None:
    """Those of locks; and a template names parameters."""
    bad: Any
    for bad in ("", "a\0b", 5.5, "x" * 600):
        with pytest.raises(InvalidArgument):
            single_flight(bad, lambda: 1, timeout=60)
    bare: Any = single_flight
    with pytest.raises(InvalidArgument, match=r"without parentheses\? Write @single_flight\("):
        bare(lambda: 1)
    with pytest.raises(InvalidArgument, match="compute must be a function, not 5"):
        bare("summary", 5, timeout=3)
    with pytest.raises(TypeError, match=r"^single_flight\(\) missing .* 'timeout'"):
        bare("summary")
    with pytest.raises(InvalidArgument, match="nobody"):
        single_flight("summary:{nobody}", timeout=60)(lambda pk: pk)
