"""Events, timers, flags and thread starts that an exception of a signal's handler cannot break.

Also work that may hang, in a thread that can be left behind.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Generic, TypeVar

from .durations import MAX_BOUND, Over, left

T = TypeVar("T")


class Bell:
    """An event that an exception of a signal's handler cannot leave locked.

    `threading.Event` is Python code around a lock. An exception inside `wait` may leave that lock
    taken, so that `set` hangs. A `SimpleQueue` is pure C.
    """

    __slots__ = ("_rung", "put")

    def __init__(self) -> None:
        self._rung: SimpleQueue[object] = SimpleQueue()
        #: Rings it without Python code, also as the callback of a weak reference.
        self.put = self._rung.put

    @property
    def is_rung(self) -> bool:
        """Whether it was rung since it was cleared."""
        return not self._rung.empty()

    def ring(self) -> bool:
        """Wake all waiters, one after the other; until `clear`, nobody waits. Always True."""
        if not self.is_rung:
            self._rung.put(None)
        return True

    def clear(self) -> None:
        """Let later calls of `wait` block again."""
        while not self._rung.empty():
            with suppress(Empty):
                self._rung.get_nowait()

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, `seconds` at most; that may be more than Python can wait for."""
        seconds = min(max(0.0, seconds), TIMEOUT_MAX)
        # One call of C gets the item and puts it back. Between two calls, a signal's exception
        # could lose the item.
        with suppress(Empty):
            next(map(self.put, map(self._rung.get, (True,), (seconds,))))


class Underway:
    """True while a block of it is open; no exception can leave it True after that."""

    _open: Callable[[], object] | None = None

    def __bool__(self) -> bool:
        return self._open is not None and self._open() is not None

    def __enter__(self) -> None:
        return None

    if TYPE_CHECKING:

        def __exit__(self, *_: object) -> None: ...

    else:

        def _watched(self):
            sentinel = functools.partial(_is_not)
            self._open = weakref.ref(sentinel)
            return sentinel

        __exit__ = property(_watched)


def _is_not(*_: object) -> None:
    return None


class TimerThread(ABC, Generic[T]):
    """Does what is due for each of its leases, in a thread that runs while there are any.

    A forked child starts without the leases of its parent.
    """

    #: Seconds that the thread lives on without leases, because leases come and go quickly.
    linger = 10.0
    #: The longest wait, in seconds: the clock of a wait may stop while the machine is suspended.
    longest_wait = 1.0

    def __init__(self, name: str, due: Callable[[T], float], clock: Callable[[], float]):
        self._name = name
        self._due = due
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Forget all leases and the thread."""
        self._pid = os.getpid()
        # Entered directly: an exception inside `Condition.__enter__`, which is Python code, could
        # leave it locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._leases: dict[T, None] = {}
        self._thread: threading.Thread | None = None
        # When the thread looks next; infinite: it is looking right now, or there is no thread.
        self._looks_at = math.inf

    def add(self, lease: T) -> None:
        """Add a lease; call this again when it may have become due sooner."""
        if self._pid != os.getpid():
            self.forget()  # Some programs fork without telling Python: uWSGI.
        self._leases[lease] = None
        # In this order: the thread sets `_looks_at` to infinity before it looks at the leases, and
        # when it ends.
        if self._thread is not None and self._due(lease) >= self._looks_at:
            return
        with self._mutex:
            if self._thread is None or not self._thread.is_alive():
                # Stored before it starts, because a signal's handler may raise after that.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._looks_at = math.inf
                start_thread(self._thread)
            elif self._due(lease) < self._looks_at:
                self._changed.notify()

    def discard(self, lease: T) -> None:
        """Remove a lease."""
        self._leases.pop(lease, None)

    def all(self) -> list[T]:
        """Return all leases."""
        # Copied in one step, because other threads add leases meanwhile.
        return list(self._leases)

    def look(self) -> None:
        """Let the thread look at the clock now, because that was set."""
        with self._mutex:
            self._changed.notify()

    def end_idle(self) -> None:
        """End the thread now if there are no leases."""
        with self._mutex:
            thread = self._thread
            if self._leases or not self._retires():
                return
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(MAX_BOUND)

    def _retires(self) -> bool:
        """Let the thread end, unless there are leases after all."""
        thread, self._thread = self._thread, None
        if self._leases:
            self._thread = thread  # A lease was added meanwhile, which relies on the thread.
        return not self._leases

    @abstractmethod
    def _look(self, now: float, due: float) -> None:
        """Do what is due at `due` or before; the thread may have slept since `now`."""

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
                    return  # Another thread has replaced this one.
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
    """Start a thread, even if the handler of a signal raises meanwhile.

    `Thread.start()` is Python code around a dictionary and an event. An exception inside it would
    turn into a `KeyError` or `RuntimeError` of theirs. Signals' handlers run only in the main
    thread, so a helper thread calls it, which one call of C starts.

    Raises:
        RuntimeError: There are too many threads, or the interpreter is exiting.
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
    """Call this in forked children, to forget the threads of the parent."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def begun(work: Callable[[], T], name: str) -> Future[T]:
    """Start work that may hang, in a daemon thread."""
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


def apart(work: Callable[[], T], name: str) -> T:
    """Do work that may hang. If the call's time ends first, let it go on, and raise `Over`."""
    seconds = left()
    if seconds == math.inf:
        return work()
    try:
        return begun(work, name).result(seconds)
    except TimeoutError as error:
        raise Over from error
