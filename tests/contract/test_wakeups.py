"""Whoever waits sleeps until the key is free: no wake-up is lost, and nobody asks in between."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from django_distlock import Lease, Lock, LockNotAcquired
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.processes import Process, spawn

from .helpers import (
    PATIENCE,
    PROMPT,
    Later,
    alone,
    contend,
    crew,
    held,
    noted,
    pressure,
    prompt,
    race,
    take,
)
from .locking import eventually, grantable, held_elsewhere, lock_of
from .turn_workers import LAZY, granted_at, waits
from .workers import WIDTH

pytestmark = pytest.mark.requires("supports_wakeups")

WORKERS = "tests.contract.turn_workers"
#: Turns of each of four processes. By hand: `DISTLOCK_TEST_TURNS=2500`.
TURNS = int(os.environ.get("DISTLOCK_TEST_TURNS", "60"))
GRACE = 1.0


class Waiter:
    """Somebody who waits for a key: in another process, or in a thread where no other sees it."""

    def __init__(self, registered: Registered, lock: Lock, how: str, stack: ExitStack):
        self.lock = lock
        self._how = how
        self._process: Process | None = None
        self._thread: Later[float] | None = None
        if registered.store != "memory":
            self._process = stack.enter_context(
                spawn(f"{WORKERS}:wait_for_turn", registered.alias, lock.key, how)
            )
            self._process.wait_for("asks", PATIENCE)

    def begin(self) -> None:
        """Wait for the key from now on."""
        if self._process is None:
            self._thread = Later(granted_at, self.lock, self._how)
            assert eventually(lambda: waits(self.lock))
        else:
            self._process.send("ask")
            self._process.wait_for("waits")

    def granted_at(self) -> float:
        """Return when the key was granted, by the clock that all processes share."""
        if self._process is not None:
            return float(self._process.result(PATIENCE))
        assert self._thread is not None
        return self._thread.result()


@contextmanager
def waiter_of(registered: Registered, key: str, how: str) -> Iterator[Waiter]:
    """Give a waiter that has yet to begin."""
    with ExitStack() as stack:
        yield Waiter(registered, lock_of(registered, key, ttl=60, wait=30, retry=LAZY), how, stack)


def marked(lease: Lease) -> bool:
    """Say whether the end of a lease will wake somebody."""
    return Later(held, lock_backends[lease.backend], lease.key).result().wanted


# What ends a grant returns when the key is free, at the earliest.


def release(lease: Lease) -> float:
    """Give the key back."""
    free_at = time.monotonic()
    assert lease.release() is True
    return free_at


def settle(lease: Lease) -> float:
    """Keep the key taken for another second, without grace."""
    backend, free_at = lock_backends[lease.backend], time.monotonic() + 1
    held_for = (backend_now(lease) - lease.acquired_at).total_seconds()
    assert backend.release(lease._holding.grant, held_for + 1.0) is True
    return free_at


def backend_now(lease: Lease) -> datetime:
    """Return the store's time, as the lease knows it."""
    lease.extend(60)
    assert lease.expires_at is not None
    return lease.expires_at - timedelta(seconds=60)


def force_release(lease: Lease) -> float:
    """Let an operator take the key."""
    free_at = time.monotonic()
    assert lock_backends[lease.backend].force_release(lease.key) is not None
    return free_at


def extend_to_less(lease: Lease) -> float:
    """Shorten the lease."""
    free_at = time.monotonic() + 0.3 + GRACE
    lease.extend(0.3)
    return free_at


def take_over(lease: Lease) -> float:
    """Force-release the key, and give it back a while later: not by the old mark."""
    backend = lock_backends[lease.backend]
    answer = backend.acquire(lease.key, new_token(), 60, replace=lease.token)
    assert isinstance(answer, Grant)
    assert eventually(lambda: held(backend, lease.key).wanted), "nobody marked the new grant"
    time.sleep(0.3)
    free_at = time.monotonic()
    assert backend.release(answer) is True
    return free_at


