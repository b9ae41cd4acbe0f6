"""Owners of renewed leases without a block: such a lease is renewed while its object lives.

Once the object is dropped without a release, nobody can release it. No Python code runs at that
moment: a weak reference ends the renewals at the next heartbeat, and another thread warns.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import dataclass

from ..database.connections import when_gone
from ..process.heartbeat import held_here
from . import blocks
from .lease import Lease

logger = logging.getLogger("django_distlock")

DROPPED = "its owner dropped it without a release"


@dataclass(frozen=True, slots=True)
class Place:
    """The line of the project that acquired a lease."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def callers_level() -> int:
    """Return the `stacklevel` of the line outside this package, so that a warning names it."""
    level, frame = 1, sys._getframe(1)
    ours = __name__.rpartition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__package__") == ours:
        level, frame = level + 1, frame.f_back
    return level


def callers_place() -> Place:
    """Return the line outside this package that called it."""
    frame = sys._getframe(callers_level() - 1)
    module = frame.f_globals.get("__name__", "?")
    return Place(frame.f_code.co_filename, frame.f_lineno, module)


class Owner:
    """Keeps a lease renewed while the `Lease` object lives."""

    def __init__(self, lease: Lease, place: Place):
        self._place, self._release = place, lease._release
        # A callback may refer to its lease. If the holding kept the callbacks, these would keep the
        # lease alive, so the lease keeps them.
        lease._callbacks = lease._holding.losses.entrust()
        self._gone = when_gone(lease, self._tell)

    @property
    def is_open(self) -> bool:
        """Whether the `Lease` object lives."""
        return self._gone() is not None

    def _tell(self) -> None:
        """Warn, in the worker's thread, that the lease expires by itself."""
        holding, place = self._release.holding, self._place
        has_ended = holding not in held_here or holding.state != "held" or holding.given_up
        # If the acquire was interrupted, the block releases the lease.
        is_ending = any(each.release is self._release for each in list(blocks.every))
        if has_ended or is_ending or holding.block is not self or holding.pid != os.getpid():
            return
        holding.lost_by = DROPPED
        ends = "is no longer renewed, and expires after its ttl"
        if not holding.store.supports_ttl:
            ends = "stays held until this process ends"
        text = f"The lease on {holding.key!r} (fence {holding.fence}) {ends}: {DROPPED}"
        logger.warning("%s (%s)", text, place, extra=holding.log_fields("dropped"))
        warnings.warn_explicit(
            f"{text}. Release it in a finally, or hold the lock by a with statement.",
            ResourceWarning, place.file, place.line, place.module,
            source=holding,
        )  # fmt: skip
