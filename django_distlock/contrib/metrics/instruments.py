"""The table of instruments: every metric that exporters publish."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

#: Bounds of histograms, in seconds: for waits, which are mostly short, for work, and for leases.
_WAITS: Final = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WORK: Final = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
_LEFT: Final = (0.05, 0.25, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)

_KEY: Final = ("backend", "prefix")


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """Something that is measured.

    Attributes:
        kind: The kind of metric.
        name: The name in OpenTelemetry: words with dots.
        help: The description for people.
        labels: The names of the labels that distinguish its values.
        unit: "s" for seconds; "" for numbers.
        buckets: The upper bounds of a histogram's buckets.
    """

    kind: Literal["counter", "histogram", "gauge"]
    name: str
    help: str
    labels: tuple[str, ...] = ("backend",)
    unit: Literal["", "s"] = ""
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus; that of a counter is without its `_total`."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")


def _counter(name: str, text: str, *labels: str) -> Instrument:
    return Instrument("counter", name, text, (*_KEY, *labels))


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Instrument:
    return Instrument("histogram", name, text, _KEY, "s", buckets)


_gauge = partial(Instrument, "gauge")


ACQUIRE = _counter("distlock.acquire", "Acquires that have ended, by outcome.", "outcome")
WAIT = _histogram("distlock.wait", "Seconds until an acquire ended, granted or not.", _WAITS)
BLOCKED = _histogram(
    "distlock.blocked_by",
    "Seconds for which a key had been held when an acquire was refused.",
    _WORK,
)
HOLD = _histogram("distlock.hold", "Seconds from a grant to its release.", _WORK)
LOST = _counter("distlock.lost", "Leases that ended before their block, by cause.", "cause")
REJECTED = _counter(
    "distlock.fence_rejected", "Reads and writes that were refused because their fence was stale."
)
TAKEN_OVER = _counter("distlock.taken_over", "Keys taken over from a holder that no longer exists.")
FORCED = _counter("distlock.forced", "Locks that an operator force-released.")
BYPASSED = _counter("distlock.bypassed", "Blocks that ran without their lock, by reason.", "reason")
SKIPPED = _counter(
    "distlock.skipped",
    "Ticks, jobs and tasks that did not run or were not queued, by reason.",
    "reason",
)
REQUEUED = _counter(
    "distlock.requeued",
    "Times that jobs and tasks were queued again because of their lock, by reason.",
    "reason",
)
SLACK = _histogram(
    "distlock.renewal_slack", "Seconds that were left of a lease when it was renewed.", _LEFT
)
LAG = _gauge(
    "distlock.heartbeat_lag",
    "Seconds by which the heartbeat of this process is late, or was within a minute.",
    unit="s",
)
ACTIVE = _gauge("distlock.active", "Leases that this process holds and works under.")
OVERDUE = _gauge(
    "distlock.active_past_expiry",
    "Blocks of this process that still run although their lease has expired.",
)
WAITING = _gauge("distlock.waiting", "Callers of this process that wait for a key.")
STORE_UP = _gauge("distlock.store_up", "Whether the store is available (1) or not (0).")
LOCKS_HELD = _gauge("distlock.locks_held", "Leases that are held in the store, by any process.")
HELD_PAST_EXPIRY = _gauge(
    "distlock.held_past_expiry",
    "Records of leases that expired without a release and were not removed or granted again.",
)
OLDEST = _gauge(
    "distlock.oldest_holding", "Seconds since the oldest grant that is still held.", _KEY, "s"
)
OVERDUE_TICK = _gauge(
    "distlock.schedule_overdue",
    "Seconds for which a tick of a schedule has been overdue on all nodes.",
    _KEY,
    "s",
)

#: All of the above, in this order.
INSTRUMENTS: Final = tuple(each for each in [*globals().values()] if isinstance(each, Instrument))
PROCESS_GAUGES: Final = (ACTIVE, OVERDUE, WAITING, LAG)
STORE_GAUGES: Final = (STORE_UP, LOCKS_HELD, HELD_PAST_EXPIRY, OLDEST, OVERDUE_TICK)
