"""`steal_if_dead=True`: the key of a process that is provably gone is taken over at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from django_distlock import Lease, Lock, LockLost, LockNotAcquired, signals
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Holder
from django_distlock.handler import lock_backends
from django_distlock.locks.attempts import Attempts, Request
from django_distlock.process.host import current_holder
from tests.backends import Registered
from tests.processes import spawn, spawn_by

from .conftest import Hold
from .helpers import ELSEWHERE, Later, at_once, held, prompt
from .locking import Heard, eventually, grantable, lock_of, taken
from .turn_workers import LAZY

pytestmark = pytest.mark.requires("supports_ttl")

HOLD = "tests.contract.lock_workers:hold_until_told"


@pytest.fixture(scope="session")
def dead() -> Holder:
    """Give the identity of a process that has ended."""
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return replace(current_holder(), pid=int(ended.stdout), started_at=1.0, process="late")


def thief(registered: Registered, key: str, **more: object) -> Lock:
    """Describe a lock that is taken over from the dead."""
    return lock_of(registered, key, steal_if_dead=True, **{"ttl": 60, "wait": 0, **more})


def left_by(holder: Holder, registered: Registered, key: str, ttl: float | None = 600) -> Grant:
    """Let somebody hold a key."""
    answer = lock_backends[registered.alias].acquire(key, new_token(), ttl, holder)
    assert isinstance(answer, Grant)
    return answer


@pytest.fixture
def left(registered: Registered, key: str, dead: Holder) -> Iterator[Grant]:
    """Give a grant whose holder has died."""
    yield left_by(dead, registered, key)
    lock_backends[registered.alias].force_release(key)


@ELSEWHERE
@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "zombie"])
def test_key_of_a_killed_process_is_granted_at_once(
    registered: Registered, key: str, reaped: bool
) -> None:
    """Long before its ttl and grace, with a higher fence, and it is told once."""
    with (
        # A child of the test is a zombie until it is waited for.
        spawn_by([], HOLD, registered.alias, key, 60, "") as worker,
        Heard(signals.lock_taken_over, key) as heard,
    ):
        worker.wait_for("held")
        before = held(lock_backends[registered.alias], key)
        os.kill(worker.popen.pid, signal.SIGKILL)
        if reaped:
            worker.popen.wait(timeout=20)
        with prompt():
            assert eventually(partial(is_granted_to_thief, registered, key))
    said = heard.once
    assert said["previous"].pid == worker.popen.pid
    assert said["holder"].pid == os.getpid()
    assert said["alias"] == registered.alias
    assert "died" in said["cause"]
    assert said["fence"] > before.fence
    assert grantable(lock_of(registered, key))


def is_granted_to_thief(registered: Registered, key: str) -> bool:
    """Try once, and give back what was granted: a signal takes a moment to kill."""
    lease = thief(registered, key).try_acquire()
    return lease is not None and lease.release()


@ELSEWHERE
def test_key_of_a_stopped_process_is_not_taken(registered: Registered, key: str) -> None:
    """Who stands still may go on."""
    with spawn(HOLD, registered.alias, key, 60, "") as worker:
        worker.wait_for("held")
        worker.stop()
        try:
            with pytest.raises(LockNotAcquired):
                thief(registered, key, wait=0.5).acquire()
            assert taken(lock_of(registered, key))
        finally:
            worker.go_on()
        worker.send("go on")
        assert worker.result() is True


@ELSEWHERE
def test_waiter_takes_over_who_dies_meanwhile(
    registered: Registered, key: str, acquire: Callable[[Lock], Lease]
) -> None:
    """At the next safety read at the latest: nobody calls out that somebody died."""
    with spawn(HOLD, registered.alias, key, 60, "") as worker:
        worker.wait_for("held")
        waiting = Later(acquire, thief(registered, key, wait=30))
        time.sleep(0.5)
        os.kill(worker.popen.pid, signal.SIGKILL)
        with prompt(5):
            lease = waiting.result()
    assert lease.release() is True


def test_dead_holder_is_taken_over_in_every_way(
    registered: Registered, key: str, dead: Holder, hold: Hold
) -> None:
    """With a block, an await or a call; a single attempt does so in the tests above."""
    lock = thief(registered, key)
    with Heard(signals.lock_taken_over, key) as heard:
        grant = left_by(dead, registered, key)
        fence = hold(lock, lambda lease: lease.fence)
    assert heard.once["previous"] == dead
    assert heard.once["fence"] == fence > grant.fence
    assert not taken(lock)


def test_dead_holder_is_waited_for_without_it(
    registered: Registered, key: str, left: Grant
) -> None:
    """Taking over is for those who ask for it."""
    with Heard(signals.lock_taken_over, key) as heard:
        with pytest.raises(LockNotAcquired):
            lock_of(registered, key, wait=0.3).acquire()
        assert not grantable(lock_of(registered, key))
    assert heard.facts == []
    record = held(lock_backends[registered.alias], key)
    assert record.fence == left.fence


def test_holder_of_whom_nothing_is_proven_is_waited_for(
    registered: Registered, key: str, dead: Holder
) -> None:
    """Another host's, another boot's, an unknown one's, a living one's, and one without end."""
    unproven: list[tuple[dict[str, Any], float | None]] = [
        ({"host": "another"}, 600),
        ({"boot_id": "another/1"}, 600),
        ({"boot_id": ""}, 600),
        ({"pid": 0}, 600),
        ({"pid": os.getpid(), "started_at": None}, 600),
        # A basic lock ends by release, or by an operator, and not because its process ended.
        ({}, None),
    ]
    for said, ttl in unproven:
        left_by(replace(dead, **said), registered, key, ttl)
        with pytest.raises(LockNotAcquired):
            thief(registered, key, wait=0.3).acquire()
        lock_backends[registered.alias].force_release(key)


def test_window_of_a_dead_process_is_kept(registered: Registered, key: str, dead: Holder) -> None:
    """What was given up in order and is kept for its time is nobody's to take over."""
    backend = lock_backends[registered.alias]
    assert backend.release(left_by(dead, registered, key), 60) is True
    with pytest.raises(LockNotAcquired):
        thief(registered, key, wait=0.3).acquire()
    assert held(backend, key).is_settled
    backend.force_release(key)


