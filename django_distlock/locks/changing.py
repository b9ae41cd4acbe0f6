"""Extend or downgrade a lease at its holder's request. Renewals by the heartbeat are in `state`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ..core import durations
from ..core.durations import Duration, ttl_seconds
from ..core.errors import LockError, LockNotAcquired
from ..core.keys import new_token
from ..core.records import UNKNOWN, Grant, Unknown
from ..process.heartbeat import held_here
from ..signals import lock_extended
from .acquire import insist
from .attempts import release_unanswered
from .state import GONE, Holding, hold_from


def extend(holding: Holding, ttl: Duration | None) -> None:
    """Make a lease end `ttl` seconds from now: see `Lease.extend`."""
    answer, slack = holding.alone(partial(_extend, holding, ttl))
    holding.keep_on()
    holding.tell(lock_extended, ttl=answer.ttl, slack=slack, cause=None)


def _extend(holding: Holding, ttl: Duration | None) -> tuple[Grant, float | None]:
    """Return the answer, and the seconds that were left when it came."""
    holding.check(tells=False)
    longest = holding.store.config.max_ttl
    new = holding.terms.ttl if ttl is None else ttl_seconds(ttl, maximum=longest)
    before, sent_at, deadline = holding.deadline, 0.0, holding.deadline

    def question(bound: float) -> Grant | Unknown | None:
        nonlocal sent_at, deadline
        sent_at = holding.monotonic()
        deadline = sent_at + holding.counted(new)
        holding.shorten(deadline)
        if holding.is_lost:
            # Lost since an earlier attempt that got no answer. It is never extended after that.
            holding.lose(holding.why_over(), tells=False)
        return ask_to_extend(holding, new, bound)

    try:
        answer = insist(holding.store, question, before, holding.terms.retry)
    except LockError as error:
        holding.renew_soon()
        holding.tell(lock_extended, ttl=new, slack=_left(holding, before), cause=error)
        raise
    slack = _left(holding, before)
    if isinstance(answer, Grant):
        holding.grant = answer
    # If anybody has seen it as lost meanwhile, it stays lost, whatever the store says.
    is_late = holding.monotonic() >= deadline
    if not isinstance(answer, Grant) or holding.state == "lost" or is_late:
        why = GONE if answer is None else "no answer came before its deadline"
        holding.lose(why, tells=False)
    holding.deadline = deadline
    holding.renewing.renewed(sent_at, holding.counted(answer.ttl))
    return answer, slack


def ask_to_extend(holding: Holding, ttl: float | None, bound: float) -> Grant | Unknown | None:
    """Make one attempt to extend, and remember it if there is no answer."""
    answered = False
    try:
        # The ttl is passed in the grant, because the argument `ttl=None` means that of the grant.
        answer = holding.store.extend(replace(holding.grant, ttl=ttl), bound=bound)
        answered = True
        return answer
    finally:
        if not answered:
            holding.unheard = holding.counted(ttl)


def _left(holding: Holding, deadline: float) -> float | None:
    """Return the seconds until a deadline; None: there is none."""
    return None if deadline == math.inf else max(0.0, deadline - holding.monotonic())


def downgrade(holding: Holding) -> None:
    """Share the key, which is never free in between: see `Lease.downgrade`."""
    holding.alone(partial(_downgrade, holding))
    holding.keep_on()


def _downgrade(holding: Holding) -> None:
    holding.check(tells=False)
    before, store, sent_at, unanswered = holding.grant, holding.store, 0.0, 0
    is_granted = is_kept = False
    # All attempts use one token: after a lost answer, the next one finds its own place.
    token = new_token()
    if before.shared:
        return

    def question(bound: float) -> Grant | Unknown | None:
        nonlocal sent_at, unanswered, is_granted
        sent_at = holding.monotonic()
        unanswered += 1
        answer = store.acquire(
            before.key,
            token,
            before.ttl,
            holding.terms.holder,
            replace=before.token,
            permits=None,
            bound=bound,
        )
        # In this order: a signal's exception may come between any two of these lines.
        is_granted = isinstance(answer, Grant)
        unanswered -= 1
        if isinstance(answer, Grant):
            return answer
        if answer.paused:
            raise refusal("the key is paused")
        return UNKNOWN if answer.busy else None

    def refusal(why: str) -> LockNotAcquired:
        return LockNotAcquired(
            f"The lease on {before.key!r} cannot be shared: {why}.",
            key=before.key,
            holder=holding.terms.holder,
        )

    try:
        # The lease is not renewed meanwhile, so only a half of what is left is used.
        now = holding.monotonic()
        until = now + min(durations.PATIENCE, (holding.deadline - now) / 2)
        answer = insist(store, question, until, holding.terms.retry)
        if answer is UNKNOWN and not holding.is_lost:
            raise refusal("a transaction has locked the key")
        if not isinstance(answer, Grant) or holding.is_lost:
            why = "no answer came before its deadline" if answer is UNKNOWN else GONE
            holding.lose(why, tells=False)
        held_here.rename(holding, token)
        holding.grant = replace(answer, stop_requested=before.stop_requested)
        holding.fence = answer.fence
        is_kept = True
    finally:
        if not is_kept:
            # If the store has shared the key, or still does, the release below frees it.
            if unanswered or is_granted:
                holding.given_up = True
            # It may have been granted: there was no answer, or a signal's handler raised.
            release_unanswered(store, replace(before, token=token, shared=True))
    hold = hold_from(answer.acquired_at, holding.terms.hold, before.acquired_at)
    holding.terms = replace(holding.terms, hold=hold, permits=None)
    # Requests with the token before have no effect any more.
    holding.unheard = before.ttl if unanswered and before.ttl is not None else math.inf
    holding.deadline = sent_at + holding.counted(answer.ttl)
    holding.renewing.renewed(sent_at, holding.counted(answer.ttl))
