"""A worker: takes and releases keys in all forms, while signals raise in it."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import math
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import django
from django.db import DatabaseError, InterfaceError, connections, transaction

from django_distlock import (
    BackendUnavailable,
    FenceRejected,
    Lease,
    Lock,
    LockError,
    LockLost,
    LockNotAcquired,
    current_lease,
    distlock,
    distlock_all,
    inspection,
    signals,
    transaction_lock,
)
from django_distlock.core.clock import monotonic
from django_distlock.core.sharing import MAX_PERMITS
from django_distlock.handler import lock_backends

from .history import EXPECTED, Writer

TTLS = (0.6, 1.0, 1.6, 2.4)
WAITS = (0, 0.2, 0.5, 1.5)
#: How often a holder writes a fenced row at a step.
WRITES = 0.4
#: How often a holder without a heartbeat works on behind its deadline, and for how long at most.
LATE, LATENESS = 0.2, 5.0
#: How often a lock is shared, by the number of its key, and by how many where not by any number.
#: While somebody waits to be alone nobody joins, so that some keys are mostly shared.
SHARES, PERMITS = (0.9, 0.1, 0.1), 2
#: How often who wants a key alone takes it over from a process that is gone.
STEALS = 0.3
#: How many locks a thread takes in a row without work between them.
TURNS = 400
#: Seconds between two signals.
EVERY = 0.05
#: Seconds until Python lets another thread run: so often that they meet between any two steps.
SWITCHES = 0.0001
#: Threads that may stay, by how their names begin: how many of each. Each node of a cluster has one
#: for wake-ups.
MAY_STAY = {
    "distlock-heartbeat": 1, "distlock-alarms": 1, "distlock-signals": 1,
    "distlock-releases-": 1, "distlock-releases": 1,
    "distlock-connections": 1, "distlock-wake-ups": 1, "distlock-redis-wakeups": 1,
    "distlock-redis_cluster-wakeups": 3,
    "distlock-": 33, "asyncio_": 1, "Timer": 2,
}  # fmt: skip


class Interrupted(Exception):
    """What the handler of a signal raises, as that of a time limit does."""


class Worker:
    """Works on a handful of keys, in a few threads, until told to stop.

    Args:
        spec: The `alias` of the lock backend; `rows`, the alias of a database; `keys`, `seed`,
            `name`, how many `threads`, whether there are `signals`, and the file of the `history`.
    """

    def __init__(self, spec: dict[str, Any]):
        self.alias, self.rows, self.keys = spec["alias"], spec["rows"], spec["keys"]
        self.seed, self.signals, self.threads = spec["seed"], spec["signals"], spec["threads"]
        self.write = Writer(Path(spec["history"]), spec["name"])
        # In memory, each process has locks of its own.
        self.scope = f"{spec['name']} " if self.alias == "memory" else ""
        self.stopped = self.armed = False
        self.numbers = count()
        #: Those of the main thread, whose ends are written before a signal's handler raises.
        self.claims: dict[int, Claim] = {}

    def run(self) -> None:
        """Work until the line "stop" comes, and say what is left once the line "end" does."""
        signals.lock_extended.connect(self._count_renewal)
        # Drivers are imported here: what a signal raises amid an import leaves Python's own lock
        # of imports taken, and every later import waits for ever.
        _ = lock_backends[self.alias], connections[self.rows or "default"]
        print("ready", flush=True)
        main, *others = (Hand(self, str(number)) for number in range(self.threads))
        threading.Thread(target=self._wait_for_stop, name="stop", daemon=True).start()
        beside = [threading.Thread(target=each.work, args=(each.plain,)) for each in others]
        for thread in beside:
            thread.start()
        if self.signals:
            signal.signal(signal.SIGALRM, lambda *_: self._interrupt())
            signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
        main.work(main.plain + main.awaited)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for thread in beside:
            thread.join()
        print("idle", flush=True)
        sys.stdin.readline()
        left = lock_backends[self.alias].list().records if self.scope else ()
        leases = [each.key for each in left]
        self.write("report", **{"thread left": _threads_left(), "lease left": leases})

    def permits(self, key: str) -> int:
        """Return how many may hold a key at the same time who share it."""
        return MAX_PERMITS if self.keys.index(key) % 2 else PERMITS

    def keeps(self, form: str, key: str, begin: float, until: float, **more: Any) -> None:
        """Write that nobody else can have had a key, or can have it, from a time to another."""
        self.write("kept", form=form, key=self.scope + key, begin=begin, until=until, **more)

    def _interrupt(self) -> None:
        if self.armed:
            # Once: what is interrupted may clear up in peace.
            self.armed = False
            for claim in list(self.claims.values()):
                claim.end()
            self.write("interrupted")
            raise Interrupted

    def _count_renewal(self, *, cause: Exception | None, **_more: Any) -> None:
        if cause is None:
            self.write("renewed")

    def _wait_for_stop(self) -> None:
        sys.stdin.readline()
        self.stopped = True


class Claim:
    """What a holder believes of its lease, from the request on.

    Args:
        form: How the lock is taken.
    """

    def __init__(self, worker: Worker, form: str):
        self.form, self.asked = form, monotonic()
        self._worker, self._write, self.number = worker, worker.write, next(worker.numbers)
        self._open = worker.claims if _is_main() else {}
        self._lease: Lease | None = None
        self._ended = False

    @contextmanager
    def of(self, lease: Lease) -> Iterator[None]:
        """Claim a key for as long as the block runs: it ends before the lease is released."""
        self._lease = lease
        self._open[self.number] = self
        self.facts = {
            "fence": lease.fence, "token": lease.token[:6], "asked": self.asked,
            "permits": self._worker.permits(lease.key) if lease.shared else 0,
        }  # fmt: skip
        self.until = lease.deadline
        self._write(
            "grant", lease=self.number, form=self.form, key=self._worker.scope + lease.key,
            until=self.until, **self.facts,
        )  # fmt: skip
        try:
            yield
        except LockLost as error:
            self._ended = self._lost(error)
            raise
        finally:
            self.end()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Write that the lease is lost, where the end of the block says so."""
        try:
            yield
        except LockLost as error:
            self._lost(error)
            raise

    def check(self) -> None:
        """Ask whether the lease is held, and note that it is."""
        assert self._lease is not None
        self._lease.check()
        self._note("check", self._lease.deadline)

    @contextmanager
    def extending(self, ttl: float) -> Iterator[None]:
        """Note an extend, with an answer or without. The lease may end sooner from before it on."""
        assert self._lease is not None
        self._note("extending", min(self._lease.deadline, monotonic() + ttl))
        yield
        self._note("extended", self._lease.deadline)

    def end(self) -> None:
        """Claim the key no more."""
        if not self._ended:
            # Written first: where a signal comes in between it is written twice.
            self._write("end", lease=self.number)
            self._ended = True
        self._open.pop(self.number, None)

    def _note(self, event: str, until: float) -> None:
        self._write(event, lease=self.number, until=until)

    def _lost(self, error: LockLost) -> bool:
        """Write that the lease is lost, unless the error is about another one."""
        if self._lease is None or error.key != self._lease.key:
            return False
        lost_by = self._lease._holding.lost_by or ""
        self._write("lost", lease=self.number, why=f"{error} {lost_by}")
        return True


