"""Measure for one exporter what the signals report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from django.dispatch import Signal

from ...core.errors import BackendUnavailable, LockNotAcquired
from ...core.keys import UNIQUE_PREFIX
from ...locks.state import GONE, OVER_AT_LAST
from ...signals import (
    fence_rejected,
    lock_acquired,
    lock_bypassed,
    lock_extended,
    lock_forced,
    lock_lost,
    lock_not_acquired,
    lock_released,
    lock_taken_over,
    work_requeued,
    work_skipped,
)
from .instruments import (
    ACQUIRE,
    BLOCKED,
    BYPASSED,
    FORCED,
    HOLD,
    LOST,
    REJECTED,
    REQUEUED,
    SKIPPED,
    SLACK,
    TAKEN_OVER,
    WAIT,
    Instrument,
)
from .prefixes import Prefixes

#: Values of the label `outcome`.
OUTCOMES: Final = (
    "acquired", "conflict", "timeout", "standby", "unavailable", "cancelled", "error",
)  # fmt: skip
#: Values of the label `cause`.
CAUSES: Final = ("deadline", "max_lifetime", "gone", "no_answer")
#: Values of the label `reason`.
REASONS: Final = ("conflict", "unavailable", "error")
#: Values of the label `reason` of work that did not run.
SKIPS: Final = ("conflict", "unavailable", "queued")
#: The same of work that went back to its queue.
REQUEUES: Final = ("conflict", "unavailable")

#: Counters of rare events, with the values of their last label.
_RARE: Final[Mapping[Instrument, tuple[str, ...]]] = {
    ACQUIRE: OUTCOMES, LOST: CAUSES, BYPASSED: REASONS, SKIPPED: SKIPS, REQUEUED: REQUEUES,
    REJECTED: (), TAKEN_OVER: (), FORCED: (),
}  # fmt: skip


class Exporter(Protocol):
    """Takes measurements. Its methods are called in any thread, and must be fast."""

    def add(self, instrument: Instrument, *labels: str, by: int = 1) -> None:
        """Add to a counter; `by=0` shows the counter before its first event."""

    def observe(self, instrument: Instrument, value: float, *labels: str) -> None:
        """Put a value into a histogram."""


def hear(receivers: Sequence[tuple[Signal, Any]], uid: str) -> Callable[[], None]:
    """Connect receivers, unless others have this `uid`; return the function that disconnects."""
    for signal, receive in receivers:
        signal.connect(receive, weak=False, dispatch_uid=uid)

    def end() -> None:
        for signal, _receive in receivers:
            signal.disconnect(dispatch_uid=uid)

    return end


class Recorder:
    """Receives the signals, and passes their measurements to an exporter."""

    def __init__(self, exporter: Exporter, prefixes: Prefixes):
        self._to = exporter
        self._prefixes = prefixes
        self._seen: tuple[int, set[tuple[str, str]]] = (0, set())

    def receivers(self) -> Sequence[tuple[Signal, Any]]:
        """Return the signals, each with its receiver."""
        return (
            (lock_acquired, self._acquired),
            (lock_not_acquired, self._not_acquired),
            (lock_bypassed, partial(self._refused, BYPASSED)),
            (work_skipped, self._skipped),
            (work_requeued, partial(self._refused, REQUEUED)),
            (lock_extended, self._extended),
            (lock_released, self._released),
            (lock_lost, self._lost),
            (lock_taken_over, partial(self._count, TAKEN_OVER)),
            (lock_forced, partial(self._count, FORCED)),
            (fence_rejected, partial(self._count, REJECTED)),
        )

    def _acquired(self, *, alias: str, key: str, waited: float, **_: Any) -> None:
        prefix = self._seen_prefix(alias, key)
        self._to.add(ACQUIRE, alias, prefix, "acquired")
        self._to.observe(WAIT, waited, alias, prefix)

    def _not_acquired(
        self, *, alias: str, key: str, waited: float, cause: object, **more: Any
    ) -> None:
        prefix = self._seen_prefix(alias, key)
        self._to.add(ACQUIRE, alias, prefix, outcome_of(cause, more.get("wait")))
        self._to.observe(WAIT, waited, alias, prefix)
        if not isinstance(cause, LockNotAcquired) or cause.held_for is None or cause.settled:
            return
        # Only for holders that are expected to end: leaders and queued tasks keep the key.
        if not (cause.holder is None or cause.holder.leads or cause.holder.is_queued):
            self._to.observe(BLOCKED, cause.held_for, alias, prefix)

    def _skipped(self, *, alias: str, key: str, cause: object, **_: Any) -> None:
        reason = reason_of(cause)
        if reason == "conflict" and key.startswith(UNIQUE_PREFIX):
            reason = "queued"
        self._to.add(SKIPPED, alias, self._prefixes.of(key), reason)

    def _refused(
        self, instrument: Instrument, *, alias: str, key: str | None, cause: object, **_: Any
    ) -> None:
        self._to.add(instrument, alias, self._prefixes.of(key), reason_of(cause))

    def _extended(
        self, *, alias: str, key: str, slack: float | None, cause: object, **_: Any
    ) -> None:
        # A process that loads leases may never acquire one.
        prefix = self._seen_prefix(alias, key)
        if cause is None and slack is not None:
            self._to.observe(SLACK, slack, alias, prefix)

    def _released(
        self, *, alias: str, key: str, held_for: float, released: bool, cause: object, **_: Any
    ) -> None:
        # A release that failed may be tried again.
        if released or cause is None:
            self._to.observe(HOLD, held_for, alias, self._prefixes.of(key))

    def _lost(self, *, alias: str, key: str, cause: str, **_: Any) -> None:
        self._to.add(LOST, alias, self._prefixes.of(key), cause_of(cause))

    def _count(self, instrument: Instrument, *, alias: str, key: str, **_: Any) -> None:
        self._to.add(instrument, alias, self._prefixes.of(key))

    def _seen_prefix(self, alias: str, key: str) -> str:
        """Return the label of a key; at its first use, show the counters of rare events with 0.

        A counter that first appears with its first loss has no increase, so no alarm sees it.
        """
        prefix = self._prefixes.of(key)
        pid, seen = self._seen
        if pid != os.getpid():
            # A forked process exports its own counters.
            seen = set()
            self._seen = os.getpid(), seen
        if (alias, prefix) not in seen:
            seen.add((alias, prefix))
            for instrument, values in _RARE.items():
                if not values:
                    self._to.add(instrument, alias, prefix, by=0)
                for value in values:
                    self._to.add(instrument, alias, prefix, value, by=0)
        return prefix


def outcome_of(cause: object, wait: float | None) -> str:
    """Return the `outcome` of an acquire without a grant; `wait`: its limit in seconds."""
    if isinstance(cause, LockNotAcquired):
        if cause.holder is not None and cause.holder.leads:
            return "standby"
        return "conflict" if wait == 0 else "timeout"
    if isinstance(cause, BackendUnavailable):
        return "unavailable"
    if isinstance(cause, (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)):
        return "cancelled"
    return "error"


def reason_of(cause: object) -> str:
    """Return the `reason` of a block that ran without its lock."""
    if isinstance(cause, LockNotAcquired):
        return "conflict"
    return "unavailable" if isinstance(cause, BackendUnavailable) else "error"


def cause_of(sentence: str) -> str:
    """Return the `cause` of a loss from the sentence in the signal."""
    if sentence == GONE:
        return "gone"
    if sentence == OVER_AT_LAST:
        return "max_lifetime"
    # "3 renewals in a row …": lost before its deadline.
    return "no_answer" if sentence.endswith("had no answer") else "deadline"
