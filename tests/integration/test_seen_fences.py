"""The highest fence that was seen for a key, on every database."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction

from django_distlock import BackendUnavailable, LockUsageError
from django_distlock.core.errors import FenceRejected
from django_distlock.core.records import FENCE_MAX, clock_fence
from django_distlock.database.borrowing import LockConnections
from django_distlock.database.connections import in_test_case
from django_distlock.fencing import seen
from django_distlock.fencing.rejecting import Fence
from django_distlock.fencing.seen import FenceJump, mark_of, see, set_mark
from django_distlock.models import SeenFence
from tests.contract.helpers import Later, at_once, crew, race
from tests.contract.locking import rolled_back

from .databases import here
from .histories import Attempt, attempted, rising, wrong

#: Aliases of the tests' databases; SQLite has one writer per file.
SERVERS = ["default", "serializable", "mariadb"]


@pytest.fixture(params=["default", "mariadb", "sqlite"])
def using(request: pytest.FixtureRequest) -> str:
    """Give each kind of database in turn."""
    return here(request.param)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    """Give each database in turn that has more than one writer."""
    return here(request.param)


def row(using: str, key: str) -> SeenFence:
    """Read the row of a key, from a connection that sees only what is committed."""
    return Later(SeenFence.objects.using(using).get, pk=key).result()


def test_mark_is_raised(using: str, key: str, settings: Any) -> None:
    """By a higher fence, with the time of that; a lower one is told it, and changes nothing."""
    assert see(Fence(key, 5), using) == 5
    first = row(using, key)
    assert first.fence == 5
    assert see(Fence(key, 7), using) == 7
    second = row(using, key)
    assert second.fence == 7
    assert second.raised_at > first.raised_at
    assert see(Fence(key, 6), using) == 7
    assert row(using, key).raised_at == second.raised_at
    # Fifteen digits lose none.
    settings.DISTLOCK_FENCE_JUMP = FENCE_MAX
    for fence, mark in ((-1, -1), (0, 0), (-1, 0)):
        assert see(Fence(key, FENCE_MAX + fence), using) == FENCE_MAX + mark


def test_fence_that_was_seen_costs_one_query(server: str, key: str) -> None:
    """Equal or lower, nothing is written."""
    see(Fence(key, 7), server)
    asked: list[str] = []

    def note(execute: Callable[..., object], sql: str, *rest: object) -> object:
        asked.append(sql.split()[0])
        return execute(sql, *rest)

    with connections[server].execute_wrapper(note):
        for fence in (7, 6):
            see(Fence(key, fence), server)
    assert asked == ["SELECT", "SELECT"]


def test_keys_are_told_apart_by_their_bytes(using: str, key: str) -> None:
    """Case, accents and spaces at the end make another key; the longest fits."""
    keys = [key, key.upper(), f"{key}e", f"{key}é", f"{key} ", f"{key}🔒", "é" * 250 + key[-12:]]
    for fence, each in enumerate(keys, 1):
        see(Fence(each, fence), using)
    assert [row(using, each).fence for each in keys] == [1, 2, 3, 4, 5, 6, 7]


# How far


def test_fence_far_above_the_clock_raises_nothing(using: str, key: str) -> None:
    """Whoever signs the highest one there is would else shut out all later ones."""
    for before in (None, 5):
        if before is not None:
            see(Fence(key, before), using)
        with pytest.raises(FenceJump, match=f"{FENCE_MAX}.*{key}") as caught:
            see(Fence(key, FENCE_MAX), using)
        assert caught.value.code == "fence_jump"
        assert SeenFence.objects.using(using).filter(pk=key).exists() is (before is not None)
    assert see(Fence(key, 6), using) == 6


def test_fences_that_follow_the_clock_are_never_a_jump(using: str, key: str) -> None:
    """From nothing, from counted fences, and a little ahead of this host's clock."""
    now = clock_fence(datetime.now(UTC))
    for fence in (5, now, now + 60 * 100_000):
        assert see(Fence(key, fence), using) == fence


def test_jump_counts_from_the_mark(using: str, key: str, settings: Any) -> None:
    """Counted fences have a bound of their own, where the project says how far they may jump."""
    settings.DISTLOCK_FENCE_JUMP = 100
    for fence in (100, 200):
        with pytest.raises(FenceJump, match="DISTLOCK_FENCE_JUMP"):
            see(Fence(key, fence + 1), using)
        assert see(Fence(key, fence), using) == fence
    assert see(Fence(key, 5), using) == 200