class Hand:
    """One thread of a worker, and the forms in which it takes locks."""

    def __init__(self, worker: Worker, name: str):
        self.worker = worker
        self.chance = random.Random(f"{worker.seed} {name}")
        self.store = store = lock_backends[worker.alias]
        self.plain: list[Callable[[], None]] = [
            self.block, self.block, self.decorated, self.reentered, self.explicit, self.tried,
            self.turns, self.several,
        ]  # fmt: skip
        if worker.alias != "advisory":  # whose leases do not end by themselves
            self.plain.append(self.held)
        self.awaited: list[Callable[[], None]] = [self.awaited_blocks] * 4
        if worker.rows:
            self.plain += [self.in_a_transaction, self.saved]
            self.plain += [self.locked] * 2 * store.supports_transactions
            self.plain += [self.guarded] * 2 * store.supports_guard

    def work(self, forms: list[Callable[[], None]]) -> None:
        """Take locks in one form after another."""
        while not self.worker.stopped:
            # A signal may come behind the last line of a turn, once.
            with suppress(Interrupted):
                self._turn(self.chance.choice(forms))

    def _turn(self, form: Callable[[], None]) -> None:
        try:
            # Neither asyncio's nor Django's own code can be interrupted anywhere.
            if form in (
                *self.awaited,
                self.saved,
                self.in_a_transaction,
                self.locked,
                self.guarded,
            ):
                form()
            else:
                with self._interrupted():
                    form()
        except Exception as error:  # noqa: BLE001 - whatever it is, that is what is looked for
            self._tell(error)

    # The forms

    def block(self) -> None:
        """Hold a lock around a block."""
        self._in_block("block", self._lock())

    def held(self) -> None:
        """Keep the key taken behind the block."""
        claim, lock = Claim(self.worker, "hold"), self._lock(hold=True, ttl=TTLS[0])
        self._in_block(claim.form, lock, claim=claim)
        # Nothing that it was extended by is shorter.
        self.worker.keeps("hold", lock.key, monotonic(), claim.until, **claim.facts)

    def reentered(self) -> None:
        """Enter a block again."""
        lock = self._lock(reentrant=True)

        def again(lease: Lease) -> None:
            if lease.held:
                with lock as same:
                    self._work(Claim(self.worker, "reentered"), same)

        self._in_block("block", lock, again)

    def decorated(self) -> None:
        """Hold a lock around a call."""
        claim = Claim(self.worker, "decorated")

        @self._lock()
        def call() -> None:
            lease = current_lease()
            # None: it was over before the call began.
            if lease is not None:
                self._work(claim, lease)

        with claim.told():
            call()

    def explicit(self) -> None:
        """Acquire, extend and release."""
        claim = Claim(self.worker, "explicit")
        self._keep(claim, self._lock().acquire())

    def tried(self) -> None:
        """Try once."""
        claim = Claim(self.worker, "tried")
        lease = self._lock().try_acquire()
        if lease is not None:
            self._keep(claim, lease)

    def turns(self) -> None:
        """Take one key after another, each for as long as a check takes."""
        for _ in range(TURNS):
            if self.worker.stopped:
                return
            claim = Claim(self.worker, "turn")
            with suppress(LockNotAcquired), claim.told(), self._lock() as lease, claim.of(lease):
                claim.check()

    def several(self) -> None:
        """Hold two keys at once, or none."""
        form, terms = "several", self._terms()
        claims = {key: Claim(self.worker, form) for key in self._two()}
        locks = distlock_all(*claims, backend=self.worker.alias, **terms)
        with ExitStack() as told:
            for claim in claims.values():
                told.enter_context(claim.told())
            with locks as leases, ExitStack() as claimed:
                for key, lease in leases.items():
                    claimed.enter_context(claims[key].of(lease))
                for seconds in self._naps(lease):
                    time.sleep(seconds)
                    for claim in claims.values():
                        claim.check()

    def in_a_transaction(self) -> None:
        """Take a lock inside `atomic()`, behind a row that is saved there."""
        mark, asked = self._mark(), monotonic()
        claim, lock = Claim(self.worker, "in a transaction"), self._lock()
        leases: list[Lease] = []
        behind = 0.0
        with transaction.atomic(using=self.worker.rows):
            self._save(mark)
            try:
                with self._interrupted():
                    self._in_block(claim.form, lock, leases.append, claim)
                behind = monotonic()
                time.sleep(self.chance.uniform(0, 0.2))
            except (LockError, Interrupted) as error:
                self._tell(error)
            ends = monotonic()
        # It has ended without an error.
        self.worker.write("saved", row=mark, asked=asked)
        if behind:
            until = min(ends, leases[0].deadline)
            self.worker.keeps("to the commit", lock.key, behind, until, **claim.facts)

    def locked(self) -> None:
        """Lock keys until a transaction ends."""
        keys, shared = self._two(), self.chance.random() < 0.3
        with transaction.atomic(using=self.worker.rows):
            with self._interrupted():
                wait = self.chance.choice(WAITS)
                transaction_lock(*keys, shared=shared, wait=wait, backend=self.worker.alias)
            begin = monotonic()
            time.sleep(self.chance.uniform(0, 0.3))
            ends = monotonic()
        # It has ended without an error.
        for key in keys:
            permits = MAX_PERMITS if shared else 0
            self.worker.keeps("transaction", key, begin, ends, permits=permits)

    def guarded(self) -> None:
        """Guard a transaction, which may go on behind the end of the lease."""
        # Models are there behind Django's setup.
        from tests.shop.models import Row

        claim, lock = Claim(self.worker, "guarded"), self._lock(shared=False, permits=1)
        lease = lock.acquire()
        try:
            with claim.of(lease):
                # Meanwhile, an operator may take the key, and somebody else acquire it.
                if self.chance.random() < LATE:
                    self._be_overtaken(lease)
                self._wait_for_successor(lease)
                with lease.atomic(self.worker.rows):
                    begin, naps = monotonic(), [0.1, *self._naps(lease)]
                    if self.chance.random() < LATE:
                        # Past the grace of the store, and never silent for as long as a ttl.
                        naps = [0.2] * math.ceil((lease.remaining() + 2) / 0.2)
                    for seconds in naps:
                        time.sleep(seconds)
                        Row.objects.using(self.worker.rows).exists()
                    ends = monotonic()
            self.worker.keeps("guarded", lock.key, begin, ends, **claim.facts)
        finally:
            lease.release()

    def saved(self) -> None:
        """Save a row where it is committed at once."""
        mark, asked = self._mark(), monotonic()
        self._save(mark)
        self.worker.write("saved", row=mark, asked=asked)

    def awaited_blocks(self) -> None:
        """Hold locks in several tasks, some of which are cancelled."""
        asyncio.run(self._tasks())

    async def _tasks(self) -> None:
        tasks = [asyncio.create_task(self._task()) for _ in range(3)]
        for task in tasks:
            if self.chance.random() < 0.3:
                asyncio.get_running_loop().call_later(self.chance.uniform(0, 1), task.cancel)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self._tell(outcome)

    async def _task(self) -> None:
        if self.chance.random() < 0.3:
            claim = Claim(self.worker, "awaited explicit")
            async with asyncio.timeout(1.5):
                lease = await self._lock(wait=None).aacquire()
            try:
                await self._await_work(claim, lease)
            finally:
                await lease.arelease()
        else:
            claim = Claim(self.worker, "awaited block")
            with claim.told():
                async with self._lock() as lease:
                    await self._await_work(claim, lease)

    # What the forms share

    def _lock(self, **more: Any) -> Lock:
        key, terms = self.chance.choice(self.worker.keys), self._terms()
        shares = SHARES[self.worker.keys.index(key) % len(SHARES)]
        if self.store.supports_sharing and self.chance.random() < shares:
            permits = self.worker.permits(key)
            terms |= {"shared": True} if permits == MAX_PERMITS else {"permits": permits}
        elif self.chance.random() < STEALS:
            terms["steal_if_dead"] = True
        return distlock(key, backend=self.worker.alias, **{**terms, **more})

    def _terms(self) -> dict[str, Any]:
        return {"ttl": self.chance.choice(TTLS), "wait": self.chance.choice(WAITS)}

    def _two(self) -> list[str]:
        return self.chance.sample(self.worker.keys, min(2, len(self.worker.keys)))

    def _in_block(
        self,
        form: str,
        lock: Lock,
        then: Callable[[Lease], None] = lambda lease: None,
        claim: Claim | None = None,
    ) -> None:
        claim = claim or Claim(self.worker, form)
        with claim.told(), lock as lease:
            self._work(claim, lease)
            then(lease)

    def _keep(self, claim: Claim, lease: Lease) -> None:
        try:
            self._work(claim, lease, extends=0.5, late=LATE)
        finally:
            lease.release()

    def _work(self, claim: Claim, lease: Lease, *, extends: float = 0.1, late: float = 0.0) -> None:
        with claim.of(lease):
            if self._may_write(lease) and self.chance.random() < late:
                self._write_late(lease)
            for seconds in self._naps(lease):
                time.sleep(seconds)
                # Before the check, which does not see what comes behind it either.
                if self._may_write(lease) and self.chance.random() < WRITES:
                    self._write_fenced(lease)
                claim.check()
                if self.chance.random() < extends:
                    ttl = self.chance.choice(TTLS)
                    with claim.extending(ttl), suppress(BackendUnavailable):
                        lease.extend(ttl)

    async def _await_work(self, claim: Claim, lease: Lease) -> None:
        with claim.of(lease):
            for seconds in self._naps(lease):
                await asyncio.sleep(seconds)
                claim.check()
                if self.chance.random() < 0.1:
                    ttl = self.chance.choice(TTLS)
                    with claim.extending(ttl), suppress(BackendUnavailable):
                        await lease.aextend(ttl)

    def _naps(self, lease: Lease) -> list[float]:
        if self.chance.random() < 0.1:
            # Longer than the lease lives without a heartbeat.
            return [lease.remaining() / 6] * 9
        return [self.chance.uniform(0, 0.04) for _ in range(self.chance.randint(0, 5))]

    @contextmanager
    def _interrupted(self) -> Iterator[None]:
        """Let signals raise in the block, in the main thread, most of the times."""
        worker = self.worker
        mine = worker.signals and _is_main()
        try:
            worker.armed = worker.armed or (mine and self.chance.random() < 0.8)
            yield
        finally:
            worker.armed = worker.armed and not mine

    def _tell(self, error: Exception) -> None:
        name = type(error).__name__
        why = "" if name in EXPECTED else "".join(traceback.format_exception(error))[-3000:]
        self.worker.write("error", form=name, why=why)
        # As behind each request.
        if self.worker.rows and isinstance(error, DatabaseError | InterfaceError):
            connections[self.worker.rows].close_if_unusable_or_obsolete()

    def _may_write(self, lease: Lease) -> bool:
        """Whether a fenced row is committed at once, and no signal divides its write."""
        worker = self.worker
        # Of those who share a key, nobody may.
        if lease.shared or not worker.rows or (worker.signals and _is_main()):
            return False
        return not connections[worker.rows].in_atomic_block

    def _be_overtaken(self, lease: Lease) -> None:
        """Let an operator take the key. It is written before: no answer may come."""
        facts = {"key": lease.key, "before": lease.fence, "after": lease.fence + 1}
        self.worker.write("operator", form="force_release", **facts, seen=lease.fence)
        alias, fence = self.worker.alias, lease.fence
        inspection.force_release(
            lease.key, fence=fence, backend=alias, actor="chaos", reason="late"
        )

    def _wait_for_successor(self, lease: Lease) -> None:
        """Wait for less than the lease lasts, until another holder is seen."""
        until = monotonic() + self.chance.choice((0.2, 1, 1)) * (lease.remaining() - 0.1)
        while monotonic() < until:
            record = self.store.read(lease.key)
            if record is not None and record.fence > lease.fence:
                return
            time.sleep(0.05)

    def _write_late(self, lease: Lease) -> None:
        """Write as a process does that was stopped: when another holder may have written."""
        # Models are there behind Django's setup.
        from tests.shop.models import Account

        until = monotonic() + lease.remaining() + LATENESS
        newer = Account.objects.using(self.worker.rows).filter(
            name=lease.key, fence__gt=lease.fence
        )
        while monotonic() < until and not newer.exists():
            time.sleep(0.1)
        self._write_fenced(lease)

    def _write_fenced(self, lease: Lease) -> None:
        """Write the row of the key, which refuses a lower fence than it has."""
        # Models are there behind Django's setup.
        from tests.shop.models import Account

        facts = {"key": lease.key, "fence": lease.fence, "asked": monotonic()}
        rows = Account.objects.using(self.worker.rows).fenced(lease).filter(name=lease.key)
        try:
            assert rows.update(value=self.chance.getrandbits(30)) == 1
        except FenceRejected:
            self.worker.write("refused", **facts, held=lease.held)
        else:
            self.worker.write("wrote", **facts)

    def _mark(self) -> str:
        return f"{self.chance.getrandbits(96):x}"

    def _save(self, mark: str) -> None:
        # Models are there behind Django's setup.
        from tests.shop.models import Row

        Row.objects.using(self.worker.rows).create(name=mark)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _threads_left() -> list[str]:
    """Return the threads that nobody needs any more, and those of pools that are stuck."""
    frames, left, seen = sys._current_frames(), [], dict.fromkeys(MAY_STAY, 0)
    for thread in threading.enumerate():
        name = "Timer" if isinstance(thread, threading.Timer) else thread.name
        if name == "stop" or thread is threading.main_thread():
            continue
        kind = next((each for each in MAY_STAY if name.startswith(each)), None)
        if kind is not None:
            seen[kind] += 1
        frame = frames.get(thread.ident or 0)
        idles = frame is None or frame.f_code.co_filename.endswith("thread.py")
        if kind is None or seen[kind] > MAY_STAY[kind] or (kind == "distlock-" and not idles):
            left.append(f"{thread.name}\n" + "".join(traceback.format_stack(frame))[-1500:])
    return left


def _sleep(seconds: Any) -> None:
    select.select([], [], [], seconds)


def main(spec: str) -> None:
    """Be the worker."""
    faulthandler.register(signal.SIGUSR2)
    if "LD_PRELOAD" in os.environ:
        # libfaketime refuses the clock that `time.sleep` sleeps by.
        time.sleep = _sleep
    django.setup()
    sys.setswitchinterval(SWITCHES)
    Worker(json.loads(spec)).run()


if __name__ == "__main__":
    main(sys.argv[1])