def grant_is_late(granted_at: float, free_at: float, pressed: float) -> None:
    """Check that a waiter was granted the key when it became free, and not before.

    Args:
        free_at: Measured before the request that frees the key: this thread may stand still.
        pressed: What `pressure` told before that.
    """
    late = granted_at - free_at
    # Two clocks are compared: the store's, which decides, and ours.
    assert late > -0.1, f"granted {-late:.3f} s before the key was free"
    own = alone(late, pressed)
    assert own < PROMPT, f"took {late:.3f} s, alone {own:.3f} s, instead of 0 s"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (release, "acquire"),
        (release, "aacquire"),
        (settle, "aacquire"),
        (force_release, "acquire"),
        (extend_to_less, "aacquire"),
        (take_over, "acquire"),
    ],
)
def test_end_of_a_grant_wakes_who_waits_for_it(
    registered: Registered, key: str, end: Callable[[Lease], float], how: str
) -> None:
    """However a grant ends or is made to end sooner, another process has the key at once."""
    with waiter_of(registered, key, how) as waiter:
        lease = Later(lock_of(registered, key, ttl=60).acquire).result()
        waiter.begin()
        assert eventually(lambda: marked(lease)), "nobody marked the grant"
        pressed = pressure()
        free_at = Later(end, lease).result()
        grant_is_late(waiter.granted_at(), free_at, pressed)
    lock_backends[registered.alias].force_release(key)


def test_expired_grant_is_taken_when_it_is_free(registered: Registered, key: str) -> None:
    """Its time is known: no message, no backoff and no safety read is needed."""
    with waiter_of(registered, key, "aacquire") as waiter:
        pressed, free_at = pressure(), time.monotonic() + 3 + GRACE
        lease = Later(lock_of(registered, key, ttl=3).acquire).result()
        waiter.begin()
        grant_is_late(waiter.granted_at(), free_at, pressed)
        assert Later(lease.release).result() is False


def test_end_of_a_pause_wakes_who_waits(registered: Registered, key: str) -> None:
    """An operator's `resume` is called out, though there is no grant to mark."""
    backend = lock_backends[registered.alias]
    with waiter_of(registered, key, "acquire") as waiter:
        assert backend.pause(key, datetime.now(UTC) + timedelta(hours=1)) is True
        waiter.begin()
        # Until its attempt behind the subscription has been made.
        time.sleep(0.7)
        pressed, free_at = pressure(), time.monotonic()
        assert backend.pause(key, None) is True
        grant_is_late(waiter.granted_at(), free_at, pressed)


@pytest.mark.stores("postgresql", "redis", "redis_cluster", why="no other process sees its locks")
def test_no_wake_up_is_lost(registered: Registered, key: str, tmp_path: Path) -> None:
    """Four processes hand a key to each other, and none has to fall back to a safety read.

    Nor does any of them run while another one does: the counter in the file is exact.
    """
    path = tmp_path / "counter"
    path.write_text("0" * WIDTH)
    turns = f"{WORKERS}:take_turns", registered.alias, key, str(path), TURNS
    with crew(4, *turns, ready="asks") as workers:
        started = time.monotonic()
        said = race(workers, PATIENCE + TURNS)
        took = time.monotonic() - started
    print(f"{registered.alias}: {4 * TURNS} turns in {took:.1f} s: {said}")
    assert int(path.read_text()) == 4 * TURNS, "updates were lost"
    # Where each turn takes long, others may have many of them first.
    bound = max(4, 40 * took / (4 * TURNS))
    late = [each for told in said for _, each in told["slow"] if each > bound]
    assert late == [], said
    assert grantable(lock_of(registered, key))


