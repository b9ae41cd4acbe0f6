"""A signal's exception may come between any two steps: what was taken is ended all the same."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import atomic

from django_distlock import (
    Lease,
    Lock,
    LockUsageError,
    distlock,
    distlock_all,
    leader,
    leading,
    signals,
)
from django_distlock.backends.advisory import holdings
from django_distlock.backends.shelf import Shelf
from django_distlock.compat import pglock
from django_distlock.compat.pglock import advisory
from django_distlock.core.keys import own_key
from django_distlock.database.connections import releases
from django_distlock.handler import lock_backends
from django_distlock.leading import Leader, Leadership
from django_distlock.locks import blocks, context, several, taking
from django_distlock.locks.release import Release
from django_distlock.locks.several import LockSet
from django_distlock.process import deferred_release
from django_distlock.process.heartbeat import alarms, heartbeat_of, held_here
from tests.backends import BACKENDS, Registered
from tests.processes import WHOLE_END, spawn

from . import interrupting
from .helpers import Later
from .interrupting import TimeIsUp, interrupt_at, lines_of, strike_again_and_again
from .locking import PAST, SHORT, eventually, grantable, in_a_block, lock_of, receiving, take_away

# One of each way to ask a store: the others share their code with one of these.
pytestmark = pytest.mark.aliases("memory", "redis", "postgres", "advisory")

#: Interruptions of each operation at different lines.
SAMPLES = 30
#: Seconds in which a busy machine has certainly done what is at once elsewhere.
PATIENT = 15.0

Operation = Callable[[Lock], None]


def left_of(lock: Lock) -> list[str]:
    """Name what this process still has of a lock, and the store."""
    store = lock_backends[lock.backend]
    kept: dict[str, list[Any]] = {
        "held": [each.holding for each in held_here.all()],
        "renewed": heartbeat_of(store).all(),
        "watched": alarms.all(),
    }
    found = [name for name, leases in kept.items() if any(each.key == lock.key for each in leases)]
    found += ["queued"] * len(store.queues)
    name = (lock.backend, lock.key)
    found += ["open" for block in list(blocks.every) if block.name == name]
    found += ["kept for a transaction" for _deferred in deferred_release._waiting.of(name)]
    return found + ["taken"] * (store.read(lock.key) is not None)


def nothing_is_left(lock: Lock) -> bool:
    """Say whether nobody holds the key, and this process does nothing for it any more."""
    if not left_of(lock):
        return True
    # The frames of an event loop, and of a stack, refer to their own exceptions.
    gc.collect()
    return False


def block(lock: Lock) -> None:
    """Enter and leave a block."""
    with lock:
        pass


def extend(lock: Lock) -> None:
    """Extend a lease in its block."""
    with lock as lease:
        lease.extend(20)


def stack(lock: Lock) -> None:
    """Let a stack hold the block."""
    with ExitStack() as held:
        held.enter_context(lock)


def transaction(lock: Lock) -> None:
    """Release behind a transaction."""
    with atomic(), lock:
        pass


def acquire(lock: Lock, *, heartbeat: bool = False) -> None:
    """Acquire without a block."""
    lease = lock.acquire(heartbeat=heartbeat)
    # An interrupted release by hand leaves the lease to its holder, and to its ttl.
    sys.settrace(None)
    lease.release()


acquire_renewed = partial(acquire, heartbeat=True)


def awaited(lock: Lock) -> None:
    """Enter and leave an asynchronous block."""

    async def work() -> None:
        async with lock:
            pass

    asyncio.run(work())


# psycopg tells of a connection that a signal broke off while it was opened.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. .function BaseConnection:pytest.PytestUnraisableExceptionWarning"
)
# redis-py leaves a socket to the garbage collector that a signal broke off while it connected.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
)
# What strikes while a weak set forgets an object reaches nobody.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. .function WeakSet:pytest.PytestUnraisableExceptionWarning"
)
# The same for a part of a connection of Django's that was being made for a new session.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. .function BaseDatabase:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("operation", [block, extend])
def test_signals_leave_nothing_held(registered: Registered, key: str, operation: Operation) -> None:
    """Whenever a time limit strikes, the key can be had at once, and nobody renews it."""
    lock = lock_of(registered, key, ttl=60, wait=2)

    def look() -> None:
        assert eventually(lambda: nothing_is_left(lock), PATIENT), left_of(lock)

    most = 2000 if registered.alias == "memory" else 200
    struck = strike_again_and_again(lambda: operation(lock), look, seconds=2, most=most)
    assert struck


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("operation", [block, awaited])
def test_interruption_at_any_line_leaves_nothing_held(
    registered: Registered, key: str, operation: Operation
) -> None:
    """Wherever an exception comes between two lines, nothing is held and nothing renewed."""
    interrupt_everywhere(lock_of(registered, key, ttl=60, wait=2), operation)


@pytest.mark.parametrize("operation", [acquire, acquire_renewed, stack, transaction])
def test_interruption_of_other_ways_to_lock(key: str, operation: Operation) -> None:
    """The same without a block, in a stack of blocks, and behind a transaction."""
    interrupt_everywhere(lock_of(BACKENDS["memory"], key, ttl=60, wait=2), operation)


@pytest.mark.parametrize("inside", [Shelf.put, Shelf.drop])
def test_interrupted_change_of_a_shared_record_leaves_the_key_usable(
    key: str, inside: FunctionType
) -> None:
    """Whichever part of the record in memory was changed before."""
    lock = lock_of(BACKENDS["memory"], key, ttl=60, shared=True)
    for line in interrupted_lines(lambda: block(lock), inside, least=2):
        assert eventually(lambda: nothing_is_left(lock), PATIENT), (line, left_of(lock))
        block(lock)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    "operation", [block, extend, awaited, acquire, acquire_renewed, stack, transaction]
)
@pytest.mark.aliases("memory", "advisory")
def test_interruption_at_every_line(registered: Registered, key: str, operation: Operation) -> None:
    """The same, and no line is left out."""
    lock = lock_of(registered, key, ttl=60, wait=2)
    interrupt_everywhere(lock, operation, samples=sys.maxsize, seconds=300)


@pytest.mark.aliases("memory", "redis", "postgres")
def test_interruption_of_several_keys(registered: Registered, key: str) -> None:
    """Those that were granted together are all given back, wherever the block is broken off."""
    locks = [lock_of(registered, f"{key}-{number}", ttl=60, wait=2) for number in range(2)]

    def hold(_lock: Lock) -> None:
        keys = [each.key for each in locks]
        with distlock_all(*keys, ttl=60, wait=2, backend=registered.alias):
            pass

    interrupt_everywhere(locks[0], hold, others=locks[1:])


def enter(kept: AbstractContextManager[object]) -> None:
    """Enter and leave what is kept."""
    with kept as entered:
        assert entered


Kept = tuple[Callable[[], None], list[str]]


def a_set(key: str) -> Kept:
    """Give what holds some keys, and those."""
    keys = [f"{key}-{number}" for number in range(2)]
    return partial(enter, distlock_all(*keys, ttl=60, backend="memory")), keys


def a_leader(key: str) -> Kept:
    """Give what leads in a block, and its key."""
    return partial(enter, leader(key, backend="memory")), [own_key(f"leader:{key}")]


def a_running_leader(key: str) -> Kept:
    """Give what leads in a call, and its key."""
    candidate = leader(key, backend="memory")
    return partial(candidate.run, lambda _term: None), [own_key(f"leader:{key}")]


def an_advisory_lock(key: str) -> Kept:
    """Give what holds a key as another package does, and that."""
    return partial(enter, advisory(key, backend="memory")), [key]


LEADS = (Leader._elected, Leadership.gain, Leadership.give_up)
INSIDE: dict[Callable[[str], Kept], Sequence[Any]] = {
    a_set: (LockSet.__enter__, LockSet._claimed, several._leave),
    a_leader: (Leader.__enter__, leading._leave, *LEADS),
    a_running_leader: LEADS,
    an_advisory_lock: (advisory.__enter__, advisory._acquired, pglock._leave),
}


@pytest.mark.parametrize("make", INSIDE)
def test_interrupted_block_of_what_is_kept_leaves_it_usable(
    key: str, make: Callable[[str], Kept]
) -> None:
    """Nothing is held, and the same may be entered again."""
    hold, keys = make(key)
    locks = [lock_of(BACKENDS["memory"], each) for each in keys]
    for inside in INSIDE[make]:
        for line in interrupted_lines(hold, inside, most=8):
            assert eventually(lambda: all(map(nothing_is_left, locks)), PATIENT), (
                f"behind line {line} of {inside}, {[*map(left_of, locks)]} is left"
            )
            hold()
            assert all(map(nothing_is_left, locks))


def test_ctrl_c_in_a_call_to_enter_a_set_of_locks_leaves_the_set_usable(key: str) -> None:
    """The set keeps what has entered it, and not what was about to."""
    locks = distlock_all(f"{key}-1", f"{key}-2", ttl=60, backend="memory")

    def press(**_: object) -> None:
        raise KeyboardInterrupt

    def enters() -> bool:
        gc.collect()  # The frames of an event loop refer to their own exceptions.
        with suppress(LockUsageError), locks:
            return True
        return False

    for enter in (locks.__enter__, async_to_sync(locks.__aenter__)):
        with suppress(KeyboardInterrupt), receiving(signals.lock_acquired, press):
            enter()
        # A thread of the store has the error for a moment longer, and with it the frames.
        assert eventually(enters, PATIENT)


def test_interrupted_block_in_a_transaction_keeps_the_key_to_its_end(
    registered: Registered, key: str
) -> None:
    """Where the data is yet to be committed, the key stays taken, and its lease is renewed."""
    lock = lock_of(registered, key, ttl=60)
    store = lock_backends[lock.backend]
    with atomic():
        with suppress(TimeIsUp), lock as lease:
            raise_in_the_end_of(lease)
        renewed = heartbeat_of(store)._leases
        assert eventually(lambda: lease._holding in renewed and lease.is_released, PATIENT)
        assert not grantable(replace(lock, wait=0))
        with lock as again:
            assert again.token == lease.token
    assert eventually(lambda: nothing_is_left(lock), PATIENT), left_of(lock)


@pytest.mark.parametrize("inside", [taking._take, context.adopt, context._successor])
def test_interrupted_acquire_leaves_what_the_transaction_has_kept_to_it(
    key: str, inside: FunctionType
) -> None:
    """A call goes on with its lease, under which data may have been written before."""
    lock = lock_of(BACKENDS["memory"], key, ttl=60)
    for line in range(1, 22):
        with atomic():
            block(lock)
            was_reached = interrupt_at(line, lambda: lock.acquire().release(), inside)
            deferred_release._worker.finish()
            assert not grantable(replace(lock, wait=0)), line
        assert eventually(lambda: nothing_is_left(lock), PATIENT), left_of(lock)
        assert was_reached or line > 8


def test_interrupted_release_behind_a_transaction_is_not_remembered(key: str) -> None:
    """What is not registered with all transactions waits for none: neither for this, nor later."""
    lock = lock_of(BACKENDS["memory"], key, ttl=60)
    making: Any = deferred_release.Deferred.__init__

    for line in range(1, 27):
        with atomic():
            was_reached = interrupt_at(line, lambda: block(lock), making)
            # Other keys are kept until the end by nobody but those who have registered.
            assert eventually(
                lambda: len(deferred_release._waiting.of((lock.backend, key))) == 1, PATIENT
            ), line
        assert eventually(lambda: nothing_is_left(lock), PATIENT), (line, left_of(lock))
        assert was_reached or line > 15


def test_interrupted_release_behind_a_commit_is_carried_out(key: str) -> None:
    """Whatever it has done of it, and whatever it had in its hands."""
    lock = lock_of(BACKENDS["memory"], key, ttl=60)
    release: Any = Release.now
    for line in interrupted_lines(lambda: transaction(lock), release, least=10, most=26):
        assert eventually(lambda: nothing_is_left(lock), PATIENT), (line, left_of(lock))


@pytest.mark.aliases("advisory")
@pytest.mark.parametrize("inside", [holdings.ping, holdings._send, holdings._hear])
def test_interrupted_extend_holds_up_no_release(
    registered: Registered, key: str, inside: FunctionType
) -> None:
    """The end of its block, in the same thread, does not wait for a mutex that it left locked."""
    lock = lock_of(registered, key, ttl=60)

    def work(line: int) -> bool:
        with lock as lease:
            return interrupt_at(line, lease.extend, inside)

    for line in range(1, 10):
        was_reached = Later(work, line).result(PATIENT)
        assert eventually(lambda: nothing_is_left(lock), PATIENT), (line, left_of(lock))
        if not was_reached:
            break
    assert line > 1


def test_interrupted_look_at_the_context_holds_up_no_other_thread() -> None:
    """Also where it is interrupted in code of others, which every lock comes to."""
    left = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename.endswith(("asgiref/local.py", "deferred_release.py")):
            left -= event == "line"
            if event == "line" and left == 0:
                raise TimeIsUp
            return trace
        return None

    for line in range(1, 12):
        left = line
        sys.settrace(trace)
        with suppress(TimeIsUp):
            deferred_release.home()
        sys.settrace(None)
        assert Later(deferred_release.home).result(PATIENT), line


def test_lease_of_a_block_that_is_gone_is_not_renewed(key: str) -> None:
    """The heartbeat asks the block, whatever becomes of the thread that ends what it has."""
    lease = lock_of(BACKENDS["memory"], key, ttl=60).acquire()
    block = blocks.Block(lease)
    sentinel = block.watched()
    lease._holding.begin_block(heartbeat=True, block=block)
    assert lease._holding.begin_renewal() is not None
    lease._holding.mutex.release()
    del sentinel
    assert lease._holding.begin_renewal() is None
    assert lease.release()


def strike_now(*_: object, **__: object) -> None:
    """Let a signal come right here."""
    signal.raise_signal(signal.SIGALRM)


def interrupt_its_release(lease: Lease) -> None:
    """Let a signal come when the store is asked to release a lease, once."""
    ask = lease._release._ask

    def strike(bound: float) -> Any:
        lease._release._ask = ask  # type: ignore[method-assign]
        strike_now()

    lease._release._ask = strike  # type: ignore[method-assign]


@pytest.mark.parametrize("take", [Lock.acquire, async_to_sync(Lock.aacquire)])
def test_who_looks_at_all_blocks_ends_none(
    registered: Registered, key: str, take: Callable[[Lock], Lease]
) -> None:
    """What tells of the end of a block outlives it where somebody looks, and ends none by then."""
    lock, seen = lock_of(registered, key), list[Callable[[], object]]()

    def look(**_facts: object) -> None:
        seen.extend(blocks.every.values())

    # As another thread does, a moment before the call returns.
    with receiving(signals.lock_acquired, look):
        lease = take(lock)
    assert seen
    assert not eventually(lambda: not lease.held, timeout=0.2)
    assert not grantable(lock)
    assert lease.release()


@pytest.mark.parametrize("told", ["lock_acquired", "lock_released", "lock_lost"])
def test_signal_amid_a_receiver_reaches_the_caller(key: str, told: str) -> None:
    """Django logs what a receiver raises; what a time limit raises there is not its own."""
    lock = lock_of(BACKENDS["memory"], key, ttl=60)
    work = take_away if told == "lock_lost" else Lease.check
    with (
        receiving(getattr(signals, told), strike_now),
        interrupting.alarms(),
        pytest.raises(TimeIsUp),
    ):
        in_a_block(lock, work)
    assert eventually(lambda: nothing_is_left(lock), PATIENT), left_of(lock)


@pytest.mark.parametrize("around", [nullcontext, atomic])
def test_signal_amid_a_release_reaches_the_caller(
    registered: Registered, key: str, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    """A time limit that strikes while the store is asked ends the task, and the key is free."""
    lock = lock_of(registered, key, ttl=60)
    with interrupting.alarms(), pytest.raises(TimeIsUp), around():
        in_a_block(lock, interrupt_its_release)
    assert eventually(lambda: nothing_is_left(lock), PATIENT), left_of(lock)


def test_signal_amid_a_callback_reaches_the_caller(key: str) -> None:
    """The same for a callback of a loss that `check()` finds."""
    lease = lock_of(BACKENDS["memory"], key, ttl=SHORT).acquire()
    lease._holding.losses.on_lost(strike_now, lease)
    time.sleep(PAST)
    with interrupting.alarms(), pytest.raises(TimeIsUp):
        lease.check()


def interrupt_everywhere(
    lock: Lock,
    operation: Operation,
    samples: int = SAMPLES,
    seconds: float = 3,
    others: Sequence[Lock] = (),
) -> None:
    """Interrupt an operation at so many lines all over it, or at fewer in these seconds.

    Args:
        others: What it takes besides the lock.
    """
    locks = [lock, *others]

    def work() -> None:
        operation(lock)

    for _ in range(2):
        work()
    lines = lines_of(work)
    assert lines > 50
    until, step = time.monotonic() + seconds, max(1, lines // samples)
    for line in range(1 + hash(lock.key) % step, lines + 1, step):
        if time.monotonic() > until:
            break
        interrupt_at(line, work)
        assert eventually(lambda: all(map(nothing_is_left, locks)), PATIENT), (
            f"behind line {line} of {lines}, {[left_of(each) for each in locks]} is left while\n"
            f"{interrupting.stacks()}"
        )
        work()
    assert all(map(grantable, locks))
    # Coroutines that were broken off before they were awaited warn here, and not in another test.
    gc.collect()


def interrupted_lines(
    work: Callable[[], object], inside: FunctionType, least: int = 1, most: int = 30
) -> Iterator[int]:
    """Interrupt what is called at each line of a function, one after the other; give the line.

    Args:
        least: How many lines it comes to at least.
        most: Of how many to try.
    """
    for line in range(1, most + 1):
        was_reached = interrupt_at(line, work, inside)
        assert was_reached or line > least, f"{inside} has {line - 1} lines"
        yield line
        if not was_reached:
            break


def raise_in_the_end_of(lease: Lease) -> None:
    """Let the end of a lease's block be interrupted, before it has done anything."""

    def end_block(error: BaseException | None, **_: object) -> None:
        raise TimeIsUp

    lease._release.end_block = end_block  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        ("leave_at_the_very_end", "given up"),
        # What it may have been granted is free at once, as behind Ctrl-C amid an acquire.
        ("leave_what_had_no_answer_at_the_very_end", "released"),
    ],
)
def test_acquire_that_is_interrupted_at_the_very_end_is_given_up(leave: str, said: str) -> None:
    """The interpreter waits for the thread that does it, which is slow here."""
    with spawn(f"tests.contract.lock_workers:{leave}", **WHOLE_END) as worker:
        worker.wait_for(said)


