"""What a run was asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of the benchmarks; the command line sets them.

    Attributes:
        rounds: How often each subject has its turn.
        slice_ms: Milliseconds of such a turn.
        seconds: How long the clients of the throughput run at a time.
        clients: How many processes ask at once.
        keys: Numbers of counters and live locks.
        rows: Rows that sizes are averaged over.
        handoffs: How often a key is handed over in such a turn.
        held_seconds: How long somebody waits in vain whose statements are counted.
        pairs: Of acquire and release, for which nobody waits.
        contestants: How many processes compete for one key.
        contest_seconds: How long they do, at a time.
        leases: How many leases a heartbeat renews.
        load_seconds: How long an open load lasts, for each store and delay.
    """

    rounds: int = 30
    slice_ms: float = 40.0
    seconds: float = 2.0
    clients: tuple[int, ...] = (1, 8, 32)
    keys: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    rows: int = 100_000
    handoffs: int = 5
    held_seconds: float = 10.0
    pairs: int = 1000
    contestants: int = 12
    contest_seconds: float = 4.0
    leases: tuple[int, ...] = (1, 100, 1_000, 10_000)
    load_seconds: float = 20.0


QUICK = Options(
    rounds=2, slice_ms=1, seconds=0.05, clients=(2,), keys=(50, 200), rows=500, handoffs=2,
    held_seconds=3.0, pairs=20, contestants=3, contest_seconds=0.3, leases=(1, 20),
    load_seconds=0.3,
)  # fmt: skip
