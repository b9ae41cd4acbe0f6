"""Short words for what most tests do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import pytest
from django.db import connections

from django_distlock.backends.base import BaseLockBackend
from django_distlock.testing.contract import contend as contend
from django_distlock.testing.contract import extend as extend
from django_distlock.testing.contract import finds as finds
from django_distlock.testing.contract import held as held
from django_distlock.testing.contract import take as take
from tests.processes import Process, spawn

P = ParamSpec("P")
T = TypeVar("T")

#: For tests of what is left of a lease that is over.
KEEPS_EXPIRED = pytest.mark.stores(
    "memory", "sqlite", "postgresql", "mysql", why="its store removes expired records itself"
)
#: For tests of a counter that starts at 1.
COUNTS = pytest.mark.stores(
    "memory", "sqlite", "postgresql", "mysql", why="its fences always follow the clock"
)
#: For tests with another process.
ELSEWHERE = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", "redis", "redis_cluster", why="no other process sees its locks"
)
SHARED = pytest.mark.stores(
    *ELSEWHERE.args, "session", why="no other process sees its locks, or nothing of them"
)
#: For tests of what a ttl ends.
HAS_TTL = pytest.mark.requires("supports_ttl")
#: What a prompt answer takes at most on a busy machine, and a bounded wait beyond its bound. Less
#: than a second: that is how long those wait whom nobody told a bound.
PROMPT = 0.9
#: What a busy machine may add to a time, where what would be wrong adds more.
NOISE = 2.0
#: What other processes may take to start and to end, on a machine with much else to do.
PATIENCE = 120
#: A bound to wait for in tests.
SHORT = 0.05


def there(value: T | None) -> T:
    """Give what must be there."""
    assert value is not None
    return value


def listed(backend: BaseLockBackend, prefix: str = "", **filters: Any) -> list[str]:
    """List the keys that start with a prefix, through all pages."""
    keys: list[str] = []
    cursor = None
    while True:
        page = backend.list(prefix, cursor, **filters)
        keys += [record.key for record in page.records]
        if (cursor := page.cursor) is None:
            return keys


def pressure() -> float:
    """Return the seconds since the boot in which somebody waited for a processor or for a disk.

    It is what Linux tells in /proc/pressure, and what a host took from this machine, of all
    processors; 0 where nobody tells.
    """
    told = [Path(f"/proc/pressure/{what}") for what in ("cpu", "io")]
    some = (each.read_text().partition("total=")[2].split()[0] for each in told if each.exists())
    return sum(map(int, some)) / 1e6 + _stolen()


def _stolen() -> float:
    told = Path("/proc/stat")
    if not told.exists():
        return 0.0
    # user, nice, system, idle, iowait, irq, softirq, steal: in ticks.
    return int(told.read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def alone(took: float, pressed: float) -> float:
    """Return how long something would have taken without others on the machine.

    Each step waits for its turn about as long as it runs.

    Args:
        pressed: What `pressure` told when it began, or before.
    """
    return took - min(max(0.0, took), pressure() - pressed) / 2


@contextmanager
def prompt(seconds: float = 0, *, least: float = 0) -> Iterator[None]:
    """Check that the block takes no longer than this, and what a busy machine adds; nor less."""
    started, pressed = time.monotonic(), pressure()
    yield
    took = time.monotonic() - started
    own = alone(took, pressed)
    assert own < seconds + PROMPT, f"took {took:.3f} s, alone {own:.3f} s, instead of {seconds:g} s"
    assert took >= least, f"took {took:.3f} s only"


class Later(Generic[T]):
    """A call in a thread of its own, which closes its connections at the end."""

    def __init__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs):
        self._future: Future[T] = Future()

        def run() -> None:
            try:
                self._future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - result() raises it
                self._future.set_exception(error)
            finally:
                connections.close_all()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()

    def result(self, timeout: float = 20) -> T:
        """Return what the call returned, or raise what it raised."""
        self._thread.join(timeout)
        return self._future.result(timeout=0)


def at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make calls in threads that start together."""
    todo = list(calls)
    barrier = threading.Barrier(len(todo))

    def run(call: Callable[[], T]) -> T:
        barrier.wait(10)
        return call()

    return [each.result() for each in [Later(run, call) for call in todo]]


@contextmanager
def crew(
    size: int, target: str, *arguments: Any, ready: str = "ready", **environment: str
) -> Iterator[list[Process]]:
    """Start processes that do the same; give them when each of them is ready."""
    with ExitStack() as stack:
        started = (spawn(target, *arguments, **environment) for _ in range(size))
        workers = [stack.enter_context(each) for each in started]
        for worker in workers:
            worker.wait_for(ready, PATIENCE)
        yield workers


def race(workers: Iterable[Process], patience: float = PATIENCE) -> list[Any]:
    """Let processes that wait for a line go on at once; return what they do."""
    started = list(workers)
    for worker in started:
        worker.send("go")
    return [worker.result(patience) for worker in started]


def noted(patch: pytest.MonkeyPatch, backend: BaseLockBackend, operation: str) -> list[Any]:
    """Note what an operation of a backend answers from now on."""
    answers: list[Any] = []
    real = getattr(backend, operation)

    def note(*args: Any, **kwargs: Any) -> Any:
        answers.append(real(*args, **kwargs))
        return answers[-1]

    patch.setattr(backend, operation, note)
    return answers
