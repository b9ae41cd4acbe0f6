"""The algorithm of waiting for a key, without a clock, a store or a sleep.

`acquiring()` yields steps and is sent their results. `locks/acquire.py` carries the steps out, sync
and async, so the algorithm exists only once. The steps are not frozen dataclasses, because creating
those takes five times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeGuard

from .durations import MAX_BOUND
from .errors import BackendUnavailable, LockError
from .pacing import Outcome, Pacing, leaves_mark
from .records import Contended, Grant, Holder, Record


@dataclass(slots=True)
class Attempt:
    """Make one attempt, waiting at most `bound` seconds inside the store.

    Attributes:
        wanted: Mark the grant in the way: its end wakes this process, and whoever ends it leaves
            the key to others for a moment.
        replace: Take the key over from this token.
    """

    bound: float
    wanted: bool = False
    replace: str | None = None


@dataclass(slots=True)
class LineUp:
    """Join the queue of this process; go on when first, or at the time `until`.

    Go on as well if the first waiter has made no attempt for too long. The first one subscribes to
    wake-ups.
    """

    until: float


@dataclass(slots=True)
class Read:
    """Read the record of the key."""


@dataclass(slots=True)
class Pause:
    """Sleep for `seconds`, or until woken."""

    seconds: float


@dataclass(slots=True)
class GiveBack:
    """Release a grant whose answer came too late."""

    grant: Grant


Step = Attempt | LineUp | Read | Pause | GiveBack


@dataclass(slots=True)
class Reply:
    """The result of a step.

    Attributes:
        now: The caller's monotonic clock, in seconds, after the step.
        outcome: The `Outcome` of an `Attempt`; None after other steps.
        record: The result of a `Read`; None: no record, or no answer.
        listening: Whether wake-ups come.
        queued: Whether another waiter was in front when a `LineUp` began.
    """

    now: float
    outcome: Any = None
    record: Record | None = None
    listening: bool = False
    queued: bool = False


Steps = Generator[Step, Reply, Outcome]


def acquiring(
    *,
    now: float,
    wait: float | None,
    pacing: Pacing,
    rest: float = 0.0,
    others_wait: Callable[[], bool] = lambda: False,
    is_gone: Callable[[Holder], bool] | None = None,
    margin: float = 0.0,
) -> Steps:
    """Make attempts until the key is granted or `wait` is over; return the last outcome.

    The first attempt is made at once, and the last one at the deadline. The exceptions are an
    attempt that the store leaves without an answer until after the deadline, that it answers more
    than a second after it, or whose answer says nothing about the key.

    Between attempts a caller sleeps until the earliest of: a wake-up, the moment the key becomes
    free, the next pause of `pacing`, the deadline. While wake-ups come, the longer `safety` of
    `pacing` replaces its pauses. A busy or paused answer is different: it leaves no mark in the
    store, so no wake-up follows.

    No wake-up is lost. The caller is in the queue and subscribed to wake-ups before the attempt
    that marks the grant in its way, and a wake-up after that attempt ends the sleep.

    Args:
        now: The caller's monotonic clock, in seconds.
        wait: Seconds to keep trying; 0: one attempt; None: for ever.
        pacing: How long to pause, and how often.
        rest: Seconds to leave to others before the first attempt, unless that is the only one.
        others_wait: Whether other waiters of this process are in front.
        is_gone: Whether a holder is provably gone, so that its key may be taken over at once.
        margin: Seconds from now in which a last answer that says nothing about the key is asked
            for again, even if `wait` is shorter.
    """
    deadline = math.inf if wait is None else now + wait
    until = now + margin
    before: Outcome | None = None
    if rest > 0 and now < deadline:
        now = (yield Pause(min(rest, deadline - now))).now
    lined_up, listening = False, False
    pause: float | None = None
    # With `steal_if_dead`, the first attempt comes first, because the waiters in front may have to
    # wait for the ttl of a dead holder.
    if now < deadline and is_gone is None and others_wait():
        reply = yield LineUp(deadline)
        lined_up, now, listening = True, reply.now, reply.listening
    while True:
        is_last = now >= deadline
        bound = 0.0 if is_last else min(MAX_BOUND, deadline - now)
        outcome, now = yield from _trying(now, bound, wanted=lined_up, is_gone=is_gone)
        # More than any wait inside the store after the deadline: the network or store was slow.
        is_last = is_last or (now > deadline + MAX_BOUND and not _is_unclear(outcome))
        if is_last and _is_unclear(outcome):
            # The last attempt could not wait inside the store. The one before may have said more.
            known = before if leaves_mark(before) else outcome
            return (yield from _clear(known, now, until, pacing, is_gone=is_gone))
        # A store without an answer may have used up the time of the last attempt.
        has_time = now < deadline or not isinstance(outcome, BackendUnavailable)
        if is_last or _is_final(outcome) or not has_time:
            return outcome
        before = outcome
        pacing.see(outcome)
        if pause is None and (pause := pacing.step()) is None:
            return outcome
        if not lined_up:
            reply = yield LineUp(deadline)
            lined_up, now, listening = True, reply.now, reply.listening
            if reply.queued:
                pause = None  # The time in the queue counts as the pause.
                continue
            if listening and pacing.safety is not None:
                continue
        seconds = pacing.pause(outcome, pause, listening=listening)
        reply = yield Pause(max(0.0, min(seconds, deadline - now)))
        now, listening, pause = reply.now, reply.listening, None


def _clear(
    outcome: Outcome,
    now: float,
    until: float,
    pacing: Pacing,
    *,
    is_gone: Callable[[Holder], bool] | None,
) -> Generator[Step, Reply, Outcome]:
    """Make attempts until the store says something about the key; return the last outcome."""
    while _is_unclear(outcome) and now < until and (step := pacing.step()) is not None:
        pacing.see(outcome)
        pause = pacing.pause(outcome, step, listening=False)
        now = (yield Pause(min(pause, until - now))).now
        bound = max(0.0, min(MAX_BOUND, until - now))
        outcome, now = yield from _trying(now, bound, wanted=False, is_gone=is_gone)
    return outcome


def _trying(
    now: float, bound: float, *, wanted: bool, is_gone: Callable[[Holder], bool] | None
) -> Generator[Step, Reply, tuple[Outcome, float]]:
    """Make an attempt, and another one if the holder is gone; return the outcome and the time."""
    sent_at = now
    reply = yield Attempt(bound, wanted=wanted)
    outcome = reply.outcome
    if is_gone is not None and _may_be_taken_over(outcome, is_gone):
        reply = yield Read()
        record = reply.record
        if record is not None and record.fence == outcome.fence and not record.is_settled:
            sent_at = reply.now
            reply = yield Attempt(bound, wanted=wanted, replace=record.token)
            outcome = reply.outcome
    if (
        isinstance(outcome, Grant)
        and outcome.ttl is not None
        and reply.now >= sent_at + outcome.ttl
    ):
        # The answer took longer than the ttl: somebody else may hold the key by now.
        late = BackendUnavailable(
            f"The store took {reply.now - sent_at:.1f} s to grant {outcome.key!r}, for"
            f" {outcome.ttl:g} s. The lease had already expired and was released.",
            key=outcome.key,
            code="network_timeout",
        )
        reply = yield GiveBack(outcome)
        return late, reply.now
    return outcome, reply.now


def _may_be_taken_over(outcome: Outcome, is_gone: Callable[[Holder], bool]) -> TypeGuard[Contended]:
    """Whether the holder of the key is gone.

    A settled key was released, and stays taken for its window. A lock without expiry ends only by a
    release.
    """
    return (
        leaves_mark(outcome)
        and outcome.holder is not None
        and outcome.expires_at is not None
        and outcome.expires_at != outcome.free_at
        and is_gone(outcome.holder)
    )


def _is_final(outcome: Outcome) -> bool:
    if isinstance(outcome, Grant):
        return True
    return isinstance(outcome, LockError) and not isinstance(outcome, BackendUnavailable)


def _is_unclear(outcome: Outcome) -> bool:
    return isinstance(outcome, Contended) and outcome.is_unclear
