"""A clock, and greenlets in the place of threads: one runs at a time, and the seed says which."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from queue import Empty
from random import Random
from types import SimpleNamespace
from typing import Any

import greenlet


class Violation(BaseException):
    """Something happened that must never happen. The package, which logs errors, catches none."""


class Process:
    """One process of the history.

    Attributes:
        offset: By how much its monotonic clock differs from the time of the world.
        stands_until: Until when it is stopped, as by SIGSTOP.
        stood: Whether it ever stood still, or a thread of its did.
        is_dead: Whether it was killed.
    """

    def __init__(self, world: World, number: int):
        self.world, self.number = world, number
        self.offset = 100.0 * (number + 1)
        self.stands_until = 0.0
        self.stood = self.is_dead = False
        self.backend: Any = None
        self.alarms: Any = None

    def __repr__(self) -> str:
        return f"p{self.number}"

    def clock(self) -> float:
        """Return what its monotonic clock says, without a chance to be interrupted."""
        return self.world.now + self.offset

    @property
    def runs(self) -> bool:
        """Whether it does anything now."""
        return not self.is_dead and self.world.now >= self.stands_until


class World:
    """The time, what is to happen, and who does it.

    Args:
        seed: Decides whatever chance decides.
        limit: Seconds after which it is a violation that anything still goes on.
    """

    def __init__(self, seed: int, limit: float):
        self.random = Random(seed)
        self.now = 0.0
        self.limit = limit
        self.is_over = False
        self.history: list[str] = []
        self.processes: list[Process] = []
        #: How likely a thread is not to go on for a while where it looks at a clock.
        self.stalls = 0.0
        self.after_each: Callable[[], None] = lambda: None
        self._events: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._number = 0
        self._strands: list[Thread] = []
        self._hub = greenlet.getcurrent()

    def say(self, text: str) -> None:
        """Write down what happens."""
        self.history.append(f"{self.now:10.6f} {text}")

    def at(self, time: float, work: Callable[[], None], process: Process | None = None) -> None:
        """Let something happen in the scheduler; in a process only while that runs."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, process, work))

    def run(self) -> None:
        """Let everything happen.

        Raises:
            Violation: A check failed, or it does not end.
        """
        events = self._events
        while events:
            time, _number, process, work = heapq.heappop(events)
            if process is not None and process.is_dead:
                continue
            if process is not None and process.stands_until > time:
                self.at(process.stands_until, work, process)
                continue
            if time > self.limit:
                raise Violation("it does not end")
            self.now = max(self.now, time)
            work()
            self.after_each()

    def end(self) -> None:
        """Drop whoever has not ended, without letting any of it reach the store."""
        self.is_over = True
        for strand in self._strands:
            for _ in range(20):
                if strand.greenlet.dead:
                    break
                strand.greenlet.throw(greenlet.GreenletExit)

    # Threads

    def start(self, strand: Thread) -> None:
        """Let a thread begin."""
        self._strands.append(strand)
        self.at(self.now, strand.greenlet.switch, strand.process)

    def wait(self, seconds: float) -> bool:
        """Let the others go on; return whether this thread was woken before its time."""
        if self.is_over:
            raise greenlet.GreenletExit
        me = current_thread()
        me.ticket += 1
        ticket, me.was_woken = me.ticket, False
        if seconds < math.inf:
            self.at(self.now + max(0.0, seconds), lambda: me.resume(ticket), me.process)
        self._hub.switch()
        return me.was_woken

    def wake(self, strand: Thread) -> None:
        """Let a thread that waits go on."""
        ticket = strand.ticket

        def resume() -> None:
            strand.was_woken = strand.was_woken or strand.ticket == ticket
            strand.resume(ticket)

        self.at(self.now, resume, strand.process)

    def clock(self) -> float:
        """Return what the clock of the running thread's process says, maybe after a while."""
        strand = _thread()
        if strand is None:
            return self.now
        if self.stalls and self.random.random() < self.stalls:
            strand.process.stood = True
            self.wait(10 ** self.random.uniform(-3, 1))
            strand.stalled_at = self.now
        return strand.process.clock()


def _thread() -> Thread | None:
    return getattr(greenlet.getcurrent(), "thread", None)


def current_thread() -> Thread:
    """Return the thread that runs."""
    found = _thread()
    if found is None:
        raise RuntimeError("No simulated thread runs.")
    return found


class _Greenlet(greenlet.greenlet):
    thread: Thread


class Thread:
    """Is `threading.Thread`: in the process of whoever makes it."""

    def __init__(
        self,
        target: Callable[..., object],
        name: str = "",
        *,
        daemon: bool = True,
        args: tuple[Any, ...] = (),
        process: Process | None = None,
    ):
        self.process: Process = process or current_thread().process
        self.name = self.ident = f"{self.process}.{name or 'thread'}"
        self.ticket, self.was_woken = 0, False
        #: When it last went on behind a while in which it did not look at anything.
        self.stalled_at = -1.0
        #: When it began to wait for what it does now; -1: that waits for nothing.
        self.began = -1.0
        self._target, self._args = target, args
        self._has_begun = False
        self.greenlet = _Greenlet(self._run, greenlet.getcurrent())
        self.greenlet.thread = self

    def start(self) -> None:
        """Begin."""
        self._has_begun = True
        self.greenlet.parent = self.process.world._hub
        self.process.world.start(self)

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._has_begun and not self.greenlet.dead

    def resume(self, ticket: int) -> None:
        """Go on, if it still waits for that."""
        if ticket == self.ticket and not self.greenlet.dead:
            self.ticket += 1
            self.greenlet.switch()

    def _run(self, *_: object) -> None:
        # What has ended keeps nothing alive.
        target, args = self.__dict__.pop("_target"), self.__dict__.pop("_args")
        try:
            target(*args)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{self.name} ended with {error!r}") from error