@pytest.mark.parametrize("pause", [False, True], ids=["free", "paused"])
def test_of_many_that_take_over_one_wins(
    registered: Registered, key: str, left: Grant, pause: bool
) -> None:
    """At the same time, exactly one is granted the key; under a pause, nobody."""
    backend = lock_backends[registered.alias]
    if pause:
        backend.pause(key, datetime.now(UTC) + timedelta(hours=1))
    with Heard(signals.lock_taken_over, key) as heard:
        leases = at_once([thief(registered, key).try_acquire for _ in range(6)])
    won = [lease for lease in leases if lease is not None]
    assert len(won) == (0 if pause else 1)
    assert len(heard.facts) == len(won)
    for lease in won:
        assert lease.fence > left.fence
        assert Later(lease.release).result() is True
    backend.pause(key, None)


def test_two_waiters_take_over_in_turn(registered: Registered, key: str, left: Grant) -> None:
    """The second one waits for the first one's release: that one is alive."""
    lock = thief(registered, key, wait=20, retry=LAZY)
    holding = threading.Semaphore(1)
    overlaps: list[bool] = []

    def work() -> int:
        with lock as lease:
            overlaps.append(not holding.acquire(blocking=False))
            time.sleep(0.3)
            holding.release()
            return lease.fence

    with Heard(signals.lock_taken_over, key) as heard:
        fences = at_once([work, work])
    assert overlaps == [False, False]
    assert min(fences) > left.fence
    assert heard.once["previous"].process == "late"


def test_block_that_was_taken_over_fails(
    registered: Registered, key: str, dead: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that was alive after all releases nothing of its successor's, and is told."""
    lock = lock_of(registered, key, ttl=60)
    with monkeypatch.context() as patch:
        patch.setattr("django_distlock.locks.taking.current_holder", lambda *_: dead)
        alive = lock.__enter__()
    successor = Later(thief(registered, key).acquire).result()
    assert successor.fence > alive.fence
    with Heard(signals.lock_lost, key) as heard:
        with pytest.raises(LockLost):
            alive.extend()
        assert (alive.is_lost, alive.held) == (True, False)
        assert alive.release() is False
        with pytest.raises(LockLost):
            lock.__exit__(None, None, None)
    assert heard.once["fence"] == alive.fence
    assert taken(lock)
    assert Later(successor.release).result() is True


def test_thief_behind_a_patient_waiter_takes_over(
    registered: Registered, key: str, left: Grant
) -> None:
    """Whoever may take over does not stand behind one that may not, in its own process."""
    patient = Later(lock_of(registered, key, ttl=60, wait=12, retry=LAZY).acquire)
    backend = lock_backends[registered.alias]
    assert eventually(lambda: backend.queues.name_of(key) in backend.queues)
    with prompt(5):
        lease = Later(thief(registered, key, wait=10, retry=LAZY).acquire).result()
    assert lease.fence > left.fence
    assert Later(lease.release).result() is True
    Later(patient.result().release).result()


@pytest.mark.parametrize(("may_take_over", "seconds"), [(True, 1.0), (False, 5.0)])
def test_no_wake_up_tells_of_a_death(key: str, may_take_over: bool, seconds: float) -> None:
    """So whoever may take the key over looks more often, also where wake-ups come."""
    backend = lock_backends["memory"]
    request = Request(
        key=key, ttl=60.0, wait=10.0, holder=current_holder(), retry=backend.config.retry,
        steal_if_dead=may_take_over,
    )  # fmt: skip
    assert Attempts(backend, request)._pacing.safety == seconds
