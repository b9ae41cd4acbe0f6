"""The waiters of one process are granted a key in the order in which they came."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from django_distlock import BackendUnavailable, Lease, Lock, LockNotAcquired, Retry
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.queues import Turn
from django_distlock.core.records import Grant
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .helpers import PATIENCE, PROMPT, Later, alone, crew, noted, pressure, prompt, race
from .locking import eventually, grantable, held_elsewhere, lock_of
from .turn_workers import LAZY

#: Tries often, where nobody wakes it.
QUICK = Retry(delay=0.05, factor=1, cap=0.05)


class Line:
    """Those who wait for one key, in this process.

    Attributes:
        order: Who was granted the key, in this order.
    """

    def __init__(self, registered: Registered, key: str):
        self.backend: BaseLockBackend = lock_backends[registered.alias]
        self.lock = lock_of(registered, key, ttl=60, wait=20, retry=LAZY)
        self.order: list[int] = []
        self._name = self.backend.queues.name_of(key)

    @property
    def length(self) -> int:
        """How many wait."""
        return len(self.backend.queues.get(self._name, ()))

    def wait(self, number: int, lock: Lock | None = None) -> None:
        """Wait, be granted, and work for a moment."""
        with self.lock if lock is None else lock:
            self.order.append(number)
            so_far = len(self.order)
            time.sleep(0.01)
            assert len(self.order) == so_far, "two held a key at once"

    async def await_(self, number: int) -> None:
        """The same in a task."""
        async with self.lock:
            self.order.append(number)
            so_far = len(self.order)
            await asyncio.sleep(0.01)
            assert len(self.order) == so_far, "two held a key at once"

    def joined(self, length: int) -> None:
        """Wait until so many stand in line."""
        assert eventually(lambda: self.length == length, timeout=30), self.length

    async def ajoined(self, length: int) -> None:
        """Wait until so many stand in line, and let the event loop go on."""
        await asyncio.to_thread(self.joined, length)

    def follow(self, numbers: Iterable[int], lock: Lock | None = None) -> list[Later[None]]:
        """Let threads come one after the other."""
        waiting = []
        for number in numbers:
            length = self.length
            waiting.append(Later(self.wait, number, lock))
            self.joined(length + 1)
        return waiting


@pytest.fixture
def line(registered: Registered, key: str) -> Line:
    """Give a line with nobody in it."""
    return Line(registered, key)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.left: list[asyncio.Task[Any]] = []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], Any]) -> Any:
        """Start a task; give what becomes of it."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    def stop(self) -> None:
        """Let the loop stand still, whatever it is doing."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    def close(self) -> None:
        """Close the loop under its tasks."""
        if not self.loop.is_closed():
            self.stop()
            self.left = [*asyncio.all_tasks(self.loop)]
            for task in self.left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            self.loop.close()

    def drop(self) -> None:
        """End the tasks as the garbage collector does."""
        for task in self.left:
            coroutine = task.get_coro()
            assert inspect.iscoroutine(coroutine)
            coroutine.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Give an event loop in a thread of its own."""
    made = Loop()
    yield made
    made.close()
    with suppress(RuntimeError):
        made.drop()


@pytest.mark.parametrize("kinds", ["threads", "tasks", "mixed"])
def test_first_come_is_first_served(line: Line, loop: Loop, kinds: str) -> None:
    """Ten waiters are granted in the order of their arrival, be they threads, tasks, or both."""
    with held_elsewhere(line.lock):
        waiting: list[Any] = []
        for number in range(10):
            in_thread = kinds == "threads" or (kinds == "mixed" and number % 2 == 0)
            waiting.append(
                Later(line.wait, number) if in_thread else loop.start(partial(line.await_, number))
            )
            line.joined(number + 1)
    for each in waiting:
        each.result(20)
    assert line.order == list(range(10))
    assert line.length == 0
    assert grantable(line.lock)


