"""The algorithm of waiting, driven by hand: no clock, no store, no sleep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_distlock.core.acquiring import (
    SAFETY_SECONDS,
    Attempt,
    GiveBack,
    LineUp,
    Outcome,
    Pause,
    Read,
    Reply,
    acquiring,
)
from django_distlock.core.errors import BackendUnavailable, LockError
from django_distlock.core.holders import Holder
from django_distlock.core.records import Contended, Grant, Record

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

    Attributes:
        in_front: Seconds until those in front in the queue are done; 0: nobody is.
        hears: From when on, and until when, wake-ups come.
        record: What a read finds.
    """

    latency: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    now: float = START
    tries: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    given_back: list[Grant] = field(default_factory=list)
    in_front: float = 0.0
    hears: tuple[float, float] = (math.inf, math.inf)
    record: Record | None = None
    did: list[str] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    replaced: list[str | None] = field(default_factory=list)

    def run(
        self,
        answer: Callable[[int], Outcome],
        *,
        wait: float | None,
        pauses: Iterable[float] = (),
        **more: Any,
    ) -> Outcome:
        """Drive the generator to its end."""
        steps = acquiring(now=self.now, wait=wait, pauses=iter(pauses), **more)
        step = next(steps)
        while True:
            outcome, queued = None, False
            self.did.append(type(step).__name__)
            if isinstance(step, Attempt):
                outcome = answer(len(self.tries))
                self.bounds.append(step.bound)
                self.wanted.append(step.wanted)
                self.replaced.append(step.replace)
                self.now += self.slow.get(len(self.tries), self.latency)
                self.tries.append(self.now - START)
            elif isinstance(step, Pause):
                self.pauses.append(step.seconds)
                self.now += step.seconds
            elif isinstance(step, LineUp):
                queued = self.in_front > 0
                self.now = max(self.now, min(step.until, self.now + self.in_front))
            elif isinstance(step, Read):
                self.now += self.latency
            else:
                assert isinstance(step, GiveBack)
                self.given_back.append(step.grant)
                self.now += self.latency
            since, until = self.hears
            listening = since <= self.now - START < until
            record = self.record if isinstance(step, Read) else None
            try:
                step = steps.send(Reply(self.now, outcome, record, listening, queued))
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


@pytest.mark.parametrize(("wait", "tries"), [(0, 5), (0.6, 5), (1.0, 4)])
def test_unclear_answer_is_asked_for_again_in_the_margin(wait: float, tries: int) -> None:
    """Somebody is in the way of the store: nobody knows more until the margin is over."""
    world = World()
    outcome = world.run(lambda _: BUSY, wait=wait, pauses=itertools.repeat(0.3), margin=1.0)
    assert outcome is BUSY
    assert world.tries[-1] == pytest.approx(1.0)
    assert len(world.tries) >= tries
    # Also whoever has no time to wait gives the store some.
    assert max(world.bounds) > 0


@pytest.mark.parametrize("clear", [HELD, DOWN, granted(), replace(BUSY, guarded=True)])
def test_clear_answer_ends_the_margin(clear: Outcome) -> None:
    """The first answer that says something is the last."""
    world = World()
    assert world.run(after(1, BUSY, clear), wait=0, pauses=[0.3, 0.3], margin=1.0) is clear
    assert world.tries == pytest.approx([0.0, 0.3])


def test_busy_holder_is_known_without_a_margin() -> None:
    """Who holds the key is told, also where its record was locked."""
    world, known = World(), Contended(busy=True, fence=3)
    assert world.run(lambda _: known, wait=0, pauses=[0.3], margin=1.0) is known
    assert world.tries == [0.0]


def test_last_attempt_without_time_counts_less_than_the_one_before() -> None:
    """At the deadline a store may have no time to say who holds the key: it just did."""
    world = World()
    assert world.run(after(2, HELD, BUSY), wait=2.0, pauses=[0.9, 60], margin=1.0) is HELD
    assert world.tries == pytest.approx([0.0, 0.9, 2.0])


