"""The algorithm of waiting, driven by hand: no clock, no store, no sleep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from django_distlock.core.acquiring import Attempt, GiveBack, Outcome, Pause, Reply, acquiring
from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.records import Contended, Grant

WHEN = datetime(2026, 1, 2, tzinfo=UTC)
BUSY = Contended(busy=True)
HELD = Contended(free_at=WHEN + timedelta(hours=1), observed_at=WHEN)
DOWN = BackendUnavailable("down")
START = 1000.0


def granted(ttl: float | None = 10.0) -> Grant:
    """Make a grant."""
    return Grant("key", "token", 1, ttl, WHEN, None)


def held_for(seconds: float) -> Contended:
    """Make an answer that says when the key becomes free."""
    return Contended(free_at=WHEN + timedelta(seconds=seconds), observed_at=WHEN)


@dataclass
class World:
    """A clock, and a store that takes `latency` seconds to answer.

    `slow` says which attempts (from 0) take longer.
    """

    latency: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    now: float = START
    tries: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    given_back: list[Grant] = field(default_factory=list)

    def run(
        self,
        answer: Callable[[int], Outcome],
        *,
        wait: float | None,
        pauses: Iterable[float] = (),
    ) -> Outcome:
        """Drive the generator to its end."""
        steps = acquiring(now=self.now, wait=wait, pauses=iter(pauses))
        step = next(steps)
        while True:
            outcome = None
            if isinstance(step, Attempt):
                outcome = answer(len(self.tries))
                self.bounds.append(step.bound)
                self.now += self.slow.get(len(self.tries), self.latency)
                self.tries.append(self.now - START)
            elif isinstance(step, Pause):
                self.pauses.append(step.seconds)
                self.now += step.seconds
            else:
                assert isinstance(step, GiveBack)
                self.given_back.append(step.grant)
                self.now += self.latency
            try:
                step = steps.send(Reply(self.now, outcome))
            except StopIteration as end:
                result: Outcome = end.value
                return result


def after(count: int, before: Outcome, then: Outcome) -> Callable[[int], Outcome]:
    """Answer `before` for a number of attempts and then `then`."""
    return lambda attempt: before if attempt < count else then


def test_free_key_takes_one_attempt() -> None:
    """The first attempt is made at once, and its grant is the result."""
    world, grant = World(), granted()
    assert world.run(lambda _: grant, wait=5, pauses=itertools.repeat(1.0)) is grant
    assert (world.tries, world.pauses) == ([0.0], [])


@pytest.mark.parametrize("outcome", [HELD, BUSY, DOWN])
def test_wait_zero_tries_exactly_once(outcome: Outcome) -> None:
    """With no time to wait there is one attempt and no pause, whatever it answers."""
    world = World()
    assert world.run(lambda _: outcome, wait=0, pauses=itertools.repeat(1.0)) is outcome
    assert (len(world.tries), world.pauses) == (1, [])


def test_wait_zero_may_be_granted() -> None:
    """No time to wait is time for an attempt."""
    assert isinstance(World().run(lambda _: granted(), wait=0), Grant)


def test_last_attempt_is_at_the_deadline() -> None:
    """The last pause is cut so that the last attempt comes exactly when the wait is over."""
    world = World()
    assert world.run(lambda _: HELD, wait=1.0, pauses=[0.3, 0.6, 10.0]) is HELD
    assert world.tries == pytest.approx([0.0, 0.3, 0.9, 1.0])


def test_last_attempt_can_win() -> None:
    """A key that becomes free in the last pause is granted."""
    world = World()
    assert isinstance(
        world.run(after(1, HELD, granted()), wait=0.5, pauses=itertools.repeat(60.0)), Grant
    )
    assert world.tries == pytest.approx([0.0, 0.5])


def test_slow_attempt_is_followed_by_a_last_one() -> None:
    """An attempt that began before the deadline and ended after it was not the last."""
    world = World(slow={0: 2.0})
    assert world.run(lambda _: HELD, wait=1.0, pauses=itertools.repeat(0.3)) is HELD
    assert world.tries == pytest.approx([2.0, 2.0])
    assert world.pauses == [0.0]


def test_pause_ends_when_the_key_becomes_free() -> None:
    """Knowing when the key is free beats the backoff, in both directions of time."""
    world = World()
    world.run(after(1, held_for(0.25), granted()), wait=10, pauses=itertools.repeat(5.0))
    assert world.pauses == pytest.approx([0.25])
    world = World()
    world.run(after(1, held_for(60), granted()), wait=10, pauses=itertools.repeat(0.5))
    assert world.pauses == pytest.approx([0.5])


def test_key_that_should_be_free_already_is_tried_at_once() -> None:
    """A moment in the past makes no negative pause."""
    world = World()
    world.run(after(1, held_for(-3), granted()), wait=10, pauses=itertools.repeat(0.5))
    assert world.pauses == [0.0]


@pytest.mark.parametrize(
    "outcome",
    [
        BUSY,
        DOWN,
        Contended(),
        Contended(busy=True, free_at=WHEN, observed_at=WHEN),
        Contended(paused=True, free_at=WHEN, observed_at=WHEN),
        Contended(paused=True, observed_at=WHEN),
    ],
)
def test_backoff_stays_where_nobody_knows_when(outcome: Outcome) -> None:
    """Busy, paused or down: the next step of backoff counts, or the waiter would spin."""
    world = World()
    world.run(after(3, outcome, granted()), wait=10, pauses=[0.1, 0.2, 0.4, 0.8])
    assert world.pauses == pytest.approx([0.1, 0.2, 0.4])


def test_wait_for_ever_goes_on() -> None:
    """Without a deadline the attempts go on until a grant."""
    world = World()
    assert isinstance(
        world.run(after(500, HELD, granted()), wait=None, pauses=itertools.repeat(3600.0)), Grant
    )
    assert len(world.tries) == 501


def test_retries_run_out_before_the_deadline() -> None:
    """The end of the pauses ends the attempts."""
    world = World()
    assert world.run(lambda _: HELD, wait=None, pauses=[0.1, 0.1]) is HELD
    assert len(world.tries) == 3


def test_store_that_comes_back_grants() -> None:
    """A store that is down is tried again until the deadline."""
    world = World()
    outcome = world.run(after(3, DOWN, granted()), wait=10, pauses=itertools.repeat(0.5))
    assert isinstance(outcome, Grant)


def test_store_that_stays_down_is_the_result() -> None:
    """Trouble at the last attempt is told as trouble, not as contention."""
    world = World()
    assert world.run(after(1, HELD, DOWN), wait=1, pauses=itertools.repeat(0.3)) is DOWN
    assert world.tries[-1] == pytest.approx(1.0)


def test_contention_after_trouble_is_the_result() -> None:
    """The last attempt speaks."""
    assert World().run(after(1, DOWN, HELD), wait=1, pauses=itertools.repeat(0.3)) is HELD


def test_bound_is_what_is_left_and_at_most_a_second() -> None:
    """An attempt may wait inside the store for the caller's remaining time, up to 1 s."""
    world = World()
    world.run(lambda _: BUSY, wait=1.5, pauses=itertools.repeat(0.7))
    assert world.bounds == pytest.approx([1.0, 0.8, 0.1, 0.0])
    world = World()
    world.run(after(1, BUSY, granted()), wait=None, pauses=itertools.repeat(1.0))
    assert world.bounds == [1.0, 1.0]
    world = World(slow={0: 9.0})
    world.run(lambda _: BUSY, wait=1.0, pauses=itertools.repeat(1.0))
    assert world.bounds == [1.0, 0.0]