class Timer:
    """Is `threading.Timer`."""

    daemon = True

    def __init__(self, seconds: float, work: Callable[..., None], args: tuple[Any, ...] = ()):
        self._seconds, self._work, self._args = seconds, work, args

    def start(self) -> None:
        """Begin to count."""
        process = current_thread().process
        world = process.world
        thread = Thread(self._work, "timer", args=self._args, process=process)
        world.at(world.now + self._seconds, thread.start, process)


class Mutex:
    """Is `threading.Lock` and `threading.RLock`."""

    def __init__(self, *, is_reentrant: bool = False):
        self._is_reentrant = is_reentrant
        self._owner: Thread | None = None
        self._depth = 0
        self._waiting: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, or wait for it."""
        me = current_thread()
        world = me.process.world
        until = world.now + timeout if timeout >= 0 else math.inf
        while self._owner is not None and not (self._is_reentrant and self._owner is me):
            if not blocking or world.now >= until:
                return False
            self._waiting.append(me)
            world.wait(until - world.now)
            if me in self._waiting:
                self._waiting.remove(me)
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        """Give it back."""
        self._depth -= 1
        if not self._depth:
            owner, self._owner = self._owner, None
            if owner is not None:
                # All of them: one whose time is over at this moment would not hand it on.
                for strand in self._waiting:
                    owner.process.world.wake(strand)
                self._waiting.clear()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """Is `threading.Condition`, around a mutex that was entered once."""

    def __init__(self, mutex: Mutex):
        self._mutex = mutex
        self._waiting: list[Thread] = []

    def wait(self, timeout: float) -> bool:
        """Give the mutex back until notified."""
        me = current_thread()
        self._waiting.append(me)
        self._mutex.release()
        try:
            return me.process.world.wait(timeout)
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            self._mutex.acquire()

    def notify(self) -> None:
        """Wake one."""
        if self._waiting:
            strand = self._waiting.pop(0)
            strand.process.world.wake(strand)


class SimpleQueue:
    """Is `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiting: list[Thread] = []

    def put(self, item: Any) -> None:
        """Put something in."""
        self._items.append(item)
        if self._waiting:
            strand = self._waiting.pop(0)
            strand.process.world.wake(strand)

    def empty(self) -> bool:
        """Whether nothing is in it."""
        return not self._items

    def get_nowait(self) -> Any:
        """Take something out."""
        return self.get(False)

    def get(self, block: bool = True, timeout: float = math.inf) -> Any:
        """Take something out, or wait for it."""
        me = current_thread()
        world = me.process.world
        until = world.now + timeout
        while not self._items:
            if not block or world.now >= until:
                raise Empty
            self._waiting.append(me)
            world.wait(until - world.now)
            if me in self._waiting:
                self._waiting.remove(me)
        return self._items.pop(0)


#: Is the module `threading`.
Threading = SimpleNamespace(
    Thread=Thread,
    Timer=Timer,
    Condition=Condition,
    Lock=Mutex,
    RLock=partial(Mutex, is_reentrant=True),
    current_thread=current_thread,
    get_ident=lambda: id(current_thread()),
    # Signals come in real threads alone.
    main_thread=lambda: None,
)


class Time:
    """Is the module `time`."""

    @staticmethod
    def monotonic() -> float:
        """Return the seconds of the clock of this process."""
        return current_thread().process.world.clock()

    @staticmethod
    def sleep(seconds: float) -> None:
        """Let the others go on for so long."""
        current_thread().process.world.wait(seconds)


class Worker:
    """Is a `Worker` of `database.connections`: does each thing in a thread of its own."""

    is_busy = False

    def __init__(self) -> None:
        self.queue = self

    def start(self) -> None:
        """Be there."""

    def finish(self) -> None:
        """Have nothing that is waited for."""

    def apart(self, backend: str, work: Any, most: float = math.inf) -> bool:
        """Do something in a thread as any other."""
        self.put(work)
        return True

    def put(self, work: Any, seconds: float = 0.0) -> None:
        """Do something."""
        strand = _thread()
        # Outside of threads the history is over, and what it leaves is dropped.
        if strand is None or strand.process.world.is_over:
            return
        if hasattr(work, "work"):
            work = work.work
            # It may do something else until then.
            seconds = 0.3 if strand.process.world.random.random() < 0.2 else 0.0
        if seconds:
            Timer(seconds, self.put, (work,)).start()
        else:
            Thread(work, "worker").start()