def test_only_the_first_asks_the_store(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nine wait behind it, one asks; a hand-over costs its attempt and the next mark."""
    with held_elsewhere(line.lock):
        asked = noted(monkeypatch, line.backend, "acquire")
        waiting = line.follow([0])
        assert eventually(lambda: len(asked) >= 1)
        time.sleep(0.7)
        before = len(asked)
        # Whom nobody wakes asks at 5, 10, 20 ms and so on: as long as the key is held by then.
        is_woken = line.backend.supports_wakeups
        assert before <= (2 if is_woken else 10)
        waiting += line.follow(range(1, 10))
        time.sleep(0.7)
        more = len(asked) - before
        assert more <= (0 if is_woken else 2), "somebody asked who was not the first"
    for each in waiting:
        each.result()
    assert sum(isinstance(answer, Grant) for answer in asked) == 10
    # A message may meet one who has just tried by itself. Without messages, what is held for
    # moments is asked for a few times.
    assert len(asked) - before <= 10 + (9 if is_woken else 4 * 9) + 3, asked


def test_long_wait_does_not_break_the_line(
    line: Line, registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind one that asks in time, nobody asks however long it takes, and the order stays."""
    asked: list[int] = []
    acquire = line.backend.acquire
    # As by default: one second at most between two questions of the first, where nobody wakes it.
    patient = lock_of(registered, line.lock.key, ttl=60, wait=40)

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(threading.get_ident())
        return acquire(*args, **kwargs)

    with held_elsewhere(line.lock):
        waiting = line.follow(range(6), patient)
        time.sleep(1)
        monkeypatch.setattr(line.backend, "acquire", counted)
        time.sleep(10)
        assert len(set(asked)) == 1, f"{len(set(asked))} waiters asked {len(asked)} times"
    for each in waiting:
        each.result(30)
    assert line.order == list(range(6))


def test_newcomer_comes_behind_those_who_wait(line: Line) -> None:
    """Whoever gives a key up and wants it again does not overtake who waited meanwhile."""
    holder = line.lock.acquire()
    waiting = line.follow(range(3))
    assert holder.release() is True
    line.wait(3)
    for each in waiting:
        each.result()
    assert line.order == [0, 1, 2, 3]


def test_waiter_in_front_that_gives_up_strands_nobody(registered: Registered, line: Line) -> None:
    """Those whose time is over leave the line, in front and in the middle."""
    lock = line.lock

    def give_up(seconds: float) -> None:
        with pytest.raises(LockNotAcquired):
            lock_of(registered, lock.key, wait=seconds, retry=LAZY).acquire()

    with held_elsewhere(lock):
        waiting: list[Later[None]] = []
        for wait, argument in ((give_up, 3.0), (line.wait, 1), (give_up, 2.5), (line.wait, 3)):
            waiting.append(Later(wait, argument))  # type: ignore[arg-type]
            line.joined(len(waiting))
        line.joined(2)
    with prompt():
        for each in waiting:
            each.result()
    assert line.order == [1, 3]


def test_silence_counts_from_the_front(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has waited for long is not taken for stuck when it is first and has yet to ask."""
    queues, listen = line.backend.queues, line.backend.listen
    is_first, asks = threading.Event(), threading.Event()

    def stand(*args: float) -> bool:
        if queues.front(second.name) is second:
            is_first.set()
            asks.wait(PATIENCE)
        return listen(*args)

    with held_elsewhere(line.lock):
        waiting = line.follow(range(3))
        _first, second, third = queues.all()
        second.asked_at -= 100
        monkeypatch.setattr(line.backend, "listen", stand)
    assert is_first.wait(PATIENCE)
    patience = third.ring.__self__._attempts.patience  # type: ignore[attr-defined]
    asks.set()
    for each in waiting:
        each.result()
    assert patience > 0
    assert line.order == [0, 1, 2]


def test_last_attempt_is_made_by_one_who_was_never_first(
    line: Line, registered: Registered, acquire: Callable[[Lock], Lease]
) -> None:
    """Who waits behind somebody that does not ask has the key at its own deadline."""
    never = Turn(line.backend.queues.name_of(line.lock.key), lambda: True)
    line.backend.queues.join(never)
    try:
        with prompt(0.8, least=0.79):
            lease = acquire(lock_of(registered, line.lock.key, wait=0.8, retry=LAZY))
        assert lease.release() is True
    finally:
        line.backend.queues.leave(never)


def test_single_attempt_does_not_queue_up(line: Line, registered: Registered) -> None:
    """With `wait=0` the answer comes at once, and the line is as it was."""
    with held_elsewhere(line.lock):
        waiting = Later(line.wait, 1)
        line.joined(1)
        with prompt():
            assert line.lock.try_acquire() is None
        with prompt(), pytest.raises(LockNotAcquired):
            lock_of(registered, line.lock.key, wait=0).acquire()
        assert line.length == 1
    waiting.result()


@pytest.mark.parametrize("place", [0, 1])
async def test_cancelled_waiter_strands_nobody(line: Line, place: int) -> None:
    """In front or in the middle, a task that is cancelled leaves the line."""
    tasks = []
    with held_elsewhere(line.lock):
        for number in range(4):
            tasks.append(asyncio.create_task(line.await_(number)))
            await line.ajoined(number + 1)
        tasks[place].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[place]
        await line.ajoined(3)
    with prompt():
        await asyncio.gather(*(each for each in tasks if not each.cancelled()))
    assert line.order == [number for number in range(4) if number != place]


@pytest.mark.parametrize("place", [0, 1])
def test_waiter_that_is_interrupted_strands_nobody(line: Line, place: int) -> None:
    """A time limit that a signal's handler raises ends a wait, and nobody else's."""
    waiting = []

    class TimeLimit(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with held_elsewhere(line.lock):
            if place:
                waiting.append(Later(line.wait, 0))
                line.joined(1)

            def come_behind() -> None:
                line.joined(place + 1)
                waiting.append(Later(line.wait, 2))
                line.joined(place + 2)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

            behind = Later(come_behind)
            with pytest.raises(TimeLimit):
                line.wait(1)
            behind.result()
            line.joined(place + 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    with prompt():
        for each in waiting:
            each.result()
    assert line.order == ([0, 2] if place else [2])


@pytest.mark.parametrize("followed", [True, False])
def test_task_of_a_closed_loop_strands_nobody(line: Line, loop: Loop, *, followed: bool) -> None:
    """A loop that was closed under a waiting task wakes nobody, is passed over, and cleared."""
    waiting = None
    with held_elsewhere(line.lock):
        lost = loop.start(partial(line.await_, 0))
        line.joined(1)
        if followed:
            waiting = Later(line.wait, 1)
            line.joined(2)
        # So that its attempt behind the subscription has marked the grant.
        time.sleep(0.7)
        loop.close()
    if waiting is not None:
        with prompt():
            waiting.result()
        assert line.order == [1]
    assert not lost.done()
    line.joined(0)
    assert grantable(line.lock)


def test_task_that_is_dropped_with_its_loop_leaves_in_silence(line: Line, loop: Loop) -> None:
    """What the garbage collector ends can await nothing: it leaves, and raises nothing of ours."""
    with held_elsewhere(line.lock):
        loop.start(partial(line.await_, 0))
        line.joined(1)
        # Long enough for people to see that it waits.
        time.sleep(1.5)
        loop.close()
        loop.drop()
        line.joined(0)
    assert grantable(line.lock)


def test_loop_that_stands_still_does_not_keep_the_key_from_others(line: Line, loop: Loop) -> None:
    """A task whose loop does other work cannot ask: those behind it wait for a few seconds more."""
    goes_on = threading.Event()
    with held_elsewhere(line.lock):
        blocked = loop.start(partial(line.await_, 0))
        line.joined(1)
        # It has asked, and sleeps: asked behind the release, it would have the key, and keep it.
        time.sleep(0.7)
        loop.loop.call_soon_threadsafe(goes_on.wait, 15)
        waiting = Later(line.wait, 1)
        line.joined(2)
    try:
        with prompt(7):
            waiting.result(14)
    finally:
        goes_on.set()
        with suppress(Exception):
            blocked.result(20)


@pytest.mark.requires("distributed", supports_wakeups=False)
def test_lazy_waiter_does_not_slow_the_quick_one_behind_it(
    line: Line, registered: Registered
) -> None:
    """Where nobody is woken, the pauses of the one in front are not those of all."""
    lease = Later(line.lock.acquire).result()
    front = Later(line.wait, 0)
    line.joined(1)

    def quick() -> float:
        with lock_of(registered, line.lock.key, wait=15, retry=QUICK):
            return time.monotonic()

    behind = Later(quick)
    line.joined(2)
    # As another process does: it rings nobody here.
    name, grant = line.backend.queues.name_of(line.lock.key), lease._holding.grant
    released = Later(line.backend._release, name, grant, None, bound=1.0).result()
    assert released is True
    pressed, freed_at = pressure(), time.monotonic()
    took = alone(behind.result() - freed_at, pressed)
    assert took < 7 + PROMPT, f"took {took:.3f} s instead of 7 s"
    front.result()


def test_everybody_gets_the_key_however_many_come_and_go(
    line: Line, registered: Registered
) -> None:
    """Threads that wait, give up and come again leave an empty line and a free key."""
    granted: list[int] = []

    def run(number: int) -> None:
        for turn in range(6):
            wait = 0.02 if (number + turn) % 3 == 0 else 20
            # On a busy machine a store may not answer in so short a time.
            may_meet = (LockNotAcquired, BackendUnavailable) if wait < 1 else (LockNotAcquired,)
            with (
                suppress(*may_meet),
                lock_of(registered, line.lock.key, ttl=60, wait=wait, retry=QUICK),
            ):
                granted.append(number)

    running = [Later(run, number) for number in range(6)]
    for each in running:
        each.result(PATIENCE)
    assert len(granted) >= 6 * 4
    assert line.length == 0
    assert grantable(line.lock)


# Not session locks, which have no marks: nobody knows who waits. Nor the ORM on MySQL, where of two
# that ask at once one is told to come again.
@pytest.mark.aliases("sqlite", "postgres", "postgres_orm", "mariadb", "redis")
def test_released_key_is_left_to_other_processes(
    registered: Registered, key: str, tmp_path: Path
) -> None:
    """Of 180 turns that six processes compete for, each gets at least half of the mean."""
    path = tmp_path / "turns"
    path.touch()
    compete = "tests.contract.turn_workers:compete"
    with crew(6, compete, registered.alias, key, str(path), 180, ready="asks") as workers:
        turns = race(workers)
    print(f"{registered.alias}: {sorted(turns)}")
    assert sum(turns) == 180
    assert min(turns) >= 15, f"one process got {min(turns)} turns, the mean is 30: {turns}"


# Awaited


@pytest.mark.parametrize("steps", range(0, 30, 6))
async def test_attempt_that_is_cancelled_in_flight_holds_nothing_and_strands_nobody(
    line: Line, registered: Registered, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a task is cancelled whose attempt takes long, the next waiter has the key soon."""
    acquire = line.backend.acquire
    # Where nobody wakes it, it has its backoff.
    lock = lock_of(registered, line.lock.key, ttl=60, wait=20)

    async def work() -> None:
        async with lock:
            pass

    slow = asyncio.Event()
    running = asyncio.get_running_loop()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        answer = acquire(*args, **kwargs)
        if not slow.is_set():
            running.call_soon_threadsafe(slow.set)
            time.sleep(0.03)
        return answer

    monkeypatch.setattr(line.backend, "acquire", slowly)
    task = asyncio.create_task(lock.aacquire())
    await slow.wait()
    behind = asyncio.create_task(work())
    await asyncio.sleep(steps / 1000)
    task.cancel()
    try:
        lease: Lease | None = await task
    except asyncio.CancelledError:
        lease = None
    if lease is not None:
        assert await lease.arelease() is True
    with prompt():
        await behind
    assert await asyncio.to_thread(eventually, partial(grantable, lock))