def test_grant_that_came_after_its_own_end_is_given_back() -> None:
    """A reply slower than the lease counts as not acquired; the grant is returned."""
    late, good = granted(ttl=1.0), granted()
    world = World(slow={0: 1.0})
    assert world.run(after(1, late, good), wait=10, pauses=itertools.repeat(0.5)) is good
    assert world.given_back == [late]
    assert world.pauses == [0.5]


def test_grant_that_came_just_in_time_is_used() -> None:
    """A lease that still runs is a lease."""
    grant = granted(ttl=1.0)
    world = World(slow={0: 0.999})
    assert world.run(lambda _: grant, wait=0) is grant
    assert world.given_back == []


def test_late_grant_at_the_deadline_is_no_grant() -> None:
    """Where no time is left after giving back, the result is contention without a holder."""
    late = granted(ttl=0.1)
    world = World(slow={0: 0.2})
    outcome = world.run(lambda _: late, wait=0)
    assert isinstance(outcome, Contended)
    assert outcome.busy
    assert world.given_back == [late]


def test_every_late_grant_is_given_back() -> None:
    """None of several late grants stays behind."""
    world = World(latency=0.2)
    assert isinstance(
        world.run(lambda _: granted(ttl=0.1), wait=1.0, pauses=itertools.repeat(0.1)), Contended
    )
    assert len(world.given_back) == len(world.tries) > 2


def test_lock_without_expiry_is_never_late() -> None:
    """Without a ttl there is no end that a reply could miss."""
    grant = granted(ttl=None)
    assert World(slow={0: 1e6}).run(lambda _: grant, wait=0) is grant


def test_time_between_first_and_late_attempt_counts_from_its_own_start() -> None:
    """A grant is measured from the attempt that got it, not from the start of the wait."""
    grant = granted(ttl=1.0)
    world = World()
    assert world.run(after(3, HELD, grant), wait=10, pauses=itertools.repeat(2.0)) is grant
    assert world.given_back == []


def test_backoff_steps_are_not_drawn_after_the_last_attempt() -> None:
    """The algorithm takes one step per pause, so `max_retries` counts attempts exactly."""
    drawn = []

    def steps() -> Iterable[float]:
        for number in itertools.count():
            drawn.append(number)
            yield 0.4

    World().run(lambda _: HELD, wait=1.0, pauses=steps())
    assert drawn == [0, 1, 2]