@pytest.mark.stores("postgresql", "mysql", "sqlite", "redis", "redis_cluster", why="others see it")
def test_acquire_that_ends_a_child_of_multiprocessing_is_given_up(
    registered: Registered, key: str
) -> None:
    """Such a child calls nothing that `atexit` knows of."""
    leave = "tests.contract.lock_workers:leave_a_child_amid_an_acquire"
    with spawn(leave, registered.alias, key) as worker:
        worker.result()
    assert grantable(lock_of(registered, key, wait=0))


def test_unknown_backends_leave_no_thread() -> None:
    """A block that has asked for nothing has nothing to release."""
    for number in range(3):
        with pytest.raises(ImproperlyConfigured), distlock("k", backend=f"nowhere{number}"):
            pass
    releases.finish()
    assert not [each for each in threading.enumerate() if "nowhere" in each.name]


def test_acquire_waits_until_several_keys_are_given_up(key: str) -> None:
    """The block of an interrupted `distlock_all` has no name, but keys."""
    given_up: list[object] = []

    def fail(error: object) -> None:
        time.sleep(0.3)
        given_up.append(error)

    name, block = ("memory", key), blocks.Block(None)
    block.attempts = SimpleNamespace(names={name}, backend=lock_backends["memory"], fail=fail)
    block.watched()  # Nobody keeps what it returns.
    blocks.flush(name)
    assert given_up


