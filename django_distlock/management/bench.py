"""The bench: what locks cost on the project's own store, beside the least that it can be asked."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ..backends.base import BaseLockBackend
from ..locks import Lock
from .bench_clients import ProcessClient, Team, ThreadClient
from .bench_figures import Measured, Rate, Timed
from .bench_floors import Floor
from .bench_work import HAND_OFF, HOT, PAIR, PATIENCE, RUN, floor_below, keys, lock_on, own_key

PARTS = ("pair", "handoff", "throughput")

#: Operations before the first one that counts: they open connections and fill caches.
_WARMING = 5
#: Seconds between two looks whether somebody waits, and how long to look.
_LOOK_SECONDS, _SEEN_SECONDS = 0.005, 0.5
#: Seconds from when somebody waits to the release: as different as real work is. Who polls is met
#: at any place of the pause between two questions, which grows; whoever is woken, at none.
_SHORTEST, _LONGEST, _LONGEST_POLLED = 0.02, 0.06, 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, and for how long.

    Attributes:
        parts: Some of `PARTS`.
        seconds: How long each measurement takes. The hand-off takes twice as long, and the
            throughput is four of them.
        rounds: How many pairs and hand-offs at most; None: as many as there is time for.
        clients: How many compete.
        in_threads: Whether they are threads of this process.
    """

    parts: tuple[str, ...]
    seconds: float
    rounds: int | None
    clients: int
    in_threads: bool

    def within(self, seconds: float) -> Iterator[int]:
        """Count rounds until that time is over, from the first one on, which always comes."""
        number, until = 0, time.monotonic() + seconds
        while number == 0 or (
            time.monotonic() < until and (self.rounds is None or number < self.rounds)
        ):
            yield number
            number += 1


class Bench:
    """One backend's bench.

    Args:
        on_part: Called with the name of what is measured next.
    """

    def __init__(self, store: BaseLockBackend, plan: Plan, on_part: Callable[[str], object]):
        self._store = store
        self._alias = store.alias
        self._plan = plan
        self._on_part = on_part
        # No other process sees locks in memory.
        self._apart = "threads" if plan.in_threads or not store.distributed else "processes"

    def run(self) -> Measured:
        """Measure. What stays are the fence counters of its keys, the same ones in each run.

        Raises:
            LockNotAcquired: Another bench of this backend is running.
            LockError: The store did not answer, or refused.
        """
        with lock_on(self._alias, RUN, wait=0):
            try:
                return self._measure()
            except BaseException:
                self._clear()
                raise

    def _measure(self) -> Measured:
        parts = self._plan.parts
        with ExitStack() as stack:
            size = self._plan.clients if "throughput" in parts else int("handoff" in parts)
            self._on_part("start")
            kind = ThreadClient if self._apart == "threads" else ProcessClient
            team = stack.enter_context(Team(self._alias, size, kind))
            # Each key gets its counter, of which floors are made.
            for key in keys(size):
                with lock_on(self._alias, key):
                    pass
            floor = stack.enter_context(floor_below(self._alias, PAIR))
            pair = self._pair(floor) if "pair" in parts else None
            hand_off = self._hand_off(team, floor) if "handoff" in parts else None
            own, hot = self._throughput(team, floor) if "throughput" in parts else (None, None)
        return Measured(
            backend=self._alias,
            store=type(self._store).__name__ if floor is None else floor.store,
            floor="" if floor is None else floor.what,
            apart=self._apart,
            clients=self._plan.clients,
            woken=self._store.supports_wakeups,
            pair=pair,
            hand_off=hand_off,
            own_keys=own,
            hot_key=hot,
        )

    def _pair(self, floor: Floor | None) -> Timed:
        """Take and release a key, and ask the floor, turn by turn."""
        self._on_part("pair")
        lock, timed = lock_on(self._alias, PAIR), Timed(parts={"acquire": [], "release": []})
        for _ in range(_WARMING):
            _take_turns(lock, floor, Timed(parts={"acquire": [], "release": []}))
        for _ in self._plan.within(self._plan.seconds):
            _take_turns(lock, floor, timed)
        return timed

    def _hand_off(self, team: Team, floor: Floor | None) -> Timed:
        """Release a key that somebody else waits for, again and again."""
        self._on_part("hand-off")
        timed = Timed()
        self._hand_over(team)
        for _ in self._plan.within(2 * self._plan.seconds):
            timed.taken.append(self._hand_over(team))
            _ask(floor, timed)
        return timed

    def _hand_over(self, team: Team) -> int:
        """Return the nanoseconds from before the release to behind the grant."""
        with lock_on(self._alias, HAND_OFF):
            waiter = team.wait()
            self._pause()
            released_at = time.monotonic_ns()
        granted_at: int = waiter.wait_for("granted", 2 * PATIENCE)["at"]
        return granted_at - released_at

    def _pause(self) -> None:
        """Let it wait for a while."""
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

    def _throughput(self, team: Team, floor: Floor | None) -> tuple[Rate, Rate]:
        """Let all clients compete: each for a key of its own, and all for one."""
        clients = self._plan.clients
        rates = []
        for name, each in (
            ("own keys", [own_key(number) for number in range(clients)]),
            ("hot key", [HOT] * clients),
        ):
            self._on_part(name)
            rate = team.compete("pair", each, self._plan.seconds)
            least = team.compete("floor", each, self._plan.seconds) if floor else None
            rates.append(Rate(per_second=rate, floor=least))
        return rates[0], rates[1]

    def _clear(self) -> None:
        """Take back what clients hold that had to be killed. Nobody else has these keys."""
        # Whatever comes of it: something else was told, or is about to be.
        with suppress(Exception):
            for key in keys(self._plan.clients):
                if self._store.read(key) is not None:
                    self._store.force_release(key)


def _take_turns(lock: Lock, floor: Floor | None, timed: Timed) -> None:
    """Time a pair, and a floor."""
    began = time.perf_counter_ns()
    with lock:
        held = time.perf_counter_ns()
    ended = time.perf_counter_ns()
    timed.parts["acquire"].append(held - began)
    timed.parts["release"].append(ended - held)
    timed.taken.append(ended - began)
    _ask(floor, timed)


def _ask(floor: Floor | None, timed: Timed) -> None:
    """Time a floor."""
    if floor is not None:
        began = time.perf_counter_ns()
        floor.write()
        floor.trip()
        timed.floor.append(time.perf_counter_ns() - began)
