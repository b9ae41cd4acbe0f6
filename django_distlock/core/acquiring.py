"""The algorithm of waiting for a key, without clock, store or sleep.

`acquiring()` yields what to do next and is sent what came of it. `locks/acquire.py` does that with
calls and with awaits; the algorithm exists once. No step is frozen: that is five times as slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeGuard

from .durations import MAX_BOUND
from .errors import BackendUnavailable, LockError
from .holders import Holder
from .pacing import Outcome, Pacing, leaves_mark
from .records import Contended, Grant, Record


@dataclass(slots=True)
class Attempt:
    """Try once, waiting at most `bound` seconds inside the store.

    Attributes:
        wanted: Let whoever ends the grant that is in the way wake this process, and leave the key
            to others for a moment.
        replace: Take the key over from this token.
    """

    bound: float
    wanted: bool = False
    replace: str | None = None


@dataclass(slots=True)
class LineUp:
    """Queue up behind the waiters of this process; go on when first, or at the time `until`.

    Also when the one in front has not asked the store for too long. Whoever is first then lets
    wake-ups come.
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
    """Release a grant that came too late to be used."""

    grant: Grant


Step = Attempt | LineUp | Read | Pause | GiveBack


@dataclass(slots=True)
class Reply:
    """What came of a step.

    Attributes:
        now: The caller's monotonic clock, in seconds, after the step.
        outcome: What an `Attempt` led to: an `Outcome`; None after the other steps.
        record: What a `Read` found; None: nothing, or no answer.
        queued: Whether somebody was in front when a `LineUp` began.
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
    """Try until granted or until `wait` is over; return the last attempt's outcome.

    The first attempt is made at once and the last one at the deadline, unless the store left one
    without an answer until behind it, answered it more than a second behind it, or said nothing
    about the key. Between them a caller sleeps until the earliest of: a wake-up, the moment the key
    becomes free, the next pause of `pacing`, the deadline. While wake-ups come, its `safety` takes
    the place of a pause, except behind a busy or paused answer, which leaves no mark for a wake-up.

    No wake-up is lost: the caller is in the queue, and wake-ups come, before the attempt that marks
    the grant in its way, and whatever comes behind the attempt ends the sleep.

    Args:
        now: The caller's monotonic clock, in seconds.
        wait: Seconds to keep trying; 0: one attempt; None: for ever.
        pacing: How long to pause, and how often.
        rest: Seconds to leave to others before the first attempt, unless that is the only one.
        others_wait: Whether waiters of this process are in front.
        is_gone: Whether a holder is provably gone, so that its key may be taken over at once.
        margin: Seconds from now in which a last answer that says nothing about the key is asked
            for again, where `wait` is shorter.
    """
    deadline = math.inf if wait is None else now + wait
    until = now + margin
    before: Outcome | None = None
    if rest > 0 and now < deadline:
        now = (yield Pause(min(rest, deadline - now))).now
    lined_up, listening = False, False
    pause: float | None = None
    # Whoever may take over from the dead looks first: those in front may have to wait for the ttl.
    if now < deadline and is_gone is None and others_wait():
        reply = yield LineUp(deadline)
        lined_up, now, listening = True, reply.now, reply.listening
    while True:
        is_last = now >= deadline
        bound = 0.0 if is_last else min(MAX_BOUND, deadline - now)
        outcome, now = yield from _trying(now, bound, wanted=lined_up, is_gone=is_gone)
        # Behind it by more than any wait in the store: it was on its way for that long.
        is_last = is_last or (now > deadline + MAX_BOUND and not _is_unclear(outcome))
        if is_last and _is_unclear(outcome):
            # It had no time to wait in the store, and the one before may have told more.
            known = before if leaves_mark(before) else outcome
            return (yield from _clear(known, now, until, pacing, is_gone=is_gone))
        # A store without an answer may have taken the time of the last attempt, too.
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
                pause = None  # It has been slept for, in the queue.
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
    """Try until the store says something about the key; return the last outcome."""
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
    """Try, and once more in the place of a holder that is gone; return the outcome and the time."""
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
        # The reply took longer than the lease lives: somebody else may hold the key by now.
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
    """Whether the key is held by somebody who is gone.

    What is settled was given up in order and is kept for its time; a lock without expiry ends by
    release alone.
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
