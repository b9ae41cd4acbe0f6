"""The table of instruments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: Bounds of histograms, in seconds: for what is mostly over at once, for work, for leases.
_WAITS: Final = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WORK: Final = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
_LEFT: Final = (0.05, 0.25, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)

_KEY: Final = ("backend", "prefix")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instrument:
    """Something that is measured.

    Attributes:
        name: As OpenTelemetry writes it: words with dots.
        kind: What can be done with its values.
        help: What it says, for people.
        labels: What its values are told apart by.
        unit: "s" for seconds; "" for numbers.
        buckets: The upper bounds of a histogram's buckets.
        whole_store: Whether every process that asks gets the same value.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    labels: tuple[str, ...] = ("backend",)
    unit: Literal["", "s"] = ""
    buckets: tuple[float, ...] = ()
    whole_store: bool = False

    @property
    def prometheus_name(self) -> str:
        """What Prometheus calls it; of a counter, without its `_total`."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")


ACQUIRE = Instrument(
    name="distlock.acquire",
    kind="counter",
    help="Acquires that have ended, by how.",
    labels=(*_KEY, "outcome"),
)
WAIT = Instrument(
    name="distlock.wait",
    kind="histogram",
    help="Seconds until an acquire ended, granted or not.",
    labels=_KEY,
    unit="s",
    buckets=_WAITS,
)
BLOCKED = Instrument(
    name="distlock.blocked_by",
    kind="histogram",
    help="Seconds for which a key had been held when an acquire was refused.",
    labels=_KEY,
    unit="s",
    buckets=_WORK,
)
HOLD = Instrument(
    name="distlock.hold",
    kind="histogram",
    help="Seconds from a grant to its release.",
    labels=_KEY,
    unit="s",
    buckets=_WORK,
)
LOST = Instrument(
    name="distlock.lost",
    kind="counter",
    help="Leases that ended before their block did, by why.",
    labels=(*_KEY, "cause"),
)
REJECTED = Instrument(
    name="distlock.fence_rejected",
    kind="counter",
    help="Reads and writes that were refused because their fence was stale.",
    labels=_KEY,
)
TAKEN_OVER = Instrument(
    name="distlock.taken_over",
    kind="counter",
    help="Keys granted in the place of a holder that no longer exists.",
    labels=_KEY,
)
FORCED = Instrument(
    name="distlock.forced", kind="counter", help="Keys that an operator took.", labels=_KEY
)
BYPASSED = Instrument(
    name="distlock.bypassed",
    kind="counter",
    help="Blocks that ran without their lock, by why.",
    labels=(*_KEY, "reason"),
)
SKIPPED = Instrument(
    name="distlock.skipped",
    kind="counter",
    help="Ticks, jobs and tasks that did not run or were not queued, by reason.",
    labels=(*_KEY, "reason"),
)
REQUEUED = Instrument(
    name="distlock.requeued",
    kind="counter",
    help="Times that jobs and tasks were queued again because of their lock, by reason.",
    labels=(*_KEY, "reason"),
)
SLACK = Instrument(
    name="distlock.renewal_slack",
    kind="histogram",
    help="Seconds that were left of a lease when it was renewed.",
    labels=_KEY,
    unit="s",
    buckets=_LEFT,
)
LAG = Instrument(
    name="distlock.heartbeat_lag",
    kind="gauge",
    help="Seconds by which the heartbeat of this process is late, or was within a minute.",
    unit="s",
)
ACTIVE = Instrument(
    name="distlock.active", kind="gauge", help="Leases that this process holds and works under."
)
OVERDUE = Instrument(
    name="distlock.active_past_expiry",
    kind="gauge",
    help="Blocks of this process that still run although their lease has expired.",
)
WAITING = Instrument(
    name="distlock.waiting", kind="gauge", help="Callers of this process that wait for a key."
)
STORE_UP = Instrument(
    name="distlock.store_up",
    kind="gauge",
    help="Whether the store answers (1) or not (0).",
    whole_store=True,
)
LOCKS_HELD = Instrument(
    name="distlock.locks_held",
    kind="gauge",
    help="Leases that are held in the store, by whomever.",
    whole_store=True,
)
HELD_PAST_EXPIRY = Instrument(
    name="distlock.held_past_expiry",
    kind="gauge",
    help="Records of leases that expired without a release and were not removed or granted again.",
    whole_store=True,
)
OLDEST = Instrument(
    name="distlock.oldest_holding",
    kind="gauge",
    help="Seconds since the oldest grant that is still held.",
    labels=_KEY,
    unit="s",
    whole_store=True,
)
OVERDUE_TICK = Instrument(
    name="distlock.schedule_overdue",
    kind="gauge",
    help="Seconds by which no tick of a schedule has run that should have, on any node.",
    labels=_KEY,
    unit="s",
    whole_store=True,
)

INSTRUMENTS: Final = (
    ACQUIRE, WAIT, BLOCKED, HOLD, LOST, REJECTED, TAKEN_OVER, FORCED, BYPASSED, SKIPPED, REQUEUED,
    SLACK, LAG, ACTIVE, OVERDUE, WAITING, STORE_UP, LOCKS_HELD, HELD_PAST_EXPIRY,
    OLDEST, OVERDUE_TICK,
)  # fmt: skip
PROCESS_GAUGES: Final = (ACTIVE, OVERDUE, WAITING, LAG)
STORE_GAUGES: Final = (STORE_UP, LOCKS_HELD, HELD_PAST_EXPIRY, OLDEST, OVERDUE_TICK)
