"""The bench: measures the time that locks take on the project's own store."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from django.db import connections

from ..backends.base import BaseLockBackend
from ..core.documents import Document
from ..locks.lock import Lock, distlock

PARTS = ("pair", "handoff")

#: The key that is held while the bench runs, so that one runs at a time on a backend.
RUN = "distlock-bench"
#: Only these keys, and the same in each run, because each keeps a fence counter.
PAIR, HAND_OFF = f"{RUN}:pair", f"{RUN}:hand-off"
#: Seconds that a key is held at most, if its holder is killed.
_TTL = 10.0
#: Seconds to wait for a key: the keys of a killed bench are free by then.
_PATIENCE = 12.0

#: Pairs before the first one that counts: they open connections and fill caches.
_WARMING = 5
#: Seconds between two looks for the waiter, and how long to look.
_LOOK_SECONDS, _SEEN_SECONDS = 0.005, 0.5
#: Seconds from the beginning of a wait to the release, at random as in real work. With polling, the
#: release may come at any point of the growing pause between two queries; wake-ups have no pause.
_SHORTEST, _LONGEST, _LONGEST_POLLED = 0.02, 0.06, 0.6
#: With fewer operations, the slowest one in twenty or in a hundred means nothing.
_FOR_P95, _FOR_P99 = 20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, and for how long.

    Attributes:
        parts: Some of `PARTS`.
        seconds: How long pairs are measured; hand-offs take twice as long.
        rounds: How many of each at most; None: as many as there is time for.
    """

    parts: tuple[str, ...]
    seconds: float
    rounds: int | None

    def within(self, seconds: float) -> Iterator[int]:
        """Count rounds until these seconds have passed; there is always a first one."""
        number, until = 0, time.monotonic() + seconds
        while number == 0 or (
            time.monotonic() < until and (self.rounds is None or number < self.rounds)
        ):
            yield number
            number += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long an operation took, in seconds.

    Attributes:
        p95: The time that 95 of 100 did not exceed; None: there were too few operations to tell.
        p99: The same for 99.
    """

    count: int
    median: float
    p95: float | None
    p99: float | None

    @staticmethod
    def of(taken: Sequence[int]) -> Times:
        """Return the figures of at least one operation, from the nanoseconds of each."""
        seconds = [each / 1e9 for each in taken]
        cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(taken) > 1 else []
        return Times(
            count=len(seconds),
            median=statistics.median(seconds),
            p95=cuts[94] if len(seconds) >= _FOR_P95 else None,
            p99=cuts[98] if len(seconds) >= _FOR_P99 else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Times):
    """The times of a block without contention, and of its two parts."""

    acquire: Times
    release: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Document):
    """The results of a backend; None: not requested. `woken`: whether the store wakes waiters."""

    backend: str
    woken: bool
    pair: Pair | None = None
    handoff: Times | None = None


class Bench:
    """One backend's bench."""

    def __init__(self, store: BaseLockBackend, plan: Plan):
        self._store = store
        self._plan = plan

    def run(self) -> Measured:
        """Measure, unless another bench of this backend runs. Its fence counters stay."""
        with self._lock(RUN, wait=0):
            return Measured(
                backend=self._store.alias,
                woken=self._store.supports_wakeups,
                pair=self._pair() if "pair" in self._plan.parts else None,
                handoff=self._hand_off() if "handoff" in self._plan.parts else None,
            )

    def _lock(self, key: str, wait: float = _PATIENCE) -> Lock:
        ttl = min(_TTL, self._store.config.max_ttl)
        return distlock(key, ttl=ttl, wait=wait, backend=self._store.alias)

    def _pair(self) -> Pair:
        lock = self._lock(PAIR)
        for _ in range(_WARMING):
            _timed(lock)
        taken = [_timed(lock) for _ in self._plan.within(self._plan.seconds)]
        return Pair(
            **asdict(Times.of([sum(each) for each in taken])),
            acquire=Times.of([acquire for acquire, _ in taken]),
            release=Times.of([release for _, release in taken]),
        )

    def _hand_off(self) -> Times:
        with ThreadPoolExecutor(1) as waiter:
            try:
                # The first one opens connections.
                self._hand_over(waiter)
                rounds = self._plan.within(2 * self._plan.seconds)
                return Times.of([self._hand_over(waiter) for _ in rounds])
            finally:
                waiter.submit(connections.close_all).result()

    def _hand_over(self, waiter: ThreadPoolExecutor) -> int:
        """Release a key that another thread waits for; return the nanoseconds until its grant."""
        begun = threading.Event()
        with self._lock(HAND_OFF):
            granted_at = waiter.submit(self._wait, begun)
            begun.wait()
            self._pause()
            released_at = time.perf_counter_ns()
        return granted_at.result() - released_at

    def _wait(self, begun: threading.Event) -> int:
        begun.set()
        with self._lock(HAND_OFF):
            return time.perf_counter_ns()

    def _pause(self) -> None:
        """Let the other thread wait for a while."""
        if not self._store.supports_wakeups:
            time.sleep(random.uniform(_SHORTEST, _LONGEST_POLLED))  # noqa: S311 - no secret
            return
        until = time.monotonic() + _SEEN_SECONDS
        while time.monotonic() < until:
            record = self._store.read(HAND_OFF)
            if record is not None and record.wanted:
                break
            time.sleep(_LOOK_SECONDS)
        time.sleep(random.uniform(_SHORTEST, _LONGEST))  # noqa: S311 - no secret


def _timed(lock: Lock) -> tuple[int, int]:
    """Return the nanoseconds of an acquire and of its release."""
    began = time.perf_counter_ns()
    with lock:
        held = time.perf_counter_ns()
    return held - began, time.perf_counter_ns() - held
