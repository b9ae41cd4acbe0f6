"""One history: the package's own code in simulated processes, and what must hold at each step."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    Lease,
    Lock,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from django_distlock.backends import queues
from django_distlock.conf import BackendConfig
from django_distlock.core import durations, retry, threads
from django_distlock.core.records import Holder
from django_distlock.core.secrets import Token
from django_distlock.database import connections as own_connections
from django_distlock.handler import lock_backends
from django_distlock.locks import (
    acquire,
    attempts,
    blocks,
    callbacks,
    context,
    state,
    taking,
    transfer,
)
from django_distlock.locks import release as release_module
from django_distlock.process import deadlocks, deferred_release, heartbeat

from .plans import Actor, Fault, Plan, Step, plan_of
from .scheduler import (
    Process,
    SimpleQueue,
    Thread,
    Threading,
    Time,
    Violation,
    Worker,
    World,
    current_thread,
)
from .store import PREFIX, TAKING, Client, Store

#: Seconds after which nothing of a plan may go on any more.
LIMIT = 400.0
#: Seconds between two looks at who waits though a key is free.
LOOK = 0.25

_THREADED: tuple[ModuleType, ...] = (
    threads, attempts, blocks, callbacks, deadlocks, deferred_release, queues, release_module,
    state,
)  # fmt: skip
_TIMED: tuple[ModuleType, ...] = (acquire, attempts, blocks, durations, context, queues, transfer)
#: What may come of an operation where things go wrong.
EXPECTED = (BackendUnavailable, LockLost, LockNotAcquired, LockUsageError)


@contextmanager
def simulated() -> Iterator[None]:
    """Let the package's modules use the clock and the threads of histories."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _THREADED:
            patch.setattr(module, "threading", Threading)
        for module in _TIMED:
            patch.setattr(module, "time", Time)
        patch.setattr(threads, "SimpleQueue", SimpleQueue)
        patch.setattr(heartbeat, "monotonic", _clock)
        worker = Worker()
        patch.setattr(own_connections, "releases", worker)
        patch.setattr(deferred_release, "_worker", worker)
        patch.setattr(deferred_release, "teller", worker)
        patch.setattr(state, "apart", _apart)
        patch.setattr(state, "alarms", _Alarms())
        patch.setattr(deferred_release, "managed_transactions", lambda _home: [])
        patch.setattr(deferred_release, "open_transactions", lambda _thread=None: [])
        patch.setattr(transfer, "lock_backends", _OwnBackend())
        patch.setattr(taking, "current_holder", _holder)
        patch.setattr(transfer, "current_holder", _holder)
        patch.setattr(attempts, "is_gone", _is_gone)
        patch.setattr(attempts, "new_token", _new_token)
        patch.setattr(transfer, "new_token", partial(_new_token, TAKING))
        patch.setattr(retry.Retry, "pauses", _pauses(retry.Retry.pauses))
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def _clock() -> float:
    return current_thread().process.clock()


def _holder(_metadata: object = None) -> Holder:
    return Holder(host="simulated", pid=current_thread().process.number)


def _is_gone(holder: Holder) -> bool:
    return current_thread().process.world.processes[holder.pid].is_dead


def _new_token(begins: str = "") -> Token:
    drawn = f"{current_thread().process.world.random.getrandbits(128):022x}"
    return Token(begins + drawn[len(begins) - 22 :])


def _pauses(original: Any) -> Any:
    def pauses(self: Any) -> Any:
        return original(self, current_thread().process.world.random.random)

    return pauses


class _OwnBackend:
    """What an alias stands for, which is the same one in all processes: each has its own client."""

    def __getitem__(self, _alias: str) -> Client:
        return current_thread().process.backend  # type: ignore[no-any-return]


def _apart(work: Any) -> None:
    Thread(work, "lost").start()


