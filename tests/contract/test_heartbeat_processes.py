"""Processes that stand still, die, or fork while they hold a lease."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from django.test import override_settings
from redis import Redis

from django_distlock import BackendUnavailable, Lease, Lock, signals
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.clock import monotonic
from django_distlock.core.records import Grant, Unknown
from django_distlock.handler import lock_backends
from django_distlock.process import heartbeat
from tests.backends import Registered
from tests.processes import spawn
from tests.services import private_redis

from .aliases import counted_alias, cut, locks_on, sessions
from .heart_workers import FOREIGN
from .helpers import NOISE, SHARED, Later, held
from .locking import Heard, eventually, grantable, lock_of, taken
from .stores import Session
from .test_lock_trouble import registered_options

WORKERS = "tests.contract.heart_workers"
#: Seconds from SIGCONT until a process that stood still knows of its loss, and what the kernel may
#: take until it lets it go on.
AT_ONCE, TICK = 0.1, 0.01
#: How many stand still in one test.
STOPS = 3


@SHARED
def test_process_that_stood_still_notices_at_once(registered: Registered, key: str) -> None:
    """Behind the pause its lease is lost, its callback is called, and another one has the key.

    Of several that stood still, the quickest needs no more than is promised: a busy machine adds to
    some of them, and not to each.
    """
    locks = [lock_of(registered, f"{key}:{number}", ttl=30, wait=0) for number in range(STOPS)]
    stand_still = f"{WORKERS}:stand_still"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(spawn(stand_still, registered.alias, lock.key, 2.4))
            for lock in locks
        ]
        for worker in workers:
            worker.wait_for("held")
            worker.stop()
        successors = followed(registered, locks)
        delays: dict[str, list[float]] = {"seen": [], "told": []}
        for number, worker in enumerate(workers):
            continued_at = monotonic()
            worker.go_on()
            said = worker.result()
            check_loss(locks[number], said, successors[number])
            delays["seen"].append(said["seen_at"] - continued_at)
            delays["told"].append(said["told_at"][0] - continued_at)
    print(f"{registered.alias}: {delays}")
    for each in delays.values():
        assert 0 <= min(each) <= AT_ONCE + TICK, delays
        assert max(each) < AT_ONCE + NOISE, delays


def followed(registered: Registered, locks: list[Lock]) -> list[Lease | None]:
    """Wait until leases are over, and take their keys, where a lease ends in the store."""
    if not lock_backends[registered.alias].supports_ttl:
        time.sleep(3.6)
        return [None] * len(locks)
    assert all(eventually(lambda lock=each: _can_be_had(lock), timeout=20) for each in locks)  # type: ignore[misc]
    return [Later(each.acquire).result() for each in locks]


def _can_be_had(lock: Lock) -> bool:
    # Who was stopped amid a transaction is in the way until the server ends that.
    with suppress(BackendUnavailable):
        return grantable(lock)
    return False


def check_loss(lock: Lock, said: dict[str, Any], successor: Lease | None) -> None:
    """Check what somebody says that stood still: it has lost its lease, and nothing of others."""
    assert len(said["told_at"]) <= 1, "a loss was told twice"
    assert len(said["heard"]) <= 1, "a loss was told twice"
    if successor is not None:
        assert successor.fence > said["fence"], "a fence came again"
        # What the loser did when it went on took nothing from its successor.
        assert not (not taken(lock) and successor.held), "a key became free under its holder"
        assert Later(successor.release).result() is True
    assert grantable(lock)
    assert said["is_lost"] is True
    assert said["seen_at"] is not None
    assert len(said["told_at"]) == 1
    assert len(said["heard"]) == 1


@SHARED
@pytest.mark.requires("supports_ttl")
def test_holder_that_was_killed_is_followed_when_its_lease_is_over(
    registered: Registered, key: str
) -> None:
    """Not before its ttl and the grace behind it have passed, and soon afterwards."""
    lock = lock_of(registered, key, ttl=30, wait=0)
    with spawn(f"{WORKERS}:hold_in_a_block", registered.alias, key, 3) as worker:
        first = ""
        while not first.startswith("held"):
            first = worker._next(time.monotonic() + 20) or ""
        # Long enough that only a heartbeat has kept it.
        time.sleep(4.5)
        assert taken(lock)
        os.kill(worker.popen.pid, signal.SIGKILL)
        worker.popen.wait()
    record = Later(held, lock_backends[registered.alias], key).result()
    assert record.expires_at is not None
    assert record.free_at is not None
    assert (record.free_at - record.expires_at).total_seconds() == pytest.approx(1, abs=0.01)
    began = time.monotonic()
    assert eventually(lambda: grantable(lock), timeout=20)
    successor = Later(lock.acquire).result()
    assert successor.acquired_at >= record.free_at, "a key was granted before it was free"
    assert successor.fence > int(first.removeprefix("held ")), "a fence came again"
    took = time.monotonic() - began
    assert took < 4 + 2 * NOISE, f"took {took:.3f} s instead of 4 s"
    assert Later(successor.release).result() is True


@SHARED
@pytest.mark.parametrize("how", ["exit", "_exit", "amid a beat"])
def test_fork_inside_a_block_leaves_the_lease_to_its_parent(
    registered: Registered, key: str, how: str
) -> None:
    """The child neither renews nor releases it, and its own locks are renewed as anybody's."""
    with spawn(f"{WORKERS}:fork_in_a_block", registered.alias, key, 2.4, how) as worker:
        result = worker.result(60)
    child = result["child"]
    assert child["parents"] == "0"
    assert {child[each] for each in FOREIGN} == {"foreign_context"}
    assert child["own"] == "True"
    # Of its parent's lease it knows nothing.
    assert child["is_lost"] == "False"
    parent = result["parent"]
    assert not (parent["held"] and (not parent["locked"])), "a key became free under its holder"
    assert parent == {"status": 0, "held": True, "locked": True, "released": True}
    assert grantable(lock_of(registered, key))


