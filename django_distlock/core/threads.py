"""Threads that a signal's exception neither leaves half started nor is lost in.

Also the loop of those that wait for times, of which each process has a few.
"""

from __future__ import annotations

import math
import os
import threading
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from .durations import MAX_BOUND

T = TypeVar("T")


class Bell:
    """An event that a signal's exception cannot leave locked.

    `threading.Event` is Python around a lock: interrupted in `wait`, it may keep the lock, and
    whoever sets it would hang. A simple queue is C alone.
    """

    __slots__ = ("_rung", "put")

    def __init__(self) -> None:
        self._rung: SimpleQueue[object] = SimpleQueue()
        #: Rings it, without any Python: as the callback of a weak reference, which it takes.
        self.put = self._rung.put

    @property
    def is_rung(self) -> bool:
        """Whether somebody has rung it since it was cleared."""
        return not self._rung.empty()

    def ring(self) -> bool:
        """Wake everybody, one after the other, and let nobody wait from now on; always True."""
        if not self.is_rung:
            self._rung.put(None)
        return True

    def clear(self) -> None:
        """Let the next ones wait."""
        while not self._rung.empty():
            with suppress(Empty):
                self._rung.get_nowait()

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, for so many seconds at most."""
        # Taken out and put back by one call of C: between two, a signal would let it fall silent.
        with suppress(Empty):
            next(map(self.put, map(self._rung.get, (True,), (max(0.0, seconds),))))


class TimerThread(ABC, Generic[T]):
    """Does what is due, in a thread of its own, which lives while there is anything.

    A child that was forked begins anew: what is due to its parent is the parent's.
    """

    #: Seconds that the thread stays when there is nothing to do: leases come and go quickly.
    linger = 10.0
    #: Seconds of one wait at most.
    longest_wait = 10.0

    def __init__(self, name: str, due: Callable[[T], float], clock: Callable[[], float]):
        self._name = name
        self._due = due
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Have nothing to do, and no thread."""
        self._pid = os.getpid()
        # Entered by itself: `Condition.__enter__` is Python, where a signal's exception leaks it.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._leases: dict[T, None] = {}
        self._thread: threading.Thread | None = None
        # When the thread looks next; infinite: nobody knows yet, it looks what there is, or is not
        # there.
        self._looks_at = math.inf

    def add(self, lease: T) -> None:
        """See to a lease from now on; again, when it may have become due sooner."""
        if self._pid != os.getpid():
            self.forget()  # Not everybody who forks tells Python of it: uWSGI does not.
        self._leases[lease] = None
        # In this order: the thread looks at what there is when it has said that it is about to, and
        # once more behind its end.
        if self._thread is not None and self._due(lease) >= self._looks_at:
            return
        with self._mutex:
            if self._thread is None or not self._thread.is_alive():
                # Kept before it starts: a signal's handler may raise behind that.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._looks_at = math.inf
                start_thread(self._thread)
            elif self._due(lease) < self._looks_at:
                self._changed.notify()

    def discard(self, lease: T) -> None:
        """See to a lease no more."""
        self._leases.pop(lease, None)

    def all(self) -> list[T]:
        """Return what is seen to."""
        # Copied in one step: other threads go on taking leases.
        return list(self._leases)

    def look(self) -> None:
        """Let the thread look at the clock now: it was set."""
        with self._mutex:
            self._changed.notify()

    def end_idle(self) -> None:
        """End the thread, if there is nothing to do, instead of letting it linger."""
        with self._mutex:
            thread = self._thread
            if self._leases or not self._retires():
                return
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(MAX_BOUND)

    def _retires(self) -> bool:
        """Have no thread from now on, unless there is something to do after all."""
        thread, self._thread = self._thread, None
        if self._leases:
            self._thread = thread  # It came meanwhile, and found the thread there.
        return not self._leases

    @abstractmethod
    def _look(self, now: float, due: float) -> None:
        """Do what is due, from `due` on; behind `now` the thread may have slept."""

    def _begin(self) -> None:
        """Prepare the thread."""

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._looks_at = math.inf

    def _work(self) -> None:
        self._begin()
        idle_since = self._clock()
        while True:
            with self._mutex:
                if self._thread is not threading.current_thread():
                    return  # Another one was started in its place.
                self._looks_at = math.inf
                now = self._clock()
                if self._leases:
                    idle_since = now
                elif now - idle_since >= self.linger and self._retires():
                    return
                due = min(map(self._due, self.all()), default=math.inf)
                longest = self.longest_wait if self._leases else self.linger
                self._looks_at = min(due, now + longest)
                if self._looks_at > now:
                    self._changed.wait(self._looks_at - now)
            self._look(now, due)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, or not, whatever the handler of a signal raises meanwhile.

    `Thread.start()` is Python around a dictionary and an event: an exception in its midst becomes
    a `KeyError` or a `RuntimeError` of theirs. Handlers run in the main thread alone, so another
    one starts it, and is itself started by one call of C.

    Raises:
        RuntimeError: There are too many threads, or the interpreter ends.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    errors: list[RuntimeError] = []
    started = Bell()

    def begin() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            errors.append(error)
        finally:
            started.ring()

    start_new_thread(begin, ())
    started.wait(MAX_BOUND)
    if errors:
        raise errors[0]


def in_child(call: Callable[[], object]) -> None:
    """Have a forked child call this first: the threads, and what they did, are its parent's."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def begun(work: Callable[[], T], name: str) -> Future[T]:
    """Begin some work that may hang, in a thread that ends with the process at the latest."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(result)

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    return done