def test_error_that_is_no_outage_ends_the_wait() -> None:
    """Somebody has found out that there is nothing to wait for."""
    world, error = World(), LockError("in vain")
    assert world.run(after(1, HELD, error), wait=None, pauses=itertools.repeat(1.0)) is error
    assert len(world.tries) == 2


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


@pytest.mark.parametrize(("outcome", "tries"), [(HELD, 1), (BUSY, 2)])
def test_answer_far_behind_the_deadline_is_the_last(outcome: Outcome, tries: int) -> None:
    """A store that slow would take as long once more; unless it said nothing about the key."""
    world = World(slow={0: 2.1})
    assert world.run(lambda _: outcome, wait=1.0, pauses=itertools.repeat(0.3)) is outcome
    assert len(world.tries) == tries


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
    """Where no time is left after giving back, the store was too slow: it is no contention."""
    late = granted(ttl=0.1)
    world = World(slow={0: 0.2})
    outcome = world.run(lambda _: late, wait=0)
    assert isinstance(outcome, BackendUnavailable)
    assert (outcome.code, outcome.key) == ("network_timeout", "key")
    assert world.given_back == [late]


def test_every_late_grant_is_given_back() -> None:
    """None of several late grants stays behind."""
    world = World(latency=0.2)
    assert isinstance(
        world.run(lambda _: granted(ttl=0.1), wait=1.0, pauses=itertools.repeat(0.1)),
        BackendUnavailable,
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


# In the queue of the process

ALWAYS = (0.0, math.inf)


def test_waiter_queues_up_once_behind_its_first_attempt() -> None:
    """Whoever is contended takes a place in the queue, before its first pause, and keeps it."""
    world = World()
    world.run(lambda _: HELD, wait=1.0, pauses=itertools.repeat(0.4))
    assert world.did[:3] == ["Attempt", "LineUp", "Pause"]
    assert world.did.count("LineUp") == 1


def test_who_is_granted_at_once_does_not_queue_up() -> None:
    """Nor does who may try only once."""
    world = World()
    world.run(lambda _: granted(), wait=5, pauses=[1.0])
    assert world.did == ["Attempt"]
    world = World(in_front=3)
    world.run(lambda _: HELD, wait=0, pauses=[1.0], others_wait=lambda: True)
    assert world.did == ["Attempt"]


def test_newcomer_comes_behind_those_who_wait() -> None:
    """Where others wait for the key, nothing is tried before they are done."""
    world = World(in_front=2.0)
    grant = granted()
    assert world.run(lambda _: grant, wait=5, others_wait=lambda: True) is grant
    assert world.did == ["LineUp", "Attempt"]
    assert world.tries == [2.0]


def test_who_becomes_first_tries_at_once() -> None:
    """The one in front has left: it was granted, or has given up, and the key may be free."""
    world = World(in_front=2.0)
    world.run(after(1, HELD, granted()), wait=5, pauses=[1.0])
    assert world.did == ["Attempt", "LineUp", "Attempt"]
    assert world.tries == [0.0, 2.0]


@pytest.mark.parametrize("others", [False, True])
def test_who_never_becomes_first_tries_at_the_deadline(others: bool) -> None:
    """The last attempt is everybody's, and can win."""
    world, grant = World(in_front=60), granted()
    outcome = world.run(
        after(0 if others else 1, HELD, grant),
        wait=1.5,
        pauses=itertools.repeat(1.0),
        others_wait=lambda: others,
    )
    assert outcome is grant
    assert world.tries[-1] == 1.5
    assert world.bounds[-1] == 0.0


# Woken instead of asking


def test_attempt_marks_the_grant_once_wake_ups_come() -> None:
    """The first attempt writes nothing; the one behind the subscription asks to be woken."""
    world = World(hears=ALWAYS)
    world.run(after(2, HELD, granted()), wait=20, pauses=itertools.repeat(0.1))
    assert world.did[:4] == ["Attempt", "LineUp", "Attempt", "Pause"]
    assert world.wanted[:2] == [False, True]
    assert world.tries[:2] == [0.0, 0.0]


def test_woken_waiter_asks_seldom() -> None:
    """While wake-ups come there is one safety read every 5 s, and the last attempt."""
    world = World(hears=ALWAYS)
    assert world.run(lambda _: HELD, wait=12.0, pauses=itertools.repeat(0.1)) is HELD
    assert world.tries == pytest.approx([0.0, 0.0, SAFETY_SECONDS, 2 * SAFETY_SECONDS, 12.0])
    assert all(world.wanted[1:])


def test_woken_waiter_tries_when_the_key_becomes_free() -> None:
    """Expiry is called out by nobody: its time is known."""
    world = World(hears=ALWAYS)
    world.run(after(2, held_for(1.25), granted()), wait=20, pauses=itertools.repeat(60.0))
    assert world.pauses == pytest.approx([1.25])


@pytest.mark.parametrize(
    "outcome", [BUSY, DOWN, replace(HELD, paused=True), Contended(paused=True)]
)
def test_what_leaves_no_mark_is_asked_again_by_backoff(outcome: Outcome) -> None:
    """Busy, paused or away, the store was not asked to wake anybody."""
    world = World(hears=ALWAYS)
    world.run(after(4, outcome, granted()), wait=20, pauses=[0.1, 0.2, 0.4, 0.8])
    assert world.pauses == pytest.approx([0.1, 0.2, 0.4])


def test_waiter_who_hears_no_more_goes_back_to_backoff() -> None:
    """And marks nothing any more."""
    world = World(hears=(0.0, 5.0))
    world.run(lambda _: HELD, wait=6.0, pauses=itertools.repeat(0.4))
    assert world.pauses == pytest.approx([5.0, 0.4, 0.4, 0.2])
    assert world.wanted == [False, True, False, False, False, False]


def test_waiter_who_begins_to_hear_marks_the_grant() -> None:
    """A subscription that comes late is used from the next attempt on."""
    world = World(hears=(0.5, math.inf))
    world.run(lambda _: HELD, wait=7.0, pauses=itertools.repeat(0.3))
    assert world.wanted == [False, False, True, True, True]
    assert world.pauses == pytest.approx([0.3, 0.3, 5.0, 1.4])


def test_without_a_safety_net_the_pauses_stay() -> None:
    """Who counts on the steps of its backoff keeps them."""
    world = World(hears=ALWAYS)
    world.run(lambda _: HELD, wait=1.0, pauses=itertools.repeat(0.4), safety=None)
    assert world.pauses == pytest.approx([0.4, 0.4, 0.2])


@pytest.mark.parametrize("hears", [ALWAYS, (math.inf, math.inf)])
@pytest.mark.parametrize("in_front", [0.0, 0.1])
def test_retries_are_counted_exactly(hears: tuple[float, float], in_front: float) -> None:
    """`max_retries` are attempts after the first one, also for those who are woken."""
    world = World(hears=hears, in_front=in_front)
    world.run(lambda _: HELD, wait=None, pauses=[0.1, 0.1], safety=None)
    assert len(world.tries) == 3


# Leaving a key to others


def test_rest_comes_before_the_first_attempt() -> None:
    """Who has just given a wanted key up lets others have it first."""
    world = World()
    world.run(lambda _: granted(), wait=5, rest=0.3)
    assert (world.did, world.pauses) == (["Pause", "Attempt"], [0.3])


def test_rest_is_cut_to_the_wait() -> None:
    """It costs nobody its last attempt."""
    world = World()
    assert isinstance(world.run(lambda _: granted(), wait=0.2, rest=0.3), Grant)
    assert world.tries == pytest.approx([0.2])


@pytest.mark.parametrize("rest", [0.0, -1.0])
def test_no_rest_is_no_pause(rest: float) -> None:
    """What is past needs no pause."""
    world = World()
    world.run(lambda _: granted(), wait=5, rest=rest)
    assert world.did == ["Attempt"]


def test_single_attempt_does_not_rest() -> None:
    """With no time to wait the attempt is made at once."""
    world = World()
    world.run(lambda _: granted(), wait=0, rest=0.3)
    assert world.did == ["Attempt"]


# Taking over

PREVIOUS = Holder(host="here", pid=7)
TAKEABLE = replace(HELD, holder=PREVIOUS, fence=4, expires_at=WHEN + timedelta(hours=1, seconds=-1))
FOUND = Record(
    key="key",
    token="theirs",
    fence=4,
    ttl=3600,
    acquired_at=WHEN,
    renewed_at=WHEN,
    expires_at=TAKEABLE.expires_at,
    free_at=TAKEABLE.free_at,
    holder=PREVIOUS,
)


def test_key_of_a_holder_who_is_gone_is_taken_over_at_once() -> None:
    """The record is read, and its token replaced, without a pause, also with no time to wait."""
    world, grant, asked = World(record=FOUND), granted(), list[Holder]()

    def is_gone(holder: Holder) -> bool:
        asked.append(holder)
        return True

    assert world.run(after(1, TAKEABLE, grant), wait=0, is_gone=is_gone) is grant
    assert world.did == ["Attempt", "Read", "Attempt"]
    assert world.replaced == [None, "theirs"]
    assert asked == [PREVIOUS]


def test_key_of_a_holder_who_lives_is_waited_for() -> None:
    """Nothing is read where there is no proof."""
    world = World(record=FOUND)
    world.run(lambda _: TAKEABLE, wait=1, pauses=[0.5, 0.5], is_gone=lambda _: False)
    assert "Read" not in world.did
    assert world.replaced == [None] * len(world.tries)


@pytest.mark.parametrize(
    "outcome",
    [
        BUSY,
        DOWN,
        replace(TAKEABLE, busy=True),
        replace(TAKEABLE, paused=True),
        replace(TAKEABLE, holder=None),
        replace(TAKEABLE, expires_at=None, free_at=None),
        replace(TAKEABLE, expires_at=TAKEABLE.free_at),
    ],
    ids=["busy", "down", "busy-held", "paused", "nobody", "no-expiry", "settled"],
)
def test_what_may_not_be_taken_over_is_waited_for(outcome: Outcome) -> None:
    """Busy, paused, settled, without expiry, or nobody's: whoever is gone, it stays."""
    world = World(record=FOUND)
    world.run(lambda _: outcome, wait=1, pauses=[0.5, 0.5], is_gone=lambda _: True)
    assert "Read" not in world.did


@pytest.mark.parametrize("record", [None, replace(FOUND, fence=5)])
def test_another_grant_is_not_taken_over(record: Record | None) -> None:
    """What was granted meanwhile is somebody else's, about whom nothing is proven."""
    world = World(record=record)
    world.run(lambda _: TAKEABLE, wait=0, is_gone=lambda _: True)
    assert world.replaced == [None]


def test_grant_that_was_settled_meanwhile_is_not_taken_over() -> None:
    """What is kept on purpose is kept, also if that was seen only on the second look."""
    world = World(record=replace(FOUND, expires_at=FOUND.free_at))
    world.run(lambda _: TAKEABLE, wait=0, is_gone=lambda _: True)
    assert world.replaced == [None]


def test_takeover_that_somebody_else_wins_is_contention() -> None:
    """Of two that take over, the other one waits, and is woken as ever."""
    world = World(record=FOUND, hears=ALWAYS)
    outcome = world.run(
        after(4, TAKEABLE, granted()), wait=30, pauses=[0.1] * 9, is_gone=lambda _: True
    )
    assert isinstance(outcome, Grant)
    assert world.replaced == [None, "theirs", None, "theirs", None]
    assert world.wanted == [False, False, True, True, True]
