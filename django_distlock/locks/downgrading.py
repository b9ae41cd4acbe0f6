"""How a lease that holds its key alone shares it from now on, without a moment in between."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ..core import budgets
from ..core.errors import LockNotAcquired
from ..core.keys import new_token
from ..core.records import UNKNOWN, Grant, Unknown
from ..process.at_exit import held_here
from .acquire import insist
from .attempts import release_unanswered
from .state import GONE, Holding, hold_from


def downgrade(holding: Holding) -> None:
    """Share the key of a lease: see `Lease.downgrade`."""
    holding.alone(partial(_downgrade, holding))
    holding.keep_on()


def _downgrade(holding: Holding) -> None:
    holding.check(tells=False)
    before, store, sent_at, unanswered = holding.grant, holding.store, 0.0, 0
    # Behind an answer that was lost, it takes the place that it has by then.
    token = new_token()
    if before.shared:
        return

    def question(bound: float) -> Grant | Unknown | None:
        nonlocal sent_at, unanswered
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

    is_kept = False
    try:
        # The lease is not renewed meanwhile, and is to last.
        now = holding.monotonic()
        until = now + min(budgets.PATIENCE, (holding.deadline - now) / 2)
        answer = insist(store, question, until, holding.terms.retry)
        if answer is UNKNOWN and not holding.is_lost:
            raise refusal(
                "a transaction has locked the key. If the lease guards it, call downgrade()"
                " after its end"
            )
        if not isinstance(answer, Grant) or holding.is_lost:
            why = "no answer came before its deadline" if answer is UNKNOWN else GONE
            holding.lose(why, tells=False)
        held_here.rename(holding, token)
        holding.grant = replace(answer, stop_requested=before.stop_requested)
        holding.fence = answer.fence
        is_kept = True
    finally:
        if not is_kept:
            # It may have been granted, be it that no answer came or that a signal raised.
            release_unanswered(store, replace(before, token=token, shared=True))
    hold = hold_from(answer.acquired_at, holding.terms.hold, before.acquired_at)
    holding.terms = replace(holding.terms, hold=hold, permits=None)
    # What was asked with the token before concerns nobody any more.
    holding.unheard = before.ttl if unanswered and before.ttl is not None else math.inf
    holding.deadline = sent_at + holding.counted(answer.ttl)
    holding.renewing.renewed(sent_at, holding.counted(answer.ttl))