def test_mark_is_set_by_hand(using: str, key: str) -> None:
    """Lower too, and where there is none; what is above it passes again."""
    assert (mark_of(key, using), set_mark(key, 9, using)) == (None, None)
    assert set_mark(key, 5, using) == mark_of(key, using) + 4 == 9  # type: ignore[operator]
    assert set_mark(key, 5, using) == row(using, key).fence == 5
    assert see(Fence(key, 6), using) == 6


def test_rollback_of_the_caller_leaves_the_mark(server: str, key: str) -> None:
    """It was committed by itself, when made and when raised."""
    for fence in (5, 7):
        with rolled_back(server):
            SeenFence.objects.using(server).exists()
            assert see(Fence(key, fence), server) == fence
            assert row(server, key).fence == fence
        assert row(server, key).fence == fence


def test_own_transaction_on_sqlite_is_named(key: str) -> None:
    """With one writer per file, the caller's transaction is in the way, and the error says so."""
    with (
        transaction.atomic(using="sqlite"),
        pytest.raises(LockUsageError, match="one writer") as caught,
    ):
        see(Fence(key, 5), "sqlite")
    assert caught.value.code == "self_blocked"


def test_test_case_takes_the_mark_back(server: str, key: str) -> None:
    """Inside of a `TestCase` all goes through its transaction."""
    outermost = transaction.atomic(using=server)
    outermost._from_testcase = True  # type: ignore[attr-defined]
    with outermost:
        assert in_test_case(connections[server])
        assert see(Fence(key, 5), server) == 5
        assert see(Fence(key, 7), server) == 7
        assert see(Fence(key, 6), server) == 7
        transaction.set_rollback(True, using=server)
    assert not SeenFence.objects.using(server).filter(pk=key).exists()


def test_no_connection_free_is_no_pass(
    server: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be asked, nobody is told that a fence is the highest."""
    ours = LockConnections(server, 1)
    monkeypatch.setattr(seen, "_connections", lambda using: ours)
    with transaction.atomic(using=server), ours.use(), pytest.raises(BackendUnavailable):
        Later(_inside, server, key).result()
    ours.close_all()
    assert not SeenFence.objects.using(server).filter(pk=key).exists()


def _inside(using: str, key: str) -> None:
    with transaction.atomic(using=using):
        see(Fence(key, 5), using)


# Many at once

#: Also where transactions read from snapshots.
RACING = pytest.mark.parametrize("using", [*SERVERS, "sqlite"], indirect=True)


def passing(using: str, key: str) -> Callable[[int], None]:
    """Give what passes with a fence or raises, as the middleware does."""

    def act(fence: int) -> None:
        mark = see(Fence(key, fence), using)
        assert mark >= fence
        if mark > fence:
            raise FenceRejected(key=key)

    return act


@RACING
def test_those_who_make_a_mark_at_once_agree(using: str, key: str) -> None:
    """One row comes of it, with the highest fence, and nobody meets an error."""
    for number in range(10):
        each = f"{key}-{number}"
        fences = [3, 1, 4, 2, 4, 1]
        acts = [partial(attempted, fence, passing(using, each)) for fence in fences]
        history = at_once(acts)
        assert wrong(history) == []
        assert [attempt.passed for attempt in history if attempt.fence == 4] == [True, True]
        assert row(using, each).fence == 4


LAST = 120


@RACING
def test_no_lower_fence_passes_behind_a_higher_one(using: str, key: str) -> None:
    """Three processes come with fences that mostly rise; the order is right throughout."""
    with crew(3, f"{__name__}:come_rising", using, key) as workers:
        together = [Attempt(*each) for history in race(workers) for each in history]
    assert wrong(together) == []
    assert {each.passed for each in together} == {True, False}
    assert row(using, key).fence == LAST


def come_rising(using: str, key: str) -> list[Attempt]:
    """Be a process of a service."""
    connections[using].ensure_connection()
    print("ready")
    input()
    act = passing(using, key)
    history = [attempted(fence, act) for fence in rising(LAST, os.getpid())]
    connections.close_all()
    return history
