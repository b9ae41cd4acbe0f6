"""The algorithm of waiting, driven by hand: no clock, no store, no sleep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_distlock.core.acquiring import Attempt, GiveBack, LineUp, Pause, Read, Reply, acquiring
from django_distlock.core.errors import BackendUnavailable, LockError
from django_distlock.core.pacing import (
    FEW,
    OFTEN,
    SAFETY_SECONDS,
    SHORTEST_PAUSE,
    Outcome,
    Pacing,
)
from django_distlock.core.records import Contended, Grant, Holder, Record

WHEN = datetime(2026, 1, 2, tzinfo=UTC)
BUSY = Contended(busy=True)
HELD = Contended(fence=1, free_at=WHEN + timedelta(hours=1), observed_at=WHEN)
DOWN = BackendUnavailable("down")
START = 1000.0


def granted(ttl: float | None = 10.0) -> Grant:
    """Make a grant."""
    return Grant("key", "token", 1, ttl, WHEN, None)


def held_for(seconds: float) -> Contended:
    """Make an answer that says when the key becomes free."""
    return Contended(fence=1, free_at=WHEN + timedelta(seconds=seconds), observed_at=WHEN)


@dataclass
class World:
    """A clock, and a store that takes `latency` seconds to answer.

    Attributes:
        slow: How long the first attempt takes instead.
        in_front: Seconds until those in front in the queue are done; 0: nobody is.
        hears: From when on, and until when, wake-ups come.
        record: What a read finds.
    """

    latency: float = 0.0
    slow: float = 0.0
    in_front: float = 0.0
    hears: tuple[float, float] = (math.inf, math.inf)
    record: Record | None = None
    now: float = START
    outcome: Outcome | None = None
    tries: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    given_back: list[Grant] = field(default_factory=list)
    did: list[str] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    replaced: list[str | None] = field(default_factory=list)

    def run(
        self,
        *answers: Outcome,
        wait: float | None,
        pauses: float | list[float] | Iterator[float] = 0.5,
        safety: float | None = SAFETY_SECONDS,
        **more: Any,
    ) -> World:
        """Drive the generator to its end; the last answer goes on, and so does a single pause."""
        every = itertools.repeat(pauses) if isinstance(pauses, float) else iter(pauses)
        steps = acquiring(now=self.now, wait=wait, pacing=Pacing(every, safety), **more)
        step = next(steps)
        while True:
            outcome, queued = None, False
            self.did.append(type(step).__name__)
            if isinstance(step, Attempt):
                number = len(self.tries)
                outcome = answers[min(number, len(answers) - 1)]
                self.bounds.append(step.bound)
                self.wanted.append(step.wanted)
                self.replaced.append(step.replace)
                self.now += self.latency if number else self.latency + self.slow
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
                self.outcome = end.value
                return self


GRANT, SHORT = granted(), granted(ttl=1.0)
VAIN = LockError("in vain")
ALWAYS = (0.0, math.inf)


def case(name: str, *answers: Outcome, world: dict[str, Any] | None = None, **more: Any) -> Any:
    """Describe a run by what the store answers, the arguments, and what `sees` says it has done.

    The outcome is the last answer, where `sees` names no other.
    """
    sees = {"outcome": answers[-1], **more.pop("sees")}
    return pytest.param(answers, world or {}, more, sees, id=name)


WAITS = [
    case("free key takes one attempt", GRANT, wait=5, sees={"tries": [0], "pauses": []}),
    case("no time to wait is time for an attempt", GRANT, wait=0, sees={"did": ["Attempt"]}),
    case(
        "last attempt is at the deadline", HELD, wait=1.0, pauses=[0.3, 0.6, 10],
        sees={"tries": [0, 0.3, 0.9, 1.0]},
    ),
    case("last attempt can win", HELD, GRANT, wait=0.5, pauses=60.0, sees={"tries": [0, 0.5]}),
    case(
        "slow attempt is followed by a last one", HELD, wait=1.0, world={"slow": 2.0},
        sees={"tries": [2, 2], "pauses": [0]},
    ),
    case(
        "answer far behind the deadline is the last", HELD, wait=1.0, world={"slow": 2.1},
        sees={"tries": [2.1]},
    ),
    case(
        "answer far behind the deadline that says nothing is not", BUSY, wait=1.0,
        world={"slow": 2.1}, sees={"tries": [2.1, 2.1]},
    ),
    case(
        "store that used up the wait without an answer is not asked again", DOWN, wait=1.0,
        world={"slow": 1.5}, sees={"tries": [1.5]},
    ),
    case(
        "pause ends when the key becomes free", held_for(0.25), GRANT, wait=10, pauses=5.0,
        sees={"pauses": [0.25]},
    ),
    case(
        "pause is no longer than the backoff", held_for(60), GRANT, wait=10,
        sees={"pauses": [0.5]},
    ),
    case(
        "key that should be free already is tried at once", held_for(-3), GRANT, wait=10,
        sees={"pauses": [0]},
    ),
    case(
        "wait for ever goes on", *[HELD] * 500, GRANT, wait=None, pauses=3600.0,
        sees={"pauses": [3600] * 500},
    ),
    case(
        "retries run out before the deadline", HELD, wait=None, pauses=[0.1, 0.1],
        sees={"tries": [0, 0.1, 0.2]},
    ),
    case("store that comes back grants", DOWN, DOWN, GRANT, wait=10, sees={"tries": [0, 0.5, 1]}),
    case("store that stays down is the result", HELD, DOWN, wait=1, sees={"tries": [0, 0.5, 1]}),
    case("contention after trouble is the result", DOWN, HELD, wait=1, sees={}),
    case(
        "error that is no outage ends the wait", HELD, VAIN, wait=None, sees={"tries": [0, 0.5]}
    ),
    case(
        "bound is what is left and at most a second", DOWN, wait=1.5, pauses=0.7,
        sees={"bounds": [1, 0.8, 0.1, 0]},
    ),
    case(
        "bound is a second for who waits for ever", BUSY, GRANT, wait=None, sees={"bounds": [1, 1]}
    ),
    case(
        "bound is never below zero", BUSY, wait=1.0, world={"slow": 9.0}, sees={"bounds": [1, 0]}
    ),
]  # fmt: skip

MARGINS = [
    case(
        "busy holder is known without a margin", Contended(busy=True, fence=3), wait=0, margin=1.0,
        sees={"tries": [0]},
    ),
    # At the deadline a store may have no time to say who holds the key: it just did.
    case(
        "last attempt without time counts less than the one before", HELD, HELD, BUSY, wait=2.0,
        pauses=[0.9, 60], margin=1.0, sees={"outcome": HELD, "tries": [0, 0.9, 2]},
    ),
]  # fmt: skip

LATE = [
    case(
        "grant that came after its own end is given back", SHORT, GRANT, wait=10,
        world={"slow": 1.0}, sees={"given_back": [SHORT], "pauses": [0.5]},
    ),
    case(
        "grant that came just in time is used", SHORT, wait=0, world={"slow": 0.999},
        sees={"given_back": []},
    ),
    case("lock without expiry is never late", granted(None), wait=0, world={"slow": 1e6}, sees={}),
    case(
        "grant is measured from the attempt that got it", HELD, HELD, HELD, SHORT, wait=10,
        pauses=2.0, sees={"given_back": []},
    ),
]  # fmt: skip

QUEUES = [
    case(
        "waiter queues up once behind its first attempt", HELD, wait=0.5, pauses=0.4,
        sees={"did": ["Attempt", "LineUp", "Pause", "Attempt", "Pause", "Attempt"]},
    ),
    case(
        "who may try only once does not queue up", HELD, wait=0, others_wait=lambda: True,
        world={"in_front": 3}, sees={"did": ["Attempt"]},
    ),
    case(
        "newcomer comes behind those who wait", GRANT, wait=5, others_wait=lambda: True,
        world={"in_front": 2.0}, sees={"did": ["LineUp", "Attempt"], "tries": [2]},
    ),
    # The one in front has left: it was granted, or has given up, and the key may be free.
    case(
        "who becomes first tries at once", HELD, GRANT, wait=5, world={"in_front": 2.0},
        sees={"did": ["Attempt", "LineUp", "Attempt"], "tries": [0, 2]},
    ),
    case(
        "who never becomes first tries at the deadline", HELD, GRANT, wait=1.5,
        world={"in_front": 60}, sees={"tries": [0, 1.5], "bounds": [1, 0]},
    ),
    case(
        "newcomer who never becomes first tries at the deadline", GRANT, wait=1.5,
        others_wait=lambda: True, world={"in_front": 60}, sees={"tries": [1.5], "bounds": [0]},
    ),
]  # fmt: skip

WOKEN = [
    # The first attempt writes nothing; the one behind the subscription asks to be woken.
    case(
        "attempt marks the grant once wake-ups come", HELD, HELD, GRANT, wait=20,
        world={"hears": ALWAYS},
        sees={
            "did": ["Attempt", "LineUp", "Attempt", "Pause", "Attempt"],
            "tries": [0, 0, SAFETY_SECONDS],
            "wanted": [False, True, True],
        },
    ),
    case(
        "woken waiter asks seldom", HELD, wait=12.0, pauses=0.1, world={"hears": ALWAYS},
        sees={
            "tries": [0, 0, SAFETY_SECONDS, 2 * SAFETY_SECONDS, 12],
            "wanted": [False, True, True, True, True],
        },
    ),
    # Expiry is called out by nobody: its time is known.
    case(
        "woken waiter tries when the key becomes free", HELD, held_for(1.25), GRANT, wait=20,
        world={"hears": ALWAYS}, sees={"pauses": [1.25]},
    ),
    case(
        "waiter who hears no more goes back to backoff", HELD, wait=6.0, pauses=0.4,
        world={"hears": (0.0, 5.0)},
        sees={
            "pauses": [5, 0.4, 0.4, 0.2],
            "wanted": [False, True, True, True, True, True],
        },
    ),
    case(
        "waiter who begins to hear sleeps for longer", HELD, wait=7.0, pauses=0.3,
        world={"hears": (0.5, math.inf)}, sees={"pauses": [0.3, 0.3, 5, 1.4]},
    ),
    case(
        "without a safety net the pauses stay", HELD, wait=1.0, pauses=0.4, safety=None,
        world={"hears": ALWAYS}, sees={"pauses": [0.4, 0.4, 0.2]},
    ),
]  # fmt: skip

RESTS = [
    case(
        "who has just given a wanted key up lets others have it first", GRANT, wait=5, rest=0.3,
        sees={"did": ["Pause", "Attempt"], "pauses": [0.3]},
    ),
    case("rest is cut to the wait", GRANT, wait=0.2, rest=0.3, sees={"tries": [0.2]}),
    case("no rest is no pause", GRANT, wait=5, rest=0.0, sees={"did": ["Attempt"]}),
    case("rest that is past is no pause", GRANT, wait=5, rest=-1.0, sees={"did": ["Attempt"]}),
    case("single attempt does not rest", GRANT, wait=0, rest=0.3, sees={"did": ["Attempt"]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "world", "more", "sees"), [*WAITS, *MARGINS, *LATE, *QUEUES, *WOKEN, *RESTS]
)
def test_waiting(
    answers: tuple[Outcome, ...], world: dict[str, Any], more: Any, sees: dict[str, Any]
) -> None:
    """What is done, when, and what comes of it, as the name of the case says."""
    done = World(**world).run(*answers, **more)
    assert done.outcome is sees.pop("outcome")
    for name, expected in sees.items():
        seen = getattr(done, name)
        is_time = name in ("tries", "pauses", "bounds")
        assert seen == (pytest.approx(expected) if is_time else expected), name


@pytest.mark.parametrize("outcome", [HELD, BUSY, DOWN])
def test_wait_zero_tries_exactly_once(outcome: Outcome) -> None:
    """With no time to wait there is one attempt and no pause, whatever it answers."""
    world = World().run(outcome, wait=0)
    assert world.outcome is outcome
    assert world.did == ["Attempt"]


@pytest.mark.parametrize(("wait", "tries"), [(0, 5), (0.6, 5), (1.0, 4)])
def test_unclear_answer_is_asked_for_again_in_the_margin(wait: float, tries: int) -> None:
    """Somebody is in the way of the store: nobody knows more until the margin is over."""
    world = World().run(BUSY, wait=wait, pauses=0.3, margin=1.0)
    assert world.outcome is BUSY
    assert world.tries[-1] == pytest.approx(1.0)
    assert len(world.tries) >= tries
    # Also whoever has no time to wait gives the store some.
    assert max(world.bounds) > 0


@pytest.mark.parametrize("clear", [HELD, DOWN, GRANT, replace(BUSY, guarded=True)])
def test_clear_answer_ends_the_margin(clear: Outcome) -> None:
    """The first answer that says something is the last."""
    world = World().run(BUSY, clear, wait=0, pauses=[0.3, 0.3], margin=1.0)
    assert world.outcome is clear
    assert world.tries == pytest.approx([0.0, 2 * SHORTEST_PAUSE])


@pytest.mark.parametrize(
    ("outcome", "hears"),
    [
        (DOWN, False),
        (Contended(), False),
        (Contended(paused=True, free_at=WHEN, observed_at=WHEN), False),
        (Contended(paused=True, observed_at=WHEN), False),
        # Those whom the store was not asked to wake.
        (DOWN, True),
        (replace(HELD, paused=True), True),
        (Contended(paused=True), True),
        # Nobody holds it: a waiter to hold it alone comes first.
        (Contended(observed_at=WHEN), True),
    ],
)
def test_backoff_stays_where_nobody_knows_when(outcome: Outcome, *, hears: bool) -> None:
    """Paused or down: the next step of backoff counts, or the waiter would spin."""
    world = World(hears=ALWAYS) if hears else World()
    asked = 4 if hears else 3
    world.run(*[outcome] * asked, GRANT, wait=20, pauses=[0.1, 0.2, 0.4, 0.8])
    assert world.pauses == pytest.approx([0.1, 0.2, 0.4])


@pytest.mark.parametrize("hears", [False, True])
@pytest.mark.parametrize(
    "outcome",
    [
        BUSY,
        Contended(busy=True, free_at=WHEN, observed_at=WHEN),
        replace(HELD, busy=True, fence=None),
    ],
)
def test_what_another_transaction_holds_is_asked_for_soon(
    outcome: Contended, *, hears: bool
) -> None:
    """Most are over in moments; behind those that are not, pauses double up to the step."""
    world = World(hears=ALWAYS if hears else (math.inf, math.inf))
    world.run(*[outcome] * 6, GRANT, wait=20, pauses=[0.1] * 9)
    pauses = [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]
    assert world.pauses == pytest.approx(pauses[1:] if hears else pauses)


def taken(seconds: float, fence: int = 1) -> Contended:
    """Make an answer about a key that was taken so many seconds ago."""
    since = WHEN - timedelta(seconds=seconds)
    return replace(HELD, acquired_at=since, observed_at=WHEN, fence=fence)


def test_pause_is_no_longer_than_the_key_is_held_for() -> None:
    """What is held for moments is asked for again in moments, and what is held for long, seldom."""
    answers: list[Outcome] = [taken(0.02), taken(0.04), taken(0.2), taken(3), GRANT]
    world = World().run(*answers, wait=20, pauses=[0.1, 0.5, 0.15, 0.9])
    assert world.pauses == pytest.approx([0.02, 0.04, 0.15, 0.9])
    assert world.wanted == [False, True, True, True, True]


def test_who_has_missed_most_grants_asks_most_often() -> None:
    """So nobody loses for ever to those who have just come."""
    answers = [taken(0.06, fence) for fence in (1, 2, 2, 3, 4, 5, 6)]
    world = World().run(*answers, GRANT, wait=20, pauses=1.0)
    # Not without end: a hundred processes would ask the more often, the more they are.
    assert world.pauses == pytest.approx([0.06, 0.03, 0.03, 0.02, 0.015, 0.015, 0.015])
    assert World().run(taken(0.001), GRANT, wait=20, pauses=1.0).pauses == [SHORTEST_PAUSE]


def test_who_is_woken_in_vain_asks_by_itself_as_well() -> None:
    """Of many that are woken the quickest wins, and that need not be another one each time."""
    fences = [1, 1, *range(2, FEW + 2)]
    world = World(hears=ALWAYS)
    world.run(*(taken(0.12, each) for each in fences), GRANT, wait=99, pauses=1.0)
    assert world.pauses[:FEW] == [SAFETY_SECONDS] * FEW
    assert world.pauses[FEW:] == pytest.approx([0.12 / OFTEN])


def test_who_limits_retries_has_pauses_as_said() -> None:
    """They are counted on to pass."""
    world = World().run(taken(0.01), BUSY, GRANT, wait=20, pauses=[0.3, 0.4], safety=None)
    assert world.pauses == [0.3, 0.4]


def test_every_late_grant_is_given_back() -> None:
    """None of several stays behind; and the store was too slow, so it is no contention."""
    world = World(latency=0.2).run(granted(ttl=0.1), wait=1.0, pauses=0.1)
    assert isinstance(world.outcome, BackendUnavailable)
    assert (world.outcome.code, world.outcome.key) == ("network_timeout", "key")
    assert len(world.given_back) == len(world.tries) > 2


def test_backoff_steps_are_not_drawn_after_the_last_attempt() -> None:
    """The algorithm takes one step per pause, so `max_retries` counts attempts exactly."""
    drawn = []

    def steps() -> Iterator[float]:
        for number in itertools.count():
            drawn.append(number)
            yield 0.4

    World().run(HELD, wait=1.0, pauses=steps())
    assert drawn == [0, 1, 2]


@pytest.mark.parametrize("hears", [ALWAYS, (math.inf, math.inf)])
@pytest.mark.parametrize("in_front", [0.0, 0.1])
def test_retries_are_counted_exactly(hears: tuple[float, float], in_front: float) -> None:
    """`max_retries` are attempts after the first one, also for those who are woken."""
    world = World(hears=hears, in_front=in_front)
    world.run(HELD, wait=None, pauses=[0.1, 0.1], safety=None)
    assert len(world.tries) == 3


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
    world, asked = World(record=FOUND), list[Holder]()

    def is_gone(holder: Holder) -> bool:
        asked.append(holder)
        return True

    assert world.run(TAKEABLE, GRANT, wait=0, is_gone=is_gone).outcome is GRANT
    assert world.did == ["Attempt", "Read", "Attempt"]
    assert world.replaced == [None, "theirs"]
    assert asked == [PREVIOUS]


@pytest.mark.parametrize(
    ("outcome", "is_gone"),
    [
        (TAKEABLE, False),
        (BUSY, True),
        (DOWN, True),
        (replace(TAKEABLE, busy=True), True),
        (replace(TAKEABLE, paused=True), True),
        (replace(TAKEABLE, holder=None), True),
        (replace(TAKEABLE, expires_at=None, free_at=None), True),
        (replace(TAKEABLE, expires_at=TAKEABLE.free_at), True),
    ],
    ids=["alive", "busy", "down", "busy-held", "paused", "nobody", "no-expiry", "settled"],
)
def test_what_may_not_be_taken_over_is_waited_for(outcome: Outcome, *, is_gone: bool) -> None:
    """Nothing is read of what is alive, busy, paused, settled, without expiry, or nobody's."""
    world = World(record=FOUND).run(outcome, wait=1, is_gone=lambda _: is_gone)
    assert "Read" not in world.did
    assert world.replaced == [None] * len(world.tries)


@pytest.mark.parametrize(
    "record",
    [None, replace(FOUND, fence=5), replace(FOUND, expires_at=FOUND.free_at)],
    ids=["free", "granted anew", "settled"],
)
def test_another_grant_is_not_taken_over(record: Record | None) -> None:
    """What was granted, or settled, meanwhile is another's, or kept: nothing is proven of it."""
    world = World(record=record).run(TAKEABLE, wait=0, is_gone=lambda _: True)
    assert world.replaced == [None]


def test_takeover_that_somebody_else_wins_is_contention() -> None:
    """Of two that take over, the other one waits, and is woken as ever."""
    world = World(record=FOUND, hears=ALWAYS)
    world.run(*[TAKEABLE] * 4, GRANT, wait=30, pauses=[0.1] * 9, is_gone=lambda _: True)
    assert world.outcome is GRANT
    assert world.replaced == [None, "theirs", None, "theirs", None]
    assert world.wanted == [False, False, True, True, True]
