"""What processes do that campaign."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress

from django_distlock import LockLost, leader
from django_distlock.core.clock import monotonic
from django_distlock.leading import Term


def work(term: Term) -> None:
    """Lead, and say until when that was sure, by the clock of the machine."""
    began, sure = monotonic(), None
    # Read behind the answer, and before the deadline: what was done until then was done leading.
    while term and (now := monotonic()) < term.lease.deadline:
        if sure is None:
            print(f"leads {term.fence}")
        sure = now
        term.wait(0.05)
    # Nothing was, where the process stood still from its first line on.
    if sure is not None:
        print(f"term {term.fence} {began} {sure}")


def sleep(term: Term) -> None:
    """Lead, and look at nothing."""
    print(f"leads {term.fence}")
    time.sleep(60)


def run(alias: str, name: str, ttl: float, way: str = "run") -> None:
    """Campaign in one of many ways."""
    candidate = leader(name, ttl=ttl, backend=alias)
    if way == "handled":
        signal.signal(signal.SIGTERM, lambda *_: print("handled"))
    if way == "exits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("stands by")
    if way == "with":
        with suppress(LockLost), candidate as term:
            work(term)
    else:
        candidate.run(sleep if way in ("exits", "deaf") else work)
    print("ended")