class _Alarms:
    """The alarms of each process."""

    def add(self, holding: Any) -> None:
        holding.store.process.alarms.add(holding)

    def discard(self, holding: Any) -> None:
        holding.store.process.alarms.discard(holding)


@dataclass(eq=False)
class Held:
    """A lease that somebody works under.

    Attributes:
        was_told: Whether its loss was.
        tells: How often it was to whom this one asked to be told.
    """

    lease: Any
    process: Process
    was_told: bool = False
    tells: int = 0

    @property
    def counts(self) -> bool:
        """Whether its holder may work: looked at without changing anything."""
        holding = self.lease._holding
        works = holding.state == "held" and not holding.given_up and not self.process.is_dead
        return bool(works and self.process.clock() < holding.deadline)


class History:
    """One run of a plan."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.world = World(plan.seed, LIMIT)
        self.store = Store(self.world, plan)
        self.held: list[Held] = []
        #: By token, what is known of each lease.
        self.leases: dict[str, Held] = {}
        self.texts: list[str] = []
        self.loaded: set[str] = set()
        #: From when on leases are not renewed that nobody can release any more, by their tokens.
        self.dropped: dict[str, float] = {}
        #: Tokens behind whose grant something happened that ends the promise of exclusion.
        self.excused: set[str] = set()
        self.counts = {"acquisitions": 0, "losses": 0, "refusals": 0, "outages": 0, "late": 0}
        self._threads: list[tuple[Process, Thread]] = []
        self._free_since: dict[str, float] = {}

    @property
    def digest(self) -> str:
        """A number for all that happened."""
        return hashlib.sha256("\n".join(self.world.history).encode()).hexdigest()

    def run(self) -> None:
        """Let it happen.

        Raises:
            Violation: Something must never be.
        """
        world, plan = self.world, self.plan
        backends = dict(lock_backends._backends)
        try:
            for number in range(plan.processes):
                self._add_process(number)
            for actor in plan.actors:
                process = world.processes[actor.process]
                thread = Thread(
                    partial(self._act, actor), f"t{len(self._threads)}", process=process
                )
                self._threads.append((process, thread))
                world.at(actor.begins_at, thread.start, process)
            for fault in plan.faults:
                world.at(fault.at, partial(self._break, fault))
            world.stalls = plan.stalls
            world.after_each = self._check
            world.at(LOOK, self._look)
            world.run()
            self._check_end()
        except Violation as error:
            world.say(f"VIOLATION {error}")
            raise
        finally:
            world.end()
            self.counts["late"] = sum("(late)" in each for each in world.history)
            lock_backends._backends.clear()
            lock_backends._backends.update(backends)
            heartbeat.held_here._by_token.clear()
            for process in world.processes:
                heartbeat.every.pop(process.backend, None)
            blocks.every.clear()
            blocks._giving_up.clear()
            deadlocks.waits._all.clear()
            deferred_release._waiting.forget()

    def _add_process(self, number: int) -> None:
        process = Process(self.world, number)
        config = BackendConfig(
            alias=f"{PREFIX}{number}", key_prefix=PREFIX, heartbeat=self.plan.part
        )
        process.backend = client = Client(config, process, self.store)
        client.before_asking = self._before_asking
        process.alarms = heartbeat.Alarms()
        process.alarms._clock = process.clock
        process.alarms._due = lambda lease: lease.alarm_in() + process.clock()
        lock_backends._backends[config.alias] = client
        self.world.processes.append(process)

    # What threads do

    def _act(self, actor: Actor) -> None:
        process = self.world.processes[actor.process]
        for step in actor.steps:
            waits = step[0] in ("block", "lease", "drop")
            current_thread().began = self.world.now if waits else -1.0
            self.world.say(f"{current_thread().name} {step[0]} {step[1]}")
            try:
                self._do(process, step)
            except EXPECTED as error:
                self.world.say(f"{current_thread().name} {type(error).__name__} {error}")
                self._count(error)
        others = [each for of, each in self._threads if of is process]
        others.remove(current_thread())
        process.is_dead = self.plan.ends and all(each.greenlet.dead for each in others)

    def _count(self, error: Exception) -> None:
        kinds = {LockLost: "losses", LockNotAcquired: "refusals", BackendUnavailable: "outages"}
        name = kinds.get(type(error))
        if name is not None:
            self.counts[name] += 1

    def _do(self, process: Process, step: Step) -> None:
        kind, key, *rest = step
        if kind == "sleep":
            self.world.wait(key)
            return
        how, work = rest
        asked = Lock(key=key, backend=process.backend.alias, **how)
        if kind == "block":
            began, clean = self.world.now, not process.stood
            with self._timed(asked, process, began, clean=clean), asked as lease:
                self._in_time(asked, process, began, clean=clean)
                self._work(process, lease, work)
            self._keep_window(asked, lease)
        elif kind == "hand":
            self._hand_over(process, asked)
        elif kind == "drop":
            self._drop(asked)
        else:
            began, clean = self.world.now, not process.stood
            with self._timed(asked, process, began, clean=clean):
                lease = asked.acquire()
            self._in_time(asked, process, began, clean=clean)
            self._work(process, lease, work)
            self._release(process, lease)
            self._keep_window(asked, lease)

    def _keep_window(self, asked: Lock, lease: Lease) -> None:
        """See from now on that the key of a clean run is kept for its window."""
        store = self.store
        until = lease.acquired_at + timedelta(seconds=lease._holding.terms.hold)
        record = store.server._shelf.records.get(lease._holding.store.queues.name_of(asked.key))
        if record is not None and record.is_settled and record.token == lease.token:
            # An operator may have let it end sooner.
            store.windows[asked.key] = min(until, record.free_at or until)
        # Where its release was not heard, it is the ttl that keeps it.
        elif (
            record is None
            and lease.is_released
            and not self.plan.faults
            and until > store.server._now()
        ):
            raise Violation(f"the window of {asked.key} ended with its work")

    @contextmanager
    def _timed(self, asked: Lock, process: Process, began: float, *, clean: bool) -> Iterator[None]:
        try:
            yield
        except (LockNotAcquired, BackendUnavailable):
            self._in_time(asked, process, began, clean=clean)
            raise

    def _in_time(self, asked: Lock, process: Process, began: float, *, clean: bool) -> None:
        """See that a call does not last for longer than its wait and what the store gets."""
        took = self.world.now - began
        assert isinstance(asked.wait, (int, float))
        if took > asked.wait + durations.PATIENCE + 0.5 and clean and not process.stood:
            raise Violation(f"{current_thread().name} waited {took:.2f} s for {asked.wait:g}")

    def _work(self, process: Process, lease: Lease, work: tuple[Step, ...]) -> None:
        held = self._track(process, lease)
        try:
            for step in work:
                if step[0] == "sleep":
                    self.world.wait(step[1])
                else:
                    self._extend(lease, step[1])
                lease.check()
        finally:
            self.held.remove(held)

    def _extend(self, lease: Lease, ttl: float | None) -> None:
        try:
            lease.extend(ttl)
        except BackendUnavailable as error:
            self._count(error)  # The lease stands until its deadline.

    def _release(self, process: Process, lease: Lease) -> None:
        for _ in range(3):
            try:
                lease.release()
            except BackendUnavailable as error:
                self._count(error)
                # Some go on as if nothing had happened: then it must not be theirs.
                held = self._track(process, lease)
                try:
                    self.world.wait(self.world.random.uniform(0, 1))
                    lease.extend()
                    self.world.wait(0.5)
                except EXPECTED as refused:
                    self.world.say(f"{current_thread().name} {type(refused).__name__}")
                finally:
                    self.held.remove(held)
            else:
                return

    def _hand_over(self, process: Process, asked: Lock) -> None:
        if self.texts:
            text = self.texts.pop()
            try:
                lease = Lease.load(text)
            except InvalidArgument as error:
                raise Violation(f"a text of ours is refused: {error}") from error
            # A store that loses data does not know that it was.
            if text in self.loaded and all(each.kind != "lossy" for each in self.plan.faults):
                raise Violation("a lease is handed over twice")
            self.loaded.add(text)
            if self.world.random.random() < 0.5:
                self.texts.append(text)
            self._work(process, lease, (("sleep", 0.2),))
            self._release(process, lease)
            return
        lease = asked.acquire()
        self._work(process, lease, (("sleep", 0.1),))
        self.texts.append(lease.dump())

    def _drop(self, asked: Lock) -> None:
        """Let go of a lease, or leave a block as an exception does that comes amid its begin."""
        if self.world.random.random() < 0.5:
            token = asked.acquire(heartbeat=True).token
            # A thread may still look at what acquired it.
            self.dropped[token] = self.world.now + 1.0
        else:
            leave = asked.__exit__
            token = asked.__enter__().token
            self.dropped[token] = self.world.now
            del leave

    def _track(self, process: Process, lease: Lease) -> Held:
        self.counts["acquisitions"] += lease.token not in self.leases
        held = Held(lease, process)
        before = self.leases.get(lease.token)
        if before is not None:
            held.was_told = before.was_told
        elif process.clock() >= lease.deadline and not process.stood and not self.texts:
            raise Violation("a lease is granted that is over")
        self.leases[lease.token] = held
        self.held.append(held)

        def told(_lease: Any) -> None:
            held.was_told, held.tells = True, held.tells + 1

        lease.on_lost(told)
        return held

    # What goes wrong

    def _break(self, fault: Fault) -> None:
        world, store = self.world, self.store
        world.say(f"FAULT {fault.kind} {fault.number} {fault.seconds:g}")
        process = world.processes[fault.number % len(world.processes)]
        key = "ab"[fault.number % 2]
        if fault.kind == "stop":
            process.stands_until, process.stood = world.now + fault.seconds, True
        elif fault.kind == "kill":
            process.is_dead = True
        elif fault.kind in ("crash", "lossy"):
            store.crash(loses=fault.kind == "lossy")
            if fault.kind == "lossy":
                self._excuse()
            world.at(world.now + fault.seconds, store.come_back)
        elif fault.kind == "clock":
            # Backwards, leases last longer; forwards, they end before their holders count on it.
            store.ahead += fault.seconds
            store.windows.clear()
            if fault.seconds > 0:
                self._excuse()
        elif fault.kind == "pause":
            store.server.pause(key, store.server.clock() + timedelta(seconds=fault.seconds))
        elif fault.kind == "shorten":
            store.windows.pop(key, None)
            store.server.request_stop(key, within=fault.seconds)
        elif fault.kind == "force":
            self._excuse(key)
            store.windows.pop(key, None)
            store.server.force_release(key)

    def _excuse(self, key: str | None = None) -> None:
        """Promise no exclusion for what is held now."""
        granted = self.store.granted.items()
        self.excused.update(token for token, of in granted if key in (None, of))

    # What must hold

    def _check(self) -> None:
        """Look for two who work under one key, or for one whom the store does not keep it for."""
        # What tells that a block is gone comes behind its end where somebody looks at all of them.
        self._looked_at = [*blocks.every.values()]
        for process in self.world.processes:
            process.backend.see_fronts()
        seen: dict[str, Held] = {}
        for each in self.held:
            key = each.lease.key
            if each.lease.token in self.excused or not each.counts:
                continue
            name = each.process.backend.queues.name_of(key)
            deadline = each.lease.deadline - each.process.offset
            if self.store.kept_until(name, each.lease.token) < deadline - 1e-5:
                raise Violation(f"{key!r} is not kept for its holder")
            other = seen.setdefault(key, each)
            if other is not each and other.lease is not each.lease:
                fences = sorted((other.lease.fence, each.lease.fence))
                raise Violation(f"two hold {key!r} at once, with the fences {fences}")

    def _before_asking(self, token: str, what: str) -> None:
        held = self.leases.get(token)
        # The thread of the heartbeat may have stood still since it has looked.
        is_late = what == "renewal" and held is not None and held.process.stood
        if held is not None and held.was_told and not is_late:
            raise Violation(f"{what} behind the told loss of {held.lease.key!r}")
        if what != "renewal":
            self.dropped.pop(token, None)  # Its thread has entered a block, which goes on with it.
        elif (
            self.world.now > self.dropped.get(token, math.inf)
            and not current_thread().process.stood
        ):
            raise Violation("a lease is renewed that was dropped")

    def _look(self) -> None:
        """Look for waiters who sleep though their key is free."""
        world = self.world
        for key in "ab":
            name = world.processes[0].backend.queues.name_of(key)
            sleeps = any(each.backend.sleeps_for(name) for each in world.processes if each.runs)
            if not (sleeps and self.store.is_free(name)):
                self._free_since[key] = world.now
            elif world.now - self._free_since.get(key, world.now) > self._patience:
                raise Violation(f"somebody sleeps through the release of {key!r}")
        for held in self.held:
            over = held.process.clock() - held.lease.deadline
            # A release that was not answered has ended it for its holder, who is told of no loss.
            is_told = held.was_told or held.lease._holding.given_up
            if over > 0.5 and held.process.runs and not (is_told or held.process.stood):
                raise Violation(f"nobody is told of the loss of {held.lease.key!r}")
        if any(process.runs and thread.is_alive() for process, thread in self._threads) or (
            world.now < 30
        ):
            world.at(world.now + LOOK, self._look)
        if world.random.random() < 0.3:
            self.store.keep()

    @property
    def _patience(self) -> float:
        if not self.plan.calm:
            return 20.0
        return 0.5 if self.plan.wakes else 1.5

    def _check_end(self) -> None:
        """See that all threads have ended, and nothing is renewed or watched any more."""
        for process, thread in self._threads:
            if thread.is_alive() and not process.is_dead:
                raise Violation(f"{thread.name} never ends")
        for process in self.world.processes:
            renewed = heartbeat.every.get(process.backend)
            if not process.is_dead and renewed is not None and renewed.all():
                raise Violation("a lease is renewed for nobody")
            if not process.is_dead and len(process.backend.queues):
                raise Violation("somebody is left in a queue")
            if not process.is_dead:
                process.backend.check_end()
        if any(each.tells > 1 for each in self.leases.values()):
            raise Violation("a loss is told twice")
        now = self.store.server._now()
        for name, record in self.store.server._shelf.records.items():
            # The longest lease here, and its grace.
            if record.free_at is None or record.free_at > now + timedelta(seconds=8):
                raise Violation(f"{name} stays taken for ever")


def run(plan: Plan | int) -> tuple[History, Violation | None]:
    """Run the history of a plan, or of a seed; return it and what was wrong. In `simulated`."""
    history = History(plan_of(plan) if isinstance(plan, int) else plan)
    # What is dropped in a history goes at once, and what others have left behind it.
    gc.disable()
    try:
        history.run()
    except Violation as error:
        return history, error
    finally:
        gc.enable()
    return history, None


def shrunk(plan: Plan, violation: Violation) -> Plan:
    """Return a smaller plan with a violation of the same kind. In `simulated`."""
    kind = _kind(violation)
    found = True
    while found:
        found = False
        for smaller in plan.smaller():
            _history, again = run(smaller)
            if again is not None and _kind(again) == kind:
                plan, found = smaller, True
                break
    return plan


def _kind(violation: Violation) -> str:
    """Return what it is about, without names and numbers."""
    return " ".join(word for word in str(violation).split() if word.isalpha())
