"""How it stands with the locks of this process, right now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from django.core.exceptions import ImproperlyConfigured

from ...handler import lock_backends
from ...locks import blocks
from ...locks.release import Release
from ...process.at_exit import held_here
from ...process.heartbeat import heartbeat_of
from .instruments import ACTIVE, LAG, OVERDUE, PROCESS_GAUGES, WAITING, Instrument


def process_numbers() -> Mapping[Instrument, Mapping[tuple[str, ...], float]]:
    """Return the values of each gauge of this process, by labels. It asks no store."""
    leases = [each.holding for each in held_here.all() if isinstance(each, Release)]
    active = Counter(each.backend for each in leases if each.held)
    # What the blocks hold that were entered in this process, and not left.
    entered = [each.lease for each in list(blocks.every) if not each.inner and each.is_open]
    overdue = Counter(each.backend for each in entered if each is not None and each.is_lost)
    found: dict[Instrument, dict[tuple[str, ...], float]] = {each: {} for each in PROCESS_GAUGES}
    for alias in lock_backends:
        try:
            store = lock_backends[alias]
        except ImproperlyConfigured:
            continue  # `check` says why.
        found[ACTIVE][alias,] = active[alias]
        found[OVERDUE][alias,] = overdue[alias]
        found[WAITING][alias,] = len(store.queues.all())
        found[LAG][alias,] = heartbeat_of(store).lag
    return found
