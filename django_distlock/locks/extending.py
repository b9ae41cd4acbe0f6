"""How a lease is extended by its holder: the store is asked until it knows.

What the heartbeat does by itself is in `state`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ..core.durations import Duration, ttl_seconds
from ..core.errors import LockError
from ..core.records import Grant, Unknown
from ..signals import lock_extended
from .acquire import insist
from .state import GONE, Holding


def extend(holding: Holding, ttl: Duration | None) -> None:
    """Make a lease end so many seconds from now: see `Lease.extend`."""
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
            # While an earlier question had no answer, or just now: it is told, and stays so.
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
    # Seen as lost by anybody, it stays lost, whatever the store says now.
    is_late = holding.monotonic() >= deadline
    if not isinstance(answer, Grant) or holding.state == "lost" or is_late:
        why = GONE if answer is None else "no answer came before its deadline"
        holding.lose(why, tells=False)
    holding.deadline = deadline
    holding.renewing.renewed(sent_at, holding.counted(answer.ttl))
    return answer, slack


def ask_to_extend(holding: Holding, ttl: float | None, bound: float) -> Grant | Unknown | None:
    """Ask the store once, and remember where it does not answer."""
    answered = False
    try:
        # With a ttl in the grant: an argument of None would mean that of the last extend.
        answer = holding.store.extend(replace(holding.grant, ttl=ttl), bound=bound)
        answered = True
        return answer
    finally:
        if not answered:
            holding.unheard = holding.counted(ttl)


def _left(holding: Holding, deadline: float) -> float | None:
    """Return the seconds until a deadline; None: there is none."""
    return None if deadline == math.inf else max(0.0, deadline - holding.monotonic())