def test_inner_block_that_is_left_in_a_fork_says_nothing(key: str) -> None:
    """A reentrant block of the parent ends in its child without a word about the lease."""
    with spawn(f"{WORKERS}:leave_inner_block_in_a_fork", key, 2.4) as worker:
        assert worker.result() == [""]


class Renewals:
    """What a backend is asked to renew, and what came of it."""

    def __init__(self, backend: BaseLockBackend, patch: pytest.MonkeyPatch):
        self.running = 0
        self.ended: list[object] = []
        self._extend_many = backend.extend_many
        patch.setattr(backend, "extend_many", self._noted)

    def _noted(self, grants: Sequence[Grant]) -> Sequence[Grant | Unknown | None]:
        self.running += 1
        try:
            (answer,) = answers = self._extend_many(grants)
            self.ended.append(answer)
        except BaseException as error:
            self.ended.append(error)
            raise
        finally:
            self.running -= 1
        return answers

    def are_cut(self, wait: Callable[[], None], cut: Callable[[], None]) -> None:
        """Cut the renewal that waits in the store, and see that it ends by that.

        Args:
            wait: Returns when the store says that it keeps a connection of ours waiting.
            cut: Ends that connection.
        """
        before = len(self.ended)
        wait()
        assert (self.running, len(self.ended)) == (1, before), self.ended
        cut()
        assert eventually(lambda: len(self.ended) > before, timeout=5)
        error = self.ended[before]
        assert isinstance(error, BackendUnavailable), error
        assert error.code != "network_timeout", error


def check_survival(lease: Lease) -> None:
    """Check that the next renewal has an answer, and that nobody was told of a loss."""
    before = lease.deadline
    assert eventually(lambda: lease.deadline != before, timeout=12)
    lease.check()


@pytest.mark.stores("postgresql", "mysql", why="nothing cuts a session of it")
def test_session_that_is_cut_amid_a_renewal_costs_no_lease(
    registered: Registered, key: str, stranger: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal waits in the server as its session ends. The next one has a session of its own.

    What it waits for is the table: a row that somebody holds is skipped.
    """
    with ExitStack() as stack:
        using = stack.enter_context(counted_alias(registered.using))
        options = {**registered_options(registered), "using": using}
        alias = stack.enter_context(locks_on(using, OPTIONS=options))
        renewals = Renewals(lock_backends[alias], monkeypatch)
        waiting: set[int] = set()

        def wait() -> None:
            waiting.clear()
            give_up = time.monotonic() + 12
            while not waiting:
                assert time.monotonic() < give_up, "no renewal waits"
                waiting.update(ours_that_wait())

        def ours_that_wait() -> set[int]:
            return sessions(using) & set(stranger.blocked())

        with Heard(signals.lock_lost, key) as lost, Lock(key=key, backend=alias, ttl=6) as lease:
            for _ in range(2):
                stranger.hold_table()
                renewals.are_cut(wait, lambda: cut(using, waiting))
                stranger.rollback()
                check_survival(lease)
            assert heartbeat.heartbeat_of(lock_backends[alias])._thread is not None
        assert lost.facts == []


@pytest.mark.faults
def test_connection_to_redis_that_is_cut_amid_a_renewal_costs_no_lease(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where the server keeps every write waiting, and kills who waits."""
    redis = "django_distlock.backends.redis.RedisBackend"
    with private_redis() as server, Redis.from_url(server.url) as client:
        configured = {"cut": {"BACKEND": redis, "OPTIONS": {"url": server.url}}}
        with override_settings(DISTLOCK=configured):
            renewals = Renewals(lock_backends["cut"], monkeypatch)
            waiting: list[str] = []

            def wait() -> None:
                assert eventually(lambda: bool(ours_that_wait()), 12)
                waiting[:] = ours_that_wait()

            def ours_that_wait() -> list[str]:
                return [each["id"] for each in client.client_list() if "b" in each["flags"]]

            def kill() -> None:
                assert [client.client_kill_filter(_id=each) for each in waiting] == [1]

            with (
                Heard(signals.lock_lost, key) as lost,
                Lock(key=key, backend="cut", ttl=6) as lease,
            ):
                for _ in range(2):
                    client.client_pause(60_000, all=False)
                    renewals.are_cut(wait, kill)
                    client.client_unpause()
                    check_survival(lease)
            assert lost.facts == []


def test_rollback_that_nobody_forgets_is_found_at_the_next_beat(key: str) -> None:
    """Where the garbage collector does not run, the heartbeat looks which transactions ended."""
    with spawn(f"{WORKERS}:keep_a_cycle", "default", "memory", key, 3) as worker:
        said = worker.result()
    assert said["locked"] is False
    assert said["took"] < 1 + 2 * NOISE, f"took {said['took']:.3f} s instead of 1 s"