def test_child_of_a_process_that_ends_a_block_waits_for_nothing(key: str) -> None:
    """What the parent is ending, nobody ends in the child."""
    begun, go_on = threading.Event(), threading.Event()
    block = blocks.Block(None)
    block.name = "memory", key

    def release(_: int) -> None:
        begun.set()
        go_on.wait(20)

    holding = SimpleNamespace(token="t")
    block.release = SimpleNamespace(holding=holding, end_left_block=release)
    block.watched()  # Nobody keeps what it returns.
    assert begun.wait(20)
    child = os.fork()
    if not child:
        os._exit(block in blocks.every)
    go_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    releases.finish()


def test_interrupted_acquire_is_given_up_where_no_thread_starts() -> None:
    """At the end of the interpreter, or with too many threads: here, and once."""
    with spawn("tests.contract.lock_workers:leave_while_no_thread_starts", **WHOLE_END) as worker:
        assert worker.result() == {"is_ended": True, "runs": True, "given_up": 1}


@pytest.mark.stores("postgresql", "mysql", "sqlite", "redis", "redis_cluster", why="others see it")
def test_ctrl_c_amid_a_loop_leaves_the_key_free(registered: Registered, key: str) -> None:
    """Wherever it comes, and though nothing but the end of the process is behind it."""
    lock = lock_of(registered, key, wait=0)
    for number in range(5):
        with spawn(
            "tests.contract.lock_workers:take_until_interrupted", registered.alias, key, **WHOLE_END
        ) as worker:
            worker.wait_for("at work")
            time.sleep(0.005 * number)
            worker.popen.send_signal(signal.SIGINT)
            worker.popen.wait(20)
        assert grantable(lock)