def test_waiter_asks_seldom(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds behind a lease of thirty are at most five attempts."""
    with held_elsewhere(lock_of(registered, key, ttl=30)):
        asked = noted(monkeypatch, lock_backends[registered.alias], "acquire")
        # Until it is woken, a waiter asks by itself. Connecting may fail on a busy machine.
        assert eventually(partial(lock_backends[registered.alias].listen, 10))
        with pytest.raises(LockNotAcquired):
            lock_of(registered, key, wait=10).acquire()
    assert len(asked) <= 5


async def test_cancelled_waiter_leaves_the_wake_up_to_others(
    registered: Registered, key: str
) -> None:
    """Who gives up as the key is called out does not take the message with it."""
    lock = lock_of(registered, key, ttl=60, wait=30, retry=LAZY)
    for round_ in range(5):
        lease = await asyncio.to_thread(Later(lock.acquire).result)
        first = asyncio.create_task(lock.aacquire())
        assert await asyncio.to_thread(eventually, partial(marked, lease))
        second = Later(granted_at, lock, "acquire")
        name = lock_backends[registered.alias].queues.name_of(key)
        queue = lock_backends[registered.alias].queues[name]
        assert await asyncio.to_thread(eventually, partial(_has, queue, 2))
        pressed, free_at = pressure(), time.monotonic()
        assert await asyncio.to_thread(Later(lease.release).result) is True
        await asyncio.sleep(0.002 * round_)
        first.cancel()
        try:
            granted = await first
        except asyncio.CancelledError:
            pass
        else:
            assert await granted.arelease() is True
        grant_is_late(await asyncio.to_thread(second.result), free_at, pressed)
    assert await asyncio.to_thread(grantable, lock)


def _has(queue: Sized, length: int) -> bool:
    return len(queue) == length


def test_waiters_of_two_locks_do_not_disturb_each_other(registered: Registered, key: str) -> None:
    """A release wakes those who wait for its key, and lets the others sleep."""
    one, other = (
        lock_of(registered, f"{key}:{each}", ttl=60, wait=wait, retry=LAZY)
        for each, wait in (("a", 2.5), ("b", 30))
    )
    with held_elsewhere(one), held_elsewhere(other) as lease:
        waiting = [Later(partial(each.acquire)) for each in (one, other)]
        assert eventually(lambda: waits(one) and waits(other))
        assert eventually(lambda: marked(lease))
        assert Later(lease.release).result() is True
        assert waiting[1].result().release() is True
        with pytest.raises(LockNotAcquired):
            waiting[0].result()


def test_uncontended_release_marks_and_rests_nothing(registered: Registered, key: str) -> None:
    """Who is alone with a key takes it again at once, however lazy it waits."""
    lock = lock_of(registered, key, wait=30, retry=LAZY)
    # Half of what such a waiter would sleep once.
    with prompt(30):
        for _ in range(20):
            lease = lock.acquire()
            assert not held(lock_backends[registered.alias], key).wanted
            assert lease.release() is True


def test_released_key_is_soon_taken_again_by_a_lazy_waiter(
    registered: Registered, key: str
) -> None:
    """Leaving a wanted key to others for a moment does not mean for a step of any length."""
    backend = lock_backends[registered.alias]
    lock = lock_of(registered, key, wait=20, retry=LAZY)
    lease = lock.acquire()
    assert not isinstance(backend.acquire(key, new_token(), 30, wanted=True), Grant)
    assert lease.release() is True
    with prompt(1.1):
        assert lock.acquire().release() is True


@pytest.mark.parametrize("seconds", [None, 20])
def test_process_knows_that_it_gave_up_a_wanted_key(
    registered: Registered, key: str, seconds: float | None
) -> None:
    """So that it may let the others go first; a key that nobody waited for is none of these."""
    backend = lock_backends[registered.alias]
    name = backend.queues.name_of(key)
    assert backend.release(take(backend, key), seconds) is True
    assert name not in backend.queues.released_wanted
    backend.force_release(key)
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    assert backend.release(grant, seconds) is True
    for _ in range(2):
        since = time.monotonic() - backend.queues.released_wanted[name][0]
        assert 0 <= since < 20
        assert backend.release(grant) is False
    backend.force_release(key)
