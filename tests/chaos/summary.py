"""What a run comes to: its figures, and whether it proves anything."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import Any

from .history import EXCUSED, Findings

FAULTS = {
    "sessions": "end a session on the server",
    "signals": "raise in workers from a signal's handler, every 50 ms",
    "pauses": "stop a worker, and let it go on, also past the ttl",
    "kills": "kill a worker and start another one",
    "wires": "cut, hold back or delay what goes between a worker and the store, or lose one side",
    "expire_soon": "let an operator shorten a lease",
    "operators": "let an operator force-release, pause, resume, or ask a holder to stop",
    "clocks": "shift the wall clock of a worker, where there is libfaketime",
    "crashes": "kill -9 the server, and start it again with its data",
    "disks": "fill the server's disk, then make room and start it again, where one may mount",
    "poolers": "kill and start the PgBouncer that some workers are behind, where there is one",
    "timeouts": "set low time-outs of statements and transactions on the server for a while",
    "losses": "flush Redis, or start it without its data (only if named)",
    "restores": "restore an older backup of PostgreSQL, and raise the fences (only if named)",
    "promotions": "kill the server, and promote a replica that lagged (only if named)",
}
#: Those by which the store loses what it had: two may hold a key then, so only who names them has
#: them.
LOSING = {"losses", "restores", "promotions"}
#: By the name of a fault: what of a history's counts shows that it happened.
_SHOWN_BY = {
    "sessions": ("fault ended session",),
    "signals": ("interrupted",),
    "pauses": ("fault pause",),
    "kills": ("fault kill",),
    "wires": ("fault wire: ",),
    "expire_soon": ("operator expire_soon",),
    "operators": (
        "operator force_release", "operator pause", "operator resume", "operator request_stop",
    ),
    "clocks": ("fault shifted clock",),
    "crashes": ("fault crash",),
    "disks": ("fault disk full",),
    "poolers": ("fault pooler restarted",),
    "timeouts": ("fault timeouts: ",),
    "losses": ("fault loss: ",),
    "restores": ("fault restore",),
    "promotions": ("fault promotion",),
}  # fmt: skip
#: By the name of a figure: what is counted in a history.
OPERATIONS = {
    "acquisitions": "grant",
    "renewals": "renewed",
    "losses": "lost",
    "expiries": "expired",
    "fenced writes": "wrote",
    "refused stale writes": "refused",
}


def happened(counted: Counter[str], faults: Iterable[str]) -> dict[str, int]:
    """Return how often each fault happened."""
    return {
        name: sum(n for what, n in counted.items() if what.startswith(_SHOWN_BY[name]))
        for name in FAULTS
        if name in faults
    }


def hollow(
    counted: Counter[str], faults: Collection[str], *, rows: bool, least: int = 1
) -> list[str]:
    """Return what a run lacks that shall prove something.

    Args:
        counted: What its history has.
        faults: What was chosen.
        rows: Whether its workers wrote fenced rows.
        least: How often each must have happened.
    """
    lacks = [name for name, times in happened(counted, faults).items() if times < least]
    needed = ["acquisitions", "renewals"]
    if {"pauses", "kills"} & set(faults):
        needed += ["losses", "expiries"] + ["refused stale writes"] * rows
    lacks += [name for name in needed if counted[OPERATIONS[name]] < least]
    return lacks


def summary(found: Findings, faults: Collection[str], lacks: list[str]) -> dict[str, Any]:
    """Return the figures of a store's run."""
    acquired, violations = found.counted["grant"], sum(map(len, found.broken.values()))
    told: dict[str, Any] = {
        **{name: found.counted[counted] for name, counted in OPERATIONS.items()},
        "faults": happened(found.counted, faults),
        "violations": {what: len(shown) for what, shown in found.broken.items()},
        # With a confidence of 95 %, of what has not been seen in so many.
        "bound": 3 / acquired if acquired and not violations else None,
        "lacks": lacks,
    }
    if lost := sum(told["faults"].get(name, 0) for name in LOSING):
        excused = found.counted[EXCUSED]
        told |= {"excused": excused, "excused per loss": excused / lost}
    return told


def text(told: dict[str, Any]) -> str:
    """Write the figures of a store's run for people."""
    lines = [f"  {name:44} {told[name]:8}" for name in OPERATIONS]
    lines += [f"  fault: {name:37} {times:8}" for name, times in told["faults"].items()]
    if told["bound"] is not None:
        lines.append(f"  fewer violations than 3/n of acquisitions: {told['bound']:.1e}")
    if "excused" in told:
        lines.append(f"  excused overlaps for each loss: {told['excused per loss']:.2f}")
    lines += [f"  INVALID, it proves nothing: too few {name}" for name in told["lacks"]]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Return what took part, but for the servers."""
    packages = ("django-distlock", "Django", "psycopg")
    told = {each: version(each) for each in packages}
    return {"Python": platform.python_version(), **told, "redis-py": version("redis")}
