"""The long drill: kills and suspends processes that lock and write, and judges their reports.

All processes run on one host and share its clock, so their order in time is known without the
store.
"""

from __future__ import annotations

import math
import platform
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any

import django

from ..backends.base import BaseLockBackend
from ..core.clock import monotonic
from ..core.errors import BackendUnavailable, FenceRejected, LockLost, LockNotAcquired
from ..handler import lock_backends
from ..locks.lock import distlock
from .drill import TTL, Other, Stuck, line_of
from .statuses import own_version
from .targets import RedisTarget, TableTarget, leave_nothing, target_of

#: Fewer keys than processes: some of them wait.
KEYS, PROCESSES = 2, 4
#: What happens to a process.
FAULTS = ("killed", "suspended")
#: Seconds that a holder works at most, and that a process waits for a key.
_WORK, _WAIT = 0.1, 5.0
#: Seconds between two faults.
_CALM = (0.5, 2.0)
#: Seconds after the ttl that a process is suspended: the grace of a second, and time for another
#: process to write before it continues.
_OVERDUE = (1.5, 3.0)
#: Seconds between two looks whether a process has begun.
_LOOK = 0.05
#: Seconds by which a drill is longer at most, if not each fault and a stale write have occurred.
_LONGER = 60.0
#: Seconds in which an unused key becomes free again, and in which a process ends.
_SOON = TTL + 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a holder reports about a lease. Times are those of `core.clock.monotonic`.

    Attributes:
        granted: When the holder had been granted the key.
        held: The last time at which the lease's deadline had not passed.
        wrote: When the write began, and when it had been accepted; None: the write was refused, or
            did not happen.
    """

    key: str
    fence: int
    asked: float
    granted: float
    held: float
    wrote: tuple[float, float] | None = None


def violations(turns: Iterable[Turn]) -> list[str]:
    """Return what broke a promise, in turns of any order.

    The promises: at most one holder at a time, within the deadlines; fences grow; no write is
    accepted after one with a higher fence.
    """
    found = []
    by_key: dict[str, list[Turn]] = {}
    for each in turns:
        by_key.setdefault(each.key, []).append(each)
    for key, those in by_key.items():
        those.sort(key=lambda each: each.fence)
        found += [
            f"{key}: the fence {one.fence} was granted twice."
            for one, next_one in pairwise(those)
            if one.fence == next_one.fence
        ]
        # Of all turns with a higher fence: the times of the first grant and first accepted write.
        granted = written = math.inf
        for each in reversed(those):
            if each.held > granted:
                found.append(
                    f"{key}: fence {each.fence} was held {each.held - granted:.3f} s after a higher"
                    " one was granted."
                )
            if each.asked > granted:
                found.append(f"{key}: fence {each.fence} was granted behind a higher one.")
            if each.wrote is not None and each.wrote[0] > written:
                found.append(f"{key}: fence {each.fence} was written behind a higher one.")
            granted = min(granted, each.granted)
            if each.wrote is not None:
                written = min(written, each.wrote[1])
    return found


class Toiler(Other):
    """A process that locks and writes repeatedly, and reports: see `toil`.

    Args:
        on_grant: Called with the process when it has just been granted a key.
    """

    def __init__(
        self,
        alias: str,
        prefix: str,
        seed: int,
        limit: float,
        on_grant: Callable[[Toiler], object] = lambda _: None,
    ):
        self.turns: list[Turn] = []
        self.steps: Counter[str] = Counter()
        self._on_grant = on_grant
        super().__init__(["--backend", alias, "--toil", prefix, "--seed", str(seed)], limit)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def finish(self) -> bool:
        """Let the process end after its turn; return whether it has ended soon enough."""
        self.let_go()
        self._reader.join(_SOON)
        return not self._reader.is_alive()

    def kill(self) -> None:
        """Kill the process, and keep only its reports: a long drill kills thousands."""
        self.send(signal.SIGKILL)
        self._reader.join()
        self.__exit__()

    def raise_if_ended(self) -> None:
        """Raise `Stuck` if the process has ended by itself."""
        if not self._reader.is_alive():
            status = self.wait()
            raise Stuck(f"Process {self.pid} ended by itself (exit status {status}).", status)

    def _read(self) -> None:
        for said in self.said():
            step = said.pop("step")
            self.steps[step] += 1
            if step == "granted":
                self.turns.append(Turn(**said, held=said["granted"]))
                self._on_grant(self)
            elif step == "written":
                self.turns[-1] = replace(self.turns[-1], wrote=(said["since"], said["at"]))
            elif step == "held":
                self.turns[-1] = replace(self.turns[-1], held=said["at"])


class Endurance:
    """One long drill, on keys of its own.

    Args:
        seconds: How long faults happen, after all processes have begun to work; up to a minute
            longer, until each fault has happened, and a stale write was refused.
        seed: Of the random choices. The timing of the processes is not repeated.
        on_fault: Called with each fault, in words.
    """

    def __init__(
        self,
        store: BaseLockBackend,
        prefix: str,
        seconds: float,
        seed: int,
        on_fault: Callable[[str], object],
    ):
        self._store, self._prefix = store, prefix
        self._seconds, self._seed = seconds, seed
        self._chance = random.Random(seed)  # noqa: S311 - choices of a drill
        self._on_fault = on_fault
        self._toilers: list[Toiler] = []
        self._granted: SimpleQueue[Toiler] = SimpleQueue()
        self._faults: Counter[str] = Counter()
        self._next: list[str] = []
        self._found: list[str] = []
        self._targets = _targets(store, prefix)

    def run(self) -> None:
        """Run the drill. It leaves only the fence counters of its keys, and events."""
        with ExitStack() as stack:
            for key, target in self._targets.items():
                stack.callback(leave_nothing, self._store, key, target)
            at_work = [self._start(stack) for _ in range(PROCESSES)]
            _wait_for(at_work)
            until = time.monotonic() + self._seconds
            while (now := time.monotonic()) < until or (
                now < until + _LONGER and not self._has_met_all()
            ):
                time.sleep(self._chance.uniform(*_CALM))
                for each in at_work:
                    each.raise_if_ended()
                at_work = self._disturb(at_work, stack)
            _wait_for(at_work)
            for each in at_work:
                each.let_go()
            slow = [each.pid for each in at_work if not each.finish()]
            self._found += [f"Process {pid} did not end within {_SOON:g} s." for pid in slow]
            self._found += [
                f"{key}: nobody held it, and it could not be acquired within {_SOON:g} s."
                for key in self._targets
                if not self._is_free(key)
            ]
        self._found += violations(turn for each in self._toilers for turn in each.turns)

    def certificate(self) -> Mapping[str, Any]:
        """Return what happened, as JSON can carry it."""
        steps = self._steps()
        names = ("granted", "contended", "lost", "written", "refused", "unavailable")
        is_valid = self._has_met_all()
        server = next(iter(self._targets.values())).server()
        return {
            "backend": self._store.alias,
            "prefix": self._prefix,
            "seconds": self._seconds,
            "seed": self._seed,
            "processes": PROCESSES,
            "keys": KEYS,
            "ttl": TTL,
            "versions": {
                "django-distlock": own_version(),
                "django": django.get_version(),
                "python": platform.python_version(),
                "server": server,
            },
            "operations": {name: steps[name] for name in names},
            "faults": {name: self._faults[name] for name in FAULTS},
            "violations": self._found,
            # Hanley and Lippman-Hand, "If nothing goes wrong, is everything all right?", 1983: with
            # 95 % confidence, what never happened in n turns is rarer than three in n.
            "bound": None if self._found or not steps["granted"] else 3 / steps["granted"],
            "valid": is_valid,
            "passed": is_valid and not self._found,
        }

    def _steps(self) -> Counter[str]:
        return sum((each.steps for each in self._toilers), Counter[str]())

    def _has_met_all(self) -> bool:
        """Whether each fault and a stale write have occurred. Otherwise nothing is proven."""
        return all(self._faults[each] for each in FAULTS) and bool(self._steps()["refused"])

    def _start(self, stack: ExitStack) -> Toiler:
        limit = self._seconds + _LONGER + 2 * _SOON
        seed = self._chance.getrandbits(32)
        made = Toiler(self._store.alias, self._prefix, seed, limit, self._note_grant)
        self._toilers.append(stack.enter_context(made))
        return made

    def _disturb(self, at_work: Sequence[Toiler], stack: ExitStack) -> list[Toiler]:
        """Kill a process, or suspend it past its deadline; return the processes at work."""
        if not self._next:
            # Both faults within two disturbances, in random order.
            self._next = self._chance.sample(FAULTS, len(FAULTS))
        fault = self._next.pop()
        victim = self._next_holder(at_work)
        self._faults[fault] += 1
        if fault == "killed":
            self._on_fault(f"Kills process {victim.pid}.")
            victim.kill()
            return [*(each for each in at_work if each is not victim), self._start(stack)]
        pause = TTL + self._chance.uniform(*_OVERDUE)
        self._on_fault(f"Suspends process {victim.pid} for {pause:.1f} s.")
        victim.send(signal.SIGSTOP)
        time.sleep(pause)
        victim.send(signal.SIGCONT)
        return [*at_work]

    def _note_grant(self, granted: Toiler) -> None:
        self._granted.put(granted)

    def _next_holder(self, at_work: Sequence[Toiler]) -> Toiler:
        """Return the process that is granted a key next: it has not written yet."""
        # What was granted before now is over.
        self._granted = SimpleQueue()
        try:
            return self._granted.get(timeout=_WAIT)
        except Empty:
            # On a busy machine, processes that are killed while they begin never lock anything.
            _wait_for(at_work)
            return self._chance.choice(at_work)

    def _is_free(self, key: str) -> bool:
        try:
            distlock(key, ttl=TTL, wait=_SOON, backend=self._store.alias).acquire().release()
        except LockNotAcquired:
            return False
        return True


def _wait_for(those: Iterable[Toiler]) -> None:
    """Wait until processes have reported the beginning of their work; see `raise_if_ended`."""
    for each in those:
        while not each.steps:
            each.raise_if_ended()
            time.sleep(_LOOK)


def toil(alias: str, prefix: str, seed: int, write: Callable[[str], object]) -> None:
    """Run as a process of the drill: lock and write repeatedly, until standard input ends."""
    chance, over = random.Random(seed), threading.Event()  # noqa: S311 - choices of a drill

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    targets = _targets(lock_backends[alias], prefix)
    while not over.is_set():
        key = chance.choice([*targets])
        try:
            _turn(alias, key, targets[key], chance.uniform(0, _WORK), write)
        except LockNotAcquired:
            write(line_of(step="contended", key=key))
        except LockLost:
            write(line_of(step="lost", key=key))
        except BackendUnavailable as error:
            write(line_of(step="unavailable", key=key, why=str(error)))
            over.wait(1)


def _turn(
    alias: str,
    key: str,
    target: TableTarget | RedisTarget,
    seconds: float,
    write: Callable[[str], object],
) -> None:
    asked = monotonic()
    with distlock(key, ttl=TTL, wait=_WAIT, backend=alias) as lease:

        def say(step: str, **more: Any) -> None:
            write(line_of(step=step, key=key, fence=lease.fence, **more))

        say("granted", asked=asked, granted=monotonic())
        time.sleep(seconds)
        since = monotonic()
        try:
            target.write(lease)
        except FenceRejected:
            say("refused")
        else:
            say("written", since=since, at=monotonic())
        at = monotonic()
        if at < lease.deadline:
            say("held", at=at)


def _targets(store: BaseLockBackend, prefix: str) -> dict[str, TableTarget | RedisTarget]:
    keys = [f"{prefix}:{number}" for number in range(KEYS)]
    return {key: target_of(store, key) for key in keys}
